"""``project`` and ``add_shared`` for some dozens of rows: every weight is read once for up to 32.

Formulas and shapes are those of :mod:`mlx_moeflux.kernels.project` and
:mod:`mlx_moeflux.kernels.add_shared`. Weights, and x where a norm or SwiGLU comes before, are
rounded to the dtype of x; products are summed in float32. What a row gets depends on nothing but
the row: tokens may be computed together or apart, without changing a bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.add_shared import add_shared
from mlx_moeflux.kernels.metal import MetalKernel, float_bits, launches, most_bytes
from mlx_moeflux.kernels.numbers import filled
from mlx_moeflux.kernels.project import BARE, ENTRIES, STRUCTURES, Weight, project
from mlx_moeflux.kernels.quantised import Matrix, arrays_of, matrix_of
from mlx_moeflux.kernels.structures import before_and_after, chosen, declared, operands

FLOATS = (mx.float16, mx.bfloat16)
# Threadgroups that a launch should have (an H100 has 132 processors) before one takes more rows.
ENOUGH_GROUPS, MOST_TILES = 264, 2
# Tokens of a threadgroup are 8, 16 or 32: as many as leave so many simdgroups (32 tokens, us on an
# H100 within a model, with 8, 16 and 32: 2048 -> 1281 11.9, 14.3, 20.0; 512 -> 2048 6.6, 9.6, 16;
# 4096 -> 2048 12.5, 10.7, 11.5; 2048 -> 12352 32, 28, 22).
MOST_TOKEN_TILES, ENOUGH_SIMDGROUPS = 4, 8 * 132


@dataclass(frozen=True)
class Tiling:
    """How ``multiply_tile`` in rows.metal is laid out for a matrix: 16 `MT` rows a threadgroup, `V`
    words at once."""

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
    """What suits a matrix ``[sum of outs, width]``.

    Raises:
        UnsupportedError: Its rows do not go in steps.
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
def _count(tokens: int) -> mx.array:
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
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    normed: bool = False,
    flat: bool = False,
) -> list[mx.array]:
    """:func:`~mlx_moeflux.kernels.project.project` in one launch, for the combinations of matrices
    in STRUCTURES. float32, of which products in tiles lose bits, goes to the reference, and so do
    matrices whose results stay float32, after the launch for the others.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: There is no kernel for so many matrices, or for how one is stored, or
            there is no GPU.
    """
    if x.dtype == mx.float32 and x.size:
        return project(x, weights, norm=norm, eps=eps, residual=residual, normed=normed, flat=flat)
    if any(getattr(w, "precise", False) for w in weights):
        return _beside_precise(x, weights, norm, eps, normed=normed, flat=flat)
    kernel, ends, parts = chosen(_KERNELS, x, weights, norm=norm, residual=residual, normed=normed)
    tokens = x.size // x.shape[-1]
    shape = (tokens, x.shape[-1]) if flat else x.shape
    launch = _launch(shape, x.dtype, None if norm is None else eps, ends, parts, most_bytes())
    return kernel(x, _count(tokens), *operands(weights, norm, residual), **launch)


def _beside_precise(
    x: mx.array,
    weights: Sequence[Weight],
    norm: mx.array | None,
    eps: float,
    *,
    normed: bool,
    flat: bool,
) -> list[mx.array]:
    """:func:`project_rows` with a norm; `precise` ones among the matrices get norm(x)."""
    others = [w for w in weights if not getattr(w, "precise", False)]
    if norm is None or not others:
        raise UnsupportedError("results in float32 alone are not given here; take the reference.")
    *made, post = project_rows(x, others, norm=norm, eps=eps, normed=True, flat=flat)
    products, results = [], iter(made)
    for weight in weights:
        own = project(post, [weight]) if weight.precise else islice(results, len(weight.results))
        products += own
    return [*products, post] if normed else products


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


def _kernel(structure: tuple[int, ...], norm: bool, ends: str) -> MetalKernel:
    """The kernel of a structure: threadgroups are dealt out among the matrices, and the results of
    each. ends: See :func:`mlx_moeflux.kernels.project._kernel`."""
    own = before_and_after(norm, ends)
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
                x, {own}, w{m}, scales{m}, biases{m}, y, partial, inverse, base,
                group * 16 * MT{m}, out, first, tokens[0], index);
        """
        if ends == "normed" or m + 1 < len(structure):
            groups = " + ".join(f"GROUPS{i}" for i in range(results, results + count))
            call = f"if (group < {groups}) {{ {call} return; }} group -= {groups};"
        body += call
        results += count
    if ends == "normed":
        body += """
            norm_rows<NT, W, IN>(
                x, norm, as_type<float>(EPSILON), normed, inverse, first, tokens[0], index);
        """
    inputs = ("x", "tokens", "norm") if norm else ("x", "tokens")
    inputs += ("residual",) if ends == "residual" else ()
    declaration = declared("project_rows", structure, norm, ends, more=("tokens",))
    return MetalKernel(**declaration, file="rows.metal", body=body)


_KERNELS = {
    key: _kernel(*key)
    for key in (
        *((structure, True, "") for structure in STRUCTURES),
        *((structure, True, "normed") for structure in ENTRIES),
        *((structure, False, "") for structure in BARE),
        ((1,), False, "residual"),
    )
}
launches(*_KERNELS.values())(project_rows)


@functools.lru_cache(maxsize=256)
def _launch(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    eps: float | None,
    ends: str,
    parts: tuple[tuple[Matrix, tuple[int, ...], bool], ...],
    memory: int,
) -> dict[str, Any]:
    *leading, C = shape
    tokens, W, normed = math.prod(leading), simdgroups(C), ends == "normed"
    template = {"T": dtype, "W": W, "IN": C, "FORM": int(eps is not None)}
    template["RESIDUAL"] = ends == "residual"
    if eps is not None:
        template["EPSILON"] = float_bits(eps)
    groups, most, shapes = 0, 0, []
    for m, (matrix, outs, _) in enumerate(parts):
        tile = tiling(matrix, outs, C)
        template |= tile.arguments(str(m))
        most = max(most, tile.MT)
        for out, end in zip(outs, accumulate(outs), strict=True):
            i, own = len(shapes), tile.groups(out)
            template |= {f"OUT{i}": out, f"BASE{i}": end - out, f"GROUPS{i}": own}
            groups += own
            shapes.append((*leading, out))
    NT = token_tiles(tokens, W * groups, most_token_tiles(most, W, memory))
    shapes += [shape] * normed
    return {
        "template": template | {"NT": NT, "PARTIAL": partial_floats(most, NT, W)},
        "grid": ((groups + normed) * W * 32, -(-tokens // (8 * NT)), 1),
        "threadgroup": (32 * W, 1, 1),
        "output_shapes": shapes,
        "output_dtypes": [dtype] * len(shapes),
    }


_SHARED = MetalKernel(
    "add_shared_rows",
    file="rows.metal",
    inputs=("residual", "experts", "gate", "up", "score", "tokens", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float partial[PARTIAL];
        add_shared_rows<MT, NT, W, IN, OUT, BITS, GROUP, V, ROUTED, SCORED>(
            residual, experts, gate, up, score, w, scales, biases, y, partial,
            threadgroup_position_in_grid.x * 16 * MT, threadgroup_position_in_grid.y * 8 * NT,
            tokens[0], thread_index_in_threadgroup);
    """,
)


@launches(_SHARED)
def add_shared_rows(
    residual: mx.array,
    experts: mx.array | None,
    gate: mx.array,
    up: mx.array,
    down: Weight,
    *,
    score: mx.array | None = None,
) -> mx.array:
    """:func:`~mlx_moeflux.kernels.add_shared.add_shared` in one launch; float32 goes to the
    reference.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: The matrix is stored in another way, or there is no GPU.
    """
    if residual.dtype == mx.float32:
        return add_shared(residual, experts, gate, up, down, score=score)
    C, F = residual.shape[-1], gate.shape[-1]
    N = residual.size // C
    matrix = matrix_of(down, F)
    if residual.dtype not in FLOATS or any(a.dtype != residual.dtype for a in (gate, up)):
        raise ShapeError(f"residual is {residual.dtype}, gate {gate.dtype} and up {up.dtype}.")
    if score is not None and (score.size != N or score.dtype != residual.dtype):
        raise ShapeError(f"score is {score.dtype} {list(score.shape)}; expected [{N}, 1].")
    routed = experts is not None
    summed = experts if routed else filled(0.0)
    shapes = (summed.shape if routed else (N, C), gate.shape, up.shape, down.weight.shape[0])
    if shapes != ((N, C), (N, F), (N, F), C) or summed.dtype != mx.float32:
        raise ShapeError(
            f"experts {summed.dtype} {list(shapes[0])}, gate {list(gate.shape)}, up "
            f"{list(up.shape)} and down {list(down.weight.shape)} do not fit {N} rows of {C}."
        )
    known = routed, score is not None, matrix, most_bytes()
    launch = _shared_launch(residual.shape, F, residual.dtype, *known)
    scores = gate if score is None else score
    return _SHARED(residual, summed, gate, up, scores, _count(N), *arrays_of(down), **launch)[0]


@functools.lru_cache(maxsize=64)
def _shared_launch(
    shape: tuple[int, ...],
    F: int,
    dtype: mx.Dtype,
    routed: bool,
    scored: bool,
    matrix: Matrix,
    memory: int,
) -> dict[str, Any]:
    *leading, C = shape
    tokens = math.prod(leading)
    tile, W = tiling(matrix, (C,), F), simdgroups(F)
    NT = token_tiles(tokens, W * tile.groups(C), most_token_tiles(tile.MT, W, memory))
    template = {"T": dtype, "NT": NT, "W": W, "IN": F, "OUT": C}
    template |= {"ROUTED": routed, "SCORED": scored}
    template |= tile.arguments() | {"PARTIAL": partial_floats(tile.MT, NT, W)}
    return {
        "template": template,
        "grid": (tile.groups(C) * W * 32, -(-tokens // (8 * NT)), 1),
        "threadgroup": (32 * W, 1, 1),
        "output_shapes": [shape],
        "output_dtypes": [dtype],
    }
