"""Qwen3-MoE: attention with query and key norms in every layer, a MoE block in most.

Source: transformers 5.23 `models/qwen3_moe/modeling_qwen3_moe.py`, which is authoritative; mlx-lm
0.32.2 ignores the sliding window and computes full attention.
Checkpoints: Hugging Face originals, mlx-lm and mlx-community: 30B-A3B, 235B-A22B, Coder.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlx_moeflux.cache import KVCache, SequenceState
from mlx_moeflux.experts.compute import compute_scratch_bytes
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.decoder import DecoderLayer, DecoderModel
from mlx_moeflux.models.layers import DenseMlp
from mlx_moeflux.models.moe import SparseMoeBlock
from mlx_moeflux.models.qwen3_moe_config import Config
from mlx_moeflux.models.rope import stretched


class Model(DecoderModel):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "qwen3_moe"

    @classmethod
    def mlx_lm_keys(cls, config: Config) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_keys`."""
        return stretched(config, asdict(config))

    def make_layer(self, layer: int) -> DecoderLayer:
        """Build a layer of attention, then MoE block or dense MLP."""
        config, kernels = self.config, self._kernels
        if config.is_sparse(layer):
            mlp = SparseMoeBlock(
                layer=layer,
                hidden_size=config.hidden_size,
                num_experts=config.num_experts,
                router=self._router,
                kernels=kernels,
            )
        else:
            mlp = DenseMlp(config.hidden_size, config.intermediate_size, kernels)
        attention = Attention(config, kernels, window=config.window)
        return DecoderLayer(config, mixer=("self_attn", attention), mlp=mlp)

    def make_cache(self) -> SequenceState:
        """Return an empty state: one entry per layer."""
        return self.new_state(KVCache() for _ in self.layers)

    def activation_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that a call on `tokens` tokens of an empty state
        allocates.

        It adds residual stream, attention or dense MLP for one chunk (with attention scores, which
        stock MLX materialises on the CPU), and the experts' scratch.
        """
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        residual = 10 * tokens * config.hidden_size
        heads = config.num_attention_heads
        attention = chunk * heads * (8 * config.head_dim + 3 * tokens)
        dense = 3 * chunk * config.intermediate_size
        return 4 * (residual + max(attention, dense)) + compute_scratch_bytes()
