"""The store of a model larger than memory: experts are on disk, some are in slots."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from mlx_moeflux.experts.budget import format_bytes
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
from mlx_moeflux.experts.policies.prefetch import (
    MOST_PAIRS,
    Prefetch,
    Switched,
    blocks_ahead,
    make_prefetch,
    merged,
    next_layer,
    proposed,
)
from mlx_moeflux.experts.policies.timed_budget import Budget, TimedBudget
from mlx_moeflux.experts.policies.timed_switch import Cost, DecodeSteps, StepListener, TimedSwitch
from mlx_moeflux.experts.policies.wave_schedule import (
    READ_AHEAD,
    Wave,
    WaveSchedule,
    begin_first,
    layer_to_begin,
    run_waves,
)
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.streaming.bank import LayerBank
from mlx_moeflux.experts.streaming.handshake import Handshake
from mlx_moeflux.experts.streaming.layer import StreamedLayer, missing_of
from mlx_moeflux.experts.telemetry.events import Chosen, EventHook, Guess, Resize
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.expert_ffn import Activation, ExpertBank, swiglu
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.verify.failures import lacks_memory

DEFAULT_THREADS = 8
MOST_THREADS = 256

# On the device, or where the host knows them already.
Ids = mx.array | np.ndarray


@dataclass(slots=True, eq=False)
class Call:
    """A call of a layer, from :meth:`StreamedStore.begin_load` to
    :meth:`StreamedStore.release_after`.

    ids, ahead: ``[N, K]``. host, request: The ids on the host, and the experts that they need; None
    if the host need not know. missing: Experts that are being read for the call.
    waves: The schedule of a call that needs more experts than there are slots.
    """

    state: StreamedLayer
    ids: Ids
    ahead: Ids | None = None
    host: np.ndarray | None = None
    request: ExpertRequest | None = None
    missing: list[int] | None = None
    waves: WaveSchedule | None = None


class StreamedStore(ExpertStore):
    """A store with slots for some experts, a reader for the others and an eviction policy.
    See :class:`~mlx_moeflux.experts.store.ExpertStore`.

    reader: Closed with the store. slots: For each MoE layer, or one number for all.
    eviction: A name or an :class:`~mlx_moeflux.experts.policies.eviction.Eviction`. prefetch: A
    name or a :class:`~mlx_moeflux.experts.policies.prefetch.Prefetch`. keep_all_ahead: Wait for
    every prefetched block when its layer is called, so that hits do not depend on time; otherwise
    blocks that are not needed and not begun are dropped. threads: Number of reading threads, for
    each copy of the experts. events: Listener, see :mod:`mlx_moeflux.experts.telemetry.events`, or
    None; may be replaced at any time. mix: The operation that computes experts. scratch_bytes:
    Bytes that one step of a long call may allocate besides its result; None: chosen by the device.
    activation: Of the experts. wave_reads: Blocks that a wave of a long call reads at most.
    timed_budget: The trial of a smaller budget, or None; `slots` are those that it wants now, and
    fewer than experts in every layer. :meth:`resize` ends it. handshake: A kernel that waits for
    experts in decode steps of one sequence, see :mod:`~mlx_moeflux.experts.streaming.handshake`;
    or, as a phrase, why there is none.

    One lock: a second concurrent call waits for the first. An error or interrupt leaves the
    store usable.

    A call has four steps: :meth:`begin_load`, :meth:`wait`, :meth:`compute`,
    :meth:`release_after`. :meth:`experts` makes them all; a caller that makes them itself does so
    inside :meth:`exclusive`. This object is its own `direct`, `steps`, `streaming` and `rest`.

    Evaluates: the ids of a call, unless the layer holds every expert and there is no listener;
    long calls altogether.

    Raises:
        InputError: The policy or the number of threads or slots cannot be used.
        UnsupportedError: The handshake has no native threads, or another policy than lfu and lru.
    """

    exchange: None = None

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
        scratch_bytes: int | None = None,
        activation: Activation = swiglu,
        wave_reads: int = READ_AHEAD,
        timed_budget: TimedBudget | None = None,
        handshake: device.Pull | str | None = None,
    ):
        check_threads(threads)
        self.reader, self.threads = reader, threads
        self.layers, self.num_experts = tuple(reader.layers), reader.num_experts
        self._events, self.timed_budget = events, timed_budget
        # Layer -> experts that lost their slots to the smaller budget.
        self._left: dict[int, list[int]] = {}
        self._decode_steps: DecodeSteps | None = None
        self.eviction, self.prefetch = make_eviction(eviction), make_prefetch(prefetch)
        self.keep_all_ahead, self._wave_reads = keep_all_ahead, wave_reads
        self.expert_compute = ExpertCompute(mix=mix, scratch_bytes=scratch_bytes)
        self._stats = ExpertStats(self.layers)
        self._lock = threading.RLock()
        self.generation = 0
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
            )
            for layer in self.layers
        }
        self._handshake: Handshake | None = None
        self._no_handshake = handshake if isinstance(handshake, str) else None
        if handshake is not None and not isinstance(handshake, str):
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
        """This store, unless a subclass has :meth:`experts` of its own."""
        return self if self.computes_as(StreamedStore) else None

    @property
    def steps(self) -> StreamedStore | None:
        """This store, unless a subclass has :meth:`experts` of its own."""
        return self.direct

    @property
    def streaming(self) -> StreamedStore:
        """This store."""
        return self

    @property
    def handshake(self) -> Handshake | None:
        """The object that lends slots to kernels that wait; None if the next step may not."""
        own = self._handshake
        if own is None or own.off is not None or self.training or self._closed:
            return None
        if self._events is not None or self._prefetch is not None or not self.direct:
            return None
        least = min(state.table.slots for state in self._layers.values())
        return own if least >= own.k else None

    @property
    def ways(self) -> str | None:
        """See :attr:`~mlx_moeflux.experts.store.Streaming.ways`."""
        if self._handshake is not None:
            return self._handshake.report()
        return None if self._no_handshake is None else f"handshake: none, {self._no_handshake}"

    @property
    def rest(self) -> StreamedStore:
        """This store."""
        return self

    @property
    def events(self) -> EventHook | None:
        """The listener, or None. Setting it waits for the call of a layer that is under way."""
        return self._events

    @events.setter
    def events(self, listener: EventHook | None) -> None:
        with self._own():
            self._events = listener
            self._watch_steps()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and of the buffers of reading threads."""
        shared = 0 if self._handshake is None else self._handshake.nbytes
        return self.bank_bytes + staging_bytes(self.reader, self.threads) + shared

    @property
    def most_slots(self) -> int:
        """Slots that a layer may have: one for each expert."""
        return self.num_experts

    @property
    def bank_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(state.bank.nbytes for state in self._layers.values())

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
        """True if no expert is resident and no layer was called."""
        states = self._layers.values()
        return not any(state.tokens or state.table.slot_of for state in states)

    @property
    def prefetch(self) -> Prefetch | None:
        """The policy of reading ahead, or None. It may be replaced between two calls."""
        return self._prefetch

    @prefetch.setter
    def prefetch(self, policy: Prefetch | None) -> None:
        self._prefetch = policy
        self._switch: TimedSwitch | None = policy.switch if isinstance(policy, Switched) else None
        self._watch_steps()

    @property
    def looks_ahead(self) -> bool:
        """True if :meth:`experts` takes the guess of the next layer's router as ``ahead=``. It may
        change between two steps."""
        return self._prefetch is not None and self._prefetch.looks_ahead

    def residents(self, layer: int) -> dict[int, int]:
        """Return expert -> slot of a layer, as it is now."""
        with self._own():
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
    def _own(self) -> Iterator[None]:
        """Hold the store with the slots of all layers: what was lent is taken back."""
        with self._lock:
            if self._handshake is not None:
                self._handshake.take_back()
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the store for a whole step: no other thread changes slots meanwhile. After an error
        or interrupt no read is under way."""
        # As in `_own`, whose frames each layer of a step would pay for.
        with self._lock:
            if self._handshake is not None:
                self._handshake.take_back()
            if self._released:
                self.restore()
            try:
                yield
            except BaseException:
                if self._decode_steps is not None:
                    self._decode_steps.disturb()
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
        call, slots = Call(state, ids, ahead), len(state.table.expert_of)
        if slots < ids.shape[1]:
            raise MemoryBudgetError(
                f"a token needs {ids.shape[1]} experts but layer {layer} has {slots} slots; "
                "give the experts more memory or use fewer a token."
            )
        if self._whole(state):
            return call
        if self._decode_steps is not None:
            before = self.layers[: self.layers.index(layer)]
            self._decode_steps.begin(ids.size, first=self._all_whole(before))
        start, stalled = perf_counter(), state.stats.stall_seconds
        call.host, call.request = self._wait_for_ids(call, weights)
        needed = call.request.needed
        if len(needed) > slots:
            early = state.early
            call.waves = waves = WaveSchedule(state.table, needed, self._wave_reads, early)
            if early:
                state.change.begin()
                last = early[-1].experts[-1]
                state.look_up([e for e in needed if e <= last], (), self._events)
            else:
                begin_first(waves, lambda wave: self._begin_wave(state, waves, wave))
        else:
            state.settle(self._events)
            call.missing = missing_of(state.table, needed)
            state.look_up(needed, call.missing, self._events)
            if call.missing:
                state.begin_reads(call.missing, frozenset(needed), self._events)
        _account(state, start, stalled)
        return call

    def slots_of(self, call: Call) -> mx.array:
        """Return the slots ``[N, K]`` in which the experts of a call are after :meth:`wait`, for
        callers that compute themselves. The call needs at most as many experts as there are slots.

        Raises:
            ShapeError: The call has padding, which such a caller cannot compute.
        """
        assert call.host is not None, "the layer holds every expert: the host does not know the ids"
        slot_of = call.state.slots_soon()
        where = slot_of.__getitem__
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
        state.finish(self._events)
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
                self._compute_waves(call, call.waves, pairs, total)
            else:
                self._add(state, pairs, total)
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
        if state.change.open:
            state.change.end()
        state.stats.tokens += N
        state.tokens += N
        prefetch, steps = self._prefetch, self._decode_steps
        short = N * K <= MOST_PAIRS and call.request is not None
        if short and prefetch is not None and (self._switch is None or self._switch.on):
            self._read_ahead(call, prefetch)
        if steps is not None:
            after = self.layers[self.layers.index(state.layer) + 1 :]
            if call.request is not None and self._all_whole(after):
                steps.end()
        if self.timed_budget is not None and state.layer == self.layers[-1]:
            self._follow(self.timed_budget)

    def partial(self) -> tuple[int, ...]:
        """Return the layers of whose calls the host needs the ids."""
        return tuple(i for i, state in self._layers.items() if not self._whole(state))

    def bank(self, layer: int) -> ExpertBank:
        """Return the slots of a layer as they are now."""
        return self._layers[layer].bank.current.experts

    @property
    def stays_on_device(self) -> bool:
        """True if all calls are lazy."""
        return not self._closed and all(map(self._whole, self._layers.values()))

    def whole(self, layer: int) -> tuple[ExpertBank, mx.array | None] | None:
        """See :meth:`~mlx_moeflux.experts.store.Direct.whole`."""
        with self._lock:
            if self._handshake is not None and self._handshake.lends(layer):
                return None
            state = self._state(layer)
            return (
                (state.bank.current.experts, state.device_table()) if self._whole(state) else None
            )

    def count(self, tokens: int, layer: int | None = None) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Direct.count`."""
        if self._handshake is not None and self._handshake.stepping:
            return  # it counts when the step has ended
        for state in self._layers.values() if layer is None else (self._layers[layer],):
            state.stats.tokens += tokens
            state.tokens += tokens

    def stats(self) -> ExpertStats:
        """See :meth:`ExpertStore.stats`."""
        return self._stats

    def preload(self, layers: Iterable[int] | None = None) -> None:
        """Fill free slots with the experts of lowest ids; they count as reads, not as misses."""
        with self._own():
            for layer in self.layers if layers is None else layers:
                self._state(layer).fill(self._events)

    def read_missing(
        self, layer: int, experts: Iterable[int], *, protected: Collection[int]
    ) -> bool | None:
        """See :meth:`~mlx_moeflux.experts.store.Streaming.read_missing`."""
        with self._own():
            if self._closed or layer not in self.layers:
                return None
            state = self._state(layer)
            if state.read_elsewhere():
                return False
            state.settle(self._events)
            room = state.table.slots - sum(expert in state.table for expert in protected)
            absent = missing_of(state.table, (e for e in experts if 0 <= e < self.num_experts))
            state.read_now(absent[:room], protected, self._events)
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
        with self._own():
            self._end_trial()
            if self._decode_steps is not None:
                self._decode_steps.disturb()
            self._forget_measured()
            # A bank that is released stays so.
            self._recovered(layer).resize(self._checked(layer, slots), self._events)
            if self._events is not None:
                self._events(Resize(layer, self.slots[layer]))

    def resize_all(self, slots: Mapping[int, int]) -> None:
        """Give every layer its number of slots. Memory exceeds the larger of before and after by at
        most one layer's bank."""
        with self._own():
            self._end_trial()
            changes = {layer: self._checked(layer, slots) - n for layer, n in self.slots.items()}
            for layer in sorted(changes, key=changes.__getitem__):  # smaller banks first
                if changes[layer]:
                    self.resize(layer, slots[layer])
                    # Memory that MLX keeps of the old bank would count twice.
                    mx.clear_cache()

    def release(self) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Rest.release`. The same experts are read into the
        same slots; they count as reads, not as misses."""
        with self._own():
            if self._closed:
                return
            self.generation += 1
            self._released = True
            for layer in self.layers:
                self._recovered(layer).release(self._events)
            mx.clear_cache()

    def restore(self) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Rest.restore`."""
        if not self._released:
            return
        with self._own():
            for layer in self.layers:
                self._recovered(layer).restore()
            self._released = False

    def close(self) -> None:
        """Wait for reads; free banks, files and threads. A second call does nothing."""
        with self._own():
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

    def _all_whole(self, layers: Iterable[int]) -> bool:
        """Return True if the host need not know the ids of any call of these layers."""
        return all(self._whole(self._layers[layer]) for layer in layers)

    def _clock(self) -> Cost:
        """Return the time, and the time waited for reads."""
        layers = self._stats.layers.values()
        return Cost(perf_counter(), sum(stats.stall_seconds for stats in layers))

    def _forget_measured(self) -> None:
        """Note that numbers of slots change: traces and costs of earlier steps hold no more."""
        self.generation += 1
        if self._switch is not None:
            self._switch.reset()

    def _watch_steps(self) -> None:
        """Choose who gets what decode steps cost: the trial of a budget, and after it the switch
        of the prefetcher. Each would disturb the other, and a listener of events the trial."""
        trial, pairs = self.timed_budget, MOST_PAIRS
        listener: StepListener | None = self._switch
        if trial is not None and not trial.over and self._events is None:
            listener, pairs = trial, trial.pairs
        steps = self._decode_steps
        if listener is (None if steps is None else steps.listener):
            return
        if steps is not None:
            steps.disturb()
        self._decode_steps = None if listener is None else DecodeSteps(listener, self._clock, pairs)

    def _end_trial(self) -> None:
        """Keep the slots that somebody gives from now on."""
        self.timed_budget = None
        self._watch_steps()

    def _follow(self, trial: TimedBudget) -> None:
        """Give the layers the slots that a trial wants, between two steps: not while there is a
        listener, or a pending output that this thread cannot wait for. If there is no memory for
        them, the present budget stays."""
        self._watch_steps()
        states, wanted = self._layers.values(), trial.wanted
        if wanted.slots == self.slots or self._events is not None:
            return
        if any(state.read_elsewhere() for state in states):
            return
        try:
            self._turn(wanted)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            present = trial.larger if wanted is trial.smaller else trial.smaller
            trial.end(f"no memory was left for {format_bytes(wanted.nbytes)}", present)
            self._turn(present)

    def _turn(self, budget: Budget) -> None:
        """Give every layer the slots of `budget`. Memory exceeds neither what it was nor what it
        becomes: the largest bank is freed before the others are copied, and read again after them.
        A larger budget reads what a smaller one left. Blocks that cannot be read are left to the
        call that needs them.
        """
        held = {layer: list(state.table.slot_of) for layer, state in self._layers.items()}
        for state in map(self._recovered, self.layers):
            state.settle(None)
            state.fence()
        self._forget_measured()
        # Until the end an interrupt leaves the freed bank to the next call.
        self._released = True
        largest = max(self._layers.values(), key=lambda state: state.bank.nbytes)
        largest.release(None)
        for layer, state in self._layers.items():
            mx.clear_cache()
            state.resize(budget.slots[layer], None)
        mx.clear_cache()
        with suppress(ExpertFileError):
            self.restore()
            for layer, state in self._layers.items():
                left = missing_of(state.table, self._left.get(layer, ()))
                state.read_now(left[: state.table.free], (), None)
        self._left = {
            layer: missing_of(state.table, held[layer]) for layer, state in self._layers.items()
        }

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
        if self._prefetch is not None:
            self._enter_ahead(state, request, self._prefetch)
        self.eviction.touch(state.layer, request.experts, request.last, request.uses)
        return host, request

    def _enter_ahead(
        self, state: StreamedLayer, request: ExpertRequest, prefetch: Prefetch
    ) -> None:
        """Enter prefetched blocks and notify the prefetcher of the request."""
        if proposal := state.proposal:
            needed = frozenset(request.needed)
            state.commit_prefetch(needed, wait=self.keep_all_ahead, events=self._events)
            state.count(proposed=len(proposal), foreseen=len(proposal & needed))
            state.proposal = frozenset()
        prefetch.requested(state.layer, request.experts, request.last)

    def _begin_wave(self, state: StreamedLayer, waves: WaveSchedule, wave: Wave) -> None:
        state.look_up(wave.experts, wave.missing, self._events)
        state.begin_reads(wave.missing, waves.protected, self._events)

    def _add(self, state: StreamedLayer, pairs: Pairs, total: ExpertSum) -> None:
        """Add the outputs of `pairs`, whose experts are in slots."""
        bank, slot_of = state.bank.current.experts, state.table.slots_by_expert
        if self.training and len(pairs):
            # Gradients read the experts after other ones have been read into their slots.
            experts = np.unique(pairs.expert)
            bank = bank.take(mx.array(slot_of[experts].astype(np.uint32)))
            mx.eval(bank.flat)
            slot_of = np.zeros_like(slot_of)
            slot_of[experts] = np.arange(len(experts))
        total.add(pairs, slot_of, bank)

    def _compute_waves(
        self, call: Call, waves: WaveSchedule, pairs: Pairs, total: ExpertSum
    ) -> None:
        """Add waves to `total` in ascending id and read the next one meanwhile. Evaluate each, so
        that its slots can be read into."""
        state, events = call.state, self._events
        assert call.request is not None, "the host knows the ids of calls in waves"
        needed = frozenset(call.request.needed)

        def begin(wave: Wave) -> None:
            self._begin_wave(state, waves, wave)

        def finish() -> None:
            if state.early:
                state.finish_early(needed, events)
            else:
                state.finish(events)

        def compute(wave: Wave) -> None:
            part = pairs.between(wave.experts[0], wave.experts[-1])
            if len(part):
                self._add(state, part, total)
                total.evaluate()

        def begin_following() -> None:
            layer = layer_to_begin(self.layers, state.layer, len(needed), self.num_experts)
            if layer is None or len(needed) <= self._layers[layer].table.slots:
                return
            following = self._state(layer)
            if not following.reading_ahead:
                following.begin_early(self._wave_reads, events)

        run_waves(waves, begin, finish, compute, begin_following)

    def _read_ahead(self, call: Call, prefetch: Prefetch) -> None:
        """Begin to prefetch experts of the layer after that of `call`."""
        rows = () if call.ahead is None else np.array(call.ahead).tolist()
        guess = merged(rows, self.num_experts)
        following = next_layer(self.layers, call.state.layer)
        if following is None:
            return
        if self._events is not None and (guess or self._switch is not None):
            self._events(Guess(following, guess))
        state = self._state(following)
        if state.reading_ahead:
            return
        proposal = proposed(prefetch, following, guess, self.num_experts)
        state.proposal = frozenset(proposal)
        blocks = blocks_ahead(prefetch, proposal, state.table, state.table.slots)
        if blocks:
            state.read_ahead(blocks, state.proposal, self._events)


def check_threads(threads: int) -> None:
    """Raise InputError unless `threads` is an integer between 1 and MOST_THREADS."""
    if not is_positive(threads) or threads > MOST_THREADS:
        raise InputError(f"{shown(threads)} threads cannot read experts; give 1 to {MOST_THREADS}.")


def _account(state: StreamedLayer, start: float, stalled: float) -> None:
    """Count the time since `start`, less what was spent waiting for reads, as compute time."""
    stats = state.stats
    stats.compute_seconds += perf_counter() - start - (stats.stall_seconds - stalled)
