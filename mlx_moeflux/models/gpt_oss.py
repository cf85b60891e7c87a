"""gpt-oss: attention with sinks, every other layer in a sliding window, and a MoE block with biases
and a clamped activation in every layer.

Source: transformers 5.23 `models/gpt_oss/modeling_gpt_oss.py`, which is authoritative. Its softmax
over the chosen logits is the softmax over all, divided by the sum of the chosen. mlx-lm 0.32.2
differs: it rounds YaRN's range although ``truncate`` is false.
Checkpoints: MXFP4 as published, mlx-lm and mlx-community: gpt-oss-20b, gpt-oss-120b.
"""

from __future__ import annotations

from typing import Any

from mlx_moeflux.kernels.moe.expert_ffn import Activation, ClampedSwiGLU
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.attention_decoder import AttentionDecoder
from mlx_moeflux.models.gpt_oss_config import Config
from mlx_moeflux.models.modules import Linear
from mlx_moeflux.models.moe import Router, SoftmaxRouter, SparseMoeBlock


class MoeBlock(SparseMoeBlock):
    """MoE block whose router has a bias.

    Additional parameters: ``gate.bias [E]``.
    """

    def __init__(self, **block: Any):
        super().__init__(**block)
        self.gate = Linear(block["hidden_size"], block["num_experts"], bias=True)


class Model(AttentionDecoder):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "gpt_oss"
    TIED_IN_MLX_LM = False

    @property
    def activation(self) -> Activation:
        """See :attr:`StreamingModel.activation`."""
        return ClampedSwiGLU(self.config.swiglu_alpha, self.config.swiglu_limit)

    @classmethod
    def make_router(
        cls, config: Config, kernels: Kernels, *, experts_per_token: int | None = None
    ) -> Router:
        """See :meth:`DecoderModel.make_router`."""
        return SoftmaxRouter(experts_per_token or config.num_experts_per_tok, True, kernels)

    @classmethod
    def mlx_lm_name(cls, name: str) -> str:
        """See :meth:`DecoderModel.mlx_lm_name`."""
        return name.replace(".mlp.gate", ".mlp.router").replace(".mlp.switch_mlp.", ".mlp.experts.")

    def make_attention(self, layer: int) -> Attention:
        """See :meth:`AttentionDecoder.make_attention`."""
        return Attention(
            self.config,
            self._kernels,
            window=self.config.window(layer),
            qk_norm=None,
            bias=self.config.attention_bias,
            sinks=True,
        )

    def make_moe(self, layer: int) -> MoeBlock:
        """See :meth:`AttentionDecoder.make_moe`."""
        return MoeBlock(
            layer=layer,
            hidden_size=self.config.hidden_size,
            num_experts=self.config.num_experts,
            router=self._router,
            kernels=self._kernels,
        )
