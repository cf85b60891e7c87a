"""Which experts are read before anyone asks for them. Pure Python, no MLX.

A prefetcher sees a logical clock only, like an eviction policy, and the rules below are those of
the store and of the simulator. At the end of a call it names experts for the next layer; those
that are not resident are read, and count as found once their layer is called, however much of the
read is left to wait for by then.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

from mlx_moeflux.errors import InputError

# After calls of more (token, expert) pairs nothing is read ahead: the next layer needs most
# experts anyway and reads them in its own order.
MOST_PAIRS = 64


class Prefetch(Protocol):
    """Names experts ahead. Replace it with ``load(prefetch=...)``.

    looks_ahead: The next layer's router is asked, on the present hidden state, what it would
    choose; the answer is the `guess` of :meth:`propose`. most: Blocks read ahead for one call at
    most, None for all that fit.
    """

    name: str
    looks_ahead: bool
    most: int | None

    def requested(self, layer: int, experts: Sequence[int], last: Sequence[int]) -> None:
        """What the tokens of a call asked for: see
        :meth:`~mlx_moeflux.experts.policies.eviction.Eviction.touch`."""
        ...

    def propose(self, layer: int, guess: Sequence[int]) -> Sequence[int]:
        """Different experts that the next call of `layer` may ask for, resident or not, the
        likeliest first. guess: The router's, in the same order; empty if it was not asked, as
        for the first layer, whose token is not known yet."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


class LastToken:
    """The experts that the layer's last token asked for, as moeflux does.

    A bank that keeps them, and LRU always does, has nothing left to read: what this shows then is
    how often they are asked for again.
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
    """What the next layer's router chooses on the present hidden state, `most` blocks at most."""

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


NONE = "none"
PREFETCHES: dict[str, Callable[[], Any]] = {kind.name: kind for kind in (LastToken, LookAhead)}


def make_prefetch(policy: str | Prefetch | None) -> Prefetch | None:
    """A prefetcher by name, the given object if it fits :class:`Prefetch`, or None for ``none``.

    Raises:
        InputError: The name is unknown or something is missing.
    """
    if policy is None or policy == NONE:
        return None
    if isinstance(policy, str):
        if policy not in PREFETCHES:
            names = ", ".join((NONE, *PREFETCHES))
            raise InputError(f"no prefetch is called '{policy}'; there are {names}.")
        return PREFETCHES[policy]()
    for name in ("requested", "propose", "reset", "looks_ahead", "most"):
        if not hasattr(policy, name):
            raise InputError(
                f"the prefetch {type(policy).__name__} has no '{name}'; see the Prefetch protocol."
            )
    return policy


def next_layer(layers: Sequence[int], layer: int) -> int | None:
    """Whom to read ahead for after `layer`; after the last, the first; None if it is alone."""
    following = layers[(layers.index(layer) + 1) % len(layers)]
    return None if following == layer else following


def proposed(policy: Prefetch, layer: int, guess: Sequence[int], num_experts: int) -> Sequence[int]:
    """Ask `policy` and hold it to its contract.

    Raises:
        InputError: It named an expert twice or one that does not exist.
    """
    proposal = policy.propose(layer, guess)
    if len(set(proposal)) != len(proposal) or not all(0 <= e < num_experts for e in proposal):
        raise InputError(
            f"the prefetch {getattr(policy, 'name', type(policy).__name__)} proposed "
            f"{list(proposal)} for layer {layer}; expected different experts below {num_experts}."
        )
    return proposal


def blocks_ahead(
    policy: Prefetch, proposal: Sequence[int], resident: Container[int], slots: int
) -> list[int]:
    """Those of `proposal` to read, in its order.

    All that is proposed stays: what is resident of it takes slots that cannot be read into.
    """
    absent = [expert for expert in proposal if expert not in resident]
    room = slots - (len(proposal) - len(absent))
    return absent[: room if policy.most is None else min(room, policy.most)]


def merged(rows: Sequence[Sequence[int]], num_experts: int) -> tuple[int, ...]:
    """The guesses of several tokens as one, likeliest first; `num_experts` marks padding."""
    columns = zip(*rows, strict=True)
    return tuple(dict.fromkeys(e for column in columns for e in column if e != num_experts))
