"""The store of a model whose experts are spread over ranks.

Every rank runs the trunk, holds the experts that the placement gives it in an ordinary store, and
computes the (token, expert) pairs of a call that need them. One collective brings the pairs
together: each rank fills its own of ``[N, K, C]`` float32 and -0.0 elsewhere, so the sum is exact
in any order. The routine of every store then weights and adds them in ascending ids, and the result
has the bits of one process.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.distributed.placement import Places
from mlx_moeflux.distributed.ranks import Ranks
from mlx_moeflux.errors import DistributedError
from mlx_moeflux.experts.compute import ExpertMix, check_call, check_ids, indices
from mlx_moeflux.experts.io.readers import Reader
from mlx_moeflux.experts.policies.eviction import Eviction
from mlx_moeflux.experts.policies.prefetch import Prefetch
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.experts.store import ExpertStore, Streaming
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.experts.telemetry.events import Chosen, Event, EventHook, Guess, Resize
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, accumulate_experts
from mlx_moeflux.kernels.operation import Implementation
from mlx_moeflux.kernels.runtime import device

# What one collective sends at most; a slow link takes a second or two for it.
EXCHANGE_BYTES = 64 << 20
# Calls of more tokens are prompts, whose sums are reduced before they are sent.
EXACT_TOKENS = 64


def own_columns(local: np.ndarray, count: int) -> np.ndarray:
    """Return an order of the columns of `local`, ``[N, min(K, count)]``, in which each row ascends
    and other ranks' experts, which are padding, come last.

    local: Ids ``[N, K]`` in a rank's numbers, see :meth:`Places.local_ids`. count: Its experts.
    """
    return np.argsort(local, axis=1, kind="stable")[:, : min(local.shape[1], count)]


class PairMix:
    """The operation ``expert_mix`` for calls that have one row for each pair. It takes the
    implementation that one process takes for the whole call.

    tokens, K: Of the whole call; set before each call of the local store.
    """

    def __init__(self, mix: ExpertMix):
        self._mix = mix
        self.tokens, self.K = 1, 1

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        return self._mix(*args, **options)

    def implementation(
        self, x: mx.array, slots: object, weights: mx.array, bank: ExpertBank
    ) -> Implementation:
        """Return the implementation for a call with K experts a token."""
        whole = mx.zeros((self.tokens, x.shape[1]), x.dtype)
        weights = mx.zeros((self.tokens, self.K), weights.dtype)
        return self._mix.implementation(whole, slots, weights, bank)


class DistributedStore(ExpertStore):
    """A store whose experts are on several ranks. See
    :class:`~mlx_moeflux.experts.store.ExpertStore`.

    local: The store of this rank's experts, which are numbered from 0 in ascending ids and computed
    by `mix`; closed with this one. exact_prompts: Calls of more than EXACT_TOKENS tokens have the
    bits of one process too, and send K times as much. Otherwise each rank adds its own experts
    first, which changes the order of K float32 additions. one_kind: All ranks have the same kind of
    device, so that they choose the same experts; otherwise rank 0's choice is sent to the others.

    Ids, slots and events of this rank's experts have the numbers of the whole model. Slots, bytes
    and statistics are those of this rank.

    Every rank makes the same calls. After an error in one of them, the others end.

    Evaluates: every call.
    """

    ranks: Ranks

    def __init__(
        self,
        local: StreamedStore | ResidentStore,
        ranks: Ranks,
        places: Places,
        *,
        mix: PairMix,
        exact_prompts: bool = False,
        one_kind: bool = True,
    ):
        self.local, self.ranks, self.places = local, ranks, places
        self.exact_prompts, self.one_kind = exact_prompts, one_kind
        self.layers, self.num_experts = tuple(local.layers), places.num_experts
        self._mix = mix
        self._events: EventHook | None = None
        self._local_ids = {i: places.local_ids(i, ranks.rank) for i in self.layers}
        self._held = {i: places.held(i, ranks.rank) for i in self.layers}
        self._tokens = dict.fromkeys(self.layers, 0)
        if local.streaming is not None:
            self.streaming = RankSlots(local.streaming, self._held)
        self.rest = local.rest

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
            DistributedError: The ranks have chosen different experts, or a collective failed.
        """
        check_call(layer, x, ids, weights)
        alone = nullcontext() if self.streaming is None else self.streaming.exclusive()
        with self.ranks.reporting(), alone:
            if not self.one_kind:
                ids, weights = self.ranks.from_first(ids, weights)
            mx.eval(x, ids, weights, ahead)
            host = np.array(ids)
            check_ids(layer, host, self.num_experts)
            if self._events is not None:
                self._events(Chosen(layer, self._tokens[layer], host, np.array(weights)))
            options: dict[str, Any] = {}
            if ahead is not None and self.local.looks_ahead:
                options["ahead"] = self._local_guess(layer, ahead)
            local = self._local_ids[layer][host]
            order = own_columns(local, self.places.counts[self.ranks.rank])
            own = np.take_along_axis(local, order, axis=1)
            self._mix.tokens, self._mix.K = host.shape
            if len(host) <= EXACT_TOKENS or self.exact_prompts:
                y = self._by_pair(layer, x, host, weights, own, order, options)
            else:
                chosen = mx.take_along_axis(weights, indices(order), axis=1)
                part = self.local.experts(layer, x, indices(own), chosen)
                y = self._exchanged(layer, host, part)
            self._tokens[layer] += len(host)
            return y

    def _by_pair(
        self,
        layer: int,
        x: mx.array,
        ids: np.ndarray,
        weights: mx.array,
        own: np.ndarray,
        order: np.ndarray,
        options: dict[str, Any],
    ) -> mx.array:
        """Return the sum ``[N, C]``; outputs of pairs are exchanged. own: This rank's experts in
        its numbers, ``[N, R]``; order: Their columns in `ids`."""
        (N, K), C = ids.shape, x.shape[1]
        token, column = np.nonzero(own < self.places.counts[self.ranks.rank])
        pairs = self._pairs(layer, x, own, token, column, options)  # [P, C]
        grid = np.full((N, K), len(token))
        grid[token, order[token, column]] = np.arange(len(token))
        pairs = mx.concatenate([pairs, mx.full((1, C), -0.0, mx.float32)])
        if (ids == self.num_experts).any():
            weights = mx.where(indices(ids) < self.num_experts, weights, 0.0)
        step = max(1, EXCHANGE_BYTES // (4 * K * C))
        totals = []
        for start in range(0, N, step):
            some = slice(start, start + step)
            whole = self._exchanged(layer, ids, pairs[indices(grid[some])])  # [n, K, C]
            totals.append(accumulate_experts(whole, weights[some]))
        y = totals[0] if len(totals) == 1 else mx.concatenate(totals)
        mx.eval(y)
        return y

    def _pairs(
        self,
        layer: int,
        x: mx.array,
        own: np.ndarray,
        token: np.ndarray,
        column: np.ndarray,
        options: dict[str, Any],
    ) -> mx.array:
        """Return the outputs ``[P, C]`` float32 of the pairs at `token` and `column` of `own`.

        Policies see a call of N tokens; it is computed as one of P tokens with one expert each.
        Kernels split the work on an expert by the columns that they are given, so there are K.
        """
        local, width = self.local, 1 if device.kind() == "cpu" else self._mix.K
        flat = np.full((len(token), width), self.places.counts[self.ranks.rank], np.uint32)
        flat[:, 0] = own[token, column]
        rows, ones = x[indices(token)], mx.ones(flat.shape, mx.float32)
        y = mx.zeros((0, x.shape[1]), mx.float32)
        if not isinstance(local, StreamedStore):
            local.count(len(own) - len(token), layer)
            return local.experts(layer, rows, mx.array(flat), ones) if len(token) else y
        call = local.begin_load(layer, indices(own), ones, **options)
        local.wait(call)
        if len(token):
            host = None if call.host is None else flat
            pairs = dataclasses.replace(call, ids=mx.array(flat), host=host)
            y = local.compute(pairs, rows, ones)
        local.release_after(call, y)
        return y

    def _exchanged(self, layer: int, ids: np.ndarray, part: mx.array) -> mx.array:
        """Return the sum of `part`, float32, over the ranks, some rows at a time. They send a hash
        of the ids with it."""
        step = max(1, EXCHANGE_BYTES // (part.nbytes // len(part)))
        if len(part) > step:
            parts = [part[i : i + step] for i in range(0, len(part), step)]
            return mx.concatenate([self._exchanged(layer, ids, one) for one in parts])
        ranks = self.ranks
        mark = zlib.crc32(ids.tobytes(), layer)
        marks = np.zeros((ranks.size, 2), np.float32)
        marks[ranks.rank] = mark >> 16, mark & 0xFFFF  # whole numbers that float32 has
        flat = mx.concatenate([part.reshape(-1), mx.array(marks.reshape(-1))])
        device.settle()
        total = ranks.sum(flat)
        found = np.array(total[part.size :]).reshape(marks.shape)
        for rank, theirs in enumerate(found):
            if not np.array_equal(theirs, found[0]):
                raise DistributedError(
                    f"rank {rank} chose other experts than rank 0 in layer {layer}; the ranks "
                    "differ in hardware, software or prompts: start all with the same."
                )
        return total[: part.size].reshape(part.shape)

    def _local_guess(self, layer: int, ahead: mx.array) -> mx.array:
        """Return the guess of the next layer's experts in this rank's numbers."""
        following = self.layers[(self.layers.index(layer) + 1) % len(self.layers)]
        return indices(self._local_ids[following][np.array(ahead)])

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
        self.local.events = None if listener is None else self._pass_on

    def _pass_on(self, event: Event) -> None:
        """Pass an event of the local store on, with the model's numbers."""
        listener = self._events
        if listener is None or isinstance(event, Chosen):
            return
        held = self._held[event.layer]
        if isinstance(event, Guess):
            listener(event._replace(experts=tuple(held[e] for e in event.experts)))
        elif isinstance(event, Resize):
            listener(event)
        else:
            listener(event._replace(expert=held[event.expert]))

    @property
    def looks_ahead(self) -> bool:
        """True if the local store takes a guess."""
        return self.local.looks_ahead

    @property
    def block_bytes(self) -> Mapping[int, int] | None:
        """MoE layer id -> bytes of one expert."""
        return self.local.block_bytes

    def close(self) -> None:
        """See :meth:`ExpertStore.close`; this rank takes part in no more calls."""
        self.ranks.close()
        self.local.close()


class RankSlots:
    """The slots of this rank's experts, in the numbers of the whole model. See
    :class:`~mlx_moeflux.experts.store.Streaming`.

    local: Those in this rank's numbers. held: MoE layer id -> this rank's experts, ascending.
    """

    def __init__(self, local: Streaming, held: Mapping[int, Sequence[int]]):
        self.local, self._held = local, held
        self.exclusive, self.start_eval = local.exclusive, local.start_eval
        self.resize, self.resize_all = local.resize, local.resize_all

    @property
    def eviction(self) -> Eviction:
        """This rank's policy."""
        return self.local.eviction

    @property
    def prefetch(self) -> Prefetch | None:
        """This rank's prefetcher, or None."""
        return self.local.prefetch

    @property
    def ways(self) -> None:
        """None: kernels do not wait for experts of several ranks."""

    @property
    def timed_budget(self) -> None:
        """None: ranks wait for one another, so that none can time its own budget."""

    @property
    def reader(self) -> Reader:
        """This rank's reader."""
        return self.local.reader

    @property
    def slots(self) -> Mapping[int, int]:
        """MoE layer id -> slots of this rank."""
        return self.local.slots

    @property
    def most_slots(self) -> int:
        """Experts a layer of this rank."""
        return self.local.most_slots

    @property
    def bank_bytes(self) -> int:
        """Bytes of this rank's slots."""
        return self.local.bank_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that this rank's experts may take."""
        return self.local.nbytes

    @property
    def cold(self) -> bool:
        """True if no expert of this rank is in a slot and no layer was called."""
        return self.local.cold

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
