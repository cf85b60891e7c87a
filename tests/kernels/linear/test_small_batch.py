"""Matrices of some dozens of rows against float64; the naive error is stock MLX's."""

from __future__ import annotations

import contextlib
import functools

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.linear import project as project_module
from mlx_moeflux.kernels.linear import small_batch
from mlx_moeflux.kernels.linear.project import project
from mlx_moeflux.kernels.linear.quantised import Matrix
from mlx_moeflux.kernels.linear.small_batch import (
    _KERNELS,
    most_token_tiles,
    project_rows,
    tiling,
    token_tiles,
)
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe import add_shared as add_shared_module
from mlx_moeflux.kernels.moe.add_shared import add_shared_rows
from mlx_moeflux.kernels.runtime import launcher
from tests.kernels.cases import PAST
from tests.kernels.experts import dense, random_array, random_matrix
from tests.kernels.harness import Case, error, float64, launched, patched
from tests.kernels.linear import test_project
from tests.kernels.moe import test_add_shared

EPS = test_project.EPS
# tokens, C, (rows, bits, group) of each matrix, dtype
SIZES = [
    (5, 96, [(18, 4, 32), (7, 8, 32), (3, 0, 32), (1, 4, 32)], mx.bfloat16),
    (9, 256, [(33, 4, 64), (17, 8, 64)], mx.bfloat16),
    (33, 128, [(5, 2, 64)], mx.float16),
    (1, 128, [(20, 4, 128)], mx.float16),
    (6, 4096, [(3, 4, 64)], mx.bfloat16),
    (12, 64, [(16, 0, 32)], mx.bfloat16),
]


def many_at_once():
    """Meanwhile small launches take as many tokens at once as large ones."""
    caches = small_batch._launch, add_shared_module._rows_launch
    return patched(small_batch, *caches, ENOUGH_SIMDGROUPS=1)


@pytest.fixture(params=["eight at once", "many at once"])
def at_once(request):
    """Tokens of a threadgroup."""
    with many_at_once() if request.param.startswith("many") else contextlib.nullcontext():
        yield


CALLS = [(sizes, True) for sizes in SIZES] + [(sizes, False) for sizes in SIZES[::3]]


@pytest.mark.parametrize(("sizes", "with_norm"), CALLS, ids=lambda x: str(x)[:40])
def test_agrees_with_float64(device, at_once, sizes, with_norm):
    """With a norm, or with a residual."""
    args, options, truths = test_project.arguments(
        sizes, with_norm=with_norm, residual=not with_norm
    )
    outputs = project_rows(*args, **options)
    limits = test_project.limits(args, options, truths)
    assert len(outputs) == len(truths)
    for y, truth, limit in zip(outputs, truths, limits, strict=True):
        assert y.dtype == args[0].dtype
        assert error(y, truth) <= limit


def test_tokens_together_or_apart_give_the_same_bits(device):
    rng = np.random.default_rng(0)
    weight = Weight(*random_matrix(rng, (40, 512), bits=4, group=64, dtype=mx.bfloat16))
    x, norm = random_array(rng, (35, 512), mx.bfloat16), random_array(rng, (512,), mx.bfloat16)
    whole = project_rows(x, [weight], norm=norm)[0]
    apart = [project_rows(x[a:b], [weight], norm=norm)[0] for a, b in ((0, 1), (1, 14), (14, 35))]
    assert mx.array_equal(whole, mx.concatenate(apart)).item()
    with many_at_once():
        assert mx.array_equal(whole, project_rows(x, [weight], norm=norm)[0]).item()


@pytest.mark.parametrize("structure", [(4,), (2, 2), (1, 2), (3, 1)])
def test_matrices_one_behind_another_are_as_if_apart(device, structure):
    rng = np.random.default_rng(3)
    apart, together = [], []
    for m, count in enumerate(structure):
        options = {"bits": (4, 8)[m], "group": 32, "dtype": mx.bfloat16}
        parts = [random_matrix(rng, ((16, 1, 37, 5)[i], 96), **options) for i in range(count)]
        apart += [Weight(*part) for part in parts]
        arrays = [mx.concatenate([part[i] for part in parts]) for i in range(3)]
        outs = tuple(part[0].shape[0] for part in parts)
        together.append(Weight(*arrays, parts[0][3], outs))
    x, norm = (random_array(rng, shape, mx.bfloat16) for shape in ((5, 1, 96), (96,)))
    expected = [project_rows(x, [weight], norm=norm)[0] for weight in apart]
    for y, other in zip(project_rows(x, together, norm=norm), expected, strict=True):
        assert y.shape == other.shape
        assert mx.array_equal(y, other).item()


def test_gives_the_normalised_rows_too(device):
    args, options, _ = test_project.arguments(SIZES[0], with_norm=True, residual=False)
    *outputs, normed = project_rows(*args, **options, normed=True)
    x = float64(args[0])
    truth = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * float64(options["norm"])
    (naive,) = project(args[0], [], **options, normed=True)
    assert error(normed, truth) <= 2 * error(naive, truth)
    for y, expected in zip(outputs, project_rows(*args, **options), strict=True):
        assert mx.array_equal(y, expected).item()


def test_flat_results(device):
    rng = np.random.default_rng(5)
    weight = Weight(*random_matrix(rng, (6, 64), bits=4, group=32, dtype=mx.bfloat16))
    x, norm = (random_array(rng, shape, mx.bfloat16) for shape in ((2, 3, 64), (64,)))
    y, normed = project_rows(x, [weight], norm=norm, normed=True, flat=True)
    assert (y.shape, normed.shape) == ((6, 6), (6, 64))


def test_wrong_arguments():
    rng = np.random.default_rng(0)
    weight = Weight(*random_matrix(rng, (6, 64), bits=4, group=64, dtype=mx.bfloat16))
    narrow = Weight(*random_matrix(rng, (6, 96), bits=2, group=32, dtype=mx.bfloat16))
    x = random_array(rng, (2, 64), mx.bfloat16)
    for call in (
        lambda: project_rows(mx.zeros((0, 64), mx.bfloat16), [weight]),
        lambda: project_rows(x[:, :32], [weight]),
        lambda: project_rows(x, [weight], norm=mx.ones((32,))),
        lambda: project_rows(x, [weight], residual=x),
    ):
        with pytest.raises(ShapeError):
            call()
    with pytest.raises(UnsupportedError):
        project_rows(random_array(rng, (2, 96), mx.bfloat16), [narrow])
    with pytest.raises(UnsupportedError):
        project_rows(x, [weight] * 5)
    precise = Weight(mx.zeros((6, 64)), precise=True)
    for weights in ([precise], [precise, weight]):
        with pytest.raises(UnsupportedError, match="float32"):
            project_rows(x, weights, norm=mx.ones((64,)))
    (residual, experts, gate, up, down), options, _ = shared_arguments(SHARED[0], scored=True)
    for wrong in (
        (residual[:, :8], experts, gate, up, down),
        (residual, experts.astype(mx.float16), gate, up, down),
        (residual, experts, gate, up.astype(mx.float16), down),
        (residual[:1], experts, gate, up, down),
    ):
        with pytest.raises(ShapeError):
            add_shared_rows(*wrong, **options)


# tokens, C, F, bits, group, dtype
SHARED = [
    (5, 37, 96, 8, 32, mx.bfloat16),
    (11, 128, 512, 4, 64, mx.bfloat16),
    (17, 66, 256, 2, 128, mx.float16),
    (2, 64, 128, 0, 32, mx.bfloat16),
]
shared_arguments = test_add_shared.arguments


@pytest.mark.parametrize(
    ("sizes", "scored", "routed"),
    [
        # By default one without experts.
        pytest.param(
            sizes, i > 0, routed, marks=[pytest.mark.slow] * (not routed and i != 1),
            id=f"{sizes[0]}-{sizes[3]} bits-{routed}",
        )
        for i, sizes in enumerate(SHARED)
        for routed in (True, False)
    ],
)  # fmt: skip
def test_shared_expert_agrees_with_float64(device, at_once, sizes, scored, routed):
    args, options, truth = shared_arguments(sizes, scored=scored, routed=routed)
    y = add_shared_rows(*args, **options)
    assert y.dtype == args[0].dtype
    assert error(y, truth) <= test_add_shared.limit_of(args, options, truth)


def test_tilings():
    tokens = {1: 1, 8: 1, 9: 2, 16: 2, 17: 4, 25: 4, 32: 4, 200: 4}
    assert {n: token_tiles(n, 10**6, 4) for n in tokens} == tokens
    # 2048 -> 1281, 512 -> 2048, 4096 -> 2048 and 2048 -> 12352.
    assert [token_tiles(32, n, 4) for n in (320, 512, 1024, 1544)] == [1, 1, 2, 4]
    assert token_tiles(200, 320, 4) == 4
    assert token_tiles(200, 320, 2) == 2
    # Of 8 simdgroups the sums of 32 rows and 32 tokens take 36 KB.
    assert [most_token_tiles(2, 8, memory) for memory in launcher.MOST_BYTES.values()] == [2, 4]
    wide, narrow = (tiling(Matrix(4, 64), (out,), 2048) for out in (12352, 2048))
    assert (wide.MT, wide.V, narrow.MT) == (2, 4, 1)


def test_float32_is_the_reference():
    args, options, _ = test_project.arguments(test_project.SIZES[4], with_norm=True, residual=False)
    found = project_module.project_rows(*args, **options)
    for y, expected in zip(found, project(*args, **options), strict=True):
        assert mx.array_equal(y, expected).item()


def test_a_shared_expert_in_float32_takes_the_kernel_of_a_few_rows(device):
    """The reference would round other sums in a trace than outside."""
    sizes = (*SHARED[0][:-1], mx.float32)
    args, options, truth = shared_arguments(sizes, scored=True)
    with launched() as names:
        y = add_shared_rows(*args, **options)
        mx.eval(y)
    assert names
    assert "rows" not in names[0]
    assert error(y, truth) <= test_add_shared.limit_of(args, options, truth)


def case(structure, ends, *, norm=True, tokens=10, width=128, bits=(4, 8, 2, 8)) -> Case:
    """Matrices of different sizes and bits, of more rows than a tile has."""
    rng = np.random.default_rng(len(structure))
    weights, truths, x = [], [], random_array(rng, (tokens, width), mx.bfloat16)
    # Every 256 columns are louder than those before: a sum of squares without them is far off.
    x = x * (1 + mx.arange(width) // 256).astype(mx.bfloat16)
    scale = random_array(rng, (width,), mx.bfloat16)
    wide = float64(x)
    if norm:
        wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * float64(scale)
    for m, count in enumerate(structure):
        outs = tuple(18 + 3 * i + m for i in range(count))
        matrix = random_matrix(rng, (sum(outs), width), bits=bits[m], group=64, dtype=mx.bfloat16)
        weights.append(Weight(*matrix, outs))
        product = wide @ dense(weights[-1]).T
        truths += np.split(product, np.cumsum(outs)[:-1], axis=-1)
    options = {"norm": scale if norm else None, "eps": EPS, "normed": ends == "normed"}
    if ends == "residual":
        options["residual"] = random_array(rng, (tokens, 18), mx.bfloat16)
        truths = [truths[0] + float64(options["residual"])]
    if ends == "normed":
        truths.append(wide)
    limit = max(test_project.limits((x, weights), options, truths))
    name = "-".join([*map(str, structure), str(norm), ends, f"{tokens}x{width}"])
    call = functools.partial(project_rows, x, weights, **options)
    return Case(name, call, lambda: truths, limit, within=many_at_once)


def shared_case(scored: bool, routed: bool = True, sizes=SHARED[0]) -> Case:
    args, options, truth = shared_arguments(sizes, scored=scored, routed=routed)
    limit = test_add_shared.limit_of(args, options, truth)
    name = f"{sizes[0]} {'scored' if scored else 'plain'}{', dense' * (not routed)}"
    call = functools.partial(add_shared_rows, *args, **options)
    return Case(name, lambda: [call()], lambda: [truth], limit, within=many_at_once)


EIGHTS = "both sides are multiples of eight"
WHICH = "where an element lies is the same in every fragment"
EQUIVALENT = {
    "small_batch.metal": {
        "place: transposed index (2)": "columns in another order, alike on both sides",
        "load_tokens: transposed index": WHICH,
        "load_tokens: transposed index (3)": WHICH,
        "spread_tile: swapped arguments 1 and 2 of metal::fma": "a product",
        "inverse_roots: off by one < -> + 1 < (3)": EIGHTS,
        "inverse_roots: off by one < -> <= (3)": "one more round loads nothing",
        "inverse_roots: off by one < -> + 1 < (5)": EIGHTS,
        "inverse_roots: off by one < -> + 1 < (7)": EIGHTS,
        "multiply_tile: off by one < -> <= (2)": PAST,
        "multiply_tile: off by one < -> <= (4)": "one more step is past the last",
        "norm_rows: off by one < -> + 1 <": EIGHTS,
        "norm_rows: off by one < -> <= (2)": PAST,
    },
}
CASES = {kernel.name: [case(*key)] for key, kernel in _KERNELS.items()}
# More tokens than a threadgroup takes, and rows in which each simdgroup has several steps.
for key in (((1, 1), ""), ((1,), "normed")):
    CASES[_KERNELS[key].name].append(case(*key, tokens=34, width=1024))
# A norm of more columns than a simdgroup loads at once.
CASES["project_rows_1"].append(case((1,), "", tokens=2, width=2304))
# Without a norm, with what is added to the result.
CASES["project_rows_1"] += [
    case((1,), "", norm=False),
    case((1,), "", norm=False, bits=(0,)),
    case((1,), "residual", norm=False),
]
for structure in ((2,), (1, 1)):
    CASES[_KERNELS[structure, ""].name].append(case(structure, "", norm=False))
CASES["add_shared_rows"] = [
    *(shared_case(scored) for scored in (True, False)),
    shared_case(False, routed=False),
    shared_case(True, sizes=(34, 37, 1024, 4, 32, mx.bfloat16)),
]
