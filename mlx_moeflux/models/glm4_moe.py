"""GLM-4.5, 4.6 and 4.7: attention with a partial rotary embedding, dense layers first, then MoE
blocks with DeepSeek-V3's router and unscaled shared experts.

Source: transformers 5.23 `models/glm4_moe/modeling_glm4_moe.py`, which is authoritative.
Checkpoints: Hugging Face originals, mlx-lm and mlx-community: GLM-4.5, GLM-4.5-Air, 4.6, 4.7.
"""

from __future__ import annotations

from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.attention_decoder import AttentionDecoder
from mlx_moeflux.models.glm4_moe_config import Config
from mlx_moeflux.models.moe import (
    Router,
    SigmoidMoeBlock,
    SparseMoeBlock,
    grouped_router,
    routes_in_float32,
)


class Model(AttentionDecoder):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "glm4_moe"
    TIED_IN_MLX_LM = False
    keeps_float32 = staticmethod(routes_in_float32)

    @classmethod
    def make_router(
        cls, config: Config, kernels: Kernels, *, experts_per_token: int | None = None
    ) -> Router:
        """See :meth:`DecoderModel.make_router`."""
        return grouped_router(config, kernels, experts_per_token)

    def make_attention(self, layer: int) -> Attention:
        """See :meth:`AttentionDecoder.make_attention`."""
        norm = "head" if self.config.use_qk_norm else None
        bias = self.config.attention_bias
        return Attention(self.config, self._kernels, qk_norm=norm, bias=bias, output_bias=False)

    def make_moe(self, layer: int) -> SparseMoeBlock:
        """See :meth:`AttentionDecoder.make_moe`."""
        shared = self.config.shared_intermediate_size
        return self.moe_block(layer, SigmoidMoeBlock, shared_intermediate_size=shared)
