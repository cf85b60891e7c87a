"""Decides by time whether decode steps prefetch. Pure Python, no MLX, no clock of its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple, Protocol

# Steps that are compared with as many others, and those before them that are not counted: after a
# switch, and after a reset, when the banks fill.
STRETCH, SETTLE, WARM_UP = 6, 2, 16
# Trials that a decision takes at least, and those that are remembered.
LEAST_TRIALS, MOST_TRIALS = 3, 24
# A gain of less than this share is none.
MARGIN = 0.02
# Steps of a decided switch between two trials, and the share of all steps that trials may cost.
REST, MOST_LOSS = 512, 0.01
# The loss that is assumed of a trial that did not end.
UNKNOWN_LOSS = 0.1


class Cost(NamedTuple):
    """Seconds of a decode step, and those of them that it waited for reads."""

    seconds: float
    stalled: float

    @classmethod
    def of(cls, steps: Sequence[Cost]) -> Cost:
        """Return the cost of a usual one of `steps`."""
        return cls(middle([s.seconds for s in steps]), middle([s.stalled for s in steps]))


class Trial(NamedTuple):
    """The cost of a step with the switch off and on, measured in turns."""

    off: Cost
    on: Cost

    @property
    def change(self) -> float:
        """Logarithm of the seconds with the switch on, by those with it off."""
        return math.log(self.on.seconds / self.off.seconds)


class TimedSwitch:
    """A switch that is on while decode steps are measured to be faster with it.

    A trial turns the switch for a stretch of :data:`STRETCH` steps and compares them with the mean
    of the stretches before and after it, so that a drift cancels. The cost of a stretch is the mean
    of the middle half of its steps, so that a pause does not count. Trials follow one another until
    their mean change is beyond :data:`MARGIN` and its standard error, but for at most
    :data:`MOST_TRIALS`; then one follows every :data:`REST` steps, or at once if the last one
    contradicts the choice. The switch goes on for a gain beyond that limit, and off when less than
    half of MARGIN is left. While it is off, and steps wait for reads for a smaller share than
    MARGIN, nothing can be gained and there is no trial.

    A trial of a way that takes 1 + r of the other's time costs r (STRETCH + SETTLE) steps. None
    begins while the trials so far cost more than :data:`MOST_LOSS` of the steps so far. So they
    cost n steps at most 0.01 n + 8 r, which is one percent and, at r = 0.2, less than two steps.

    The caller asks `on` before a step and calls :meth:`step` after it. The same costs give the same
    choices.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Forget everything, as after a change of the memory for experts; the switch is off."""
        self.on = self.chosen = False
        self.trials: deque[Trial] = deque(maxlen=MOST_TRIALS)
        self.steps = self._pairs = self._rest = 0
        self._lost = 0.0
        self._idle = False
        self._forget_stretch(WARM_UP)

    def step(self, pairs: int, cost: Cost) -> None:
        """Note a decode step of so many (token, expert) pairs, and decide about the next one."""
        if pairs != self._pairs:
            self._pairs = pairs
            self.disturb()
        self.steps += 1
        self._rest = max(self._rest - 1, 0)
        if self._skip or not cost.seconds > 0:
            self._skip = max(self._skip - 1, 0)
            return
        self._stretch.append(cost)
        if len(self._stretch) < STRETCH:
            return
        present = Cost.of(self._stretch)
        self._stretch.clear()
        if self.on != self.chosen:
            self._tried = present
            self._turn(self.chosen)
            return
        before, tried = self._before, self._tried
        self._before, self._tried = present, None
        if before is not None and tried is not None and self._judge(before, tried, present):
            self._before = None
            return
        self._idle = not self.on and present.stalled < MARGIN * present.seconds
        affordable = self._lost <= MOST_LOSS * self.steps
        if self.on == self.chosen and not self._rest and affordable and not self._idle:
            self._turn(not self.chosen)

    def disturb(self) -> None:
        """Note that steps before and after now cannot be compared: a prompt, an error or another
        number of tokens came between."""
        if self.on != self.chosen or self._tried is not None:
            self._lost += UNKNOWN_LOSS * (STRETCH + SETTLE)
            self.on = self.chosen
        self._forget_stretch(max(SETTLE, self._skip))

    def report(self) -> str:
        """Return what was chosen and why, as a phrase."""
        text = f"{'on' if self.chosen else 'off'} after {self.steps} steps"
        if not self.trials:
            return f"{text}: {'reads are hardly waited for' if self._idle else 'not tried yet'}"
        ways = (Cost.of([trial[on] for trial in self.trials]) for on in (True, False))
        on, off = (f"{1e3 * c.seconds:.2f} ms ({1e3 * c.stalled:.2f} waiting)" for c in ways)
        change = 100 * math.expm1(self._change())
        return f"{text}: {on} with it, {off} without; {change:+.1f} % in {len(self.trials)} trials"

    def _judge(self, before: Cost, other: Cost, after: Cost) -> bool:
        """Take the result of a trial, and return True if it changes the choice."""
        chosen = Cost.of((before, after))
        self._lost += (STRETCH + SETTLE) * (other.seconds / chosen.seconds - 1)
        self.trials.append(Trial(other, chosen) if self.chosen else Trial(chosen, other))
        if len(self.trials) < LEAST_TRIALS:
            return False
        change, changes = self._change(), [trial.change for trial in self.trials]
        limit = MARGIN + stdev(changes) / math.sqrt(len(changes))
        chosen_before, self.chosen = self.chosen, change < -(MARGIN / 2 if self.chosen else limit)
        decided = abs(change) > limit or len(changes) == MOST_TRIALS
        if decided and (changes[-1] < 0) == self.chosen:
            self._rest = REST
        if self.chosen == chosen_before:
            return False
        self._turn(self.chosen)
        return True

    def _change(self) -> float:
        return middle([trial.change for trial in self.trials])

    def _turn(self, on: bool) -> None:
        self.on, self._skip = on, SETTLE

    def _forget_stretch(self, skip: int) -> None:
        """Begin a stretch after `skip` steps, with no trial under way."""
        self._skip = skip
        self._stretch: list[Cost] = []
        # The stretch before a trial, and that of the trial.
        self._before: Cost | None = None
        self._tried: Cost | None = None


class StepListener(Protocol):
    """Decides by what decode steps cost."""

    def step(self, pairs: int, cost: Cost) -> None:
        """Note a decode step of so many (token, expert) pairs."""
        ...

    def disturb(self) -> None:
        """Note that steps before and after now cannot be compared."""
        ...


class DecodeSteps:
    """Finds the decode steps among the calls of layers, and tells a listener what they cost: from
    the beginning of the first layer's call to the end of the last layer's.

    clock: Returns the time and the sum of all waiting for reads, in seconds. most_pairs: Calls of
    more (token, expert) pairs are no decode steps.
    """

    def __init__(self, listener: StepListener, clock: Callable[[], Cost], most_pairs: int):
        self.listener, self._clock, self._most_pairs = listener, clock, most_pairs
        self._pairs = 0
        self._start: Cost | None = None

    def begin(self, pairs: int, *, first: bool) -> None:
        """Note that a call begins. first: It is of the first layer."""
        if pairs > self._most_pairs or not (first or pairs == self._pairs):
            self.disturb()
        elif first:
            self._start, self._pairs = self._clock(), pairs

    def end(self) -> None:
        """Note that the call of the step's last layer has ended."""
        if self._start is not None:
            now, then = self._clock(), self._start
            self._start = None
            # A reset of the statistics sets the stalls to zero.
            stalled = max(now.stalled - then.stalled, 0.0)
            self.listener.step(self._pairs, Cost(now.seconds - then.seconds, stalled))

    def disturb(self) -> None:
        """Note that what has begun is no decode step, or does not end."""
        self._start = None
        self.listener.disturb()


def middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half of `values`."""
    cut = len(values) // 4
    return fmean(sorted(values)[cut : len(values) - cut])
