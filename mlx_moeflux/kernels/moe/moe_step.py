"""A whole MoE block for a few tokens, its experts being all on the device.

    post = norm(x);   logits, score, gate, up = weights post
    y = x + experts(post; top K of softmax(logits)) (+ sigmoid(score) down (silu(gate) up))

Shapes:
    x: ``[..., C]``, N rows; weights: what :func:`~mlx_moeflux.kernels.linear.project.project`
    takes: the router's logits ``[E]`` first; with a shared expert also its score ``[1]``, unless
    its factor is 1, and its first two products ``[F]``. norm: ``[C]``; bank: the experts by slot;
    table: expert -> slot, ``[E]`` or more uint32, or None (expert e is in slot e); down: the shared
    expert's last matrix ``[C, F]``, or None. returns: like x.

Composed it is eight launches, fused it is three, with the same bits. They compute the projections
and the norm as one array; the choice of experts (each threadgroup for itself) and their inner
values; the sum with the residual.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear import matvec, project
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.matvec import ENTRIES, joined_places, joined_stride
from mlx_moeflux.kernels.linear.quantised import (
    ExpertLayout,
    Matrix,
    arrays_of,
    matrix_of,
    staged_floats,
)
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe import add_shared, expert_mix, moe_combine, router
from mlx_moeflux.kernels.moe.expert_ffn import INNER_INPUTS, ExpertBank
from mlx_moeflux.kernels.moe.expert_pairs import INNER_ROWS, INNER_SIMDGROUPS, OUTER_ROWS, is_wide
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, most_threads


class References:
    """The steps in plain MLX."""

    project = staticmethod(project.project)
    softmax_top_k = staticmethod(router.softmax_top_k)
    expert_mix = staticmethod(expert_mix.expert_mix)
    add_shared = staticmethod(add_shared.add_shared)
    moe_combine = staticmethod(moe_combine.moe_combine)


def moe_step(
    x: mx.array,
    weights: Sequence[Weight],
    bank: ExpertBank,
    *,
    norm: mx.array,
    eps: float,
    k: int,
    normalise: bool = True,
    table: mx.array | None = None,
    down: Weight | None = None,
    steps: Any = References,
) -> mx.array:
    """Operation by operation, each as `steps` computes it."""
    logits, *shared, post = steps.project(x, weights, norm=norm, eps=eps, normed=True, flat=True)
    ids, share = steps.softmax_top_k(logits, k=k, normalise=normalise)
    slots = ids if table is None else table[ids]
    y = steps.expert_mix(post, slots, share, bank)
    if down is None:
        return steps.moe_combine(x.reshape(y.shape), y).reshape(x.shape)
    *score, gate, up = shared
    return steps.add_shared(x, y, gate, up, down, score=score[0] if score else None)


_INNER = MetalKernel(
    "moe_step_inner",
    file="moe_step.metal",
    inputs=("row", "table", *INNER_INPUTS),
    # Behind the inner values of all pairs their slots, and then their weights: MLX takes several
    # microseconds for every output.
    outputs=("h",),
    body="""
        threadgroup uint chosen[32];
        threadgroup float share[32];
        const uint token = threadgroup_position_in_grid.y / K;
        const uint rank = threadgroup_position_in_grid.y % K;
        device float* weights = h + ulong(threadgroups_per_grid.y) * (OUT + 1);
        device uint* slots = (device uint*)(h + ulong(threadgroups_per_grid.y) * OUT);
        choose_slots<E, K, NORMALISE, TABLED>(
            row + token * STRIDE + LOGITS, table, slots + token * K, weights + token * K, chosen,
            share, threadgroup_position_in_grid.x == 0 && rank == 0,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
        inner_rows<ROWS, IN, OUT, BITS, GROUP, V, EXACT, false, 0, 0>(
            row + token * STRIDE + NORMED, gate, gate_scales, gate_biases, up, up_scales,
            up_biases, row, row, h + ulong(threadgroup_position_in_grid.y) * OUT, gate_shape[0],
            chosen[rank],
            (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup) * ROWS,
            thread_index_in_simdgroup);
    """,
)

_FINISH = MetalKernel(
    "moe_step_finish",
    file="moe_step.metal",
    inputs=(
        *("h", "down", "scales", "biases", "residual", "row"),
        *("w", "shared_scales", "shared_biases"),
    ),
    outputs=("y",),
    body="""
        threadgroup float products[(K + 1) * ROWS];
        threadgroup float values[STAGED];
        threadgroup float sums[SUMS];
        const uint token = threadgroup_position_in_grid.y;
        const device float* weights = h + ulong(threadgroups_per_grid.y) * K * (IN + 1);
        const device uint* slots =
            (const device uint*)(h + ulong(threadgroups_per_grid.y) * K * IN);
        moe_finish<ROWS, K, IN, OUT, BITS, GROUP, V, EXACT, SHARED, SCORED, INNER, SHARED_BITS,
                   SHARED_GROUP, SHARED_V>(
            h + token * K * IN, slots + token * K, weights + token * K, down, scales, biases,
            residual + token * OUT, row + token * STRIDE + GATE, row + token * STRIDE + UP,
            row + token * STRIDE + SCORE, w, shared_scales, shared_biases, y + token * OUT,
            products, values, sums, down_shape[0], threadgroup_position_in_grid.x * ROWS,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)


def moe_step_fused(
    x, weights, bank, *, norm, eps, k, normalise=True, table=None, down=None, steps=None
) -> mx.array:
    """The module's formula in three launches for a few rows. `steps` plays no part.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: The kernels cannot read the matrices or the bank, or there is no GPU.
    """
    inner, finish = _launches(x, weights, bank, k, normalise, table, down)
    row = matvec.project_joined(x, weights, norm=norm, eps=eps)
    gate, up, own = bank.arrays
    slots = row if table is None else table
    h = _INNER(row, slots, *gate, *up, **inner)[0]
    shared = own if down is None else arrays_of(down)
    return _FINISH(h, *own, x, row, *shared, **finish)[0]


def _takes(
    x, weights, bank, *, k, normalise=True, table=None, down=None, **options: object
) -> bool:
    """Return True if the kernels can read all matrices."""
    try:
        _launches(x, weights, bank, k, normalise, table, down)
    except (ShapeError, UnsupportedError):
        return False
    alike = not any(weight.precise for weight in weights)
    return alike and tuple(len(weight.results) for weight in weights) in ENTRIES


def _launches(x, weights, bank, k, normalise, table, down) -> tuple[dict[str, Any], dict[str, Any]]:
    """The launches behind the projections, for arguments of :func:`moe_step_fused`."""
    parts = tuple((matrix_of(w, x.shape[-1]), w.results) for w in weights)
    shared = described = None
    if down is not None:
        F = parts[-1][1][-1]
        shared = matrix_of(down, F), down.weight.shape[0]
    if table is not None:
        described = table.shape, table.dtype
    known = x.shape, x.dtype, parts, bank.layout, bank.slots, shared, described
    return _launch(*known, k, normalise, most_threads())


@functools.lru_cache(maxsize=256)
def _launch(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    parts: tuple[tuple[Matrix, tuple[int, ...]], ...],
    layout: ExpertLayout,
    num_slots: int,
    shared: tuple[Matrix, int] | None,
    table: tuple[tuple[int, ...], mx.Dtype] | None,
    k: int,
    normalise: bool,
    threads: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    *leading, C = shape
    widths = [out for _, outs in parts for out in outs]
    E, N = widths[0], math.prod(leading)
    places, end = joined_places(parts, C)
    stride = joined_stride(end)
    _check(C, E, widths, layout, num_slots, shared, table, k)
    matrix, outer = layout.inner, layout.down
    if not layout.plain:
        raise UnsupportedError(
            "moe_step takes affine experts without biases and with silu(gate) up."
        )
    if is_wide(layout):
        raise UnsupportedError(f"expert_mix takes experts of {C} in another order.")
    used = 32 * (k + (shared is not None))
    if used > threads:
        raise UnsupportedError(f"a threadgroup of {threads} threads has no room for {k} experts.")
    F, exact = layout.F, dtype == mx.float32
    template = {"ROWS": INNER_ROWS, "SIMDGROUPS": INNER_SIMDGROUPS, "E": E, "K": k, "IN": C}
    template |= {"OUT": F, "BITS": matrix.bits, "GROUP": matrix.group, "V": matrix.access(C, 16)}
    template |= {"EXACT": exact, "NORMALISE": normalise, "TABLED": table is not None}
    template |= {"STRIDE": stride, "NORMED": places[-1], "LOGITS": places[0]}
    groups, threads_each = (F // (INNER_ROWS * INNER_SIMDGROUPS), N * k), 32 * INNER_SIMDGROUPS
    inner = launch_of(template, groups, threads_each, [(N * k, F + 2)], mx.float32)
    template = {"ROWS": OUTER_ROWS, "K": k, "IN": F, "OUT": C, "BITS": outer.bits}
    template |= {"GROUP": outer.group, "V": outer.access(F, 16), "EXACT": exact}
    template |= {"SHARED": shared is not None, "SCORED": len(widths) == 4, "STRIDE": stride}
    template |= {"STAGED": 4, "SUMS": 1, "INNER": 32, "GATE": 0, "UP": 0, "SCORE": 0}
    template |= {"SHARED_BITS": 0, "SHARED_GROUP": 32, "SHARED_V": 4}
    if shared is not None:
        width, stored = widths[-1], shared[0]
        words = stored.access(width, 16)
        if matvec.shares_columns(width):
            raise UnsupportedError(f"add_shared takes a shared expert of {width} in another order.")
        staged, sums = staged_floats(stored, words, width)
        template |= {"STAGED": staged, "SUMS": sums, "INNER": width, "SHARED_V": words}
        template |= {"GATE": places[-3], "UP": places[-2], "SCORE": places[1]}
        template |= {"SHARED_BITS": stored.bits, "SHARED_GROUP": stored.group}
    return inner, launch_of(template, (C // OUTER_ROWS, N), used, [shape], dtype)


def _check(C, E, widths, layout, num_slots, shared, table, k) -> None:
    if layout.C != C or not 1 <= k <= min(E, router.MOST_CHOSEN) or E > router.MOST_EXPERTS:
        raise ShapeError(f"{k} of {E} experts of width {layout.C} do not fit x of width {C}.")
    if table is None and num_slots != E:
        raise ShapeError(f"a bank of {num_slots} slots without a table holds no {E} experts.")
    if table is not None and (table[1] != mx.uint32 or table[0][0] < E):
        raise ShapeError(f"table is {table[1]} {list(table[0])}; expected uint32 [{E}] or more.")
    if shared is None:
        good = len(widths) == 1
    else:
        good = len(widths) in (3, 4) and widths[-1] == widths[-2] and shared[1] == C
        good = good and (len(widths) == 3 or widths[1] == 1)
    if not good:
        raise ShapeError(f"results {widths} are not logits and a shared expert of {shared}.")


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    spec = QuantSpec(8, 64)
    router = Weight(*mx.quantize(x(s.E + 1, s.C), group_size=64, bits=8), spec, (s.E, 1))
    rows, weights = x(1, n, s.C), [router, examples.weight(s, x, s.F, s.F, width=s.C)]
    options = {"norm": x(s.C), "eps": 1e-6, "k": s.K, "down": examples.weight(s, x, s.C, width=s.F)}
    return (rows, weights, expert_mix.random_bank(s, rows.dtype)), options


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    rows, norm, router = _decisive(s, x)
    (_, (_, shared), bank), options = _workload(s, n, x)
    options |= {"norm": norm, "table": mx.arange(s.E, dtype=mx.uint32)}
    return (rows, [Weight(router, outs=(s.E, 1)), shared], bank), options


def _decisive(s: Sizes, x: Normal) -> tuple[mx.array, mx.array, mx.array]:
    """Rows, a norm's weight and a router that no rounding moves to another expert. Evaluates."""
    while True:
        rows, norm, router = x(3, s.C), x(s.C), 0.2 * x(s.E + 1, s.C)
        arrays = (array.astype(mx.float32) for array in (rows, norm, router[: s.E]))
        rows32, norm32, router32 = (np.array(array) for array in arrays)
        normed = norm32 * rows32 / np.sqrt((rows32**2).mean(axis=-1, keepdims=True))
        scores = np.sort(normed @ router32.T, axis=-1)
        if (scores[:, -s.K] - scores[:, -s.K - 1]).min() > 0.05 * np.abs(scores).max():
            return rows, norm, router


MOE_STEP = Operation(
    name="moe_step",
    reference=moe_step,
    others={
        "fused": Implementation(
            moe_step_fused, kernels=(*matvec.joining(), _INNER, _FINISH), takes=_takes
        )
    },
    size=slice(None, -1),
    shrunk=("x",),
    chooses=True,
    replaces=("project", "softmax_top_k", "expert_mix", "add_shared", "moe_combine"),
    composed=True,
    example=_example,
    workloads={"": _workload},
)
