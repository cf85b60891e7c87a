"""Oracle: what the same rounds take with each fixed number of drafts, on a clock of their own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from mlx_moeflux.generation.draft_gate import DraftGate

MOST = 3
# Time of a step with 0 to 3 drafts: rows that share their weights, the same where rows miss
# experts, rows one after another, and a kernel that is slow with two rows.
COSTS = {
    "shared": (1, 1.15, 1.25, 1.35),
    "missing": (1, 1.3, 1.6, 1.9),
    "one by one": (1, 2, 3, 4),
    "uneven": (1, 1.6, 1.65, 1.7),
}
# Share of drafts that are accepted, by the share of the text that is done.
ACCEPTED: dict[str, Callable[[float], float]] = {
    "all": lambda done: 1.0,
    "80 %": lambda done: 0.8,
    "60 %": lambda done: 0.6,
    "none": lambda done: 0.0,
    "all, then none": lambda done: float(done < 0.5),
    "none, then all": lambda done: float(done >= 0.5),
}


class Fixed:
    def __init__(self, drafts: int):
        self._drafts = drafts

    def wanted(self) -> int:
        return self._drafts

    def note(self, drafts: int, accepted: int, seconds: float) -> None:
        pass


def seconds_of_text(
    gate: DraftGate | Fixed,
    costs: Sequence[float],
    accepted: Callable[[float], float],
    *,
    tokens: int,
    proposed: float,
    noise: float,
) -> float:
    """Return the time of a token. proposed: Share of rounds for which there are drafts. noise: Of
    each round's time."""
    rng, seconds, done = random.Random(0), 0.0, 0
    while done < tokens:
        share = accepted(done / tokens)
        draws = [rng.random() < share for _ in range(MOST)]
        there, factor = rng.random() < proposed, rng.uniform(1 - noise, 1 + noise)
        drafts = gate.wanted() if there else 0
        right = [*draws[:drafts], False].index(False)
        lap = costs[drafts] * factor
        gate.note(drafts, right, lap)
        seconds, done = seconds + lap, done + 1 + right
    return seconds / done


@pytest.mark.parametrize(
    "costs",
    [pytest.param(c, marks=[pytest.mark.slow] * (c in ("missing", "uneven"))) for c in COSTS],
)
@pytest.mark.parametrize("accepted", ACCEPTED)
def test_the_gate_is_near_the_best_fixed_number(costs, accepted):
    for proposed, noise in ((1.0, 0.0), (0.2, 0.1)):
        given = {"tokens": 1500, "proposed": proposed, "noise": noise}
        replay = [COSTS[costs], ACCEPTED[accepted]]
        best = min(seconds_of_text(Fixed(n), *replay, **given) for n in range(MOST + 1))
        taken = seconds_of_text(DraftGate(MOST), *replay, **given)
        assert math.isfinite(taken)
        assert taken <= 1.05 * best, (proposed, noise, taken / best)


def test_a_source_that_is_never_right_costs_one_percent():
    given = {"tokens": 2000, "proposed": 1.0, "noise": 0.0}
    for name, costs in COSTS.items():
        taken = seconds_of_text(DraftGate(MOST), costs, ACCEPTED["none"], **given)
        assert taken <= 1.015, name


def test_nothing_is_drafted_before_the_time_of_a_plain_step_is_known():
    gate = DraftGate(MOST)
    assert gate.wanted() == 0
    assert gate.saved_by(3, 1.0) == 0.0
    for _ in range(2):
        gate.note(0, 0, 1.0)
    assert gate.wanted() == 1
    assert gate.saved_by(3, 1.0) == 2.0


def test_the_first_step_of_a_size_is_not_counted():
    gate = DraftGate(MOST)
    for _ in range(8):
        gate.note(0, 0, 1.0)
    for seconds in (500.0, 1.2, 1.2):
        assert gate.wanted() >= 1
        gate.note(1, 1, seconds)
    assert gate.wanted() == 2
    assert "1200.00 ms" in gate.report()


def test_fewer_drafts_than_wanted_are_read_only_if_they_pay():
    gate = DraftGate(2)
    for _ in range(8):
        gate.note(0, 0, 1.0)
    for _ in range(8):
        gate.note(1, 1, 2.5)
        gate.note(2, 2, 2.6)
    assert gate.wanted() == 2
    assert gate.pays(2)
    assert not gate.pays(1)


def test_the_same_notes_give_the_same_answers():
    def answers() -> list[int]:
        gate, found, rng = DraftGate(MOST), [], random.Random(1)
        for _ in range(300):
            found.append(drafts := gate.wanted())
            gate.note(drafts, rng.randint(0, drafts), rng.uniform(1, 2))
        return found

    assert answers() == answers()
    assert len(set(answers())) > 1
