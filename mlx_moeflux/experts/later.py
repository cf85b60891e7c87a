"""Telling a recorder late what the router chose, so that a decode step need not wait for it.

A step from a trace (see :mod:`mlx_moeflux.models.step`) returns its ids and weights beside the
logits. Those of some steps are fetched at once and told then; what happened meanwhile is told after
them, in the order in which it happened.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.events import Chosen, Event, LookedUp, Recorder, Steps
from mlx_moeflux.experts.uploads import host_copy

# By a name and how many numbers a step has of that name.
Logs = dict[tuple[str, int], mx.array]
Numbers = dict[tuple[str, int], np.ndarray]

# Steps that are fetched together.
STEPS_AT_ONCE = 64


@dataclass(slots=True)
class Step:
    """One step of N tokens that was handed to the device.

    layers: Those that hold every expert, as far as the step went; counts: tokens that each had seen
    before, and `more` of them since. numbers: How many only the device knows, by name. "notes":
    ``[L 2 N K]``, layer by layer weights ``[N, K]`` and the bits of ids ``[N, K]``; "weights":
    ``[M N K]`` of the M layers that the host looked at. events: What those told, each after a
    :class:`Chosen` without weights; from `after` on what happened before the next step.
    """

    tokens: int
    nanoseconds: int = field(default_factory=perf_counter_ns)
    layers: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    more: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    events: list[Event | LookedUp] = field(default_factory=list)
    after: int = 0

    @property
    def plain(self) -> bool:
        """Whether the host looked at no layer."""
        return not self.after and "weights" not in self.numbers

    def alike(self, other: Step) -> bool:
        """Whether both can be told as one block."""
        same = (self.tokens, self.layers) == (other.tokens, other.layers)
        follows = self._first + self.tokens == other._first
        return same and follows and self.plain and other.plain and not self.events

    @property
    def _first(self) -> int:
        """Tokens that the first of its layers had seen."""
        return sum(self.counts[:1]) + self.more


class Later:
    """Stands between a store and its recorder. streamed: Whether the store tells of hits.

    Numbers of steps that have equally many are in one array, a log, the last step's at its end.
    Each step writes it on (:mod:`mlx_moeflux.kernels.collect`): nothing is left to do when it is
    asked for.

    Evaluates: logs, when steps are told.
    """

    late = True

    def __init__(self, recorder: Recorder, *, streamed: bool):
        self.recorder, self._streamed = recorder, streamed
        recorder.catch_up = self.catch_up
        self._lock = threading.RLock()
        self._open: tuple[Step, int] | None = None
        self._steps: list[Step] = []
        # As they are, and as they were a step before.
        self._logs: Logs = {}
        self._logs_before: Logs = {}
        self._most = STEPS_AT_ONCE
        self._telling: Iterator[None] = iter(())

    def __call__(self, event: Event | LookedUp) -> None:
        """An event that is known now."""
        with self._lock:
            if self.in_step:
                self._open[0].events.append(event)
            elif self._steps:
                self._steps[-1].events.append(event)
            else:
                self._finish()
                self.recorder(event)

    @property
    def used(self) -> bool:
        """Whether any step came from a trace; until then everything can be told at once."""
        return bool(self._logs) or self._open is not None

    @property
    def in_step(self) -> bool:
        """Inside this thread's :meth:`listening`."""
        return self._open is not None and self._open[1] == threading.get_ident()

    @contextmanager
    def listening(self, step: Step) -> Iterator[None]:
        """While this lasts this thread's events belong to `step`."""
        self._open = step, threading.get_ident()
        try:
            yield
        finally:
            self._open = None

    def step(self, tokens: int, layers: tuple[int, ...], seen: Callable[[], tuple]) -> Step:
        """One of which the host will look at no layer. `seen` is asked only where it does not
        follow another: in between all layers see the same, or everything is told."""
        last = self._steps[-1] if self._steps else None
        if last is None or last.layers is not layers:
            return Step(tokens, layers=layers, counts=seen())
        return Step(tokens, layers=layers, counts=last.counts, more=last.more + last.tokens)

    def log(self, name: str, numbers: int) -> mx.array:
        """What a step with so many numbers writes on."""
        with self._lock:
            if (name, numbers) not in self._logs:
                self._logs[name, numbers] = mx.zeros((self._most * numbers,))
                mx.eval(self._logs[name, numbers])
            return self._logs[name, numbers]

    def add(self, step: Step, **logs: mx.array) -> None:
        """It was handed to the device, and these logs were written on."""
        with self._lock:
            self._logs_before = dict(self._logs)
            for name, log in logs.items():
                step.numbers[name] = log.size // self._most
                self._logs[name, step.numbers[name]] = log
            step.after = len(step.events)
            self._steps.append(step)

    def land(self) -> None:
        """A step is about to begin: tell of those before, unless that can be done within it, once
        logs are full. The last one may be under way: whoever asks for it must not wait."""
        if len(self._steps) < self._most:
            return
        with self._lock:
            self._finish()
            steps, self._steps = self._steps[:-1], self._steps[-1:]
            self._telling = self._told(steps, self._logs_before)
            if all(step.plain for step in steps):
                self._finish()

    def hand_over(self) -> None:
        """Begin to evaluate the logs: other threads may then write them on."""
        with self._lock:
            mx.async_eval([*self._logs.values()])

    def some(self) -> None:
        """The device is at work: tell about a layer's worth of what is known."""
        with self._lock:
            next(self._telling, None)

    def catch_up(self) -> None:
        """Tell everything."""
        with self._lock:
            self._finish()
            steps, self._steps = self._steps, []
            self._telling = self._told(steps, self._logs)
            self._finish()

    def _finish(self) -> None:
        for _ in self._telling:
            pass

    def _told(self, steps: list[Step], logs: Logs) -> Iterator[None]:
        numbers, i = _fetched(steps, logs), 0
        while i < len(steps):
            first, j = steps[i], i + 1
            while j < len(steps) and steps[j - 1].alike(steps[j]):
                j += 1
            if first.plain:
                self.recorder(self._block(steps[i:j], numbers))
            else:
                yield from self._one_by_one(first, numbers)
            i, last = j, steps[j - 1]
            for event in last.events[last.after :]:
                self.recorder(event)
            yield

    def _block(self, steps: list[Step], numbers: Numbers) -> Steps:
        first, S = steps[0], len(steps)
        notes = _taken(first, "notes", numbers, S).reshape(
            S, len(first.layers), 2, first.tokens, -1
        )
        return Steps(
            layers=first.layers,
            counts=np.array(first.counts) + first.more + first.tokens * np.arange(S)[:, None],
            ids=notes[:, :, 1],
            weights=notes[:, :, 0].view(np.float32),
            nanoseconds=np.array([step.nanoseconds for step in steps]),
            found=self._streamed,
        )

    def _one_by_one(self, step: Step, numbers: Numbers) -> Iterator[None]:
        """A step of which some layers told events."""
        known = [*self._block([step], numbers).calls(0)][::-1] if step.layers else []
        weights, at = None, 0
        if "weights" in step.numbers:
            (weights,) = _taken(step, "weights", numbers, 1)
        for event in step.events[: step.after]:
            if type(event) is Chosen:
                yield
                while known and known[-1].layer < event.layer:
                    self.recorder(known.pop())
                own, at = weights[at : at + event.ids.size], at + event.ids.size
                event = event._replace(weights=own.view(np.float32).reshape(event.ids.shape))
            self.recorder(event)
        while known:
            self.recorder(known.pop())


def _fetched(steps: Sequence[Step], logs: Logs) -> Numbers:
    """The bits of the steps' numbers, a row for each step."""
    counts = Counter(key for step in steps for key in step.numbers.items())
    return {
        key: host_copy(logs[key]).view(np.uint32).reshape(-1, key[1])[-count:]
        for key, count in counts.items()
    }


def _taken(step: Step, name: str, numbers: Numbers, rows: int) -> np.ndarray:
    """The next rows, from `step` on."""
    key = name, step.numbers[name]
    taken, numbers[key] = numbers[key][:rows], numbers[key][rows:]
    return taken
