"""Caches of a model's layers, one entry per layer, for one sequence or a batch.

``KVCache`` (attention), ``LatentCache`` (latent attention) and ``RecurrentCache`` (gated delta
net) derive from ``BaseCache``, which counts columns and padding. They have the methods that
mlx-lm's generators call, without importing mlx_lm. A ``SequenceState`` is the list of a model's
entries, with snapshots, checkpoints and files.
"""

from mlx_moeflux.cache.base import MOST_ROWS, BaseCache, Mark, check_positions, transaction
from mlx_moeflux.cache.delta import RecurrentCache
from mlx_moeflux.cache.indexed import IndexedCache
from mlx_moeflux.cache.kv import AttentionCache, KVCache
from mlx_moeflux.cache.latent import IndexedLatentCache, LatentCache
from mlx_moeflux.cache.ngrams import NgramCache
from mlx_moeflux.cache.rows import keep_rows
from mlx_moeflux.cache.state.sequence import SequenceState, Snapshot
from mlx_moeflux.cache.state.spec import StateSpec

_CLASSES = (
    *(AttentionCache, LatentCache, IndexedCache, IndexedLatentCache, RecurrentCache),
    NgramCache,
)
ENTRIES = {entry.declared.name: entry for entry in _CLASSES}
"""Class of the entries of each declared kind."""

__all__ = [
    "ENTRIES",
    "MOST_ROWS",
    "AttentionCache",
    "BaseCache",
    "IndexedCache",
    "IndexedLatentCache",
    "KVCache",
    "LatentCache",
    "Mark",
    "NgramCache",
    "RecurrentCache",
    "SequenceState",
    "Snapshot",
    "StateSpec",
    "check_positions",
    "keep_rows",
    "transaction",
]
