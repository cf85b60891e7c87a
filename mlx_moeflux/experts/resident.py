"""All experts in memory, as arrays of the model: no reads, no host, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.experts.compute import (
    REFERENCE_MIX,
    ExpertCompute,
    ExpertMix,
    block_bytes,
    check_call,
    from_whole_bank,
)
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.telemetry.events import Chosen, EventHook
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank


class Disk(Protocol):
    """The source from which a resident model reads its experts again."""

    def free(self) -> None:
        """Free their arrays."""
        ...

    def read(self) -> None:
        """Read all of them."""
        ...


class ResidentStore(ExpertStore):
    """The store of a model that fits. See :class:`~mlx_moeflux.experts.store.ExpertStore`.

    banks: MoE layer id -> that layer's experts, expert e in slot e; asked on every call, because
        training replaces parameter arrays.
    disk: Frees and reads the arrays of the banks, for :meth:`release`; None: they stay.
    events: Listener of the routers' choices, or None; may be replaced at any time.
    mix: The operation that computes experts. scratch_bytes: What one step of a long call may
        allocate besides its result; None is what suits the device. block_bytes: MoE layer id ->
        bytes of one expert on disk, for traces.

    Evaluates: nothing, unless there is a listener, or experts are in ggml's blocks: all other calls
    are lazy. Gradients flow to x, weights and the arrays of the banks.
    """

    # Without a listener. With one, models run no step from a trace.
    stays_on_device = True
    events: EventHook | None = None
    exchange: None = None

    def __init__(
        self,
        banks: Callable[[int], ExpertBank],
        *,
        layers: Iterable[int],
        num_experts: int,
        events: EventHook | None = None,
        mix: ExpertMix = REFERENCE_MIX,
        scratch_bytes: int | None = None,
        block_bytes: Mapping[int, int] | None = None,
        disk: Disk | None = None,
    ):
        self._disk, self._released, self.generation = disk, False, 0
        self.layers, self.num_experts = tuple(sorted(layers)), num_experts
        self._banks: Callable[[int], ExpertBank] | None = banks
        self.expert_compute = ExpertCompute(mix=mix, scratch_bytes=scratch_bytes)
        self._stats, self._block_bytes = ExpertStats(self.layers), block_bytes
        self.events = events

    @property
    def direct(self) -> ResidentStore | None:
        """This store, unless a subclass has :meth:`experts` of its own."""
        return self if self.computes_as(ResidentStore) else None

    @property
    def rest(self) -> ResidentStore | None:
        """This store, if a disk is known."""
        return None if self._disk is None else self

    @property
    def block_bytes(self) -> dict[int, int]:
        """MoE layer id -> bytes of one expert on disk, or here if no disk is known."""
        if self._block_bytes is not None:
            return dict(self._block_bytes)
        banks = self._open()
        return {layer: block_bytes(banks(layer)) for layer in self.layers}

    def _open(self) -> Callable[[int], ExpertBank]:
        if self._banks is None:
            raise InputError("this expert store is closed; load the model again.")
        self.restore()
        return self._banks

    def experts(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """See :meth:`ExpertStore.experts`."""
        check_call(layer, x, ids, weights)
        bank = self._open()(layer)
        if bank.slots != self.num_experts:
            raise ShapeError(
                f"layer {layer} holds {bank.slots} experts, the model has {self.num_experts}."
            )
        stats = self._stats.layers[layer]
        if (events := self.events) is not None:
            events(Chosen(layer, stats.tokens, np.array(ids), np.array(weights)))
        stats.tokens += x.shape[0]
        return from_whole_bank(x, ids, weights, bank, self.expert_compute)

    def whole(self, layer: int) -> tuple[ExpertBank, None] | None:
        """See :meth:`~mlx_moeflux.experts.store.Direct.whole`."""
        if self._banks is None or self.events is not None:
            return None
        bank = self._open()(layer)
        return (bank, None) if bank.slots == self.num_experts else None

    def count(self, tokens: int, layer: int | None = None) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Direct.count`."""
        for each in self.layers if layer is None else (layer,):
            self._stats.layers[each].tokens += tokens

    def stats(self) -> ExpertStats:
        """See :meth:`ExpertStore.stats`; only tokens are counted."""
        return self._stats

    def release(self) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Rest.release`. What is read again is what the
        checkpoint has: changes of the parameters are lost."""
        if self._disk is not None and self._banks is not None:
            self.generation += 1
            self._released = True
            self._disk.free()
            mx.clear_cache()

    def restore(self) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Rest.restore`."""
        if self._released and self._disk is not None:
            self._disk.read()
            self._released = False

    def close(self) -> None:
        """See :meth:`ExpertStore.close`."""
        self._banks = None
