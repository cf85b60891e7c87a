"""Oracle: scores in float64 numpy and a stable sort. Numbers are small integers, so that every
implementation has the same scores, and many of them are equal; or they are random, and decisions
that are nearer than rounding are left out."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention.choose_blocks import (
    best_blocks,
    block_scores,
    choose_blocks,
    choose_blocks_fused,
)
from tests.kernels.harness import DTYPES, Case, error, float64, launched

IMPLEMENTATIONS = {"reference": choose_blocks, "fused": choose_blocks_fused}


def arguments(
    dtype, B, H, T, Di, N, k, *, tail=0, before=None, complete=None, random=False, rising=False
):  # fmt: skip
    """A call; the tail's blocks are where `before` says. rising: Later blocks score more."""
    rng = np.random.default_rng(N)

    def draw(*shape):
        values = rng.normal(size=shape) if random else rng.integers(-2, 3, shape)
        return mx.array(values.astype(np.float32)).astype(dtype)

    q, blocks = draw(B, H, T, Di), draw(B, 1, N, Di)
    if rising:
        q, blocks = mx.ones_like(q), mx.ones_like(blocks) * mx.arange(N, dtype=dtype)[:, None]
    options = {"k": k}
    total = np.full((B, 1), N)
    if tail:
        options |= {"tail": draw(B, 1, tail, Di), "before": mx.array(before, mx.int32)}
        total = np.array(before)[:, None] + tail
    if complete is None:
        complete = np.maximum(total - np.arange(T)[::-1], 0)
    return (q, blocks, mx.array(np.array(complete), mx.int32)), options


def oracle(q, blocks, complete, *, k, tail=None, before=None):
    """What is chosen, and by how much each decision is sure."""
    q, blocks, counts = float64(q), float64(blocks)[:, 0], np.array(complete)
    B, _, T, _ = q.shape
    chosen, margin = np.zeros((B, T, k + 1), np.int32), np.full((B, T), np.inf)
    for b, t in np.ndindex(B, T):
        keys, count = blocks[b], counts[b, t]
        if tail is not None:
            first = int(np.array(before)[b])
            newest = float64(tail)[b, 0]
            # Block i is number i - first of the tail from `first` on.
            keys = np.concatenate([keys[: max(first, 0)], newest[max(-first, 0) :]])
        scores = np.maximum(q[b, :, t] @ keys[:count].T, 0).sum(axis=0)
        order = np.argsort(-scores, kind="stable")
        if count > k:
            margin[b, t] = scores[order[k - 1]] - scores[order[k]]
        own = np.sort(order[:k])
        chosen[b, t] = [*own, *[count] * (k + 1 - len(own))]
    return chosen, margin


# dtype, B, H, T, Di, N, k and more.
CALLS = {
    "one token": (mx.bfloat16, 1, 4, 1, 16, 300, 40, {}),
    "several queries": (mx.float32, 2, 8, 9, 8, 33, 5, {}),
    "odd sizes": (mx.float16, 3, 3, 2, 7, 19, 4, {}),
    "more than there are": (mx.float32, 1, 2, 3, 16, 6, 9, {}),
    "one of a few": (mx.float32, 1, 1, 1, 8, 9, 1, {}),
    "none yet": (mx.float32, 2, 2, 2, 8, 12, 3, {"complete": [[0, 1], [12, 0]]}),
    "the last ones": (mx.float32, 1, 2, 1, 8, 130, 7, {"rising": True}),
    "a tail": (mx.float32, 2, 8, 1, 16, 64, 6, {"tail": 16, "before": [64, 33]}),
    "all in the tail": (mx.bfloat16, 2, 4, 2, 8, 16, 3, {"tail": 16, "before": [0, -5]}),
    "many heads": (mx.float32, 1, 40, 2, 16, 20, 4, {}),
    "many equal ones": (mx.float16, 1, 1, 2, 8, 600, 150, {"complete": [[599, 600]]}),
    "a wide head": (mx.float32, 1, 2, 40, 256, 20, 4, {}),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", CALLS)
def test_of_equal_scores_the_lower_block(name):
    *sizes, more = CALLS[name]
    args, options = arguments(*sizes, **more)
    expected, _ = oracle(*args, **options)
    for implementation in IMPLEMENTATIONS.values():
        found = implementation(*args, **options)
        assert found.dtype == mx.int32
        assert np.array(found).tolist() == expected.tolist()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_best_of_random_scores(dtype):
    args, options = arguments(dtype, 2, 8, 6, 32, 200, 20, random=True)
    expected, margin = oracle(*args, **options)
    sure = margin > 1e-4
    assert sure.mean() > 0.8
    for implementation in IMPLEMENTATIONS.values():
        assert (np.array(implementation(*args, **options))[sure] == expected[sure]).all()


@pytest.mark.usefixtures("device")
def test_where_nothing_scores_the_first_blocks_are_taken():
    """Exact zeros: every product is negative."""
    q, blocks = -mx.ones((1, 3, 2, 8)), mx.ones((1, 1, 50, 8))
    complete = mx.array([[50, 3]], mx.int32)
    expected = [[[*range(7), 50], [0, 1, 2, *[3] * 5]]]
    for implementation in IMPLEMENTATIONS.values():
        assert implementation(q, blocks, complete, k=7).tolist() == expected


@pytest.mark.usefixtures("device")
def test_a_query_chooses_the_same_beside_any_others():
    (q, blocks, complete), options = arguments(mx.bfloat16, 2, 4, 9, 32, 60, 12, random=True)
    together = choose_blocks_fused(q, blocks, complete, **options)
    for b, t in np.ndindex(2, 9):
        one = q[b : b + 1, :, t : t + 1], blocks[b : b + 1], complete[b : b + 1, t : t + 1]
        alone = choose_blocks_fused(*one, **options)
        assert mx.array_equal(alone[0, 0], together[b, t])


@pytest.mark.usefixtures("device")
def test_keys_that_are_not_counted_play_no_part():
    (q, blocks, complete), options = arguments(mx.float32, 1, 4, 1, 16, 40, 6, complete=[[25]])
    expected = choose_blocks_fused(q, blocks, complete, **options)
    for value in (np.nan, np.inf):
        spoilt = mx.where((mx.arange(40) < 25)[:, None], blocks, value)
        found = choose_blocks_fused(q, spoilt, complete, **options)
        assert mx.array_equal(found, expected)


def test_scores_and_their_choice_in_plain_mlx():
    (q, blocks, _), _ = arguments(mx.float32, 2, 3, 4, 16, 30, 5, random=True)
    scores = block_scores(q, blocks)
    products = float64(q) @ float64(blocks).swapaxes(2, 3)
    wanted = np.maximum(products, 0).sum(axis=1, keepdims=True) / 4
    assert error(scores, wanted) <= 1e-5
    chosen = np.array(best_blocks(scores, mx.arange(30) < 17, 5))
    for b, t in np.ndindex(2, 4):
        best = np.argsort(-wanted[b, 0, t, :17])[:5]
        assert set(np.flatnonzero(chosen[b, 0, t])) == set(best)


@pytest.mark.usefixtures("device")
def test_it_is_two_launches():
    *sizes, more = CALLS["a tail"]
    args, options = arguments(*sizes, **more)
    with launched() as names:
        choose_blocks_fused(*args, **options)
    assert names == ["block_scores", "best_blocks"]


def test_what_does_not_fit_is_refused():
    *sizes, more = CALLS["a tail"]
    (q, blocks, complete), options = arguments(*sizes, **more)
    tail, before = options["tail"], options["before"]
    for args, changed in (
        ((q, blocks.astype(mx.float16), complete), {}),
        ((q, blocks[:1], complete), {}),
        ((q, blocks, complete.astype(mx.uint32)), {}),
        ((q, blocks, complete[:, 0]), {}),
        ((q, blocks[:, :, :0], complete), {}),
        ((q, blocks, complete), {"k": 0}),
        ((q, blocks, complete), {"before": None}),
        ((q, blocks, complete), {"before": before.astype(mx.uint32)}),
        ((q, blocks, complete), {"tail": tail[..., 1:]}),
        ((mx.zeros((2, 64, 1, 128)), mx.zeros((2, 1, 5, 128)), complete), {"tail": None}),
    ):
        with pytest.raises(ShapeError):
            choose_blocks_fused(*args, **{**options, **changed})


def case(name, call, **more):
    *sizes, known = CALLS[call]
    args, options = arguments(*sizes, **known | more)
    return Case(
        name,
        call=lambda: [choose_blocks_fused(*args, **options)],
        expected=lambda: [oracle(*args, **options)[0]],
        limit=0.0,
    )


CASES = {
    "block_scores": [
        case("queries", "several queries"),
        case("in the tail", "all in the tail"),
        case("tail", "a tail"),
        case("the last", "the last ones"),
        case("odd", "odd sizes"),
    ],
    "best_blocks": [
        case("many", "many equal ones"),
        case("the last", "the last ones"),
        case("few", "none yet"),
        case("fewer", "more than there are"),
    ],
}
EQUIVALENT = {
    "choose_blocks.metal": {
        "relu: off by one <= -> <": "0 is 0",
        "block_scores: swapped arguments 1 and 2 of metal::fma": "commutes",
        "best_blocks: off by one > -> >=": "of K blocks the least is the limit, and all are taken",
        "best_blocks: off by one >= -> > (2)": "the limit is then the next key below, and "
        "all above it are taken",
    }
}
