"""Routed experts for a few tokens: each pair of a token and an expert reads that expert's weights.

See :mod:`mlx_moeflux.kernels.moe.expert_mix` for what is computed. Two launches: gate, up and the
activation; down and the weighted sum.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.linear import matvec
from mlx_moeflux.kernels.linear.launch import Launch, launch_of
from mlx_moeflux.kernels.linear.quantised import FLOATS, ExpertLayout
from mlx_moeflux.kernels.moe import expert_blocks
from mlx_moeflux.kernels.moe.expert_ffn import (
    INNER_BIASES,
    INNER_INPUTS,
    ExpertBank,
    activation_template,
)
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, most_threads

MOST_EXPERTS_A_TOKEN = 16


def expert_mix_pairs(x, slots, weights, bank, *, initial=None, exchange=None) -> mx.array:
    """The module's formula for few tokens, in two launches, or three and an exchange: each pair
    reads its expert. The kernels of banks in blocks are those of
    :mod:`~mlx_moeflux.kernels.moe.expert_blocks`.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: The kernels do not know this bank, or there is no GPU.
    """
    inner, outer = _pair_launches(x, slots, weights, bank, initial)
    gate, up, down = bank.arrays
    of_inner, of_down = bank.bias_arrays
    h = inner[0](x, slots, *gate, *up, *of_inner, **inner[1])[0]
    if exchange is not None:
        own, total = _exchanged_launches(bank.layout, *slots.shape, x.dtype)
        outputs = own[0](h, slots, weights, *down, *of_down, **own[1])[0]
        return total[0](exchange(outputs), **total[1])[0]
    start = weights if initial is None else initial
    return outer[0](h, slots, weights, *down, *of_down, start, **outer[1])[0]


def exchanges(bank: ExpertBank) -> bool:
    """Return True if the kernels exchange the outputs of this bank's experts."""
    try:
        return not bank.layout.in_blocks and not is_wide(bank.layout)
    except UnsupportedError:
        return False


def refuse_exchange(name: str, exchange: object) -> None:
    """Raise :class:`UnsupportedError` unless `exchange` is None. name: Of the implementation."""
    if exchange is not None:
        raise UnsupportedError(f"expert_mix={name} exchanges no outputs.")


def readable(x: mx.array, slots: object, weights: mx.array, bank: ExpertBank) -> bool:
    """Return True if kernels can read this bank and take so many experts a token."""
    try:
        _ = bank.layout
    except UnsupportedError:
        return False
    return weights.shape[1] <= MOST_EXPERTS_A_TOKEN


def readable_in_pairs(x: mx.array, slots: object, weights: mx.array, bank: ExpertBank) -> bool:
    """Return the same for implementations that take a simdgroup for each of a token's experts."""
    return 32 * weights.shape[1] <= most_threads() and readable(x, slots, weights, bank)


def pair_bytes(bank: ExpertBank, dtype: mx.Dtype) -> int:
    """Bytes of scratch that kernels need for each pair of a long call."""
    return (bank.layout.C + bank.layout.F) * dtype.size + 16


def checked(x, slots, weights, bank, initial) -> None:
    """See to it that all arguments fit.

    Raises:
        ShapeError: They do not.
        UnsupportedError: The kernels cannot read the bank.
    """
    C, (N, K) = bank.layout.C, slots.shape
    if x.shape != (N, C) or x.dtype not in FLOATS:
        raise ShapeError(
            f"x is {x.dtype} {list(x.shape)}; expected floats [{N}, {C}] for {N} rows of slots "
            f"and experts of width {C}."
        )
    if slots.dtype != mx.uint32 or not 1 <= K <= MOST_EXPERTS_A_TOKEN:
        raise ShapeError(
            f"slots is {slots.dtype} {list(slots.shape)}; expected uint32 with at most "
            f"{MOST_EXPERTS_A_TOKEN} columns."
        )
    if weights is not None and (weights.shape != (N, K) or weights.dtype != mx.float32):
        raise ShapeError(
            f"weights is {weights.dtype} {list(weights.shape)}; expected float32 [{N}, {K}]."
        )
    if initial is not None and (initial.shape != (N, C) or initial.dtype != mx.float32):
        raise ShapeError(
            f"initial is {initial.dtype} {list(initial.shape)}; expected float32 [{N}, {C}]."
        )


_OUTER_INPUTS = ("h", "slots", "weights", "down", "scales", "biases")
# By whether each product has a bias.
_INNER = {
    biased: MetalKernel(
        "expert_inner" + "_biased" * biased,
        file="expert_pairs.metal",
        inputs=("x", "slots", *INNER_INPUTS, *INNER_BIASES * biased),
        outputs=("h",),
        body=f"""
        expert_inner<ROWS, K, IN, OUT, BITS, GROUP, V, EXACT, {"true" if biased else "false"},
                     ALPHA, LIMIT>(
            x, slots, gate, gate_scales, gate_biases, up, up_scales, up_biases,
            {", ".join(INNER_BIASES) if biased else "x, x"}, h, gate_shape[0],
            threadgroup_position_in_grid.y,
            (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup) * ROWS,
            thread_index_in_simdgroup);
        """,
    )
    for biased in (False, True)
}
_OUTER = {
    biased: MetalKernel(
        "expert_outer" + "_biased" * biased,
        file="expert_pairs.metal",
        inputs=(*_OUTER_INPUTS, *("bias",) * biased, "initial"),
        outputs=("y",),
        body=f"""
        threadgroup float products[K * ROWS];
        expert_outer<ROWS, K, IN, OUT, BITS, GROUP, V, EXACT, CONTINUES,
                     {"true" if biased else "false"}>(
            h, slots, weights, down, scales, biases, {"bias" if biased else "h"}, initial, y,
            products, down_shape[0], threadgroup_position_in_grid.y,
            threadgroup_position_in_grid.x * ROWS, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
        """,
    )
    for biased in (False, True)
}

_INNER_WIDE = MetalKernel(
    "expert_inner_wide",
    file="expert_pairs.metal",
    inputs=_INNER[False].inputs,
    outputs=("h",),
    body="""
        threadgroup float partial[2 * ROWS * SIMDGROUPS];
        const uint pair = threadgroup_position_in_grid.y;
        inner_parts<ROWS, TOGETHER, SIMDGROUPS, IN, OUT, BITS, GROUP, V, EXACT, DEAL>(
            x + pair / K * IN, gate, gate_scales, gate_biases, up, up_scales, up_biases,
            h + ulong(pair) * OUT, partial, gate_shape[0], slots[pair],
            threadgroup_position_in_grid.x * TOGETHER, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)

_OUTER_WIDE = MetalKernel(
    "expert_outer_wide",
    file="expert_pairs.metal",
    inputs=_OUTER[False].inputs,
    outputs=("y",),
    body="""
        threadgroup float partial[(K * PARTS | 1) * ROWS];
        outer_parts<ROWS, TOGETHER, PARTS, K, IN, OUT, BITS, GROUP, V, EXACT, CONTINUES, DEALT>(
            h, slots, weights, down, scales, biases, initial, y, partial,
            down_shape[0], threadgroup_position_in_grid.y,
            threadgroup_position_in_grid.x * TOGETHER, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)
# What an exchange cuts the second launch in.
_OWN = {
    biased: MetalKernel(
        "expert_own" + "_biased" * biased,
        file="expert_pairs.metal",
        inputs=(*_OUTER_INPUTS, *("bias",) * biased),
        outputs=("y",),
        body=f"""
        threadgroup float products[K * ROWS];
        const uint k = simdgroup_index_in_threadgroup;
        const uint pair = threadgroup_position_in_grid.y * K + k;
        expert_own<ROWS, IN, OUT, BITS, GROUP, V, EXACT, {"true" if biased else "false"}>(
            h + ulong(pair) * IN, down, scales, biases, {"bias" if biased else "h"},
            y + ulong(pair) * OUT, products + k * ROWS, weights[pair], down_shape[0], slots[pair],
            threadgroup_position_in_grid.x * ROWS, thread_index_in_simdgroup);
        """,
    )
    for biased in (False, True)
}
_TOTAL = MetalKernel(
    "expert_total",
    file="expert_pairs.metal",
    inputs=("outputs",),
    outputs=("y",),
    body="""
        const uint row = thread_position_in_grid.x;
        const ulong token = thread_position_in_grid.y;
        if (row < OUT) {
          y[token * OUT + row] = sum_of_outputs<K, OUT>(outputs + token * K * OUT + row);
        }
    """,
)

_OF_PAIRS = (*_INNER.values(), *_OUTER.values(), _INNER_WIDE, _OUTER_WIDE, *_OWN.values(), _TOTAL)
KERNELS = (*_OF_PAIRS, *expert_blocks.KERNELS)

# Rows of a matrix for each simdgroup, and simdgroups for each threadgroup.
INNER_ROWS, INNER_SIMDGROUPS, OUTER_ROWS = 2, 4, 8
# A threadgroup of these adds outputs.
TOTAL_THREADS = 128


# From this C on simdgroups share the columns (docs/notes/kernels.md).
WIDE_EXPERTS, MOST_SIMDGROUPS = 6144, 16


@functools.lru_cache(maxsize=256)
def _inner_launch(layout: ExpertLayout, N: int, K: int, dtype: mx.Dtype, threads: int) -> Launch:
    C, F, matrix = layout.C, layout.F, layout.inner
    rows, groups, kernel = INNER_ROWS, INNER_SIMDGROUPS, _INNER[layout.biased]
    template = {"K": K, "IN": C, "OUT": F, "BITS": matrix.bits, "GROUP": matrix.group}
    template |= {"V": matrix.access(C, 16), "EXACT": dtype == mx.float32 or matrix.tiny}
    blocks = F // (rows * groups)
    if is_wide(layout):
        kernel, groups = _INNER_WIDE, matvec.simdgroups_of(C, threads)
        rows, template["TOGETHER"] = matvec.rows_at_once(matrix, F, dtype, K * F, groups)
        template["V"] = matvec.words_at_once(matrix, C)
        template["DEAL"] = _dealt(layout, K, threads)
        blocks = F // rows
    else:
        template |= activation_template(layout.activation)
    template |= {"ROWS": rows, "SIMDGROUPS": groups}
    return kernel, launch_of(template, (blocks, N * K), 32 * groups, [(N * K, F)], mx.float32)


@functools.lru_cache(maxsize=256)
def _outer_launch(
    layout: ExpertLayout, N: int, K: int, dtype: mx.Dtype, continues: bool, threads: int
) -> Launch:
    C, F, rows, matrix, kernel = layout.C, layout.F, OUTER_ROWS, layout.down, _OUTER[layout.biased]
    template = _outer_template(layout, K, dtype) | {"CONTINUES": continues}
    groups, parts = K, _outer_parts(layout, K, threads)
    if parts:
        kernel, groups = _OUTER_WIDE, K * parts
        rows, template["TOGETHER"] = matvec.rows_at_once(matrix, C, dtype, C, groups)
        template["V"] = matvec.words_at_once(matrix, F)
        template |= {"PARTS": parts, "DEALT": bool(_dealt(layout, K, threads))}
    template["ROWS"] = rows
    return kernel, launch_of(template, (C // rows, N), 32 * groups, [(N, C)], mx.float32)


@functools.lru_cache(maxsize=256)
def _exchanged_launches(
    layout: ExpertLayout, N: int, K: int, dtype: mx.Dtype
) -> tuple[Launch, Launch]:
    """The launches in front of an exchange and behind it.

    Raises:
        UnsupportedError: No kernel exchanges the outputs of such experts.
    """
    if layout.in_blocks or is_wide(layout):
        raise UnsupportedError("expert_mix exchanges no outputs of experts in blocks or so wide.")
    C, template = layout.C, _outer_template(layout, K, dtype) | {"ROWS": OUTER_ROWS}
    own = launch_of(template, (C // OUTER_ROWS, N), 32 * K, [(N, K, C)], mx.float32)
    blocks = -(-C // TOTAL_THREADS), N
    total = launch_of({"K": K, "OUT": C}, blocks, TOTAL_THREADS, [(N, C)], mx.float32)
    return (_OWN[layout.biased], own), (_TOTAL, total)


def _outer_template(layout: ExpertLayout, K: int, dtype: mx.Dtype) -> dict[str, int]:
    F, matrix = layout.F, layout.down
    template = {"K": K, "IN": F, "OUT": layout.C, "BITS": matrix.bits, "GROUP": matrix.group}
    return template | {"V": matrix.access(F, 16), "EXACT": dtype == mx.float32 or matrix.tiny}


def _outer_parts(layout: ExpertLayout, K: int, threads: int) -> int:
    """Simdgroups for each expert that share the columns of the second matrix too: each has twice
    as many where a threadgroup may not have the threads. 0: They share none."""
    parts = -(-layout.F // matvec.WIDE_COLUMNS)
    if not is_wide(layout) or K * parts > MOST_SIMDGROUPS:
        return 0
    return next((n for n in (parts, -(-parts // 2)) if 32 * K * n <= threads), 0)


def _dealt(layout: ExpertLayout, K: int, threads: int) -> int:
    """Columns of a lane if the inner values lie as lanes of the second launch take them (H100, F
    2048: 25.1 us instead of 26.2), 0 if they lie in order."""
    matrix, F = layout.down, layout.F
    columns = matvec.words_at_once(matrix, F) * (32 // matrix.bits if matrix.bits else 1)
    return columns if _outer_parts(layout, K, threads) and F % (32 * columns) == 0 else 0


def is_wide(layout: ExpertLayout) -> bool:
    """Return True if simdgroups share the columns of an expert's rows."""
    return layout.C >= WIDE_EXPERTS and layout.plain


def columns_count(bank: ExpertBank) -> bool:
    """Return True if the bits of an expert's output may depend on the columns of a call, those of
    absent experts included: simdgroups of a threadgroup share the work."""
    try:
        return is_wide(bank.layout)
    except UnsupportedError:
        return False


def _pair_launches(x, slots, weights, bank, initial) -> tuple[Launch, Launch]:
    """The two launches; arguments of shapes and dtypes that were seen before are not checked."""
    threads = most_threads()
    key = threads, x.shape, x.dtype, slots.shape, slots.dtype, weights.shape, weights.dtype
    if initial is not None:
        key += initial.shape, initial.dtype
    found = bank.launches.get(key)
    if found is None:
        checked(x, slots, weights, bank, initial)
        N, K = slots.shape
        if threads < 32 * K:
            raise UnsupportedError(
                f"a threadgroup of {threads} threads has no room for {K} experts."
            )
        layout, continues = bank.layout, initial is not None
        if layout.in_blocks:
            found = (
                expert_blocks.inner_launch(layout, N, K, x.dtype),
                expert_blocks.outer_launch(layout, N, K, x.dtype, continues),
            )
        else:
            found = (
                _inner_launch(layout, N, K, x.dtype, threads),
                _outer_launch(layout, N, K, x.dtype, continues, threads),
            )
        bank.launches[key] = found
    return found
