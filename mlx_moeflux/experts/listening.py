"""The listener that a store may have, see :mod:`mlx_moeflux.experts.events`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.events import Chosen, EventHook
from mlx_moeflux.experts.later import Later
from mlx_moeflux.kernels.choice import Kernels


class Listened:
    """Base of stores that have a listener. streamed: Whether a store tells of hits.

    later: Whom to tell what traced steps chose; None if nobody, or nobody who can wait, listens.
    """

    def __init__(self, *, streamed: bool):
        self._streamed = streamed
        self._events: EventHook | None = None
        self.later: Later | None = None
        self._noting: dict[int, list[mx.array]] = {}

    @property
    def events(self) -> EventHook | None:
        """The listener."""
        return self._events

    @events.setter
    def events(self, listener: EventHook | None) -> None:
        self.catch_up()
        self._events, self.later = listener, None
        if getattr(listener, "late", False):
            self.later = Later(listener, streamed=self._streamed)

    @property
    def tell(self) -> EventHook | None:
        """Whom to tell of an event."""
        return self.later if self.later is not None and self.later.used else self._events

    @property
    def told_at_once(self) -> bool:
        """Whether a listener wants to hear of each event at its moment."""
        return self._events is not None and self.later is None

    @property
    def quiet(self) -> bool:
        """Whether nobody is to be told of what is called now."""
        return self._events is None or self.noting is not None

    @property
    def wants_weights(self) -> bool:
        """Whether somebody is to be told now, and not later with all that a traced step chose."""
        return self._events is not None and (self.later is None or not self.later.in_step)

    def called(self, ids: mx.array, weights: mx.array) -> None:
        """A call begins: if it is being traced it is noted, else told of after those before it."""
        if self.noting is not None:
            self.noting.extend([weights.reshape(-1), ids.reshape(-1).view(mx.float32)])
        else:
            self.catch_up()

    def tell_chosen(
        self, layer: int, token: int, ids: np.ndarray, weights: mx.array | None
    ) -> None:
        """Tell the listener, if any, what a call chose; weights: None if they come later."""
        if self._events is not None:
            now = perf_counter_ns() if weights is None else 0
            known = None if weights is None else np.array(weights)
            self.tell(Chosen(layer, token, ids, known, now))

    def catch_up(self) -> None:
        """Tell a recorder what it has not been told yet."""
        if self.later is not None and self.later.used:
            self.later.catch_up()

    def hand_over(self) -> None:
        """Begin to evaluate what a recorder is still to be told."""
        if self.later is not None:
            self.later.hand_over()

    @property
    def noting(self) -> list[mx.array] | None:
        """While this thread traces a step for a recorder, a list: for each layer that the store is
        asked for, an array that ends with its weights and the bits of its ids, or two that are
        these; all are float32."""
        return self._noting.get(threading.get_ident()) if self._noting else None

    @contextmanager
    def notes(self) -> Iterator[list[mx.array]]:
        """While this lasts, :attr:`noting` is there."""
        thread = threading.get_ident()
        notes = self._noting[thread] = []
        try:
            yield notes
        finally:
            del self._noting[thread]


def collected(kernels: Kernels, log: mx.array, notes: Sequence[mx.array], pairs: int) -> mx.array:
    """`log` with what was noted of L layers, as "notes" of :mod:`mlx_moeflux.experts.later`."""
    count = 2 * pairs
    if any(note.size < count for note in notes):
        count, parts = pairs, []
        for note in notes:
            parts += [note] if note.size == pairs else mx.split(note.reshape(-1)[-2 * pairs :], 2)
        notes = parts
    assert log.size % (count * len(notes)) == 0, "a log is made of whole steps"
    return kernels.collect(log, notes, count=count)
