"""Oracle: the formula in float64 numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.moe import moe_combine
from tests.kernels.harness import DTYPES, Case, error, float64

RNG = np.random.default_rng(4)
IMPLEMENTATIONS = {"reference": moe_combine.moe_combine, "fused": moe_combine.moe_combine_fused}
# Half a unit in the last place of values up to 16, and float32's own noise.
ROUNDING = {mx.float32: 4e-6, mx.float16: 2**-8, mx.bfloat16: 2**-5}


def arguments(n, c, dtype, *, shared=True, score=True):
    made = {
        "residual": mx.array(RNG.normal(size=(n, c))).astype(dtype),
        "experts": mx.array(RNG.normal(size=(n, c))).astype(mx.float32),
    }
    if shared:
        made["shared"] = mx.array(RNG.normal(size=(n, c))).astype(dtype)
    if score:
        made["score"] = mx.array(RNG.normal(size=(n, 1))).astype(dtype)
    return made


def oracle(residual, experts, shared=None, score=None):
    y = float64(residual) + float64(experts)
    if shared is not None:
        gate = 1 if score is None else 1 / (1 + np.exp(-float64(score)))
        y = y + gate * float64(shared)
    return y


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("shared", "score", "dtype"),
    [
        # By default each dtype with one choice of what there is.
        pytest.param(*given, dtype, marks=[pytest.mark.slow] * (i != j))
        for i, given in enumerate(((True, True), (True, False), (False, False)))
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_agrees_with_the_formula(implementation, dtype, shared, score):
    made = arguments(3, 84, dtype, shared=shared, score=score)
    y = IMPLEMENTATIONS[implementation](**made)
    assert y.dtype == dtype
    assert error(y, oracle(**made)) <= ROUNDING[dtype]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("n", "c"),
    [
        *((1, 8), (2, 132), (2, 2060)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2048), (1, 4096))),
    ],
)
def test_rows_of_every_length(n, c):
    made = arguments(n, c, mx.float32)
    assert error(moe_combine.moe_combine_fused(**made), oracle(**made)) <= ROUNDING[mx.float32]


@pytest.mark.usefixtures("device")
def test_y_is_the_reference_to_the_bit():
    """One rounding at the end: implementations may only differ in the gate's last place."""
    made = arguments(4, 64, mx.bfloat16, score=False)
    expected = moe_combine.moe_combine(**made)
    for name, implementation in IMPLEMENTATIONS.items():
        assert mx.array_equal(implementation(**made), expected), name


@pytest.mark.parametrize("name", ["experts", "shared", "score"])
def test_wrong_shapes_are_refused(name):
    made = arguments(3, 16, mx.float32)
    made[name] = made[name].astype(mx.float16)
    with pytest.raises(ShapeError, match=f"{name} is .*float16"):
        moe_combine.moe_combine_fused(**made)


def test_rows_of_odd_length_are_refused():
    with pytest.raises(ShapeError, match="rows of 18 values"):
        moe_combine.moe_combine_fused(**arguments(2, 18, mx.float32))


def case(name, n, c, dtype, **options):
    made = arguments(n, c, dtype, **options)
    return Case(
        name,
        call=lambda: [moe_combine.moe_combine_fused(**made)],
        expected=lambda: [oracle(**made)],
        limit=ROUNDING[dtype],
    )


CASES = {
    "moe_combine": [
        case("gated", 3, 136, mx.float32),
        case("plain", 2, 2060, mx.float16, score=False),
        case("routed", 2, 8, mx.float32, shared=False, score=False),
    ],
}
_WHOLE_PACKS = "C and the place are multiples of 4"
_GUARDED = "the place lies beyond C there"
EQUIVALENT = {
    "moe_combine.metal": {
        "moe_combine: off by one < -> + 1 < (2)": _WHOLE_PACKS,
        "moe_combine: off by one < -> <=": _GUARDED,
    }
}
