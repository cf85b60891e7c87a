"""What latent attention does to one token of each sequence between its projections and its sums.

    nope, rotary, latent, key = latent_prepare(q, kv)
    q_latent = w_h nope[h]  (transposed: w_h^T nope[h]);   tail' = tail with the row (latent, key)

Shapes:
    q: ``[B, 1, H, Dn + Dr]``, or with `queries` what these make them of, ``[B, 1, L]``; kv:
    ``[B, 1, R + Dr]``; tail: ``[B, 1, rows, R]`` and ``[B, 1, rows, Dr]``; matrices ``[R, Dn]`` of
    each head (transposed: ``[Dn, R]``); norm, frequencies, offset, factor, interleaved: see
    :mod:`mlx_moeflux.kernels.latent_prepare`; position: see :mod:`mlx_moeflux.kernels.append`.
    returns: q_latent ``[B, H, 1, R]``, rotary ``[B, H, 1, Dr]``, and the two new tails.

Composed it is four launches, fused it is one for one sequence, or two, with the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels import append, heads, latent_prepare, project
from mlx_moeflux.kernels.append import Pair
from mlx_moeflux.kernels.heads import NARROW_SIMDGROUPS, HeadMatrices, narrow_rows
from mlx_moeflux.kernels.metal import (
    MetalKernel,
    backend,
    float_bits,
    launches,
    most_threads,
)
from mlx_moeflux.kernels.norm_rope import offsets
from mlx_moeflux.kernels.numbers import filled, on_the_device
from mlx_moeflux.kernels.project import Weight
from mlx_moeflux.kernels.quantised import FLOATS, Matrix, arrays_of, matrix_of
from mlx_moeflux.kernels.tiling import (
    MIDDLE,
    MIDDLE_AT_ONCE,
    MOST_SIMDGROUPS,
    PROCESSORS,
    simdgroups_of,
    tiling,
)


@dataclass(frozen=True)
class Queries:
    """How queries are made: the rows of `weight` ``[H (Dn + Dr), L]`` times a norm, whose weight is
    `norm` ``[L]``."""

    weight: Weight
    norm: mx.array
    eps: float

    def of(self, low: mx.array, heads: int, steps: Any) -> mx.array:
        """low ``[B, 1, L]`` -> ``[B, 1, H, Dn + Dr]``."""
        q = steps.project(low, [self.weight], norm=self.norm, eps=self.eps)[0]
        return q.reshape(*low.shape[:2], heads, -1)


class References:
    """The steps in plain MLX."""

    project = staticmethod(project.project)
    latent_prepare = staticmethod(latent_prepare.latent_prepare)
    head_product = staticmethod(heads.head_product)
    append_row = staticmethod(append.append_row)


def latent_step(
    q: mx.array,
    kv: mx.array,
    tail: Pair,
    matrices: HeadMatrices,
    *,
    norm: mx.array,
    eps: float,
    frequencies: mx.array,
    offset: int | mx.array,
    position: mx.array,
    factor: float = 1.0,
    interleaved: bool = False,
    transposed: bool = False,
    queries: Queries | None = None,
    steps: Any = References,
) -> tuple[mx.array, mx.array, Pair]:
    """Operation by operation, each as `steps` computes it."""
    if queries is not None:
        q = queries.of(q, matrices.number, steps)
    nope, rotary, latent, key = steps.latent_prepare(
        q, kv, norm=norm, eps=eps, frequencies=frequencies, offset=offset, factor=factor,
        interleaved=interleaved,
    )  # fmt: skip
    tail = steps.append_row(tail, latent, key, position=position)
    return steps.head_product(nope, matrices, transposed=transposed), rotary, tail


_KERNEL = MetalKernel(
    "latent_step",
    file="latent_step.metal",
    inputs=(
        *("q", "kv", "weight", "frequencies", "numbers", "offset", "position"),
        *("latents", "keys", "w", "scales", "biases"),
    ),
    outputs=("q_latent", "rotary", "new_latents", "new_keys"),
    body="""
        const uint simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
        const int b = int(threadgroup_position_in_grid.y), own = position[0] % TAIL;
        const device T* heads = q + size_t(b) * HEADS * (DN + DR);
        const device T* block = latents + size_t(b) * TAIL * RANK;
        const device T* turned = keys + size_t(b) * TAIL * DR;
        device T* to = new_latents + size_t(b) * TAIL * RANK;
        device T* to_keys = new_keys + size_t(b) * TAIL * DR;
        uint group = threadgroup_position_in_grid.x;
        if (group < OTHERS) {
            const uint row = group * SIMDGROUPS + simdgroup;
            const device T* row_of_kv = kv + size_t(b) * (RANK + DR);
            if (row <= HEADS) {
                turned_rows<T, DR, INTERLEAVED>(
                    row < HEADS ? heads + row * (DN + DR) + DN : row_of_kv + RANK, frequencies,
                    numbers[1], offset[b],
                    row < HEADS ? rotary + (size_t(b) * HEADS + row) * DR : to_keys + own * DR,
                    lane, 1, 0, 0);
            }
            if (row == HEADS) {
                latent_row<T, RANK>(row_of_kv, weight, numbers[0], to + own * RANK, lane);
            }
            return;
        }
        group -= OTHERS;
        if (group < COPIES) {
            const uint index = group * (32 * SIMDGROUPS) + simdgroup * 32 + lane;
            other_rows<TAIL, RANK, PACK>(block, to, own, index);
            other_rows<TAIL, DR, PACK>(turned, to_keys, own, index);
            return;
        }
        group -= COPIES;
        const uint head = group / EACH;
        const ulong first = ulong(head) * BLOCK;
        narrow_matvec<ROWS, SIMDGROUPS, DN, FIRST, OUT, BITS, GROUP, V, EXACT>(
            heads + head * (DN + DR), w + first * PACKS, scales + first * (DN / GROUP),
            biases + first * (DN / GROUP), q_latent + (size_t(b) * HEADS + head) * OUT,
            group % EACH, simdgroup, lane);
    """,
)


# Threadgroups besides those of the heads: with 128 heads as many as an H100 has processors. And
# parts of rows that a lane holds: for more there are no registers, nor for L wider than MIDDLE.
OTHERS, MOST_STEPS = 4, 4
# Heads with which few of those processors have nothing to do and none has two; with 64, where half
# would have nothing, queries are a launch of their own.
HEADS = range(96, PROCESSORS - OTHERS + 1)

_WITH_QUERIES = MetalKernel(
    "latent_step_queries",
    file="latent_step.metal",
    inputs=("low", "low_weight", "v", "v_scales", "v_biases", *_KERNEL.inputs[1:]),
    outputs=_KERNEL.outputs,
    body="""
        threadgroup float squares[32];
        threadgroup float partial[(DN + DR) * PARTS];
        threadgroup float values[2 * (DN + DR)];
        const uint simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
        const uint head = threadgroup_position_in_grid.x;
        const int own = position[0] % TAIL;
        const threadgroup float* turning;
        if (head < HEADS) {
            const ulong first = ulong(head) * (DN + DR), row = ulong(head) * BLOCK + FIRST;
            turning = step_of_head<ROWS, DN, DR, RANK, BITS, GROUP, V, OWN, TOGETHER, PARTS, L,
                                   LOW_BITS, LOW_GROUP, LOW_V, EXACT>(
                low, low_weight, as_type<float>(EPSILON), v + first * LOW_PACKS,
                v_scales + first * (L / LOW_GROUP), v_biases + first * (L / LOW_GROUP),
                w + row * PACKS, scales + row * (DN / GROUP), biases + row * (DN / GROUP),
                q_latent + head * RANK, values, squares, partial, simdgroup, lane);
        } else {
            turning = step_of_tail<THREADS, OTHERS, TAIL, RANK, DR, PACK>(
                kv, weight, numbers[0], latents, keys, new_latents, new_keys, values, own,
                head - HEADS, simdgroup, lane);
        }
        if (head <= HEADS && simdgroup == THREADS / 32 - 1) {
            turned_rows<T, DR, INTERLEAVED>(
                turning, frequencies, numbers[1], offset[0],
                head < HEADS ? rotary + head * DR : new_keys + own * DR, lane, 1, 0, 0);
        }
    """,
)


@launches(_KERNEL, _WITH_QUERIES)
def latent_step_fused(
    q: mx.array,
    kv: mx.array,
    tail: Pair,
    matrices: HeadMatrices,
    *,
    norm: mx.array,
    eps: float,
    frequencies: mx.array,
    offset: int | mx.array,
    position: mx.array,
    factor: float = 1.0,
    interleaved: bool = False,
    transposed: bool = False,
    queries: Queries | None = None,
    steps: Any = References,
) -> tuple[mx.array, mx.array, Pair]:
    """:func:`latent_step` in one launch; where `queries` have one of their own, `steps` makes it.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, there is more than one token of a
            sequence, or R, Dn or Dr is no multiple of 8.
        UnsupportedError: Matrices are transposed or stored in another way, or there is no GPU.
    """
    if transposed or matrices.heads is not None:
        raise UnsupportedError("latent_step takes all heads' matrices [R, Dn].")
    layout = matrix_of(matrices, matrices.width)
    dtypes = {x.dtype for x in (q, kv, *tail)}
    if q.dtype not in FLOATS or len(dtypes) > 1 or norm.dtype not in FLOATS:
        raise ShapeError(f"latent_step: q, kv and tail are {dtypes}, norm {norm.dtype}.")
    if position.dtype != mx.int32:
        raise ShapeError(f"latent_step: position is {position.dtype}, not int32.")
    made = None if queries is None else _made(q, queries, matrices.number)
    if queries is not None and made is None:
        q = queries.of(q, matrices.number, steps)
    kernel, launch = _launch(
        q.shape if made is None else made.shape, kv.shape, tail[0].shape, tail[1].shape,
        norm.shape, frequencies.shape[0], matrices.weight.shape, layout, matrices.first,
        matrices.count, q.dtype, made, most_threads(),
    )  # fmt: skip
    if made is not None and kernel is _KERNEL:
        q = queries.of(q, matrices.number, steps)
    before = [q] if kernel is _KERNEL else [q, queries.norm, *arrays_of(queries.weight)]
    template = launch["template"] | {"INTERLEAVED": interleaved}
    q_latent, rotary, *new = kernel(
        *before, kv, norm, frequencies.astype(mx.float32), filled(eps, factor),
        offsets(offset, q.shape[0]), on_the_device(position), *tail, *arrays_of(matrices),
        **launch | {"template": template},
    )  # fmt: skip
    return q_latent, rotary, tuple(new)


@dataclass(frozen=True)
class _Made:
    """Queries of `shape` ``[1, 1, H, Dn + Dr]``, and how the matrix ``[*, width]`` is stored that
    makes them."""

    shape: tuple[int, ...]
    layout: Matrix
    width: int
    eps: float


def _made(low: mx.array, queries: Queries, heads: int) -> _Made | None:
    """What a kernel has to know of them; None: none makes them."""
    weight, L = queries.weight, low.shape[-1]
    try:
        layout = matrix_of(weight, L)
    except UnsupportedError:
        return None
    rows = weight.weight.shape[0]
    if heads not in HEADS and backend().name == "cuda":
        return None
    known = low.shape == (1, 1, L) and queries.norm.shape == (L,) and queries.norm.dtype in FLOATS
    if not known or weight.precise or rows % heads or L not in MIDDLE:
        return None
    return _Made((1, 1, heads, rows // heads), layout, L, queries.eps)


@functools.lru_cache(maxsize=256)
def _launch(
    q: tuple[int, ...],
    kv: tuple[int, ...],
    latents: tuple[int, ...],
    keys: tuple[int, ...],
    norm: tuple[int, ...],
    pairs: int,
    weight: tuple[int, ...],
    layout: Matrix,
    first: int,
    out: int,
    dtype: mx.Dtype,
    made: _Made | None,
    threads: int,
) -> tuple[MetalKernel, dict[str, Any]]:
    (B, T, H, D), Dr, rows = q, 2 * pairs, latents[2]
    Dn, R = D - Dr, norm[0]
    wanted = (T, kv, latents, keys, out, weight[0])
    if wanted != (1, (B, 1, R + Dr), (B, 1, rows, R), (B, 1, rows, Dr), R, H) or (
        Dn != (weight[2] * 32 // layout.bits if layout.bits else weight[2]) or (Dn | R | Dr) % 8
    ):
        raise ShapeError(
            f"latent_step: q {q}, kv {kv}, tails {latents} and {keys}, norm {norm}, {pairs} pairs "
            f"and matrices {weight} of {out} rows do not fit together."
        )
    narrow = narrow_rows(layout, R, Dn)
    if narrow is None:
        raise UnsupportedError(f"latent_step takes no matrices of {R} rows of {Dn}.")
    pack = 16 // dtype.size
    template = {
        **{"T": dtype, "HEADS": H, "DN": Dn, "DR": Dr, "RANK": R, "TAIL": rows, "PACK": pack},
        **{"FIRST": first, "BLOCK": weight[1], "PACKS": weight[2], "EXACT": dtype == mx.float32},
        **{"BITS": layout.bits, "GROUP": layout.group, **narrow},
    }
    outputs = {"output_shapes": [(B, H, 1, R), (B, H, 1, Dr), latents, keys]}
    outputs["output_dtypes"] = [dtype] * 4
    own = None if made is None else _with_queries(made, layout, narrow["V"], R, Dn, dtype, threads)
    if own is not None:
        used = own["THREADS"]
        grid = {"grid": ((H + OTHERS) * used, 1, 1), "threadgroup": (used, 1, 1)}
        return _WITH_QUERIES, {"template": template | own, **grid, **outputs}
    simdgroups = NARROW_SIMDGROUPS
    each = -(-R // (simdgroups * narrow["ROWS"]))
    others, copies = -(-(H + 1) // simdgroups), -(-rows * max(R, Dr) // pack // (32 * simdgroups))
    template |= {"OTHERS": others, "COPIES": copies, "EACH": each, "OUT": R}
    return _KERNEL, {
        "template": template | {"SIMDGROUPS": simdgroups},
        "grid": ((others + copies + each * H) * simdgroups * 32, B, 1),
        "threadgroup": (simdgroups * 32, 1, 1),
        **outputs,
    }


def _with_queries(
    made: _Made, layout: Matrix, words: int, R: int, Dn: int, dtype: mx.Dtype, threads: int
) -> dict[str, Any] | None:
    """Template arguments of the launch that makes queries too: as many simdgroups as there are
    registers and threads for, among which both matrices' rows of a head come out even; None: they
    do not, as with 128 heads of DeepSeek's on Metal."""
    D, L = made.shape[3], made.width
    tile, parts = tiling(made.layout, D, L, dtype, threads)[1], simdgroups_of(L, threads)
    lanes = Dn // (words * (32 // layout.bits if layout.bits else 1))
    known = [n for n in range(32 // lanes, R + 1, 32 // lanes) if R % n == 0]
    # With these 76 registers at most, of the 80 that 24 simdgroups may have (H100: 12.0 us, with 18
    # 12.7).
    few = layout.bits == 4 and made.layout.bits in (0, 4)
    most = min(MIDDLE_AT_ONCE if few else MOST_SIMDGROUPS, threads // 32)
    for teams in range(most // parts, 0, -1):
        simdgroups = teams * parts
        rows = next((n for n in known if n * simdgroups >= R), 0)
        steps, even = rows * lanes // 32, D % (teams * tile["SPLIT"]) == 0
        if even and 32 * simdgroups >= D and 0 < steps <= MOST_STEPS:
            return {
                **{"THREADS": 32 * simdgroups, "ROWS": rows, "OWN": D // teams, "PARTS": parts},
                **{"OTHERS": OTHERS, "TOGETHER": tile["SPLIT"], "L": L, "LOW_V": tile["V"]},
                **{"LOW_BITS": made.layout.bits, "LOW_GROUP": made.layout.group},
                **{"LOW_PACKS": made.layout.words(L), "EPSILON": float_bits(made.eps)},
            }
    return None
