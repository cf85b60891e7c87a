"""Routed experts for some dozens of tokens: pairs grouped by slot, each weight read once for 8.

Launches: lists of pairs by slot; the table of eights; gate, up and SwiGLU; down; the weighted sum.
See :mod:`mlx_moeflux.kernels.moe.expert_mix` for what is computed. As in
:mod:`mlx_moeflux.kernels.moe.expert_tiles` weights become T, the dtype of x, in front of the
products, and inner values and each expert's output are rounded to T; tiles are those of
:mod:`mlx_moeflux.kernels.linear.small_batch`, for the one or two tokens that an expert has then.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.quantised import ExpertLayout
from mlx_moeflux.kernels.linear.small_batch import Tiling, partial_floats, simdgroups, tiling
from mlx_moeflux.kernels.moe import expert_pairs, expert_tiles
from mlx_moeflux.kernels.moe.expert_ffn import INNER_INPUTS
from mlx_moeflux.kernels.moe.expert_pairs import checked, expert_mix_pairs, refuse_exchange
from mlx_moeflux.kernels.moe.expert_tiles import combine, grouped, list_pairs, list_tiles
from mlx_moeflux.kernels.runtime.launcher import MetalKernel

EIGHT = 8
# Tiles of 16 rows that a threadgroup takes of down, whose rows are short.
OUTER_TILES = 4

_INNER = MetalKernel(
    "expert_rows_inner",
    file="expert_rows.metal",
    inputs=("x", "order", "offsets", "tiles", *INNER_INPUTS),
    outputs=("h",),
    body="""
        threadgroup float partial[2 * PARTIAL];
        threadgroup uint listed[8];
        expert_rows_inner<W, K, IN, OUT, BITS, GROUP, V>(
            x, order, offsets, tiles, gate, gate_scales, gate_biases, up, up_scales, up_biases, h,
            partial, listed, threadgroup_position_in_grid.x * 16, threadgroup_position_in_grid.y,
            thread_index_in_threadgroup);
    """,
)

_OUTER = MetalKernel(
    "expert_rows_outer",
    file="expert_rows.metal",
    inputs=("h", "order", "offsets", "tiles", "down", "scales", "biases"),
    outputs=("out",),
    body="""
        threadgroup float partial[PARTIAL];
        expert_rows_outer<MT, W, IN, OUT, BITS, GROUP, V>(
            h, order, offsets, tiles, down, scales, biases, out, partial,
            threadgroup_position_in_grid.x * 16 * MT, threadgroup_position_in_grid.y,
            thread_index_in_threadgroup);
    """,
)
KERNELS = (_INNER, _OUTER, *expert_tiles.KERNELS, *expert_pairs.KERNELS)


def expert_mix_rows(x, slots, weights, bank, *, initial=None, exchange=None) -> mx.array:
    """The module's formula, in five launches. float32, and banks whose rows do not go in steps, go
    to :func:`~mlx_moeflux.kernels.moe.expert_pairs.expert_mix_pairs`; banks in MXFP4 or in blocks,
    with biases or a clamp to :func:`~mlx_moeflux.kernels.moe.expert_tiles.grouped`.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: The kernels do not know this bank, there is an exchange, or no GPU.
    """
    refuse_exchange("rows", exchange)
    checked(x, slots, weights, bank, initial)
    if not bank.layout.plain:
        return grouped(x, slots, weights, bank, initial)
    K, P = slots.shape[1], slots.size
    launch = None if x.dtype == mx.float32 else _launch(bank.layout, P, K, bank.slots, x.dtype)
    if launch is None:
        return expert_mix_pairs(x, slots, weights, bank, initial=initial)
    inner, outer = launch
    gate, up, down = bank.arrays
    order, offsets = list_pairs(slots, bank.slots)
    lists = order, offsets, list_tiles(offsets, P, EIGHT)
    h = _INNER(x, *lists, *gate, *up, **inner)[0]
    out = _OUTER(h, *lists, *down, **outer)[0]
    return combine(out, slots, weights, bank.slots, initial)


@functools.lru_cache(maxsize=256)
def _launch(
    layout: ExpertLayout, pairs: int, K: int, slots: int, dtype: mx.Dtype
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The two launches; None if a bank's rows do not go in steps."""
    C, F, tiles = layout.C, layout.F, pairs // EIGHT + min(pairs, slots)
    try:
        inner, outer = tiling(layout.inner, (F,), C), tiling(layout.down, (C,), F)
    except UnsupportedError:
        return None

    def launch(tile: Tiling, MT: int, IN: int, OUT: int) -> dict[str, Any]:
        W = simdgroups(IN)
        template = {"T": dtype, "W": W, "IN": IN, "OUT": OUT, "K": K} | tile.arguments()
        template |= {"MT": MT, "PARTIAL": partial_floats(MT, 1, W)}
        return launch_of(template, (-(-OUT // (16 * MT)), tiles), 32 * W, [(pairs, OUT)], dtype)

    return launch(inner, 1, C, F), launch(outer, OUTER_TILES, F, C)
