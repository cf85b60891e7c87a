"""Qwen3.5-MoE: three gated-delta-net layers, then one of gated attention, each with a MoE block.

Source: transformers 5.23 `models/qwen3_5_moe/modeling_qwen3_5_moe.py`, whose maths wins.
Checkpoints: Hugging Face originals (text or vision-language wrapper), mlx-lm and mlx-community
(4-bit and others), moeflux / flash-moe directories.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.cache import KVCache, RecurrentCache, SequenceState, transaction
from mlx_moeflux.checkpoint.names import Drop, Experts, NameRules, Transform
from mlx_moeflux.checkpoint.refs import TensorRef
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.compute import compute_scratch_bytes
from mlx_moeflux.kernels.choice import Kernels
from mlx_moeflux.models.base import StreamingModel
from mlx_moeflux.models.moe import Router, SoftmaxRouter, SparseMoeBlock
from mlx_moeflux.models.qwen3_5_moe_config import Config
from mlx_moeflux.models.record import note


class Convolution(nn.Module):
    """Holder of ``conv1d.weight [conv_dim, width, 1]`` (MLX's layout)."""

    def __init__(self, dims: int, width: int):
        super().__init__()
        self.weight = mx.random.uniform(-0.5, 0.5, (dims, width, 1))


class GatedNorm(nn.Module):
    """Holder of ``norm.weight [Dv]``, shared by all value heads."""

    def __init__(self, dims: int):
        super().__init__()
        self.weight = mx.ones((dims,))


class GatedDeltaNet(nn.Module):
    """Linear attention with a state of fixed size.

    Shapes:
        x: ``[B, T, C]``; returns ``[B, T, C]``, residual not added. The cache carries the last
        W - 1 raw inputs of the convolution and the state ``[B, Hv, Dv, Dk]`` in float32.
    """

    def __init__(self, config: Config, kernels: Kernels):
        super().__init__()
        C, Hv = config.hidden_size, config.linear_num_value_heads
        self.config, self._kernels = config, kernels
        self.conv1d = Convolution(config.conv_dim, config.linear_conv_kernel_dim)
        self.in_proj_qkv = nn.Linear(C, config.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(C, config.value_dim, bias=False)
        self.in_proj_b = nn.Linear(C, Hv, bias=False)
        self.in_proj_a = nn.Linear(C, Hv, bias=False)
        self.dt_bias = mx.ones((Hv,))
        self.A_log = mx.log(mx.random.uniform(1.0, 16.0, (Hv,)))
        self.norm = GatedNorm(config.linear_value_head_dim)
        self.out_proj = nn.Linear(config.value_dim, C, bias=False)

    def __call__(self, x: mx.array, cache: RecurrentCache) -> mx.array:
        config, kernels = self.config, self._kernels
        B, T, _ = x.shape
        Hk, Dk = config.linear_num_key_heads, config.linear_key_head_dim
        Hv, Dv = config.linear_num_value_heads, config.linear_value_head_dim
        mask = cache.make_mask(T)  # [B, T] or None
        qkv, z = self.in_proj_qkv(x), self.in_proj_z(x)
        if mask is not None:
            qkv = mx.where(mask[..., None], qkv, 0.0)
        conv, state = cache.conv, cache.delta
        if conv is None:
            conv = mx.zeros((B, config.linear_conv_kernel_dim - 1, config.conv_dim), x.dtype)
            state = mx.zeros((B, Hv, Dv, Dk), mx.float32)
        y, cache.conv = kernels.causal_conv(
            qkv, self.conv1d.weight[..., 0], conv, lengths=cache.lengths
        )
        q, k, v = mx.split(y, [config.key_dim, 2 * config.key_dim], axis=-1)
        q, k = kernels.normalise_qk(q.reshape(B, T, Hk, Dk), k.reshape(B, T, Hk, Dk))
        log_decay, beta = kernels.decay_beta(
            self.in_proj_a(x), self.in_proj_b(x), a_log=self.A_log, dt_bias=self.dt_bias
        )
        v = v.reshape(B, T, Hv, Dv)
        y, cache.delta = kernels.gated_delta(
            q, k, v, log_decay=log_decay, beta=beta, state=state, mask=mask
        )
        cache.advance(T)
        z = z.reshape(B, T, Hv, Dv)
        y = kernels.gated_rms_norm(y, z, self.norm.weight, eps=config.rms_norm_eps)
        return self.out_proj(y.reshape(B, T, Hv * Dv))


class GatedAttention(nn.Module):
    """Grouped-query attention with per-head norms, partial rotary embedding and an output gate.

    Shapes:
        x: ``[B, T, C]``; returns ``[B, T, C]``, residual not added. Each head's rows of
        ``q_proj`` are its query rows, then its gate rows.
    """

    def __init__(self, config: Config, kernels: Kernels):
        super().__init__()
        C, Dh = config.hidden_size, config.head_dim
        Hq, Hkv = config.num_attention_heads, config.num_key_value_heads
        self.config, self._kernels = config, kernels
        self.q_proj = nn.Linear(C, Hq * 2 * Dh, bias=False)
        self.k_proj = nn.Linear(C, Hkv * Dh, bias=False)
        self.v_proj = nn.Linear(C, Hkv * Dh, bias=False)
        self.o_proj = nn.Linear(Hq * Dh, C, bias=False)
        self.q_norm = nn.RMSNorm(Dh, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(Dh, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, cache: KVCache) -> mx.array:
        config, kernels = self.config, self._kernels
        B, T, _ = x.shape
        Hq, Hkv, Dh = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q, gate = mx.split(self.q_proj(x).reshape(B, T, Hq, 2 * Dh), 2, axis=-1)
        k, v = self.k_proj(x).reshape(B, T, Hkv, Dh), self.v_proj(x).reshape(B, T, Hkv, Dh)
        rope = {
            "eps": config.rms_norm_eps,
            "dims": config.rotary_dims,
            "base": config.rope_theta,
            "offset": cache.positions(T),
        }
        mask = cache.make_mask(T)
        q = kernels.norm_rope(q, self.q_norm.weight, **rope)  # [B, Hq, T, Dh]
        k = kernels.norm_rope(k, self.k_norm.weight, **rope)
        keys, values = cache.update_and_fetch(k, v.swapaxes(1, 2))
        y = kernels.sdpa(q, keys, values, scale=Dh**-0.5, mask=mask)
        y = y.swapaxes(1, 2).reshape(B, T, Hq * Dh)
        return self.o_proj(y * mx.sigmoid(gate.reshape(B, T, Hq * Dh)))


class DecoderLayer(nn.Module):
    """Mixer, then MoE block, each behind a norm and with a residual."""

    def __init__(self, config: Config, layer: int, router: Router, kernels: Kernels):
        super().__init__()
        self.is_linear = config.is_linear(layer)
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config, kernels)
        else:
            self.self_attn = GatedAttention(config, kernels)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SparseMoeBlock(
            layer=layer,
            hidden_size=config.hidden_size,
            num_experts=config.num_experts,
            shared_intermediate_size=config.shared_expert_intermediate_size,
            router=router,
            kernels=kernels,
        )

    def __call__(self, x: mx.array, cache: KVCache | RecurrentCache, *, chunk: int) -> mx.array:
        """x ``[B, T, C]`` -> ``[B, T, C]``. The mixer takes `chunk` tokens at a time, so that its
        scratch is bounded; the MoE block takes all, so that every expert is read once."""
        mixer = self.linear_attn if self.is_linear else self.self_attn
        mask = cache.real_tokens(x.shape[1])
        mixed = []
        for start, stop in cache.parts(x.shape[1], chunk):
            mixed.append(mixer(self.input_layernorm(x[:, start:stop]), cache))
            if x.shape[1] > chunk:
                mx.eval(mixed[-1])
        h = x + (mixed[0] if len(mixed) == 1 else mx.concatenate(mixed, axis=1))
        post = self.post_attention_layernorm(h)
        out = self.mlp(post, h, mask)
        note(self, input=x, h_mid=h, h_post=post, output=out)
        return out


class TextModel(nn.Module):
    """Embedding, layers, final norm: tokens ``[B, T]`` -> ``[B, T, C]``."""

    def __init__(self, config: Config, router: Router, kernels: Kernels):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [
            DecoderLayer(config, layer, router, kernels)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Model(StreamingModel):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config

    def __init__(
        self, config: Config, *, router: Router | None = None, kernels: Kernels | None = None
    ):
        super().__init__()
        kernels = kernels or Kernels()
        self.config, self.model_type = config, "qwen3_5_moe"
        self._kernels = kernels
        # A new module is in training mode.
        kernels.references_only(self.training)
        self._router = router or SoftmaxRouter(
            config.num_experts_per_tok, config.norm_topk_prob, kernels
        )
        self.model = TextModel(config, self._router, kernels)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def make_cache(self) -> SequenceState:
        """One empty state per layer."""
        return self.new_state(
            RecurrentCache() if layer.is_linear else KVCache() for layer in self.layers
        )

    def state_bytes(self, positions: int) -> int:
        """Bytes of one sequence's state after `positions` tokens, in the model's dtype, with the
        rows that the key-value buffers have in reserve."""
        config, size = self.config, self.model.norm.weight.itemsize
        linear = sum(config.is_linear(i) for i in range(config.num_hidden_layers))
        full = config.num_hidden_layers - linear
        Hv, Dk = config.linear_num_value_heads, config.linear_key_head_dim
        recurrent = 4 * Hv * config.linear_value_head_dim * Dk
        convolution = size * (config.linear_conv_kernel_dim - 1) * config.conv_dim
        kv = 2 * size * config.num_key_value_heads * config.head_dim
        return linear * (recurrent + convolution) + full * kv * KVCache.rows_for(positions)

    def activation_bytes(self, tokens: int, seen: int = 0) -> int:
        """An upper bound of what a call on `tokens` tokens after `seen` others allocates.

        Residual stream, the widest mixer for one chunk (attention scores included, which stock
        MLX writes out on the CPU), and the scratch of the experts.
        """
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        residual = 10 * tokens * config.hidden_size
        linear = chunk * (6 * config.conv_dim + 8 * config.value_dim)
        heads = config.num_attention_heads
        full = chunk * heads * (8 * config.head_dim + 3 * (tokens + seen))
        return 4 * (residual + max(linear, full)) + compute_scratch_bytes()

    def __call__(
        self,
        tokens: mx.array,
        cache: list[KVCache | RecurrentCache] | None = None,
        *,
        last_only: bool = False,
    ) -> mx.array:
        """tokens ``[B, T]`` ints -> logits; `last_only` computes the last position's alone.

        A call that raises leaves `cache` as it was before.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise InputError(f"tokens have shape {list(tokens.shape)}, expected [B, T] with T > 0.")
        cache = self.make_cache() if cache is None else cache
        with transaction(cache):
            h = self.model.embed_tokens(tokens)
            for layer, entry in zip(self.model.layers, cache, strict=True):
                h = layer(h, entry, chunk=self.prefill_chunk)
            h = self.model.norm(h[:, -1:] if last_only else h)
            if self.config.tie_word_embeddings:
                return self.model.embed_tokens.as_linear(h)
            return self.lm_head(h)

    NAME_RULES: ClassVar[NameRules] = NameRules(
        prefixes=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        drops=(
            Drop(r"(model\.)?(visual|vision_tower)\..*", "images are not read"),
            Drop(
                r"((model\.)?language_model\.)?(model\.)?mtp\..*",
                "multi-token prediction is not used at inference",
            ),
        ),
        experts=(
            Experts(
                r"model\.layers\.(?P<layer>\d+)\.mlp\.switch_mlp"
                r"\.(?P<projection>gate_proj|up_proj|down_proj)\.(?P<part>weight|scales|biases)"
            ),
            Experts(
                r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.gate_up_proj",
                ("gate_proj.weight", "up_proj.weight"),
            ),
            Experts(
                r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.down_proj", ("down_proj.weight",)
            ),
            Experts(
                r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<expert>\d+)"
                r"\.(?P<projection>gate_proj|up_proj|down_proj)\.(?P<part>weight|scales|biases)"
            ),
        ),
    )

    @staticmethod
    def transforms(trunk: dict[str, TensorRef]) -> dict[str, Transform]:
        """What to do to trunk tensors once read, by canonical name.

        Hugging Face originals store convolutions as [D, 1, W] and norms around zero: mlx-lm's
        conversion transposes the first and adds one to the second. The layout of the first
        tells which form this is; ``linear_attn.norm`` is never zero-centred.
        """
        convolutions = [n for n in trunk if n.endswith("linear_attn.conv1d.weight")]
        if not any(trunk[n].shape[-1] != 1 and len(trunk[n].shape) == 3 for n in convolutions):
            return {n: _as_taps for n in convolutions if len(trunk[n].shape) == 2}
        norms = (
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            "model.norm.weight",
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
        )
        return dict.fromkeys(convolutions, _transposed) | {
            n: _plus_one for n in trunk if n.endswith(norms)
        }

    @staticmethod
    def keeps_float32(name: str) -> bool:
        """Parameters that stay in float32 whatever the compute dtype is."""
        return name.endswith((".A_log", ".dt_bias"))


def _as_taps(weight: mx.array) -> mx.array:
    return weight[..., None]


def _transposed(weight: mx.array) -> mx.array:
    return weight.moveaxis(2, 1)


def _plus_one(weight: mx.array) -> mx.array:
    return weight.astype(mx.float32) + 1.0
