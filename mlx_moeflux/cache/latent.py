"""Rows of latent attention, of one sequence or a batch."""

from __future__ import annotations

import mlx.core as mx

from mlx_moeflux.cache.kv import AttentionCache, TracedAttention
from mlx_moeflux.cache.traced import ChosenPositions
from mlx_moeflux.state_arrays import INDEXED_LATENT, LATENT


class LatentCache(AttentionCache):
    """Cache of latent attention: ``keys`` are the latents [B, 1, capacity, R] and ``values`` the
    rotary keys [B, 1, capacity, Dr] that all heads share."""

    declared, kind = LATENT, LATENT.name
    chosen: ChosenPositions | None = None
    """What the layers of a sequence's state share in a call; a model with such layers sets it."""


class TracedIndexedLatent(TracedAttention):
    """Traced form of :class:`IndexedLatentCache`."""

    def index_rows(self) -> tuple[mx.array, mx.array]:
        """Return the buffer of index keys and its tail, the new row included."""
        return self._buffers[2], self._tail[2]


class IndexedLatentCache(LatentCache):
    """Cache of latent attention with an indexer: ``index_keys`` [B, 1, capacity, Di] beside
    latents and rotary keys, rotated."""

    declared, kind = INDEXED_LATENT, INDEXED_LATENT.name
    form = TracedIndexedLatent

    @property
    def takes_steps(self) -> bool:
        """Return True unless rows are quantised."""
        return not self.packs

    def index_rows(self) -> tuple[mx.array, None]:
        """Return the whole buffer of index keys; the tail's rows are in it."""
        return self.buffers()[2], None
