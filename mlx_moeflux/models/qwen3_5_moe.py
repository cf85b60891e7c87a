"""Qwen3.5-MoE: three gated-delta-net layers, then one of gated attention, each with a MoE block.

Source: transformers 5.23 `models/qwen3_5_moe/modeling_qwen3_5_moe.py`, which is authoritative.
Checkpoints: Hugging Face originals (text or vision-language wrapper), mlx-lm and mlx-community
(4-bit and others), moeflux / flash-moe directories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.cache import RecurrentCache
from mlx_moeflux.checkpoint.names import MappedTensors, Transform
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.rows import together
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.layers import (
    DecoderLayer,
    DenseMlp,
    joined_weight,
    project_normed,
    weights_of,
)
from mlx_moeflux.models.modules import Linear, Module
from mlx_moeflux.models.moe import SharedExpertMoeBlock, SparseMoeBlock
from mlx_moeflux.models.mtp import PredictionHead
from mlx_moeflux.models.qwen3_5_moe_config import Config
from mlx_moeflux.models.rows import RowsEntry

NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)
CONVOLUTION = ".conv1d.weight"
FUSION_NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")


class Convolution(Module):
    """Parameter ``conv1d.weight [conv_dim, width, 1]`` (MLX's layout)."""

    def __init__(self, dims: int, width: int):
        super().__init__()
        self.weight = mx.random.uniform(-0.5, 0.5, (dims, width, 1))
        self._taps: tuple[mx.array, mx.array] | None = None

    def taps(self) -> mx.array:
        """Return the weight as ``[conv_dim, width]``; evaluated and cached except in training."""
        if self.training:
            return self.weight[..., 0]
        if self._taps is None or self._taps[0] is not self.weight:
            taps = self.weight, self.weight[..., 0]
            # Evaluate before publishing: two threads must not evaluate one array.
            mx.eval(taps)
            self._taps = taps
        return self._taps[1]


class GatedNorm(Module):
    """Parameter ``norm.weight [Dv]``, shared by all value heads."""

    def __init__(self, dims: int):
        super().__init__()
        self.weight = mx.ones((dims,))


class GatedDeltaNet(Module):
    """Linear attention with a state of fixed size.

    Shapes:
        x: ``[B, T, C]``; returns x + mixer(norm(x)), or, without a norm, mixer(x). The cache holds
        the last W - 1 raw inputs of the convolution and the state ``[B, Hv, Dv, Dk]`` in float32.
    """

    reads: ClassVar[Mapping[str, type]] = {"conv1d": Convolution, "norm": GatedNorm}
    _gate = "silu"
    """Gate of the output, see the operation ``delta_mixer``."""

    def __init__(self, config: Config, kernels: Kernels):
        super().__init__()
        C, Hv = config.hidden_size, config.linear_num_value_heads
        self.config, self._kernels = config, kernels
        self.conv1d = Convolution(config.conv_dim, config.linear_conv_kernel_dim)
        self.make_projections()
        self.dt_bias = mx.ones((Hv,))
        self.A_log = mx.log(mx.random.uniform(1.0, 16.0, (Hv,)))
        self.norm = GatedNorm(config.linear_value_head_dim)
        self.out_proj = Linear(config.value_dim, C, bias=False)

    def make_projections(self) -> None:
        """Create the input projections that :meth:`project` uses."""
        C, Hv = self.config.hidden_size, self.config.linear_num_value_heads
        self.in_proj_qkv = Linear(C, self.config.conv_dim, bias=False)
        self.in_proj_z = Linear(C, self.config.value_dim, bias=False)
        self.in_proj_b = Linear(C, Hv, bias=False)
        self.in_proj_a = Linear(C, Hv, bias=False)

    def project(self, x: mx.array, norm: nn.RMSNorm | None) -> Sequence[mx.array | None]:
        """Project norm(x), x ``[B, T, C]``, or x without a norm.

        Returns queries, keys and values ``[B, T, conv_dim]``, the output gate z
        ``[B, T, value_dim]``, a and b ``[B, T, Hv]``; or all of them concatenated in the first,
        and None three times.
        """
        linears = self.stacks()[0]
        joined = joined_weight(*linears)
        if joined is None:
            weights = weights_of(*linears)
            return project_normed(self._kernels, x, weights, norm)
        rows = project_normed(self._kernels, x, [joined], norm)[0]
        return rows, None, None, None

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        return [(self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)]

    def __call__(self, x: mx.array, cache: Any, norm: nn.RMSNorm | None) -> mx.array:
        projected, residual = self.project(x, norm), None if norm is None else x
        if not isinstance(cache, RowsEntry):
            y = self._mixed(cache, *projected)
        elif callable(self._kernels.delta_mixer.choice):  # it need not know `every`
            y = cache.each(self._mixed, *projected)
        else:
            y = self._rows_mixed(cache, *projected)
        return self._kernels.project(y, weights_of(self.out_proj), residual=residual)[0]

    def _mixed(self, cache: RecurrentCache, *projected: Any) -> mx.array:
        """Take what :meth:`project` returned into the state, and return ``[B, T, value_dim]``."""
        config, first = self.config, projected[0]
        B, T, _ = first.shape
        conv, state = cache.conv, cache.delta
        if conv is None:
            width, heads = config.linear_conv_kernel_dim - 1, config.linear_num_value_heads
            conv = mx.zeros((B, width, config.conv_dim), first.dtype)
            sizes = config.linear_value_head_dim, config.linear_key_head_dim
            state = mx.zeros((B, heads, *sizes), mx.float32)
        mask = cache.real_tokens(T)  # [B, T] or None
        y, cache.conv, cache.delta = self._kernels.delta_mixer(
            *projected, **self._around(conv, state), mask=mask, lengths=cache.lengths
        )
        cache.advance(T)
        return y

    def _rows_mixed(self, cache: RowsEntry, *projected: Any) -> mx.array:
        """Do the same for rows ``[R, 1, ...]`` of one sequence; return ``[R, 1, value_dim]``."""
        R, entry = cache.count, cache.entry
        tokens = (None if x is None else device.reshape(x, 1, R, x.shape[-1]) for x in projected)
        around = self._around(entry.conv, entry.delta)
        with together(1):
            y, conv, delta = self._kernels.delta_mixer(*tokens, **around, every=True)
        cache.store(conv=conv, delta=delta)
        return device.reshape(y, R, 1, y.shape[-1])

    def _around(self, conv: mx.array, state: mx.array) -> dict[str, Any]:
        """Return the arguments of ``delta_mixer`` that are the same for all tokens."""
        return {
            "conv_weight": self.conv1d.taps(),
            "conv_state": conv,
            "state": state,
            "a_log": self.A_log,
            "dt_bias": self.dt_bias,
            "norm_weight": self.norm.weight,
            "eps": self.config.rms_norm_eps,
            "steps": self._kernels,
            **({} if self._gate == "silu" else {"gate": self._gate}),
        }


class Head(PredictionHead):
    """Head whose norms are zero-centred in Hugging Face originals. Files for MLX, which have its
    names of experts, have added the one."""

    ZERO_CENTRED: ClassVar[tuple[str, ...]] = (*NORMS, *FUSION_NORMS)
    """Ends of the names of these norms."""

    def transforms(self, mapped: MappedTensors) -> dict[str, Transform]:
        """See :meth:`PredictionHead.transforms`."""
        experts = (refs[0].name for parts in mapped.experts.values() for refs in parts.values())
        of_mlx = any(".switch_mlp." in name for name in experts)
        return {} if of_mlx else plus_one(mapped.trunk, self.ZERO_CENTRED)


class Model(DecoderModel):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "qwen3_5_moe"
    MLX_LM_PREFIX = "language_model."
    HEAD = Head
    DELTA_NET: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet

    def make_layer(self, layer: int) -> DecoderLayer:
        """Build a layer of mixer, then MoE block with a gated shared expert."""
        config, kernels = self.config, self._kernels
        mixer = "self_attn", Attention(config, kernels, gated=True)
        if config.is_linear(layer):
            mixer = "linear_attn", self.DELTA_NET(config, kernels)
        return DecoderLayer(config, mixer=mixer, mlp=self.make_mlp(layer))

    def make_mlp(self, layer: int) -> DenseMlp | SparseMoeBlock:
        """Build the second half of layer number `layer`."""
        shared = self.config.shared_expert_intermediate_size
        return self.moe_block(layer, SharedExpertMoeBlock, shared_intermediate_size=shared)

    def activation_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that a call on `tokens` tokens of an empty state
        allocates.

        It adds residual stream, the larger mixer for one chunk (with attention scores, which stock
        MLX materialises on the CPU), and the experts' scratch.
        """
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        residual = 10 * tokens * config.hidden_size
        linear = chunk * (6 * config.conv_dim + 8 * config.value_dim)
        heads = config.num_attention_heads
        full = chunk * heads * (8 * config.head_dim + 3 * tokens)
        return 4 * (residual + max(linear, full)) + self.runtime.expert_scratch_bytes()

    @classmethod
    def mlx_lm_interval(cls, config: Config) -> int:
        """Return the ``full_attention_interval`` of the config that mlx-lm reads, which knows no
        list of layers."""
        full = [i for i in range(config.num_hidden_layers) if not config.is_linear(i)]
        return full[0] + 1 if full else config.num_hidden_layers + 1

    @classmethod
    def mlx_lm_config(cls, config: Config, raw: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_config`."""
        found = super().mlx_lm_config(config, raw)
        text, interval = found.get("text_config"), cls.mlx_lm_interval(config)
        (text if isinstance(text, dict) else found)["full_attention_interval"] = interval
        return found

    @classmethod
    def lacking_in_mlx_lm(cls, config: Config) -> str | None:
        """See :meth:`DecoderModel.lacking_in_mlx_lm`."""
        interval = cls.mlx_lm_interval(config)
        regular = replace(config, layer_types=(), full_attention_interval=interval)
        if all(config.is_linear(i) == regular.is_linear(i) for i in range(len(config.layer_types))):
            return super().lacking_in_mlx_lm(config)
        return "'layer_types' that no 'full_attention_interval' makes"

    @staticmethod
    def transforms(trunk: dict[str, TensorRef]) -> dict[str, Transform]:
        """Return the functions to apply to trunk tensors after reading, by canonical name.

        Hugging Face originals store convolutions as [D, 1, W] and zero-centred norms; mlx-lm's
        conversion transposes the convolutions and adds one to the norms. The layout of the
        convolutions distinguishes the two forms. ``linear_attn.norm`` is never zero-centred.
        """
        return as_mlx_lm(trunk, NORMS)

    @staticmethod
    def keeps_float32(name: str) -> bool:
        """See :meth:`DecoderModel.keeps_float32`."""
        return name.endswith((".A_log", ".dt_bias"))


def as_mlx_lm(trunk: dict[str, TensorRef], norms: tuple[str, ...]) -> dict[str, Transform]:
    """See :meth:`Model.transforms`. norms: Ends of the names of norms that are zero-centred."""
    convolutions = [n for n in trunk if n.endswith(CONVOLUTION)]
    if not is_original(trunk):
        return {n: _as_taps for n in convolutions if len(trunk[n].shape) == 2}
    return dict.fromkeys(convolutions, _transposed) | plus_one(trunk, norms)


def is_original(trunk: dict[str, TensorRef]) -> bool:
    """Return True if convolutions have the layout of Hugging Face originals."""
    shapes = (ref.shape for name, ref in trunk.items() if name.endswith(CONVOLUTION))
    return any(len(shape) == 3 and shape[-1] != 1 for shape in shapes)


def plus_one(trunk: dict[str, TensorRef], norms: tuple[str, ...]) -> dict[str, Transform]:
    """Return the functions that add one to norms whose names end so."""
    return {n: _plus_one for n in trunk if n.endswith(norms)}


def _as_taps(weight: mx.array) -> mx.array:
    return weight[..., None]


def _transposed(weight: mx.array) -> mx.array:
    return weight.moveaxis(2, 1)


def _plus_one(weight: mx.array) -> mx.array:
    return weight.astype(mx.float32) + 1.0
