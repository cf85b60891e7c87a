"""Multi-head latent attention of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.cache import LatentCache
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.mla.head_product import HeadMatrices
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.layers import ScaledLinear, project_normed, weights_of
from mlx_moeflux.models.modules import Linear, Module, RMSNorm
from mlx_moeflux.models.rows import RowsEntry

# Epsilon of the two inner norms in transformers, which ignores rms_norm_eps there.
INNER_EPS = 1e-6


class HeadLinear(Module):
    """One matrix per head: ``weight [H, out, in]``; mlx-lm's ``embed_q`` and ``unembed_out``."""

    def __init__(self, heads: int, output_dims: int, input_dims: int):
        super().__init__()
        scale = input_dims**-0.5
        self.weight = mx.random.uniform(-scale, scale, (heads, output_dims, input_dims))
        self._spec: QuantSpec | None = None

    def to_quantized(self, group_size: int, bits: int, mode: str = "affine") -> HeadLinear:
        """Return this layer quantised along its inputs."""
        module = HeadLinear.__new__(HeadLinear)
        nn.Module.__init__(module)
        module._spec = QuantSpec(bits, group_size, mode)
        module.weight, module.scales, *biases = mx.quantize(
            self.weight, group_size, bits, mode=mode
        )
        if biases:
            module.biases = biases[0]
        module.freeze()
        return module

    def matrices(self) -> HeadMatrices:
        """Return the current parameters."""
        scales, biases = self.get("scales"), self.get("biases")
        return HeadMatrices(self.weight, scales, biases, self._spec, 0, self.weight.shape[1])


class Queries(NamedTuple):
    """Queries of T tokens: each head's ``whole [B, T, H, Dn + Dr]`` as projected, its rotated part
    ``rotary [B, H, T, Dr]``, and, of the absorbed form, ``latent [B, H, T, R]``. values: Each
    head's matrix, which makes values of latents."""

    whole: mx.array
    rotary: mx.array
    latent: mx.array | None
    values: HeadMatrices

    def of(self, which: slice) -> Queries:
        """Return those of some of the tokens."""
        latent = None if self.latent is None else self.latent[:, :, which]
        return Queries(self.whole[:, which], self.rotary[:, :, which], latent, self.values)


class LatentAttention(Module):
    """Attention whose keys and values are linear maps of one latent per position.

    config: A DeepSeek-V3 config; :mod:`mlx_moeflux.kernels.mla.latent_attention` states the shapes.

    Shapes:
        x: ``[B, T, C]``; returns x + attention(norm(x)).

    Parameters (names as in the checkpoint): ``q_a_proj``, ``q_a_layernorm``, ``q_b_proj``, or
    ``q_proj`` where ``q_lora_rank`` is null; ``kv_a_proj_with_mqa``, ``kv_a_layernorm``;
    ``kv_b_proj [H (Dn + Dv), R]``, or mlx-lm's ``embed_q [H, R, Dn]`` and ``unembed_out
    [H, Dv, R]`` (:meth:`use_split_heads`); ``o_proj``.

    Source: transformers `DeepseekV3Attention`.
    """

    reads: ClassVar[Mapping[str, type]] = {
        "q_a_layernorm": nn.RMSNorm,
        "kv_a_layernorm": nn.RMSNorm,
        "embed_q": HeadLinear,
        "unembed_out": HeadLinear,
    }

    def __init__(self, config: Any, kernels: Kernels):
        super().__init__()
        C, H, R = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        Dn, Dr, Dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.config, self._kernels = config, kernels
        bias = config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = Linear(C, H * (Dn + Dr), bias=False)
        else:
            self.q_a_proj = Linear(C, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=INNER_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, H * (Dn + Dr), bias=False)
        self.kv_a_proj_with_mqa = Linear(C, R + Dr, bias=bias)
        self.kv_a_layernorm = RMSNorm(R, eps=INNER_EPS)
        self.kv_b_proj = Linear(R, H * (Dn + Dv), bias=False)
        self.o_proj = Linear(H * Dv, C, bias=bias)
        self.scale = (Dn + Dr) ** -0.5 * config.rope.softmax_factor()
        self._frequencies = 1.0 / mx.array(config.rope.periods(Dr))
        mx.eval(self._frequencies)
        # Arrays of kv_b_proj, and what was made of them.
        self._known: tuple[Any, Any, Any, tuple[HeadMatrices, HeadMatrices]] | None = None

    def use_split_heads(self) -> None:
        """Replace ``kv_b_proj`` with ``embed_q`` and ``unembed_out``."""
        config = self.config
        H, R = config.num_attention_heads, config.kv_lora_rank
        del self.kv_b_proj
        self.embed_q = HeadLinear(H, R, config.qk_nope_head_dim)
        self.unembed_out = HeadLinear(H, config.v_head_dim, R)

    def __call__(self, x: mx.array, cache: Any, norm: nn.RMSNorm) -> mx.array:
        B, T, _ = x.shape
        projected = self._project_inputs(x, norm)
        if isinstance(cache, RowsEntry):
            y = cache.each(self._appended, *projected)
        else:
            y = self._appended(cache, *projected)
        y = y.swapaxes(1, 2).reshape(B, T, -1)
        return self._kernels.project(y, weights_of(self.o_proj), residual=x)[0]

    def _appended(self, cache: Any, q: mx.array, kv: mx.array, *others: mx.array) -> mx.array:
        """Append what :meth:`_project_inputs` returned, and return the values that its tokens see,
        ``[B, H, T, Dv]``."""
        config, kernels = self.config, self._kernels
        B, T, _ = q.shape
        q, offset = q.reshape(B, T, config.num_attention_heads, -1), cache.positions(T)
        inputs = {
            "norm": self.kv_a_layernorm.weight,
            "eps": INNER_EPS,
            "frequencies": self._frequencies,
            "offset": offset,
            "factor": config.rope.attention_factor,
            "interleaved": config.rope_interleave,
        }
        keys, values = self._matrices()
        transposed, q_latent = "embed_q" not in self, None
        absorbs = T == 1 or self.absorbs(T)
        index, newest = self.index(others, offset) if others else None, cache.newest
        rows = () if index is None else (index.keys,)
        if newest is not None and T == 1:
            inputs |= {"position": cache.columns, "transposed": transposed, "steps": kernels}
            q_latent, q_rope, newest = kernels.latent_step(q, kv, newest, keys, **inputs)
            stand_in: Any = cache
            options = stand_in.appended(newest, *rows)
        else:
            q_nope, q_rope, latent, key_rope = kernels.latent_prepare(q, kv, **inputs, nope=absorbs)
            options = cache.append(kernels, latent, key_rope, *rows)
            if absorbs:
                q_latent = kernels.head_product(q_nope, keys, transposed=transposed)
        options |= {"scale": self.scale, "mask": None if T == 1 else "causal"}
        return self.attend(Queries(q, q_rope, q_latent, values), index, cache, **options)

    def index(self, projected: Sequence[mx.array], offset: int | mx.array) -> Any:
        """Return what chooses the positions that the tokens see, with ``keys`` of its own for the
        cache, or None. projected: What :meth:`_project_inputs` returns beside queries and latents.
        offset: Position of the first token, or one for each sequence."""
        return None

    def attend(
        self,
        queries: Queries,
        index: Any,
        cache: LatentCache,
        *,
        k: mx.array,
        v: mx.array,
        **options: Any,
    ) -> mx.array:
        """Return the values ``[B, H, T, Dv]`` of the last T rows of latents k and rotary keys v.
        index: What :meth:`index` returned. options: Of the operation."""
        kernels, (q, rotary, latent, values) = self._kernels, queries
        if latent is None:
            return kernels.latent_prefill(q, rotary, k, v, expand=self._expand, **options)
        product, attention = kernels.head_product, kernels.latent_attention
        if q.shape[1] == 1 and not (product.chosen_by_name or attention.chosen_by_name):
            # The sum computes this product too, which a given callable need not know.
            return attention(latent, rotary, k, v, values=values, **options)
        return product(attention(latent, rotary, k, v, **options), values)

    def absorbs(self, T: int) -> bool:
        """Return True if attention of T queries costs less on latents than on keys and values
        expanded from them."""
        config = self.config
        R, Dn, Dv = config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim
        return T * (2 * R - Dn - Dv) <= (Dn + Dv) * R

    def _project_inputs(self, x: mx.array, norm: nn.RMSNorm) -> Sequence[mx.array]:
        """Return queries ``[B, T, H (Dn + Dr)]``, latent with rotary key ``[B, T, R + Dr]``, and
        what a subclass adds."""
        kernels, low = self._kernels, self.config.q_lora_rank is not None
        weights = weights_of(self.q_a_proj if low else self.q_proj, self.kv_a_proj_with_mqa)
        q, kv = project_normed(kernels, x, weights, norm)
        if low:
            norm, weights = self.q_a_layernorm, weights_of(self.q_b_proj)
            (q,) = kernels.project(q, weights, norm=norm.weight, eps=norm.eps)
        return q, kv

    def _expand(self, latent: mx.array, first: int, last: int) -> tuple[mx.array, mx.array]:
        """Expand latents ``[B, 1, s, R]`` to keys ``[B, h, s, Dn]``, values ``[B, h, s, Dv]``."""
        product, (keys, values) = self._kernels.head_product, self._matrices()
        keys, heads = replace(keys, heads=(first, last)), replace(values, heads=(first, last))
        return product(latent, keys, transposed="embed_q" in self), product(latent, heads)

    def _matrices(self) -> tuple[HeadMatrices, HeadMatrices]:
        """Return the matrices latent -> keys (``embed_q``: transposed) and latent -> values."""
        if "embed_q" in self:
            return self.embed_q.matrices(), self.unembed_out.matrices()
        linear, known = self.kv_b_proj, self._known
        if "bias" in linear:
            raise UnsupportedError("kv_b_proj takes no bias.")
        if (
            known is not None
            and not self.training
            and known[0] is linear.get("weight")
            and known[1] is linear.get("scales")
            and known[2] is linear.get("biases")
        ):
            return known[3]
        H, Dn = self.config.num_attention_heads, self.config.qk_nope_head_dim
        stored = weights_of(linear)[0]
        if isinstance(linear, ScaledLinear):
            # Products by heads know no global scale.
            stored = Weight(linear.dense(self.kv_a_layernorm.weight.dtype))
        if not isinstance(stored, Weight):
            # The matrix of an adapter is its product with the identity.
            norm = self.kv_a_layernorm.weight
            stored = Weight(linear(mx.eye(norm.size, dtype=norm.dtype)).T)
        rows = stored.weight.shape[0] // H
        weight = stored.weight.reshape(H, rows, -1)
        scales, biases = (
            None if part is None else part.reshape(H, rows, -1)
            for part in (stored.scales, stored.biases)
        )
        whole = HeadMatrices(weight, scales, biases, stored.spec, 0, rows)
        both = replace(whole, count=Dn), replace(whole, first=Dn, count=whole.count - Dn)
        if not self.training and "weight" in linear:
            # Evaluate before publishing: two threads must not evaluate one array.
            mx.eval([part for part in (weight, scales, biases) if part is not None])
            self._known = linear["weight"], linear.get("scales"), linear.get("biases"), both
        return both

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        if self.config.q_lora_rank is None:
            return [(self.q_proj, self.kv_a_proj_with_mqa)]
        return [(self.q_a_proj, self.kv_a_proj_with_mqa)]
