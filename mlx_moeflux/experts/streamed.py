"""Experts that live on disk and visit memory: the store of a model that does not fit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from time import perf_counter

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import InputError, MemoryBudgetError, ShapeError
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
from mlx_moeflux.experts.events import Chosen, EventHook
from mlx_moeflux.experts.fetch import ReadThreads
from mlx_moeflux.experts.layer import StreamedLayer, missing_of
from mlx_moeflux.experts.policy import Clock, Eviction, make_eviction
from mlx_moeflux.experts.readers import Reader
from mlx_moeflux.experts.stats import ExpertStats
from mlx_moeflux.experts.store import check_call
from mlx_moeflux.experts.sweep import sweep
from mlx_moeflux.kernels.expert_ffn import expert_ffn
from mlx_moeflux.kernels.expert_mix import expert_mix

DEFAULT_THREADS = 8


class StreamedStore:
    """Resident slots, a reader for what is missing, a policy for who must go.
    See :class:`~mlx_moeflux.experts.store.ExpertStore`.

    reader: Closed with the store. slots: For each MoE layer, or one number for all.
    eviction: A name or an :class:`~mlx_moeflux.experts.policy.Eviction`. threads: Reads under way
    at once. events: Listener, see :mod:`mlx_moeflux.experts.events`. overlap: Compute a decode
    step's hits while its misses are read. ffn, mix: The operations that compute experts.
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
        eviction: str | Eviction = "lru",
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
        self.eviction = make_eviction(eviction)
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
    def slots(self) -> dict[int, int]:
        """MoE layer id -> number of slots."""
        return {layer: state.table.slots for layer, state in self._layers.items()}

    def residents(self, layer: int) -> dict[int, int]:
        """Expert -> slot of a layer, as it is now."""
        with self._lock:
            return dict(self._state(layer).table.slot_of)

    def experts(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
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
                y = self._experts(state, x, ids, weights)
                state.settled()
            finally:
                if state.unsettled:
                    state.settle()
                spent = perf_counter() - start - (state.stats.stall_seconds - stalled)
                state.stats.compute_seconds += spent
            state.stats.tokens += x.shape[0]
            state.tokens += x.shape[0]
            return y

    @property
    def stays_on_device(self) -> bool:
        """Whether calls are lazy and nobody is told of them: every layer holds every expert."""
        states = self._layers.values()
        return self.events is None and all(state.table.complete for state in states)

    def count(self, tokens: int) -> None:
        """Account for a call of every layer that ran from a trace."""
        for state in self._layers.values():
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
            state = self._state(layer)
            self.generation += 1
            state.resize(self._checked(layer, slots), self.events)

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
        self, state: StreamedLayer, x: mx.array, ids: mx.array, weights: mx.array
    ) -> mx.array:
        if ids.shape[1] > state.table.slots:
            raise MemoryBudgetError(
                f"a token needs {ids.shape[1]} experts but layer {state.layer} has "
                f"{state.table.slots} slots; give the experts more memory or use fewer a token."
            )
        if state.table.complete and self.events is None:
            # Nothing that reads a complete bank need be remembered: its slots never change.
            table = state.device_table()
            return from_whole_bank(x, ids, weights, state.bank.experts, self._form, table=table)
        host = np.array(ids)
        self._check_ids(state.layer, host)
        if self.events is not None:
            self.events(Chosen(state.layer, state.tokens, host, np.array(weights)))
        pairs = Pairs.of(host, self.num_experts)
        needed = self._touch(state, pairs)
        if len(needed) > state.table.slots:
            total = ExpertSum(x, weights, self._form)
            return sweep(state, pairs, needed, total, threads=self._threads, events=self.events)
        return self._at_once(state, pairs, needed, x, weights)

    def _check_ids(self, layer: int, ids: np.ndarray) -> None:
        if ids.max() > self.num_experts or (ids[:, 1:] < ids[:, :-1]).any():
            raise ShapeError(
                f"layer {layer}: ids must ascend in each row and be at most {self.num_experts}, "
                f"got {ids[0].tolist()} in the first row."
            )

    def _touch(self, state: StreamedLayer, pairs: Pairs) -> list[int]:
        """Tell the policy who is asked for; the distinct experts, ascending."""
        needed, last, uses = np.unique(
            pairs.expert[::-1], return_index=True, return_counts=True
        )  # the first of the reversed pairs is the last use
        last = len(pairs) - 1 - last
        by_last_use = np.argsort(last)
        for expert, at, count in zip(
            needed[by_last_use].tolist(),
            last[by_last_use].tolist(),
            uses[by_last_use].tolist(),
            strict=True,
        ):
            clock = Clock(state.tokens + int(pairs.token[at]), state.layer, int(pairs.rank[at]))
            self.eviction.touch(state.layer, expert, clock, count)
        return needed.tolist()

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
