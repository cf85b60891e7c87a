"""One layer of a streamed store: its bank, its table of slots, and its reads.

The order of every change makes an interrupt harmless at any moment. An expert leaves the table
before its slot is written and enters it after its block has arrived. Meanwhile its
:class:`Change` is open; a caller that finds it open recovers the layer first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from itertools import chain, filterfalse
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io.read_pool import Arrival, BlockFetch, BlockPool
from mlx_moeflux.experts.policies.eviction import Eviction, choose_victims
from mlx_moeflux.experts.policies.wave_schedule import Wave, WaveSchedule, begin_early
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
    Resize,
)
from mlx_moeflux.experts.telemetry.stats import LayerStats
from mlx_moeflux.kernels.moe.expert_mix import ABSENT

# Beyond so many pending outputs the layer evaluates them; most have ended long before.
MAX_UNEVALUATED = 8


class PendingOutput(NamedTuple):
    """A lazy output that references a bank. maker: The thread whose streams it is on; None if every
    thread may wait for it."""

    maker: threading.Thread | None
    output: mx.array

    def ended(self) -> bool:
        """Wait until `output` is evaluated; return False if this thread must not wait for it.

        MLX waits for work that ``async_eval`` began in any thread, but does not notice that another
        thread is inside ``eval``.
        """
        maker = self.maker
        if maker not in (None, threading.current_thread()) and maker.is_alive():
            return False
        try:
            mx.eval(self.output)
        except RuntimeError as error:
            # Streams belong to their thread and end with it.
            if "in current thread" not in str(error):
                raise
            return False
        return True


class Change:
    """Whether slots of a layer are being changed: while `open` is set, or inside a ``with`` block.
    An error or interrupt leaves it open, and its layer has to be recovered."""

    __slots__ = ("open",)

    def __init__(self):
        self.open = False

    def __enter__(self) -> None:
        self.open = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.open = False


class StreamedLayer:
    """The slots of one layer. Methods run in the caller's thread, reads in threads of the pool.
    events: The store's listener, or None."""

    def __init__(
        self,
        layer: int,
        bank: LayerBank,
        *,
        num_experts: int,
        pool: BlockPool,
        policy: Eviction,
        stats: LayerStats,
        events: EventHook | None,
    ):
        self.layer, self.bank, self.events = layer, bank, events
        self.table = SlotTable(bank.slots, num_experts)
        self.tokens = 0
        self.change = Change()
        self._pool, self._policy, self.stats = pool, policy, stats
        # Batches on their way, the oldest first.
        self._fetches: deque[BlockFetch] = deque()
        # Prefetches that are under way, each of one block, and residents that were prefetched and
        # not yet used.
        self._ahead: list[BlockFetch] = []
        self._fresh: set[int] = set()
        # Waves of the next call that began before it, the oldest first. Until they and the reads
        # behind them have ended, no read of this layer is urgent, so that they stay in order.
        self._early: deque[tuple[Wave, BlockFetch]] = deque()
        self._in_order = False
        self.proposal: frozenset[int] = frozenset()
        self._readers_of_bank: list[PendingOutput] = []
        self._device_table: mx.array | None = None

    def device_table(self) -> mx.array | None:
        """Return expert -> slot as ``[E + 1]`` uint32, with ABSENT for padding at the end; None if
        expert e is in slot e. The layer is complete."""
        if self.table.in_order:
            return None
        if self._device_table is None:
            self._device_table = mx.array(
                np.append(self.table.slots_by_expert, ABSENT).astype(np.uint32)
            )
            mx.eval(self._device_table)
        return self._device_table

    def remember(self, output: mx.array) -> None:
        """Keep every slot as it is until `output`, which may be lazy, is evaluated."""
        # The fence cannot run while reads are under way; the end of the call comes back here.
        if len(self._readers_of_bank) >= MAX_UNEVALUATED and not self._fetches:
            self.fence()
        self._readers_of_bank.append(PendingOutput(threading.current_thread(), output))

    def fence(self) -> None:
        """Evaluate the lazy outputs that still reference the bank.

        This thread cannot evaluate the outputs of some others, and must not while they may be
        inside ``eval``. Such an output keeps the arrays that it references, and the layer continues
        in a copy of them. The output stays right; until it is dropped, this layer has one more bank
        in memory.
        """
        if not self._readers_of_bank:
            return
        assert not any(f.blocks for f in self._fetches), "the bank changes while it is read into"
        assert not self._ahead, "the bank changes while it is read into"
        if not all(reading.ended() for reading in self._readers_of_bank):
            self.bank.resize(self.bank.slots)
        self._readers_of_bank.clear()

    def read_elsewhere(self) -> bool:
        """Return True if the bank has pending outputs that this thread cannot wait for."""
        here = threading.current_thread()
        return any(r.maker not in (None, here) for r in self._readers_of_bank)

    def own_outputs(self) -> list[mx.array]:
        """Return the pending outputs of this thread."""
        here = threading.current_thread()
        return [reading.output for reading in self._readers_of_bank if reading.maker is here]

    def start_eval(self) -> None:
        """Note that :meth:`own_outputs` are being evaluated: any thread may wait for them."""
        here = threading.current_thread()
        self._readers_of_bank = [
            reading._replace(maker=None) if reading.maker is here else reading
            for reading in self._readers_of_bank
        ]

    def look_up(self, needed: Collection[int], missing: Collection[int]) -> None:
        """Count every needed expert, ascending, and report it as hit or miss."""
        used = self._fresh.intersection(needed) if self._fresh else frozenset()
        self.count(
            lookups=len(needed),
            misses=len(missing),
            hits=len(needed) - len(missing),
            prefetched_hits=len(used),
        )
        self._fresh -= used
        if (events := self.events) is not None:
            absent = frozenset(missing)
            for expert in needed:
                if expert in absent:
                    events(Miss(self.layer, expert))
                else:
                    events(Hit(self.layer, expert, expert in used))

    def make_room(self, count: int, protected: Container[int]) -> list[int]:
        """Take `count` slots; the policy chooses victims outside `protected`.

        The caller makes sure that there are enough. Every slot that is written is taken here, so
        the fence is here.
        """
        short = count - self.table.free
        if count:
            self.fence()
        self.change.open = True
        if short > 0:
            victims = choose_victims(
                self._policy,
                self.layer,
                short,
                resident=self.table.slot_of.keys(),
                protected=protected,
            )
            for expert in victims:
                self.evict(expert)
        return [self.table.take() for _ in range(count)]

    def evict(self, expert: int) -> None:
        """Evict `expert` from its slot, in a change."""
        self._device_table = None
        slot = self.table.remove(expert)
        self._fresh.discard(expert)
        self._policy.evict(self.layer, expert)
        self.stats.evictions += 1
        if self.events is not None:
            self.events(Evict(self.layer, expert, slot))

    def begin_reads(self, experts: Sequence[int], protected: Container[int]) -> None:
        """Begin to read `experts`, which are absent, in place of others than `protected`;
        :meth:`finish` waits for them."""
        blocks = list(zip(experts, self.make_room(len(experts), protected), strict=True))
        if (events := self.events) is not None:
            for block in blocks:
                events(ReadStart(self.layer, *block))
        # Entered before the first read begins, so that recover() finds it.
        fetch = self._pool.fetch(self.layer, self.bank.current, blocks)
        self._fetches.append(fetch)
        start = perf_counter()
        self._in_order = self._in_order and (bool(self._early) or len(self._fetches) > 1)
        fetch.start(urgent=not self._in_order)
        if fetch.in_caller:
            self.stats.stall_seconds += perf_counter() - start

    def read_now(self, experts: Sequence[int], protected: Container[int]) -> None:
        """Read `experts`, which are absent, in place of others than `protected`."""
        if not experts:
            return
        try:
            with self.change:
                self.begin_reads(experts, protected)
                self.finish()
        except BaseException:
            self.recover()
            raise

    def finish(self) -> None:
        """Wait for the oldest batch of :meth:`begin_reads` and enter the blocks that arrived.

        Raises:
            ExpertFileError: A read failed; the other blocks are entered nevertheless.
        """
        if not self._fetches:
            return
        start, fetch = perf_counter(), self._fetches[0]
        error = fetch.wait()
        self.stats.stall_seconds += perf_counter() - start
        arrivals = fetch.arrivals()
        self._enter(arrivals)
        if (events := self.events) is not None:
            for arrival in arrivals:
                events(ReadEnd(self.layer, *arrival))
        if error is not None:
            raise error
        self._fetches.popleft()

    @property
    def early(self) -> list[Wave]:
        """The waves of the next call that have begun, the oldest first."""
        return [wave for wave, _ in self._early]

    def begin_early(self, wave_reads: int) -> None:
        """Begin the first waves of the next call, as if it needed every expert.

        wave_reads: Blocks that a wave reads at most.
        """
        waves = WaveSchedule(self.table, range(self.table.num_experts), wave_reads)

        def begin(wave: Wave) -> None:
            slots = self.make_room(len(wave.missing), waves.protected)
            blocks = list(zip(wave.missing, slots, strict=True))
            if (events := self.events) is not None:
                for block in blocks:
                    events(PrefetchStart(self.layer, *block))
            fetch = self._pool.fetch(self.layer, self.bank.current, blocks)
            self._early.append((wave, fetch))
            self._in_order = True
            self._fresh.update(wave.missing)
            fetch.start()

        with self.change:
            begin_early(waves, begin)

    def finish_early(self, needed: Container[int]) -> None:
        """Wait for the oldest wave of :meth:`begin_early` and enter its blocks, in a change.

        Raises:
            ExpertFileError: A read of an expert that is `needed` failed; others are dropped.
        """
        start, (_, fetch), events = perf_counter(), self._early[0], self.events
        error = fetch.wait()
        self.stats.stall_seconds += perf_counter() - start
        arrivals = fetch.arrivals()
        self._enter(arrivals)
        self.stats.prefetches += len(arrivals)
        if events is not None:
            for arrival in arrivals:
                events(PrefetchEnd(self.layer, *arrival))
        if error is not None:
            failed = [block for block in fetch.blocks if block[0] not in self.table]
            if not isinstance(error, ExpertFileError) or any(e in needed for e, _ in failed):
                raise error
            for expert, slot in failed:
                self._fresh.discard(expert)
                self.table.give_back(slot)
                if events is not None:
                    events(PrefetchDrop(self.layer, expert, slot))
        self._early.popleft()

    def settle(self) -> None:
        """Wait for everything that is read before its call, and enter it."""
        if self._early:
            with self.change:
                while self._early:
                    self.finish_early(())
        if self._ahead:
            self.commit_prefetch((), wait=True)

    def take_table(self, expert_of: list[int]) -> None:
        """Take the experts of all slots, ``EMPTY`` for none, from who changed them."""
        with self.change:
            self._device_table = None
            self.table.expert_of = expert_of
            self.table.rebuild()
            self._fresh.intersection_update(self.table.slot_of)

    def slots_soon(self) -> dict[int, int]:
        """Return expert -> slot, as after the reads that are under way."""
        if not self._fetches:
            return self.table.slot_of
        return self.table.slot_of | dict(chain.from_iterable(f.blocks for f in self._fetches))

    def _enter(self, arrivals: Sequence[Arrival]) -> None:
        put, admit = self.table.put, self._policy.admit
        for expert, slot, _, _ in arrivals:
            put(expert, slot)
            admit(self.layer, expert)
        self._count(arrivals)

    def count(self, **counts: int | float) -> None:
        """Add to statistics that belong together: another thread copies all sums or none."""
        values = vars(self.stats)
        for name in counts:
            counts[name] += values[name]
        # One call of C: it holds the interpreter, and no interrupt divides it.
        values.update(counts)

    def _count(self, arrivals: Sequence[Arrival]) -> None:
        self.count(
            reads=len(arrivals),
            bytes_read=sum(arrival.nbytes for arrival in arrivals),
            read_seconds=sum(arrival.seconds for arrival in arrivals),
        )

    def read_ahead(self, experts: Sequence[int], protected: Container[int]) -> None:
        """Begin to prefetch `experts`, which are absent."""
        with self.change:
            slots = self.make_room(len(experts), protected)
            for expert, slot in zip(experts, slots, strict=True):
                if self.events is not None:
                    self.events(PrefetchStart(self.layer, expert, slot))
                fetch = self._pool.fetch(self.layer, self.bank.current, [(expert, slot)])
                self._ahead.append(fetch)
                fetch.start()

    def commit_prefetch(self, needed: Container[int], *, wait: bool) -> None:
        """Enter the prefetched blocks.

        wait: Wait for all of them. Otherwise reads that are not `needed` and have not begun are
        dropped, and their slots are free again. A read that failed is dropped too.
        """
        if not self._ahead:
            return
        events = self.events
        with self.change:
            start = perf_counter()
            unwanted = [] if wait else [f for f in self._ahead if f.blocks[0][0] not in needed]
            for fetch in unwanted:
                fetch.abandon()
            for fetch in self._ahead:
                if fetch in unwanted:
                    fetch.drain()
                    continue
                error = fetch.wait()
                if error is not None and not isinstance(error, ExpertFileError):
                    raise error
            self.stats.stall_seconds += perf_counter() - start
            for fetch in self._ahead:
                (expert, slot), arrivals = fetch.blocks[0], fetch.arrivals()
                self._enter(arrivals)
                if arrivals:
                    self._fresh.add(expert)
                    self.stats.prefetches += 1
                    if events is not None:
                        events(PrefetchEnd(self.layer, *arrivals[0]))
                else:
                    self.table.give_back(slot)
                    if events is not None:
                        events(PrefetchDrop(self.layer, expert, slot))
            self._ahead.clear()

    @property
    def reading(self) -> bool:
        """True while reads are under way that a call waits for."""
        return bool(self._fetches)

    @property
    def reading_ahead(self) -> bool:
        """True while blocks are read before their call."""
        return bool(self._ahead or self._early)

    def recover(self) -> None:
        """Recover from an error or interrupt: wait for reads and rebuild the table.

        Blocks that :meth:`finish` has not entered are dropped; the next call reads them again.
        """
        early = [fetch for _, fetch in self._early]
        for fetch in (*reversed(self._fetches), *self._ahead, *reversed(early)):
            fetch.drain()
        self._fetches.clear()
        self._ahead.clear()
        self._early.clear()
        self._fresh.clear()
        self._device_table = None
        self.table.rebuild()
        self.change.open = False

    def resize(self, slots: int) -> None:
        """Change the number of slots; the policy chooses the victims of a smaller bank. After
        :meth:`release` there is no bank until :meth:`restore`."""
        self.settle()
        excess = len(self.table) - slots
        with self.change:
            if excess > 0:
                resident = self.table.slot_of.keys()
                for expert in choose_victims(
                    self._policy, self.layer, excess, resident=resident, protected=()
                ):
                    self.evict(expert)
            self._device_table = None
            try:
                moves = self.table.resize(slots)
                if self.bank.slots:
                    self.bank.resize(slots, moves)
            except BaseException:
                # Bank and table may disagree: start with an empty table.
                self.table = SlotTable(self.bank.slots or slots, self.table.num_experts)
                raise
            # Pending outputs keep the old arrays, which no one writes again.
            self._readers_of_bank.clear()
        if self.events is not None:
            self.events(Resize(self.layer, slots))

    def release(self) -> None:
        """Free the bank; the table keeps what :meth:`restore` reads again."""
        self.settle()
        # Pending outputs keep the arrays, which no one writes again.
        self._readers_of_bank.clear()
        self.bank.close()

    def restore(self) -> None:
        """Read into a new bank what the slots held at :meth:`release`. Listeners and the policy are
        not called, unless an expert is lost.

        Raises:
            ExpertFileError: A read failed; the other experts are entered nevertheless.
        """
        if self.bank.slots == self.table.slots:
            return
        held = dict(self.table.slot_of)
        self.change.open = True
        # Empty before there are slots again: an interrupt must not leave experts in blank slots.
        self.table = table = SlotTable(self.table.slots, self.table.num_experts)
        self._device_table = None
        self.bank.open(table.slots)
        try:
            fetch = self._pool.fetch(self.layer, self.bank.current, list(held.items()))
            self._fetches.append(fetch)
            fetch.start(urgent=True)
            error, arrivals = fetch.wait(), fetch.arrivals()
            for expert, slot, _, _ in arrivals:
                table.put(expert, slot)
            self._count(arrivals)
        finally:
            self.recover()
            for expert in held.keys() - table.slot_of.keys():
                self._policy.evict(self.layer, expert)
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for reads and release the bank."""
        self.recover()
        self._readers_of_bank.clear()
        self.bank.close()


def missing_of(table: SlotTable, experts: Iterable[int]) -> list[int]:
    """Return those of `experts` that are in no slot, in their order."""
    return list(filterfalse(table.slot_of.__contains__, experts))
