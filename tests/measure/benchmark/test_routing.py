"""Oracle: traces small enough to count by hand."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.experts.telemetry.events import Chosen
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.benchmark.routing import Routing, follow


def rows(*experts: int) -> np.ndarray:
    return np.array([[e] for e in experts], np.uint32)


def test_decode_steps_are_told_from_the_prompt():
    calls = {0: [rows(1, 2, 3), rows(1), rows(2)], 1: [rows(5, 5, 5), rows(5), rows(6)]}
    routing = Routing(calls)
    assert [len(parts) for parts in routing.decode.values()] == [2, 2]
    assert routing.distinct_per_step() == 1.0


def test_distinct_experts_of_a_batch():
    step = np.array([[0, 1], [1, 2], [0, 1]], np.uint32)
    assert Routing({0: [step, step]}).distinct_per_step() == 3.0


def test_one_expert_only_always_hits():
    routing = Routing({0: [rows(*[4] * 10), *[rows(4)] * 5]})
    assert routing.shuffled_hit_rate({0: 1}, seed=0) == 1.0


def test_shuffling_takes_away_what_neighbours_have_in_common():
    # Long runs of one expert: in order nearly everything hits, shuffled 1 of 8 does.
    prompt = rows(*np.repeat(np.arange(8), 100).tolist())
    decode = [rows(int(e)) for e in np.repeat(np.arange(8), 50)]
    routing = Routing({0: [prompt, *decode]})
    assert routing.shuffled_hit_rate({0: 1}, seed=0) == pytest.approx(1 / 8, abs=0.05)
    assert routing.shuffled_hit_rate({0: 4}, seed=0) == pytest.approx(4 / 8, abs=0.08)
    assert routing.shuffled_hit_rate({0: 8}, seed=0) == 1.0


def test_order_matters_to_the_hit_rate():
    prompt = rows(*np.repeat(np.arange(8), 100).tolist())
    routing = Routing({0: [prompt, *[rows(int(e)) for e in np.repeat(np.arange(8), 50)]]})
    # Runs of 50: only the first of each misses.
    assert routing.hit_rate(1) == pytest.approx(1 - 8 / 400)
    skew = routing.skew(8, seed=0)
    assert skew["distinct_in_32"] == 1.0
    assert skew["lru_half"] > 0.95
    assert skew["lru_half_shuffled"] == routing.shuffled_hit_rate(4, seed=0) < 0.6


def test_groups_are_whole_steps_with_the_odd_tokens_first():
    prompt, step = rows(*range(5)), rows(7, 8)
    groups = Routing({0: [prompt, step, step]})._groups(0)
    assert [group[:, 0].tolist() for group in groups] == [[0], [1, 2], [3, 4], [7, 8], [7, 8]]


@pytest.mark.parametrize("memory", ["100%", "25%"])
def test_following_a_store(checkpoint, memory):
    heard = []
    with load_model(checkpoint, expert_memory=memory, events=heard.append) as model:
        heard.clear()
        cache = model.make_cache()

        def action():
            mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache))
            mx.eval(model(mx.array([[6]]), cache))

        listener = model.store.events
        routing = follow(model.store, action)
        assert model.store.events is listener
    assert [ids.shape for ids in routing.calls[2]] == [(5, 4), (1, 4)]
    assert sorted(routing.calls) == [0, 1, 2, 3]
    assert sum(isinstance(event, Chosen) for event in heard) == 8
    assert 0 <= routing.shuffled_hit_rate(dict.fromkeys(range(4), 8), seed=1) <= 1
