"""Multi-head latent attention as DeepSeek-V3 has it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.cache import LatentCache
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.choice import Kernels
from mlx_moeflux.models.layers import project

# transformers gives the two inner norms this one, whatever rms_norm_eps is.
INNER_EPS = 1e-6


class HeadLinear(nn.Module):
    """One matrix per head: ``weight [H, out, in]``; mlx-lm's ``embed_q`` and ``unembed_out``."""

    def __init__(self, heads: int, output_dims: int, input_dims: int):
        super().__init__()
        scale = input_dims**-0.5
        self.weight = mx.random.uniform(-scale, scale, (heads, output_dims, input_dims))
        self._spec: QuantSpec | None = None

    def to_quantized(self, group_size: int, bits: int, mode: str = "affine") -> HeadLinear:
        """The same, quantised along the inputs."""
        module = HeadLinear.__new__(HeadLinear)
        nn.Module.__init__(module)
        module._spec = QuantSpec(bits, group_size, mode)
        module.weight, module.scales, module.biases = mx.quantize(self.weight, group_size, bits)
        module.freeze()
        return module

    def heads(self, first: int, last: int) -> HeadMatrices:
        """Some of the matrices."""
        rows = slice(first, last)
        parts = (self.get(part) for part in ("weight", "scales", "biases"))
        return HeadMatrices(*(None if p is None else p[rows] for p in parts), self._spec)


class HeadMatrices:
    """Matrices ``[h, out, in]`` of some heads, views of parameters, perhaps quantised."""

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array | None,
        biases: mx.array | None,
        spec: QuantSpec | None,
    ):
        self.parts, self.spec = (weight, scales, biases), spec

    def __call__(self, x: mx.array, *, transposed: bool = False) -> mx.array:
        """x ``[B, h or 1, T, in]`` -> ``[B, h, T, out]``; `transposed`: out and in swapped."""
        weight, scales, biases = self.parts
        if self.spec is None:
            return x @ (weight if transposed else weight.swapaxes(-1, -2))
        return mx.quantized_matmul(
            x,
            weight,
            scales,
            biases,
            transpose=not transposed,
            group_size=self.spec.group_size,
            bits=self.spec.bits,
        )


class LatentAttention(nn.Module):
    """Attention whose keys and values are linear maps of one latent per position.

    config: Of DeepSeek-V3; see the shapes in :mod:`mlx_moeflux.kernels.latent`.

    Shapes:
        x: ``[B, T, C]``; returns x plus what comes of norm(x).

    Parameters (names as in the checkpoint): ``q_a_proj``, ``q_a_layernorm``, ``q_b_proj``, or
    ``q_proj`` where ``q_lora_rank`` is null; ``kv_a_proj_with_mqa``, ``kv_a_layernorm``;
    ``kv_b_proj [H (Dn + Dv), R]``, or mlx-lm's ``embed_q [H, R, Dn]`` and ``unembed_out
    [H, Dv, R]`` (:meth:`use_split_heads`); ``o_proj``.

    Source: transformers `DeepseekV3Attention`.
    """

    def __init__(self, config: Any, kernels: Kernels):
        super().__init__()
        C, H, R = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        Dn, Dr, Dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.config, self._kernels = config, kernels
        bias = config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(C, H * (Dn + Dr), bias=False)
        else:
            self.q_a_proj = nn.Linear(C, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=INNER_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, H * (Dn + Dr), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(C, R + Dr, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(R, eps=INNER_EPS)
        self.kv_b_proj = nn.Linear(R, H * (Dn + Dv), bias=False)
        self.o_proj = nn.Linear(H * Dv, C, bias=bias)
        self.scale = (Dn + Dr) ** -0.5 * config.rope.softmax_factor()
        self._periods = config.rope.periods(Dr)

    def use_split_heads(self) -> None:
        """Hold ``embed_q`` and ``unembed_out`` instead of ``kv_b_proj``."""
        config = self.config
        H, R = config.num_attention_heads, config.kv_lora_rank
        del self.kv_b_proj
        self.embed_q = HeadLinear(H, R, config.qk_nope_head_dim)
        self.unembed_out = HeadLinear(H, config.v_head_dim, R)

    def __call__(self, x: mx.array, cache: LatentCache, norm: nn.RMSNorm) -> mx.array:
        config, kernels = self.config, self._kernels
        B, T, _ = x.shape
        H, R, Dv = config.num_attention_heads, config.kv_lora_rank, config.v_head_dim
        q, latent = self._queries(x, norm)
        q = q.reshape(B, T, H, -1).swapaxes(1, 2)  # [B, H, T, Dn + Dr]
        q_nope, q_rope = mx.split(q, [config.qk_nope_head_dim], axis=-1)
        latent, key_rope = mx.split(latent[:, None], [R], axis=-1)
        rope = {
            "offset": cache.positions(T),
            "scale": config.rope.attention_factor,
            "interleaved": config.rope_interleave,
        }
        start = cache.left_padding
        q_rope = kernels.rope(q_rope, self._periods, **rope)
        key_rope = kernels.rope(key_rope, self._periods, **rope)
        cache.update_and_fetch(self.kv_a_layernorm(latent), key_rope)
        latent, key_rope, length = cache.buffer()
        options = {"length": length, "scale": self.scale, "start": start}
        options["mask"] = None if T == 1 else "causal"
        if self.absorbs(T):
            q_latent = self._key_heads(q_nope)  # [B, H, T, R]
            y = kernels.latent_attention(q_latent, q_rope, latent, key_rope, **options)
            y = self._values(0, H)(y)
        else:
            y = kernels.latent_prefill(
                q_nope, q_rope, latent, key_rope, expand=self._expand, **options
            )
        y = y.swapaxes(1, 2).reshape(B, T, H * Dv)
        return project(kernels, y, self.o_proj, residual=x)[0]

    def absorbs(self, T: int) -> bool:
        """Whether T queries cost less against latents than against keys and values, which have
        to be made of the latents first."""
        config = self.config
        R, Dn, Dv = config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim
        return T * (2 * R - Dn - Dv) <= (Dn + Dv) * R

    def _queries(self, x: mx.array, norm: nn.RMSNorm) -> list[mx.array]:
        """Queries of all heads, and latent with rotary key."""
        kernels, latent = self._kernels, self.kv_a_proj_with_mqa
        if self.config.q_lora_rank is None:
            return project(kernels, x, self.q_proj, latent, norm=norm)
        low, latent = project(kernels, x, self.q_a_proj, latent, norm=norm)
        return [*project(kernels, low, self.q_b_proj, norm=self.q_a_layernorm), latent]

    def _key_heads(self, q_nope: mx.array) -> mx.array:
        """``W_K(h)^T q_nope``: ``[B, H, T, Dn]`` -> ``[B, H, T, R]``."""
        H = self.config.num_attention_heads
        if "embed_q" in self:
            return self.embed_q.heads(0, H)(q_nope)
        return self._of_kv_b(0, H, keys=True)(q_nope, transposed=True)

    def _expand(self, latent: mx.array, first: int, last: int) -> tuple[mx.array, mx.array]:
        """Keys ``[B, h, s, Dn]`` and values ``[B, h, s, Dv]`` of latents ``[B, 1, s, R]``."""
        values = self._values(first, last)(latent)
        if "embed_q" in self:
            return self.embed_q.heads(first, last)(latent, transposed=True), values
        return self._of_kv_b(first, last, keys=True)(latent), values

    def _values(self, first: int, last: int) -> HeadMatrices:
        if "unembed_out" in self:
            return self.unembed_out.heads(first, last)
        return self._of_kv_b(first, last, keys=False)

    def _of_kv_b(self, first: int, last: int, *, keys: bool) -> HeadMatrices:
        """The rows of ``kv_b_proj`` that make keys, or values: each head has both."""
        H, Dn = self.config.num_attention_heads, self.config.qk_nope_head_dim
        rows = slice(0, Dn) if keys else slice(Dn, None)
        parts = []
        for part in ("weight", "scales", "biases"):
            array = self.kv_b_proj.get(part)
            if array is not None:
                array = array.reshape(H, array.shape[0] // H, -1)[first:last, rows]
            parts.append(array)
        spec = None
        if parts[1] is not None:
            spec = QuantSpec(self.kv_b_proj.bits, self.kv_b_proj.group_size)
        return HeadMatrices(*parts, spec)
