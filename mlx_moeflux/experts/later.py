"""Telling a recorder late what the router chose, so that a decode step need not wait for it.

A step from a trace (see :mod:`mlx_moeflux.models.step`) returns its ids and weights beside the
logits. Those of some steps are laid together on the device, fetched at once and told then; what
happened meanwhile is told after them, in the order in which it happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.events import Chosen, Event, EventHook, Recorder, Steps, looked_up

Collect = Callable[..., mx.array]

# Steps that are fetched together: on a GPU each fetch costs as much as several launches.
STEPS_AT_ONCE = 32


class _LookedUp(NamedTuple):
    """Arguments of :func:`~mlx_moeflux.experts.events.looked_up`."""

    layer: int
    needed: Collection[int]
    missing: Collection[int]
    first: Collection[int]


@dataclass
class Step:
    """One step of N tokens that was handed to the device.

    layers: Those that hold every expert, as far as the step went; counts: tokens that each had seen
    before. notes: float32 arrays, one after the other these layers' weights ``[N, K]`` and the bits
    of their ids ``[N, K]``. weights: ``[N, K]`` of each of the layers that the host looked at. events:
    What those told, each after a :class:`Chosen` without weights. after: What happened between this
    step and the next.
    """

    tokens: int
    nanoseconds: int = field(default_factory=perf_counter_ns)
    layers: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    notes: Sequence[mx.array] = ()
    weights: Sequence[mx.array] = ()
    events: list[Event | _LookedUp] = field(default_factory=list)
    after: list[Event] = field(default_factory=list)
    told: bool = False
    thread: int = field(default_factory=threading.get_ident)

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return sum(array.size for array in (*self.notes, *self.weights))

    @property
    def plain(self) -> bool:
        """Whether the host looked at no layer."""
        return not self.events and not self.weights

    def alike(self, other: Step) -> bool:
        """Whether both can be told as one block."""
        same = (self.tokens, self.layers) == (other.tokens, other.layers)
        return same and self.plain and other.plain and not self.after


class Later:
    """Stands between a store and its recorder. streamed: Whether the store tells of hits.

    Evaluates: the steps' notes, when they are told.
    """

    def __init__(self, recorder: Recorder, *, streamed: bool):
        self.recorder, self._streamed = recorder, streamed
        recorder.catch_up = self.catch_up
        self._lock = threading.RLock()
        self._open: Step | None = None
        self._last: Step | None = None
        self._waiting: list[Step] = []
        self._fetching: tuple[list[Step], mx.array] | None = None
        self._telling: Iterator[None] = iter(())
        self._collect: Collect | None = None

    def __call__(self, event: Event) -> None:
        """An event that is known now."""
        with self._lock:
            if self.in_step:
                self._open.events.append(event)
            elif self._last is not None and not self._last.told:
                self._last.after.append(event)
            else:
                self._finish()
                self.recorder(event)

    def looked_up(self, *found: Collection[int]) -> bool:
        """Keep what :func:`~mlx_moeflux.experts.events.looked_up` is to be asked for, unless there
        is time for that now."""
        if self.in_step:
            self._open.events.append(_LookedUp(*found))
        return self.in_step

    @property
    def used(self) -> bool:
        """Whether any step came from a trace; until then everything can be told at once."""
        return self._last is not None or self._open is not None

    @property
    def in_step(self) -> bool:
        """Inside this thread's :meth:`listening`."""
        return self._open is not None and self._open.thread == threading.get_ident()

    @contextmanager
    def listening(self, step: Step) -> Iterator[None]:
        """While this lasts this thread's events belong to `step`."""
        self._open = step
        try:
            yield
        finally:
            self._open = None

    def add(self, step: Step, collect: Collect) -> None:
        """It was handed to the device; collect: The model's operation of that name."""
        with self._lock:
            if len(self._waiting) >= STEPS_AT_ONCE and self._fetching is None:
                # Without this step, which is under way: whoever asks for it must not wait.
                steps, self._waiting = self._waiting, []
                joined = _joined(steps, collect)
                mx.async_eval(joined)
                self._fetching = steps, joined
            self._last, self._collect = step, collect
            self._waiting.append(step)

    def land(self) -> None:
        """A step is about to begin: tell what was fetched, unless that can be done within it."""
        with self._lock:
            if self._fetching is None:
                return
            self._finish()
            fetching, self._fetching = self._fetching, None
            self._telling = self._told(*fetching)
            if all(step.plain for step in fetching[0]):
                self._finish()

    def hand_over(self) -> None:
        """Begin to evaluate the notes: other threads may then tell them."""
        with self._lock:
            mx.async_eval([step.notes for step in self._waiting[-1:]])

    def some(self) -> None:
        """The device is at work: tell about a layer's worth of what is known."""
        with self._lock:
            next(self._telling, None)

    def catch_up(self) -> None:
        """Tell everything."""
        with self._lock:
            self.land()
            self._finish()
            steps, self._waiting = self._waiting, []
            if steps:
                self._telling = self._told(steps, _joined(steps, self._collect))
            self._finish()

    def _finish(self) -> None:
        for _ in self._telling:
            pass

    def _told(self, steps: list[Step], joined: mx.array) -> Iterator[None]:
        numbers, at, i = np.array(joined).view(np.uint32), 0, 0
        for step in steps:
            # Whatever becomes of the telling, what happens from now on is not told after them.
            step.told = True
        while i < len(steps):
            first, j = steps[i], i + 1
            while j < len(steps) and steps[j - 1].alike(steps[j]):
                j += 1
            size = (j - i) * first.size
            if first.plain:
                self.recorder.steps(self._block(steps[i:j], numbers[at : at + size]))
            else:
                yield from self._one_by_one(first, numbers[at : at + size])
            at, i = at + size, j
            for event in steps[i - 1].after:
                self.recorder(event)
            yield

    def _block(self, steps: list[Step], numbers: np.ndarray) -> Steps:
        first = steps[0]
        numbers = numbers.reshape(len(steps), len(first.layers), 2, first.tokens, -1)
        return Steps(
            layers=first.layers,
            counts=np.array([step.counts for step in steps]),
            ids=numbers[:, :, 1],
            weights=numbers[:, :, 0].view(np.float32),
            nanoseconds=np.array([step.nanoseconds for step in steps]),
            found=self._streamed,
        )

    def _one_by_one(self, step: Step, numbers: np.ndarray) -> Iterator[None]:
        """A step of which some layers told events."""
        whole = sum(note.size for note in step.notes)
        weights, at = numbers[whole:].view(np.float32), 0
        known = [*self._block([step], numbers[:whole]).calls(0)] if whole else []
        known.reverse()
        for event in step.events:
            if type(event) is Chosen:
                yield
                while known and known[-1].layer < event.layer:
                    self.recorder(known.pop())
                own, at = weights[at : at + event.ids.size], at + event.ids.size
                event = event._replace(weights=own.reshape(event.ids.shape))
            if type(event) is _LookedUp:
                self.recorder.looked_up(*event)
            else:
                self.recorder(event)
        while known:
            self.recorder(known.pop())


def tell_looked_up(listener: EventHook | None, *found: Collection[int]) -> None:
    """Tell all that :func:`~mlx_moeflux.experts.events.looked_up` gives, now or later."""
    if listener is None or (isinstance(listener, Later) and listener.looked_up(*found)):
        return
    if getattr(listener, "late", False):
        listener.looked_up(*found)
        return
    for event in looked_up(*found):
        listener(event)


def _joined(steps: Sequence[Step], collect: Collect) -> mx.array:
    arrays = [array for step in steps for array in (*step.notes, *step.weights)]
    if all(array.shape == arrays[0].shape for array in arrays):
        return collect(arrays, count=arrays[0].size)
    return mx.concatenate([array.reshape(-1) for array in arrays])
