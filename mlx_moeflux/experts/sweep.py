"""More experts than slots: bank-fulls in ascending id, the next read while one computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_moeflux.experts.compute import ExpertSum, Pairs
from mlx_moeflux.experts.events import EventHook
from mlx_moeflux.experts.fetch import ReadThreads
from mlx_moeflux.experts.layer import StreamedLayer
from mlx_moeflux.experts.slots import SlotTable

# Blocks that a bank-full reads at most: enough to keep a disk busy, few enough that computing
# begins early and that most residents can wait for their turn.
READ_AHEAD = 16


class BankFull(NamedTuple):
    """Consecutive needed experts that are, or are being read, in the bank together."""

    experts: list[int]
    missing: list[int]


class Plan:
    """Decides the bank-fulls of one sweep.

    Every needed expert is in exactly one, ascending. Residents whose turn comes later are kept
    if that leaves room to read, so that each block is read at most once and hits stay hits.
    """

    def __init__(self, table: SlotTable, needed: Sequence[int]):
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


def sweep(
    state: StreamedLayer,
    pairs: Pairs,
    needed: Sequence[int],
    total: ExpertSum,
    *,
    threads: ReadThreads,
    events: EventHook | None,
) -> mx.array:
    """Compute `pairs`, whose distinct experts `needed` (ascending) exceed the slots.

    Evaluates: the result ``[N, C]``, bank-full by bank-full, so that the slots of one may be
    read into once it is done.
    """
    plan = Plan(state.table, needed)

    def begin(limit: int) -> BankFull | None:
        full = plan.next(min(limit, READ_AHEAD))
        if full is not None:
            state.look_up(full.experts, full.missing, events)
            slots = state.make_room(len(full.missing), plan.protected, events)
            state.start(threads, full.missing, slots, events)
        return full

    current = begin(max(1, plan.room() // 2))
    while current is not None:
        state.finish(events)
        following = begin(plan.room())
        part = pairs.between(current.experts[0], current.experts[-1])
        total.add(part, state.table.slots_by_expert, state.bank.experts)
        mx.eval(total.total)
        plan.done(current)
        current = following or begin(max(1, plan.room() // 2))
    return total.total
