"""The store of a model larger than memory: experts are on disk, some are in slots."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_moeflux.checks import is_positive, shown
from mlx_moeflux.errors import (
    ExpertFileError,
    InputError,
    MemoryBudgetError,
    ShapeError,
    UnsupportedError,
)
from mlx_moeflux.experts.compute import (
    FEW_PAIRS,
    REFERENCE_MIX,
    ExpertCompute,
    ExpertMix,
    ExpertSum,
    Pairs,
    check_call,
    check_ids,
    from_whole_bank,
)
from mlx_moeflux.experts.io.native_pool import NativePool, open_pool, staging_bytes
from mlx_moeflux.experts.io.readers import Reader, largest_block
from mlx_moeflux.experts.io.replicas import ReplicaPool
from mlx_moeflux.experts.policies.eviction import (
    DEFAULT_EVICTION,
    Eviction,
    ExpertRequest,
    is_known,
    make_eviction,
)
from mlx_moeflux.experts.policies.prefetch import MOST_PAIRS, Prefetch, make_prefetch, next_layer
from mlx_moeflux.experts.policies.timed_budget import TimedBudget
from mlx_moeflux.experts.policies.wave_schedule import (
    READ_AHEAD,
    WaveSchedule,
    begin_first,
    layer_to_begin,
)
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.streaming.bank import LayerBank
from mlx_moeflux.experts.streaming.budget_trial import BudgetTrial
from mlx_moeflux.experts.streaming.call import Call, Ids
from mlx_moeflux.experts.streaming.handshake import Handshake
from mlx_moeflux.experts.streaming.layer import StreamedLayer, missing_of
from mlx_moeflux.experts.streaming.read_ahead import ReadAhead
from mlx_moeflux.experts.telemetry.events import Chosen, EventHook
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.expert_ffn import Activation, ExpertBank, swiglu
from mlx_moeflux.kernels.runtime import device

DEFAULT_THREADS = 8
MOST_THREADS = 256


class StreamedStore(ExpertStore):
    """A store with slots for some experts, a reader for the others and an eviction policy.
    See :class:`~mlx_moeflux.experts.store.ExpertStore`.

    reader: Closed with the store. slots: For each MoE layer, or one number for all.
    eviction: A name or an :class:`~mlx_moeflux.experts.policies.eviction.Eviction`. prefetch: A
    name or a :class:`~mlx_moeflux.experts.policies.prefetch.Prefetch`. keep_all_ahead: Wait for
    every prefetched block when its layer is called, so that hits do not depend on time; otherwise
    blocks that are not needed and not begun are dropped. threads: Number of reading threads, for
    each copy of the experts. events: Listener, see :mod:`mlx_moeflux.experts.telemetry.events`, or
    None; may be replaced at any time. mix: The operation that computes experts. activation: Of the
    experts. timed_budget: The trial of a smaller budget, or None; `slots` are those that it wants
    now, and fewer than experts in every layer. :meth:`resize` ends it. handshake: A kernel that
    waits for experts in decode steps of one sequence, see
    :mod:`~mlx_moeflux.experts.streaming.handshake`; or, as a phrase, why there is none.

    One lock: a second concurrent call waits for the first. An error or interrupt leaves the
    store usable.

    A call has four steps: :meth:`begin_load`, :meth:`wait`, :meth:`compute`,
    :meth:`release_after`. :meth:`experts` makes them all; a caller that makes them itself does so
    inside :meth:`exclusive`. This object is its own `direct`, `steps`, `streaming` and `rest`; what
    has no description here is described in their classes.

    Evaluates: the ids of a call, unless the layer holds every expert and there is no listener;
    long calls altogether.

    Raises:
        InputError: The policy or the number of threads or slots cannot be used.
        UnsupportedError: The handshake has no native threads, or another policy than lfu and lru.
    """

    exchange: None = None
    # Blocks that a wave of a long call reads at most.
    wave_reads = READ_AHEAD

    def __init__(
        self,
        reader: Reader,
        slots: int | Mapping[int, int],
        *,
        eviction: str | Eviction = DEFAULT_EVICTION,
        prefetch: str | Prefetch | None = None,
        keep_all_ahead: bool = False,
        threads: int = DEFAULT_THREADS,
        events: EventHook | None = None,
        mix: ExpertMix = REFERENCE_MIX,
        activation: Activation = swiglu,
        timed_budget: TimedBudget | None = None,
        handshake: device.Pull | str | None = None,
    ):
        check_threads(threads)
        self.reader, self.threads = reader, threads
        self.layers, self.num_experts = tuple(reader.layers), reader.num_experts
        self.most_slots = self.num_experts
        self._events, self._stats = events, ExpertStats(self.layers)
        self._trial = BudgetTrial(timed_budget, self._stats, heard=events is not None)
        self.keep_all_ahead, self.expert_compute = keep_all_ahead, ExpertCompute(mix)
        self.eviction, self.prefetch = make_eviction(eviction), make_prefetch(prefetch)
        self._lock, self.generation = threading.RLock(), 0
        self._closed = self._released = False
        counts = {layer: self._checked(layer, slots) for layer in self.layers}
        layouts = {layer: reader.layout(layer) for layer in self.layers}
        self._uploads = device.uploads_for(largest_block(reader), threads)
        self._pool = open_pool(reader, threads, self._uploads)
        if isinstance(self._pool, ReplicaPool):
            self._stats.places = self._pool.stats
        self._layers = {
            layer: StreamedLayer(
                layer,
                LayerBank(layouts[layer], counts[layer], self.num_experts, activation),
                num_experts=self.num_experts,
                pool=self._pool,
                policy=self.eviction,
                stats=self._stats.layers[layer],
                events=events,
            )
            for layer in self.layers
        }
        self._handshake: Handshake | None = None
        self._no_handshake: str | None = None
        if isinstance(handshake, str):
            self._no_handshake = f"handshake: none, {handshake}"
        elif handshake is not None:
            if not isinstance(self._pool, NativePool) or not is_known(self.eviction):
                self.close()
                raise UnsupportedError(
                    "the handshake needs native threads and the eviction lfu or lru; leave it out."
                )
            self._handshake = Handshake(
                *(self._pool, self._layers, self.eviction, handshake),
                lock=self._lock,
                ready=lambda: self.handshake is not None,
                restore=self.restore,
                changed=self._forget_measured,
            )

    @property
    def direct(self) -> StreamedStore | None:
        return self if self.computes_as(StreamedStore) else None

    @property
    def steps(self) -> StreamedStore | None:
        return self.direct

    @property
    def streaming(self) -> StreamedStore:
        return self

    @property
    def rest(self) -> StreamedStore:
        return self

    @property
    def handshake(self) -> Handshake | None:
        """The object that lends slots to kernels that wait; None if the next step may not."""
        own = self._handshake
        if own is None or own.off is not None or self.training or self._closed:
            return None
        if self._events is not None or self._ahead is not None or not self.direct:
            return None
        least = min(state.table.slots for state in self._layers.values())
        return own if least >= own.k else None

    @property
    def ways(self) -> str | None:
        return self._no_handshake if self._handshake is None else self._handshake.report()

    @property
    def events(self) -> EventHook | None:
        """The listener, or None. Setting it waits for the call of a layer that is under way."""
        return self._events

    @events.setter
    def events(self, listener: EventHook | None) -> None:
        with self.exclusive(calls=False):
            self._events = listener
            for state in self._layers.values():
                state.events = listener
            self._trial.heard = listener is not None
            self._trial.choose()

    @property
    def nbytes(self) -> int:
        shared = 0 if self._handshake is None else self._handshake.nbytes
        return self.bank_bytes + staging_bytes(self.reader, self.threads) + shared

    @property
    def bank_bytes(self) -> int:
        return sum(state.bank.nbytes for state in self._layers.values())

    @property
    def slots(self) -> dict[int, int]:
        return {layer: state.table.slots for layer, state in self._layers.items()}

    @property
    def block_bytes(self) -> dict[int, int]:
        return {layer: state.bank.layout.nbytes for layer, state in self._layers.items()}

    @property
    def cold(self) -> bool:
        states = self._layers.values()
        return not any(state.tokens or state.table.slot_of for state in states)

    @property
    def prefetch(self) -> Prefetch | None:
        """The policy of reading ahead, or None. It may be replaced between two calls."""
        return self._ahead and self._ahead.policy

    @prefetch.setter
    def prefetch(self, policy: Prefetch | None) -> None:
        self._ahead = None if policy is None else ReadAhead(policy, self.keep_all_ahead)
        self._trial.switch = self._ahead and self._ahead.switch
        self._trial.choose()

    @property
    def timed_budget(self) -> TimedBudget | None:
        return self._trial.timed

    @property
    def looks_ahead(self) -> bool:
        """True if :meth:`experts` takes the guess of the next layer's router as ``ahead=``. It may
        change between two steps."""
        return self._ahead is not None and self._ahead.policy.looks_ahead

    def residents(self, layer: int) -> dict[int, int]:
        """Return expert -> slot of a layer, as it is now."""
        with self.exclusive(calls=False):
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
            ExpertFileError: A block could not be read; the next call tries again.
        """
        check_call(layer, x, ids, weights)
        with self._lock:
            if self._handshake is not None and self._handshake.serves(layer):
                slots, bank = self._handshake.slots(layer, ids), self.bank(layer)
                return self.compute_slots(x, slots, weights, bank)
        with self.exclusive():
            call = self.begin_load(layer, ids, weights, ahead=ahead)
            self.wait(call)
            y = self.compute(call, x, weights)
            self.release_after(call, y)
            return y

    @contextmanager
    def exclusive(self, *, calls: bool = True) -> Iterator[None]:
        """Hold the store: no other thread changes slots meanwhile, and what was lent is taken back.

        calls: Layers are called meanwhile. So released banks are read again, and after an error or
        interrupt no read is under way.
        """
        with self._lock:
            if self._handshake is not None:
                self._handshake.take_back()
            if calls and self._released:
                self.restore()
            try:
                yield
            except BaseException:
                if calls:
                    self._trial.disturb()
                    for state in self._layers.values():
                        if state.change.open or state.early:
                            state.recover()
                raise

    def begin_load(
        self, layer: int, ids: Ids, weights: mx.array, *, ahead: Ids | None = None
    ) -> Call:
        """Take the ids of a call, notify policies and listeners, and begin to read missing experts;
        of a call that needs more experts than slots, those of the first wave. The ids of a layer
        that holds every expert stay on the device.

        Evaluates: the ids. Raises what :meth:`experts` does.
        """
        state = self._recovered(layer)
        call, slots = Call(state, ids, ahead, self.training), len(state.table.expert_of)
        if slots < ids.shape[1]:
            raise MemoryBudgetError(
                f"a token needs {ids.shape[1]} experts but layer {layer} has {slots} slots; "
                "give the experts more memory or use fewer a token."
            )
        if self._whole(state):
            return call
        if (steps := self._trial.steps) is not None:
            before = self.layers[: self.layers.index(layer)]
            steps.begin(ids.size, first=all(self._whole(self._layers[i]) for i in before))
        start, stalled = perf_counter(), state.stats.stall_seconds
        call.host, call.request = self._wait_for_ids(call, weights)
        needed = call.request.needed
        if len(needed) > slots:
            early = state.early
            call.waves = waves = WaveSchedule(state.table, needed, self.wave_reads, early)
            if early:
                state.change.open = True
                last = early[-1].experts[-1]
                state.look_up([e for e in needed if e <= last], ())
            else:
                begin_first(waves, call.begin_wave)
        else:
            state.settle()
            call.missing = missing_of(state.table, needed)
            state.look_up(needed, call.missing)
            if call.missing:
                state.begin_reads(call.missing, frozenset(needed))
        _account(state, start, stalled)
        return call

    def slots_of(self, call: Call) -> mx.array:
        """Return the slots ``[N, K]`` in which the experts of a call are after :meth:`wait`, for
        callers that compute themselves. The call needs at most as many experts as there are slots.

        Raises:
            ShapeError: The call has padding, which such a caller cannot compute.
        """
        assert call.host is not None, "the layer holds every expert: the host does not know the ids"
        where = call.state.slots_soon().__getitem__
        try:
            return self.upload([list(map(where, row)) for row in call.host.tolist()])
        except KeyError:
            raise ShapeError(
                f"layer {call.state.layer}: a router with traceable = True chose fewer experts "
                f"than {call.host.shape[1]}; leave traceable out."
            ) from None

    def upload(self, slots: list[list[int]]) -> mx.array:
        """Return slots ``[N, K]`` uint32 as an array that a GPU reads where the host wrote it."""
        found = mx.array(slots, mx.uint32)
        if self._uploads is not None:
            self._uploads.advise_gpu(found)
        return found

    def wait(self, call: Call) -> None:
        """Wait for the reads of :meth:`begin_load`, once; only then may a kernel read the slots.
        Calls in waves wait in :meth:`compute`."""
        if not call.missing:
            return
        state = call.state
        start, stalled = perf_counter(), state.stats.stall_seconds
        assert state.reading, "the reads of this call were dropped"
        state.finish()
        call.missing = None
        _account(state, start, stalled)

    def compute(
        self, call: Call, x: mx.array, weights: mx.array, *, by: ExpertCompute | None = None
    ) -> mx.array:
        """Compute x ``[N, C]``, weights ``[N, K]`` -> ``[N, C]`` float32: from a complete bank, in
        one pass, or in waves. by: Other options than this store's. Evaluates: long calls of
        incomplete layers."""
        state, bank, own = call.state, call.state.bank.current.experts, by or self.expert_compute
        start, stalled = perf_counter(), state.stats.stall_seconds
        few = not self.training and own.takes_few(weights.size, x.shape[0], bank)
        slot_of = state.table.slots_by_expert
        if call.host is None:
            ids = cast(mx.array, call.ids)
            y = from_whole_bank(x, ids, weights, bank, own, table=state.device_table())
        elif few and call.waves is None and call.host.max() < self.num_experts:
            slots = mx.array(slot_of[call.host].astype(np.uint32))
            y = from_whole_bank(x, slots, weights, bank, own, padded=False)
        else:
            pairs, total = Pairs.of(call.host, self.num_experts), ExpertSum(x, weights, own)
            if call.waves is not None:
                call.add_waves(pairs, total, partial(self._begin_following, state.layer))
            else:
                call.add(pairs, total)
            y = total.total
            if weights.size > FEW_PAIRS:
                # Evaluate a long output now rather than keep it pending.
                device.settle()
                mx.eval(y)
        _account(state, start, stalled)
        return y

    def compute_slots(
        self, x: mx.array, slots: mx.array, weights: mx.array, bank: ExpertBank
    ) -> mx.array:
        """Compute a short call from the slots of :meth:`slots_of`; lazy.

        Traced steps call this. The number of slots is no constant of the trace: the CPU compiles
        fused kernels anew for every constant.
        """
        return from_whole_bank(x, slots, weights, bank, self.expert_compute, padded=False)

    def release_after(self, call: Call, output: mx.array) -> None:
        """End a call: keep its slots until `output`, perhaps lazy, is evaluated; then prefetch."""
        state, (N, K) = call.state, call.ids.shape
        # Slots of a complete bank never change, so no output need be pending.
        if call.request is not None and call.waves is None and N * K <= FEW_PAIRS:
            state.remember(output)
        state.change.open = False
        state.stats.tokens += N
        state.tokens += N
        ahead, trial = self._ahead, self._trial
        short = N * K <= MOST_PAIRS and call.request is not None
        if short and ahead is not None and (ahead.switch is None or ahead.switch.on):
            following = next_layer(self.layers, state.layer)
            if following is not None:
                ahead.begin(self._state(following), call.ahead)
        if trial.steps is not None:
            after = self.layers[self.layers.index(state.layer) + 1 :]
            if call.request is not None and all(self._whole(self._layers[i]) for i in after):
                trial.steps.end()
        if trial.timed is not None and state.layer == self.layers[-1]:
            trial.follow(self)

    def partial(self) -> tuple[int, ...]:
        return tuple(i for i, state in self._layers.items() if not self._whole(state))

    def bank(self, layer: int) -> ExpertBank:
        return self._layers[layer].bank.current.experts

    @property
    def stays_on_device(self) -> bool:
        return not self._closed and all(map(self._whole, self._layers.values()))

    def whole(self, layer: int) -> tuple[ExpertBank, mx.array | None] | None:
        with self._lock:
            if self._handshake is not None and self._handshake.lends(layer):
                return None
            state = self._state(layer)
            whole = self._whole(state)
            return (state.bank.current.experts, state.device_table()) if whole else None

    def count(self, tokens: int, layer: int | None = None) -> None:
        if self._handshake is not None and self._handshake.stepping:
            return  # it counts when the step has ended
        for state in self._layers.values() if layer is None else (self._layers[layer],):
            state.stats.tokens += tokens
            state.tokens += tokens

    def stats(self) -> ExpertStats:
        return self._stats

    def preload(self, layers: Iterable[int] | None = None) -> None:
        """Fill free slots with the experts of lowest ids; they count as reads, not as misses."""
        with self.exclusive(calls=False):
            for layer in self.layers if layers is None else layers:
                state = self._state(layer)
                state.settle()
                absent = missing_of(state.table, range(self.num_experts))
                state.read_now(absent[: state.table.free], ())

    def read_missing(
        self, layer: int, experts: Iterable[int], *, protected: Collection[int]
    ) -> bool | None:
        with self.exclusive(calls=False):
            if self._closed or layer not in self.layers:
                return None
            state = self._state(layer)
            if state.read_elsewhere():
                return False
            state.settle()
            room = state.table.slots - sum(expert in state.table for expert in protected)
            absent = missing_of(state.table, (e for e in experts if 0 <= e < self.num_experts))
            state.read_now(absent[:room], protected)
            return True

    def start_eval(self) -> None:
        """Begin to evaluate the pending outputs of this thread, so that others can wait for them.

        Otherwise the next call of another thread copies the banks that these outputs reference.
        Generation calls this after each step.
        """
        with self._lock:
            states = self._layers.values()
            mx.async_eval([output for state in states for output in state.own_outputs()])
            for state in states:
                state.start_eval()

    def resize(self, layer: int, slots: int) -> None:
        """Change a layer's number of slots; the policy chooses the victims of a smaller bank."""
        with self.exclusive(calls=False):
            self._trial.end()
            self._forget_measured()
            # A bank that is released stays so.
            self._recovered(layer).resize(self._checked(layer, slots))

    def resize_all(self, slots: Mapping[int, int], *, tight: bool = False) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Streaming.resize_all`. Reading the freed bank again
        counts as reads, not as misses; a block that cannot be read is left to the call that needs
        it."""
        with self.exclusive(calls=False):
            self._trial.end()
            before, blocks, frees = self.slots, self.block_bytes, tight and not self._released
            after = {layer: self._checked(layer, slots) for layer in before}
            changes = {layer: n - before[layer] for layer, n in after.items() if n != before[layer]}
            if not changes:
                return
            self._forget_measured()
            # Its room holds any other bank, as it was or as it becomes, whichever is smaller.
            freed = max(before, key=lambda i: min(before[i], after[i]) * blocks[i])
            for state in map(self._recovered, (freed, *changes)):
                state.settle()
                # An output of another thread keeps its arrays.
                if not state.read_elsewhere():
                    state.fence()
            if frees:
                # Until the end an interrupt leaves the freed bank to the next call.
                self._released = True
                self._layers[freed].release()
            for layer in sorted(changes, key=changes.__getitem__):  # smaller banks first
                # Memory that MLX keeps of an old bank would count twice.
                mx.clear_cache()
                self._layers[layer].resize(after[layer])
            mx.clear_cache()
            if frees:
                with suppress(ExpertFileError):
                    self.restore()

    def release(self) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Rest.release`. The same experts are read into the
        same slots; they count as reads, not as misses."""
        with self.exclusive(calls=False):
            if self._closed:
                return
            self.generation += 1
            self._released = True
            for layer in self.layers:
                self._recovered(layer).release()
            mx.clear_cache()

    def restore(self) -> None:
        if not self._released:
            return
        with self.exclusive(calls=False):
            for layer in self.layers:
                self._recovered(layer).restore()
            self._released = False

    def close(self) -> None:
        """Wait for reads; free banks, files and threads. A second call does nothing."""
        with self.exclusive(calls=False):
            if self._closed:
                return
            self._closed = True
            for state in self._layers.values():
                state.close()
            self._pool.close()
            self.reader.close()
            self._layers.clear()

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
        """Return a layer that has a bank, and no reads under way but prefetches."""
        self.restore()
        return self._recovered(layer)

    def _recovered(self, layer: int) -> StreamedLayer:
        state = self._layers.get(layer)
        if state is None:
            if self._closed:
                raise InputError("this expert store is closed; load the model again.")
            raise ShapeError(f"layer {layer} has no routed experts; layers {self.layers} do.")
        if state.change.open:
            state.recover()
        return state

    def _whole(self, state: StreamedLayer) -> bool:
        """Return True if the host need not know the ids of a call of this layer."""
        table = state.table
        return len(table.slot_of) == table.num_experts and self._events is None

    def _forget_measured(self) -> None:
        """Note that numbers of slots change: traces and costs of earlier steps hold no more."""
        self.generation += 1
        self._trial.forget()

    def _wait_for_ids(self, call: Call, weights: mx.array) -> tuple[np.ndarray, ExpertRequest]:
        """Wait for the ids ``[N, K]`` of a call; notify the listener and the policies."""
        state, ids, events = call.state, call.ids, self._events
        if device.kind() != "cpu":
            device.settle()
        if call.ahead is not None or events is not None:
            # One evaluation for everything that the host reads.
            mx.eval(ids, call.ahead, None if events is None else weights)
        try:
            host = np.array(ids)
        except ValueError:  # a graph transformation refuses evaluation
            raise UnsupportedError(
                "streamed experts are chosen on the host, which mx.compile excludes; call "
                "mx.disable_compile() before, or load with expert_memory='100%'."
            ) from None
        check_ids(state.layer, host, self.num_experts)
        if events is not None:
            events(Chosen(state.layer, state.tokens, host, np.array(weights)))
        request = ExpertRequest.of(host, self.num_experts, state.tokens)
        if self._ahead is not None:
            self._ahead.enter(state, request)
        self.eviction.touch(state.layer, request.experts, request.last, request.uses)
        return host, request

    def _begin_following(self, layer: int, needed: int) -> None:
        """Begin the first waves of the layer after `layer`, whose call needs `needed` experts."""
        following = layer_to_begin(self.layers, layer, needed, self.num_experts)
        if following is None or needed <= self._layers[following].table.slots:
            return
        state = self._state(following)
        if not state.reading_ahead:
            state.begin_early(self.wave_reads)


def check_threads(threads: int) -> None:
    """Raise InputError unless `threads` is an integer between 1 and MOST_THREADS."""
    if not is_positive(threads) or threads > MOST_THREADS:
        raise InputError(f"{shown(threads)} threads cannot read experts; give 1 to {MOST_THREADS}.")


def _account(state: StreamedLayer, start: float, stalled: float) -> None:
    """Count the time since `start`, less what was spent waiting for reads, as compute time."""
    stats = state.stats
    stats.compute_seconds += perf_counter() - start - (stats.stall_seconds - stalled)
