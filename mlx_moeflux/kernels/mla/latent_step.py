"""Prepare one token of each sequence between latent attention's projections and sums.

    nope, rotary, latent, key = latent_prepare(q, kv)
    q_latent = w_h nope[h]  (transposed: w_h^T nope[h]);   tail' = tail with the row (latent, key)

Shapes:
    q: ``[B, 1, H, Dn + Dr]``; kv: ``[B, 1, R + Dr]``; tail: ``[B, 1, rows, R]`` and
    ``[B, 1, rows, Dr]``; matrices ``[R, Dn]`` of each head (transposed: ``[Dn, R]``); norm,
    frequencies, offset, factor, interleaved: see
    :mod:`mlx_moeflux.kernels.mla.latent_prepare`; position: see
    :mod:`mlx_moeflux.kernels.attention.append`. returns: q_latent ``[B, H, 1, R]``, rotary ``[B, H,
    1, Dr]``, and the two new tails.

Composed it is three launches, fused it is one, with the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.attention import append
from mlx_moeflux.kernels.attention.append import Pair
from mlx_moeflux.kernels.attention.norm_rope import offsets
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear.quantised import FLOATS, Matrix, arrays_of, matrix_of
from mlx_moeflux.kernels.mla.head_product import (
    NARROW_SIMDGROUPS,
    HeadMatrices,
    head_product,
    narrow_rows,
)
from mlx_moeflux.kernels.mla.latent_prepare import latent_prepare, prepare_workload
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launch_args import filled, on_the_device
from mlx_moeflux.kernels.runtime.launcher import MetalKernel


class References:
    """The steps in plain MLX."""

    latent_prepare = staticmethod(latent_prepare)
    head_product = staticmethod(head_product)
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
    steps: Any = References,
) -> tuple[mx.array, mx.array, Pair]:
    """Operation by operation, each as `steps` computes it."""
    nope, rotary, new, key = steps.latent_prepare(
        q, kv, norm=norm, eps=eps, frequencies=frequencies, offset=offset, factor=factor,
        interleaved=interleaved,
    )  # fmt: skip
    tail = steps.append_row(tail, new, key, position=position)
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


def latent_step_fused(
    q,
    kv,
    tail,
    matrices,
    *,
    norm,
    eps,
    frequencies,
    offset,
    position,
    factor=1.0,
    interleaved=False,
    transposed=False,
    steps=References,
):
    """:func:`latent_step` in one launch. `steps` plays no part.

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
    launch = _launch(
        q.shape, kv.shape, tail[0].shape, tail[1].shape, norm.shape, frequencies.shape[0],
        matrices.weight.shape, layout, matrices.first, matrices.count, q.dtype,
    )  # fmt: skip
    template = launch["template"] | {"INTERLEAVED": interleaved}
    q_latent, rotary, *new = _KERNEL(
        q, kv, norm, frequencies.astype(mx.float32), filled(eps, factor),
        offsets(offset, q.shape[0]), on_the_device(position), *tail, *arrays_of(matrices),
        **launch | {"template": template},
    )  # fmt: skip
    return q_latent, rotary, tuple(new)


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
) -> dict[str, Any]:
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
    simdgroups = NARROW_SIMDGROUPS
    each = -(-R // (simdgroups * narrow["ROWS"]))
    others, copies = -(-(H + 1) // simdgroups), -(-rows * max(R, Dr) // pack // (32 * simdgroups))
    template |= {"OTHERS": others, "COPIES": copies, "EACH": each, "OUT": R}
    return {
        "template": template | {"SIMDGROUPS": simdgroups},
        "grid": ((others + copies + each * H) * simdgroups * 32, B, 1),
        "threadgroup": (simdgroups * 32, 1, 1),
        "output_shapes": [(B, H, 1, R), (B, H, 1, Dr), latents, keys],
        "output_dtypes": [dtype] * 4,
    }


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    arrays, options = prepare_workload(s, 1, x)
    tail = x(s.B, 1, s.tail, s.latent), x(s.B, 1, s.tail, s.Dr)
    matrices = HeadMatrices(*examples.quantised(s, x, s.heads, s.latent, s.Dn), s.spec, 0, s.latent)
    position = mx.array([s.tail + 3], dtype=mx.int32)
    return (*arrays, tail, matrices), options | {"position": position}


LATENT_STEP = Operation(
    name="latent_step",
    reference=latent_step,
    others={"fused": Implementation(latent_step_fused, kernels=(_KERNEL,))},
    size=None,
    replaces=("latent_prepare", "append_row", "head_product"),
    composed=True,
    proof=Proof(example=_workload, workloads={"": _workload}, shrunk=("kv",)),
)
