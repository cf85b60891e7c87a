"""Routed experts in ggml's blocks for a few tokens: the two launches of
:mod:`~mlx_moeflux.kernels.moe.expert_pairs` for them.

See :mod:`mlx_moeflux.checkpoint.blocks` for the blocks. Lanes take eight neighbours at a time, and
multiply their numbers, which are exact, before their scale. Sums are in float32, in an order that
nothing but the width and the modes decide.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from mlx_moeflux.kernels.linear.launch import Launch, launch_of
from mlx_moeflux.kernels.linear.quantised import ExpertLayout
from mlx_moeflux.kernels.moe.expert_ffn import activation_template
from mlx_moeflux.kernels.runtime.launcher import MetalKernel

# Rows of a matrix for each simdgroup, and simdgroups for each threadgroup. Widths are multiples of
# 32, the smallest block.
INNER_ROWS, INNER_SIMDGROUPS, OUTER_ROWS = 2, 4, 4

_INNER = MetalKernel(
    "block_inner",
    file="expert_blocks.metal",
    inputs=("x", "slots", "gate", "up"),
    outputs=("h",),
    body="""
        const uint pair = threadgroup_position_in_grid.y;
        block_inner<ROWS, IN, OUT, G, U, L, EXACT, ALPHA, LIMIT>(
            x + pair / K * IN, gate, up, h + ulong(pair) * OUT, gate_shape[0], slots[pair],
            (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup) * ROWS,
            thread_index_in_simdgroup);
    """,
)

_OUTER = MetalKernel(
    "block_outer",
    file="expert_blocks.metal",
    inputs=("h", "slots", "weights", "down", "initial"),
    outputs=("y",),
    body="""
        threadgroup float products[K * ROWS];
        block_outer<ROWS, K, IN, OUT, EXACT, CONTINUES, E>(
            h, slots, weights, down, initial, y, products, down_shape[0],
            threadgroup_position_in_grid.y, threadgroup_position_in_grid.x * ROWS,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)
KERNELS = (_INNER, _OUTER)


def inner_types(layout: ExpertLayout) -> dict[str, str]:
    """The types of `block_inner`: those of gate and up, and of what a lane takes of both."""
    gate, up = layout.inner.block, layout.up.block
    return {"G": gate, "U": up, "L": f"{gate}::lanes" if gate == up else "lane_eights<8, 1, 1>"}


def outer_types(layout: ExpertLayout) -> dict[str, str]:
    """The type of `block_products`."""
    return {"E": layout.down.block}


@functools.lru_cache(maxsize=256)
def inner_launch(layout: ExpertLayout, N: int, K: int, dtype: mx.Dtype) -> Launch:
    """x ``[N, C]``, slots ``[N, K]``, gate, up -> h ``[N * K, F]`` float32. dtype: Of x."""
    C, F, rows, groups = layout.C, layout.F, INNER_ROWS, INNER_SIMDGROUPS
    template = {"ROWS": rows, "SIMDGROUPS": groups, "K": K, "IN": C, "OUT": F}
    template |= {"EXACT": dtype == mx.float32, **activation_template(layout.activation)}
    grid = F // (rows * groups), N * K
    launch = launch_of(template, grid, 32 * groups, [(N * K, F)], mx.float32)
    return _INNER.using(**inner_types(layout)), launch


@functools.lru_cache(maxsize=256)
def outer_launch(layout: ExpertLayout, N: int, K: int, dtype: mx.Dtype, continues: bool) -> Launch:
    """h of :func:`inner_launch`, slots, weights ``[N, K]``, down, initial -> y ``[N, C]`` float32.
    continues: `initial` is a sum; otherwise any array may stand there."""
    C, F, rows = layout.C, layout.F, OUTER_ROWS
    template = {"ROWS": rows, "K": K, "IN": F, "OUT": C, "CONTINUES": continues}
    template["EXACT"] = dtype == mx.float32
    launch = launch_of(template, (C // rows, N), 32 * K, [(N, C)], mx.float32)
    return _OUTER.using(**outer_types(layout)), launch
