"""The ends of several arrays in one: a host that fetches them waits once.

    y[i count + j] = flat(array_i)[size - count + j]

Shapes:
    arrays: float32, of one shape, `count` numbers or more each.
    returns: float32 ``[len(arrays) count]``. Nothing is computed with the numbers: they may be the
    bits of others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import metal
from mlx_moeflux.kernels.metal import MetalKernel, launches

# Of a launch. Metal binds 31; NVIDIA's kernels take addresses up to 4 kB.
MOST_ARRAYS = {"metal": 20, "cuda": 128}
_THREADS = 64


def most_arrays() -> int:
    """How many arrays one launch takes here."""
    return MOST_ARRAYS.get(metal.backend().name, 20)


def collect(arrays: Sequence[mx.array], *, count: int) -> mx.array:
    """The module's formula in stock MLX: a launch for each array."""
    return mx.concatenate([array.reshape(-1)[array.size - count :] for array in arrays])


def _body(arrays: int) -> str:
    parts = "".join(f"which == {i} ? a{i} : " for i in range(arrays - 1)) + f"a{arrays - 1}"
    return f"""
        const uint index = thread_position_in_grid.x, which = index / COUNT;
        if (index < {arrays} * COUNT) {{
            y[index] = number_at<COUNT, START>({parts}, index);
        }}
    """


def _names(arrays: int) -> tuple[str, ...]:
    return tuple(f"a{i}" for i in range(arrays))


_KERNEL = MetalKernel(
    "collect", file="collect.metal", inputs=_names(20), outputs=("y",), body=_body(20)
)


@functools.cache
def _kernel(arrays: int) -> MetalKernel:
    """The kernel for so many: an input costs the host time at each launch."""
    if arrays == len(_KERNEL.inputs):
        return _KERNEL
    return _KERNEL.variant(f"collect_{arrays}", _names(arrays), _body(arrays))


@launches(_KERNEL)
def collect_fused(arrays: Sequence[mx.array], *, count: int) -> mx.array:
    """The module's formula, :func:`most_arrays` in a launch.

    Raises:
        ShapeError: The arrays differ, are too small or not float32.
        UnsupportedError: There is no GPU.
    """
    first = arrays[0]
    if any((a.shape, a.dtype) != (first.shape, mx.float32) for a in arrays):
        raise ShapeError(f"collect: arrays are {[(a.dtype, a.shape) for a in arrays]}.")
    if not 1 <= count <= first.size:
        raise ShapeError(f"collect: arrays {list(first.shape)} have no last {count} numbers.")
    parts, most = [], most_arrays()
    for start in range(0, len(arrays), most):
        some = arrays[start : start + most]
        size = len(some) * count
        parts += _kernel(len(some))(
            *some,
            template={"COUNT": count, "START": first.size - count},
            grid=(-(-size // _THREADS) * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(size,)],
            output_dtypes=[mx.float32],
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
