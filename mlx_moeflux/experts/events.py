"""What a store tells the one listener it may have: statistics, traces, simulators feed on it.

For each call of a layer the order is: one :class:`Chosen`; then for each bank-full (one, unless
the tokens need more experts than there are slots), in ascending expert ids: a :class:`Hit` or
:class:`Miss` for each expert, an :class:`Evict` for each victim, a :class:`ReadStart` for each
missing expert, and a :class:`ReadEnd` for each block that arrived. A `ReadStart` without its
`ReadEnd` is a read that failed or was interrupted.

All events come from the thread that calls the store. A listener may raise; the call is then
abandoned like any interrupted one. Without a listener nothing is built. With one, a layer that
holds every expert synchronises too, because ids and weights must be known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Chosen(NamedTuple):
    """What the router chose. ids ``[N, K]`` uint32, E marks padding; weights ``[N, K]`` float32.

    token: How many tokens this layer had seen before.
    """

    layer: int
    token: int
    ids: np.ndarray
    weights: np.ndarray


class Hit(NamedTuple):
    """A needed expert is resident."""

    layer: int
    expert: int


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


Event = Chosen | Hit | Miss | Evict | ReadStart | ReadEnd
EventHook = Callable[[Event], None]
