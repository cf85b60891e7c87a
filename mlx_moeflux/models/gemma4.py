"""Gemma-4 with experts: layers with a sliding window, every sixth global with heads of another size
whose keys are the values too, and a dense MLP beside the experts of every layer.

Source: transformers 5.24 `models/gemma4/modeling_gemma4.py`, which is authoritative.
Checkpoints: Hugging Face originals (text or multimodal wrapper), mlx-community: gemma-4-26B-A4B.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.cache import BaseCache
from mlx_moeflux.kernels.moe.expert_ffn import Activation, geglu
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.rounding import rounded
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.attention_decoder import AttentionDecoder
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.gemma4_config import TEXT_TYPE, Config
from mlx_moeflux.models.layers import DecoderLayer, project_normed, weights_of
from mlx_moeflux.models.modules import Linear, Module, RMSNorm
from mlx_moeflux.models.moe import Router, SoftmaxRouter, SparseMoeBlock


class GateNorm(Module):
    """RMS norm of the router's input, times C^-0.5. Parameter ``scale [C]``."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.scale = mx.ones((hidden_size,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.scale * x.shape[-1] ** -0.5, self.eps)


class MoeBlock(SparseMoeBlock):
    """Experts and a dense MLP of the same input, each between norms of its own:

        x + post(post_1(mlp(pre(x))) + post_2(experts(pre_2(x))))

    The router reads x through a norm of its own and weights the experts by a factor of each.

    Additional parameters: ``gate_norm.scale [C]``; ``per_expert_scale [E]``; ``gate_proj.weight``,
    ``up_proj.weight [F, C]`` and ``down_proj.weight [C, F]`` of the dense MLP; five norms ``[C]``.

    Source: transformers 5.24 `Gemma4TextDecoderLayer` and `Gemma4TextRouter`.
    """

    def __init__(self, config: Config, **block: Any):
        super().__init__(hidden_size=config.hidden_size, num_experts=config.num_experts, **block)
        C, F, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.gate_norm = GateNorm(C, eps)
        self.per_expert_scale = mx.ones((config.num_experts,))
        self.gate_proj, self.up_proj = Linear(C, F, bias=False), Linear(C, F, bias=False)
        self.down_proj = Linear(F, C, bias=False)
        self.pre_feedforward_layernorm = RMSNorm(C, eps=eps)
        self.pre_feedforward_layernorm_2 = RMSNorm(C, eps=eps)
        self.post_feedforward_layernorm_1 = RMSNorm(C, eps=eps)
        self.post_feedforward_layernorm_2 = RMSNorm(C, eps=eps)
        self.post_feedforward_layernorm = RMSNorm(C, eps=eps)

    def project_inputs(
        self, x: mx.array, norm: nn.RMSNorm | None
    ) -> tuple[mx.array, mx.array, Any]:
        """See :meth:`SparseMoeBlock.project_inputs`; norm: of the experts alone."""
        kernels, dense = self._kernels, weights_of(*self.stacks()[0])
        post = (x if norm is None else norm(x)).reshape(-1, x.shape[-1])
        (logits,) = project_normed(kernels, x, weights_of(self.gate), self.gate_norm, flat=True)
        shared = project_normed(kernels, x, dense, self.pre_feedforward_layernorm, flat=True)
        return post, logits, tuple(shared)

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        return [(self.gate_proj, self.up_proj)]

    def route(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """See :meth:`SparseMoeBlock.route`."""
        ids, weights = super().route(logits)
        rows = ids
        if type(self._router) is not SoftmaxRouter:
            # An id E, which stands for no expert, has no factor.
            rows = mx.minimum(ids, mx.array(self.num_experts - 1, ids.dtype))
        return ids, weights * self.per_expert_scale.astype(mx.float32)[rows]

    def combine(self, x: mx.array, experts: mx.array, shared: Any) -> mx.array:
        """See :meth:`SparseMoeBlock.combine`; shared: gate and up of the dense MLP."""
        dense = self._kernels.project(geglu(*shared), weights_of(self.down_proj))[0]
        if self._recorder is not None:
            self._recorder.note(shared_out=dense)
        both = self.post_feedforward_layernorm_1(dense)
        both = both + self.post_feedforward_layernorm_2(experts)
        both = self.post_feedforward_layernorm(both)
        return x + both.astype(x.dtype).reshape(x.shape)


class Layer(DecoderLayer):
    """One layer: attention between two norms, then a :class:`MoeBlock`, each with a residual, and a
    factor of the whole.

    Additional parameter: ``layer_scalar [1]``.
    """

    mlp: MoeBlock

    def make_residuals(self, config: Config) -> None:
        """See :meth:`DecoderLayer.make_residuals`."""
        super().make_residuals(config)
        self.layer_scalar = mx.ones((1,))

    @property
    def router_norm(self) -> nn.Module:
        """See :attr:`DecoderLayer.router_norm`."""
        return self.mlp.gate_norm

    def mix(self, x: mx.array, cache: BaseCache) -> mx.array:
        """See :meth:`DecoderLayer.mix`."""
        y = self[self._mixer_name](x, cache, self.input_layernorm)
        return x + self.post_attention_layernorm(y)

    def feed_forward(
        self, h: mx.array, mask: mx.array | None, parts: list[tuple[int, int]]
    ) -> mx.array:
        """See :meth:`DecoderLayer.feed_forward`."""
        y = self.mlp(h, self.mlp.pre_feedforward_layernorm_2, mask)
        return rounded(y * self.layer_scalar)

    def begin_experts(self, h: mx.array) -> Any:
        """See :meth:`DecoderLayer.begin_experts`."""
        return self.mlp.prepare(h, self.mlp.pre_feedforward_layernorm_2)

    def end_experts(self, h: mx.array, experts: mx.array, shared: tuple[mx.array, ...]) -> mx.array:
        """See :meth:`DecoderLayer.end_experts`."""
        return rounded(self.mlp.combine(h, experts, shared) * self.layer_scalar)

    def halves(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`DecoderLayer.halves`."""
        mixer = self[self._mixer_name]
        return [(mixer, self.input_layernorm, self.post_attention_layernorm), (self.mlp,)]


class Model(AttentionDecoder):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "gemma4"
    MLX_LM_PREFIX = "language_model."
    AROUND_ONE: ClassVar[tuple[str, ...]] = (
        *DecoderModel.AROUND_ONE,
        "norm_1.weight",
        "norm_2.weight",
        ".gate_norm.scale",
        ".per_expert_scale",
        ".layer_scalar",
    )

    @property
    def activation(self) -> Activation:
        """See :attr:`StreamingModel.activation`."""
        return geglu

    @classmethod
    def make_router(
        cls, config: Config, kernels: Kernels, *, experts_per_token: int | None = None
    ) -> Router:
        """See :meth:`DecoderModel.make_router`."""
        return SoftmaxRouter(experts_per_token or config.num_experts_per_tok, True, kernels)

    @classmethod
    def mlx_lm_name(cls, name: str) -> str:
        """See :meth:`DecoderModel.mlx_lm_name`."""
        for own, theirs in _MLX_LM_NAMES:
            name = re.sub(own, theirs, name)
        return super().mlx_lm_name(name)

    @classmethod
    def mlx_lm_config(cls, config: Config, raw: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_config`: the wrapper's form, without
        ``per_layer_config``."""
        outer, text = raw, raw.get("text_config")
        if not isinstance(text, dict):
            own = config.published()["text_config"].keys() | config.INERT
            text = {key: value for key, value in raw.items() if key in own}
            outer = {key: value for key, value in raw.items() if key not in own}
        text = {key: value for key, value in text.items() if key != "per_layer_config"} | {
            "model_type": TEXT_TYPE,
            "global_head_dim": config.global_head_dim,
            "num_global_key_value_heads": config.num_global_key_value_heads,
        }
        outer = outer | {"model_type": cls.MODEL_TYPE, "vocab_size": config.vocab_size}
        outer["tie_word_embeddings"] = config.tie_word_embeddings
        return outer | {"text_config": text}

    def make_layer(self, layer: int) -> DecoderLayer:
        """See :meth:`DecoderModel.make_layer`."""
        mixer = "self_attn", self.make_attention(layer)
        return Layer(self.config, mixer=mixer, mlp=self.make_moe(layer))

    def make_attention(self, layer: int) -> Attention:
        """See :meth:`AttentionDecoder.make_attention`."""
        config, window = self.config, self.config.window(layer)
        return Attention(
            config.of_layer(layer),
            self._kernels,
            window=window,
            scale=1.0,
            shares_values=config.attention_k_eq_v and window is None,
            value_norm=True,
            residual=False,
        )

    def make_moe(self, layer: int) -> SparseMoeBlock:
        """See :meth:`AttentionDecoder.make_moe`."""
        return MoeBlock(self.config, layer=layer, router=self._router, kernels=self._kernels)

    def embed(self, tokens: Sequence[mx.array]) -> list[mx.array]:
        """See :meth:`DecoderModel.embed`."""
        return [rounded(h * self.config.hidden_size**0.5) for h in super().embed(tokens)]

    def logits(self, h: mx.array) -> mx.array:
        """See :meth:`DecoderModel.logits`."""
        logits, cap = super().logits(h), self.config.final_logit_softcapping
        if cap is None:
            return logits
        return (cap * mx.tanh(logits.astype(mx.float32) / cap)).astype(logits.dtype)

    def activation_bytes(self, tokens: int) -> int:
        """See :meth:`AttentionDecoder.activation_bytes`; adds what global heads are larger."""
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        larger = max(config.global_head_dim - config.head_dim, 0)
        return super().activation_bytes(tokens) + 32 * chunk * config.num_attention_heads * larger


# Pattern of a name of ours -> mlx-lm's.
_MLX_LM_NAMES = (
    (r"\.mlp\.gate_norm\.scale$", ".router.scale"),
    (r"\.mlp\.gate(?=\.|$)", ".router.proj"),
    (r"\.mlp\.per_expert_scale$", ".router.per_expert_scale"),
    (r"\.mlp\.switch_mlp\.", ".experts.switch_glu."),
    (r"\.mlp\.(pre|post)_feedforward_", r".\1_feedforward_"),
)
