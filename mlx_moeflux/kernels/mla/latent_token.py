"""Latent attention of one token a sequence, or of a few to chosen positions each, over parts of the
positions.

    score = (q_latent c_s + q_rotary r_s) scale log2(e),  top >= the highest score of a part - 8
    partial = sum 2^(score - top) c_s,  total = sum 2^(score - top)

Shapes: q_latent, q_rotary, latents (c), rotary_keys (r) and tail as in
:mod:`mlx_moeflux.kernels.mla.latent_attention`; ranges: see
:func:`mlx_moeflux.kernels.runtime.launch_args.ranges`.
    returns: partial ``[B, parts, H, R]`` and stats ``[B, parts, H, 2]`` (tops and totals), float32,
    as ``attend_combine`` and ``attend_values`` take them. Chosen positions: see
    :mod:`mlx_moeflux.kernels.mla.chosen_latents`; B counts all tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.kernels.attention.plan import MEMORY_ON_DEMAND, memory_of
from mlx_moeflux.kernels.runtime.launcher import MetalKernel


@dataclass(frozen=True)
class Layout:
    """The layout of a threadgroup: tiles of 16 heads, simdgroups, simdgroups that share the sum of
    a score, positions of a tile; and threadgroups that a launch should have."""

    MT: int
    W: int
    WC: int
    BN: int
    groups: int


# For no more memory than a kernel declares. With more, a threadgroup reads each latent once for 32
# heads where there are many positions, and with few there are fewer parts to join
# (docs/notes/attention.md, docs/notes/kernels.md).
SMALL = Layout(1, 4, 4, 16, 264)
FEW = Layout(1, 8, 2, 64, 132)
MANY = Layout(2, 8, 4, 32, 132)
# From this capacity on there are many; positions that a threadgroup should see at least.
MANY_POSITIONS, LEAST_KEYS = 4096, 64
# By GPU, more threadgroup memory on demand for these kernels, which alone were measured with it.
MORE_ON_DEMAND = {"sm_90": 227 * 1024}


def _memory(template: Mapping[str, Any]) -> int:
    """Bytes of the arrays that the kernel's body declares."""
    M, BN = 16 * template["MT"], template["BN"]
    tiles = template["BUFFERS"] * BN * (template["R"] + template["DR"] + 8)
    halves = tiles + M * (BN + 8)
    return halves * template["T"].size + 4 * M * (template["WC"] * (BN + 1) + 1)


def _kernel(name: str, *, chosen: bool) -> MetalKernel:
    tensors = "q", "q2", "k", "k2", "tail_k", "tail_v"
    return MetalKernel(
        name,
        file="attention_latent.metal",
        inputs=(*tensors, *["chosen"] * chosen, "ranges", "scale"),
        outputs=("partial", "stats"),
        body=f"""
            threadgroup T tiles[BUFFERS * BN * (R + DR + 8)];
            threadgroup T weights[16 * MT * (BN + 8)];
            threadgroup float scores[16 * MT * WC * (BN + 1)];
            threadgroup float factors[16 * MT];
            attend_latents<T, R, DR, HEADS, MT, W, WC, BN, BUFFERS, TAIL,
                           {"CHOSEN, TOKENS" if chosen else "0, 1"}>(
                q, q2, k, k2, tail_k, tail_v, {"chosen" if chosen else "ranges"}, ranges, scale,
                partial, stats, tiles, weights, scores, factors, k_shape[2],
                threadgroup_position_in_grid, threadgroups_per_grid, thread_index_in_threadgroup);
        """,
        memory=_memory,
    )


KERNEL = _kernel("attend_latents", chosen=False)
CHOSEN = _kernel("attend_chosen_latents", chosen=True)


def memory_and_more(backend_name: str) -> tuple[int, int]:
    """Bytes of threadgroup memory that ``attend_latents`` may declare, and ask for on demand."""
    on_demand = MEMORY_ON_DEMAND.get(backend_name, 0)
    if on_demand and mx.cuda.is_available():
        architecture = str(mx.device_info(mx.gpu).get("architecture", ""))
        on_demand = max(on_demand, MORE_ON_DEMAND.get(architecture, 0))
    return memory_of(backend_name), on_demand


@functools.lru_cache(maxsize=1024)
def launch_of(
    limit: int,
    on_demand: int,
    q: tuple[int, ...],
    latents: tuple[int, ...],
    rotary: int,
    tail: int,
    dtype: mx.Dtype,
    chosen: int = 0,
) -> dict[str, Any] | None:
    """Return the launch of a call with `limit` bytes of threadgroup memory, or with `on_demand`;
    None if there is no kernel for it. chosen: Positions that a token sees at most; 0: all."""
    (B, H, T, R), capacity = q, chosen or latents[2]
    if (not chosen and (T != 1 or not tail)) or not rotary or rotary % 16:
        return None
    sizes = {"T": dtype, "R": R, "DR": rotary, "HEADS": H, "TAIL": tail}
    if chosen:
        sizes |= {"CHOSEN": chosen, "TOKENS": T}
    large = MANY if capacity >= MANY_POSITIONS else FEW
    for layout, buffers, memory in ((large, 2, on_demand), (SMALL, 2, limit), (SMALL, 1, limit)):
        rows, threads = 16 * layout.MT, 32 * layout.W
        template = sizes | {"MT": layout.MT, "W": layout.W, "WC": layout.WC, "BN": layout.BN}
        template |= {"BUFFERS": buffers}
        if (
            (not chosen and tail % layout.BN)
            or H % rows
            or R % (8 * layout.W)
            or _memory(template) > memory
        ):
            continue
        # Among chosen positions sums do not depend on the tokens beside one.
        tokens = 1 if chosen else B
        parts = max(1, min(layout.groups * rows // (tokens * H), -(-capacity // LEAST_KEYS)))
        return {
            "template": template,
            "grid": (threads * parts, B * T, H // rows),
            "threadgroup": (threads, 1, 1),
            "output_shapes": [(B * T, parts, H, R), (B * T, parts, H, 2)],
            "output_dtypes": [mx.float32, mx.float32],
        }
    return None
