"""Oracle: a loop over tokens and experts in float64, written from the formula."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.moe import router
from tests.kernels.harness import DTYPES, Case, error, float64

RNG = np.random.default_rng(1)
SOFTMAX = {"reference": router.softmax_top_k, "fused": router.softmax_top_k_fused}
SIGMOID = {"reference": router.sigmoid_top_k, "fused": router.sigmoid_top_k_fused}


def best(values, k):
    """Indices of the k largest, ties to the lower index, ascending."""
    order = sorted(range(len(values)), key=lambda e: (-values[e], e))
    return sorted(order[:k])


def softmax_oracle(logits, *, k, normalise=True):
    ids, weights = [], []
    for row in float64(logits):
        p = np.exp(row - row.max())
        p /= p.sum()
        ids.append(best(row, k))
        weights.append(p[ids[-1]] / (p[ids[-1]].sum() if normalise else 1))
    return np.array(ids), np.array(weights)


def sigmoid_oracle(logits, bias, *, k, groups=1, kept_groups=1, normalise=True, scale=1.0):
    ids, weights = [], []
    for row in float64(logits):
        s = 1 / (1 + np.exp(-row))
        choice = s + float64(bias)
        if kept_groups < groups:
            cut = choice.reshape(groups, -1)
            kept = best([sum(sorted(g)[-2:]) for g in cut], kept_groups)
            for g in set(range(groups)) - set(kept):
                cut[g] = -np.inf
        ids.append(best(choice, k))
        weights.append(s[ids[-1]] / (s[ids[-1]].sum() + 1e-20 if normalise else 1) * scale)
    return np.array(ids), np.array(weights)


def distinct(n, e, dtype):
    """Logits whose order no rounding changes: distinct steps of 1/32."""
    rows = [RNG.permutation(e) for _ in range(n)]
    return mx.array((np.array(rows) - e / 2) / 32).astype(dtype)


def agree(got, wanted, limit=2e-6):
    assert got[0].dtype == mx.uint32
    assert got[1].dtype == mx.float32
    np.testing.assert_array_equal(np.array(got[0]), wanted[0])
    assert error(got[1], wanted[1]) <= limit


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", SOFTMAX)
@pytest.mark.parametrize(
    ("n", "e", "k", "normalise"),
    [
        # By default one as it is.
        pytest.param(*sizes, on, marks=[pytest.mark.slow] * (not on and sizes != (9, 256, 8)))
        for sizes in ((2, 5, 2), (3, 32, 1), (5, 33, 16), (9, 256, 8), (4, 512, 10), (2, 16, 16))
        for on in (True, False)
    ],
)
def test_softmax_agrees_with_the_formula(implementation, n, e, k, normalise):
    logits = distinct(n, e, mx.float32)
    wanted = softmax_oracle(logits, k=k, normalise=normalise)
    agree(SOFTMAX[implementation](logits, k=k, normalise=normalise), wanted)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", SOFTMAX)
def test_softmax_takes_every_dtype(implementation, dtype):
    logits = mx.array(RNG.normal(size=(6, 60))).astype(dtype)
    agree(SOFTMAX[implementation](logits, k=6), softmax_oracle(logits, k=6))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", SOFTMAX)
def test_softmax_ties_go_to_the_lower_id(implementation):
    logits = mx.array(RNG.integers(-2, 3, (8, 70)).astype(np.float32)) * 0.0
    logits = mx.where(mx.arange(70) % 3 == 0, -logits, logits)  # 0.0 and -0.0 are equal
    agree(SOFTMAX[implementation](logits, k=9), softmax_oracle(logits, k=9))
    logits = mx.array(RNG.integers(-2, 3, (8, 70)).astype(np.float32))
    agree(SOFTMAX[implementation](logits, k=9), softmax_oracle(logits, k=9))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", SOFTMAX)
@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_of_extreme_logits(implementation, normalise):
    logits = distinct(3, 40, mx.float32) * 1e4
    logits[1, 3:] = -mx.inf
    wanted = softmax_oracle(logits, k=4, normalise=normalise)
    agree(SOFTMAX[implementation](logits, k=4, normalise=normalise), wanted)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", SIGMOID)
@pytest.mark.parametrize(
    ("n", "e", "k", "groups", "kept", "normalise"),
    [
        # By default one as it is.
        pytest.param(*sizes, on, marks=[pytest.mark.slow] * (not on and sizes[0] != 5))
        for sizes in (
            (5, 256, 8, 8, 4), (1, 24, 3, 4, 2), (3, 96, 16, 3, 1), (2, 64, 5, 32, 7),
            (4, 37, 6, 1, 1),
        )
        for on in (True, False)
    ],
)  # fmt: skip
def test_sigmoid_agrees_with_the_formula(implementation, n, e, k, groups, kept, normalise):
    # Steps that survive the sigmoid's and the sum's rounding.
    logits = distinct(n, e, mx.float32) * 0.5
    bias = mx.array(RNG.permutation(e) * 0.37 / e).astype(mx.float32)
    options = {"k": k, "groups": groups, "kept_groups": kept, "normalise": normalise, "scale": 2.5}
    wanted = sigmoid_oracle(logits, bias, **options)
    agree(SIGMOID[implementation](logits, bias, **options), wanted)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("implementation", SIGMOID)
def test_sigmoid_ties_go_to_the_lower_group_and_id(implementation):
    logits, bias = mx.zeros((3, 48)), mx.zeros((48,))
    logits[2, 40] = 1.0
    options = {"k": 7, "groups": 6, "kept_groups": 2}
    agree(SIGMOID[implementation](logits, bias, **options), sigmoid_oracle(logits, bias, **options))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_forms_agree_where_the_bias_is_negative(dtype):
    logits = mx.array(RNG.normal(size=(7, 128))).astype(dtype)
    bias = mx.array(RNG.normal(size=128) - 3).astype(mx.float32)
    options = {"k": 8, "groups": 8, "kept_groups": 3, "scale": 1.7}
    a, b = (implementation(logits, bias, **options) for implementation in SIGMOID.values())
    agree(a, (np.array(b[0]), float64(b[1])))


def test_shapes_that_the_kernel_refuses():
    with pytest.raises(ShapeError, match="17 of 40 experts"):
        router.softmax_top_k_fused(mx.zeros((2, 40)), k=17)
    with pytest.raises(ShapeError, match="2 of 513 experts"):
        router.softmax_top_k_fused(mx.zeros((2, 513)), k=2)
    with pytest.raises(ShapeError, match="expected"):
        router.softmax_top_k_fused(mx.zeros((2, 5, 7)), k=2)
    with pytest.raises(ShapeError, match="bias is"):
        router.sigmoid_top_k_fused(mx.zeros((2, 8)), mx.zeros((9,)), k=2)
    with pytest.raises(ShapeError, match="2 of 3 groups"):
        router.sigmoid_top_k_fused(mx.zeros((2, 8)), mx.zeros((8,)), k=2, groups=3, kept_groups=2)


def case(name, implementation, oracle, logits, *others, **options):
    return Case(
        name,
        call=lambda: implementation(logits, *others, **options),
        expected=lambda: oracle(logits, *others, **options),
        limit=2e-6,
    )


def softmax_case(name, logits, **options):
    return case(name, router.softmax_top_k_fused, softmax_oracle, logits, **options)


def best_of(E, best):
    """Logits of one token: those of `best`, -16 for all others."""
    return mx.array([[float(best.get(e, -16.0)) for e in range(E)]])


def sigmoid_case(name, logits, *, spread=0.37, shift=0.0, **options):
    bias = RNG.permutation(logits.shape[1]) * spread / logits.shape[1] + shift
    bias = mx.array(bias).astype(mx.float32)
    return case(name, router.sigmoid_top_k_fused, sigmoid_oracle, logits * 0.5, bias, **options)


CASES = {
    "softmax_top_k": [
        softmax_case("normalised", distinct(5, 70, mx.float32), k=5),
        softmax_case("all", distinct(2, 70, mx.float32), k=16, normalise=False),
        softmax_case("ties", mx.zeros((2, 70)), k=5),
        softmax_case("extreme", 1e4 * distinct(3, 40, mx.float32), k=4),
    ],
    "sigmoid_top_k": [
        sigmoid_case(
            "grouped", distinct(5, 96, mx.float32), k=6, groups=8, kept_groups=3, scale=2.5
        ),
        sigmoid_case("plain", distinct(2, 33, mx.float32), k=4, normalise=False),
        sigmoid_case("last is best", mx.arange(66.0).reshape(1, 66) / 8, k=2),
        sigmoid_case("all but one", distinct(3, 36, mx.float32), k=16, groups=3, kept_groups=2),
        sigmoid_case("small groups", distinct(3, 70, mx.float32), k=3, groups=14, kept_groups=2),
        # The two best of the better group belong to one lane.
        sigmoid_case(
            "one lane", best_of(128, {3: 5, 35: 4.9, 70: 4, 75: 4.5}), k=2, groups=2, spread=0.0
        ),
        sigmoid_case("negative", distinct(2, 64, mx.float32), k=3, groups=4, shift=-3.0),
    ],
}
EQUIVALENT = {
    "router.metal": {
        "rank_of: off by one < -> <=": "lane K holds no id: its 2^32 - 1 is not smaller",
        "group_scores: off by one < -> <= (2)": "no group has an index that large",
        "sigmoid_choice: off by one < -> <= (7)": "lane K writes nothing",
        "sigmoid_choice: off by one < -> <= (3)": "keeping all groups cuts nothing",
        "take_largest: off by one < -> <= (2)": "no index is so large: nothing is written",
    }
}
