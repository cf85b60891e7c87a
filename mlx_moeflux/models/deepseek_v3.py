"""DeepSeek-V3: latent attention, dense layers first, then MoE blocks with unscaled shared experts.

Source: transformers 5.23 `models/deepseek_v3/modeling_deepseek_v3.py`, which is authoritative;
mlx-lm 0.32.2 differs: it scores masked groups 0, not minus infinity.
Checkpoints: DeepSeek-V3, R1, V3.1 in FP8 or bf16, Cogito-v2 671B, mlx-community's 4-bit with
``kv_b_proj`` or with ``embed_q`` and ``unembed_out``, int4 of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from mlx_moeflux.kernels.mla.latent_attention import SCORES_AT_ONCE
from mlx_moeflux.kernels.mla.latent_prefill import VALUES_AT_ONCE
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.deepseek_v3_config import Config
from mlx_moeflux.models.layers import DecoderLayer, DenseMlp
from mlx_moeflux.models.mla import LatentAttention
from mlx_moeflux.models.moe import Router, SigmoidMoeBlock, grouped_router, routes_in_float32


class Model(DecoderModel):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "deepseek_v3"
    TIED_IN_MLX_LM = False
    keeps_float32 = staticmethod(routes_in_float32)

    @classmethod
    def make_router(
        cls, config: Config, kernels: Kernels, *, experts_per_token: int | None = None
    ) -> Router:
        """See :meth:`DecoderModel.make_router`."""
        return grouped_router(config, kernels, experts_per_token)

    @classmethod
    def mlx_lm_keys(cls, config: Config) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_keys`."""
        keys = {k: v for k, v in asdict(config).items() if k != "rope"}
        return keys | config.rope.published()

    def make_layer(self, layer: int) -> DecoderLayer:
        """Build a layer of latent attention, then MoE block or dense MLP."""
        config, kernels = self.config, self._kernels
        if config.is_sparse(layer):
            shared = config.shared_intermediate_size
            mlp = self.moe_block(layer, SigmoidMoeBlock, shared_intermediate_size=shared)
        else:
            mlp = DenseMlp(config.hidden_size, config.intermediate_size, kernels)
        return DecoderLayer(config, mixer=("self_attn", self.make_attention(layer)), mlp=mlp)

    def make_attention(self, layer: int) -> LatentAttention:
        """Build the attention of layer number `layer`."""
        return LatentAttention(self.config, self._kernels)

    def fit_names(self, names: Iterable[str]) -> None:
        """See :meth:`DecoderModel.fit_names`; chooses attention with split heads."""
        found = set(names)
        for i, layer in enumerate(self.layers):
            if f"model.layers.{i}.self_attn.embed_q.weight" in found:
                layer["self_attn"].use_split_heads()

    def activation_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that a call on `tokens` tokens of an empty state
        allocates.

        It adds residual stream and shared experts of all tokens, attention or dense MLP for one
        chunk (whose scores, or expanded keys and values, are bounded), and the experts' scratch.
        """
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        shared = 3 * tokens * config.shared_intermediate_size
        residual = 10 * tokens * config.hidden_size + shared
        width = 2 * config.kv_lora_rank + config.qk_nope_head_dim + 3 * config.qk_rope_head_dim
        H, Dn = config.num_attention_heads, config.qk_nope_head_dim
        heads = chunk * H * (width + 4 * config.v_head_dim)
        expanded = H * tokens * 2 * Dn
        attention = heads + max(8 * SCORES_AT_ONCE, min(expanded, VALUES_AT_ONCE))
        dense = 3 * chunk * config.intermediate_size
        return 4 * (residual + max(attention, dense)) + self.runtime.expert_scratch_bytes()
