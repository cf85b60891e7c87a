"""All experts in memory, as arrays of the model: no reads, no host, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.experts.compute import ExpertFFN, ExpertMix, Form, block_bytes, from_whole_bank
from mlx_moeflux.experts.events import EventHook
from mlx_moeflux.experts.listening import Listened
from mlx_moeflux.experts.stats import ExpertStats
from mlx_moeflux.experts.store import check_call
from mlx_moeflux.kernels.expert_ffn import ExpertBank, expert_ffn
from mlx_moeflux.kernels.expert_mix import expert_mix


class ResidentStore(Listened):
    """The store of a model that fits. See :class:`~mlx_moeflux.experts.store.ExpertStore`.

    banks: MoE layer id -> that layer's experts, expert e in slot e; asked on every call, because
        training replaces parameter arrays.
    events: Listener that is told what the router chose.
    ffn, mix: The operations that compute experts. scratch_bytes: What one step of a long call may
        allocate besides its result; None is what suits the device. block_bytes: MoE layer id ->
        bytes of one expert on disk, for traces.

    Evaluates: nothing, unless there is a listener and the call is not traced. Gradients flow to x,
    weights and the arrays of the banks.
    """

    def __init__(
        self,
        banks: Callable[[int], ExpertBank],
        *,
        layers: Iterable[int],
        num_experts: int,
        events: EventHook | None = None,
        ffn: ExpertFFN = expert_ffn,
        mix: ExpertMix = expert_mix,
        scratch_bytes: int | None = None,
        block_bytes: Mapping[int, int] | None = None,
    ):
        super().__init__(streamed=False)
        self.layers, self.num_experts = tuple(sorted(layers)), num_experts
        self._banks = banks
        self._form = Form(ffn=ffn, mix=mix, scratch_bytes=scratch_bytes)
        self._stats, self._block_bytes = ExpertStats(self.layers), block_bytes
        self.events = events

    @property
    def block_bytes(self) -> dict[int, int]:
        """MoE layer id -> bytes of one expert on disk, or here if no disk is known."""
        if self._block_bytes is not None:
            return dict(self._block_bytes)
        return {layer: block_bytes(self._banks(layer)) for layer in self.layers}

    def experts(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """See :meth:`ExpertStore.experts`."""
        check_call(layer, x, ids, weights)
        if self._banks is None:
            raise InputError("this expert store is closed; load the model again.")
        bank = self._banks(layer)
        if bank.slots != self.num_experts:
            raise ShapeError(
                f"layer {layer} holds {bank.slots} experts, the model has {self.num_experts}."
            )
        stats = self._stats.layers[layer]
        self.called(ids, weights)
        if not self.quiet:
            self.tell_chosen(layer, stats.tokens, np.array(ids), weights)
        stats.tokens += x.shape[0]
        return from_whole_bank(x, ids, weights, bank, self._form)

    def whole(self, layer: int) -> tuple[ExpertBank, None] | None:
        """See :meth:`StreamedStore.whole`."""
        if self._banks is None or not self.quiet:
            return None
        bank = self._banks(layer)
        return (bank, None) if bank.slots == self.num_experts else None

    @property
    def stays_on_device(self) -> bool:
        """Whether calls are lazy and nobody wants to be told of them at once."""
        return not self.told_at_once

    def count(self, tokens: int, layer: int | None = None) -> None:
        """Account for a call of a layer, or of all, that did not come through :meth:`experts`."""
        for each in self.layers if layer is None else (layer,):
            self._stats.layers[each].tokens += tokens

    def seen(self) -> tuple[int, ...]:
        """See :meth:`StreamedStore.seen`."""
        return tuple(self._stats.layers[layer].tokens for layer in self.layers)

    def stats(self) -> ExpertStats:
        """See :meth:`ExpertStore.stats`; only tokens are counted."""
        if self._stats.calls is not None:
            self.catch_up()
        return self._stats

    def close(self) -> None:
        """See :meth:`ExpertStore.close`."""
        self._banks = None
        self.catch_up()
