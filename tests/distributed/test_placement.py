"""Placements: their answers, and what is wrong about others'. Oracle: counting."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_moeflux.distributed.placement import (
    ById,
    ByPopularity,
    make_placement,
    make_places,
    shares,
)
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.telemetry.trace import Call, Trace, TraceInfo

LAYERS, E = (3, 5), 8


def trace_of(*popular: int, num_experts: int = E) -> Trace:
    """20 tokens of layer 3 that choose `popular`, and one of layer 5 that chooses the last two."""
    info = TraceInfo(num_experts, 2, LAYERS, dict.fromkeys(LAYERS, 10))
    weights = np.ones((20, 2), np.float16)
    ids = np.array([sorted(popular)] * 20, np.uint16)
    last = np.array([[E - 2, E - 1]], np.uint16)
    return Trace(info, [Call(3, 0, ids, weights), Call(5, 0, last, weights[:1])])


def test_by_id_gives_neighbours_and_remainders():
    places = make_places(ById(), LAYERS, E, 3)
    assert places.counts == (3, 3, 2)
    assert places.rank_of == dict.fromkeys(LAYERS, (0, 0, 0, 1, 1, 1, 2, 2))
    assert places.held(5, 1) == (3, 4, 5)
    assert places.local_ids(5, 1).tolist() == [3, 3, 3, 0, 1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("memory", "ranks", "counts"),
    [
        (None, 1, [8]),
        ([1, 3], 2, [2, 6]),
        ([1, 1, 1, 97], 4, [1, 1, 1, 5]),
        ([1, 100], 2, [1, 7]),
        ([2, 1, 1], 3, [4, 2, 2]),
    ],
)
def test_shares_follow_the_memory(memory, ranks, counts):
    assert shares(E, ranks, memory) == counts


def test_popular_experts_are_on_different_ranks():
    places = make_places(ByPopularity(trace_of(0, 1)), LAYERS, E, 2)
    assert places.counts == (4, 4)
    assert {places.rank_of[3][e] for e in (0, 1)} == {0, 1}
    assert {places.rank_of[5][e] for e in (6, 7)} == {0, 1}
    # With memory, the small rank gets one of eight, the popular one of layer 3.
    places = make_places(ByPopularity(trace_of(5, 6), [1, 100]), LAYERS, E, 2)
    assert places.counts == (1, 7)


def test_by_text(tmp_path):
    assert make_places(make_placement("id"), LAYERS, E, 2).counts == (4, 4)
    assert make_places(make_placement("memory:1GB,3GB"), LAYERS, E, 2).counts == (2, 6)
    with pytest.raises(InputError, match="none"):
        make_placement(f"popularity:{tmp_path / 'none'}")
    for wrong in ("ids", "id:3", "memory", "memory:", "popularity:"):
        with pytest.raises(InputError, match="give id, memory:16GB"):
            make_placement(wrong)
    with pytest.raises(InputError, match="auto"):
        make_placement("memory:auto,1GB")


class Own:
    name = "own"

    def __init__(self, rows):
        self.rows = rows

    def place(self, layers, num_experts, ranks):
        return dict(zip(layers, self.rows, strict=True))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (([0, 1] * 4, [0, 1] * 3), "no rank below 2 for each of 8 experts of layer 5"),
        (([0, 1] * 4, [0, 2] * 4), "no rank below 2"),
        (([0, 1] * 4, [0] * 5 + [1] * 3), r"\[5, 3\] experts of layer 5"),
        (([0] * 8, [0] * 8), r"\[8, 0\] experts of layer 3"),
    ],
)
def test_an_own_placement_is_checked(rows, message):
    with pytest.raises(InputError, match=message):
        make_places(make_placement(Own(rows)), LAYERS, E, 2)
    assert make_places(Own(([1, 0] * 4, [0, 1] * 4)), LAYERS, E, 2).held(3, 0) == (1, 3, 5, 7)


def test_what_cannot_be_placed():
    with pytest.raises(InputError, match="8 experts a layer cannot be on 9 ranks"):
        make_places(ById(), LAYERS, E, 9)
    with pytest.raises(InputError, match="memory of 3 machines"):
        make_places(ById([1, 1, 1]), LAYERS, E, 2)
    with pytest.raises(InputError, match="a model with 9 experts"):
        make_places(ByPopularity(trace_of(0, 1, num_experts=9)), LAYERS, E, 2)
    with pytest.raises(InputError, match="has no 'place'"):
        make_placement(object())  # pyright: ignore[reportArgumentType]
