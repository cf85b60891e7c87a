"""One layer of a streamed store: its bank, who is in it, and how experts get there.

The order of every change makes an interruption at any moment harmless: an expert leaves the
table before its slot is written, enters it after its block has arrived, and until then
`unsettled` is set, which makes the next user put things right first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from itertools import filterfalse
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io.cuda_upload import Uploads
from mlx_moeflux.experts.io.read_pool import Arrival, Fetch, ReadPool, Target
from mlx_moeflux.experts.io.readers import Reader
from mlx_moeflux.experts.policies.eviction import Eviction, choose_victims
from mlx_moeflux.experts.streaming.bank import LayerBank
from mlx_moeflux.experts.streaming.slots import SlotTable
from mlx_moeflux.experts.telemetry.events import (
    EventHook,
    Evict,
    Hit,
    Miss,
    PrefetchDrop,
    PrefetchEnd,
    PrefetchStart,
    ReadEnd,
    ReadStart,
)
from mlx_moeflux.experts.telemetry.stats import LayerStats
from mlx_moeflux.kernels.moe.expert_mix import ABSENT

# More outputs than this are not remembered, but evaluated: by then they long have been.
MAX_UNEVALUATED = 8


class PendingOutput(NamedTuple):
    """A result that reads a bank; maker: whose streams it is on, None for anyone's to wait for."""

    maker: threading.Thread | None
    output: mx.array

    def ended(self) -> bool:
        """Wait until `output` is evaluated; False if this thread cannot do that, or must not.

        MLX waits for work that ``async_eval`` began, wherever that was, but does not see that
        another thread is inside ``eval``.
        """
        here = self.maker is None or self.maker is threading.current_thread()
        if not here and self.maker.is_alive():
            return False
        try:
            mx.eval(self.output)
        except RuntimeError as error:
            # The streams of a thread are its own, and end with it.
            if "in current thread" not in str(error):
                raise
            return False
        return True


class StreamedLayer:
    """The slots of one layer. All methods but none of the reads run in the caller's thread."""

    def __init__(
        self,
        layer: int,
        bank: LayerBank,
        *,
        reader: Reader,
        policy: Eviction,
        stats: LayerStats,
        uploads: Uploads | None = None,
    ):
        self._uploads = uploads
        self.layer, self.bank = layer, bank
        self.table = SlotTable(bank.slots, reader.num_experts)
        self.tokens = 0
        self.unsettled = False
        self._reader, self._policy, self.stats = reader, policy, stats
        # Batches on their way, the oldest first.
        self._fetches: deque[Fetch] = deque()
        # Blocks on their way that nobody has asked for yet, and residents that came so.
        self._ahead: list[tuple[Target, Fetch]] = []
        self._fresh: set[int] = set()
        self.proposal: frozenset[int] = frozenset()
        # Experts that were missed, and that lost their slots, since the end of the last call.
        self.missed: list[int] = []
        self.victims: list[int] = []
        self._readers_of_bank: list[PendingOutput] = []
        self._device_table: mx.array | None = None

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
        self._readers_of_bank.append(PendingOutput(threading.current_thread(), output))

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

    def start_eval(self) -> None:
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
            absent = frozenset(missing)
            for expert in needed:
                if expert in absent:
                    events(Miss(self.layer, expert))
                else:
                    events(Hit(self.layer, expert, expert in used))

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

    def begin_reads(
        self,
        threads: ReadPool,
        experts: Sequence[int],
        protected: Container[int],
        events: EventHook | None,
    ) -> None:
        """Begin to read `experts`, which are absent, in the place of others than `protected`."""
        slots = self.make_room(len(experts), protected, events)
        self.start(threads, experts, slots, events)

    def start(
        self,
        threads: ReadPool,
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

    def _new_fetch(self, threads: ReadPool, targets: Sequence[Target]) -> Fetch:
        return Fetch(
            self._reader,
            self.layer,
            targets,
            at_once=threads.count,
            uploads=self._uploads,
        )

    def fill(self, threads: ReadPool, events: EventHook | None) -> None:
        """Read the experts of lowest ids into free slots."""
        self.commit_prefetch((), wait=True, events=events)
        absent = missing_of(self.table, range(self.table.num_experts))[: self.table.free]
        self.read_now(threads, absent, (), events)

    def read_now(
        self,
        threads: ReadPool,
        experts: Sequence[int],
        protected: Container[int],
        events: EventHook | None,
    ) -> None:
        """Read `experts`, which are absent, in the place of others than `protected`."""
        if not experts:
            return
        try:
            self.begin_reads(threads, experts, protected, events)
            self.finish(events)
            self.unsettled = False
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
        threads: ReadPool,
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

    def commit_prefetch(
        self, needed: Container[int], *, wait: bool, events: EventHook | None
    ) -> None:
        """Enter the blocks that were read ahead.

        wait: Wait for all of them; otherwise those that are not `needed` and not begun are given
        up, and their slots are free again. A read that failed is given up too.
        """
        if not self._ahead:
            return
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
        self.stats.stall_seconds += perf_counter() - start
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

    @property
    def reading(self) -> bool:
        """Blocks are on their way that a call waits for."""
        return bool(self._fetches)

    @property
    def reading_ahead(self) -> bool:
        """Blocks are on their way that nobody has asked for yet."""
        return bool(self._ahead)

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
        self.commit_prefetch((), wait=True, events=events)
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


def missing_of(table: SlotTable, experts: Iterable[int]) -> list[int]:
    """Those of `experts` that are in no slot, in their order."""
    return list(filterfalse(table.slot_of.__contains__, experts))
