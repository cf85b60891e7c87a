"""Oracle: the formula in float64 numpy; the naive error is the reference's."""

from __future__ import annotations

import contextlib
import functools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.linear import matvec
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.streams import read_streams as module
from mlx_moeflux.kernels.streams.read_streams import read_streams, read_streams_fused
from mlx_moeflux.models.layers import Applied
from tests.kernels.experts import dense, random_array, random_matrix
from tests.kernels.harness import DTYPES, Case, error, float64, launched, one_rounding, patched

EPS = 1e-5
IMPLEMENTATIONS = {"reference": read_streams, "fused": read_streams_fused}
# rows, S, C, R, bits of down, of w and of up, and their groups
SIZES = [
    (1, 3, 64, 8, (0, 0, 0), 32),
    (2, 2, 7, 3, (0, 0, 0), 32),  # no width is even
    (3, 4, 24, 5, (0, 0, 0), 32),
    (1, 5, 50, 6, (0, 0, 0), 32),
    (2, 4, 96, 32, (4, 8, 2), 32),
    (1, 3, 352, 64, (8, 0, 4), 32),
    (1, 2, 640, 160, (2, 4, 0), 32),
    (1, 4, 1032, 96, (0, 4, 4), 32),  # columns are shared, the last share being smaller
    (2, 32, 33, 1, (0, 0, 0), 32),
]


def arguments(sizes, dtype, *, inject=True, joined=False, floats=None):
    """The call's arguments. floats: Dtype of the norm, by default float32."""
    rows, S, C, R, (down, w, up), group = sizes
    rng = np.random.default_rng(rows + S * C + R)
    options = {"group": group, "dtype": dtype}
    weights = [Weight(*random_matrix(rng, (R, S * C), bits=down, **options))]
    if inject:
        weights.append(Weight(*random_matrix(rng, (S, S * C), bits=w, **options)))
    if joined:
        pairs = [(one.weight, one.scales, one.biases) for one in weights]
        whole = [None if a is None else mx.concatenate([a, b]) for a, b in zip(*pairs, strict=True)]
        weights = [Weight(*whole, weights[0].spec, (R, S))]
    matrix = Weight(*random_matrix(rng, (S * C, R), bits=up, **options))
    # The streams differ in size.
    x = random_array(rng, (rows, S, C), mx.float32) * mx.arange(1, S + 1)[:, None]
    norm = random_array(rng, (S * C,), floats or mx.float32)
    known = {"norm": norm, "eps": EPS, "streams": S}
    return (x.reshape(rows, -1).astype(dtype), weights, matrix), known


def oracle(x, weights, up, *, norm, eps, streams):
    rows, f = x.shape[0], float64(x).reshape(x.shape[0], streams, -1)
    f = f / np.sqrt((f**2).mean(-1, keepdims=True) + eps)
    normed = f.reshape(rows, -1) * float64(norm)
    matrices = np.concatenate([dense(weight) for weight in weights])
    products = normed @ matrices.T / streams
    R = weights[0].results[0]
    low, inject = products[:, :R], products[:, R:]
    gate = 1 / (1 + np.exp(-(low / (1 + np.exp(-low))) @ dense(up).T))
    read = (gate * normed).reshape(rows, streams, -1).mean(axis=1)
    return read, 2 / (1 + np.exp(-inject)) if inject.size else None


def limits(args, options, truths):
    """Twice the error of stock MLX; for a few numbers that has none by luck, the rounding of the
    result and those of the sum and the sigmoid in float32."""
    naive, dtype = read_streams(*args, **options)[: len(truths)], args[0].dtype
    return [
        max(2 * error(y, truth), one_rounding(truth, dtype) + 2 * one_rounding(truth, mx.float32))
        for y, truth in zip(naive, truths, strict=True)
    ]


def check(implementation, args, options, inject=True):
    found, truths = implementation(*args, **options), oracle(*args, **options)
    if not inject:
        assert found[1] is None
        found, truths = found[:1], truths[:1]
    for y, truth, limit in zip(found, truths, limits(args, options, truths), strict=True):
        assert y.dtype == args[0].dtype
        assert error(y, truth) <= limit


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        # By default each size in one of the dtypes, in turns, and of floats three sizes.
        pytest.param(sizes, dtype, marks=[pytest.mark.slow] * (i % 3 != j or i in (0, 3)),
                     id=f"{'-'.join(map(str, sizes[:4]))}-{dtype}")
        for i, sizes in enumerate(SIZES)
        for j, dtype in enumerate(DTYPES)
    ],
)  # fmt: skip
def test_agrees_with_float64(sizes, dtype):
    check(read_streams_fused, *arguments(sizes, dtype))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("size", [0, 4, pytest.param(7, marks=pytest.mark.slow)])
def test_the_last_mixer_injects_nothing(size):
    args, options = arguments(SIZES[size], mx.bfloat16, inject=False)
    check(read_streams_fused, args, options, inject=False)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("bits", "dtype"), [pytest.param(0, mx.bfloat16, marks=pytest.mark.slow), (4, mx.float32)]
)
def test_matrices_in_one_are_as_if_apart(bits, dtype):
    sizes = (2, 3, 96, 32, (bits, bits, 4), 32)
    apart, options = arguments(sizes, dtype)
    together, _ = arguments(sizes, dtype, joined=True)
    for a, b in zip(read_streams_fused(*apart, **options),
                    read_streams_fused(*together, **options), strict=True):  # fmt: skip
        assert mx.array_equal(a, b)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (0, mx.float32),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((3, mx.float16), (4, mx.bfloat16))
        ),
    ],
)
def test_a_row_has_the_same_bits_beside_any_others(size, dtype):
    (x, *matrices), options = arguments((7, *SIZES[size][1:]), dtype)
    together = read_streams_fused(x, *matrices, **options)
    alone = [read_streams_fused(x[i : i + 1], *matrices, **options) for i in range(7)]
    for i, whole in enumerate(together):
        assert mx.array_equal(whole, mx.concatenate([parts[i] for parts in alone]))
    shaped = read_streams_fused(x.reshape(1, 7, 1, -1), *matrices, **options)
    for flat, y in zip(together, shaped, strict=True):
        assert y.shape == (1, 7, 1, flat.shape[-1])
        assert mx.array_equal(y.reshape(flat.shape), flat)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "floats", [pytest.param(mx.float16, marks=pytest.mark.slow), mx.bfloat16], ids=str
)
def test_a_norm_of_any_floats(floats):
    check(read_streams_fused, *arguments(SIZES[2], mx.float16, floats=floats))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_and_infinity_spoil_their_row_alone(implementation, value):
    (x, *matrices), options = arguments((3, *SIZES[2][1:]), mx.float32)
    spoilt = mx.array(np.where(np.arange(x.size).reshape(x.shape) == x.shape[1] + 5, value, x))
    for y, before in zip(
        IMPLEMENTATIONS[implementation](spoilt, *matrices, **options),
        IMPLEMENTATIONS[implementation](x, *matrices, **options),
        strict=True,
    ):
        assert mx.isnan(y[1]).all()
        for row in (0, 2):
            assert mx.array_equal(y[row], before[row])


@pytest.mark.usefixtures("device")
def test_zeros_are_no_division_by_zero():
    (x, *matrices), options = arguments(SIZES[2], mx.bfloat16)
    read, inject = read_streams_fused(mx.zeros_like(x), *matrices, **options)
    assert mx.array_equal(read, mx.zeros_like(read))
    assert mx.array_equal(inject, mx.ones_like(inject))


@pytest.mark.usefixtures("device")
def test_it_is_two_launches():
    args, options = arguments(SIZES[4], mx.bfloat16)
    with launched() as names:
        read_streams_fused(*args, **options)
    assert names == ["streams_down_inject", "streams_up"]


def test_gradients_flow_through_the_reference():
    (x, *matrices), options = arguments(SIZES[2], mx.float32)
    slope = mx.grad(lambda x: read_streams(x, *matrices, **options)[0].sum())(x)
    moved = x + 1e-3 * slope
    before, after = (read_streams(a, *matrices, **options)[0].sum().item() for a in (x, moved))
    assert after > before


def test_wrong_arguments():
    (x, weights, up), options = arguments(SIZES[0], mx.float32)
    calls = [
        (x[:0], weights, up, {}),
        (x.astype(mx.int32), weights, up, {}),
        (x[:, :-1], weights, up, {}),
        (x, weights[::-1], up, {}),
        (x, [weights[0], weights[0]], up, {}),
        (x, weights, weights[0], {}),
        (x, weights, Weight(up.weight[:, :-1]), {}),
        (x, weights, Weight(up.weight.astype(mx.int32)), {}),
        (x, weights, up, {"norm": options["norm"][1:]}),
        (x, weights, up, {"streams": 64}),
    ]
    for x_, weights_, up_, changed in calls:
        with pytest.raises(ShapeError):
            read_streams_fused(x_, weights_, up_, **{**options, **changed})
    for others in (
        {"weights": [Applied(nn.Linear(192, 8)), weights[1]]},
        {"up": Applied(nn.Linear(8, 192))},
        {"up": Weight(up.weight, precise=True)},
    ):
        with pytest.raises(UnsupportedError):
            read_streams_fused(**{"x": x, "weights": weights, "up": up, **others}, **options)


def case(name, sizes, dtype=mx.float32, within=contextlib.nullcontext, **kinds):
    args, options = arguments(sizes, dtype, **kinds)
    truths = [truth for truth in oracle(*args, **options) if truth is not None]
    return Case(
        name,
        call=lambda: arrays(read_streams_fused(*args, **options)),
        expected=lambda: truths,
        limit=lambda: max(limits(args, options, truths)),
        within=within,
    )


# Each threadgroup has several rows, as those of a published model have.
FEW = functools.partial(
    patched, matvec, matvec.rows_at_once, module._launches, PROCESSORS=4, AT_ONCE=6
)
CASES = {
    "streams_down_inject": [
        case("odd", (2, 5, 51, 7, (0, 0, 0), 32)),
        case("joined", (2, 4, 96, 32, (4, 4, 4), 32), joined=True),
        case("wide", (1, 6, 688, 30, (8, 4, 0), 32), within=FEW),
    ],
    "streams_down": [
        case("quantised", (2, 2, 1040, 30, (4, 0, 0), 32), inject=False, within=FEW),
    ],
    "streams_up": [
        case("quantised", (2, 4, 24, 256, (0, 0, 8), 32), floats=mx.float16),
        case("long", (1, 2, 20, 261, (0, 0, 0), 32)),
    ],
}
_PRODUCT = "the product of the two is the same"
EQUIVALENT = {
    "read_streams.metal": {
        "streams_down: swapped arguments 2 and 3 of normed_product": _PRODUCT,
        "streams_down_inject: swapped arguments 2 and 3 of normed_product": _PRODUCT,
        "streams_down_inject: swapped arguments 2 and 3 of normed_product (2)": _PRODUCT,
        "normed_product: swapped arguments 2 and 3 of take_normed": _PRODUCT,
        "normed_product: swapped parameters 2 and 3 of share": "both divide, and it is rounded up",
        "mix_streams: off by one < -> <=": "the place lies beyond the row there",
    }
}
