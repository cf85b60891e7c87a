"""Balances: they move slots between layers while a model runs. Pure Python, no MLX.

By default every layer keeps its slots. A balance moves slots at token boundaries from layers that
would miss them least to those that would use them most. It sees a logical clock, like every policy,
and the simulator follows the same rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.named import label, policy_of


class Balance(Protocol):
    """Moves slots between layers. Replace it with ``load(balance=...)``."""

    name: str

    def called(self, layer: int, misses: Sequence[int], evicted: Sequence[int]) -> None:
        """Note that a call of `layer` read `misses`; `evicted` lost their slots for them."""
        ...

    def share(
        self, token: int, slots: Mapping[int, int], *, least: int, most: int
    ) -> Mapping[int, int]:
        """Return layer -> slots from now on, or `slots` itself to change nothing; called after the
        last layer of each short call. token: Tokens that this layer has seen. The bytes may not
        grow, and each number stays within `least` and `most`."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


class Shift:
    """Moves `step` slots every `period` tokens.

    They go from the layer that reads its last victims back least often to the one that does so most
    often, if that is `margin` times as often. A layer's last victims are the `step` experts that it
    would have kept with `step` more slots.
    """

    name = "shift"

    def __init__(self, period: int = 128, step: int = 2, margin: float = 1.5):
        self._period, self._step, self._margin = period, step, margin
        self.reset()

    def called(self, layer: int, misses: Sequence[int], evicted: Sequence[int]) -> None:
        ghosts = self._ghosts.setdefault(layer, OrderedDict())
        wanted = sum(ghosts.pop(expert, None) is not None for expert in misses)
        self._wanted[layer] = self._wanted.get(layer, 0) + wanted
        ghosts.update(dict.fromkeys(evicted, True))
        while len(ghosts) > self._step:
            ghosts.popitem(last=False)

    def share(
        self, token: int, slots: Mapping[int, int], *, least: int, most: int
    ) -> Mapping[int, int]:
        if token < self._next:
            return slots
        self._next = token + self._period
        wanted, self._wanted = self._wanted, {}
        able = [layer for layer in slots if slots[layer] - self._step >= least]
        needy = [layer for layer in slots if slots[layer] + self._step <= most]
        if not able or not needy:
            return slots
        # Ties go to the lowest layer; the order of the mapping does not matter.
        giver = min(able, key=lambda layer: (wanted.get(layer, 0), layer))
        taker = max(needy, key=lambda layer: (wanted.get(layer, 0), -layer))
        if wanted.get(taker, 0) <= self._margin * wanted.get(giver, 0):
            return slots
        return {
            **slots, giver: slots[giver] - self._step, taker: slots[taker] + self._step
        }  # fmt: skip

    def reset(self) -> None:
        self._next = self._period
        self._wanted: dict[int, int] = {}
        self._ghosts: dict[int, OrderedDict[int, bool]] = {}


BALANCES: dict[str, Callable[[], Any]] = {Shift.name: Shift}


def make_balance(policy: str | Balance | None) -> Balance | None:
    """Return a balance by name, the given object if it fits :class:`Balance`, or None for ``none``.

    Raises:
        InputError: See :func:`~mlx_moeflux.experts.policies.named.policy_of`.
    """
    return policy_of(Balance, policy, BALANCES, optional=True)


def changes_in_order(
    policy: Balance,
    token: int,
    slots: Mapping[int, int],
    *,
    least: int,
    most: int,
    bytes_of: Mapping[int, int],
) -> list[tuple[int, int]]:
    """Return (layer, slots) of every bank to resize, those that shrink first.

    Raises:
        InputError: The policy gave more bytes than there are, a number out of range, or no mapping.
    """
    wanted = policy.share(token, slots, least=least, most=most)
    if wanted is slots:
        return []
    fair = isinstance(wanted, Mapping) and set(wanted) == set(slots)
    if not (fair and all(isinstance(n, int) and least <= n <= most for n in wanted.values())) or (
        sum((wanted[layer] - n) * bytes_of[layer] for layer, n in slots.items()) > 0
    ):
        raise InputError(
            f"the balance {label(policy)} gave slots {wanted!r}; they must be {least} to {most} a "
            f"layer and no more bytes than {dict(slots)}."
        )
    changed = [(layer, n) for layer, n in wanted.items() if n != slots[layer]]
    return sorted(changed, key=lambda change: (change[1] - slots[change[0]], change[0]))
