"""A whole MoE block for a few tokens, its experts being all on the device.

    post = norm(x);   logits, score, gate, up = weights post
    y = x + experts(post; top K of softmax(logits)) (+ sigmoid(score) down (silu(gate) up))

Shapes:
    x: ``[..., C]``, N rows; weights: what :func:`~mlx_moeflux.kernels.linear.project.project`
    takes: the router's logits ``[E]`` first; with a shared expert also its score ``[1]``, unless
    its factor is 1, and its first two products ``[F]``. norm: ``[C]``; bank: the experts by slot,
    affine, floats or in ggml's blocks; table: expert -> slot, ``[E]`` or more uint32, or None
    (expert e is in slot e); down: the shared expert's last matrix ``[C, F]``, or None.
    exchange: where other processes have experts too, whose slots are not below the bank's: takes
    the chosen ids ``[N, K]`` and the weighted outputs of this process's experts ``[N, K, C]``
    float32, -0.0 for those of others, and returns all outputs.
    returns: like x.

Composed it is eight launches, fused it is three, with the same bits. They compute the projections
and the norm as one array; the choice of experts (each threadgroup for itself) and their inner
values; the sum with the residual. An exchange cuts the last in two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear import matvec, project
from mlx_moeflux.kernels.linear.launch import Launch, launch_of
from mlx_moeflux.kernels.linear.matvec import ENTRIES, joined_places, joined_stride
from mlx_moeflux.kernels.linear.quantised import (
    ExpertLayout,
    Matrix,
    arrays_of,
    matrix_of,
    staged_floats,
)
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe import (
    add_shared,
    expert_blocks,
    expert_mix,
    expert_pairs,
    moe_combine,
    router,
)
from mlx_moeflux.kernels.moe.expert_ffn import INNER_INPUTS, ExpertBank, add_outputs
from mlx_moeflux.kernels.moe.expert_pairs import is_wide
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, most_threads

Exchange = Callable[[mx.array, mx.array], mx.array]


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
    exchange: Exchange | None = None,
    steps: Any = References,
) -> mx.array:
    """Operation by operation, each as `steps` computes it."""
    logits, *shared, post = steps.project(x, weights, norm=norm, eps=eps, normed=True, flat=True)
    ids, share = steps.softmax_top_k(logits, k=k, normalise=normalise)
    slots = ids if table is None else table[ids]
    if exchange is None:
        y = steps.expert_mix(post, slots, share, bank)
    else:
        one, repeated = (-1, 1), mx.repeat(post, k, axis=0)
        own = steps.expert_mix(repeated, slots.reshape(one), share.reshape(one), bank)
        y = add_outputs(exchange(ids, own.reshape(-1, k, post.shape[-1])))
    if down is None:
        return steps.moe_combine(x.reshape(y.shape), y).reshape(x.shape)
    *score, gate, up = shared
    return steps.add_shared(x, y, gate, up, down, score=score[0] if score else None)


def _inner_kernel(name: str, arrays: Sequence[str], rows: str) -> MetalKernel:
    """rows: A call that computes ROWS inner values of a pair, with `arrays` in it."""
    return MetalKernel(
        name,
        file="moe_step.metal",
        inputs=("row", "table", *arrays),
        # Behind the inner values of all pairs their slots, then their weights, then their experts:
        # MLX takes several microseconds for every output.
        outputs=("h",),
        body=f"""
        threadgroup uint chosen[32];
        threadgroup float share[32];
        const uint pair = threadgroup_position_in_grid.y, token = pair / K, rank = pair % K;
        const uint simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
        device uint* slots = (device uint*)(h + ulong(threadgroups_per_grid.y) * OUT);
        device float* weights = h + ulong(threadgroups_per_grid.y) * (OUT + 1);
        device uint* ids = (device uint*)(h + ulong(threadgroups_per_grid.y) * (OUT + 2));
        choose_slots<E, K, NORMALISE, TABLED>(
            row + token * STRIDE + LOGITS, table, slots + token * K, weights + token * K,
            ids + token * K, chosen, share, threadgroup_position_in_grid.x == 0 && rank == 0,
            simdgroup, lane);
        {rows}(
            row + token * STRIDE + NORMED, {", ".join(arrays)},
            {"" if len(arrays) == 2 else "row, row, "}h + ulong(pair) * OUT, gate_shape[0],
            chosen[rank], (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup) * ROWS, lane);
        """,
    )


_SHARED_INPUTS = ("shared_scales", "shared_biases")
# Where the last launches of a block are, and what the first has written behind its inner values.
_PLACE = """
        const uint token = threadgroup_position_in_grid.y;
        const uint first = threadgroup_position_in_grid.x * ROWS;
        const uint k = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
"""
_ROUTE = """
        const device float* weights =
            h + ulong(threadgroups_per_grid.y) * K * (IN + 1) + token * K;
        const device uint* slots =
            (const device uint*)(h + ulong(threadgroups_per_grid.y) * K * IN) + token * K;
"""
_STAGE = """
        if (SHARED) {
          float unused;
          stage<INNER, SHARED_BITS, EXACT, SHARED_V * per_word<SHARED_BITS>(), SWIGLU>(
              values, sums, &unused, row + token * STRIDE + GATE, row + token * STRIDE + UP,
              k * 32 + lane, 32 * (K + 1));
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
"""
_STAGED = """shared_products<ROWS, INNER, SHARED_BITS, SHARED_GROUP, SHARED_V, EXACT>(
              values, sums, w, shared_scales, shared_biases, products + K * ROWS, first, lane);"""
_IN_BLOCKS = """block_products<ROWS, INNER, OUT, SWIGLU, EXACT, S>(
              row + token * STRIDE + GATE, row + token * STRIDE + UP, w, products + K * ROWS, 1.0f,
              0, first, lane);"""


def _finish_rows(experts: str) -> str:
    """The end of a last launch. experts: The sum of the experts' outputs of a row."""
    return f"""
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (k == 0 && lane < ROWS) {{
          finish_row<SHARED, SCORED>(
              {experts}, products + K * ROWS, residual + token * OUT,
              row + token * STRIDE + SCORE, y + token * OUT, first, lane);
        }}
        """


def _finish_kernel(
    name: str, arrays: Sequence[str], products: str, *, blocks: bool = False
) -> MetalKernel:
    """products: A call that computes ROWS weighted products of a pair, with `arrays` in it. blocks:
    The shared expert is in blocks."""
    in_blocks = len(arrays) == 1
    return MetalKernel(
        name,
        file="moe_step.metal",
        inputs=("h", *arrays, "residual", "row", "w", *([] if blocks else _SHARED_INPUTS)),
        outputs=("y",),
        body=f"""
        threadgroup float products[(K + 1) * ROWS];
        threadgroup float values[STAGED];
        threadgroup float sums[SUMS];
        {_PLACE}
        {_ROUTE}
        {"" if blocks else _STAGE}
        if (k < K) {{
          if (slots[k] < down_shape[0]) {{
            {products}(
                h + (token * K + k) * IN, {"h, " if in_blocks else ""}{", ".join(arrays)},
                {"" if in_blocks else "h, "}products + k * ROWS, weights[k], slots[k], first, lane);
          }}
        }} else if (SHARED) {{
          {_IN_BLOCKS if blocks else _STAGED}
        }}
        {_finish_rows("sum_of_experts<ROWS, K>(products, slots, -0.0f, down_shape[0], lane)")}
        """,
    )


_INNER = _inner_kernel(
    "moe_step_inner", INNER_INPUTS, "inner_rows<ROWS, IN, OUT, BITS, GROUP, V, EXACT, false, 0, 0>"
)
_FINISH = _finish_kernel(
    "moe_step_finish",
    ("down", "scales", "biases"),
    "outer_rows<ROWS, IN, OUT, BITS, GROUP, V, EXACT, false>",
)
_INNER_BLOCKS = _inner_kernel(
    "moe_step_inner_blocks", ("gate", "up"), "block_inner<ROWS, IN, OUT, G, U, L, EXACT, 0, 0>"
)
_PRODUCTS = "block_products<ROWS, IN, OUT, PLAIN, EXACT, E>"
_FINISH_BLOCKS = _finish_kernel("moe_step_finish_blocks", ("down",), _PRODUCTS)
_ALL_BLOCKS = _finish_kernel("moe_step_finish_all_blocks", ("down",), _PRODUCTS, blocks=True)
# What an exchange cuts the last launch in.
_OWN = MetalKernel(
    "moe_step_own",
    file="moe_step.metal",
    inputs=("h", "down", "scales", "biases"),
    outputs=("y",),
    body=f"""
        threadgroup float products[K * ROWS];
        {_PLACE}
        {_ROUTE}
        const uint pair = token * K + k;
        expert_own<ROWS, IN, OUT, BITS, GROUP, V, EXACT, false>(
            h + pair * IN, down, scales, biases, h, y + ulong(pair) * OUT, products + k * ROWS,
            weights[k], down_shape[0], slots[k], first, lane);
        """,
)
_END = MetalKernel(
    "moe_step_end",
    file="moe_step.metal",
    inputs=("outputs", "residual", "row", "w", *_SHARED_INPUTS),
    outputs=("y",),
    body=f"""
        threadgroup float products[(K + 1) * ROWS];
        threadgroup float values[STAGED];
        threadgroup float sums[SUMS];
        {_PLACE}
        {_STAGE}
        if (SHARED && k == K) {{
          {_STAGED}
        }}
        {_finish_rows("sum_of_outputs<K, OUT>(outputs + ulong(token) * K * OUT + first + lane)")}
        """,
)
KERNELS = (_INNER, _FINISH, _INNER_BLOCKS, _FINISH_BLOCKS, _ALL_BLOCKS, _OWN, _END)


def moe_step_fused(
    x,
    weights,
    bank,
    *,
    norm,
    eps,
    k,
    normalise=True,
    table=None,
    down=None,
    exchange=None,
    steps=None,
) -> mx.array:
    """The module's formula in three launches for a few rows, or four and an exchange. `steps` plays
    no part.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: The kernels cannot read the matrices or the bank, or there is no GPU.
    """
    inner, *last = _launches(x, weights, bank, k, normalise, table, down, exchange)
    row = matvec.project_joined(x, weights, norm=norm, eps=eps)
    gate, up, own = bank.arrays
    slots = row if table is None else table
    h = inner[0](row, slots, *gate, *up, **inner[1])[0]
    # Where there is no shared expert, any floats stand.
    shared = (x, x, x) if down is None else arrays_of(down)
    if exchange is None:
        ((finish, how),) = last
        return finish(h, *own, x, row, *shared, **how)[0]
    of_own, (finish, how) = last
    outputs = of_own[0](h, *own, **of_own[1])[0]
    ids = h.reshape(-1)[len(h) * (bank.layout.F + 2) :].view(mx.uint32).reshape(-1, k)
    return finish(exchange(ids, outputs), x, row, *shared, **how)[0]


def _takes(
    x,
    weights,
    bank,
    *,
    k,
    normalise=True,
    table=None,
    down=None,
    exchange=None,
    **options: object,
) -> bool:
    """Return True if the kernels can read all matrices."""
    try:
        _launches(x, weights, bank, k, normalise, table, down, exchange)
    except (ShapeError, UnsupportedError):
        return False
    alike = not any(weight.precise for weight in weights)
    return alike and tuple(len(weight.results) for weight in weights) in ENTRIES


def _launches(x, weights, bank, k, normalise, table, down, exchange) -> tuple[Launch, ...]:
    """The launches behind the projections, for arguments of :func:`moe_step_fused`."""
    parts = tuple((matrix_of(w, x.shape[-1], blocks=True), w.results) for w in weights)
    shared = described = None
    if down is not None:
        F = parts[-1][1][-1]
        shared = matrix_of(down, F, blocks=True), down.weight.shape[0]
    if table is not None:
        described = table.shape, table.dtype
    known = x.shape, x.dtype, parts, bank.layout, bank.slots, shared, described
    return _launch(*known, k, normalise, exchange is not None, most_threads())


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
    exchanged: bool,
    threads: int,
) -> tuple[Launch, ...]:
    *leading, C = shape
    widths = [out for _, outs in parts for out in outs]
    E, N = widths[0], math.prod(leading)
    places, end = joined_places(parts, C)
    stride = joined_stride(end)
    _check(C, E, widths, layout, num_slots, shared, table, k)
    if not layout.plain and (not layout.in_blocks or any(layout.activation)):
        raise UnsupportedError(
            "moe_step takes affine experts and such in blocks, without biases and with silu(gate) "
            "up."
        )
    if is_wide(layout):
        raise UnsupportedError(f"expert_mix takes experts of {C} in another order.")
    if exchanged and layout.in_blocks:
        raise UnsupportedError("moe_step exchanges no outputs of experts in blocks.")
    used = 32 * (k + (shared is not None))
    if used > threads:
        raise UnsupportedError(f"a threadgroup of {threads} threads has no room for {k} experts.")
    F, exact = layout.F, dtype == mx.float32
    if shared is not None and shared[0].block and not layout.in_blocks:
        raise UnsupportedError("moe_step takes a shared expert in blocks beside such experts.")
    inner, finish, of_inner, of_finish = _reading(layout, shared and shared[0].block)
    rows, groups = of_inner["ROWS"], of_inner["SIMDGROUPS"]
    template = {**of_inner, "E": E, "K": k, "IN": C, "OUT": F, "EXACT": exact}
    template |= {"NORMALISE": normalise, "TABLED": table is not None, "STRIDE": stride}
    template |= {"NORMED": places[-1], "LOGITS": places[0]}
    blocks = F // (rows * groups), N * k
    first = inner, launch_of(template, blocks, 32 * groups, [(N * k, F + 3)], mx.float32)
    reading = {**of_finish, "K": k, "IN": F, "OUT": C, "EXACT": exact}
    template = {"K": k, "ROWS": of_finish["ROWS"], "OUT": C, "EXACT": exact}
    template |= {"SHARED": shared is not None, "SCORED": len(widths) == 4, "STRIDE": stride}
    template |= {"STAGED": 4, "SUMS": 1, "INNER": 32, "GATE": 0, "UP": 0, "SCORE": 0}
    template |= {"SHARED_BITS": 0, "SHARED_GROUP": 32, "SHARED_V": 4}
    if shared is not None:
        width, stored = widths[-1], shared[0]
        template |= {"GATE": places[-3], "UP": places[-2], "SCORE": places[1], "INNER": width}
        if not stored.block:
            words = stored.access(width, 16)
            if matvec.shares_columns(width):
                raise UnsupportedError(
                    f"add_shared takes a shared expert of {width} in another order."
                )
            staged, sums = staged_floats(stored, words, width)
            template |= {"STAGED": staged, "SUMS": sums, "SHARED_V": words}
            template |= {"SHARED_BITS": stored.bits, "SHARED_GROUP": stored.group}
    blocks = C // of_finish["ROWS"], N
    if not exchanged:
        return first, (finish, launch_of({**reading, **template}, blocks, used, [shape], dtype))
    own = _OWN, launch_of(reading, blocks, 32 * k, [(N, k, C)], mx.float32)
    return first, own, (_END, launch_of(template, blocks, used, [shape], dtype))


def _reading(
    layout: ExpertLayout, shared: str | None
) -> tuple[MetalKernel, MetalKernel, dict[str, int], dict[str, int]]:
    """The two kernels that read such experts, and what their templates say of it. shared: The type
    of the shared expert's blocks, if it is in blocks."""
    of = expert_blocks if layout.in_blocks else expert_pairs
    of_inner = {"ROWS": of.INNER_ROWS, "SIMDGROUPS": of.INNER_SIMDGROUPS}
    of_finish = {"ROWS": of.OUTER_ROWS}
    if layout.in_blocks:
        inner = _INNER_BLOCKS.using(**expert_blocks.inner_types(layout))
        types = expert_blocks.outer_types(layout)
        finish = _ALL_BLOCKS.using(**types, S=shared) if shared else _FINISH_BLOCKS.using(**types)
        return inner, finish, of_inner, of_finish
    for entries, matrix, width in (
        (of_inner, layout.inner, layout.C),
        (of_finish, layout.down, layout.F),
    ):
        entries |= {"BITS": matrix.bits, "GROUP": matrix.group, "V": matrix.access(width, 16)}
    return _INNER, _FINISH, of_inner, of_finish


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
            moe_step_fused, kernels=(*matvec.joining(), *KERNELS), takes=_takes, joins=True
        )
    },
    size=slice(None, -1),
    rows=("x",),
    replaces=("project", "softmax_top_k", "expert_mix", "add_shared", "moe_combine"),
    composed=True,
    proof=Proof(example=_example, workloads={"": _workload}, shrunk=("x",), chooses=True),
)
