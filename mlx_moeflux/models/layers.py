"""Blocks that two or more architectures share."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.choice import Kernels
from mlx_moeflux.kernels.project import Weight


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``: x ``[..., C]`` -> ``[..., C]``, inner width F."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Applied:
    """A module in the place of a matrix: an adapter, a linear layer with a bias, anything."""

    module: nn.Module
    weight: None = None
    scales: None = None
    spec: None = None

    def matmul(self, x: mx.array) -> mx.array:
        return self.module(x)


def weight_of(linear: nn.Module) -> Weight | Applied:
    """The matrix of a linear layer as kernels take it; it is what it is at this moment."""
    if "bias" not in linear:
        if type(linear) is nn.Linear:
            return Weight(linear.weight)
        if type(linear) is nn.QuantizedLinear:
            spec = QuantSpec(linear.bits, linear.group_size, linear.mode)
            return Weight(linear.weight, linear.scales, linear.get("biases"), spec)
    return Applied(linear)


def project(
    kernels: Kernels,
    x: mx.array,
    *linears: nn.Module,
    norm: nn.RMSNorm | None = None,
    residual: mx.array | None = None,
    normed: bool = False,
) -> list[mx.array]:
    """x ``[..., C]``, normalised first if `norm` is given, through every one of `linears`:
    ``[..., out_i]`` each, `residual` added to the one; with `normed` the normalised x behind
    them."""
    rows = x.reshape(-1, x.shape[-1])
    options = {} if norm is None else {"norm": norm.weight, "eps": norm.eps}
    if residual is not None:
        options["residual"] = residual.reshape(rows.shape[0], -1)
    ys = kernels.project(rows, [weight_of(each) for each in linears], **options, normed=normed)
    return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys]
