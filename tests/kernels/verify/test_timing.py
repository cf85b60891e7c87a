"""Times of implementations beside each other. Oracle: a clock that a test winds."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux.kernels.verify import timing
from tests.kernels.verify.clock import Clock

CALL = ((mx.ones((3,)),), {})


def measured(**functions):
    return timing.times(functions or {"a": mx.abs, "b": mx.abs}, [CALL])


def test_what_an_evaluation_costs_cancels(monkeypatch):
    Clock(monkeypatch, fixed=1e-4, a=2e-5, b=7e-5)
    found = measured()
    assert found == {"a": pytest.approx([2e-5] * 5), "b": pytest.approx([7e-5] * 5)}


def test_implementations_alternate(monkeypatch):
    clock = Clock(monkeypatch, fixed=0, a=1e-5, b=1e-5)
    measured()
    rounds = [name for name, count in clock.evaluations if count == timing.MANY]
    assert "".join(rounds) == "abbaabbaab"
    launches = sum(count for _, count in clock.evaluations)
    assert launches == 2 * (2 + timing.ROUNDS * (timing.FEW + timing.MANY))


def test_calls_take_turns(monkeypatch):
    seen = []
    Clock(monkeypatch, a=1e-5, b=1e-5)
    calls = [((number,), {}) for number in range(7)]

    def function(number):
        seen.append(number)
        return mx.ones(())

    timing.times({"a": function, "b": function}, calls)
    del seen[4]  # a call for the size of its result
    assert seen == [n % 7 for n in range(len(seen))]


def test_a_long_call_is_evaluated_alone(monkeypatch):
    clock = Clock(monkeypatch, fixed=0, a=1e-3, b=2e-3)
    assert measured() == {"a": [1e-3] * 5, "b": [2e-3] * 5}
    assert {count for _, count in clock.evaluations} == {1}
    assert len(clock.evaluations) == 2 * (2 + timing.ROUNDS)


def test_large_results_are_not_all_held(monkeypatch):
    clock = Clock(monkeypatch, fixed=0, a=1e-5, b=1e-5)
    size = timing.ROTATED // timing.MANY // 4
    large = {"a": lambda x: mx.zeros((size + 1,)), "b": lambda x: mx.zeros((size + 1,))}
    measured(**large)
    assert {count for _, count in clock.evaluations} == {1}


def test_nothing_longer_than_the_limit_is_timed(monkeypatch):
    clock = Clock(monkeypatch, fixed=0, a=0.03, b=0.04)
    assert timing.times({"a": mx.abs, "b": mx.abs}, [CALL], longest=0.025) == {}
    assert len(clock.evaluations) == 4


def test_what_is_hopeless_is_not_timed_again(monkeypatch):
    clock = Clock(monkeypatch, fixed=0, a=1e-5, b=1e-3)
    assert measured()["b"] == [1e-3] * timing.ROUNDS
    assert clock.evaluations.count(("b", 1)) == 2
    assert ("b", timing.MANY) not in clock.evaluations


@pytest.mark.parametrize("error", [RuntimeError("does not compile"), ValueError("640 threads")])
def test_what_metal_refuses_is_left_out(error):
    """Metal raises ValueError where a threadgroup has too many threads."""
    said = []

    def refused(x):
        raise error

    both = {"reference": mx.abs, "kernel": refused}
    assert timing.times(both, [CALL], report=said.append).keys() == {"reference"}
    assert f"kernel refuses: {error}" in said[0]


def test_want_of_memory_is_no_refusal():
    def large(x):
        raise RuntimeError("[metal::malloc] Attempting to allocate 9 bytes")

    with pytest.raises(RuntimeError, match="Attempting to allocate"):
        measured(a=mx.abs, b=large)


def test_the_clock_itself_counts_up():
    assert all(t > 0 for t in measured(a=lambda x: mx.ones((256, 256)) @ mx.ones((256, 256)))["a"])


def test_faster_is_in_every_round_and_by_the_margin():
    assert timing.is_faster([0.89] * 5, [1.0] * 5)
    assert not timing.is_faster([0.91] * 5, [1.0] * 5)
    assert not timing.is_faster([0.5] * 4 + [1.0], [1.0] * 5)


def test_a_busy_machine_is_noticed():
    assert timing.is_quiet({"a": [1.0, 1.4], "b": [3.0, 3.0]})
    assert not timing.is_quiet({"a": [1.0, 1.6], "b": [3.0, 3.0]})
    assert not timing.is_quiet({"a": [1.0, 1.0], "b": [0.0, 0.0]})
