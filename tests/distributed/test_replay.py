"""The simulator with ranks. Oracle: what the stores of real ranks counted, and arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.distributed.placement import ById, make_placement, placed
from mlx_moeflux.distributed.replay import Link, rank_trace, replay_machines
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Call, Trace, TraceInfo
from mlx_moeflux.loading import load_model
from tests.distributed.launch import results
from tests.distributed.program import PROMPT, STEPS, logits_of

SHAPE = "qwen3.5-tiny"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(synthesize(SHAPE, tmp_path_factory.mktemp("shape") / SHAPE, experts=64))


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
        places = placed(policy, trace.info.layers, trace.info.num_experts, ranks)
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
    places = placed(ById(), (0,), 8, 2)
    first, second = (rank_trace(trace, places, rank) for rank in range(2))
    assert [call.ids.tolist() for call in first] == [[[0, 4]], [[4, 4]], [[1, 2], [3, 4]]]
    assert [call.ids.tolist() for call in second] == [[[1, 4]], [[2, 3]], [[4, 4], [4, 4]]]
    assert [call.token for call in second] == [0, 1, 2]
    assert second.info.num_experts == 4
    assert second.info.experts_per_token == 2


def test_a_rank_with_fewer_experts_than_a_token_needs_has_fewer_columns():
    own = rank_trace(trace_of([[[0, 5]], [[6, 7]]]), placed(ById(), (0,), 8, 8), 5)
    assert [call.ids.tolist() for call in own] == [[[0]], [[1]]]
    assert own.info.experts_per_token == 1


def test_a_link_sends_a_part_to_each_neighbour():
    link = Link(1e6, latency=0.5)
    assert link.seconds(1e6, 1) == 0
    assert link.seconds(1e6, 2) == 2 * (0.5 + 0.5)
    assert link.seconds(1e6, 4) == pytest.approx(6 * (0.5 + 0.25))


def test_machines_wait_for_the_one_that_reads_most():
    # Both experts of each token on machine 0, then one on each.
    trace = trace_of([[[0, 1]], [[2, 3]], [[0, 5]], [[2, 6]]])
    options = {"hidden_size": 100, "disk": 10.0, "link": Link(1e3, latency=0.0)}
    alone = replay_machines(trace, ById(), [80], **options)
    assert alone.bytes_read == [60]
    assert (alone.read_seconds, alone.exchange_seconds) == (60 / 10 / 4, 0)
    two = replay_machines(trace, ById(), [20, 20], eviction="lru", **options)
    assert two.bytes_read == [60, 20]
    # 2, 2, 1 and 1 blocks of the slowest: 0 and 2 had left machine 0.
    assert two.read_seconds == 60 / 10 / 4
    assert two.exchange_seconds == pytest.approx(2 * (4 * (2 * 100 + 4) / 2) / 1e3)
    enough = replay_machines(trace, ById(), [80, 80], **options)
    assert enough.bytes_read == [40, 20]
    assert enough.read_seconds == (2 + 2 + 1 + 1) * 10 / 10 / 4
