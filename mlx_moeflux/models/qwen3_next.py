"""Qwen3-Next: Qwen3.5-MoE's layers with two fused input projections in the delta net, and dense
layers by config.

Source: transformers 5.23 `models/qwen3_next/modeling_qwen3_next.py`, which is authoritative.
Checkpoints: Hugging Face originals, mlx-lm and mlx-community: Qwen3-Next-80B-A3B, Qwen3-Coder-Next.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models import qwen3_5_moe
from mlx_moeflux.models.layers import DenseMlp, project_normed, weights_of
from mlx_moeflux.models.modules import Linear
from mlx_moeflux.models.moe import SparseMoeBlock
from mlx_moeflux.models.qwen3_next_config import Config
from mlx_moeflux.models.rope import stretched


class FusedDeltaNet(qwen3_5_moe.GatedDeltaNet):
    """Gated delta net with ``in_proj_qkvz`` and ``in_proj_ba``.

    Their rows are grouped by key head: ``[q Dk, k Dk, v R Dv, z R Dv]`` and ``[b R, a R]``, with
    R = Hv / Hk value heads in each group. :meth:`use_split_projections` takes them apart, as
    llama.cpp's files have them.
    """

    def make_projections(self) -> None:
        """See :meth:`GatedDeltaNet.make_projections`."""
        config = self.config
        width = config.conv_dim + config.value_dim
        self.in_proj_qkvz = Linear(config.hidden_size, width, bias=False)
        self.in_proj_ba = Linear(config.hidden_size, 2 * config.linear_num_value_heads, bias=False)

    def use_split_projections(self) -> None:
        """Replace the two projections with Qwen3.5-MoE's four."""
        del self.in_proj_qkvz, self.in_proj_ba
        super().make_projections()

    def project(self, x: mx.array, norm: nn.RMSNorm | None) -> Sequence[mx.array | None]:
        """See :meth:`GatedDeltaNet.project`."""
        if "in_proj_qkvz" not in self:
            return super().project(x, norm)
        config = self.config
        B, T, _ = x.shape
        Hk, Dk = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.value_dim // Hk
        weights = weights_of(*self.stacks()[0])
        qkvz, ba = project_normed(self._kernels, x, weights, norm)
        if T == 1 and device.kind() == "metal":
            # Two launches instead of nine.
            order, gates = _orders(Hk, Dk, values, config.linear_num_value_heads // Hk)
            qkv, z = mx.split(mx.take(qkvz, order, axis=-1), [config.conv_dim], axis=-1)
            a, b = mx.split(mx.take(ba, gates, axis=-1), 2, axis=-1)
            return qkv, z, a, b
        parts = mx.split(qkvz.reshape(B, T, Hk, -1), [Dk, 2 * Dk, 2 * Dk + values], axis=-1)
        q, k, v, z = (part.reshape(B, T, -1) for part in parts)
        b, a = mx.split(ba.reshape(B, T, Hk, -1), 2, axis=-1)
        qkv = mx.concatenate([q, k, v], axis=-1)
        return qkv, z, a.reshape(B, T, -1), b.reshape(B, T, -1)

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        if "in_proj_qkvz" not in self:
            return super().stacks()
        return [(self.in_proj_qkvz, self.in_proj_ba)]


@functools.cache
def _orders(Hk: int, Dk: int, values: int, R: int) -> tuple[mx.array, mx.array]:
    """Return the rows of ``in_proj_qkvz`` and ``in_proj_ba`` in the order ``q, k, v, z`` and
    ``a, b``, int32, which have groups of `values` and `R` rows. Evaluates: both."""

    def order(*sizes: int) -> list[np.ndarray]:
        rows = np.arange(Hk * sum(sizes), dtype=np.int32).reshape(Hk, -1)
        return [part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]

    b, a = order(R, R)
    orders = mx.array(np.concatenate(order(Dk, Dk, values, values))), mx.array(np.append(a, b))
    mx.eval(*orders)  # no two threads may evaluate one array
    return orders


class Model(qwen3_5_moe.Model):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "qwen3_next"
    MLX_LM_PREFIX = ""
    DELTA_NET = FusedDeltaNet

    @classmethod
    def mlx_lm_keys(cls, config: Config) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_keys`; mlx-lm reads an interval, no list of layers."""
        keys = stretched(asdict(config), config.yarn)
        del keys["layer_types"]
        return keys | {"full_attention_interval": cls.mlx_lm_interval(config)}

    @classmethod
    def mlx_lm_name(cls, name: str) -> str:
        """See :meth:`DecoderModel.mlx_lm_name`.

        Raises:
            UnsupportedError: mlx-lm has no split projections.
        """
        if ".linear_attn.in_proj_qkv." in name:
            raise UnsupportedError(
                f"mlx-lm's qwen3_next has no '{name}', which llama.cpp's files have; convert to "
                "the packed layout."
            )
        return super().mlx_lm_name(name)

    def fit_names(self, names: Iterable[str]) -> None:
        """See :meth:`DecoderModel.fit_names`; chooses delta nets with split projections."""
        found = set(names)
        for i, layer in enumerate(self.layers):
            split = f"model.layers.{i}.linear_attn.in_proj_qkv.weight" in found
            if split and self.config.is_linear(i):
                layer["linear_attn"].use_split_projections()

    def make_mlp(self, layer: int) -> DenseMlp | SparseMoeBlock:
        """Build a MoE block with a gated shared expert, or a dense MLP."""
        config = self.config
        if config.is_sparse(layer):
            return super().make_mlp(layer)
        return DenseMlp(config.hidden_size, config.intermediate_size, self._kernels)
