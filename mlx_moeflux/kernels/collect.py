"""The ends of several arrays, written behind what is there already: what many steps leave can be
fetched at once, and no step is held up.

    y = (log, ends)[-n:];   ends[i count + j] = flat(array_i)[size - count + j]

Shapes:
    log: float32 ``[n]``; arrays: float32, of one shape, `count` numbers or more each, and together
    n or fewer that count.
    returns: float32 ``[n]``. Nothing is computed with the numbers: they may be the bits of others.
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
_THREADS = 256


def most_arrays() -> int:
    """How many arrays one launch takes here."""
    return MOST_ARRAYS.get(metal.backend().name, 20)


def collect(log: mx.array, arrays: Sequence[mx.array], *, count: int) -> mx.array:
    """The module's formula in stock MLX: a launch for each array."""
    ends = [array.reshape(-1)[array.size - count :] for array in arrays]
    return mx.concatenate([log[len(arrays) * count :], *ends])


def _body(arrays: int) -> str:
    parts = "".join(f"which == {i} ? a{i} : " for i in range(arrays - 1)) + f"a{arrays - 1}"
    return f"""
        const uint index = thread_position_in_grid.x, kept = LOG - {arrays} * COUNT;
        if (index < kept) {{
            y[index] = log[index + {arrays} * COUNT];
        }} else if (index < LOG) {{
            const uint which = (index - kept) / COUNT;
            y[index] = number_at<COUNT, START>({parts}, index - kept);
        }}
    """


def _names(arrays: int) -> tuple[str, ...]:
    return ("log", *(f"a{i}" for i in range(arrays)))


_KERNEL = MetalKernel(
    "collect", file="collect.metal", inputs=_names(20), outputs=("y",), body=_body(20)
)


@functools.cache
def _kernel(arrays: int) -> MetalKernel:
    """The kernel for so many: an input costs the host time at each launch."""
    if _names(arrays) == _KERNEL.inputs:
        return _KERNEL
    return _KERNEL.variant(f"collect_{arrays}", _names(arrays), _body(arrays))


@launches(_KERNEL)
def collect_fused(log: mx.array, arrays: Sequence[mx.array], *, count: int) -> mx.array:
    """The module's formula, :func:`most_arrays` in a launch.

    Raises:
        ShapeError: The arrays differ, are too small, too many or not float32.
        UnsupportedError: There is no GPU.
    """
    first = arrays[0]
    if any((a.shape, a.dtype) != (first.shape, mx.float32) for a in arrays):
        raise ShapeError(f"collect: arrays are {[(a.dtype, a.shape) for a in arrays]}.")
    if not 1 <= count <= first.size:
        raise ShapeError(f"collect: arrays {list(first.shape)} have no last {count} numbers.")
    if log.ndim != 1 or log.dtype != mx.float32 or log.size < len(arrays) * count:
        raise ShapeError(
            f"collect: log is {log.dtype} {list(log.shape)}; expected float32 and room for "
            f"{len(arrays)} times {count} numbers."
        )
    most = most_arrays()
    for start in range(0, len(arrays), most):
        some = arrays[start : start + most]
        (log,) = _kernel(len(some))(
            log,
            *some,
            template={"COUNT": count, "START": first.size - count, "LOG": log.size},
            grid=(-(-log.size // _THREADS) * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[log.shape],
            output_dtypes=[mx.float32],
        )
    return log
