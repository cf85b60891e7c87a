"""The protocol of eviction policies, which choose the expert that loses its slot. No MLX.

A policy sees a logical clock, never time, so that a recorded trace can be replayed. The set of
residents that a policy receives is the truth, also after an interrupted call of which it missed a
part.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import Protocol

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.eviction_policies import EVICTIONS
from mlx_moeflux.experts.policies.named import distinct_ids, label, policy_of


class Eviction(Protocol):
    """Chooses victims. Replace it with ``load(eviction=...)``.

    For each call of a layer the store calls `touch` once, with all requested experts; then, once
    or several times, `choose`, `evict` for each victim, and `admit` for each expert whose block has
    arrived. Between calls of a layer `choose`, `evict` and `admit` serve prefetches and changes of
    the bank's size.
    """

    name: str

    def touch(
        self, layer: int, experts: Sequence[int], last: Sequence[int], uses: Sequence[int]
    ) -> None:
        """Note that the tokens of a call need `experts`, resident or not.

        experts: Different ones, in the order of their last use: by token, then in the router's
        order (ascending ids). last: The token of that use, counted by the layer since the store
        was opened. uses: Number of tokens of the call that need it.
        """
        ...

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        """Return exactly `count` different members of `resident` that are not in `protected`; there
        are always enough."""
        ...

    def evict(self, layer: int, expert: int) -> None:
        """Note that `expert` has lost its slot."""
        ...

    def admit(self, layer: int, expert: int) -> None:
        """Note that `expert` has been read into a slot."""
        ...

    def reset(self) -> None:
        """Forget everything: all banks are empty."""
        ...


def make_eviction(policy: str | Eviction) -> Eviction:
    """Return a policy by name, or the given object if it has the methods of :class:`Eviction`.

    Raises:
        InputError: See :func:`~mlx_moeflux.experts.policies.named.policy_of`.
    """
    return policy_of(Eviction, policy, EVICTIONS)


def choose_victims(
    policy: Eviction,
    layer: int,
    count: int,
    *,
    resident: Collection[int],
    protected: Container[int],
) -> list[int]:
    """Let `policy` choose, and check its answer. ``StreamedLayer.make_room`` calls this.

    Raises:
        InputError: It chose too few, too many, one twice, or one that is not allowed.
    """
    answer = policy.choose(layer, count, resident=resident, protected=protected)
    victims = distinct_ids(answer)
    if victims is None or len(victims) != count or not all(
        expert in resident and expert not in protected for expert in victims
    ):  # fmt: skip
        raise InputError(
            f"the eviction {label(policy)} chose {answer!r} in layer {layer}; expected {count} "
            "different unprotected residents."
        )
    return victims
