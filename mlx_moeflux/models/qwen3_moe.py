"""Qwen3-MoE: attention with query and key norms in every layer, a MoE block in most.

Source: transformers 5.23 `models/qwen3_moe/modeling_qwen3_moe.py`, which is authoritative; mlx-lm
0.32.2 ignores the sliding window and computes full attention.
Checkpoints: Hugging Face originals, mlx-lm and mlx-community: 30B-A3B, 235B-A22B, Coder.
"""

from __future__ import annotations

from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.attention_decoder import AttentionDecoder
from mlx_moeflux.models.qwen3_moe_config import Config


class Model(AttentionDecoder):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "qwen3_moe"

    def make_attention(self, layer: int) -> Attention:
        """See :meth:`AttentionDecoder.make_attention`."""
        return Attention(
            self.config,
            self._kernels,
            window=self.config.window,
            bias=self.config.attention_bias,
        )
