"""MoE blocks with a sigmoid router, whose choice a bias per expert corrects.

Source: transformers 5.23 `models/deepseek_v3/modeling_deepseek_v3.py`, which GLM-4 and MiniMax-M2
follow; mlx-lm 0.32.2 differs: it scores masked groups 0, not minus infinity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.layers import PreciseLinear, SwiGLU, weight_of, weights_of
from mlx_moeflux.models.moe import Prepared, Router, SparseMoeBlock


@dataclass
class GroupedRouter:
    """Router with sigmoid scores: the K best experts of the best groups, chosen with a bias.

    wants_bias: :class:`SigmoidMoeBlock` passes its layer's ``e_score_correction_bias``, which
    affects the choice and not the weights.
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


class SigmoidMoeBlock(SparseMoeBlock):
    """MoE block with a bias per expert, and shared experts, if any, as one SwiGLU added unscaled.

    shared_intermediate_size: Inner width of the shared experts together; 0 for none. precise_gate:
    The router is a :class:`Gate`; otherwise a linear layer of the compute dtype, which may be
    quantised.

    Additional parameters: ``e_score_correction_bias [E]``, of ``gate`` if it is precise;
    ``shared_experts.*``.

    Source: transformers `DeepseekV3MoE`.
    """

    def __init__(
        self,
        *,
        layer: int,
        hidden_size: int,
        num_experts: int,
        router: Router,
        kernels: Kernels,
        shared_intermediate_size: int = 0,
        precise_gate: bool = True,
    ):
        super().__init__(
            layer=layer,
            hidden_size=hidden_size,
            num_experts=num_experts,
            router=router,
            kernels=kernels,
        )
        if precise_gate:
            self.gate = Gate(hidden_size, num_experts)
        else:
            self.e_score_correction_bias = mx.zeros((num_experts,))
        if shared_intermediate_size:
            self.shared_experts = SwiGLU(hidden_size, shared_intermediate_size)

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
            owner = self if "e_score_correction_bias" in self else self.gate
            return choose(logits, owner["e_score_correction_bias"])
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


def grouped_router(config: Any, kernels: Kernels, experts_per_token: int | None) -> GroupedRouter:
    """Return the router of a config with DeepSeek-V3's keys; `experts_per_token` overrides the
    config's number."""
    return GroupedRouter(
        experts_per_token or config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        norm_topk_prob=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        kernels=kernels,
    )


def routes_in_float32(name: str) -> bool:
    """Return True for parameters of a :class:`Gate`; see :meth:`DecoderModel.keeps_float32`."""
    return ".mlp.gate." in name
