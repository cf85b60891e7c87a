"""Launches on several matrices of one input: a kernel for each structure, which says how many
results each matrix gives, with or without a norm before, and for each end.

Ends: "normed" gives norm(x) too; "residual" adds one to the one result; "joined" writes all results
and norm(x) into one array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.metal import MetalKernel
from mlx_moeflux.kernels.quantised import FLOATS, Matrix, arrays_of, matrix_of

if TYPE_CHECKING:
    from mlx_moeflux.kernels.project import Weight


def chosen(
    kernels: Mapping[tuple[tuple[int, ...], bool, str], MetalKernel],
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None,
    residual: mx.array | None,
    normed: bool,
) -> tuple[MetalKernel, str, tuple[tuple[Matrix, tuple[int, ...], bool], ...]]:
    """Of `kernels`, by structure, norm and end, the one for a call; its end; and of each matrix how
    it is stored, the widths of its results, and whether they are precise.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: There is none for so many matrices, or for how one is stored.
    """
    C = x.shape[-1]
    if not x.size or x.dtype not in FLOATS or (norm is not None and norm.shape != (C,)):
        raise ShapeError(f"x is {x.dtype} {list(x.shape)}, which does not fit the norm's weight.")
    parts = tuple((matrix_of(w, C), w.results, w.precise) for w in weights)
    if residual is not None and (
        sum(len(outs) for _, outs, _ in parts) != 1
        or residual.shape != (*x.shape[:-1], parts[0][1][0])
        or residual.dtype != x.dtype
    ):
        raise ShapeError(f"residual {list(residual.shape)} does not fit the matrices {parts}.")
    ends = " and ".join(["residual"] * (residual is not None) + ["normed"] * normed)
    key = tuple(len(outs) for _, outs, _ in parts), norm is not None, ends
    kernel = kernels.get(key)
    if kernel is None:
        raise UnsupportedError(
            f"no kernel takes matrices by {key[0]}, {'with' if key[1] else 'without'} a norm "
            f"{ends and 'and ' + ends}; take the reference (MOEFLUX_KERNELS=project=reference)."
        )
    return kernel, ends, parts


def operands(
    weights: Sequence[Weight], norm: mx.array | None, residual: mx.array | None
) -> list[mx.array]:
    """The inputs behind x, as :func:`declared` names them."""
    arrays = [array for array in (norm, residual) if array is not None]
    return arrays + [array for weight in weights for array in arrays_of(weight)]


def declared(
    name: str, structure: tuple[int, ...], norm: bool, ends: str, *, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Name, inputs and outputs of a kernel; more: inputs behind x."""
    own = more + ("norm",) * norm + ("residual",) * (ends == "residual")
    matrices = (f"{p}{m}" for m in range(len(structure)) for p in ("w", "scales", "biases"))
    outputs = [f"y{i}" for i in range(sum(structure))] + ["normed"] * (ends == "normed")
    return {
        "name": "_".join([name, *map(str, structure), "" if norm else "bare", ends]).strip("_"),
        "inputs": ("x", *own, *matrices),
        "outputs": ["y"] if ends == "joined" else outputs,
    }


def before_and_after(norm: bool, ends: str) -> str:
    """What a call in a body says of the norm and of what is added."""
    own = "norm, as_type<float>(EPSILON)" if norm else "x, 0.0f"
    return own + (", residual" if ends == "residual" else ", x")
