"""Grouped-query attention; what differs between families is a choice."""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.layers import project_normed, weights_of
from mlx_moeflux.models.modules import Linear, Module, RMSNorm
from mlx_moeflux.models.rows import RowsEntry


class Attention(Module):
    """Grouped-query attention with norms of queries and keys and a rotary embedding.

    config: Uses ``hidden_size``, ``head_dim``, ``num_attention_heads``, ``num_key_value_heads``,
        ``rms_norm_eps``, ``rope_theta``, ``rotary_dims`` and, unless the rope is plain, ``yarn``
        (a :class:`~mlx_moeflux.models.rope.Rope`).
    gated: ``q_proj`` holds for each head its query rows, then the rows of a sigmoid gate of its
        output.
    window: Width of the sliding window in tokens, the current one included; None for full
        attention.
    qk_norm: RMS norm of queries and keys: each head by itself (weights ``[Dh]``), all heads of a
        token together (weights ``[H Dh]``) or none.
    bias: The projections of queries, keys and values have biases.
    output_bias: ``o_proj`` has one; None for the same as `bias`.
    sinks: A parameter ``sinks [Hq]`` takes part in each softmax.
    scale: Factor of the scores; None for the head size to the power of -1/2.
    shares_values: ``k_proj`` gives the values too, before the keys' norm; there is no ``v_proj``.
    value_norm: RMS norm of each head of the values, without a weight.
    head_gate: A projection ``g_proj`` gives a number a head, whose softplus scales its output.
    residual: x is added to the attention of norm(x).

    Shapes:
        x: ``[B, T, C]``; returns x + attention(norm(x)), or, without a norm, attention(x).
    """

    def __init__(
        self,
        config: Any,
        kernels: Kernels,
        *,
        gated: bool = False,
        window: int | None = None,
        qk_norm: Literal["head", "all heads"] | None = "head",
        bias: bool = False,
        output_bias: bool | None = None,
        sinks: bool = False,
        scale: float | None = None,
        shares_values: bool = False,
        value_norm: bool = False,
        head_gate: bool = False,
        residual: bool = True,
    ):
        super().__init__()
        C, Dh = config.hidden_size, config.head_dim
        Hq, Hkv = config.num_attention_heads, config.num_key_value_heads
        self.config, self.gated, self.window, self._kernels = config, gated, window, kernels
        self.qk_norm, self.value_norm = qk_norm, value_norm
        self.scale, self.residual = Dh**-0.5 if scale is None else scale, residual
        self.q_proj = Linear(C, Hq * Dh * (2 if gated else 1), bias=bias)
        self.k_proj = Linear(C, Hkv * Dh, bias=bias)
        if not shares_values:
            self.v_proj = Linear(C, Hkv * Dh, bias=bias)
        if head_gate:
            self.g_proj = Linear(C, Hq, bias=False)
        self.o_proj = Linear(Hq * Dh, C, bias=bias if output_bias is None else output_bias)
        if qk_norm is not None:
            heads = (1, 1) if qk_norm == "head" else (Hq, Hkv)
            self.q_norm = RMSNorm(heads[0] * Dh, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(heads[1] * Dh, eps=config.rms_norm_eps)
        if sinks:
            self.sinks = mx.zeros((Hq,))
        self._rotary_dims = config.rotary_dims
        yarn, self._rope_options = config.yarn, {}
        self._factors = None
        if yarn is not None:
            self._rope_options["frequencies"] = 1.0 / mx.array(yarn.periods(config.rotary_dims))
            factors = mx.where(mx.arange(Dh) < config.rotary_dims, yarn.attention_factor, 1.0)
            self._factors = factors if yarn.attention_factor != 1.0 else None
            mx.eval(self._rope_options, self._factors)

    def __call__(self, x: mx.array, cache: Any, norm: nn.RMSNorm | None) -> mx.array:
        config, kernels = self.config, self._kernels
        B, T, _ = x.shape
        Hq, Hkv, Dh = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        weights = weights_of(*self.stacks()[0])
        q, k, *own = project_normed(kernels, x, weights, norm)
        v = own[0] if "v_proj" in self else k
        if self.qk_norm == "all heads":
            q, k = self.q_norm(q), self.k_norm(k)
        q = device.reshape(q, B, T, Hq, -1)  # gated: [B, T, Hq, 2 Dh], the gate in the second half
        k, v = device.reshape(k, B, T, Hkv, Dh), device.reshape(v, B, T, Hkv, Dh)
        if self.value_norm:
            v = mx.fast.rms_norm(v, None, config.rms_norm_eps)
        gate = q if self.gated else None
        q_weight = k_weight = None
        if self.qk_norm == "head":
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        if self._factors is not None:
            # YaRN scales the rotated dimensions; a rotation keeps the factor.
            if q_weight is None or k_weight is None:
                q, k = q * self._factors.astype(q.dtype), k * self._factors.astype(k.dtype)
            else:
                q_weight, k_weight = q_weight * self._factors, k_weight * self._factors
        q, k, v = kernels.norm_rope(  # [B, H, T, Dh]
            q,
            k,
            v,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=config.rms_norm_eps,
            dims=self._rotary_dims,
            base=config.rope_theta,
            offset=cache.positions(T),
            **self._rope_options,
        )
        if isinstance(cache, RowsEntry) and (cache.lengths is None or self.window is not None):
            y = cache.each(self._appended, x, q, k, v, gate)
        else:
            y = self._appended(cache, x, q, k, v, gate)
        y = y.swapaxes(1, 2)
        if "g_proj" in self:
            y = y * nn.softplus(own[-1].astype(mx.float32)).astype(y.dtype).reshape(B, T, Hq, 1)
        y = y.reshape(B, T, Hq * Dh)
        residual = x if self.residual and norm is not None else None
        return kernels.project(y, weights_of(self.o_proj), residual=residual)[0]

    def _appended(
        self, cache: Any, x: mx.array, q: mx.array, k: mx.array, v: mx.array, gate: mx.array | None
    ) -> mx.array:
        """Do what :meth:`attend` does, within the window. gate: See the operation ``sdpa``."""
        options = {"scale": self.scale, "gate": gate}
        if "sinks" in self:
            options["sinks"] = self.sinks
        if self.window is not None:
            options |= cache.windowed(q.shape[2], self.window)
        return self.attend(x, q, k, v, cache, options)

    def attend(
        self,
        x: mx.array,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        cache: Any,
        options: dict[str, Any],
    ) -> mx.array:
        """Append k, v ``[B, Hkv, T, Dh]`` and return the attention of q ``[B, Hq, T, Dh]``, of the
        same shape. options: Of the operation."""
        buffers = cache.append(self._kernels, k, v)
        if "table" in buffers:
            return self._kernels.paged_sdpa(q, **buffers, **options)
        mask = "causal" if q.shape[2] > 1 else None
        return self._kernels.sdpa(q, **{"mask": mask, **buffers, **options})

    @property
    def reads(self) -> dict[str, type]:
        """See :class:`Module`; norms of all heads together are called."""
        names = ("q_norm", "k_norm") if self.qk_norm == "head" else ()
        return dict.fromkeys(names, nn.RMSNorm)

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        others = (self[name] for name in ("v_proj", "g_proj") if name in self)
        return [(self.q_proj, self.k_proj, *others)]
