"""What a model remembers of the sequences it reads, one entry per layer.

``KVCache`` (attention), ``LatentCache`` (latent attention) and ``RecurrentCache`` (gated
delta net) serve one sequence and batches alike; the ``clock`` module counts columns and
keeps padding apart from tokens. The methods are the ones that mlx-lm's generators call, so
they run on our models unchanged, yet nothing here imports mlx_lm. All entries of a model
together are a ``SequenceState``, which can be kept, rewound and saved.
"""

from mlx_moeflux.cache.base import BaseCache, Mark, check_positions, transaction
from mlx_moeflux.cache.delta import RecurrentCache
from mlx_moeflux.cache.kv import AttentionCache, KVCache, LatentCache
from mlx_moeflux.cache.state.sequence import SequenceState, Snapshot
from mlx_moeflux.cache.state.spec import EntrySpec, StateSpec

__all__ = [
    "AttentionCache",
    "BaseCache",
    "EntrySpec",
    "KVCache",
    "LatentCache",
    "Mark",
    "RecurrentCache",
    "SequenceState",
    "Snapshot",
    "StateSpec",
    "check_positions",
    "transaction",
]
