"""One layer of a streamed store: its bank, who is in it, and how experts get there.

The order of every change makes an interruption at any moment harmless: an expert leaves the
table before its slot is written, enters it after its block has arrived, and until then
`unsettled` is set, which makes the next user put things right first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.asked import Asked
from mlx_moeflux.experts.bank import LayerBank
from mlx_moeflux.experts.events import (
    EventHook,
    Evict,
    LookedUp,
    PrefetchDrop,
    PrefetchEnd,
    PrefetchStart,
    ReadEnd,
    ReadStart,
    tell_looked_up,
)
from mlx_moeflux.experts.fetch import Arrival, Fetch, ReadThreads, Target
from mlx_moeflux.experts.policy import Eviction, choose_victims
from mlx_moeflux.experts.readers import Reader
from mlx_moeflux.experts.readings import Reading
from mlx_moeflux.experts.slots import SlotTable
from mlx_moeflux.experts.stats import ExpertStats, LayerStats
from mlx_moeflux.experts.uploads import Uploads
from mlx_moeflux.kernels.expert_mix import ABSENT

# More outputs than this are not remembered, but evaluated: by then they long have been.
MAX_UNEVALUATED = 8


class StreamedLayer:
    """The slots of one layer. All methods but none of the reads run in the caller's thread."""

    def __init__(
        self,
        layer: int,
        bank: LayerBank,
        *,
        reader: Reader,
        policy: Eviction,
        stats: ExpertStats,
        uploads: Uploads | None = None,
    ):
        self._uploads = uploads
        self.layer, self.bank = layer, bank
        self.table = SlotTable(bank.slots, reader.num_experts)
        self.tokens = 0
        self.unsettled = False
        self._reader, self._policy, self._all_stats = reader, policy, stats
        # Batches on their way, the oldest first.
        self._fetches: deque[Fetch] = deque()
        # Blocks on their way that nobody has asked for yet, and residents that came so.
        self._ahead: list[tuple[Target, Fetch]] = []
        self._fresh: set[int] = set()
        self.proposal: frozenset[int] = frozenset()
        # Since whoever shares out slots was told last.
        self.missed: list[int] = []
        self.victims: list[int] = []
        self._readers_of_bank: list[Reading] = []
        self._device_table: mx.array | None = None

    @property
    def stats(self) -> LayerStats:
        """This layer's account."""
        return self._all_stats.layers[self.layer]

    def device_table(self) -> mx.array | None:
        """Expert -> slot, and an entry for padding that is none, ``[E + 1]`` uint32; None if expert
        e is in slot e. The layer is complete."""
        if self.table.in_order:
            return None
        if self._device_table is None:
            self._device_table = mx.array(
                np.append(self.table.slots_by_expert, ABSENT).astype(np.uint32)
            )
            mx.eval(self._device_table)
        return self._device_table

    def remember(self, output: mx.array) -> None:
        """`output`, perhaps not evaluated, reads the bank: no slot changes before it is."""
        # While reads are under way the bank cannot be left; the end of the call remembers again.
        if len(self._readers_of_bank) >= MAX_UNEVALUATED and not self._fetches:
            self.fence()
        self._readers_of_bank.append(Reading(threading.current_thread(), output))

    def fence(self) -> None:
        """See to it that nothing unevaluated reads the bank.

        What this thread cannot evaluate, or what another thread may be evaluating at this moment,
        keeps the arrays that it was given, and the layer goes on in a copy of them. Such a result
        stays right, whenever it is evaluated, and one whose thread has ended blocks nobody; until
        it is dropped it keeps one bank of this layer more in memory.
        """
        if not self._readers_of_bank:
            return
        assert not any(f.targets for f in self._fetches), "the bank changes while it is read into"
        assert not self._ahead, "the bank changes while it is read into"
        if not all(reading.ended() for reading in self._readers_of_bank):
            self.bank.resize(self.bank.slots)
        self._readers_of_bank.clear()

    def read_elsewhere(self) -> bool:
        """Results of another thread read the bank, for which this one cannot wait."""
        here = threading.current_thread()
        return any(r.maker not in (None, here) for r in self._readers_of_bank)

    def own_outputs(self) -> list[mx.array]:
        """What this thread built on the bank and may not have evaluated."""
        here = threading.current_thread()
        return [reading.output for reading in self._readers_of_bank if reading.maker is here]

    def hand_over(self) -> None:
        """The evaluation of :meth:`own_outputs` has begun: any thread may wait for it."""
        here = threading.current_thread()
        self._readers_of_bank = [
            reading._replace(maker=None) if reading.maker is here else reading
            for reading in self._readers_of_bank
        ]

    def look_up(
        self, needed: Collection[int], missing: Collection[int], events: EventHook | None
    ) -> None:
        """Count, and tell of, every needed expert, ascending."""
        stats = self.stats
        stats.lookups += len(needed)
        stats.misses += len(missing)
        stats.hits += len(needed) - len(missing)
        self.missed += missing
        used = self._fresh.intersection(needed) if self._fresh else frozenset()
        stats.prefetched_hits += len(used)
        self._fresh -= used
        if events is not None:
            tell_looked_up(events, LookedUp(self.layer, needed, missing, used))

    def make_room(
        self, count: int, protected: Container[int], events: EventHook | None
    ) -> list[int]:
        """Take `count` slots, evicting whom the policy chooses outside `protected`.

        The caller has seen to it that there are enough. No slot is written that was not taken
        here, so this is where the fence stands.
        """
        short = count - self.table.free
        if count:
            self.fence()
        self.unsettled = True
        if short > 0:
            victims = choose_victims(
                self._policy,
                self.layer,
                short,
                resident=self.table.slot_of.keys(),
                protected=protected,
            )
            for expert in victims:
                self.evict(expert, events)
        return [self.table.take() for _ in range(count)]

    def evict(self, expert: int, events: EventHook | None) -> None:
        """Let `expert` lose its slot."""
        self.unsettled, self._device_table = True, None
        slot = self.table.remove(expert)
        self._fresh.discard(expert)
        self.victims.append(expert)
        self._policy.evict(self.layer, expert)
        self.stats.evictions += 1
        if events is not None:
            events(Evict(self.layer, expert, slot))

    def start(
        self,
        threads: ReadThreads,
        experts: Sequence[int],
        slots: Sequence[int],
        events: EventHook | None,
    ) -> None:
        """Begin to read `experts` into `slots`, which were taken: a batch for :meth:`finish`."""
        targets = [self._target(*pair) for pair in zip(experts, slots, strict=True)]
        if events is not None:
            for target in targets:
                events(ReadStart(self.layer, target.expert, target.slot))
        # Known to the layer before the first read begins, so that settle() can find it.
        fetch = self._new_fetch(threads, targets)
        self._fetches.append(fetch)
        fetch.start(threads, urgent=True)

    def _target(self, expert: int, slot: int) -> Target:
        if self._uploads is not None:
            return Target(expert, slot, addresses=self.bank.slot_addresses(slot))
        return Target(expert, slot, self.bank.slot_views(slot))

    def _new_fetch(self, threads: ReadThreads, targets: Sequence[Target]) -> Fetch:
        return Fetch(
            self._reader,
            self.layer,
            targets,
            at_once=threads.count,
            uploads=self._uploads,
        )

    def fill(self, threads: ReadThreads, events: EventHook | None) -> None:
        """Read the experts of lowest ids into free slots."""
        self.land((), wait=True, events=events)
        absent = missing_of(self.table, range(self.table.num_experts))[: self.table.free]
        if not absent:
            return
        try:
            slots = self.make_room(len(absent), (), events)
            self.start(threads, absent, slots, events)
            self.finish(events)
            self.settled()
        finally:
            if self.unsettled:
                self.settle()

    def finish(self, events: EventHook | None) -> None:
        """Wait for the oldest batch that :meth:`start` began and enter what arrived.

        Raises:
            ExpertFileError: A read failed; the others are entered all the same.
        """
        if not self._fetches:
            return
        start, fetch = perf_counter(), self._fetches[0]
        error = fetch.wait()
        self.stats.stall_seconds += perf_counter() - start
        for arrival in fetch.arrivals():
            self._enter(arrival)
            if events is not None:
                events(ReadEnd(self.layer, *arrival))
        if error is not None:
            raise error
        self._fetches.popleft()

    def slots_soon(self) -> np.ndarray:
        """Expert -> slot, ``[E]``, as it is once the reads that :meth:`start` began are entered."""
        known = self.table.slots_by_expert
        known = known.copy() if self._fetches else known
        for target in (target for fetch in self._fetches for target in fetch.targets):
            known[target.expert] = target.slot
        return known

    def _enter(self, arrival: Arrival) -> None:
        self.table.put(arrival.expert, arrival.slot)
        self._policy.admit(self.layer, arrival.expert)
        self.stats.reads += 1
        self.stats.bytes_read += arrival.nbytes
        self.stats.read_seconds += arrival.seconds

    def read_ahead(
        self,
        threads: ReadThreads,
        experts: Sequence[int],
        protected: Container[int],
        events: EventHook | None,
    ) -> None:
        """Begin to read `experts`, which are absent and which nobody has asked for yet."""
        slots = self.make_room(len(experts), protected, events)
        for expert, slot in zip(experts, slots, strict=True):
            target = self._target(expert, slot)
            if events is not None:
                events(PrefetchStart(self.layer, expert, slot))
            fetch = self._new_fetch(threads, [target])
            self._ahead.append((target, fetch))
            fetch.start(threads)
        self.unsettled = False

    def land(self, needed: Container[int], *, wait: bool, events: EventHook | None) -> float:
        """Enter the blocks that were read ahead; the seconds that this had to wait.

        wait: Wait for all of them; otherwise those that are not `needed` and not begun are given
        up, and their slots are free again. A read that failed is given up too.
        """
        if not self._ahead:
            return 0.0
        self.unsettled = True
        start = perf_counter()
        unwanted = [] if wait else [f for target, f in self._ahead if target.expert not in needed]
        for fetch in unwanted:
            fetch.abandon()
        for _, fetch in self._ahead:
            if fetch in unwanted:
                fetch.drain()
                continue
            error = fetch.wait()
            if error is not None and not isinstance(error, ExpertFileError):
                raise error
        waited = perf_counter() - start
        self.stats.stall_seconds += waited
        for target, fetch in self._ahead:
            arrivals = fetch.arrivals()
            for arrival in arrivals:
                self._enter(arrival)
                self._fresh.add(arrival.expert)
                self.stats.prefetches += 1
                if events is not None:
                    events(PrefetchEnd(self.layer, *arrival))
            if not arrivals:
                self.table.give_back(target.slot)
                if events is not None:
                    events(PrefetchDrop(self.layer, target.expert, target.slot))
        self._ahead.clear()
        self.unsettled = False
        return waited

    def take_news(self) -> tuple[list[int], list[int]]:
        """Experts that were missed and that lost their slots since the last time."""
        news = self.missed, self.victims
        self.missed, self.victims = [], []
        return news

    @property
    def reading(self) -> bool:
        """Blocks are on their way that a call waits for."""
        return bool(self._fetches)

    @property
    def reading_ahead(self) -> bool:
        """Blocks are on their way that nobody has asked for yet."""
        return bool(self._ahead)

    def settled(self) -> None:
        """Everything that was begun is finished."""
        self.unsettled = False

    def settle(self) -> None:
        """After an error or interruption: wait for reads, make the table right again.

        Blocks that :meth:`finish` has not entered are forgotten; the next call reads them again.
        """
        for fetch in (*reversed(self._fetches), *(fetch for _, fetch in self._ahead)):
            fetch.drain()
        self._fetches.clear()
        self._ahead.clear()
        self._fresh.clear()
        self._device_table = None
        self.table.rebuild()
        self.unsettled = False

    def resize(self, slots: int, events: EventHook | None) -> None:
        """Change the number of slots; the policy chooses who leaves when there are too many."""
        self.land((), wait=True, events=events)
        excess = len(self.table) - slots
        if excess > 0:
            resident = self.table.slot_of.keys()
            for expert in choose_victims(
                self._policy, self.layer, excess, resident=resident, protected=()
            ):
                self.evict(expert, events)
        self.unsettled, self._device_table = True, None
        try:
            self.bank.resize(slots, self.table.resize(slots))
        except BaseException:
            # Bank and table may disagree: who was where is not known any more.
            self.table = SlotTable(self.bank.slots, self.table.num_experts)
            raise
        # What reads the old arrays keeps them; nobody writes to them any more.
        self._readers_of_bank.clear()
        self.unsettled = False

    def close(self) -> None:
        """Wait for reads and let go of the bank."""
        self.settle()
        self._readers_of_bank.clear()
        self.bank.close()


@dataclass
class Call:
    """A call of a layer: ids and look-ahead on the device; asked: None if nobody looked; missing:
    Experts that are being read for it."""

    state: StreamedLayer
    ids: mx.array
    ahead: mx.array | None
    asked: Asked | None = None
    missing: Sequence[int] = ()


def missing_of(table: SlotTable, experts: Iterable[int]) -> list[int]:
    """Those of `experts` that are in no slot, in their order."""
    return [expert for expert in experts if expert not in table]
