"""Laguna: attention with a softplus gate of each head's output, three of four layers in a window
and with more heads and a rope of their own, and MoE blocks with a sigmoid router after a dense
layer.

Source: transformers 5.24 `models/laguna/modeling_laguna.py`, which is authoritative.
Checkpoints: Hugging Face originals, mlx-lm and mlx-community: Laguna-XS.2, Laguna-S-2.1.
"""

from __future__ import annotations

import re
from typing import Any

from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.attention_decoder import AttentionDecoder
from mlx_moeflux.models.laguna_config import Config
from mlx_moeflux.models.moe import GroupedRouter, Router, SigmoidMoeBlock, SparseMoeBlock


class Model(AttentionDecoder):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "laguna"

    @classmethod
    def make_router(
        cls, config: Config, kernels: Kernels, *, experts_per_token: int | None = None
    ) -> Router:
        """See :meth:`DecoderModel.make_router`."""
        k = experts_per_token or config.num_experts_per_tok
        return GroupedRouter(k, scale=config.moe_routed_scaling_factor, kernels=kernels)

    @classmethod
    def mlx_lm_name(cls, name: str) -> str:
        """See :meth:`DecoderModel.mlx_lm_name`."""
        for own, theirs in _MLX_LM_NAMES:
            name = re.sub(own, theirs, name)
        return name

    @classmethod
    def mlx_lm_keys(cls, config: Config) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_keys`."""
        return config.published()

    def make_attention(self, layer: int) -> Attention:
        """See :meth:`AttentionDecoder.make_attention`."""
        config, window = self.config.of_layer(layer), self.config.window(layer)
        return Attention(config, self._kernels, window=window, head_gate=True)

    def make_moe(self, layer: int) -> SparseMoeBlock:
        """See :meth:`AttentionDecoder.make_moe`."""
        shared = self.config.shared_intermediate_size
        return self.moe_block(
            layer, SigmoidMoeBlock, shared_intermediate_size=shared, precise_gate=False
        )

    @staticmethod
    def keeps_float32(name: str) -> bool:
        """See :meth:`DecoderModel.keeps_float32`."""
        return name.endswith(".e_score_correction_bias")

    def activation_bytes(self, tokens: int) -> int:
        """See :meth:`AttentionDecoder.activation_bytes`; adds the heads that windows have more."""
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        more = max(config.window_attention_heads - config.num_attention_heads, 0)
        rows = 8 * config.head_dim + 3 * tokens
        return super().activation_bytes(tokens) + 4 * chunk * more * rows


# Pattern of a name of ours -> mlx-lm's.
_MLX_LM_NAMES = (
    (r"\.mlp\.gate(?=\.|$)", ".mlp.gate.proj"),
    (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.shared_experts(?=\.|$)", ".mlp.shared_expert"),
)
