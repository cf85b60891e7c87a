"""Oracle: scores in float64 numpy and a stable sort. Numbers are small integers, so that every
implementation has the same scores, and many of them are equal; or they are random, and decisions
that are nearer than rounding are left out."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.mla.choose_positions import (
    _CHOICE,
    best_positions,
    choose_positions,
    choose_positions_fused,
)
from tests.kernels.harness import DTYPES, Case, emulated, float64, launched

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32
IMPLEMENTATIONS = {"reference": choose_positions, "fused": choose_positions_fused}


class Call:
    """A random call and what it must give. rows: Of a tail; with one the length is on the device.
    Rows that do not count are large. flat: Every weight is 0; negative: Every weight is below 0.
    scores: Column -> score of every query, a whole number and units of 2^-23; of two heads."""

    def __init__(
        self, dtype, B, H, T, Di, S, k, length, *, start=None, rows=0, random=False, flat=False,
        negative=False, scores=None,
    ):  # fmt: skip
        rng = np.random.default_rng(S + T)

        def draw(*shape):
            values = rng.normal(size=shape) if random else rng.integers(-2, 3, shape)
            return values.astype(np.float32)

        q, weights, keys = draw(B, H, T, Di), draw(B, T, H), draw(B, 1, S, Di)
        weights = -np.abs(weights) if negative else weights * (not flat)
        if scores is not None:
            q[:], weights[:] = np.eye(2, Di)[None, :, None], (1, 2**-23)
            keys[..., :2] = [scores(column) for column in range(S)]
        q, weights, keys = (mx.array(x).astype(dtype) for x in (q, weights, keys))
        self.k, first = k, start or [0] * B
        self.chosen, self.margin = self.oracle(q, weights, keys, first, length)
        self.options = {"k": k, "length": length}
        self.options["start"] = None if start is None else mx.array(start, mx.int32)
        spoilt, newest = np.array(keys.astype(F32)), (length - 1) // max(rows, 1) * rows
        whole = spoilt.copy()
        spoilt[:, :, length:] = 1e4
        for b in range(B):
            spoilt[b, :, : first[b]] = 1e4
        if rows:
            end = np.full((B, 1, rows, Di), 1e4, np.float32)
            end[:, :, : length - newest] = whole[:, :, newest:length]
            spoilt[:, :, newest:] = 1e4
            self.options["tail"] = mx.array(end).astype(dtype)
            self.options["length"] = mx.array([length], mx.int32)
        self.arrays = q, weights, mx.array(spoilt).astype(dtype)

    def oracle(self, q, weights, keys, first, length):
        """What is chosen, and by how much each decision is sure."""
        q, weights, keys = float64(q), float64(weights), float64(keys)[:, 0]
        B, _, T, _ = q.shape
        chosen, margin = np.zeros((B, T, self.k), np.int32), np.full((B, T), np.inf)
        for b, t in np.ndindex(B, T):
            last = length - T + t
            columns = np.arange(min(first[b], last), last + 1)
            scores = weights[b, t] @ np.maximum(q[b, :, t] @ keys[b, columns].T, 0)
            order = np.argsort(-scores, kind="stable")
            if len(columns) > self.k:
                margin[b, t] = scores[order[self.k - 1]] - scores[order[self.k]]
            own = np.sort(columns[order[: self.k]])
            chosen[b, t] = [*own, *[last] * (self.k - len(own))]
        return chosen, margin

    def case(self, name):
        call = lambda: [choose_positions_fused(*self.arrays, **self.options)]  # noqa: E731
        return Case(name, call, lambda: [self.chosen], 0.0)


# dtype, B, H, T, Di, S, k, length and more.
CALLS = {
    "one token": (BF16, 1, 32, 1, 128, 320, 100, 300, {}),
    "a tail": (F32, 2, 5, 1, 32, 128, 20, 75, {"rows": 32, "start": [0, 40]}),
    "several tokens": (F16, 2, 16, 8, 16, 192, 7, 170, {"start": [3, 0]}),
    "around k": (F32, 2, 3, 6, 16, 64, 34, 40, {"start": [0, 3]}),
    "a first position": (F32, 1, 20, 1, 16, 64, 50, 1, {"rows": 64}),
    "many": (BF16, 1, 1, 1, 16, 2048, 700, 1900, {"rows": 64}),
    "the last ones": (F32, 1, 2, 1, 16, 1024, 5, 897, {"scores": lambda i: (i, 0)}),
    "as many as columns": (F32, 1, 2, 1, 16, 192, 7, 192, {"scores": lambda i: (i % 9, 0)}),
    # In float32 they differ in the last two bits.
    "neighbours": (F32, 1, 2, 1, 16, 96, 40, 90, {"scores": lambda i: (1, i % 4)}),
    "all are zero": (F32, 1, 2, 2, 16, 640, 150, 601, {"flat": True}),
    "all are negative": (F16, 1, 17, 1, 16, 96, 9, 90, {"negative": True}),
}


USUAL = ("a tail", "around k")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in USUAL)) for n in CALLS]
)
def test_of_equal_scores_the_lower_position(name):
    *sizes, more = CALLS[name]
    call = Call(*sizes, **more)
    for implementation in IMPLEMENTATIONS.values():
        found = implementation(*call.arrays, **call.options)
        assert found.dtype == mx.int32
        assert np.array(found).tolist() == call.chosen.tolist()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=[pytest.mark.slow] * (d != BF16), id=str(d)) for d in DTYPES]
)
def test_the_best_of_random_scores(dtype):
    call = Call(dtype, 2, 17, 5, 32, 256, 40, 250, start=[0, 100], random=True)
    sure = call.margin > 1e-4
    assert sure.mean() > 0.8
    for implementation in IMPLEMENTATIONS.values():
        found = np.array(implementation(*call.arrays, **call.options))
        assert (found[sure] == call.chosen[sure]).all()


@pytest.mark.parametrize("length", [63, 64, 65, 128])
def test_lengths_around_steps_of_the_capacity_and_of_k(length):
    """With k = 64 positions, in a buffer that just grew; on CUDA other threads choose."""
    for back_end in ("metal", "cuda"):
        call = Call(F32, 1, 3, 1, 16, 128, 64, length, rows=64)
        with emulated(name=back_end):
            found = choose_positions_fused(*call.arrays, **call.options)
        assert np.array(found).tolist() == call.chosen.tolist()


class Choice:
    """Scores int32 ``[rows, columns]``, given as bits of floats, and what the second launch alone
    must choose of those from `low` to `high` - 1: NaN before all numbers, -0 as 0."""

    def __init__(self, bits, k, low, high, simdgroups=8):
        self.bits, self.k, self.low, self.high = np.ascontiguousarray(bits), k, low, high
        self.simdgroups = simdgroups

    def __call__(self):
        rows = len(self.bits)
        scores, bounds = (
            mx.array(self.bits).view(mx.float32),
            mx.array([self.low, self.high] * rows),
        )
        return _CHOICE(
            scores,
            bounds,
            template={"K": self.k, "SIMDGROUPS": self.simdgroups, "TOKENS": 1},
            grid=(32 * self.simdgroups * rows, 1, 1),
            threadgroup=(32 * self.simdgroups, 1, 1),
            output_shapes=[(rows, self.k)],
            output_dtypes=[mx.int32],
        )

    def wanted(self):
        scores = self.bits[:, self.low : self.high].view(np.float32)
        none = np.isnan(scores)
        order = np.lexsort((-np.where(none, 0, scores), ~none))[:, : self.k]
        found = np.full((len(scores), self.k), self.high - 1)
        found[:, : order.shape[1]] = np.sort(order) + self.low
        return found

    def case(self, name):
        return Case(name, self, lambda: [self.wanted()], 0.0)


def any_floats(seed, *shape):
    """NaN too, one of 256."""
    return np.random.default_rng(seed).integers(-(2**31), 2**31, shape, dtype=np.int32)


def near(seed, *shape):
    """Floats of which many begin with the same digits, and some are equal."""
    return 0x41234000 + np.random.default_rng(seed).integers(0, 2**12, shape, dtype=np.int32)


SPECIAL = np.array([0, -(2**31), 0x7F800000, -0x800000, 0x7FC00000, -0x400000], np.int32)
CHOICES = {
    "any floats": Choice(any_floats(0, 2, 1400), 300, 5, 1399),
    "near ones": Choice(near(1, 2, 1400), 700, 0, 1331),
    "NaN, infinities and zeros": Choice(SPECIAL[any_floats(2, 3, 640) % 6], 450, 3, 640),
    "more than four places": Choice(near(3, 1, 5000), 1100, 130, 4997),
    "more than all places": Choice(any_floats(4, 1, 4400), 4200, 1, 4390),
}


@pytest.mark.parametrize("simdgroups", [8, 32])
@pytest.mark.parametrize("name", CHOICES)
def test_any_scores(name, simdgroups):
    choice = CHOICES[name]
    other = Choice(choice.bits, choice.k, choice.low, choice.high, simdgroups)
    with emulated(name="metal" if simdgroups == 8 else "cuda"):
        assert np.array(other()[0]).tolist() == choice.wanted().tolist()


@pytest.mark.parametrize("name", CHOICES)
def test_any_scores_by_the_reference(name):
    """But for NaN."""
    choice = CHOICES[name]
    numbers = np.nan_to_num(choice.bits.view(np.float32), nan=-7.0, posinf=np.inf, neginf=-np.inf)
    choice = Choice(numbers.view(np.int32), choice.k, choice.low, choice.high)
    first, last = (mx.array([[[n]]]) for n in (choice.low, choice.high - 1))
    scores = mx.array(choice.bits).view(mx.float32)[:, None]
    found = best_positions(scores, last, first, choice.k)[:, 0]
    assert np.array(found).tolist() == choice.wanted().tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_a_query_chooses_the_same_beside_any_others():
    call = Call(BF16, 2, 16, 6, 32, 192, 30, 180, start=[0, 20], random=True)
    q, weights, keys = call.arrays
    together = choose_positions_fused(*call.arrays, **call.options)
    for b, t in np.ndindex(2, 6):
        own = q[b : b + 1, :, t : t + 1], weights[b : b + 1, t : t + 1], keys[b : b + 1]
        options = {"k": 30, "length": 180 - 5 + t, "start": call.options["start"][b : b + 1]}
        assert mx.array_equal(choose_positions_fused(*own, **options)[0, 0], together[b, t])


@pytest.mark.usefixtures("device")
def test_it_is_two_launches():
    *sizes, more = CALLS["a tail"]
    call = Call(*sizes, **more)
    with launched() as names:
        choose_positions_fused(*call.arrays, **call.options)
    assert names == ["position_scores", "best_positions"]


def test_what_does_not_fit_is_refused():
    *sizes, more = CALLS["a tail"]
    call = Call(*sizes, **more)
    (q, weights, keys), tail = call.arrays, call.options["tail"]
    for arrays, changed in (
        ((q, weights, keys.astype(F16)), {}),
        ((q, weights, keys[:1]), {}),
        ((q, weights[:, :, 1:], keys), {}),
        ((q[..., :8], weights, keys[..., :8]), {"tail": tail[..., :8]}),
        ((q, weights, keys[:, :, :120]), {}),
        ((q, weights, keys), {"k": 0}),
        ((q, weights, keys), {"tail": tail[..., 1:]}),
        ((q, weights, keys), {"tail": tail[:, :, :0]}),
        ((mx.zeros((2, 5, 9, 32)), mx.zeros((2, 9, 5)), keys), {}),
        ((mx.zeros((2, 5, 1, 1024)), weights, mx.zeros((2, 1, 128, 1024))), {"tail": None}),
    ):
        with pytest.raises(ShapeError), emulated():
            choose_positions_fused(*arrays, **call.options | changed)


def case(name):
    *sizes, more = CALLS[name]
    return Call(*sizes, **more).case(name)


NONE_THERE = "past the end of a stretch there is no key"
SPEED = "of speed alone"
HIDDEN = "keys of rows that do not count are zeros"
EQUIVALENT = {
    "choose_positions.metal": {
        "best_positions: off by one < -> <=": NONE_THERE,
        "best_positions: off by one < -> <= (2)": NONE_THERE,
        "best_positions: off by one < -> <= (3)": NONE_THERE,
        "best_positions: off by one < -> <= (6)": NONE_THERE,
        "best_positions: off by one < -> + 1 <": SPEED,
        "best_positions: off by one < -> + 1 < (3)": "behind the last stretch nobody counts",
        "best_positions: off by one <= -> <": SPEED,
        "best_positions: off by one <= -> < (2)": SPEED,
        "best_positions: off by one <= -> < (3)": SPEED,
        "best_positions: off by one > -> >=": SPEED,
        "best_positions: off by one > -> >= (2)": SPEED,
        "best_positions: swapped arguments 3 and 4 of fetch_keys": SPEED,
        "best_positions: unwritten": SPEED,
        "find_digit: unwritten (4)": SPEED,
        "position_scores: off by one <= -> <": HIDDEN,
        "position_scores: off by one >= -> >": HIDDEN,
        "position_scores: swapped arguments 1 and 2 of metal::fma": "commutes",
        "position_scores: swapped parameters 7 and 8 of stage": "both are 0",
    }
}
CASES = {
    "position_scores": [
        case("a tail"),
        case("several tokens"),
        Call(F32, 2, 17, 2, 32, 160, 30, 150, start=[0, 70]).case("two rows of tiles"),
        Call(BF16, 1, 2, 1, 16, 192, 3, 129, rows=64).case("a tail of one row"),
        case("all are negative"),
    ],
    "best_positions": [
        case("around k"),
        case("several tokens"),
        case("many"),
        case("all are zero"),
        case("a first position"),
        case("all are negative"),
        case("the last ones"),
        case("as many as columns"),
        case("neighbours"),
        *(CHOICES[name].case(name) for name in CHOICES if name != "more than all places"),
    ],
}
