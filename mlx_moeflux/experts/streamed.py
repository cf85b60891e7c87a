"""Experts that live on disk and visit memory: the store of a model that does not fit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from time import perf_counter

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import InputError, MemoryBudgetError, ShapeError
from mlx_moeflux.experts.asked import Asked
from mlx_moeflux.experts.balance import Balance, changes_in_order, make_balance
from mlx_moeflux.experts.bank import Bank
from mlx_moeflux.experts.compute import (
    FEW_PAIRS,
    Early,
    ExpertFFN,
    ExpertMix,
    ExpertSum,
    Form,
    Pairs,
    begin_few,
    few_pairs,
    from_whole_bank,
)
from mlx_moeflux.experts.events import Chosen, EventHook, Guess, Resize
from mlx_moeflux.experts.evictions import DEFAULT_EVICTION
from mlx_moeflux.experts.fetch import ReadThreads
from mlx_moeflux.experts.layer import StreamedLayer, missing_of
from mlx_moeflux.experts.policy import Eviction, make_eviction
from mlx_moeflux.experts.prefetch import (
    MOST_PAIRS,
    Prefetch,
    blocks_ahead,
    make_prefetch,
    merged,
    next_layer,
    proposed,
)
from mlx_moeflux.experts.readers import Reader
from mlx_moeflux.experts.stats import ExpertStats
from mlx_moeflux.experts.store import check_call, check_ids
from mlx_moeflux.experts.sweep import sweep
from mlx_moeflux.kernels import metal
from mlx_moeflux.kernels.expert_ffn import ExpertBank, expert_ffn
from mlx_moeflux.kernels.expert_mix import expert_mix

DEFAULT_THREADS = 8


class StreamedStore:
    """Resident slots, a reader for what is missing, a policy for who must go.
    See :class:`~mlx_moeflux.experts.store.ExpertStore`.

    reader: Closed with the store. slots: For each MoE layer, or one number for all.
    eviction: A name or an :class:`~mlx_moeflux.experts.policy.Eviction`. prefetch: A name or a
    :class:`~mlx_moeflux.experts.prefetch.Prefetch`. keep_all_ahead: Every block that was read ahead
    is waited for when its layer is called, so that hits do not depend on time; otherwise those
    that are not needed and not begun are given up. balance: A name or a
    :class:`~mlx_moeflux.experts.balance.Balance`, who moves slots between layers. threads: Reads
    under way at once. events: Listener, see :mod:`mlx_moeflux.experts.events`. overlap: Compute a
    decode step's hits while its misses are read. ffn, mix: The operations that compute experts.
    scratch_bytes: What one step of a long call may allocate besides its result, None for what
    suits the device.

    One lock: a second concurrent call waits for the first. An error or interrupt leaves the
    store usable.

    Evaluates: the ids of a call, unless the layer holds every expert and there is no listener;
    long calls altogether.

    Raises:
        InputError: The policy or the number of threads or slots cannot be used.
    """

    def __init__(
        self,
        reader: Reader,
        slots: int | Mapping[int, int],
        *,
        eviction: str | Eviction = DEFAULT_EVICTION,
        prefetch: str | Prefetch | None = None,
        keep_all_ahead: bool = False,
        balance: str | Balance | None = None,
        threads: int = DEFAULT_THREADS,
        events: EventHook | None = None,
        overlap: bool = False,
        ffn: ExpertFFN = expert_ffn,
        mix: ExpertMix = expert_mix,
        scratch_bytes: int | None = None,
    ):
        if threads < 1:
            raise InputError(f"{threads} threads cannot read experts; give at least 1.")
        self.reader, self.threads, self.events, self.overlap = reader, threads, events, overlap
        self.layers, self.num_experts = tuple(reader.layers), reader.num_experts
        self.eviction, self.prefetch = make_eviction(eviction), make_prefetch(prefetch)
        self.keep_all_ahead, self.balance = keep_all_ahead, make_balance(balance)
        self._form = Form(ffn=ffn, mix=mix, scratch_bytes=scratch_bytes)
        self._stats = ExpertStats(self.layers)
        self._lock = threading.RLock()
        self.generation = 0
        """Grows when banks are replaced: traces that read them are then of the past."""
        self._closed = False
        counts = {layer: self._checked(layer, slots) for layer in self.layers}
        layouts = {layer: reader.layout(layer) for layer in self.layers}
        self._bank = Bank(layouts, counts)
        self._layers = {
            layer: StreamedLayer(
                layer, self._bank[layer], reader=reader, policy=self.eviction, stats=self._stats
            )
            for layer in self.layers
        }
        self._threads = ReadThreads(threads)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and of the reader's private buffers."""
        return self._bank.nbytes + self.threads * getattr(self.reader, "staging_bytes", 0)

    @property
    def bank_bytes(self) -> int:
        """Bytes of all slots."""
        return self._bank.nbytes

    @property
    def slots(self) -> dict[int, int]:
        """MoE layer id -> number of slots."""
        return {layer: state.table.slots for layer, state in self._layers.items()}

    @property
    def block_bytes(self) -> dict[int, int]:
        """MoE layer id -> bytes of one expert."""
        return {layer: state.bank.layout.nbytes for layer, state in self._layers.items()}

    @property
    def cold(self) -> bool:
        """No expert is resident and none was asked for."""
        states = self._layers.values()
        return not any(state.tokens or state.table.slot_of for state in states)

    @property
    def looks_ahead(self) -> bool:
        """Whether :meth:`experts` wants to be told what the next layer's router would choose."""
        return self.prefetch is not None and self.prefetch.looks_ahead

    def residents(self, layer: int) -> dict[int, int]:
        """Expert -> slot of a layer, as it is now."""
        with self._lock:
            return dict(self._state(layer).table.slot_of)

    def experts(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        *,
        ahead: mx.array | None = None,
    ) -> mx.array:
        """See :meth:`ExpertStore.experts`.

        Raises:
            ShapeError: Shapes or dtypes are wrong, or ids are not ascending or out of range.
            MemoryBudgetError: A token needs more experts than the layer has slots.
            ExpertFileError: A block could not be read; the next call may try again.
        """
        check_call(layer, x, ids, weights)
        with self._lock:
            state = self._state(layer)
            start, stalled = perf_counter(), state.stats.stall_seconds
            try:
                y, asked, guess = self._experts(state, x, ids, weights, ahead)
                state.settled()
            finally:
                if state.unsettled:
                    state.settle()
                spent = perf_counter() - start - (state.stats.stall_seconds - stalled)
                state.stats.compute_seconds += spent
            state.stats.tokens += x.shape[0]
            state.tokens += x.shape[0]
            short, news = ids.size <= MOST_PAIRS, state.take_news()
            if self.balance is not None:
                self.balance.called(layer, *news)
                if short and layer == self.layers[-1]:
                    self._move_slots(state.tokens, ids.shape[1])
            if short and asked is not None:
                self._read_ahead(layer, guess)
            return y

    @property
    def stays_on_device(self) -> bool:
        """Whether calls are lazy and nobody is told of them: every layer holds every expert."""
        states = self._layers.values()
        return self.events is None and all(state.table.complete for state in states)

    def whole(self, layer: int) -> tuple[ExpertBank, mx.array] | None:
        """A layer's bank and its table, expert -> slot, ``[E + 1]`` uint32, if every expert is in
        it and nobody wants to be told of calls: who computes with them says so to :meth:`count`."""
        with self._lock:
            state = self._state(layer)
            if not (state.table.complete and self.events is None and self.prefetch is None):
                return None
            return state.bank.experts, state.device_table()

    def count(self, tokens: int, layer: int | None = None) -> None:
        """Account for a call of a layer, or of all, that did not come through :meth:`experts`."""
        for state in self._layers.values() if layer is None else (self._layers[layer],):
            state.stats.tokens += tokens
            state.tokens += tokens

    def stats(self) -> ExpertStats:
        """See :meth:`ExpertStore.stats`."""
        return self._stats

    def preload(self, layers: Iterable[int] | None = None) -> None:
        """Fill free slots with the experts of lowest ids, so that complete layers need no look.

        Counted as reads, not as misses.
        """
        with self._lock:
            for layer in self.layers if layers is None else layers:
                state = self._state(layer)
                state.land((), wait=True, events=self.events)
                absent = missing_of(state.table, range(self.num_experts))[: state.table.free]
                if not absent:
                    continue
                try:
                    slots = state.make_room(len(absent), (), self.events)
                    state.start(self._threads, absent, slots, self.events)
                    state.finish(self.events)
                    state.settled()
                finally:
                    if state.unsettled:
                        state.settle()

    def hand_over(self) -> None:
        """Begin to evaluate what this thread built, so that the others need not keep away from it.

        Without it another thread's next call leaves the banks that this one's results read, and
        goes on in copies of them. Generation does it after each step.
        """
        with self._lock:
            states = self._layers.values()
            mx.async_eval([output for state in states for output in state.own_outputs()])
            for state in states:
                state.hand_over()

    def resize(self, layer: int, slots: int) -> None:
        """Change a layer's number of slots; the policy chooses who leaves a smaller bank."""
        with self._lock:
            self.generation += 1
            self._state(layer).resize(self._checked(layer, slots), self.events)
            if self.events is not None:
                self.events(Resize(layer, self.slots[layer]))

    def resize_all(self, slots: Mapping[int, int]) -> None:
        """Give every layer its number of slots: those that shrink first, so that no more memory is
        held than before or after, but for one layer's bank."""
        with self._lock:
            changes = {layer: self._checked(layer, slots) - n for layer, n in self.slots.items()}
            for layer in sorted(changes, key=changes.get):
                if changes[layer]:
                    self.resize(layer, slots[layer])
                    # What MLX keeps of the old bank would count twice.
                    mx.clear_cache()

    def close(self) -> None:
        """Wait for reads; free bank, files and threads. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for state in self._layers.values():
                state.close()
            self._threads.close()
            self.reader.close()
            self._layers.clear()
            self._bank.close()

    def __enter__(self) -> StreamedStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _checked(self, layer: int, slots: int | Mapping[int, int]) -> int:
        count = slots if isinstance(slots, int) else slots.get(layer, 0)
        if not 1 <= count <= self.num_experts:
            raise InputError(
                f"layer {layer} cannot have {count} slots; give 1 to {self.num_experts}."
            )
        return count

    def _state(self, layer: int) -> StreamedLayer:
        if self._closed:
            raise InputError("this expert store is closed; load the model again.")
        if layer not in self._layers:
            raise ShapeError(f"layer {layer} has no routed experts; layers {self.layers} do.")
        state = self._layers[layer]
        if state.unsettled:
            state.settle()
        return state

    def _experts(
        self,
        state: StreamedLayer,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        ahead: mx.array | None,
    ) -> tuple[mx.array, Asked | None, tuple[int, ...]]:
        """The result, what was asked for (None if nobody looked), and the guess."""
        if ids.shape[1] > state.table.slots:
            raise MemoryBudgetError(
                f"a token needs {ids.shape[1]} experts but layer {state.layer} has "
                f"{state.table.slots} slots; give the experts more memory or use fewer a token."
            )
        whole = self.whole(state.layer)
        if whole is not None:
            # Nothing that reads a complete bank need be remembered: its slots never change.
            bank, table = whole
            return from_whole_bank(x, ids, weights, bank, self._form, table=table), None, ()
        metal.settle()
        if ahead is not None:
            mx.eval(ids, ahead)
        host = np.array(ids)
        check_ids(state.layer, host, self.num_experts)
        if self.events is not None:
            self.events(Chosen(state.layer, state.tokens, host, np.array(weights)))
        asked = Asked.of(host, self.num_experts, state.tokens)
        needed = asked.needed
        self._prepare(state, asked)
        pairs = Pairs.of(host, self.num_experts)
        if len(needed) > state.table.slots:
            total = ExpertSum(x, weights, self._form)
            y = sweep(state, pairs, needed, total, threads=self._threads, events=self.events)
        else:
            y = self._at_once(state, pairs, needed, x, weights)
        guess = () if ahead is None else merged(ahead.tolist(), self.num_experts)
        return y, asked, guess

    def _prepare(self, state: StreamedLayer, asked: Asked) -> None:
        """Enter what was read ahead; tell the policies what is asked for."""
        if self.prefetch is not None:
            needed = frozenset(asked.needed)
            waited = state.land(needed, wait=self.keep_all_ahead, events=self.events)
            if hasattr(self.prefetch, "waited"):
                self.prefetch.waited(state.layer, waited)
            state.stats.proposed += len(state.proposal)
            state.stats.foreseen += len(state.proposal & needed)
            state.proposal = frozenset()
            self.prefetch.asked(state.layer, asked.experts, asked.last)
        self.eviction.touch(state.layer, asked.experts, asked.last, asked.uses)

    def _move_slots(self, token: int, least: int) -> None:
        """Let the balance share out the slots anew, at the end of a token."""
        limits = {"least": least, "most": self.num_experts, "bytes_of": self.block_bytes}
        changes = changes_in_order(self.balance, token, self.slots, **limits)
        for layer, slots in changes:
            self._state(layer).resize(slots, self.events)

    def _read_ahead(self, layer: int, guess: tuple[int, ...]) -> None:
        """Begin to read what the next layer may need."""
        following = next_layer(self.layers, layer)
        if self.prefetch is None or following is None:
            return
        if guess and self.events is not None:
            self.events(Guess(following, guess))
        state = self._state(following)
        if state.reading_ahead:
            return
        proposal = proposed(self.prefetch, following, guess, self.num_experts)
        state.proposal = frozenset(proposal)
        blocks = blocks_ahead(self.prefetch, proposal, state.table, state.table.slots)
        if blocks:
            state.read_ahead(self._threads, blocks, state.proposal, self.events)

    def _at_once(
        self,
        state: StreamedLayer,
        pairs: Pairs,
        needed: list[int],
        x: mx.array,
        weights: mx.array,
    ) -> mx.array:
        """All needed experts fit: read what is missing, compute."""
        missing = missing_of(state.table, needed)
        state.look_up(needed, missing, self.events)
        if missing:
            slots = state.make_room(len(missing), frozenset(needed), self.events)
            state.start(self._threads, missing, slots, self.events)
        bank, slot_of = state.bank.experts, state.table.slots_by_expert
        few = len(pairs) == weights.size and self._form.takes_few(len(pairs), x.shape[0], bank)
        early = None
        if few and self.overlap and 0 < len(missing) < len(needed):
            early = self._hits_first(state, pairs, x, weights)
        state.finish(self.events)
        if few:
            y = few_pairs(x, weights, pairs, slot_of, bank, self._form, early=early)
        else:
            total = ExpertSum(x, weights, self._form)
            total.add(pairs, slot_of, bank)
            y = total.total
        # A long output is evaluated now rather than kept.
        if weights.size > FEW_PAIRS:
            mx.eval(y)
        else:
            state.remember(y)
        return y

    def _hits_first(
        self, state: StreamedLayer, pairs: Pairs, x: mx.array, weights: mx.array
    ) -> Early | None:
        """Begin to compute the pairs whose experts are resident."""
        hits = np.isin(pairs.expert, list(state.table.slot_of))
        early = begin_few(
            x, weights, pairs, hits, state.table.slots_by_expert, state.bank.experts, self._form
        )
        if early is not None:
            state.remember(early.rows)
            mx.async_eval(early.rows)
        return early
