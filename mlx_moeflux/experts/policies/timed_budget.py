"""Decides by time between two budgets of the experts. Pure Python, no MLX, no clock of its own.

Where experts are read through the page cache and the bank lies in the same memory, a block of the
bank is often in the page cache too. A smaller bank leaves the page cache room for other blocks: it
misses more, and waits less for each miss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from mlx_moeflux.experts.budget import format_bytes
from mlx_moeflux.experts.policies.chooser import Chooser, Cost

# Steps of the smaller budget that are enough to tell that it loses, and changes of the banks.
LEAST_STEPS, MOST_TURNS = 4, 4


class Budget(NamedTuple):
    """MoE layer id -> slots, and the bytes of all banks and of the reader's buffers."""

    slots: Mapping[int, int]
    nbytes: int


class Verdict(NamedTuple):
    """Which budget is kept, and the cost of a step with each."""

    smaller: bool
    with_larger: Cost
    with_smaller: Cost


class TimedBudget(Chooser):
    """A trial of a smaller budget, and what came of it.

    The two take turns, the larger one first. If the smaller one gains, its second stretch decides:
    it is kept if it gains again. So a verdict for it takes three turns, one for the larger two or
    four.

    The smaller budget is left as soon as its steps have cost more than trials may, but for the
    first :data:`LEAST_STEPS`. It is also left when something else comes between its steps; the
    stretch is made again if no more than :data:`MOST_TURNS` turns come of it. Else the larger one
    stays without a verdict. There is no trial where steps hardly wait for reads. So a smaller
    budget that takes 1 + r of the time costs n steps at most 0.01 n + 4 r, besides the `settle`
    steps after each turn.

    The store gives the layers the slots of `wanted` between two steps, and calls :meth:`step` after
    a decode step of one sequence, of `pairs` (token, expert) pairs.

    verdict: Of an earlier process; there is no trial then. keep: Called with the verdict of this
    one.
    """

    stretch, settle, warm_up, margin = 24, 32, 32, 0.05

    def __init__(
        self,
        larger: Budget,
        smaller: Budget,
        *,
        pairs: int,
        verdict: Verdict | None = None,
        keep: Callable[[Verdict], object] = lambda verdict: None,
    ):
        super().__init__()
        self.larger, self.smaller, self.pairs, self._keep = larger, smaller, pairs, keep
        self.wanted, self.turns, self.over, self.why = larger, 0, False, ""
        self._tried: list[Cost] = []  # all steps of the smaller budget that count
        if verdict is not None:
            self._conclude(verdict, ", measured earlier")
            self.turns = 0

    def turn(self, way: int) -> None:
        self.turns += way != self.way
        super().turn(way)
        self.wanted = self.smaller if way else self.larger

    def step(self, pairs: int, cost: Cost) -> None:
        """Note a decode step, and decide about the next one."""
        if self.over or not self.counts(self.way, cost.seconds):
            return
        if self.trying and self._loses(cost):
            self._decide(smaller=False)
            return
        present = self.lengthen(cost)
        if present is None:
            return
        if not self.trying and present.hardly_waits:
            self.end("reads are hardly waited for")
        elif len(self.past) > 2 and not self._gains():
            self._decide(smaller=False)
        elif len(self.past) == 4:
            self._decide(smaller=True)
        elif self.trying or self.turns + 2 <= MOST_TURNS:
            self.turn(not self.way)
        else:
            smaller = format_bytes(self.smaller.nbytes)
            self.end(f"replies are too short to compare it with {smaller}")

    def end(self, why: str, wanted: Budget | None = None) -> None:
        """End the trial without a verdict. wanted: The budget that stays; None: the larger one."""
        self.chosen = int(wanted is self.smaller)
        self.turn(self.chosen)
        self.over, self.why = True, why

    def report(self) -> str:
        """Return what was chosen and why, as a phrase."""
        present = format_bytes(self.wanted.nbytes)
        if self.over:
            return f"{present}: {self.why}"
        other = self.larger if self.trying else self.smaller
        state = "being compared" if self.turns else "not yet compared"
        return f"{present}, {state} with {format_bytes(other.nbytes)}"

    def _loses(self, cost: Cost) -> bool:
        """Note a step of the smaller budget, and return True if it has cost too much."""
        self._tried.append(cost)
        count, larger = len(self._tried), self.past[-1]
        self.lost = count * (Cost.of(self._tried).seconds / larger.seconds - 1)
        return count >= LEAST_STEPS and not self.affords(self.steps)

    def _gains(self) -> bool:
        """Return True if the smaller budget is faster in the last three stretches."""
        larger, smaller = self.compare()
        return self.gains(smaller.seconds, larger.seconds)

    def _decide(self, *, smaller: bool) -> None:
        verdict = Verdict(smaller, Cost.of(self.past[::2]), Cost.of(self._tried))
        self._conclude(verdict)
        self._keep(verdict)

    def _conclude(self, verdict: Verdict, when: str = "") -> None:
        ways = [(verdict.with_larger, self.larger), (verdict.with_smaller, self.smaller)]
        (cost, kept), (others, other) = ways[::-1] if verdict.smaller else ways
        self.end(f"{cost} a step with it, {others} with {format_bytes(other.nbytes)}{when}", kept)
