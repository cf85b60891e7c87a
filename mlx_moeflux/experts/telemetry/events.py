"""The events of a store, for one listener: traces, attribution and simulators use them.

For each call of a layer the order is: one :class:`Chosen`; a :class:`PrefetchEnd` or
:class:`PrefetchDrop` for each block on its way to this layer; then for each wave (one, unless
the tokens need more experts than there are slots), in ascending expert ids: a :class:`Hit` or
:class:`Miss` for each expert, an :class:`Evict` for each victim, a :class:`ReadStart` for each
missing expert, and a :class:`ReadEnd` for each block that arrived, which may come behind the
:class:`ReadStart` of the next two waves. A `ReadStart` without its `ReadEnd` is a read that
failed or was interrupted. At the end, where there is a prefetcher, come one :class:`Guess` if it
looks ahead or has a switch that is on, an :class:`Evict` for each victim in the next layer, and a
:class:`PrefetchStart` for each block that is read ahead.

Where a call begins the first waves of the next layer, their :class:`Evict` and
:class:`PrefetchStart` come behind the last :class:`ReadStart` of the call. In the next layer's call
the hits of these waves come first, and a :class:`PrefetchEnd` or :class:`PrefetchDrop` for each
block in the order of the waves, before the first :class:`ReadEnd`.

All events come from the thread that calls the store. A listener may raise; the call is then
abandoned like an interrupted one. Without a listener no event is made.

While a store has a listener, every layer synchronises, because ids and weights must be known, and
decode steps are not traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np


class Chosen(NamedTuple):
    """The router's choice. ids ``[N, K]`` uint32, E marks padding; weights ``[N, K]`` float32.

    token: Number of tokens that this layer had seen before.
    """

    layer: int
    token: int
    ids: np.ndarray
    weights: np.ndarray


class Hit(NamedTuple):
    """A needed expert is resident. prefetched: It was read ahead and this is its first use."""

    layer: int
    expert: int
    prefetched: bool = False


class Miss(NamedTuple):
    """A needed expert is not resident."""

    layer: int
    expert: int


class Evict(NamedTuple):
    """An expert lost its slot."""

    layer: int
    expert: int
    slot: int


class ReadStart(NamedTuple):
    """A block's read was handed to the threads."""

    layer: int
    expert: int
    slot: int


class ReadEnd(NamedTuple):
    """A block has arrived: bytes, and seconds that its thread spent on it."""

    layer: int
    expert: int
    slot: int
    nbytes: int
    seconds: float


class Guess(NamedTuple):
    """Experts that `layer`, the next one, may be asked for, the likeliest first; none from a
    prefetcher with a switch that does not look ahead."""

    layer: int
    experts: tuple[int, ...]


class PrefetchStart(NamedTuple):
    """A block is read before its layer is called: the read was handed to the threads."""

    layer: int
    expert: int
    slot: int


class PrefetchEnd(NamedTuple):
    """Such a block has arrived, at the latest when its layer was called."""

    layer: int
    expert: int
    slot: int
    nbytes: int
    seconds: float


class PrefetchDrop(NamedTuple):
    """Such a block was not needed and not begun, or its read failed; its slot is free again."""

    layer: int
    expert: int
    slot: int


class Resize(NamedTuple):
    """Between calls a layer was given another number of slots, after an :class:`Evict` for each
    expert that had to leave."""

    layer: int
    slots: int


Event = (
    Chosen | Hit | Miss | Evict | ReadStart | ReadEnd
    | Guess | PrefetchStart | PrefetchEnd | PrefetchDrop | Resize
)  # fmt: skip
EventHook = Callable[[Event], None]


class Listeners:
    """A listener that passes every event to several."""

    def __init__(self, listeners: Iterable[EventHook]):
        self.listeners = tuple(listeners)

    def __call__(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)


def joined(present: EventHook | None, new: EventHook) -> EventHook:
    """Return a listener that passes every event to `present`, if there is one, and to `new`."""
    return new if present is None else Listeners((*_parts(present), new))


def parted(present: EventHook | None, old: EventHook) -> EventHook | None:
    """Return `present` without `old`. Listeners that were joined later stay."""
    left = [listener for listener in _parts(present) if listener is not old]
    return Listeners(left) if len(left) > 1 else left[0] if left else None


def _parts(listener: EventHook | None) -> tuple[EventHook, ...]:
    if isinstance(listener, Listeners):
        return listener.listeners
    return () if listener is None else (listener,)
