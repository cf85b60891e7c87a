"""Decides by time whether decode steps prefetch. Pure Python, no MLX, no clock of its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import stdev
from typing import Protocol

from mlx_moeflux.experts.policies.chooser import Chooser, Cost, middle

# Trials that a decision takes at least, and those that are remembered.
LEAST_TRIALS, MOST_TRIALS = 3, 24
# The loss that is assumed of a trial that did not end.
UNKNOWN_LOSS = 0.1


class TimedSwitch(Chooser):
    """A switch that is on while decode steps are measured to be faster with it.

    A trial is a stretch between two of the other way. Trials follow one another until their mean
    change is beyond the margin and its standard error, but for at most :data:`MOST_TRIALS`; then
    one follows every `rest` steps, or at once if the last one contradicts the choice. The switch
    goes on for a gain beyond that limit, and off when less than half of the margin is left. While
    it is off and steps hardly wait for reads, nothing can be gained and there is no trial.

    A trial of a way that takes 1 + r of the other's time costs r (stretch + settle) steps, and none
    begins while those before it cost too much: n steps lose at most 0.01 n + 8 r.

    The caller asks `on` before a step and calls :meth:`step` after it.
    """

    stretch, settle, warm_up, rest = 6, 2, 16, 512

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Forget everything, as after a change of the memory for experts; the switch is off."""
        super().__init__()
        self.on = self._idle = False
        # The costs with the switch off and on, and the logarithms of the second by the first.
        self.trials: deque[tuple[Cost, Cost]] = deque(maxlen=MOST_TRIALS)
        self._changes: deque[float] = deque(maxlen=MOST_TRIALS)
        self._pairs = self._next_trial = 0

    def turn(self, way: int) -> None:
        super().turn(way)
        self.on = bool(way)

    def step(self, pairs: int, cost: Cost) -> None:
        """Note a decode step of so many (token, expert) pairs, and decide about the next one."""
        if pairs != self._pairs:
            self._pairs = pairs
            self.disturb()
        present = self.lengthen(cost) if self.counts(self.way, cost.seconds) else None
        if present is None:
            return
        if len(self.past) == 3:
            self._judge()
            del self.past[:2]
        if self.trying:
            self.turn(self.chosen)
            return
        self._idle = not self.on and present.hardly_waits
        if self.steps >= self._next_trial and self.affords(self.steps) and not self._idle:
            self.turn(not self.chosen)

    def disturb(self) -> None:
        """Note that steps before and after now cannot be compared: a prompt, an error or another
        number of tokens came between."""
        if self.trying or len(self.past) == 2:
            self.lost += UNKNOWN_LOSS * (self.stretch + self.settle)
        self.past.clear()
        super().disturb()

    def report(self) -> str:
        """Return what was chosen and why, as a phrase."""
        text = f"{'on' if self.chosen else 'off'} after {self.steps} steps"
        if not self.trials:
            return f"{text}: {'reads are hardly waited for' if self._idle else 'not tried yet'}"
        off, on = map(Cost.of, zip(*self.trials, strict=True))
        change = 100 * math.expm1(middle(self._changes))
        return f"{text}: {on} with it, {off} without; {change:+.1f} % in {len(self.trials)} trials"

    def _judge(self) -> None:
        """Choose by the trials so far and the one that has just ended."""
        costs, chosen, changes = self.compare(), self.chosen, self._changes
        self.trials.append(costs)
        changes.append(math.log(costs[1].seconds / costs[0].seconds))
        ratio = costs[not chosen].seconds / costs[chosen].seconds
        self.lost += (self.stretch + self.settle) * (ratio - 1)
        if len(changes) >= LEAST_TRIALS:
            change = middle(changes)
            limit = self.margin + stdev(changes) / math.sqrt(len(changes))
            self.chosen = int(change < -(self.margin / 2 if chosen else limit))
            decided = abs(change) > limit or len(changes) == MOST_TRIALS
            if decided and (changes[-1] < 0) == self.chosen:
                self._next_trial = self.steps + self.rest


class StepListener(Protocol):
    """Decides by what decode steps of so many (token, expert) pairs cost."""

    def step(self, pairs: int, cost: Cost) -> None: ...

    def disturb(self) -> None: ...


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
