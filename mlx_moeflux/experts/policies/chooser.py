"""Chooses by time between ways to do a step. Pure Python, no MLX, no clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

# Less than this share of the time is nothing, and the share that trials may cost.
MARGIN, MOST_LOSS = 0.02, 0.01


class Cost(NamedTuple):
    """Seconds of a step, and those of them that it waited for reads."""

    seconds: float
    stalled: float

    @classmethod
    def of(cls, steps: Sequence[Cost]) -> Cost:
        """Return the cost of a usual one of `steps`."""
        return cls(middle([s.seconds for s in steps]), middle([s.stalled for s in steps]))

    @property
    def hardly_waits(self) -> bool:
        return self.stalled < MARGIN * self.seconds

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.2f} ms ({1e3 * self.stalled:.2f} waiting)"


class Chooser:
    """Chooses one of some ways to do a step, numbered from 0, by what their steps cost.

    A stretch is `stretch` steps of a way. Its first `warm_up` steps do not count, nor do the first
    `settle` after a turn to it or a disturbance, or those without a time. The cost of a stretch is
    the mean of its middle half, so that a pause does not count. Where two ways take turns, a
    stretch is compared with the mean of those before and after it, so that a drift cancels. A gain
    of a smaller share than `margin` is none.

    A trial takes a way that is not chosen. Trials may cost the share :data:`MOST_LOSS` of all. A
    way that lost is tried again after `rest`, or never. A subclass is one use: it says which ways
    there are, when a trial begins and what changes the choice. The same costs give the same
    choices.

    chosen: The way that steps take but for trials. way: That of the next step. steps: Those so far.
    lost: What trials have cost. past: Costs of stretches, those of the chosen way and of the other
    in turns.
    """

    stretch: int
    settle: int
    warm_up: int
    rest: int
    margin = MARGIN

    def __init__(self, ways: int = 2):
        self.chosen = self.way = self.steps = 0
        self.lost = 0.0
        self.past: list[Cost] = []
        self._stretch: list[Cost] = []
        self._skip = [self.warm_up] * ways

    @property
    def trying(self) -> bool:
        """True while steps take a way that is not chosen."""
        return self.way != self.chosen

    def turn(self, way: int) -> None:
        """Take `way` from the next step on."""
        self.way, self._skip[way] = way, self.settle

    def disturb(self) -> None:
        """Note that steps before and after now cannot be compared."""
        self._stretch.clear()
        if self.trying:
            self.turn(self.chosen)
        self._skip[self.way] = max(self.settle, self._skip[self.way])

    def counts(self, way: int, seconds: float) -> bool:
        """Note a step of `way`, and return True if it counts."""
        self.steps += 1
        if self._skip[way] or not seconds > 0:
            self._skip[way] = max(self._skip[way] - 1, 0)
            return False
        return True

    def lengthen(self, cost: Cost) -> Cost | None:
        """Add a step to the present stretch. If that completes it, return its cost and add it to
        `past`, where a second one of the chosen way replaces the first."""
        self._stretch.append(cost)
        if len(self._stretch) < self.stretch:
            return None
        if len(self.past) % 2 and not self.trying:
            self.past.pop()
        self.past.append(Cost.of(self._stretch))
        self._stretch.clear()
        return self.past[-1]

    def compare(self) -> tuple[Cost, Cost]:
        """Return what the ways 0 and 1 cost in the last three stretches."""
        before, between, after = self.past[-3:]
        around = Cost.of((before, after))
        return (between, around) if self.way else (around, between)

    def gains(self, seconds: float, others: float) -> bool:
        """Return True if `seconds` are less than `others` by more than the margin."""
        return seconds < (1 - self.margin) * others

    def affords(self, spent: float) -> bool:
        """Return True if trials have lost no more than they may of `spent`."""
        return self.lost <= MOST_LOSS * spent


def middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half of `values`."""
    cut = len(values) // 4
    return fmean(sorted(values)[cut : len(values) - cut])
