"""Experts that live on disk and visit memory: the store of a model that does not fit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import InputError, MemoryBudgetError, ShapeError
from mlx_moeflux.experts import consult
from mlx_moeflux.experts.asked import Asked
from mlx_moeflux.experts.at_once import at_once, begin_reads
from mlx_moeflux.experts.balance import Balance, make_balance
from mlx_moeflux.experts.bank import Bank
from mlx_moeflux.experts.compute import ExpertFFN, ExpertMix, Form, from_whole_bank, indices
from mlx_moeflux.experts.events import EventHook, Resize
from mlx_moeflux.experts.evictions import DEFAULT_EVICTION
from mlx_moeflux.experts.fetch import ReadThreads
from mlx_moeflux.experts.layer import Call, StreamedLayer
from mlx_moeflux.experts.listening import Listened
from mlx_moeflux.experts.pairs import ExpertSum, Pairs
from mlx_moeflux.experts.policy import Eviction, make_eviction
from mlx_moeflux.experts.prefetch import MOST_PAIRS, Prefetch, make_prefetch, merged
from mlx_moeflux.experts.readers import Reader
from mlx_moeflux.experts.stats import ExpertStats
from mlx_moeflux.experts.store import check_call, check_ids
from mlx_moeflux.experts.sweep import sweep
from mlx_moeflux.experts.uploads import staging_bytes, uploads_for
from mlx_moeflux.kernels import metal
from mlx_moeflux.kernels.expert_ffn import ExpertBank, expert_ffn
from mlx_moeflux.kernels.expert_mix import expert_mix

DEFAULT_THREADS = 8


class StreamedStore(Listened):
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
        super().__init__(streamed=True)
        if threads < 1:
            raise InputError(f"{threads} threads cannot read experts; give at least 1.")
        self.reader, self.threads, self.overlap = reader, threads, overlap
        self.layers, self.num_experts = tuple(reader.layers), reader.num_experts
        self.eviction, self.prefetch = make_eviction(eviction), make_prefetch(prefetch)
        self.keep_all_ahead, self.balance = keep_all_ahead, make_balance(balance)
        self._form = Form(ffn=ffn, mix=mix, scratch_bytes=scratch_bytes)
        self._stats = ExpertStats(self.layers)
        self._lock = threading.RLock()
        self.generation = 0
        """Grows when banks are replaced: traces that read them are then of the past."""
        self._closed = False
        self._open: Call | None = None
        counts = {layer: self._checked(layer, slots) for layer in self.layers}
        layouts = {layer: reader.layout(layer) for layer in self.layers}
        self._bank = Bank(layouts, counts, self.num_experts)
        largest = max(layout.nbytes for layout in layouts.values())
        self._uploads = uploads_for(largest, threads)
        around = {"policy": self.eviction, "stats": self._stats, "uploads": self._uploads}
        self._layers = {
            layer: StreamedLayer(layer, self._bank[layer], reader=reader, **around)
            for layer in self.layers
        }
        self._threads, self.events = ReadThreads(threads), events

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and of the private buffers of reading threads."""
        return self._bank.nbytes + self.threads * staging_bytes(self.reader)

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
            self.called(ids, weights)
            call = Call(state, ids, ahead)
            with self._timed(call):
                y = self._compute(call, x, weights)
            self._over(call)
            return y

    def exclusive(self) -> AbstractContextManager[Any]:
        """Hold the store for a whole step: slots stay as they are until :meth:`read_by`."""
        return self._lock

    def bring(
        self, layer: int, ids: mx.array, weights: mx.array, *, ahead: mx.array | None = None
    ) -> mx.array:
        """The first half of :meth:`experts`, for callers that compute themselves -> the slots of
        `ids` ``[N, K]``, in which they are after :meth:`arrive`. To be called inside
        :meth:`exclusive`, for no more experts than the layer has slots, without padding;
        :meth:`arrive` and :meth:`read_by` must follow. Raises what :meth:`experts` does."""
        state = self._state(layer)
        self._open = call = Call(state, ids, ahead)
        with self._timed(call, ends=False):
            host = self._asked(call, weights)
            call.missing = begin_reads(state, call.asked.needed, self._threads, self.tell)
        slots = indices(state.slots_soon()[host])
        if self._uploads is not None:
            self._uploads.reach(slots)
        return slots

    def arrive(self) -> None:
        """Wait for what :meth:`bring` began to read; only then may anything read the slots."""
        call = self._open
        with self._timed(call):
            assert bool(call.missing) == call.state.reading, "reads were given up in between"
            call.state.finish(self.tell)

    def read_by(self, layer: int, output: mx.array) -> None:
        """End what :meth:`bring` began: `output`, not evaluated yet, reads slots of `layer`."""
        call, self._open = self._open, None
        assert call.state.layer == layer, "nothing was brought for this layer"
        call.state.remember(output)
        self._over(call)

    def compute(
        self, x: mx.array, slots: mx.array, weights: mx.array, bank: ExpertBank
    ) -> mx.array:
        """What :meth:`experts` computes, of the slots ``[N, K]`` that :meth:`bring` returned; lazy.

        Steps are traced through here, and the CPU compiles what it fuses anew for every constant:
        how many slots there are is none of them.
        """
        return from_whole_bank(x, slots, weights, bank, self._form, padded=False)

    @property
    def parts_calls(self) -> bool:
        """Whether the halves of a call may be asked for apart: hits are not computed early."""
        return not self.overlap

    def partial(self) -> tuple[int, ...]:
        """The layers whose calls the host must look at."""
        quiet = self.prefetch is None and not self.told_at_once
        return tuple(i for i, s in self._layers.items() if not (quiet and s.table.complete))

    def bank(self, layer: int) -> ExpertBank:
        """The slots of a layer as they are now."""
        return self._known(layer).bank.experts

    @property
    def stays_on_device(self) -> bool:
        """Whether calls are lazy and nobody is told of them at once."""
        return not self.partial()

    def whole(self, layer: int) -> tuple[ExpertBank, mx.array | None] | None:
        """A layer's bank and its table, expert -> slot, ``[E + 1]`` uint32 (None: e is in slot e),
        if all experts are in it and nobody is to be told of calls: who computes with them says so
        to :meth:`count`."""
        with self._lock:
            state = self._state(layer)
            return (state.bank.experts, state.device_table()) if self._whole(state) else None

    def count(self, tokens: int, layer: int | None = None) -> None:
        """Account for a call of a layer, or of all, that did not come through :meth:`experts`."""
        for state in self._layers.values() if layer is None else (self._layers[layer],):
            state.stats.tokens += tokens
            state.tokens += tokens

    def seen(self) -> tuple[int, ...]:
        """Tokens that each layer has seen."""
        return tuple(state.tokens for state in self._layers.values())

    def stats(self) -> ExpertStats:
        """See :meth:`ExpertStore.stats`."""
        return self._stats

    def preload(self, layers: Iterable[int] | None = None) -> None:
        """Fill free slots with the experts of lowest ids, so that complete layers need no look;
        counted as reads, not as misses."""
        with self._lock:
            for layer in self.layers if layers is None else layers:
                self._state(layer).fill(self._threads, self.tell)

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
            super().hand_over()

    def resize(self, layer: int, slots: int) -> None:
        """Change a layer's number of slots; the policy chooses who leaves a smaller bank."""
        with self._lock:
            self.generation += 1
            self._state(layer).resize(self._checked(layer, slots), self.tell)
            if self.tell is not None:
                self.tell(Resize(layer, self.slots[layer]))

    def resize_all(self, slots: Mapping[int, int]) -> None:
        """Give every layer its number of slots; but for one layer's bank no more memory is held
        than before or after."""
        with self._lock:
            changes = {layer: self._checked(layer, slots) - n for layer, n in self.slots.items()}
            for layer in sorted(changes, key=changes.get):  # those that shrink first
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
            self.catch_up()

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

    def _known(self, layer: int) -> StreamedLayer:
        if self._closed:
            raise InputError("this expert store is closed; load the model again.")
        if layer not in self._layers:
            raise ShapeError(f"layer {layer} has no routed experts; layers {self.layers} do.")
        return self._layers[layer]

    def _state(self, layer: int) -> StreamedLayer:
        """A layer with nothing under way but what is read ahead."""
        state = self._known(layer)
        if state.unsettled:
            state.settle()
        return state

    def _whole(self, state: StreamedLayer) -> bool:
        """Whether nobody need look at what a call of this layer asks for."""
        return state.table.complete and self.quiet and self.prefetch is None

    @contextmanager
    def _timed(self, call: Call, *, ends: bool = True) -> Iterator[None]:
        """Around what a call, or half of one, reads and computes: time, order whatever happens.

        Raises:
            MemoryBudgetError: A token needs more experts than the layer has slots.
        """
        state, K, slots = call.state, call.ids.shape[1], call.state.table.slots
        if slots < K:
            raise MemoryBudgetError(
                f"a token needs {K} experts but layer {state.layer} has {slots} slots; "
                "give the experts more memory or use fewer a token."
            )
        start, stalled = perf_counter(), state.stats.stall_seconds
        try:
            yield
            if ends:
                state.settled()
        except BaseException:
            if state.unsettled:
                state.settle()
            raise
        finally:
            spent = perf_counter() - start - (state.stats.stall_seconds - stalled)
            state.stats.compute_seconds += spent

    def _over(self, call: Call) -> None:
        """A call is over: what follows from it for the next ones."""
        state, (N, K) = call.state, call.ids.shape
        state.stats.tokens += N
        state.tokens += N
        short = N * K <= MOST_PAIRS
        consult.shift(self, state, K, short=short)
        if short and call.asked is not None:
            guess = () if call.ahead is None else merged(call.ahead.tolist(), self.num_experts)
            consult.read_ahead(self, state.layer, guess)

    def _compute(self, call: Call, x: mx.array, weights: mx.array) -> mx.array:
        state = call.state
        if (whole := self.whole(state.layer)) is not None:
            # Nothing that reads a complete bank need be remembered: its slots never change.
            bank, table = whole
            return from_whole_bank(x, call.ids, weights, bank, self._form, table=table)
        pairs = Pairs.of(self._asked(call, weights), self.num_experts)
        needed, total = call.asked.needed, ExpertSum(x, weights, self._form)
        around = {"threads": self._threads, "events": self.tell}
        if len(needed) > state.table.slots:
            return sweep(state, pairs, needed, total, **around)
        return at_once(state, pairs, needed, total, overlap=self.overlap, **around)

    def _asked(self, call: Call, weights: mx.array) -> np.ndarray:
        """Wait for the ids ``[N, K]`` of a call and tell everybody of them."""
        state, ids = call.state, call.ids
        metal.settle()
        weights = weights if self.wants_weights else None
        if call.ahead is not None or weights is not None:
            # All that anybody wants to see, in one evaluation.
            mx.eval(ids, call.ahead, weights)
        host = np.array(ids)
        check_ids(state.layer, host, self.num_experts)
        self.tell_chosen(state.layer, state.tokens, host, weights)
        call.asked = Asked.of(host, self.num_experts, state.tokens)
        consult.asked(self, state, call.asked)
        return host
