"""DeepSeek-V3: latent attention, dense layers first, then MoE blocks with unscaled shared experts.

Source: transformers 5.23 `models/deepseek_v3/modeling_deepseek_v3.py`, which is authoritative;
mlx-lm 0.32.2 differs: it scores masked groups 0, not minus infinity.
Checkpoints: DeepSeek-V3, R1, V3.1 in FP8 or bf16, Cogito-v2 671B, mlx-community's 4-bit with
``kv_b_proj`` or with ``embed_q`` and ``unembed_out``, int4 of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.cache import LatentCache, SequenceState
from mlx_moeflux.experts.compute import compute_scratch_bytes
from mlx_moeflux.kernels.mla.latent import SCORES_AT_ONCE, VALUES_AT_ONCE
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.decoder import DecoderLayer, DecoderModel
from mlx_moeflux.models.deepseek_v3_config import Config
from mlx_moeflux.models.layers import DenseMlp, PreciseLinear, SwiGLU, weight_of, weights_of
from mlx_moeflux.models.mla import LatentAttention
from mlx_moeflux.models.moe import Prepared, Router, SparseMoeBlock


@dataclass
class GroupedRouter:
    """Router with sigmoid scores: the K best experts of the best groups, chosen with a bias.

    wants_bias: :class:`MoeBlock` passes its layer's ``e_score_correction_bias``, which affects the
    choice and not the weights.
    """

    traceable: ClassVar[bool] = True
    num_experts_per_tok: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    scale: float = 1.0
    kernels: Kernels = field(default_factory=Kernels)
    wants_bias: ClassVar[bool] = True

    def __call__(self, logits: mx.array, bias: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Return ids and weights of logits ``[N, E]`` and bias ``[E]``, as a
        :class:`~mlx_moeflux.models.moe.Router` does."""
        return self.kernels.sigmoid_top_k(
            logits,
            mx.zeros(logits.shape[-1:]) if bias is None else bias,
            k=self.num_experts_per_tok,
            groups=self.n_group,
            kept_groups=self.topk_group,
            normalise=self.norm_topk_prob,
            scale=self.scale,
        )


class Gate(PreciseLinear):
    """Parameters ``gate.weight [E, C]`` and ``gate.e_score_correction_bias [E]``; logits are
    computed in float32, as in transformers."""

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__(hidden_size, num_experts)
        self.e_score_correction_bias = mx.zeros((num_experts,))


class MoeBlock(SparseMoeBlock):
    """MoE block whose shared experts are one SwiGLU, added unscaled.

    Additional parameters: ``gate.e_score_correction_bias [E]``; ``shared_experts.*``.

    Source: transformers `DeepseekV3MoE`.
    """

    def __init__(self, config: Config, *, layer: int, router: Router, kernels: Kernels):
        C, E = config.hidden_size, config.num_experts
        super().__init__(layer=layer, hidden_size=C, num_experts=E, router=router, kernels=kernels)
        self.gate = Gate(C, E)
        if config.n_shared_experts:
            width = config.n_shared_experts * config.moe_intermediate_size
            self.shared_experts = SwiGLU(C, width)

    def prepare(self, x: mx.array, norm: nn.RMSNorm, mask: mx.array | None = None) -> Prepared:
        """Do what :meth:`SparseMoeBlock.prepare` does and add the shared experts' gate and up.

        They depend on the ids, so that the top-k kernel launches first: for one token it is a
        single threadgroup, which would otherwise wait behind them.
        """
        prepared = super().prepare(x, norm, mask)
        post = mx.depends([prepared.post], [prepared.ids])[0]
        shared = []
        for linears in self.stacks():
            shared += self._kernels.project(post, weights_of(*linears), flat=True)
        return prepared._replace(shared=shared)

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        expert = self.get("shared_experts")
        return [] if expert is None else [(expert.gate_proj, expert.up_proj)]

    def route(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """See :meth:`SparseMoeBlock.route`."""
        if getattr(self._router, "wants_bias", False):
            choose: Any = self._router
            return choose(logits, self.gate.e_score_correction_bias)
        return self._router(logits)

    def combine(self, x: mx.array, experts: mx.array, shared: Any) -> mx.array:
        """See :meth:`SparseMoeBlock.combine`; the shared experts' sum is not scaled."""
        if not shared:
            return super().combine(x, experts, shared)
        gate, up = shared
        down = weight_of(self.shared_experts.down_proj)
        if self._recorder is not None and self._recorder.wants("shared_out"):
            self._recorder.note(shared_out=down.matmul(nn.silu(gate) * up))
        return self._kernels.add_shared(x, experts, gate, up, down)


class Model(DecoderModel):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "deepseek_v3"

    @classmethod
    def make_router(
        cls, config: Config, kernels: Kernels, *, experts_per_token: int | None = None
    ) -> Router:
        """See :meth:`DecoderModel.make_router`."""
        return GroupedRouter(
            experts_per_token or config.num_experts_per_tok,
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            kernels=kernels,
        )

    @classmethod
    def mlx_lm_keys(cls, config: Config) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_keys`."""
        keys = {k: v for k, v in asdict(config).items() if k != "rope"}
        return keys | config.rope.published()

    def make_layer(self, layer: int) -> DecoderLayer:
        """Build a layer of latent attention, then MoE block or dense MLP."""
        config, kernels = self.config, self._kernels
        if config.is_sparse(layer):
            mlp = MoeBlock(config, layer=layer, router=self._router, kernels=kernels)
        else:
            mlp = DenseMlp(config.hidden_size, config.intermediate_size, kernels)
        attention = LatentAttention(config, kernels)
        return DecoderLayer(config, mixer=("self_attn", attention), mlp=mlp)

    def fit_names(self, names: Iterable[str]) -> None:
        """See :meth:`DecoderModel.fit_names`; chooses attention with split heads."""
        found = set(names)
        for i, layer in enumerate(self.layers):
            if f"model.layers.{i}.self_attn.embed_q.weight" in found:
                layer["self_attn"].use_split_heads()

    def make_cache(self) -> SequenceState:
        """Return an empty state: one entry per layer."""
        return self.new_state(LatentCache() for _ in self.layers)

    def activation_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that a call on `tokens` tokens of an empty state
        allocates.

        It adds residual stream and shared experts of all tokens, attention or dense MLP for one
        chunk (whose scores, or expanded keys and values, are bounded), and the experts' scratch.
        """
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        shared = 3 * tokens * config.moe_intermediate_size * (config.n_shared_experts or 0)
        residual = 10 * tokens * config.hidden_size + shared
        width = 2 * config.kv_lora_rank + config.qk_nope_head_dim + 3 * config.qk_rope_head_dim
        H, Dn = config.num_attention_heads, config.qk_nope_head_dim
        heads = chunk * H * (width + 4 * config.v_head_dim)
        expanded = H * tokens * 2 * Dn
        attention = heads + max(8 * SCORES_AT_ONCE, min(expanded, VALUES_AT_ONCE))
        dense = 3 * chunk * config.intermediate_size
        return 4 * (residual + max(attention, dense)) + compute_scratch_bytes()

    @staticmethod
    def keeps_float32(name: str) -> bool:
        """See :meth:`DecoderModel.keeps_float32`; the router computes in float32."""
        return ".mlp.gate." in name
