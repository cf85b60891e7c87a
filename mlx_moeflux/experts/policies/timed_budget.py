"""Decides by time between two budgets of the experts. Pure Python, no MLX, no clock of its own.

Where experts are read through the page cache and the bank lies in the same memory, a block of the
bank is often in the page cache too. A smaller bank leaves the page cache room for other blocks: it
misses more, and waits less for each miss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from mlx_moeflux.experts.budget import format_bytes
from mlx_moeflux.experts.policies.timed_switch import MARGIN, MOST_LOSS, Cost

# Steps that are compared with as many others, and those before them that are not counted: after a
# turn or a disturbance, when bank and page cache fill, and at the beginning.
STRETCH, SETTLE, WARM_UP = 24, 32, 32
# Steps of the smaller budget that are enough to tell that it loses.
LEAST_STEPS = 4
# A gain of less than this share is no reason to stay away from the budget that was planned.
LEAST_GAIN = 0.05
# Changes of the banks.
MOST_TURNS = 4


class Budget(NamedTuple):
    """MoE layer id -> slots, and the bytes of all banks and of the reader's buffers."""

    slots: Mapping[int, int]
    nbytes: int


class Verdict(NamedTuple):
    """Which budget is kept, and the cost of a step with each."""

    smaller: bool
    with_larger: Cost
    with_smaller: Cost


class TimedBudget:
    """A trial of a smaller budget, and what came of it.

    The larger budget is measured for a stretch of :data:`STRETCH` steps, then the smaller one, then
    the larger one again. If the smaller one takes less time than the mean of the stretches around
    it by more than :data:`LEAST_GAIN`, its second stretch decides: it is kept if the larger one
    loses as much to the stretches around it. So a drift cancels, and a verdict for the smaller
    budget takes three turns, one for the larger two or four. The cost of a stretch is that of the
    middle half of its steps.

    The smaller budget is left as soon as its measured steps have cost more than :data:`MOST_LOSS`
    of all steps so far, but for the first :data:`LEAST_STEPS`. It is also left when something else
    comes between its steps; the stretch is made again if no more than :data:`MOST_TURNS` turns
    come of it. Else the larger one stays without a verdict. There is no trial where steps hardly
    wait for reads. So a smaller budget that takes 1 + r of the time costs n steps at most
    0.01 n + 4 r, besides the :data:`SETTLE` steps after each turn.

    The store gives the layers the slots of `wanted` between two steps, and calls :meth:`step` after
    a decode step of one sequence, of `pairs` (token, expert) pairs. The same costs give the same
    choice.

    verdict: Of an earlier process; there is no trial then. keep: Called with the verdict of this
    one.
    """

    def __init__(
        self,
        larger: Budget,
        smaller: Budget,
        *,
        pairs: int,
        verdict: Verdict | None = None,
        keep: Callable[[Verdict], object] = lambda verdict: None,
    ):
        self.larger, self.smaller, self.pairs, self._keep = larger, smaller, pairs, keep
        self.turns = self.steps = 0
        self.over = verdict is not None
        self.wanted = smaller if verdict is not None and verdict.smaller else larger
        self.why = "" if verdict is None else f"{self._compared(verdict)}, measured earlier"
        # Steps that are not counted, and the stretch under way.
        self._skip = WARM_UP
        self._stretch: list[Cost] = []
        # Stretches with each budget, and all measured steps with the smaller one.
        self._with_larger: list[Cost] = []
        self._with_smaller: list[Cost] = []
        self._tried: list[Cost] = []

    @property
    def trying(self) -> bool:
        """True while the smaller budget is measured."""
        return not self.over and self.wanted is self.smaller

    def step(self, pairs: int, cost: Cost) -> None:
        """Note a decode step, and decide about the next one."""
        if self.over:
            return
        self.steps += 1
        if self._skip or not cost.seconds > 0:
            self._skip = max(self._skip - 1, 0)
            return
        self._stretch.append(cost)
        if self.trying:
            self._tried.append(cost)
            if self._loses():
                self._decide(smaller=False)
                return
        if len(self._stretch) < STRETCH:
            return
        present = Cost.of(self._stretch)
        if self.trying:
            self._with_smaller.append(present)
            if len(self._with_smaller) == 1:
                self._turn(self.larger)
            else:
                self._decide(smaller=self._gains())
            return
        # After a stretch that something disturbed, the one before it is measured again.
        del self._with_larger[len(self._with_smaller) :]
        self._with_larger.append(present)
        if present.stalled < MARGIN * present.seconds:
            self.end("reads are hardly waited for")
        elif self._with_smaller and not self._gains():
            self._decide(smaller=False)
        elif self.turns + 2 > MOST_TURNS:
            smaller = format_bytes(self.smaller.nbytes)
            self.end(f"replies are too short to compare it with {smaller}")
        else:
            self._turn(self.smaller)

    def disturb(self) -> None:
        """Note that steps before and after now cannot be compared."""
        if self.trying:
            self._turn(self.larger)
        self._stretch.clear()
        self._skip = max(SETTLE, self._skip)

    def end(self, why: str, wanted: Budget | None = None) -> None:
        """End the trial without a verdict. wanted: The budget that stays; None: the larger one."""
        self._turn(wanted or self.larger)
        self.over, self.why = True, why

    def report(self) -> str:
        """Return what was chosen and why, as a phrase."""
        present = format_bytes(self.wanted.nbytes)
        if self.over:
            return f"{present}: {self.why}"
        other = self.larger if self.trying else self.smaller
        state = "being compared" if self.turns else "not yet compared"
        return f"{present}, {state} with {format_bytes(other.nbytes)}"

    def _turn(self, wanted: Budget) -> None:
        self.turns += wanted is not self.wanted
        self.wanted, self._skip = wanted, SETTLE
        self._stretch.clear()

    def _loses(self) -> bool:
        """Return True if the smaller budget has cost too much."""
        count = len(self._tried)
        lost = count * (Cost.of(self._tried).seconds / self._with_larger[-1].seconds - 1)
        return count >= LEAST_STEPS and lost > MOST_LOSS * self.steps

    def _gains(self) -> bool:
        """Return True if the smaller budget is faster in the last three stretches, of which the
        first and the last are of one budget."""
        count = len(self._with_larger) + len(self._with_smaller)
        larger = self._with_larger[-2 if count % 2 else -1 :]
        smaller = self._with_smaller[-1 if count % 2 else -2 :]
        return Cost.of(smaller).seconds < (1 - LEAST_GAIN) * Cost.of(larger).seconds

    def _decide(self, *, smaller: bool) -> None:
        verdict = Verdict(smaller, Cost.of(self._with_larger), Cost.of(self._tried))
        self.end(self._compared(verdict), self.smaller if smaller else self.larger)
        self._keep(verdict)

    def _compared(self, verdict: Verdict) -> str:
        costs, other = (verdict.with_larger, verdict.with_smaller), self.smaller
        if verdict.smaller:
            costs, other = costs[::-1], self.larger
        own, others = (f"{1e3 * c.seconds:.2f} ms ({1e3 * c.stalled:.2f} waiting)" for c in costs)
        return f"{own} a step with it, {others} with {format_bytes(other.nbytes)}"
