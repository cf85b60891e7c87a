"""What each rank reads is what the simulator finds for its part of a trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.distributed.placement import ById, Places, make_placement, make_places
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Call, Trace, TraceInfo
from mlx_moeflux.loading import load_model
from tests.distributed.launch import results
from tests.distributed.program import PROMPT, STEPS, logits_of

SHAPE = "qwen3.5-tiny"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(synthesize(SHAPE, tmp_path_factory.mktemp("shape") / SHAPE, experts=64))


def rank_trace(trace: Trace, places: Places, rank: int) -> Trace:
    """Return the calls that `rank` makes of its own store."""
    info, count = trace.info, places.counts[rank]
    tables = {layer: places.local_ids(layer, rank) for layer in info.layers}
    following = dict(zip(info.layers, info.layers[1:] + info.layers[:1], strict=True))
    calls = []
    for call in trace:
        local = tables[call.layer][call.ids]
        order = np.argsort(local, axis=1, kind="stable")[:, : min(local.shape[1], count)]
        guess = call.guess
        if guess is not None:
            own = tables[following[call.layer]][list(guess)].tolist()
            guess = tuple(e for e in own if e < count)
        ids = np.take_along_axis(local, order, axis=1)
        weights = np.take_along_axis(call.weights, order, axis=1)
        calls.append(Call(call.layer, call.token, ids, weights, guess=guess))
    own_info = replace(
        info, num_experts=count, experts_per_token=min(info.experts_per_token, count), slots=None
    )
    return Trace(own_info, calls)


def traced(directory: str, file, batch: int, **options) -> Trace:
    with load_model(directory, expert_memory="25%", **options) as model, model.trace(file):
        logits_of(model, batch)
    return Trace.open(file)


CASES = (
    {"expert_memory": "25%"},
    {"expert_memory": "50%", "eviction": "lru", "batch": 3},
    {"expert_memory": "50%", "batch": 3, "exact_prompts": True},
    {"expert_memory": "25%", "prefetch": "ahead", "keep_all_ahead": True},
    {"expert_memory": "37.5%", "placement": "memory:1GB,2GB,1GB,2GB"},
)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_what_the_replay_reads(ranks, directory, tmp_path):
    cases = [case for case in CASES if "placement" not in case or ranks == 4]
    jobs = {"cases": [{"path": directory, **case} for case in cases]}
    found = results(tmp_path / "run", ranks, "logits", jobs)
    for i, case in enumerate(cases):
        batch, prefetch = case.get("batch", 1), case.get("prefetch")
        trace = traced(directory, tmp_path / f"trace{i}", batch, prefetch=prefetch)
        assert {len(call.ids) for call in trace} == {batch, batch * PROMPT}
        policy = make_placement(case.get("placement", "id"))
        places = make_places(policy, trace.info.layers, trace.info.num_experts, ranks)
        total = 0
        for rank in range(ranks):
            own = rank_trace(trace, places, rank)
            expected = simulate(
                own,
                case["expert_memory"],
                eviction=case.get("eviction", "lfu"),
                prefetch=prefetch,
            )
            counts = found[rank][f"counts{i}"]
            for layer, row in zip(trace.info.layers, counts.tolist(), strict=True):
                one = expected.layers[layer]
                tokens = batch * (PROMPT + STEPS)
                assert row == [one.lookups, one.misses, one.bytes_read, tokens], (rank, layer, case)
            total += expected.total.bytes_read
        assert total > 0


def trace_of(calls) -> Trace:
    """Calls of one layer with 8 experts of 10 bytes, 2 a token."""
    info = TraceInfo(8, 2, (0,), {0: 10})
    found, seen = [], 0
    for rows in calls:
        ids = np.array(rows, np.uint16)
        found.append(Call(0, seen, ids, np.ones(ids.shape, np.float16)))
        seen += len(rows)
    return Trace(info, found)


def test_a_rank_has_its_own_columns_of_a_trace():
    trace = trace_of([[[0, 5]], [[6, 7]], [[1, 2], [3, 8]]])  # 8 is padding
    places = make_places(ById(), (0,), 8, 2)
    first, second = (rank_trace(trace, places, rank) for rank in range(2))
    assert [call.ids.tolist() for call in first] == [[[0, 4]], [[4, 4]], [[1, 2], [3, 4]]]
    assert [call.ids.tolist() for call in second] == [[[1, 4]], [[2, 3]], [[4, 4], [4, 4]]]
    assert [call.token for call in second] == [0, 1, 2]
    assert second.info.num_experts == 4
    assert second.info.experts_per_token == 2


def test_a_rank_with_fewer_experts_than_a_token_needs_has_fewer_columns():
    own = rank_trace(trace_of([[[0, 5]], [[6, 7]]]), make_places(ById(), (0,), 8, 8), 5)
    assert [call.ids.tolist() for call in own] == [[[0]], [[1]]]
    assert own.info.experts_per_token == 1
