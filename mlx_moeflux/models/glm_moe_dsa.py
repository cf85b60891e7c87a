"""GLM-5: DeepSeek-V3.2's layers with other widths; from GLM-5.2 on, layers share an indexer.

Source: transformers 5.24 `models/glm_moe_dsa/modeling_glm_moe_dsa.py`, which is authoritative;
mlx-lm 0.32.2 gives every layer an indexer.
Checkpoints: GLM-5, 5.1, 5.2 and 5.3 in bf16 or FP8, mlx-community's 4-bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache.traced import ChosenPositions
from mlx_moeflux.models import deepseek_v32
from mlx_moeflux.models.glm_moe_dsa_config import Config
from mlx_moeflux.models.indexed_mla import IndexedLatentAttention


class Model(deepseek_v32.Model):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "glm_moe_dsa"

    @classmethod
    def lacking_in_mlx_lm(cls, config: Config) -> str | None:
        """See :meth:`DecoderModel.lacking_in_mlx_lm`."""
        shared = "layers that share an indexer" if config.shares_indexers else None
        return shared or super().lacking_in_mlx_lm(config)

    @classmethod
    def mlx_lm_keys(cls, config: Config) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_keys`."""
        return super().mlx_lm_keys(config) | config.fixed()

    def make_attention(self, layer: int) -> IndexedLatentAttention:
        """See :meth:`deepseek_v3.Model.make_attention`."""
        config = self.config
        last = layer + 1 == config.num_hidden_layers or config.has_indexer(layer + 1)
        return IndexedLatentAttention(
            config, self._kernels, indexed=config.has_indexer(layer), shares=not last
        )

    def feed(self, tokens: Sequence[mx.array], states: Sequence[Sequence[Any]]) -> None:
        """See :meth:`DecoderModel.feed`; gives the layers of a state a place for what they
        share."""
        for state in states:
            chosen = ChosenPositions()
            for entry in state:
                entry.chosen = chosen

    def activation_bytes(self, tokens: int) -> int:
        """See :meth:`StreamingModel.activation_bytes`; adds what layers share."""
        config = self.config
        shared = tokens * config.index_topk if tokens > config.index_topk else 0
        return super().activation_bytes(tokens) + 4 * shared * config.shares_indexers
