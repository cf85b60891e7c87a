"""DeepSeek-V3.2: DeepSeek-V3 with latent attention to chosen positions.

Source: transformers 5.24 `models/deepseek_v32/modeling_deepseek_v32.py`, which is authoritative;
mlx-lm 0.32.2 differs: the norm of index keys has an epsilon of 1e-5, and equal scores are taken in
no order.
Checkpoints: DeepSeek-V3.2, V3.2-Exp and V3.2-Speciale in FP8 or bf16, mlx-community's 4-bit.
"""

from __future__ import annotations

from mlx_moeflux.kernels.mla.latent_attention import SCORES_AT_ONCE
from mlx_moeflux.models import deepseek_v3
from mlx_moeflux.models.deepseek_v32_config import Config
from mlx_moeflux.models.indexed_mla import IndexedLatentAttention


class Model(deepseek_v3.Model):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "deepseek_v32"

    def make_attention(self, layer: int) -> IndexedLatentAttention:
        """See :meth:`deepseek_v3.Model.make_attention`."""
        return IndexedLatentAttention(self.config, self._kernels)

    def activation_bytes(self, tokens: int) -> int:
        """See :meth:`StreamingModel.activation_bytes`; adds scores, index keys in float32, and what
        is chosen for a chunk: positions, and the mask made of them."""
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        if tokens <= config.index_topk:
            return super().activation_bytes(tokens)
        width = config.index_head_dim
        index = (chunk * (config.index_n_heads + 1) + 2 * tokens) * width
        scores = 12 * max(SCORES_AT_ONCE, tokens)
        chosen = 2 * chunk * config.index_topk + chunk * tokens // 2
        return super().activation_bytes(tokens) + 4 * (index + scores + chosen)
