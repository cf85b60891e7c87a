"""Prefetchers: they name experts that are read before their layer is called. No MLX.

A prefetcher sees a logical clock, like an eviction policy. Store and simulator follow the rules of
this module. At the end of a call the prefetcher names experts for the next layer. The store reads
those that are not resident; they count as hits when their layer is called, even if the call waits
for the rest of the read. A layer that holds every expert stays on the device and prefetches
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, runtime_checkable

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.named import distinct_ids, label, policy_of
from mlx_moeflux.experts.policies.timed_switch import TimedSwitch

# Calls of more (token, expert) pairs prefetch nothing: the next layer needs most experts and
# reads them in its own order.
MOST_PAIRS = 64


class Prefetch(Protocol):
    """Names experts to read ahead. Replace it with ``load(prefetch=...)``.

    looks_ahead: True to run the next layer's router on the present hidden state; its choice is the
    `guess` of :meth:`propose`. most: Blocks that one call prefetches at most, None for all that
    fit.
    """

    name: str
    looks_ahead: bool
    most: int | None

    def requested(self, layer: int, experts: Sequence[int], last: Sequence[int]) -> None:
        """Note the experts that the tokens of a call need: see
        :meth:`~mlx_moeflux.experts.policies.eviction.Eviction.touch`."""
        ...

    def propose(self, layer: int, guess: Sequence[int]) -> Sequence[int]:
        """Return different experts that the next call of `layer` may need, resident or not, the
        likeliest first. guess: The router's guess, in the same order; empty without
        `looks_ahead`, and for the first layer, whose token is not known yet."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


@runtime_checkable
class Switched(Protocol):
    """Part of a prefetcher that names experts only while its `switch` is on. Its `looks_ahead` may
    change with it, between two steps. The store tells the switch what decode steps cost, and resets
    it when the memory for experts changes."""

    switch: TimedSwitch


class LastToken:
    """Proposes the experts of the layer's last token, as moeflux does.

    A bank that keeps them, as LRU does, has nothing left to read; the statistics then show how
    often they are used again.
    """

    name = "last"
    looks_ahead = False

    def __init__(self, most: int | None = None):
        self.most = most
        self._last: dict[int, list[int]] = {}

    def requested(self, layer: int, experts: Sequence[int], last: Sequence[int]) -> None:
        if experts:
            self._last[layer] = [e for e, at in zip(experts, last, strict=True) if at == last[-1]]

    def propose(self, layer: int, guess: Sequence[int]) -> Sequence[int]:
        return self._last.get(layer, ())

    def reset(self) -> None:
        self._last.clear()


class LookAhead:
    """Proposes what the next layer's router chooses on the present hidden state: `most` blocks."""

    name = "ahead"
    looks_ahead = True

    def __init__(self, most: int | None = 2):
        self.most = most

    def requested(self, layer: int, experts: Sequence[int], last: Sequence[int]) -> None:
        pass

    def propose(self, layer: int, guess: Sequence[int]) -> Sequence[int]:
        return guess

    def reset(self) -> None:
        pass


class AutoLookAhead:
    """Proposes what ``ahead`` does while that is measured to be faster."""

    name = "auto"

    def __init__(self, most: int | None = 2):
        self.most, self.switch = most, TimedSwitch()

    @property
    def looks_ahead(self) -> bool:
        """True while the switch is on."""
        return self.switch.on

    def requested(self, layer: int, experts: Sequence[int], last: Sequence[int]) -> None:
        pass

    def propose(self, layer: int, guess: Sequence[int]) -> Sequence[int]:
        return guess

    def reset(self) -> None:
        self.switch.reset()


PREFETCHES: dict[str, Callable[[], Any]] = {
    kind.name: kind for kind in (LastToken, LookAhead, AutoLookAhead)
}


def make_prefetch(policy: str | Prefetch | None) -> Prefetch | None:
    """Return a prefetcher by name, the given object if it fits :class:`Prefetch`, or None for
    ``none``.

    Raises:
        InputError: See :func:`~mlx_moeflux.experts.policies.named.policy_of`.
    """
    return policy_of(Prefetch, policy, PREFETCHES, optional=True)


def next_layer(layers: Sequence[int], layer: int) -> int | None:
    """Return the layer to prefetch for after `layer`: the first after the last; None if it is
    alone."""
    following = layers[(layers.index(layer) + 1) % len(layers)]
    return None if following == layer else following


def proposed(policy: Prefetch, layer: int, guess: Sequence[int], num_experts: int) -> Sequence[int]:
    """Let `policy` propose, and check its answer.

    Raises:
        InputError: It proposed an expert twice, or one that does not exist, or no experts at all.
    """
    answer = policy.propose(layer, guess)
    proposal = distinct_ids(answer)
    if proposal is None or not all(0 <= e < num_experts for e in proposal):
        raise InputError(
            f"the prefetch {label(policy)} proposed {answer!r} for layer {layer}; expected "
            f"different experts below {num_experts}."
        )
    return proposal


def blocks_ahead(
    policy: Prefetch, proposal: Sequence[int], resident: Container[int], slots: int
) -> list[int]:
    """Return those of `proposal` to read, in its order.

    Proposed residents stay: their slots cannot be read into.
    """
    absent = [expert for expert in proposal if expert not in resident]
    room = slots - (len(proposal) - len(absent))
    return absent[: room if policy.most is None else min(room, policy.most)]


def merged(rows: Sequence[Sequence[int]], num_experts: int) -> tuple[int, ...]:
    """Merge the guesses of several tokens, likeliest first; `num_experts` marks padding."""
    columns = zip(*rows, strict=True)
    return tuple(dict.fromkeys(e for column in columns for e in column if e != num_experts))
