"""``project`` for some dozens of rows: every weight is read once for up to 32.

The formula and shapes are those of :mod:`mlx_moeflux.kernels.linear.project`; ``add_shared`` and
``expert_mix`` use the same tiles. Weights, and x where a norm comes before, are rounded to the
dtype of x; products are summed in float32. What a row gets depends on nothing but the row: tokens
may be computed together or apart, without changing a bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.matvec import (
    ENTRIES,
    STRUCTURES,
    Call,
    added_to,
    chosen,
    declared,
    operands,
)
from mlx_moeflux.kernels.linear.quantised import Matrix
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, most_bytes

FLOATS = (mx.float16, mx.bfloat16)
# Threadgroups that a launch should have before one takes more rows.
ENOUGH_GROUPS, MOST_TILES = 264, 2
# Tokens of a threadgroup are 8, 16 or 32: as many as leave so many simdgroups
# (docs/notes/kernels.md).
MOST_TOKEN_TILES, ENOUGH_SIMDGROUPS = 4, 8 * 132


@dataclass(frozen=True)
class Tiling:
    """The layout of ``multiply_tile`` in small_batch.metal for a matrix: 16 `MT` rows a
    threadgroup, `V` words a read."""

    MT: int
    V: int
    matrix: Matrix

    def groups(self, out: int) -> int:
        return -(-out // (16 * self.MT))

    def arguments(self, name: str = "") -> dict[str, int]:
        """Template arguments, `name` behind each."""
        sizes = {"MT": self.MT, "BITS": self.matrix.bits, "GROUP": self.matrix.group, "V": self.V}
        return {key + name: value for key, value in sizes.items()}


def tiling(matrix: Matrix, outs: Sequence[int], width: int) -> Tiling:
    """Return the layout for a matrix ``[sum of outs, width]``.

    Raises:
        UnsupportedError: Its rows are no multiple of a step.
    """
    per = 32 // matrix.bits if matrix.bits else 1
    words = [1, 2, 4] if matrix.bits else [8]
    fitting = [v for v in words if 8 <= v * per <= matrix.group and width % (4 * v * per) == 0]
    if not fitting:
        raise UnsupportedError(f"rows of {width} numbers of {matrix.bits} bits have no steps here.")
    tiles = MOST_TILES if sum(outs) // (16 * MOST_TILES) >= ENOUGH_GROUPS else 1
    return Tiling(tiles, fitting[-1], matrix)


def token_tiles(tokens: int, simdgroups: int, most: int) -> int:
    """Tiles of 8 tokens that a threadgroup takes, `most` at most; simdgroups: of all that take the
    same ones."""
    tiles = min(1 << (-(-tokens // 8) - 1).bit_length(), most)
    while tiles > 1 and simdgroups * -(-tokens // (8 * tiles)) < ENOUGH_SIMDGROUPS:
        tiles //= 2
    return tiles


def simdgroups(width: int) -> int:
    """Simdgroups that share the columns of a matrix: it decides the order of a sum, so nothing
    else may."""
    return 8 if width >= 4096 else 4


@functools.lru_cache(maxsize=64)
def row_count(tokens: int) -> mx.array:
    array = mx.full((8,), tokens, mx.int32)
    mx.eval(array)
    return array


def partial_floats(tiles: int, NT: int, W: int) -> int:
    """Floats of threadgroup memory for the sums of all simdgroups."""
    return W * 8 * NT * (16 * tiles + 4)


def most_token_tiles(tiles: int, W: int, memory: int) -> int:
    """Tiles of 8 tokens whose sums, and a norm's factors, fit into `memory` bytes."""
    most = MOST_TOKEN_TILES
    while most > 1 and 4 * (partial_floats(tiles, most, W) + 8 * most) > memory:
        most //= 2
    return most


def project_rows(
    x, weights, *, norm=None, eps=1e-6, residual=None, normed=False, flat=False
) -> list[mx.array]:
    """:func:`~mlx_moeflux.kernels.linear.project.project` in one launch, for the combinations of
    matrices in STRUCTURES.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: There is no kernel for so many matrices, or for how one is stored, or
            its results stay float32, or there is no GPU.
    """
    if x.dtype == mx.float32 or any(w.precise for w in weights):
        raise UnsupportedError("no kernel of rows gives results in float32; take the reference.")
    end = "normed" if normed else ""
    kernel, weights, call = chosen(_KERNELS, x, weights, end, norm, eps, residual, flat=flat)
    launch, tokens = _launch(call, most_bytes()), row_count(x.size // x.shape[-1])
    return kernel(*operands(kernel, x, weights, norm, residual, tokens), **launch)


def _choice(m: int, first: int, count: int) -> str:
    """Which of the results of matrix m a threadgroup computes: y, base, out, and group within."""
    text = f"device T* y = y{first}; int base = 0, out = OUT{first};"
    for i in range(first + 1, first + count):
        text += f"""
            if (group >= GROUPS{i - 1} && base + OUT{i - 1} == BASE{i}) {{
              group -= GROUPS{i - 1}; y = y{i}; base = BASE{i}; out = OUT{i};
            }}
        """
    return text


def _kernel(structure: tuple[int, ...], end: str) -> MetalKernel:
    """The kernel of a structure: threadgroups are dealt out among the matrices, and the results of
    each. end: See :func:`mlx_moeflux.kernels.linear.matvec._kernel`."""
    body = """
        threadgroup float partial[PARTIAL];
        threadgroup float inverse[8 * NT];
        int group = threadgroup_position_in_grid.x, first = 8 * NT * threadgroup_position_in_grid.y;
        uint index = thread_index_in_threadgroup;
    """
    results = 0
    for m, count in enumerate(structure):
        call = f"""
            {_choice(m, results, count)}
            project_rows<MT{m}, NT, W, IN, BITS{m}, GROUP{m}, V{m}, FORM, RESIDUAL>(
                x, norm, as_type<float>(EPSILON), {added_to(structure, end)}, w{m}, scales{m},
                biases{m}, y, partial, inverse, base, group * 16 * MT{m}, out, first, tokens[0],
                index);
        """
        if end or m + 1 < len(structure):
            groups = " + ".join(f"GROUPS{i}" for i in range(results, results + count))
            call = f"if (group < {groups}) {{ {call} return; }} group -= {groups};"
        body += call
        results += count
    if end:
        body += """
            norm_rows<NT, W, IN>(
                x, norm, as_type<float>(EPSILON), normed, inverse, first, tokens[0], index);
        """
    declaration = declared("project_rows", structure, end, "tokens")
    return MetalKernel(**declaration, file="small_batch.metal", body=body)


_KEYS = (*product(STRUCTURES, [""]), *product(ENTRIES, ["normed"]))
_KERNELS = {key: _kernel(*key) for key in _KEYS}
KERNELS = tuple(_KERNELS.values())


@functools.lru_cache(maxsize=256)
def _launch(call: Call, memory: int) -> dict[str, Any]:
    *leading, C = call.shape
    tokens, W = math.prod(leading), simdgroups(C)
    template = call.template() | {"T": call.dtype, "W": W}
    groups, most, shapes = 0, 0, []
    for m, (matrix, outs, _) in enumerate(call.parts):
        tile = tiling(matrix, outs, C)
        template |= tile.arguments(str(m))
        most = max(most, tile.MT)
        for out, end in zip(outs, accumulate(outs), strict=True):
            i, own = len(shapes), tile.groups(out)
            template |= {f"OUT{i}": out, f"BASE{i}": end - out, f"GROUPS{i}": own}
            groups += own
            shapes.append((*leading, out))
    NT = token_tiles(tokens, W * groups, most_token_tiles(most, W, memory))
    template |= {"NT": NT, "PARTIAL": partial_floats(most, NT, W)}
    if call.end:
        groups += 1
        shapes.append(call.shape)
    dtypes = [call.dtype] * len(shapes)
    return launch_of(template, (groups, -(-tokens // (8 * NT))), 32 * W, shapes, *dtypes)
