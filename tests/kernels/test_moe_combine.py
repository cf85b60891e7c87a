"""Oracle: the formula in float64 numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import moe_combine
from tests.kernels.harness import DTYPES, Case, error, float64

RNG = np.random.default_rng(4)
FORMS = {"reference": moe_combine.moe_combine, "fused": moe_combine.moe_combine_fused}
# Half a unit in the last place of values up to 16, and float32's own noise.
ROUNDING = {mx.float32: 4e-6, mx.float16: 2**-8, mx.bfloat16: 2**-5}


def arguments(n, c, dtype, *, shared=True, score=True, norm=False):
    made = {
        "residual": mx.array(RNG.normal(size=(n, c))).astype(dtype),
        "experts": mx.array(RNG.normal(size=(n, c))).astype(mx.float32),
    }
    if shared:
        made["shared"] = mx.array(RNG.normal(size=(n, c))).astype(dtype)
    if score:
        made["score"] = mx.array(RNG.normal(size=(n, 1))).astype(dtype)
    if norm:
        made["norm"] = mx.array(RNG.uniform(0.5, 1.5, c)).astype(dtype)
        made["eps"] = 1e-3
    return made


def oracle(residual, experts, shared=None, score=None, norm=None, eps=1e-6):
    y = float64(residual) + float64(experts)
    if shared is not None:
        gate = 1 if score is None else 1 / (1 + np.exp(-float64(score)))
        y = y + gate * float64(shared)
    if norm is None:
        return [y]
    rounded = float64(mx.array(y.astype(np.float32)).astype(residual.dtype))
    factor = 1 / np.sqrt((rounded**2).mean(-1, keepdims=True) + eps)
    return [y, float64(norm) * rounded * factor]


def as_list(returned):
    return [returned] if isinstance(returned, mx.array) else list(returned)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("shared", "score"), [(True, True), (True, False), (False, False)])
def test_agrees_with_the_formula(form, dtype, shared, score, norm):
    made = arguments(3, 84, dtype, shared=shared, score=score, norm=norm)
    got, wanted = as_list(FORMS[form](**made)), oracle(**made)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == dtype
        assert error(a, b) <= ROUNDING[dtype]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("n", "c"), [(1, 8), (2, 132), (1, 2048), (2, 2060), (1, 4096)])
def test_rows_of_every_length(n, c):
    made = arguments(n, c, mx.float32, norm=True)
    got = moe_combine.moe_combine_fused(**made)
    for a, b in zip(got, oracle(**made), strict=True):
        assert error(a, b) <= ROUNDING[mx.float32]


@pytest.mark.usefixtures("device")
def test_y_is_the_reference_to_the_bit():
    """One rounding at the end: forms may only differ in the gate's last place."""
    made = arguments(4, 64, mx.bfloat16, score=False)
    assert mx.array_equal(*(form(**made) for form in FORMS.values()))


@pytest.mark.parametrize("name", ["experts", "shared", "score", "norm"])
def test_wrong_shapes_are_refused(name):
    made = arguments(3, 16, mx.float32, norm=True)
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
        call=lambda: as_list(moe_combine.moe_combine_fused(**made)),
        expected=lambda: oracle(**made),
        limit=ROUNDING[dtype],
    )


CASES = {
    "moe_combine": [
        case("gated", 3, 136, mx.float32),
        case("plain", 2, 2060, mx.float16, score=False),
        case("routed", 2, 8, mx.float32, shared=False, score=False),
    ],
    "moe_combine_norm": [
        case("gated", 3, 136, mx.float32, norm=True),
        case("long", 2, 2060, mx.float32, norm=True),
        case("small", 2, 136, mx.bfloat16, norm=True),
    ],
}
_WHOLE_PACKS = "C and the place are multiples of 4"
_GUARDED = "the place lies beyond C there"
EQUIVALENT = {
    "moe_combine.metal": {
        "moe_combine: swapped arguments 4 and 5 of moe_combine: NORM, EPS": "both are 0",
        "moe_combine: off by one if (at < C) -> + 1 <": _WHOLE_PACKS,
        "moe_combine: off by one if (at < C) -> + 1 < (2)": _WHOLE_PACKS,
        "moe_combine: off by one i < PACKS -> <=": _GUARDED,
        "moe_combine: off by one i < PACKS -> <= (2)": _GUARDED,
    }
}
