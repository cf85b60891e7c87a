"""Which expert gives up its slot when another is needed. Pure Python, no MLX.

A policy sees a logical clock only, never time, so that a recorded trace can be replayed. It
advises and does not keep the books: the set of residents that it is given is the truth, also
after an interrupted call in which it was not told of everything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Container
from typing import NamedTuple, Protocol

from mlx_moeflux.errors import InputError


class Clock(NamedTuple):
    """When an expert was asked for: the layer's count of tokens before this one, the layer, and
    the place among the token's experts (ascending ids)."""

    token: int
    layer: int
    order: int


class Eviction(Protocol):
    """Chooses victims. Replace it with ``load(eviction=...)``.

    For each call of a layer the store calls `touch` for every distinct expert that the tokens
    ask for, in the order of their last use; then, once or several times, `choose`, `evict` for
    each victim, and `admit` for each expert whose block has arrived.
    """

    name: str

    def touch(self, layer: int, expert: int, clock: Clock, uses: int) -> None:
        """`uses` tokens of this call ask for `expert`, resident or not, the last at `clock`."""
        ...

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        """Exactly `count` different members of `resident` that are not in `protected`; the store
        never asks for more than there are."""
        ...

    def evict(self, layer: int, expert: int) -> None:
        """`expert` has lost its slot."""
        ...

    def admit(self, layer: int, expert: int) -> None:
        """`expert` has been read into a slot."""
        ...

    def reset(self) -> None:
        """Every bank is empty; forget everything."""
        ...


class LRU:
    """Evicts the expert whose last use is longest ago; one that was never asked for goes first.

    A call costs the length of its answer plus the residents and newcomers that must be skipped.
    """

    name = "lru"

    def __init__(self):
        self._order: dict[int, OrderedDict[int, None]] = {}

    def touch(self, layer: int, expert: int, clock: Clock, uses: int) -> None:
        """See :meth:`Eviction.touch`."""
        order = self._order.setdefault(layer, OrderedDict())
        order[expert] = None
        order.move_to_end(expert)

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        """See :meth:`Eviction.choose`."""
        order = self._order.get(layer, {})
        victims: list[int] = []
        for expert in order:
            if len(victims) == count:
                return victims
            if expert in resident and expert not in protected:
                victims.append(expert)
        if len(victims) < count:
            # Residents that this object was never told of are older than anything it knows.
            unknown = sorted(e for e in resident if e not in order and e not in protected)
            victims = (unknown + victims)[:count]
        return victims

    def evict(self, layer: int, expert: int) -> None:
        """See :meth:`Eviction.evict`."""
        self._order.get(layer, {}).pop(expert, None)

    def admit(self, layer: int, expert: int) -> None:
        """See :meth:`Eviction.admit`."""
        order = self._order.setdefault(layer, OrderedDict())
        if expert not in order:
            order[expert] = None
            order.move_to_end(expert, last=False)

    def reset(self) -> None:
        """See :meth:`Eviction.reset`."""
        self._order.clear()


EVICTIONS: dict[str, Callable[[], Eviction]] = {"lru": LRU}


def make_eviction(policy: str | Eviction) -> Eviction:
    """A policy by name, or the given object if it has the methods of :class:`Eviction`.

    Raises:
        InputError: The name is unknown or a method is missing.
    """
    if isinstance(policy, str):
        if policy not in EVICTIONS:
            raise InputError(f"no eviction is called '{policy}'; there are {', '.join(EVICTIONS)}.")
        return EVICTIONS[policy]()
    for method in ("touch", "choose", "evict", "admit", "reset"):
        if not callable(getattr(policy, method, None)):
            raise InputError(
                f"the eviction {type(policy).__name__} has no method '{method}'; see the "
                "Eviction protocol."
            )
    return policy


def choose_victims(
    policy: Eviction,
    layer: int,
    count: int,
    *,
    resident: Collection[int],
    protected: Container[int],
) -> list[int]:
    """Ask `policy` and hold it to its contract.

    Raises:
        InputError: It named too few, too many, the same twice, or an expert it may not.
    """
    victims = list(policy.choose(layer, count, resident=resident, protected=protected))
    fair = all(e in resident and e not in protected for e in victims)
    if len(victims) != count or len(set(victims)) != count or not fair:
        raise InputError(
            f"the eviction {getattr(policy, 'name', type(policy).__name__)} chose {victims} in "
            f"layer {layer}; expected {count} different unprotected residents."
        )
    return victims
