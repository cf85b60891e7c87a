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
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.events import Chosen, Event, LookedUp, Recorder, Steps
from mlx_moeflux.experts.uploads import host_copy

# By a name and how many numbers a step has of that name.
Logs = dict[tuple[str, int], mx.array]
Numbers = dict[tuple[str, int], np.ndarray]

# Steps that are fetched together, by device. Each step writes all of its log anew; fetching one
# takes a GPU's host longer than that (docs/streaming.md).
STEPS_AT_ONCE = {mx.cpu: 64, mx.gpu: 256}


@dataclass(slots=True)
class Run:
    """Steps of N tokens each that were handed to the device one behind another, to be told as one
    block; or a single one, of which the host looked at a layer.

    layers: Those that hold every expert, as far as the step went; counts: tokens that each had seen
    before the first step. times: When each was begun, ``perf_counter_ns``. numbers: How many of a
    step only the device knows, by name. "notes": ``[L 2 N K]``, layer by layer weights ``[N, K]``
    and the bits of ids ``[N, K]``; "weights": ``[M N K]`` of the M layers that the host looked at.
    events: What those told, each after a :class:`Chosen` without weights; from `after` on what
    happened before the next step.
    """

    tokens: int
    layers: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    times: list[int] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    events: list[Event | LookedUp] = field(default_factory=list)
    after: int = 0

    @property
    def plain(self) -> bool:
        """Whether the host looked at no layer."""
        return not self.after and "weights" not in self.numbers

    def following(self) -> Run:
        """An empty one behind it."""
        seen = self.tokens * len(self.times)
        return replace(
            self, counts=tuple(n + seen for n in self.counts), times=[], numbers={}, events=[]
        )

    def split(self) -> tuple[list[Run], Run]:
        """All steps but the last, if there are any, and that one with the events behind it."""
        if len(self.times) == 1:
            return [], self
        first = replace(self, times=self.times[:-1], events=[])
        return [first], replace(
            first.following(), times=self.times[-1:], numbers=self.numbers, events=self.events
        )


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
        self._open: tuple[Run, int] | None = None
        self._runs: list[Run] = []
        self._steps = 0
        # As they are, and as they were a step before.
        self._logs: Logs = {}
        self._logs_before: Logs = {}
        self._most = STEPS_AT_ONCE[mx.default_device().type]
        self._telling: Iterator[None] = iter(())

    def __call__(self, event: Event | LookedUp) -> None:
        """An event that is known now."""
        with self._lock:
            if self.in_step:
                self._open[0].events.append(event)
            elif self._runs:
                self._runs[-1].events.append(event)
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
    def listening(self, run: Run) -> Iterator[None]:
        """While this lasts this thread's events belong to `run`."""
        self._open = run, threading.get_ident()
        try:
            yield
        finally:
            self._open = None

    def run(self, tokens: int, layers: tuple[int, ...], seen: Callable[[], tuple]) -> Run:
        """What a step belongs to of which the host will look at no layer. `seen` is asked only
        where it does not follow one alike: in between layers see nothing that is not told."""
        last = self._runs[-1] if self._runs else None
        if last is None or last.layers is not layers or last.tokens != tokens:
            return Run(tokens, layers, seen())
        return last if last.plain and not last.events else Run(tokens, layers, seen())

    def log(self, name: str, numbers: int) -> mx.array:
        """What a step with so many numbers writes on."""
        with self._lock:
            if (name, numbers) not in self._logs:
                self._logs[name, numbers] = mx.zeros((self._most * numbers,))
                mx.eval(self._logs[name, numbers])
            return self._logs[name, numbers]

    def add(self, run: Run, began: int, **logs: mx.array) -> None:
        """A step was handed to the device, and these logs were written on."""
        with self._lock:
            last = self._runs[-1] if self._runs else None
            if run.times and (run is not last or run.events):
                run = run.following()  # something was told meanwhile
            self._logs_before = dict(self._logs)
            for name, log in logs.items():
                run.numbers[name] = log.size // self._most
                self._logs[name, run.numbers[name]] = log
            run.times.append(began)
            self._steps += 1
            if run is not last:
                run.after = len(run.events)
                self._runs.append(run)

    def land(self) -> None:
        """A step is about to begin: tell of those before, unless that can be done within it, once
        logs are full. The last one may be under way: whoever asks for it must not wait."""
        if self._steps < self._most:
            return
        with self._lock:
            self._finish()
            first, last = self._runs.pop().split()
            runs = self._runs + first
            self._runs, self._steps = [last], 1
            self._telling = self._told(runs, self._logs_before)
            if all(run.plain for run in runs):
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
            runs, self._runs, self._steps = self._runs, [], 0
            self._telling = self._told(runs, self._logs)
            self._finish()

    def _finish(self) -> None:
        for _ in self._telling:
            pass

    def _told(self, runs: list[Run], logs: Logs) -> Iterator[None]:
        numbers = _fetched(runs, logs)
        for run in runs:
            if run.plain:
                self.recorder(self._block(run, numbers))
            else:
                yield from self._one_by_one(run, numbers)
            for event in run.events[run.after :]:
                self.recorder(event)
            yield

    def _block(self, run: Run, numbers: Numbers) -> Steps:
        S = len(run.times)
        notes = _taken(run, "notes", numbers).reshape(S, len(run.layers), 2, run.tokens, -1)
        return Steps(
            layers=run.layers,
            counts=np.array(run.counts) + run.tokens * np.arange(S)[:, None],
            ids=notes[:, :, 1],
            weights=notes[:, :, 0].view(np.float32),
            nanoseconds=np.array(run.times),
            found=self._streamed,
        )

    def _one_by_one(self, run: Run, numbers: Numbers) -> Iterator[None]:
        """A step of which some layers told events."""
        known = [*self._block(run, numbers).calls(0)][::-1] if run.layers else []
        weights, at = None, 0
        if "weights" in run.numbers:
            (weights,) = _taken(run, "weights", numbers)
        for event in run.events[: run.after]:
            if type(event) is Chosen:
                yield
                while known and known[-1].layer < event.layer:
                    self.recorder(known.pop())
                own, at = weights[at : at + event.ids.size], at + event.ids.size
                event = event._replace(weights=own.view(np.float32).reshape(event.ids.shape))
            self.recorder(event)
        while known:
            self.recorder(known.pop())


def _fetched(runs: Sequence[Run], logs: Logs) -> Numbers:
    """The bits of the steps' numbers, a row for each step."""
    counts = Counter()
    for run in runs:
        for key in run.numbers.items():
            counts[key] += len(run.times)
    return {
        key: host_copy(logs[key]).view(np.uint32).reshape(-1, key[1])[-count:]
        for key, count in counts.items()
    }


def _taken(run: Run, name: str, numbers: Numbers) -> np.ndarray:
    """The next rows, one for each of its steps."""
    key = name, run.numbers[name]
    taken, numbers[key] = numbers[key][: len(run.times)], numbers[key][len(run.times) :]
    return taken
