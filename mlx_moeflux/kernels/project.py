"""RMS norm and the products of rows with several matrices of the same input.

    y_i[n] = (residual[n] +) w_i norm(x[n]),   norm(x) = weight x / sqrt(mean x^2 + eps)

Shapes:
    x: ``[..., C]``; norm: ``[C]`` or None (x is taken as it is); weights: matrices
    ``[out_i, C]``, quantised each in its own way or not, or several that lie one behind another;
    residual: ``[..., out]`` like x or None, with one matrix only.
    returns: a list of ``[..., out_i]`` in the dtype of x (float32 where a weight is `precise`),
    and with `normed` norm(x) ``[..., C]`` behind them; with `flat` all of them ``[N, ...]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.dequantise import made_dense
from mlx_moeflux.kernels.metal import (
    MetalKernel,
    float_bits,
    launches,
    most_threads,
    on_nvidia,
)
from mlx_moeflux.kernels.quantised import FLOATS, Matrix, arrays_of, matrix_of
from mlx_moeflux.kernels.structures import before_and_after, chosen, declared, operands
from mlx_moeflux.kernels.tiling import simdgroups_of, tiling

# Bytes of a matrix that are dense at a time, in rows that are a multiple of this: where a result's
# rows do not begin at multiples of 16 bytes, cuBLAS takes a kernel of a third of the speed.
MOST_DENSE, ROWS_AT_ONCE = 256 * 2**20, 128


@dataclass(frozen=True)
class Weight:
    """A matrix ``[out, in]``; see :class:`~mlx_moeflux.kernels.expert_ffn.ProjectionBank`.

    outs: Rows of each, where several matrices lie one behind another. precise: What it gives is
    computed in float32 and stays so.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    spec: QuantSpec | None = None
    outs: tuple[int, ...] = ()
    precise: bool = False

    @property
    def results(self) -> tuple[int, ...]:
        """Widths of what it gives."""
        return self.outs or (self.weight.shape[0],)

    def stored(self) -> dict[str, mx.array]:
        """Its arrays by name."""
        named = {"weight": self.weight, "scales": self.scales, "biases": self.biases}
        return {name: array for name, array in named.items() if array is not None}

    def matmul(self, x: mx.array) -> mx.array:
        """x ``[..., in]`` -> ``[..., out]``."""
        x = x.astype(mx.float32) if self.precise else x
        if self.spec is None:
            return x @ self.weight.T
        group, scales, biases = self.spec.group_size, self.scales, self.biases
        if group == x.shape[-1] and group > 32 and biases is not None and on_nvidia():
            # Of rows of one group MLX 0.32.4 gives wrong products there (supports_qmm_sm90 in
            # backend/cuda/quantized/qmm/qmm.cu takes these instead of all others).
            # The same numbers in groups half as wide take another.
            group = group // 2
            scales, biases = (mx.contiguous(mx.repeat(a, 2, 1)) for a in (scales, biases))
        return mx.quantized_matmul(
            x,
            self.weight,
            scales,
            biases,
            transpose=True,
            group_size=group,
            bits=self.spec.bits,
            mode=self.spec.mode,
        )

    def rows(self, first: int, last: int) -> Weight:
        """Rows first .. last - 1 of it."""
        parts = {name: array[first:last] for name, array in self.stored().items()}
        return replace(self, **parts, outs=())

    def dense(self, dtype: mx.Dtype) -> mx.array:
        """``[out, in]`` in `dtype`."""
        return made_dense(self, dtype)


@dataclass(frozen=True)
class Dense:
    """Rows first .. last - 1 of a matrix, made dense when they are used, MOST_DENSE bytes at a
    time: of one of 250,000 rows no more need be there at once."""

    stored: Weight
    first: int
    last: int

    def matmul(self, x: mx.array) -> mx.array:
        """x ``[..., in]`` -> ``[..., last - first]``."""
        step = max(1, MOST_DENSE // (x.shape[-1] * x.itemsize * ROWS_AT_ONCE)) * ROWS_AT_ONCE
        parts = [
            x @ self.stored.rows(start, min(start + step, self.last)).dense(x.dtype).T
            for start in range(self.first, self.last, step)
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def project(
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    normed: bool = False,
    flat: bool = False,
) -> list[mx.array]:
    """The module's formula in stock MLX. Of a weight nothing is asked but ``matmul``."""
    if flat:
        x = x.reshape(-1, x.shape[-1])
    if norm is not None:
        x = mx.fast.rms_norm(x, norm, eps)
    products = []
    for weight in weights:
        y = weight.matmul(x).astype(mx.float32 if _precise(weight) else x.dtype)
        outs = getattr(weight, "outs", ())
        products += mx.split(y, list(accumulate(outs))[:-1], axis=-1) if outs else [y]
    if residual is not None:
        products = [residual + products[0]]
    return [*products, x] if normed else products


def _precise(weight: Any) -> bool:
    return getattr(weight, "precise", False)


def project_dequantised(
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    normed: bool = False,
    flat: bool = False,
) -> list[mx.array]:
    """:func:`project` with matrices made dense first: for many rows the cheaper way on GPUs. Not
    for float32, of which dense products on NVIDIA keep 11 bits (TF32)."""
    dense = weights
    if x.dtype != mx.float32:
        dense = [part for weight in weights for part in _made_dense(weight, x.dtype)]
    return project(x, dense, norm=norm, eps=eps, residual=residual, normed=normed, flat=flat)


def _made_dense(weight: Any, dtype: mx.Dtype) -> list[Any]:
    """A matrix for each of its results, which are arrays of their own, if it is quantised: all in
    one launch, or, of a large one, each when it is used."""
    if not isinstance(weight, Weight) or weight.spec is None or weight.precise:
        return [weight]
    width, ends = weight.scales.shape[-1] * weight.spec.group_size, [*accumulate(weight.results)]
    if ends[-1] * width * dtype.size > MOST_DENSE:
        starts = [0, *ends]
        return [Dense(weight, *rows) for rows in zip(starts, ends, strict=False)]
    dense = weight.dense(dtype)
    return [Weight(rows) for rows in (mx.split(dense, ends[:-1]) if ends[1:] else [dense])]


def project_fused(
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    normed: bool = False,
    flat: bool = False,
) -> list[mx.array]:
    """The module's formula in one launch for a few rows, each on its own, with one rounding, at
    the end, for the combinations of matrices in STRUCTURES.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: There is no kernel for so many matrices, or for how one is stored, or
            there is no GPU.
    """
    kernel, ends, parts = chosen(_KERNELS, x, weights, norm=norm, residual=residual, normed=normed)
    shape = (x.size // x.shape[-1], x.shape[-1]) if flat else x.shape
    launch = _launch(shape, x.dtype, None if norm is None else eps, ends, parts, most_threads())
    return kernel(x, *operands(weights, norm, residual), **launch)


def project_joined(
    x: mx.array, weights: Sequence[Weight], *, norm: mx.array, eps: float
) -> mx.array:
    """What :func:`project_fused` gives for x of N rows with `normed`, in one array ``[N, stride]``
    in the dtype of x; see :func:`joined_places`.

    Raises:
        ShapeError, UnsupportedError: As there.
    """
    C = x.shape[-1]
    if not x.size or x.dtype not in FLOATS or norm.shape != (C,):
        raise ShapeError(f"x is {x.dtype} {list(x.shape)}, which does not fit the norm's weight.")
    parts = tuple((matrix_of(w, C), w.results) for w in weights)
    key = tuple(len(outs) for _, outs in parts), True, "joined"
    if any(w.precise for w in weights):
        raise UnsupportedError("results that lie in one row have one dtype.")
    if key not in _KERNELS:
        raise UnsupportedError(f"no kernel joins the results of matrices by {key[0]}.")
    arrays = [array for weight in weights for array in arrays_of(weight)]
    common = tuple((*part, False) for part in parts)
    launch = _launch((x.size // C, C), x.dtype, eps, "joined", common, most_threads())
    return _KERNELS[key](x, norm, *arrays, **launch)[0]


def joined_places(
    parts: Sequence[tuple[Matrix, tuple[int, ...]]], C: int
) -> tuple[tuple[int, ...], int]:
    """Where the results of the matrices and then norm(x) ``[C]`` begin in a row, and where the last
    one ends. Those whose width is a multiple of eight begin at one."""
    widths = [*(out for _, outs in parts for out in outs), C]
    places, end = [0] * len(widths), 0
    for i in sorted(range(len(widths)), key=lambda i: widths[i] % 8 != 0):
        places[i] = end
        end += widths[i]
    return tuple(places), end


def joined_stride(end: int) -> int:
    """How far apart rows are."""
    return -(-end // 8) * 8


# How many results each of the matrices of a launch gives.
STRUCTURES = ((1,), (2,), (3,), (4,), (1, 1), (1, 2), (2, 1), (1, 1, 1), (1, 1, 1, 1), (2, 2))
# Those of a MoE block: router, score, and two of the shared expert.
ENTRIES = ((1,), (2,), (4,), (1, 1), (1, 2), (2, 2), (1, 1, 1, 1))
# Without a norm: one matrix, and two of a shared expert.
BARE = ((1,), (2,), (1, 1))


def _kernel(structure: tuple[int, ...], norm: bool, ends: str) -> MetalKernel:
    """The kernel of a structure: threadgroups are dealt out among the results.

    ends: "normed" gives norm(x) too, "residual" adds one to the one result, "joined" writes all
    results and norm(x) into one array, where :func:`joined_places` says.
    """
    body = """
        threadgroup float memory[MEMORY];
        uint group = threadgroup_position_in_grid.x, token = threadgroup_position_in_grid.y;
        uint simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
    """
    if ends in ("normed", "joined"):
        # First: it must not be the last to end.
        place = "normed, memory, IN" if ends == "normed" else "y + AT, memory, STRIDE"
        last = ""
        if ends == "joined":
            last = "clear_rest<END, STRIDE>(y + token * STRIDE, simdgroup * 32 + lane);"
        body += f"""
            if (group == 0) {{
                norm_row<SIMDGROUPS, IN>(
                    x, norm, as_type<float>(EPSILON), {place}, token, simdgroup, lane);
                {last}
                return;
            }}
            --group;
        """
    places = [f"y + AT{i}" if ends == "joined" else f"y{i}" for i in range(sum(structure))]
    call = functools.partial(_call, before_and_after(norm, ends), ends == "joined")
    first = 0
    for m, count in enumerate(structure):
        results = range(first, first + count)
        first += count
        last = first == len(places)
        apart, group = "", "group"
        for i in results:
            ours = "" if last and i == results[-1] else f"if ({group} < GROUPS{i})"
            apart += f"{ours} {{ {call(m, i, places[i], group)} return; }}"
            group += f" - GROUPS{i}"
        if count == 2:
            i, j = results
            both = _as_one(m, i, j, f"(second ? {places[j]} : {places[i]})", call)
            both = both if last else f"if (group < 2 * GROUPS{i}) {{ {both} }}"
            apart = f"if (OUT{i} == OUT{j}) {{ {both} }} else {{ {apart} }}"
        body += apart + ("" if last else f"group = {group};")
    return MetalKernel(**declared("project", structure, norm, ends), file="matvec.metal", body=body)


def _call(own: str, joined: bool, m: int, i: int, y: str, group: str, rows: str = "") -> str:
    """Result i, of matrix m; rows: by how many its matrix begins later."""
    steps = {"w": f"per_word<BITS{m}>()", "scales": f"GROUP{m}", "biases": f"GROUP{m}"}
    arrays = [f"{p}{m}" + (f" + {rows} * (IN / {n})" if rows else "") for p, n in steps.items()]
    return f"""
        norm_matvec<ROWS{i}, SIMDGROUPS, IN, BASE{i}, OUT{i}, BITS{m}, GROUP{m}, V{m}, SPLIT{m},
                    EXACT, FORM, RESIDUAL>(
            x, {own}, {", ".join(arrays)}, {y}, memory, {"STRIDE" if joined else f"OUT{i}"},
            token, {group}, simdgroup, lane);
    """


def _as_one(m: int, i: int, j: int, y: str, call: Callable[..., str]) -> str:
    """Results i and j of equal width: their loop is there once (7168 -> 18432 twice: 17 KB of
    machine code on NVIDIA instead of 30, compiled in two thirds of the time, 0.2 us less on an
    H100)."""
    return f"""
        const bool second = group >= GROUPS{i};
        const ulong rows = second ? OUT{i} : 0;
        {call(m, i, y, f"second ? group - GROUPS{i} : group", "rows")}
        return;
    """


_KERNELS = {
    key: _kernel(*key)
    for key in (
        *((structure, True, "") for structure in STRUCTURES),
        *((structure, True, ends) for structure in ENTRIES for ends in ("normed", "joined")),
        *((structure, False, "") for structure in BARE),
        ((1,), False, "residual"),
    )
}
launches(*_KERNELS.values())(project_fused)


def joining() -> tuple[MetalKernel, ...]:
    """The kernels of :func:`project_joined`."""
    return tuple(kernel for key, kernel in _KERNELS.items() if key[2] == "joined")


@functools.lru_cache(maxsize=256)
def _launch(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    eps: float | None,
    ends: str,
    parts: tuple[tuple[Matrix, tuple[int, ...], bool], ...],
    threads: int,
) -> dict[str, Any]:
    *leading, C = shape
    simdgroups = simdgroups_of(C, threads)
    template = {"IN": C, "FORM": int(eps is not None), "RESIDUAL": ends == "residual"}
    if eps is not None:
        template["EPSILON"] = float_bits(eps)
    template |= {"EXACT": dtype == mx.float32, "SIMDGROUPS": simdgroups}
    groups, most, shapes, dtypes = 0, 0, [], []
    for m, (matrix, outs, precise) in enumerate(parts):
        for out, end in zip(outs, accumulate(outs), strict=True):
            own, tile, memory = tiling(matrix, out, C, dtype, threads, sum(outs))
            groups += own
            most = max(most, memory)
            i = len(shapes)
            template |= {f"ROWS{i}": tile["ROWS"], f"BASE{i}": end - out, f"OUT{i}": out}
            template |= {f"GROUPS{i}": own}
            template |= {f"{name}{m}": tile[name] for name in ("BITS", "GROUP", "V", "SPLIT")}
            shapes.append((*leading, out))
            dtypes.append(mx.float32 if precise else dtype)
    normed = ends in ("normed", "joined")
    shapes += [shape] * normed
    if ends == "joined":
        (*places, last), end = joined_places([part[:2] for part in parts], C)
        template |= {f"AT{i}": place for i, place in enumerate(places)}
        template |= {"AT": last, "END": end, "STRIDE": joined_stride(end)}
        shapes, dtypes = [(*leading, joined_stride(end))], []
    return {
        "template": template | {"MEMORY": most},
        "grid": ((groups + normed) * simdgroups * 32, math.prod(leading), 1),
        "threadgroup": (32 * simdgroups, 1, 1),
        "output_shapes": shapes,
        "output_dtypes": dtypes + [dtype] * normed,
    }
