"""In which order a layer takes its turns when its tokens need more experts than it has slots.

No MLX: the store and the simulator both follow this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, Protocol

# Blocks that a bank-full reads at most: enough to keep a disk busy, few enough that computing
# begins early and that most residents can wait for their turn.
READ_AHEAD = 16


class Residents(Container[int], Protocol):
    """Who is in the slots of a layer."""

    @property
    def slots(self) -> int:
        """How many slots there are."""
        ...


class BankFull(NamedTuple):
    """Consecutive needed experts that are, or are being read, in the bank together."""

    experts: list[int]
    missing: list[int]


class Plan:
    """Decides the bank-fulls of one sweep.

    Every needed expert is in exactly one, ascending. Residents whose turn comes later are kept
    if that leaves room to read, so that each block is read at most once and hits stay hits.
    """

    def __init__(self, table: Residents, needed: Sequence[int]):
        self._table = table
        self._waiting = list(reversed(needed))
        self._kept = {expert for expert in needed if expert in table}
        self._busy: set[int] = set()
        by_turn = sorted(self._kept)
        while by_turn and self.room() < min(table.slots, 2 * READ_AHEAD):
            self._kept.remove(by_turn.pop())

    @property
    def protected(self) -> set[int]:
        """Experts that must not be evicted now."""
        return self._kept | self._busy

    def room(self) -> int:
        """Slots that can be read into now."""
        return self._table.slots - len(self.protected)

    def next(self, limit: int) -> BankFull | None:
        """The next bank-full that takes at most `limit` slots; None if it would be empty."""
        experts, missing = [], []
        while self._waiting:
            expert = self._waiting[-1]
            if expert in self._kept:
                self._kept.remove(expert)
            elif limit == 0:
                break
            else:
                limit -= 1
                if expert not in self._table:
                    missing.append(expert)
            self._busy.add(expert)
            experts.append(self._waiting.pop())
        return BankFull(experts, missing) if experts else None

    def done(self, full: BankFull) -> None:
        """`full` has been computed: its slots may be read into."""
        self._busy.difference_update(full.experts)


def take_turns(
    plan: Plan,
    begin: Callable[[BankFull], None],
    finish: Callable[[], None],
    compute: Callable[[BankFull], None],
) -> None:
    """Play a sweep: `begin` makes room for a bank-full and starts its reads, `finish` waits for
    those of the oldest, `compute` uses what arrived.

    While one bank-full computes, the next is being read, and the one after it waits for the disk,
    which would rest between the two.
    """
    begun: deque[BankFull] = deque()

    def more(limit: int) -> bool:
        full = plan.next(min(limit, READ_AHEAD))
        if full is not None:
            begun.append(full)
            begin(full)
        return full is not None

    while begun or more(max(1, plan.room() // 3)):
        if len(begun) == 1:
            more(plan.room() // 2)
        finish()
        current = begun.popleft()
        more(plan.room())
        compute(current)
        plan.done(current)
