"""What a model remembers of the sequences it reads, one entry per layer.

``KVCache`` (attention), ``LatentCache`` (latent attention) and ``RecurrentCache`` (gated
delta net) serve one sequence and batches alike; the ``clock`` module counts columns and
keeps padding apart from tokens. The methods are the ones that mlx-lm's generators call, so
they run on our models unchanged, yet nothing here imports mlx_lm. All entries of a model
together are a ``SequenceState``, which can be kept, rewound and saved.
"""

from mlx_moeflux.cache.attention import AttentionCache, KVCache, LatentCache
from mlx_moeflux.cache.clock import Mark, SequenceClock, check_positions, transaction
from mlx_moeflux.cache.portable import StateSpec
from mlx_moeflux.cache.recurrent import RecurrentCache
from mlx_moeflux.cache.sequence import SequenceState, Snapshot

__all__ = [
    "AttentionCache",
    "KVCache",
    "LatentCache",
    "Mark",
    "RecurrentCache",
    "SequenceClock",
    "SequenceState",
    "Snapshot",
    "StateSpec",
    "check_positions",
    "transaction",
]
