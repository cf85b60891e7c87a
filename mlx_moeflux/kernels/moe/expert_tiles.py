"""Routed experts for many tokens: pairs grouped by slot, multiplied in tiles, added in order.

Launches: lists of pairs by slot; the table of tiles; gate, up and SwiGLU; down; the weighted sum.
See :mod:`mlx_moeflux.kernels.moe.expert_mix` for what is computed. Weights become T, the dtype of
x, in front of the products, which are summed in float32; inner values and each expert's output
are rounded to T.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.quantised import ExpertLayout, Matrix
from mlx_moeflux.kernels.moe.expert_ffn import (
    INNER_BIASES,
    INNER_INPUTS,
    activation_template,
)
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, most_bytes


@dataclass(frozen=True)
class Tile:
    """One threadgroup's part of a product: BM pairs x BN columns, BK bytes of each row at a time,
    by WM x WN simdgroups."""

    BM: int
    BN: int
    bytes: int
    WM: int
    WN: int

    @property
    def threads(self) -> int:
        return 32 * self.WM * self.WN

    def memory(self, matrices: int) -> int:
        """Bytes of threadgroup memory."""
        return (self.BM + matrices * self.BN) * (self.bytes + 16) + 4 * self.BM

    def fits(self, matrices: int, matrix: Matrix, dtype: mx.Dtype) -> bool:
        """Return True if it fits in memory, its sums leave registers for blocks, which take many,
        and a thread's affine weights belong to one group."""
        if matrix.block:
            even = matrices * self.BM * self.BN <= MOST_SUMS * self.threads
        else:
            even = matrix.bits == 0 or self.share(dtype) <= matrix.group
        return even and self.memory(matrices) <= most_bytes()

    def share(self, dtype: mx.Dtype) -> int:
        """Weights of a row that a thread takes at a time."""
        return self.BN * self.bytes // dtype.size // self.threads


# Sums of a thread that holds blocks: with twice as many CUDA spills registers.
MOST_SUMS = 64
SMALL, MIDDLE, LARGE = Tile(16, 64, 128, 1, 4), Tile(32, 64, 128, 1, 4), Tile(64, 64, 128, 2, 2)
# By the mean number of pairs an expert up to which they suit: tiles of gate and up, and of down, of
# the same number of pairs; of each the first that fits. All give the same bits.
TILES = {
    12: ((SMALL,), (SMALL,)),
    24: ((MIDDLE,), (MIDDLE,)),
    128: ((LARGE,), (Tile(64, 128, 128, 1, 4), LARGE)),
    float("inf"): (
        (Tile(128, 64, 128, 2, 2), Tile(128, 64, 128, 4, 2)),
        (Tile(128, 128, 128, 2, 2), Tile(128, 64, 128, 4, 2)),
    ),
}
LIST_SIMDGROUPS, TABLE_SIMDGROUPS = 8, 8

_LISTS = MetalKernel(
    "expert_lists",
    file="expert_tiles.metal",
    inputs=("slots", "sizes"),
    outputs=("order", "offsets"),
    body="""
        threadgroup uint counts[2 * SIMDGROUPS];
        list_pairs<SIMDGROUPS>(
            slots, order, offsets, sizes[0], threadgroup_position_in_grid.x, counts,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)

_TABLE = MetalKernel(
    "expert_table",
    file="expert_tiles.metal",
    inputs=("offsets", "sizes"),
    outputs=("tiles",),
    body="""
        threadgroup uint counts[SIMDGROUPS];
        list_tiles<BM, SIMDGROUPS>(
            offsets, tiles, sizes[1], sizes[2], counts, thread_index_in_threadgroup,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)

_TILE = """
    threadgroup pack<T, 16 / sizeof(T)> a[BM * (BK * sizeof(T) / 16 + 1)];
    threadgroup pack<T, 16 / sizeof(T)> b[{matrices} * BN * (BK * sizeof(T) / 16 + 1)];
    threadgroup uint pairs[BM];
    {shares}
    expert_tile<BM, BN, BK, WM, WN, K, {gated}, IN, OUT, {biased}, {activation}>(
        x, order, offsets, tiles, {weights}, {biases}, out, (threadgroup T*)a, (threadgroup T*)b,
        pairs, threadgroup_position_in_grid, thread_index_in_threadgroup,
        simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
_AFFINE = "auto {0} = share_of<IN, BITS, GROUP, WORDS, EACH>({1}, {2}, {3});"
_BLOCKS = "block_share<IN, SHARE, {1}> {0}; {0}.w = {2};"


def _kernel(
    name: str, inputs: tuple[str, ...], shares: list[str], biases: tuple[str, ...] = ()
) -> MetalKernel:
    """The kernel of gate and up, whose activation is a part of its template, or of down. shares:
    Declare w0, and w1 of up."""
    gated = len(shares) == 2
    return MetalKernel(
        name,
        file="expert_tiles.metal",
        inputs=("x", "order", "offsets", "tiles", *inputs, *biases),
        outputs=("out",),
        body=_TILE.format(
            matrices=len(shares),
            shares="\n    ".join(shares),
            gated="true" if gated else "false",
            activation="ALPHA, LIMIT" if gated else "0, 0",
            weights="w0, w1" if gated else "w0, w0",
            # Gate's and up's, or twice that of down.
            biases=", ".join(2 * biases[:1] if not gated else biases) if biases else "x, x",
            biased="true" if biases else "false",
        ),
    )


_DOWN_INPUTS = ("down", "scales", "biases")
# By whether each product has a bias.
_GATED = {
    biased: _kernel(
        "expert_tiles_gated" + "_biased" * biased,
        INNER_INPUTS,
        [_AFFINE.format("w0", *INNER_INPUTS[:3]), _AFFINE.format("w1", *INNER_INPUTS[3:])],
        INNER_BIASES * biased,
    )
    for biased in (False, True)
}
_DOWN = {
    biased: _kernel(
        "expert_tiles_down" + "_biased" * biased,
        _DOWN_INPUTS,
        [_AFFINE.format("w0", *_DOWN_INPUTS)],
        ("bias",) * biased,
    )
    for biased in (False, True)
}
_GATED_BLOCKS = _kernel(
    "block_tiles_gated",
    ("gate", "up"),
    [_BLOCKS.format("w0", "G", "gate"), _BLOCKS.format("w1", "U", "up")],
)
_DOWN_BLOCKS = _kernel("block_tiles_down", ("down",), [_BLOCKS.format("w0", "E", "down")])

COMBINE = MetalKernel(
    "expert_combine",
    file="expert_tiles.metal",
    inputs=("out", "slots", "weights", "initial", "sizes"),
    outputs=("y",),
    body="""
        combine_pairs<K, C, CONTINUES>(
            out, slots, weights, initial, y, sizes[1], threadgroup_position_in_grid.x,
            4 * (threadgroup_position_in_grid.y * THREADS + thread_index_in_threadgroup));
    """,
)

KERNELS = (
    *(_LISTS, _TABLE, COMBINE),
    *(*_GATED.values(), *_DOWN.values(), _GATED_BLOCKS, _DOWN_BLOCKS),
)


@functools.lru_cache(maxsize=64)
def _sizes(pairs: int, slots: int, tiles: int) -> mx.array:
    sizes = mx.array([pairs, slots, tiles, 0, 0, 0, 0, 0], mx.int32)
    mx.eval(sizes)
    return sizes


def tiles_for(pairs: int, experts: int, layout: ExpertLayout, dtype: mx.Dtype) -> tuple[Tile, Tile]:
    """The tiles that suit so many pairs of so many experts: of gate and up, and of down."""
    mean = pairs / min(pairs, experts)
    last = next(i for i, size in enumerate(TILES) if mean <= size)
    for gated, down in reversed(list(TILES.values())[: last + 1]):
        fitting = (
            [tile for tile in gated if tile.fits(2, layout.inner, dtype)],
            [tile for tile in down if tile.fits(1, layout.down, dtype)],
        )
        if all(fitting):
            break
    return fitting[0][0], fitting[1][0]


def list_pairs(slots: mx.array, num_slots: int) -> tuple[mx.array, mx.array]:
    """slots ``[N, K]`` uint32 -> order ``[N * K]``, offsets ``[num_slots + 1]`` uint32.

    ``order[offsets[s] : offsets[s + 1]]`` are the pairs n * K + k with ``slots[n, k] == s``,
    ascending. Past ``offsets[num_slots]`` order holds anything.
    """
    P, lists = slots.size, num_slots + 1
    template, shapes = {"SIMDGROUPS": LIST_SIMDGROUPS}, [(P,), (lists,)]
    dtypes = mx.uint32, mx.uint32
    launch = launch_of(template, (lists, 1), 32 * LIST_SIMDGROUPS, shapes, *dtypes)
    order, offsets = _LISTS(slots, _sizes(P, num_slots, 0), **launch)
    return order, offsets


def list_tiles(offsets: mx.array, pairs: int, rows: int) -> mx.array:
    """offsets of :func:`list_pairs` -> ``[tiles, 2]`` uint32: slot and first position of every
    `rows` positions of each list; slot 0xffffffff in entries past the last."""
    slots = offsets.size - 1
    tiles = pairs // rows + min(pairs, slots)
    template = {"BM": rows, "SIMDGROUPS": TABLE_SIMDGROUPS}
    launch = launch_of(template, (1, 1), 32 * TABLE_SIMDGROUPS, [(tiles, 2)], mx.uint32)
    return _TABLE(offsets, _sizes(pairs, slots, tiles), **launch)[0]


@functools.lru_cache(maxsize=256)
def _tile_launch(
    tile: Tile,
    tiles: int,
    pairs: int,
    K: int,
    IN: int,
    OUT: int,
    matrix: Matrix,
    dtype: mx.Dtype,
    **activation: int,
) -> dict[str, Any]:
    BK, share = tile.bytes // dtype.size, tile.share(dtype)
    template = {"T": dtype, "BM": tile.BM, "BN": tile.BN, "BK": BK, "WM": tile.WM, "WN": tile.WN}
    template |= {"K": K, "IN": IN, "OUT": OUT, **activation}
    if matrix.block:
        template["SHARE"] = share
    else:
        words = share * (matrix.bits or 32) // 32
        template |= {"BITS": matrix.bits, "GROUP": matrix.group}
        template |= {"WORDS": words, "EACH": min(words, 4)}
    return launch_of(template, (-(-OUT // tile.BN), tiles), tile.threads, [(pairs, OUT)], dtype)


def grouped(x, slots, weights, bank, initial, *, tiles=None) -> mx.array:
    """Compute :func:`~mlx_moeflux.kernels.moe.expert_mix.expert_mix` of checked arguments."""
    N, K = slots.shape
    layout, P = bank.layout, N * K
    C, F = layout.C, layout.F
    gate, up, down = bank.arrays
    # By the experts, not the slots, however many of them there are: a call's pairs are all here, if
    # most of them as absent ones, and every bank takes the tiles of a whole one, compiled once.
    experts = bank.experts or bank.slots
    gated, narrow = tiles_for(P, experts, layout, x.dtype) if tiles is None else tiles
    order, offsets = list_pairs(slots, bank.slots)
    table = list_tiles(offsets, P, gated.BM)
    lists, entries = (order, offsets, table), table.shape[0]
    of_inner, of_down = bank.bias_arrays
    first, second = _GATED[layout.biased], _DOWN[layout.biased]
    activation = activation_template(layout.activation)
    if layout.in_blocks:
        first = _GATED_BLOCKS.using(G=layout.inner.block, U=layout.up.block)
        second = _DOWN_BLOCKS.using(E=layout.down.block)
    launch = _tile_launch(gated, entries, P, K, C, F, layout.inner, x.dtype, **activation)
    h = first(x, *lists, *gate, *up, *of_inner, **launch)[0]
    launch = _tile_launch(narrow, entries, P, K, F, C, layout.down, x.dtype)
    out = second(h, *lists, *down, *of_down, **launch)[0]
    return combine(out, slots, weights, bank.slots, initial)


def combine(
    out: mx.array, slots: mx.array, weights: mx.array, num_slots: int, initial: mx.array | None
) -> mx.array:
    """out ``[N * K, C]`` -> ``[N, C]`` float32, the weighted sum over present pairs."""
    (N, K), C = slots.shape, out.shape[1]
    threads = min(256, -(-C // 128) * 32)
    template = {"K": K, "C": C, "CONTINUES": initial is not None, "THREADS": threads}
    launch = launch_of(template, (N, -(-C // (4 * threads))), threads, [(N, C)], mx.float32)
    start = weights if initial is None else initial
    return COMBINE(out, slots, weights, start, _sizes(N * K, num_slots, 0), **launch)[0]
