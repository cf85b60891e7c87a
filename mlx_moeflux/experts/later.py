"""Telling a recorder late what the router chose, so that a decode step need not wait for it.

A step from a trace (see :mod:`mlx_moeflux.models.step`) returns its ids and weights beside the
logits. Those of some steps are laid together on the device, fetched at once and told then; what
happened meanwhile is told after them, in the order in which it happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.events import Chosen, Event, LookedUp, Recorder, Steps

Collect = Callable[..., mx.array]
# Arrays of many steps, by how many numbers a step has in them.
Joined = dict[int, mx.array]

# Steps that are fetched together.
STEPS_AT_ONCE = 64


@dataclass
class Step:
    """One step of N tokens that was handed to the device.

    layers: Those that hold every expert, as far as the step went; counts: tokens that each had seen
    before. notes: float32 ``[L 2 N K]``, layer by layer the weights ``[N, K]`` and the bits of the
    ids ``[N, K]``. weights: ``[M N K]`` of the M layers that the host looked at. events: What those
    told, each after a :class:`Chosen` without weights; from `after` on what happened between this
    step and the next.
    """

    tokens: int
    nanoseconds: int = field(default_factory=perf_counter_ns)
    layers: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    notes: mx.array | None = None
    weights: mx.array | None = None
    events: list[Event | LookedUp] = field(default_factory=list)
    after: int = 0
    thread: int = field(default_factory=threading.get_ident)

    @property
    def plain(self) -> bool:
        """Whether the host looked at no layer."""
        return not self.after and self.weights is None

    def alike(self, other: Step) -> bool:
        """Whether both can be told as one block."""
        same = (self.tokens, self.layers) == (other.tokens, other.layers)
        return same and self.plain and other.plain and not self.events


class Later:
    """Stands between a store and its recorder. streamed: Whether the store tells of hits.

    Evaluates: the steps' notes, when they are told.
    """

    late = True

    def __init__(self, recorder: Recorder, *, streamed: bool):
        self.recorder, self._streamed = recorder, streamed
        recorder.catch_up = self.catch_up
        self._lock = threading.RLock()
        self._open: Step | None = None
        self._steps: list[Step] = []
        self._fetching: tuple[list[Step], Joined] | None = None
        self._telling: Iterator[None] = iter(())
        self._collect: Collect | None = None

    def __call__(self, event: Event | LookedUp) -> None:
        """An event that is known now."""
        with self._lock:
            if self.in_step:
                self._open.events.append(event)
            elif self._steps:
                self._steps[-1].events.append(event)
            else:
                self._finish()
                self.recorder(event)

    @property
    def used(self) -> bool:
        """Whether any step came from a trace; until then everything can be told at once."""
        return self._collect is not None or self._open is not None

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
            if len(self._steps) >= STEPS_AT_ONCE and self._fetching is None:
                # Without this step, which is under way: whoever asks for it must not wait.
                steps, self._steps = self._steps, []
                self._fetching = steps, _joined(steps, collect)
                mx.async_eval(self._fetching[1])
            self._collect, step.after = collect, len(step.events)
            self._steps.append(step)

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
            mx.async_eval([_numbers(step) for step in self._steps[-1:]])

    def some(self) -> None:
        """The device is at work: tell about a layer's worth of what is known."""
        with self._lock:
            next(self._telling, None)

    def catch_up(self) -> None:
        """Tell everything."""
        with self._lock:
            self.land()
            self._finish()
            steps, self._steps = self._steps, []
            self._telling = self._told(steps, _joined(steps, self._collect))
            self._finish()

    def _finish(self) -> None:
        for _ in self._telling:
            pass

    def _told(self, steps: list[Step], joined: Joined) -> Iterator[None]:
        _take(steps, joined)
        i = 0
        while i < len(steps):
            first, j = steps[i], i + 1
            while j < len(steps) and steps[j - 1].alike(steps[j]):
                j += 1
            if first.plain:
                self.recorder(self._block(steps[i:j]))
            else:
                yield from self._one_by_one(first)
            i, last = j, steps[j - 1]
            for event in last.events[last.after :]:
                self.recorder(event)
            yield

    def _block(self, steps: list[Step]) -> Steps:
        first = steps[0]
        numbers = np.stack([step.notes for step in steps])
        numbers = numbers.reshape(len(steps), len(first.layers), 2, first.tokens, -1)
        return Steps(
            layers=first.layers,
            counts=np.array([step.counts for step in steps]),
            ids=numbers[:, :, 1],
            weights=numbers[:, :, 0].view(np.float32),
            nanoseconds=np.array([step.nanoseconds for step in steps]),
            found=self._streamed,
        )

    def _one_by_one(self, step: Step) -> Iterator[None]:
        """A step of which some layers told events."""
        known = [*self._block([step]).calls(0)][::-1] if step.layers else []
        at = 0
        for event in step.events[: step.after]:
            if type(event) is Chosen:
                yield
                while known and known[-1].layer < event.layer:
                    self.recorder(known.pop())
                own, at = step.weights[at : at + event.ids.size], at + event.ids.size
                event = event._replace(weights=own.view(np.float32).reshape(event.ids.shape))
            self.recorder(event)
        while known:
            self.recorder(known.pop())


def _numbers(step: Step) -> list[mx.array]:
    return [array for array in (step.notes, step.weights) if array is not None]


def _joined(steps: Sequence[Step], collect: Collect) -> Joined:
    """What only the device knows of `steps`."""
    sizes: dict[int, list[mx.array]] = {}
    for array in (array for step in steps for array in _numbers(step)):
        sizes.setdefault(array.size, []).append(array)
    return {size: collect(arrays, count=size) for size, arrays in sizes.items()}


def _take(steps: Sequence[Step], joined: Joined) -> None:
    """Inverse of :func:`_joined`: from now on the steps have the bits of their numbers here."""
    rows = {n: iter(np.array(a).view(np.uint32).reshape(-1, n)) for n, a in joined.items()}
    for step in steps:
        for name in ("notes", "weights"):
            if (array := getattr(step, name)) is not None:
                setattr(step, name, next(rows[array.size]))
