"""The waves of a layer call that needs more experts than the layer has slots.

When all reads of such a call have begun, the first waves of the next layer follow them: a prompt
that needs most experts of one layer needs most of the next, whichever its router chooses. The disk
reads them while the next layer's mixer computes.

No MLX: both the store and the simulator use this schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, Protocol

# Blocks that a wave reads at most: enough to keep a disk busy, few enough that computing begins
# early and that most residents stay until their wave.
READ_AHEAD = 16
# A call that needs so large a part of the experts begins the next layer's waves. Of a smaller part
# too many blocks would be read in vain, and delay the others where the disk is never idle.
EXPECTED_SHARE = 0.875


class Residents(Container[int], Protocol):
    """The residents of a layer."""

    @property
    def slots(self) -> int:
        """Number of slots."""
        ...


class Wave(NamedTuple):
    """Consecutive needed experts that are, or are being read, in the bank together. One that began
    before its call has experts that are not needed, too."""

    experts: list[int]
    missing: list[int]


class WaveSchedule:
    """The waves of one call.

    Every needed expert is in exactly one wave, in ascending order. Residents of later waves stay if
    that leaves room to read, so that each block is read at most once and hits stay hits.

    read_ahead: Blocks that a wave reads at most. begun: Waves whose reads have begun and that are
    not computed yet, the oldest first; the argument has those that began before the call.
    """

    def __init__(
        self,
        table: Residents,
        needed: Sequence[int],
        read_ahead: int = READ_AHEAD,
        begun: Iterable[Wave] = (),
    ):
        self._table, self.read_ahead = table, read_ahead
        self.begun = deque(begun)
        self._kept = {expert for expert in needed if expert in table}
        by_turn = sorted(self._kept)
        self._busy: set[int] = set()
        while by_turn and self.room() < min(table.slots, 2 * read_ahead):
            self._kept.remove(by_turn.pop())
        for wave in self.begun:
            self._kept.difference_update(wave.experts)
            self._busy.update(wave.experts)
        first = self.begun[-1].experts[-1] + 1 if self.begun else 0
        self._waiting = [expert for expert in reversed(needed) if expert >= first]

    @property
    def all_begun(self) -> bool:
        """True if the reads of every wave have begun."""
        return not self._waiting

    @property
    def protected(self) -> set[int]:
        """Experts that must not be evicted now."""
        return self._kept | self._busy

    def room(self) -> int:
        """Return the number of slots that can be read into now."""
        return self._table.slots - len(self.protected)

    def next(self, limit: int) -> Wave | None:
        """Return the next wave, which takes at most `limit` slots; None if it would be empty."""
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
        return Wave(experts, missing) if experts else None

    def done(self, full: Wave) -> None:
        """Free the slots of `full`, which has been computed."""
        self._busy.difference_update(full.experts)


def begin_first(plan: WaveSchedule, begin: Callable[[Wave], None]) -> bool:
    """Begin the first wave; :func:`run_waves` does so unless it has begun."""
    return _begin_next(plan, max(1, plan.room() // 3), begin)


def begin_early(plan: WaveSchedule, begin: Callable[[Wave], None]) -> None:
    """Begin as many waves as :func:`run_waves` has under way."""
    begin_first(plan, begin)
    _begin_next(plan, plan.room() // 2, begin)
    _begin_next(plan, plan.room(), begin)


def layer_to_begin(layers: Sequence[int], layer: int, needed: int, num_experts: int) -> int | None:
    """Return the layer whose first waves begin during a call of `layer` that needs `needed`
    experts, if it has fewer slots; None if there is none."""
    after = layers.index(layer) + 1
    most = needed >= EXPECTED_SHARE * num_experts
    return layers[after] if most and after < len(layers) else None


def run_waves(
    plan: WaveSchedule,
    begin: Callable[[Wave], None],
    finish: Callable[[], None],
    compute: Callable[[Wave], None],
    begin_following: Callable[[], None],
) -> None:
    """Run all waves: `begin` makes room for a wave and starts its reads, `finish` waits for the
    oldest wave's, `compute` uses them. `begin_following` is called once, when the last reads have
    begun.

    While one wave computes, the next is being read, and the reads of a third are queued, so that
    the disk does not idle in between.
    """
    following = False
    while plan.begun or begin_first(plan, begin):
        if len(plan.begun) == 1:
            _begin_next(plan, plan.room() // 2, begin)
        finish()
        current = plan.begun.popleft()
        _begin_next(plan, plan.room(), begin)
        if plan.all_begun and not following:
            following = True
            begin_following()
        compute(current)
        plan.done(current)


def _begin_next(plan: WaveSchedule, limit: int, begin: Callable[[Wave], None]) -> bool:
    full = plan.next(min(limit, plan.read_ahead))
    if full is not None:
        plan.begun.append(full)
        begin(full)
    return full is not None
