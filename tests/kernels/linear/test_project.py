"""Norm and matrices in one launch against float64; the naive error is stock MLX's."""

from __future__ import annotations

import functools
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.linear import blocks, matvec
from mlx_moeflux.kernels.linear.matvec import (
    _KERNELS,
    joined_places,
    joined_stride,
    project_fused,
    project_joined,
)
from mlx_moeflux.kernels.linear.project import ROWS_AT_ONCE, project, project_dequantised
from mlx_moeflux.kernels.linear.quantised import matrix_of
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.models.layers import Applied
from tests.kernels import harness
from tests.kernels.experts import dense, random_array, random_matrix
from tests.kernels.harness import DTYPES, Case, error, float64, usually

EPS = 1e-5
# tokens, C, (rows, bits, group) of each matrix, dtype
SIZES = [
    (1, 96, [(5, 4, 32), (8, 8, 32), (3, 2, 32), (1, 0, 32)], mx.float32),
    (
        1,
        256,
        [(7, 2, 128), (6, 4, 64), (1, 8, 128), (2, 0, 32)],
        mx.float16,
    ),
    (3, 160, [(6, 4, 32)], mx.bfloat16),
    (2, 2048, [(2, 4, 64), (2, 8, 64)], mx.bfloat16),
    (4, 64, [(6, 8, 64), (7, 4, 32)], mx.float32),
    (4, 128, [(33, 0, 32)], mx.float16),
    # Columns shared out, the last share smaller.
    (1, 16416, [(5, 4, 32)], mx.bfloat16),
    (1, 16384, [(4, 4, 64)], mx.bfloat16),
    (2, 18432, [(4, 4, 64), (1, 0, 32)], mx.float32),
    (2, 6144, [(3, 2, 32), (2, 0, 32)], mx.float32),
    (2, 4128, [(16, 4, 32), (8, 0, 32)], mx.bfloat16),
    # In blocks, beside others.
    (1, 256, [(7, "q4_k", 0), (6, "q6_k", 0), (5, "q8_0", 0), (2, 0, 32)], mx.float32),
    (2, 96, [(5, "q4_0", 0), (8, "q5_1", 0), (3, "iq4_nl", 0), (1, "q8_0", 0)], mx.float16),
    (3, 512, [(6, "q5_k", 0), (8, "q3_k", 0)], mx.bfloat16),
    (1, 1792, [(4, "q2_k", 0), (5, 4, 64)], mx.bfloat16),
    (2, 4608, [(3, "q4_k", 0), (8, "iq4_xs", 0)], mx.bfloat16),
    (1, 288, [(9, "q5_0", 0), (4, "q4_1", 0)], mx.float32),
    (1, 32, [(4100, "q4_0", 0)], mx.float32),
]
# By default no second size for the same parts. A residual is added to the result of one matrix: in
# words, of floats, with shared columns, in blocks. The normalised rows are a
# result beside those of one matrix or several.
WITH_NORM = {0, 1, 2, 3, 5, 6, *range(9, 18)}
WITH_RESIDUAL = {2, 5, 6, 11, 12}
WITH_ROWS = {0, 2, 6, 11, 16}
CALLS = [
    pytest.param(
        sizes, with_norm, not with_norm,
        marks=[pytest.mark.slow] * (i not in usual),
        id=f"{'-'.join(map(str, sizes[:3]))}-{'norm' if with_norm else 'residual'}",
    )
    for with_norm, usual in ((True, WITH_NORM), (False, WITH_RESIDUAL))
    for i, sizes in enumerate(SIZES)
]  # fmt: skip


def arguments(sizes, *, with_norm, residual):
    """The call's arguments and what they must give."""
    tokens, C, parts, dtype = sizes
    rng = np.random.default_rng(C + tokens)
    parts = parts[:1] if residual else parts
    weights = [
        Weight(*random_matrix(rng, (out, C), bits=bits, group=group, dtype=dtype))
        for out, bits, group in parts
    ]
    x = random_array(rng, (tokens, C), dtype)
    norm = random_array(rng, (C,), dtype) if with_norm else None
    added = random_array(rng, (tokens, parts[0][0]), dtype) if residual else None
    rows = float64(x)
    if with_norm:
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS) * float64(norm)
    truths = [rows @ dense(weight).T + (float64(added) if residual else 0) for weight in weights]
    return (x, weights), {"norm": norm, "eps": EPS, "residual": added}, truths


def limits(args, options, truths):
    """Twice the error of stock MLX; one rounding of the result is no one's fault."""
    dtype = args[0].dtype
    half = 3e-7 if dtype == mx.float32 else float(mx.finfo(dtype).eps) / 2
    return [
        max(2 * error(reference, truth), half * np.abs(truth).max())
        for reference, truth in zip(project(*args, **options), truths, strict=True)
    ]


@pytest.mark.parametrize(("sizes", "with_norm", "residual"), CALLS)
def test_agrees_with_float64(device, sizes, with_norm, residual):
    args, options, truths = arguments(sizes, with_norm=with_norm, residual=residual)
    outputs = project_fused(*args, **options)
    assert len(outputs) == len(args[1])
    for y, truth, limit in zip(outputs, truths, limits(args, options, truths), strict=True):
        assert y.dtype == args[0].dtype
        assert error(y, truth) <= limit


def test_as_many_simdgroups_as_cuda_takes():
    with harness.emulated(name="cuda"):
        for sizes in SIZES:
            if sizes[1] >= 16384:
                test_agrees_with_float64("emulator", sizes, with_norm=True, residual=False)


@pytest.mark.parametrize("C", [128, 1536])
def test_tokens_together_or_apart_give_the_same_bits(device, C):
    rng = np.random.default_rng(0)
    weight = Weight(*random_matrix(rng, (6, C), bits=4, group=64, dtype=mx.bfloat16))
    x, norm = random_array(rng, (6, C), mx.bfloat16), random_array(rng, (C,), mx.bfloat16)
    with reads_together():
        every = [
            mx.concatenate(
                [project_fused(x[i : i + n], [weight], norm=norm)[0] for i in range(0, 6, n)]
            )
            for n in (1, 2, 3, 6)
        ]
    alone, *others = map(mx.concatenate, every)
    assert all(mx.array_equal(alone, other).item() for other in others)


@pytest.mark.parametrize("most", [1, 2 * ROWS_AT_ONCE * 96 * 2, 10**9])
def test_matrices_made_dense_a_part_at_a_time(most):
    """Stock MLX, in any number of parts: a device is not needed."""
    sizes = (11, 96, [(300, 4, 32), (140, 8, 32), (3, 0, 32)], mx.bfloat16)
    args, options, truths = arguments(sizes, with_norm=True, residual=False)
    results = project_dequantised(*args, **options, most_dense=most)
    for y, truth, limit in zip(results, truths, limits(args, options, truths), strict=True):
        assert error(y, truth) <= limit
    together = Weight(
        *(mx.concatenate([w, w]) for w in _arrays(args[1][0])), args[1][0].spec, (300, 300)
    )
    for y in project_dequantised(args[0], [together], **options, most_dense=most):
        assert mx.array_equal(y, results[0])


def test_parts_begin_where_rows_are_aligned(monkeypatch):
    """Rows of a result that begin at odd places cost cuBLAS two thirds of its speed."""
    made, dense = [], Weight.dense
    note = lambda self, dtype: made.append(self.weight.shape[0]) or dense(self, dtype)  # noqa: E731
    monkeypatch.setattr(Weight, "dense", note)
    weight = Weight(*mx.quantize(mx.ones((700, 64)), 64, 4), QuantSpec(4, 64), outs=(300, 400))
    x = mx.ones((5, 64), mx.bfloat16)
    first, second = project_dequantised(x, [weight], most_dense=200 * 64 * 2)
    assert made == [128, 128, 44, 128, 128, 128, 16]
    assert (first.shape, second.shape) == ((5, 300), (5, 400))


def test_matrices_that_lie_together_are_made_dense_together(monkeypatch):
    rng = np.random.default_rng(2)
    arrays = random_matrix(rng, (70, 64), bits=4, group=32, dtype=mx.bfloat16)
    weight, x = Weight(*arrays), random_array(rng, (5, 64), mx.bfloat16)
    apart = project_dequantised(x, [weight.rows(0, 30), weight.rows(30, 70)])
    made, dense = [], Weight.dense
    note = lambda self, dtype: made.append(self.weight.shape[0]) or dense(self, dtype)  # noqa: E731
    monkeypatch.setattr(Weight, "dense", note)
    together = project_dequantised(x, [replace(weight, outs=(30, 40))])
    assert made == [70]
    for y, wanted in zip(together, apart, strict=True):
        assert error(y, wanted) == 0.0


def _arrays(weight):
    return weight.weight, weight.scales, weight.biases


def test_wrong_arguments():
    rng = np.random.default_rng(0)
    weight = Weight(*random_matrix(rng, (6, 64), bits=4, group=64, dtype=mx.float32))
    x = random_array(rng, (2, 64), mx.float32)
    for call in (
        lambda: project_fused(mx.zeros((0, 64)), [weight]),
        lambda: project_fused(x[:, :32], [weight]),
        lambda: project_fused(x, [weight], norm=mx.ones((32,))),
        lambda: project_fused(x, [weight], residual=x),
        lambda: project_fused(x, [weight, weight], residual=x[:, :6]),
    ):
        with pytest.raises(ShapeError):
            call()


@pytest.mark.parametrize(
    "sizes", usually(SIZES, WITH_ROWS), ids=lambda sizes: "-".join(map(str, sizes[:3]))
)
def test_gives_the_normalised_rows_too(device, sizes):
    args, options, _ = arguments(sizes, with_norm=True, residual=False)
    if len(args[1]) == 2:
        args = args[0], args[1][:1]  # two matrices alone have no such kernel
    *outputs, normed = project_fused(*args, **options, normed=True)
    rows = float64(args[0])
    truth = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS) * float64(options["norm"])
    (naive,) = project(args[0], [], **options, normed=True)
    assert normed.dtype == args[0].dtype
    assert error(normed, truth) <= max(2 * error(naive, truth), 1e-6)
    for y, expected in zip(outputs, project_fused(*args, **options), strict=True):
        assert mx.array_equal(y, expected).item()


# By (1, 2) and (3, 1) no kernel takes them: they are split.
@pytest.mark.parametrize(
    ("structure", "dtype"),
    [
        # By default each structure in one of the dtypes, in turns.
        pytest.param(structure, dtype, marks=[pytest.mark.slow] * (i % 2 != j))
        for i, structure in enumerate(((4,), (2, 2), (1, 2), (3, 1)))
        for j, dtype in enumerate((mx.float32, mx.bfloat16))
    ],
)
def test_matrices_one_behind_another_are_as_if_apart(device, dtype, structure):
    rng = np.random.default_rng(3)
    apart, together = [], []
    for m, count in enumerate(structure):
        options = {"bits": (4, 8)[m], "group": 32, "dtype": dtype}
        parts = [random_matrix(rng, (3 + 4 * i, 96), **options) for i in range(count)]
        apart += [Weight(*part) for part in parts]
        arrays = [mx.concatenate([part[i] for part in parts]) for i in range(3)]
        outs = tuple(part[0].shape[0] for part in parts)
        together.append(Weight(*arrays, parts[0][3], outs))
    x, norm = random_array(rng, (2, 1, 96), dtype), random_array(rng, (96,), dtype)
    expected = project_fused(x, apart, norm=norm)
    assert [y.shape for y in expected] == [(2, 1, n) for w in together for n in w.outs]
    for implementation, same in ((project_fused, True), (project, False)):
        for y, other in zip(implementation(x, together, norm=norm), expected, strict=True):
            assert y.shape == other.shape
            if same:
                assert mx.array_equal(y, other).item()
            else:
                assert error(y, float64(other)) <= 0.03 * np.abs(float64(other)).max()


def test_flat_results(device):
    rng = np.random.default_rng(5)
    weight = Weight(*random_matrix(rng, (6, 64), bits=4, group=32, dtype=mx.float32))
    x, norm = random_array(rng, (2, 3, 64), mx.float32), random_array(rng, (64,), mx.float32)
    for implementation in (project, project_fused):
        y, normed = implementation(x, [weight], norm=norm, normed=True, flat=True)
        assert (y.shape, normed.shape) == ((6, 6), (6, 64))
        shaped, _ = implementation(x, [weight], norm=norm, normed=True)
        assert mx.array_equal(y.reshape(2, 3, 6), shaped).item()


@pytest.mark.parametrize("implementation", [project, project_fused, project_dequantised])
def test_precise_results(device, implementation):
    rng = np.random.default_rng(6)
    stored = random_matrix(rng, (12, 96), bits=4, group=32, dtype=mx.bfloat16)
    router = random_array(rng, (7, 96), mx.float32)
    weights = [Weight(router, precise=True), Weight(*stored, (5, 7))]
    x, norm = random_array(rng, (3, 96), mx.bfloat16), random_array(rng, (96,), mx.bfloat16)
    logits, *rest, normed = implementation(x, weights, norm=norm, normed=True)
    assert [y.dtype for y in rest] == [mx.bfloat16, mx.bfloat16]
    assert logits.dtype == mx.float32
    # The fused implementation does not round norm(x) first.
    rows = float64(x)
    exact = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * float64(norm)
    rows = exact if implementation is project_fused else float64(normed)
    truth = rows @ float64(router).T
    # On a GPU dense products of float32 may keep 11 bits.
    stock = device == "gpu" and implementation is not project_fused
    assert error(logits, truth) <= (1e-3 if stock else 2e-6) * np.abs(truth).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrices_in_blocks_in_many_rows(device, dtype):
    """Made dense in one launch, except for rows in float32, and in plain MLX."""
    args, options, truths = arguments(
        (11, 512, [(300, "q4_k", 0), (40, "q6_k", 0), (3, 0, 32)], dtype),
        with_norm=True,
        residual=False,
    )
    with harness.launched() as names:
        results = project_dequantised(*args, **options)
    assert names == ["dequantise_blocks"] * (2 if dtype != mx.float32 else 0)
    # On a GPU dense products of float32 may keep 11 bits.
    unit = 1e-3 if dtype == mx.float32 else float(mx.finfo(dtype).eps)
    for y, truth in zip(results, truths, strict=True):
        assert y.dtype == dtype
        assert error(y, truth) <= unit * np.abs(truth).max()
    (whole,) = project(args[0], args[1][:1], **options)
    with harness.patched(blocks, DECODED_BYTES=4 * 512 * 7):
        (apart,) = project(args[0], args[1][:1], **options)
    for y in (whole, apart):
        assert error(y, truths[0]) <= unit * np.abs(truths[0]).max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "group"), [(40, 64), (5, 128), (130, 64)])
def test_rows_of_one_group_in_stock_mlx(dtype, tokens, group):
    """Which takes them for something else on NVIDIA."""
    args, _, truths = arguments(
        (tokens, group, [(256, 4, group)], dtype), with_norm=False, residual=False
    )
    eps = 1e-3 if dtype == mx.float32 else float(mx.finfo(dtype).eps)  # TF32
    assert error(project(*args)[0], truths[0]) <= eps * np.abs(truths[0]).max()


def test_modules_that_stand_for_a_matrix_are_refused():
    applied = Applied(nn.Linear(96, 5))
    x = mx.zeros((1, 96))
    with pytest.raises(UnsupportedError, match="modules"):
        project_fused(x, [applied], norm=mx.ones((96,)))


def case(
    structure,
    ends: str,
    *,
    C: int,
    alike: bool = False,
    norm: bool = True,
    modes: tuple[str, ...] = (),
    tokens: int = 4,
) -> Case:
    """Matrices of different sizes and bits, the results of one as wide as each other if they are
    `alike`: two rows in one step; or wide, four rows in two steps
    of 16-bit numbers, stored in another order, with rows of a simdgroup, threadgroups, words a lane
    and tokens all different in number."""
    rng, wide = np.random.default_rng(len(structure)), C > 96
    dtype, tokens = (mx.bfloat16, tokens) if wide else (mx.float32, 2)
    weights, truths, x = [], [], random_array(rng, (tokens, C), dtype)
    scale = random_array(rng, (C,), dtype)
    rows = float64(x)
    if norm:
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS) * float64(scale)
    # From 4096 columns on a threadgroup has 8 rows of 16, and 4 simdgroups.
    least = 16 if C == 4096 else 10
    sizes = [
        tuple(least + 4 * (m + i) if wide else 5 + 2 * i + m for i in range(count))
        for m, count in enumerate(structure)
    ]
    if alike:
        # Threadgroups of a result are other in number than tokens.
        sizes = [(10 + 4 * m if wide else 9 + 2 * m,) * count for m, count in enumerate(structure)]
    elif ends == "joined" and not wide:
        # Seven numbers of a row are left over.
        sizes[0] = (sizes[0][0] + (1 - sum(map(sum, sizes))) % 8, *sizes[0][1:])
    for m, outs in enumerate(sizes):
        bits = (0, 2, 8, 4)[m - len(structure)] if wide else (4, 8, 2, 0)[m]
        bits = modes[m] if m < len(modes) else bits
        matrix = random_matrix(rng, (sum(outs), C), bits=bits, group=32, dtype=dtype)
        weights.append(Weight(*matrix, outs))
        product = rows @ dense(weights[-1]).T
        truths += np.split(product, np.cumsum(outs)[:-1], axis=-1)
    options = {"norm": scale if norm else None, "eps": EPS, "normed": ends == "normed"}
    if ends == "residual":
        added = random_array(rng, truths[0].shape, dtype)
        options["residual"] = added
        truths = [truths[0] + float64(added)]
    if ends == "normed":
        truths.append(rows)
    if ends == "joined":
        options = {"norm": scale, "eps": EPS}
        given = options | {"normed": True}
        limit = lambda: max(limits((x, weights), given, [*truths, rows]))  # noqa: E731
        call = functools.partial(joined, x, weights, **options)
        return Case(f"joined-{C}-{alike}", call, lambda: [*truths, rows], limit)
    limit = lambda: max(limits((x, weights), options, truths))  # noqa: E731
    name = "-".join([*map(str, structure), str(norm), ends, str(C), "alike" * alike, *modes])
    return Case(name, lambda: project_fused(x, weights, **options), lambda: truths, limit)


def joined(x, weights, **options):
    """The parts of the one array."""
    row = project_joined(x, weights, **options)
    parts = [(matrix_of(w, x.shape[-1], blocks=True), w.results) for w in weights]
    places, end = joined_places(parts, x.shape[-1])
    assert row.shape == (x.shape[0], joined_stride(end))
    assert mx.array_equal(row[:, end:], mx.zeros((x.shape[0], row.shape[1] - end))).item()
    widths = [*(out for w in weights for out in w.results), x.shape[-1]]
    return [row[:, at : at + width] for at, width in zip(places, widths, strict=True)]


@pytest.mark.parametrize("dtype", usually([mx.float32, mx.bfloat16], {1}))
def test_joined_results_are_the_same_bits(device, dtype):
    rng = np.random.default_rng(7)
    weights = []
    for bits, outs in ((8, (37, 1)), (4, (16, 16))):
        matrix = random_matrix(rng, (sum(outs), 96), bits=bits, group=32, dtype=dtype)
        weights.append(Weight(*matrix, outs))
    x, norm = random_array(rng, (3, 96), dtype), random_array(rng, (96,), dtype)
    expected = project_fused(x, weights, norm=norm, eps=EPS, normed=True)
    for part, other in zip(joined(x, weights, norm=norm, eps=EPS), expected, strict=True):
        assert mx.array_equal(part, other).item()


def reads_together():
    """As on a GPU that few threadgroups fill: rows of x share a read."""
    return harness.patched(matvec, matvec._launch, ENOUGH_GROUPS=1)


def together(case: Case) -> Case:
    return replace(case, name=f"{case.name}-together", within=reads_together)


def in_rounds(case: Case) -> Case:
    """As on a GPU for which two threadgroups are enough: they take their rows in several goes."""
    caches = matvec.rows_at_once, matvec._launch
    within = functools.partial(
        harness.patched, matvec, *caches, PROCESSORS=1, AT_ONCE=8, MIDDLE_AT_ONCE=8
    )
    return replace(case, name=f"{case.name}-rounds", within=within)


CASES = {kernel.name: [case(*key, C=C) for C in (96, 1056)] for key, kernel in _KERNELS.items()}
# Without a norm, with what is added to the result.
for structure, ends in (((1,), ""), ((1,), "residual"), ((2,), ""), ((1, 1), "")):
    own = CASES[_KERNELS[structure, ""].name]
    own += [case(structure, ends, C=C, norm=False) for C in (96, 1056)]
# Whole steps.
CASES["project_1"].append(case((1,), "", C=1024))
# Steps of another number than words a lane.
for key, kernel in _KERNELS.items():
    if len(key[0]) > 1:
        CASES[kernel.name].append(case(*key, C=2112))
    # Two results of one matrix that are as wide as each other have one text.
    if 2 in key[0]:
        CASES[kernel.name] += [case(*key, C=C, alike=True) for C in (96, 4608)]
# Columns that simdgroups share: some have none, and all have some.
CASES["project_1"].append(case((1,), "", C=16416))
CASES["project_1_1"].append(case((1, 1), "", C=4096))
# Rows by fours (numbers of 16 bits one by one), several times a threadgroup; then there is a lane
# whose next columns would begin where a row of 8 bits ends.
CASES["project_1"].append(in_rounds(case((1,), "", C=4096)))
CASES["project_1_1_1_1"].append(in_rounds(case((1, 1, 1, 1), "", C=4608)))
# Rows of x that share a read: four by twos in registers, three in threadgroup memory.
CASES["project_1"].append(together(case((1,), "", C=4096)))
CASES["project_1"].append(together(case((1,), "residual", C=1056, tokens=6, norm=False)))
CASES["project_1_normed"].append(together(case((1,), "normed", C=1056, tokens=3)))
CASES["project_1_2_joined"].append(together(case((1, 2), "joined", C=1056, tokens=3)))
# In blocks, beside a matrix in words: rows that several lanes share, whole and odd steps, a row
# that is added, two results of one matrix.
for (structure, ends), kernel in matvec._OF_BLOCKS.items():
    count = max(len(structure) - 1, 1)
    CASES[kernel.name] = [
        case(structure, ends, C=96, modes=("q5_1", "q4_0", "iq4_nl")[:count]),
        case(structure, ends, C=1280, modes=("q5_k", "q4_k", "q6_k")[:count]),
    ]
CASES["project_blocks_1"] += [
    case((1,), "", C=256, modes=("q2_k",)),
    case((1,), "residual", C=1280, norm=False, modes=("q6_k",)),
]
CASES["project_blocks_1_1"].append(case((2,), "", C=512, alike=True, modes=("q3_k",)))

# A matrix in blocks takes what one in words does, and reads its weight alone.
_UNREAD = {
    "swapped arguments 5 and 6": "the weight stands for all three arrays",
    "swapped arguments 6 and 7": "the weight stands for all three arrays",
    **dict.fromkeys([f"swapped parameters {n} and {n + 1}" for n in (6, 7, 8)], "blocks have none"),
    "swapped parameters 9 and 10": "blocks have no SPLIT, and Metal no tiny floats",
}
EQUIVALENT = {
    "block_matvec.metal": {
        "in_blocks: swapped arguments 5 and 6 of multiply": _UNREAD["swapped arguments 5 and 6"]
    }
    | {
        f"{kernel.name}: {what} of B{m}::multiply": why
        for (structure, _), kernel in matvec._OF_BLOCKS.items()
        for m in range(max(len(structure) - 1, 1))
        for what, why in _UNREAD.items()
    }
}
