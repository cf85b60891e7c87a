"""Latent attention of one token a sequence, over parts of the positions.

    score = (q_latent c_s + q_rotary r_s) scale log2(e),  top >= the highest score of a part - 8
    partial = sum 2^(score - top) c_s,  total = sum 2^(score - top)

Shapes: q_latent, q_rotary, latents (c), rotary_keys (r) and tail as in
:mod:`mlx_moeflux.kernels.latent`; ranges: see :func:`mlx_moeflux.kernels.numbers.ranges`.
    returns: partial ``[B, parts, H, R]`` and stats ``[B, parts, H, 2]`` (tops and totals), float32,
    as ``attend_combine`` and ``attend_values`` take them.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from mlx_moeflux.kernels.metal import MetalKernel

# Rows of a threadgroup, its simdgroups (H100, 32768 positions: 82 us, with 8 of them 94), and
# positions of a tile; threadgroups that a launch should have, two for each of an H100's 132
# processors, and positions that one should see at least.
ROWS, SIMDGROUPS, KEYS = 16, 4, 16
ENOUGH_GROUPS, LEAST_KEYS = 264, 64

KERNEL = MetalKernel(
    "attend_latents",
    file="attention_latent.metal",
    inputs=("q", "q2", "k", "k2", "tail_k", "tail_v", "ranges", "scale"),
    outputs=("partial", "stats"),
    body="""
        threadgroup T tiles[BUFFERS * BN * (R + DR + 8)];
        threadgroup T weights[16 * (BN + 8)];
        threadgroup float scores[16 * W * (BN + 1)];
        threadgroup float factors[16];
        attend_latents<T, R, DR, HEADS, W, BN, BUFFERS, TAIL>(
            q, q2, k, k2, tail_k, tail_v, ranges, scale, partial, stats, tiles, weights, scores,
            factors, k_shape[2], threadgroup_position_in_grid, threadgroups_per_grid,
            thread_index_in_threadgroup);
    """,
)


@functools.lru_cache(maxsize=1024)
def launch_of(
    limit: int,
    q: tuple[int, ...],
    latents: tuple[int, ...],
    rotary: int,
    tail: int,
    dtype: mx.Dtype,
) -> dict[str, Any] | None:
    """How a call is launched with `limit` bytes of threadgroup memory; None: there is no kernel
    for it."""
    (B, H, T, R), capacity = q, latents[2]
    even = tail and rotary and not (tail % KEYS or H % ROWS or R % (8 * SIMDGROUPS))
    if T != 1 or not even or rotary % 16:
        return None
    shared = ROWS * (KEYS + 8) * dtype.size + 4 * ROWS * (SIMDGROUPS * (KEYS + 1) + 1)
    tile = KEYS * (R + rotary + 8) * dtype.size
    buffers = min(2, (limit - shared) // tile)
    if buffers < 1:
        return None
    parts = max(1, min(ENOUGH_GROUPS * ROWS // (B * H), -(-capacity // LEAST_KEYS)))
    template = {"T": dtype, "R": R, "DR": rotary, "HEADS": H, "W": SIMDGROUPS, "BN": KEYS}
    return {
        "template": template | {"BUFFERS": buffers, "TAIL": tail},
        "grid": (32 * SIMDGROUPS * parts, B, H // ROWS),
        "threadgroup": (32 * SIMDGROUPS, 1, 1),
        "output_shapes": [(B, parts, H, R), (B, parts, H, 2)],
        "output_dtypes": [mx.float32, mx.float32],
    }
