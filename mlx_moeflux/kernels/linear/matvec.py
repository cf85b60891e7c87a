"""``project`` for a few rows, each on its own: one launch for all matrices of an input.

The formula and shapes are those of :mod:`mlx_moeflux.kernels.linear.project`. A row's sums have one
rounding, at the end, and its bits do not depend on the rows that share a matrix's read with it. How
rows of a matrix are laid out is shared with other kernels of one row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, product
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.quantised import (
    FLOATS,
    Matrix,
    matrix_of,
    staged_floats,
    three_arrays_of,
)
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, float_bits, most_bytes, most_threads

# Rows of a matrix for each simdgroup, and simdgroups for each threadgroup, where rows of x are kept
# on the chip.
ROWS, SIMDGROUPS = 4, 4
# From this width on simdgroups share the columns instead, and a threadgroup has so many rows that
# all threadgroups run together (docs/notes/kernels.md).
WIDE = 4096
# So do rows of these widths, of which lanes take half as much (1536 -> 24576: 10.4 against 15.2;
# 2048 -> 12352: no difference).
MIDDLE = range(1536, 2048)
# Rows of a matrix in blocks for each simdgroup: half as many where there are fewer than FEW_ROWS,
# but not of NARROW columns or less, of which lanes take several rows at a time.
BLOCK_ROWS, FEW_ROWS, NARROW = 4, 4096, 512
# Floats of threadgroup memory for sums of squares.
SQUARES = 32
# Columns of a simdgroup, of wide rows and of the others.
WIDE_COLUMNS, MIDDLE_COLUMNS = 1024, 512
# Rows at a time, and threadgroups that run together: AT_ONCE simdgroups for each of PROCESSORS, or
# MIDDLE_AT_ONCE for rows of middle widths. More simdgroups than MOST_SIMDGROUPS have too few
# registers: one for each of a lane's columns and some 70 more; with twice the columns MOST_OF_TWO.
# A back end may allow fewer.
TOGETHER, PROCESSORS, AT_ONCE, MIDDLE_AT_ONCE = 4, 132, 18, 24
MOST_SIMDGROUPS, MOST_OF_TWO = 18, 14
# Rows of x that share a read of a matrix, in threadgroup memory and in registers, in launches that
# have so many threadgroups without more for each row (docs/notes/kernels.md).
MOST_STAGED, MOST_KEPT, ENOUGH_GROUPS = 3, 2, PROCESSORS


def tiling(
    matrix: Matrix, out: int, width: int, dtype: mx.Dtype, threads: int, rows: int | None = None
) -> tuple[int, dict[str, int], int]:
    """Lay out ``rows_of`` in matvec.metal for a matrix ``[out, width]``: threadgroups, template
    arguments, floats of threadgroup memory.

    dtype: Of x. threads: Most threads of a threadgroup. rows: Number of rows of which those are a
        part; by default `out`.

    Raises:
        UnsupportedError: The rows are too wide.
    """
    simdgroups = simdgroups_of(width, threads)
    if matrix.block:
        own = block_rows(out, width)
        tile = {"BITS": matrix.bits, "GROUP": matrix.group, "V": 1, "ROWS": own, "SPLIT": 0}
        return -(-out // (own * simdgroups)), tile, SQUARES
    tile = {"BITS": matrix.bits, "GROUP": matrix.group}
    if shares_columns(width):
        tile["V"] = words_at_once(matrix, width, 16 if width >= WIDE else 8)
        middle = width < WIDE
        own, together = rows_at_once(matrix, out, dtype, rows or out, simdgroups, middle)
        tile |= {"ROWS": own, "SPLIT": together}
        return out // own, tile, SQUARES + own * simdgroups
    own, words = math.gcd(ROWS, out), matrix.access(width, 16)
    tile |= {"ROWS": own, "SPLIT": 0, "V": words}
    return -(-out // (own * simdgroups)), tile, SQUARES + sum(staged_floats(matrix, words, width))


def rows_together(rows: int, width: int, groups: int, simdgroups: int, floats: int) -> int:
    """Return how many of `rows` rows of x read a matrix together, a divisor of them.

    width: Of a row. groups: Threadgroups. simdgroups, floats: Of a threadgroup, and its memory for
        one row.
    """
    most = MOST_STAGED if groups >= ENOUGH_GROUPS else 1
    if shares_columns(width):
        most = min(most, MOST_KEPT if width <= simdgroups * WIDE_COLUMNS else 1)
    most = max(1, min(most, most_bytes() // (4 * floats)))
    return max(together for together in range(1, most + 1) if rows % together == 0)


def block_rows(out: int, width: int) -> int:
    """Return how many of `out` rows in blocks a simdgroup computes: a power of two."""
    most = math.gcd(BLOCK_ROWS, out)
    return most if out >= FEW_ROWS or width <= NARROW else max(1, most // 2)


@functools.cache
def rows_at_once(
    matrix: Matrix, out: int, dtype: mx.Dtype, rows: int, simdgroups: int, middle: bool = False
) -> tuple[int, int]:
    """Return how many of `out` rows a threadgroup owns, so that all threadgroups of `rows` run
    together and none owns more rows than it has threads; and how many rows it computes together for
    x of `dtype`: float32 takes more registers. middle: The rows are of middle width."""
    together = TOGETHER // (2 if dtype == mx.float32 else 1) if matrix.bits else 1
    step, most = math.gcd(together, out), 32 * simdgroups
    groups = (MIDDLE_AT_ONCE if middle else AT_ONCE) // simdgroups
    least = -(-rows // (PROCESSORS * max(1, groups)))
    known = [own for own in range(step, most + 1, step) if out % own == 0]
    return next((own for own in known if own >= least), known[-1]), step


def words_at_once(matrix: Matrix, width: int, most: int = 16) -> int:
    """Return the words that a lane reads together if it keeps its share of x, at most 32 columns,
    in registers."""
    return matrix.access(width, most // 2 if matrix.bits == 2 else most)


def shares_columns(width: int) -> bool:
    """Return True if simdgroups share the columns of rows of `width`."""
    return width >= WIDE or width in MIDDLE


@functools.cache
def simdgroups_of(width: int, threads: int) -> int:
    """Simdgroups for each threadgroup, which may have so many threads; what is summed in which
    order depends on them, and so on `width` and the back end alone.

    Raises:
        UnsupportedError: The rows are too wide.
    """
    if not shares_columns(width):
        return SIMDGROUPS
    parts = -(-width // (WIDE_COLUMNS if width >= WIDE else MIDDLE_COLUMNS))
    if parts <= min(MOST_SIMDGROUPS, threads // 32):
        return parts
    if parts > 2 * min(MOST_OF_TWO, threads // 32):
        raise UnsupportedError(f"kernels take no rows of {width} columns.")
    return -(-parts // 2)


# Of a matrix: how it is stored, the widths of its results, whether they are precise.
Part = tuple[Matrix, tuple[int, ...], bool]


class Call(NamedTuple):
    """The properties of a call that decide its launch. eps: None without a norm. residual: True if
    one is added. end: See :func:`_kernel`."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    eps: float | None
    residual: bool
    end: str
    parts: tuple[Part, ...]

    def template(self) -> dict[str, Any]:
        """The template arguments that say which terms there are."""
        return {
            **{"IN": self.shape[-1], "FORM": int(self.eps is not None)},
            **{"RESIDUAL": self.residual, "EPSILON": float_bits(self.eps or 0.0)},
        }


def project_fused(
    x, weights, *, norm=None, eps=1e-6, residual=None, normed=False, flat=False
) -> list[mx.array]:
    """The module's formula in one launch for a few rows, each on its own, with one rounding, at
    the end, for the combinations of matrices in STRUCTURES.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: There is no kernel for so many matrices, or for how one is stored, or
            there is no GPU.
    """
    end = "normed" if normed else ""
    known = {"flat": flat, "of_blocks": _OF_BLOCKS}
    kernel, weights, call = chosen(_KERNELS, x, weights, end, norm, eps, residual, **known)
    launch = _launch(call, most_threads())
    return kernel(*operands(kernel, x, weights, norm, residual), **launch)


def project_joined(
    x: mx.array, weights: Sequence[Weight], *, norm: mx.array, eps: float
) -> mx.array:
    """Compute the results of :func:`project_fused` with `normed` for x of N rows, as one array
    ``[N, stride]`` in the dtype of x; see :func:`joined_places`.

    Raises:
        ShapeError, UnsupportedError: As :func:`project_fused`.
    """
    known = {"flat": True, "of_blocks": _OF_BLOCKS}
    kernel, weights, call = chosen(_KERNELS, x, weights, "joined", norm, eps, **known)
    if any(precise for *_, precise in call.parts):
        raise UnsupportedError("results that lie in one row have one dtype.")
    launch = _launch(call, most_threads())
    return kernel(*operands(kernel, x, weights, norm, None), **launch)[0]


def chosen(
    kernels: Mapping[tuple[tuple[int, ...], str], MetalKernel],
    x: mx.array,
    weights: Sequence[Weight],
    end: str,
    norm: mx.array | None,
    eps: float,
    residual: mx.array | None = None,
    *,
    flat: bool,
    of_blocks: Mapping[tuple[tuple[int, ...], str], MetalKernel] = MappingProxyType({}),
) -> tuple[MetalKernel, Sequence[Weight], Call]:
    """Return the kernel of `kernels`, by structure and end, for a call, or of `of_blocks` if it has
    matrices in blocks; its matrices, split where no kernel takes them whole; and what a launch
    depends on.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: There is none for so many matrices, or for the storage of one.
    """
    C = x.shape[-1]
    if not x.size or x.dtype not in FLOATS or (norm is not None and norm.shape != (C,)):
        raise ShapeError(f"x is {x.dtype} {list(x.shape)}, which does not fit the norm's weight.")
    parts = tuple((matrix_of(w, C, blocks=True), w.results, w.precise) for w in weights)
    in_blocks = any(matrix.block for matrix, *_ in parts)
    if in_blocks:
        kernels = of_blocks
    structure = tuple(len(outs) for _, outs, _ in parts)
    if residual is not None and (
        structure != (1,)
        or residual.shape != (*x.shape[:-1], parts[0][1][0])
        or residual.dtype != x.dtype
    ):
        raise ShapeError(f"residual {list(residual.shape)} does not fit the matrices {parts}.")
    if (structure, end) not in kernels and max(structure, default=1) > 1:
        split = [part for weight in weights for part in weight.split()]
        return chosen(kernels, x, split, end, norm, eps, flat=flat, of_blocks=of_blocks)
    kernel = kernels.get((structure, end))
    if kernel is None or (end and (norm is None or residual is not None)):
        given = f"{'without' if norm is None else 'with'} a norm{end and ', ' + end}"
        raise UnsupportedError(
            f"no kernel takes matrices by {structure} {given}; take the reference "
            "(MOEFLUX_KERNELS=project=reference)."
        )
    if in_blocks:
        stored = (f"in_blocks<{m.block}>" if m.block else "in_words" for m, *_ in parts)
        kernel = kernel.using(**{f"B{i}": of for i, of in enumerate(stored)})
    shape, known = (x.size // C, C) if flat else x.shape, None if norm is None else eps
    return kernel, weights, Call(shape, x.dtype, known, residual is not None, end, parts)


def operands(
    kernel: MetalKernel,
    x: mx.array,
    weights: Sequence[Weight],
    norm: mx.array | None,
    residual: mx.array | None,
    *more: mx.array,
) -> list[mx.array]:
    """The inputs as :func:`declared` names them; x stands where there is no norm, or residual."""
    inputs = [x, *more, x if norm is None else norm]
    if "residual" in kernel.inputs:
        inputs.append(x if residual is None else residual)
    return inputs + [array for weight in weights for array in three_arrays_of(weight)]


def declared(name: str, structure: tuple[int, ...], end: str, *more: str) -> dict[str, Any]:
    """Name, inputs and outputs of a kernel; more: inputs behind x."""
    residual = ("residual",) * (structure == (1,) and not end)
    matrices = (f"{p}{m}" for m in range(len(structure)) for p in ("w", "scales", "biases"))
    outputs = [f"y{i}" for i in range(sum(structure))] + ["normed"] * (end == "normed")
    return {
        "name": "_".join([name, *map(str, structure), *filter(None, [end])]),
        "inputs": ("x", *more, "norm", *residual, *matrices),
        "outputs": ["y"] if end == "joined" else outputs,
    }


def added_to(structure: tuple[int, ...], end: str) -> str:
    """Return the argument for the residual of a call in a body."""
    return "residual" if structure == (1,) and not end else "x"


def joined_places(
    parts: Sequence[tuple[Matrix, tuple[int, ...]]], C: int
) -> tuple[tuple[int, ...], int]:
    """Return where the results of the matrices and then norm(x) ``[C]`` begin in a row, and where
    the last one ends. A result whose width is a multiple of eight begins at such a multiple."""
    widths = [*(out for _, outs in parts for out in outs), C]
    places, end = [0] * len(widths), 0
    for i in sorted(range(len(widths)), key=lambda i: widths[i] % 8 != 0):
        places[i] = end
        end += widths[i]
    return tuple(places), end


def joined_stride(end: int) -> int:
    """Return the distance between rows."""
    return -(-end // 8) * 8


# How many results each of the matrices of a launch gives.
STRUCTURES = ((1,), (2,), (3,), (4,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 2))
# Those of a MoE block: router, and two of a shared expert, with or without its score.
ENTRIES = ((1,), (4,), (1, 2), (2, 2), (1, 1, 1, 1))
# Where some are in blocks, each is a matrix of its own.
ALONE, ENTRIES_ALONE = ((1,), (1,) * 2, (1,) * 3, (1,) * 4), ((1,), (1,) * 3, (1,) * 4)


def _kernel(structure: tuple[int, ...], end: str, *, blocks: bool = False) -> MetalKernel:
    """The kernel of a structure: threadgroups are dealt out among the results.

    blocks: The storage of each matrix is a type, see block_matvec.metal.
    end: "normed" gives norm(x) too, "joined" writes all results and norm(x) into one array, where
    :func:`joined_places` says.
    """
    body = """
        threadgroup float memory[MEMORY];
        uint group = threadgroup_position_in_grid.x;
        uint token = threadgroup_position_in_grid.y * TOKENS;
        uint simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
    """
    if end:
        # First: it must not be the last to end.
        place, stride = ("normed", "IN") if end == "normed" else ("y + AT", "STRIDE")
        last = ""
        if end == "joined":
            last = "clear_rest<END, STRIDE>(y + (token + t) * STRIDE, simdgroup * 32 + lane);"
        body += f"""
            if (group == 0) {{
                for (int t = 0; t < TOKENS; ++t) {{
                    norm_row<SIMDGROUPS, IN>(
                        x, norm, as_type<float>(EPSILON), {place}, memory + 32 * t, {stride},
                        token + t, simdgroup, lane);
                    {last}
                }}
                return;
            }}
            --group;
        """
    places = [f"y + AT{i}" if end == "joined" else f"y{i}" for i in range(sum(structure))]
    call = functools.partial(_call, added_to(structure, end), end == "joined", blocks)
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
    if blocks:
        known = declared("project_blocks", structure, end)
        return MetalKernel(**known, file="block_matvec.metal", body=body)
    return MetalKernel(**declared("project", structure, end), file="matvec.metal", body=body)


def _call(
    added: str, joined: bool, blocks: bool, m: int, i: int, y: str, group: str, rows: str = ""
) -> str:
    """Result i, of matrix m; rows: by how many its matrix begins later."""
    steps = {"w": f"per_word<BITS{m}>()", "scales": f"GROUP{m}", "biases": f"GROUP{m}"}
    arrays = [f"{p}{m}" + (f" + {rows} * (IN / {n})" if rows else "") for p, n in steps.items()]
    function = f"B{m}::multiply<" if blocks else "norm_matvec<TOKENS, "
    return f"""
        {function}ROWS{i}, SIMDGROUPS, IN, BASE{i}, OUT{i}, BITS{m}, GROUP{m}, V{m}, SPLIT{m},
                    EXACT, FORM, RESIDUAL>(
            x, norm, as_type<float>(EPSILON), {added}, {", ".join(arrays)}, {y}, memory,
            {"STRIDE" if joined else f"OUT{i}"}, token, {group}, simdgroup, lane);
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


_KEYS = (*product(STRUCTURES, [""]), *product(ENTRIES, ["normed", "joined"]))
_KERNELS = {key: _kernel(*key) for key in _KEYS}
_KEYS_OF_BLOCKS = (*product(ALONE, [""]), *product(ENTRIES_ALONE, ["normed", "joined"]))
_OF_BLOCKS = {key: _kernel(*key, blocks=True) for key in _KEYS_OF_BLOCKS}
KERNELS = (*_KERNELS.values(), *_OF_BLOCKS.values())


def joining() -> tuple[MetalKernel, ...]:
    """The kernels of :func:`project_joined`."""
    every = (*_KERNELS.items(), *_OF_BLOCKS.items())
    return tuple(kernel for key, kernel in every if key[1] == "joined")


@functools.lru_cache(maxsize=256)
def _launch(call: Call, threads: int) -> dict[str, Any]:
    (*leading, C), dtype, end = call.shape, call.dtype, call.end
    simdgroups = simdgroups_of(C, threads)
    template = call.template() | {"EXACT": dtype == mx.float32, "SIMDGROUPS": simdgroups}
    groups, most, shapes, dtypes = 0, 0, [], []
    for m, (matrix, outs, precise) in enumerate(call.parts):
        for out, last in zip(outs, accumulate(outs), strict=True):
            own, tile, memory = tiling(matrix, out, C, dtype, threads, sum(outs))
            groups += own
            most = max(most, memory)
            i = len(shapes)
            template |= {f"ROWS{i}": tile["ROWS"], f"BASE{i}": last - out}
            template |= {f"OUT{i}": out, f"GROUPS{i}": own}
            template |= {f"{name}{m}": tile[name] for name in ("BITS", "GROUP", "V", "SPLIT")}
            shapes.append((*leading, out))
            dtypes.append(mx.float32 if precise else dtype)
    normed = bool(end)
    shapes += [call.shape] * normed
    if end == "joined":
        (*places, last), width = joined_places([part[:2] for part in call.parts], C)
        template |= {f"AT{i}": place for i, place in enumerate(places)}
        template |= {"AT": last, "END": width, "STRIDE": joined_stride(width)}
        shapes, dtypes = [(*leading, joined_stride(width))], []
    rows = math.prod(leading)
    in_blocks = any(matrix.block for matrix, *_ in call.parts)
    together = 1 if in_blocks else rows_together(rows, C, groups, simdgroups, most)
    template |= {"TOKENS": together, "MEMORY": together * most}
    dtypes += [dtype] * normed
    return launch_of(
        template, (groups + normed, rows // together), 32 * simdgroups, shapes, *dtypes
    )
