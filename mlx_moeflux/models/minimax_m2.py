"""MiniMax-M2: attention with norms over all heads and a partial rotary embedding, and a MoE block
with a sigmoid router in every layer.

Source: transformers 5.23 `models/minimax_m2/modeling_minimax_m2.py`, which is authoritative.
Checkpoints: Hugging Face originals in FP8, mlx-lm and mlx-community: MiniMax-M2, M2.1, M2.5, M2.7.
"""

from __future__ import annotations

from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.attention_decoder import AttentionDecoder
from mlx_moeflux.models.minimax_m2_config import Config
from mlx_moeflux.models.moe import GroupedRouter, Router, SigmoidMoeBlock, SparseMoeBlock


class Model(AttentionDecoder):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "minimax_m2"

    @classmethod
    def make_router(
        cls, config: Config, kernels: Kernels, *, experts_per_token: int | None = None
    ) -> Router:
        """See :meth:`DecoderModel.make_router`."""
        return GroupedRouter(experts_per_token or config.num_experts_per_tok, kernels=kernels)

    @classmethod
    def mlx_lm_name(cls, name: str) -> str:
        """See :meth:`DecoderModel.mlx_lm_name`."""
        return name.replace(".mlp.", ".block_sparse_moe.")

    def make_attention(self, layer: int) -> Attention:
        """See :meth:`AttentionDecoder.make_attention`."""
        return Attention(self.config, self._kernels, bias=False, qk_norm="all heads")

    def make_moe(self, layer: int) -> SparseMoeBlock:
        """See :meth:`AttentionDecoder.make_moe`."""
        return self.moe_block(layer, SigmoidMoeBlock, precise_gate=False)

    @staticmethod
    def keeps_float32(name: str) -> bool:
        """See :meth:`DecoderModel.keeps_float32`."""
        return name.endswith(".e_score_correction_bias")
