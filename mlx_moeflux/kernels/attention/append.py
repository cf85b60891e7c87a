"""The newest rows of keys and values, with n rows more, n at most R.

    y[b, h, r] = row[b n + i, h] if r = (position + i) % R, i < n, else block[b, h, r]

Shapes:
    tail: keys and values ``[B, H, R, D]``; k, v: ``[B n, H, 1, D]``, n rows of each sequence;
    position: int32 ``[1]``, where the first of them stands in the sequence.
    returns: the two tails, new arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear.quantised import FLOATS
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launch_args import on_the_device
from mlx_moeflux.kernels.runtime.launcher import MetalKernel

Pair = tuple[mx.array, mx.array]


def append_row(tail: Pair, k: mx.array, v: mx.array, *, position: mx.array) -> Pair:
    """The module's formula in stock MLX."""
    B, H, R, _ = tail[0].shape
    count = k.shape[0] // B
    row = (mx.arange(R) - position) % R
    if count > 1:
        which = mx.minimum(row, count - 1)
        k, v = (mx.take(x.reshape(B, count, H, -1).swapaxes(1, 2), which, axis=2) for x in (k, v))
    own = (row < count)[:, None]
    return mx.where(own, k, tail[0]), mx.where(own, v, tail[1])


_KERNEL = MetalKernel(
    "append_row",
    file="append.metal",
    inputs=("block_k", "block_v", "k", "v", "position"),
    outputs=("new_k", "new_v"),
    body="""
        uint index = thread_position_in_grid.x;
        if (index < PACKS_K) {
            with_rows<T, H, R, DK, ROWS, N>(block_k, k, position, new_k, index);
        } else if (index < PACKS_K + PACKS_V) {
            with_rows<T, H, R, DV, ROWS, N>(block_v, v, position, new_v, index - PACKS_K);
        }
    """,
)
_THREADS = 256


def append_row_fused(tail, k, v, *, position):
    """The module's formula in one launch.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, or D is no multiple of 8.
        UnsupportedError: There is no GPU.
    """
    keys, values = tail
    options = _plan(keys.shape, values.shape, k.shape, v.shape, keys.dtype)
    if any(x.dtype != keys.dtype for x in (values, k, v)) or position.dtype != mx.int32:
        raise ShapeError(
            f"append_row: tails are {keys.dtype} and {values.dtype}, rows {k.dtype} and "
            f"{v.dtype}, the position {position.dtype}; expected one dtype, and int32."
        )
    return tuple(_KERNEL(keys, values, k, v, on_the_device(position), **options))


@functools.lru_cache(maxsize=256)
def _plan(keys, values, k, v, dtype):
    """Shapes -> launch, checked once for each."""
    B, H, R, Dk = keys
    Dv = values[3]
    count, rest = divmod(k[0], B)
    rows = k[0], H, 1
    fits = values[:3] == (B, H, R) and (k, v) == ((*rows, Dk), (*rows, Dv))
    if not fits or rest or not 0 < count <= R or Dk % 8 or Dv % 8:
        raise ShapeError(f"append_row: tails {keys} and {values} take no rows {k} and {v}.")
    if dtype not in FLOATS:
        raise ShapeError(f"append_row: tails are {dtype}.")
    N = 16 // dtype.size
    packs = [B * H * R * D // N for D in (Dk, Dv)]
    template = {"T": dtype, "H": H, "R": R, "ROWS": count, "DK": Dk, "DV": Dv, "N": N}
    return {
        "template": template | {"PACKS_K": packs[0], "PACKS_V": packs[1]},
        "grid": (-(-sum(packs) // _THREADS) * _THREADS, 1, 1),
        "threadgroup": (_THREADS, 1, 1),
        "output_shapes": [keys, values],
        "output_dtypes": [dtype, dtype],
    }


def _cases(example: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Yield also what steps of several rows of a sequence pass."""
    yield "one row", example
    (tail, k, v), options = example
    rows = tuple(mx.concatenate([x, 2 * x]) for x in (k, v))
    yield "two rows", ((tail, *rows), options)


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    tail, row = (x(s.B, s.Hkv, s.tail, s.Dh), x(s.B, s.Hkv, s.tail, s.Dhv)), (s.B, s.Hkv, 1)
    position = mx.array([2 * s.tail + 3], dtype=mx.int32)
    return (tail, x(*row, s.Dh), x(*row, s.Dhv)), {"position": position}


APPEND_ROW = Operation(
    name="append_row",
    reference=append_row,
    others={"fused": Implementation(append_row_fused, kernels=(_KERNEL,))},
    size=None,
    proof=Proof(example=_workload, workloads={"": _workload}, cases=_cases),
)
