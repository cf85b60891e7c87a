"""What a store tells the one listener it may have: statistics, traces, simulators feed on it.

For each call of a layer the order is: one :class:`Chosen`; a :class:`PrefetchEnd` or
:class:`PrefetchDrop` for each block on its way to this layer; then for each bank-full (one, unless
the tokens need more experts than there are slots), in ascending expert ids: a :class:`Hit` or
:class:`Miss` for each expert, an :class:`Evict` for each victim, a :class:`ReadStart` for each
missing expert, and a :class:`ReadEnd` for each block that arrived, which may come behind the
:class:`ReadStart` of the next two bank-fulls. A `ReadStart` without its `ReadEnd` is a read that
failed or was interrupted. At the end, where there is a prefetcher, come one :class:`Guess` if it
looks ahead, an :class:`Evict` for each victim in the next layer, and a :class:`PrefetchStart` for
each block that is read ahead.

All events come from the thread that calls the store. A listener may raise; the call is then
abandoned like any interrupted one. Without a listener nothing is built.

A plain function is told of everything at its moment: a layer that holds every expert synchronises
too, because ids and weights must be known, and steps of one token are not traced as a whole. A
:class:`Recorder` hears of the same events in the same order, but of traced steps some steps later,
see :mod:`mlx_moeflux.experts.later`: decoding then goes on as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Chosen(NamedTuple):
    """What the router chose. ids ``[N, K]`` uint32, E marks padding; weights ``[N, K]`` float32.

    token: How many tokens this layer had seen before. nanoseconds: When that was, by
    ``time.perf_counter_ns``, if it is told late; else 0.
    """

    layer: int
    token: int
    ids: np.ndarray | None = None
    weights: np.ndarray | None = None
    nanoseconds: int = 0


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
    """Experts that `layer`, the next one, may be asked for, the likeliest first."""

    layer: int
    experts: tuple[int, ...]


class PrefetchStart(NamedTuple):
    """A block that nobody has asked for yet was handed to the threads."""

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
    expert that had to leave. A balance's own moves are not told of: it can be replayed."""

    layer: int
    slots: int


Event = Chosen | Hit | Miss | Evict | ReadStart | ReadEnd
Event = Event | Guess | PrefetchStart | PrefetchEnd | PrefetchDrop | Resize
EventHook = Callable[[Event], None]


class LookedUp(NamedTuple):
    """What a call tells of the experts that it needs, ascending. first: Read ahead, and used for
    the first time."""

    layer: int
    needed: Collection[int]
    missing: Collection[int]
    first: Collection[int]

    def events(self) -> Iterator[Hit | Miss]:
        """The same one by one."""
        for expert in self.needed:
            if expert in self.missing:
                yield Miss(self.layer, expert)
            else:
                yield Hit(self.layer, expert, expert in self.first)


@dataclass(frozen=True)
class Steps:
    """S traced steps of N tokens, none of them padding, that passed L layers holding every expert.

    layers: Their ids. counts ``[S, L]``: tokens that each had seen before. ids ``[S, L, N, K]``
    uint32, weights alike float32, as in :class:`Chosen`. nanoseconds ``[S]``: when each step was
    begun. found: Whether each expert is told of as a :class:`Hit`, as streamed stores do.
    """

    layers: tuple[int, ...]
    counts: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    nanoseconds: np.ndarray
    found: bool

    def events(self) -> Iterator[Event]:
        """The same one by one."""
        for step in range(len(self.ids)):
            yield from self.calls(step)

    def calls(self, step: int) -> Iterator[Event]:
        """Those of one step."""
        for i, layer in enumerate(self.layers):
            ids = self.ids[step, i]
            count, at = int(self.counts[step, i]), int(self.nanoseconds[step])
            yield Chosen(layer, count, ids, self.weights[step, i], at)
            if self.found:
                for expert in np.unique(ids).tolist():
                    yield Hit(layer, expert)


class Recorder(Protocol):
    """A listener that may hear of events late, and of several as one :class:`LookedUp` or
    :class:`Steps`.

    late: True; an attribute, so that an instance can decide. catch_up: Set by the store that it
    listens to: has everything told that was not yet. To be called before something is made of what
    was told; taking the listener away does so too.
    """

    late: bool
    catch_up: Callable[[], None]

    def __call__(self, event: Event | LookedUp | Steps) -> None:
        """As every listener."""
        ...


def tell_looked_up(listener: EventHook, found: LookedUp) -> None:
    """Tell as `listener` wants to hear of it."""
    if getattr(listener, "late", False):
        listener(found)
        return
    for event in found.events():
        listener(event)


class Both:
    """A listener that passes everything to two, late if both may hear of it late."""

    def __init__(self, first: EventHook, second: EventHook):
        self._parts = first, second
        self.late = all(getattr(part, "late", False) for part in self._parts)

    @property
    def catch_up(self) -> Callable[[], None]:
        """See :class:`Recorder`."""
        return self._parts[0].catch_up

    @catch_up.setter
    def catch_up(self, function: Callable[[], None]) -> None:
        for part in self._parts:
            part.catch_up = function

    def __call__(self, event: Event | LookedUp | Steps) -> None:
        for part in self._parts:
            part(event)


def both(first: EventHook | None, second: EventHook) -> EventHook:
    """A listener that passes every event to two; the first may be absent."""
    return second if first is None else Both(first, second)
