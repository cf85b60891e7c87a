"""Decoder of grouped-query attention in every layer, then a MoE block or a dense MLP."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.layers import DecoderLayer, DenseMlp
from mlx_moeflux.models.moe import SparseMoeBlock
from mlx_moeflux.models.rope import stretched


class AttentionDecoder(DecoderModel):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``.

    A subclass is one architecture: it names its ``Config`` and defines what differs of
    :meth:`make_attention`, :meth:`make_moe` and :meth:`DecoderModel.make_router`. The config is an
    :class:`~mlx_moeflux.models.config.AttentionConfig` with ``num_experts``,
    ``intermediate_size`` and ``is_sparse(layer)``.
    """

    @classmethod
    def mlx_lm_keys(cls, config: Any) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_keys`."""
        return stretched(asdict(config), config.yarn)

    def make_layer(self, layer: int) -> DecoderLayer:
        """See :meth:`DecoderModel.make_layer`."""
        config = self.config
        if config.is_sparse(layer):
            mlp = self.make_moe(layer)
        else:
            mlp = DenseMlp(config.hidden_size, config.intermediate_size, self._kernels)
        return DecoderLayer(config, mixer=("self_attn", self.make_attention(layer)), mlp=mlp)

    def make_attention(self, layer: int) -> Attention:
        """Build the attention of layer number `layer`."""
        return Attention(self.config, self._kernels)

    def make_moe(self, layer: int) -> SparseMoeBlock:
        """Build the MoE block of layer number `layer`."""
        return self.moe_block(layer)

    def activation_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that a call on `tokens` tokens of an empty state
        allocates.

        It adds residual stream and shared experts of all tokens, attention or dense MLP for one
        chunk (with attention scores, which stock MLX materialises on the CPU), and the experts'
        scratch.
        """
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        shared = 3 * tokens * config.shared_intermediate_size
        residual = 10 * tokens * config.hidden_size + shared
        heads = config.num_attention_heads
        attention = chunk * heads * (8 * config.head_dim + 3 * tokens)
        dense = 3 * chunk * config.intermediate_size
        return 4 * (residual + max(attention, dense)) + self.runtime.expert_scratch_bytes()
