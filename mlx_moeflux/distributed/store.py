"""The store of a model whose experts are spread over ranks.

Every rank runs the trunk, holds the experts that the placement gives it in an ordinary store, and
computes the (token, expert) pairs of a call that need them. One collective brings the pairs
together: each rank fills its own of ``[N, K, C]`` float32 and -0.0 elsewhere, so the sum is exact
in any order. Pairs are weighted before and added in ascending ids after, as in every store, and the
result has the bits of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_moeflux.distributed.placement import Places
from mlx_moeflux.distributed.ranks import Ranks
from mlx_moeflux.experts.compute import by_pair, check_call, check_ids, from_whole_bank, indices
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.experts.store import ExpertStore, Steps, Streaming
from mlx_moeflux.experts.streaming.call import Call
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.experts.telemetry.events import Chosen, Event, EventHook, Guess, Resize
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, add_outputs
from mlx_moeflux.kernels.moe.expert_mix import ABSENT

# What one collective sends at most; a slow link takes a second or two for it.
EXCHANGE_BYTES = 64 << 20
# Calls of more tokens are prompts, whose sums are reduced before they are sent.
EXACT_TOKENS = 64


class DistributedStore(ExpertStore):
    """A store whose experts are on several ranks. See
    :class:`~mlx_moeflux.experts.store.ExpertStore`.

    local: The store of this rank's experts, which are numbered from 0 in ascending ids; closed with
    this one. exact_prompts: Calls of more than EXACT_TOKENS tokens have the bits of one process
    too, and send K times as much. Otherwise each rank adds its own experts first, which changes the
    order of K float32 additions. one_kind: All ranks have the same kind of device, so that they
    choose the same experts; otherwise rank 0's choice is sent to the others.

    Ids, slots and events of this rank's experts have the numbers of the whole model. Slots, bytes
    and statistics are those of this rank.

    Every rank makes the same calls. After an error in one of them, the others end.

    Evaluates: on the CPU every call. Elsewhere nothing while the layer holds every expert of this
    rank and there is no listener, else what the local store does.
    """

    ranks: Ranks

    def __init__(
        self,
        local: StreamedStore | ResidentStore,
        ranks: Ranks,
        places: Places,
        *,
        exact_prompts: bool = False,
        one_kind: bool = True,
    ):
        self.local, self.ranks, self.places = local, ranks, places
        self.exact_prompts, self.one_kind = exact_prompts, one_kind
        self.layers, self.num_experts = tuple(local.layers), places.num_experts
        assert local.direct is not None, "experts() of both classes are their own"
        self._direct, self.compute = local.direct, local.expert_compute
        self.count_held = places.counts[ranks.rank]
        self.by_pair = functools.partial(by_pair, absent=self.count_held)
        self._events: EventHook | None = None
        # Expert -> its number in this rank's, that of its experts for those of others.
        self.local_ids = {i: places.local_ids(i, ranks.rank) for i in self.layers}
        # The same on the device.
        self._tables = {i: indices(table) for i, table in self.local_ids.items()}
        mx.eval(self._tables)
        self._held = {i: places.held(i, ranks.rank) for i in self.layers}
        if local.streaming is not None:
            self.streaming = cast(Streaming, RankSlots(local.streaming, self._held))
        self._turns = RankSteps(self, local) if isinstance(local, StreamedStore) else None
        self.rest, self.block_bytes = local.rest, local.block_bytes

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
            DistributedError: A collective failed.
        """
        check_call(layer, x, ids, weights)
        with self.ranks.reporting():
            if not self.one_kind:
                ids, weights = self.ranks.from_first(ids, weights)
            if self._events is not None:
                tokens = self.local.stats().layers[layer].tokens
                host = self.read(layer, ids, weights)
                self._events(Chosen(layer, tokens, host, np.array(weights)))
            pairs = self.exact_prompts or len(ids) <= EXACT_TOKENS
            complete = self._direct.whole(layer)
            if complete is not None:
                self._direct.count(len(ids), layer)
                self.ranks.hash_choice(ids, begins=layer == self.layers[0])
                call = x, self._tables[layer][ids], weights, complete[0]
                own = self.from_bank(*call, table=complete[1], pairs=pairs)
            elif self._turns is not None:
                with self._turns.exclusive():
                    call = self._turns.begin_load(layer, ids, weights, ahead=ahead)
                    own = self._turns.compute(call, x, weights, pairs=pairs)
            else:
                own = self.local.experts(layer, x, ids, weights)  # raises: it is closed
            return self.exchanged(own, ids.shape[1] if pairs else 1)

    def exchanged(self, own: mx.array, K: int) -> mx.array:
        """Return the sum ``[N, C]`` over the ranks and K of `own` ``[N * K, C]``, float32."""
        own = own.reshape(-1, K, own.shape[1])
        step, totals = max(1, EXCHANGE_BYTES // own[0].nbytes), []
        for start in range(0, len(own), step):
            totals.append(add_outputs(self.ranks.sum(own[start : start + step])))
        return totals[0] if len(totals) == 1 else mx.concatenate(totals)

    def from_bank(self, *call: Any, table: mx.array | None = None, pairs: bool = True) -> mx.array:
        """Return the outputs of all pairs ``[N * K, C]``, or this rank's sums ``[N, C]``; lazy.
        call, table: x, ids, weights and bank, and the table, of
        :func:`~mlx_moeflux.experts.compute.from_whole_bank`, in this rank's numbers."""
        given: Any = (*call, self.compute)
        given = cast(Any, self.by_pair(*given) if pairs else given)
        return from_whole_bank(*given, table=table)

    def read(self, layer: int, ids: mx.array, *others: mx.array) -> np.ndarray:
        """Return the ids on the host, in one evaluation with `others`."""
        self.ranks.read(ids, *others, brief=len(ids) <= EXACT_TOKENS)
        host = np.array(ids)
        check_ids(layer, host, self.num_experts)
        return host

    @property
    def direct(self) -> DistributedStore:
        """This store, whose calls a trace may stand for."""
        return self

    @property
    def stays_on_device(self) -> bool:
        """See :attr:`~mlx_moeflux.experts.store.Direct.stays_on_device`."""
        return self._events is None and self._direct.stays_on_device

    @property
    def generation(self) -> int:
        """See :attr:`~mlx_moeflux.experts.store.Direct.generation`."""
        return self._direct.generation

    def whole(self, layer: int) -> tuple[ExpertBank, mx.array] | None:
        """See :meth:`~mlx_moeflux.experts.store.Direct.whole`."""
        found = self._direct.whole(layer) if self.one_kind and self._events is None else None
        return (found[0], self._tables[layer]) if found and found[1] is None else None

    def exchange(self, layer: int, ids: mx.array, own: mx.array) -> mx.array:
        """See :attr:`~mlx_moeflux.experts.store.Direct.exchange`."""
        with self.ranks.reporting():
            self.ranks.hash_choice(ids, begins=layer == self.layers[0])
            return self.ranks.sum(own)

    def count(self, tokens: int, layer: int | None = None) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Direct.count`."""
        self._direct.count(tokens, layer)

    @property
    def steps(self) -> Steps | None:
        """The :class:`RankSteps` of a store that reads experts from disk. None for a resident one,
        and if rank 0 sends its choices."""
        return cast(Steps, self._turns) if self.one_kind and self._turns else None

    def stats(self) -> ExpertStats:
        """See :meth:`ExpertStore.stats`."""
        return self.local.stats()

    @property
    def events(self) -> EventHook | None:
        """The listener of events; those of other ranks' experts are theirs."""
        return self._events

    @events.setter
    def events(self, listener: EventHook | None) -> None:
        self._events = listener
        if self.streaming is not None:
            self.local.events = None if listener is None else self._pass_on

    def _pass_on(self, event: Event) -> None:
        """Pass an event of the local store on, with the model's numbers."""
        if self._events is None or isinstance(event, Chosen):
            return
        held = self._held[event.layer]
        if isinstance(event, Guess):
            event = event._replace(experts=tuple(held[e] for e in event.experts))
        elif not isinstance(event, Resize):
            event = event._replace(expert=held[event.expert])
        self._events(event)

    @property
    def looks_ahead(self) -> bool:
        """True if the local store takes a guess."""
        return self.local.looks_ahead

    def close(self) -> None:
        """See :meth:`ExpertStore.close`; this rank takes part in no more calls."""
        self.ranks.close()
        self.local.close()


class RankSteps:
    """The steps of a call of a store with slots, see :class:`~mlx_moeflux.experts.store.Steps`: in
    each the host has a turn. What is not here, `local` does.

    A call of `local` has its own experts alone, so that policies know no others; its ids on the
    host are all ``[N, K]`` in this rank's numbers.
    """

    def __init__(self, store: DistributedStore, local: StreamedStore):
        self._store, self._local = store, local

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the store for a whole step; the others are notified of an error."""
        with self._store.ranks.reporting(), self._local.exclusive():
            yield

    def partial(self) -> tuple[int, ...]:
        """Return all layers, whose ids are hashed on the host, unless all hold every expert."""
        return self._store.layers if self._local.partial() else ()

    def begin_load(
        self, layer: int, ids: mx.array, weights: mx.array, *, ahead: mx.array | None = None
    ) -> Call:
        """Take the ids of a call and begin to read missing experts of this rank."""
        store, options = self._store, dict[str, Any]()
        others = () if ahead is None else (ahead,)
        host = store.read(layer, ids, *others)
        store.ranks.hash_choice(host, begins=layer == store.layers[0])
        mine = store.local_ids[layer][host]
        if ahead is not None and self._local.looks_ahead:
            following = store.layers[(store.layers.index(layer) + 1) % len(store.layers)]
            options["ahead"] = store.local_ids[following][np.array(ahead)]
        # Each row ascends, and other ranks' experts, which are padding, come last.
        own = np.sort(mine, axis=1)[:, : min(mine.shape[1], store.count_held)]
        call = self._local.begin_load(layer, own, weights, **options)
        call.host = mine
        return call

    def slots_of(self, call: Call) -> mx.array:
        """Return the slots ``[N, K]``, ABSENT for experts of other ranks."""
        assert call.host is not None, "begin_load set it"
        slot_of, rows = call.state.slots_soon(), call.host.tolist()
        return self._local.upload([[slot_of.get(e, ABSENT) for e in row] for row in rows])

    def compute_slots(
        self, x: mx.array, slots: mx.array, weights: mx.array, bank: ExpertBank
    ) -> mx.array:
        """Compute and exchange a short call from the slots of :meth:`slots_of`; lazy."""
        mix = self._store.compute.mixer(x, weights, bank)
        if mix is not None and mix.exchanges is not None and mix.exchanges(bank):
            return mix.function(x, slots, weights, bank, exchange=self._store.ranks.sum)
        return self._store.exchanged(self._store.from_bank(x, slots, weights, bank), slots.shape[1])

    def compute(self, call: Call, x: mx.array, weights: mx.array, *, pairs: bool) -> mx.array:
        """Make the other steps, but the exchange, of a call of any length. Return the outputs of
        its `pairs`, or this rank's sums."""
        store, local, by = self._store, self._local, None
        if pairs:
            assert call.host is not None, "begin_load set it"
            whole = x, indices(call.host), weights, local.bank(call.state.layer), store.compute
            x, flat, weights, _, by = store.by_pair(*whole)
            call.host = np.array(flat)
        local.wait(call)
        y = local.compute(call, x, weights, by=by)
        local.release_after(call, y)
        return y


class RankSlots:
    """The slots of this rank's experts, in the numbers of the whole model: all that `local` is and
    offers, see :class:`~mlx_moeflux.experts.store.Streaming`, but for what is here.

    local: Those in this rank's numbers. held: MoE layer id -> this rank's experts, ascending.
    ways: None: kernels do not wait for experts of several ranks. timed_budget: None: ranks wait for
    one another, so that none can time its own budget.
    """

    ways: None = None
    timed_budget: None = None

    def __init__(self, local: Streaming, held: Mapping[int, Sequence[int]]):
        self.local, self._held = local, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def residents(self, layer: int) -> dict[int, int]:
        """See :meth:`~mlx_moeflux.experts.store.Streaming.residents`."""
        held = self._held[layer]
        return {held[e]: slot for e, slot in self.local.residents(layer).items()}

    def read_missing(
        self, layer: int, experts: Iterable[int], *, protected: Collection[int]
    ) -> bool | None:
        """See :meth:`~mlx_moeflux.experts.store.Streaming.read_missing`; experts of other ranks are
        left to them."""
        if layer not in self._held:
            return None
        local = {e: i for i, e in enumerate(self._held[layer])}
        own = [local[e] for e in experts if e in local]
        kept = [local[e] for e in protected if e in local]
        return self.local.read_missing(layer, own, protected=kept)
