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
from mlx_moeflux.kernels.metal import MetalKernel, launches

# Metal binds 31 arrays; 40 layers are two launches.
MOST_ARRAYS = 20
_THREADS = 64


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


_NAMES = tuple(f"a{i}" for i in range(MOST_ARRAYS))
_KERNEL = MetalKernel(
    "collect", file="collect.metal", inputs=_NAMES, outputs=("y",), body=_body(MOST_ARRAYS)
)


@functools.cache
def _kernel(arrays: int) -> MetalKernel:
    """The kernel for so many: an input costs the host time at each launch."""
    if arrays == MOST_ARRAYS:
        return _KERNEL
    return _KERNEL.variant(f"collect_{arrays}", _NAMES[:arrays], _body(arrays))


@launches(_KERNEL)
def collect_fused(arrays: Sequence[mx.array], *, count: int) -> mx.array:
    """The module's formula, 20 arrays in a launch.

    Raises:
        ShapeError: The arrays differ, are too small or not float32.
        UnsupportedError: There is no GPU.
    """
    first = arrays[0]
    if any((a.shape, a.dtype) != (first.shape, mx.float32) for a in arrays):
        raise ShapeError(f"collect: arrays are {[(a.dtype, a.shape) for a in arrays]}.")
    if not 1 <= count <= first.size:
        raise ShapeError(f"collect: arrays {list(first.shape)} have no last {count} numbers.")
    parts = []
    for start in range(0, len(arrays), MOST_ARRAYS):
        some = arrays[start : start + MOST_ARRAYS]
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
