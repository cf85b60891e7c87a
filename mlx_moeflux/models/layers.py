"""Blocks that two or more architectures share."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.linear.project import Weight
from mlx_moeflux.kernels.registry import Kernels


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``: x ``[..., C]`` -> ``[..., C]``, inner width F."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        return [(self.gate_proj, self.up_proj)]


class DenseMlp(SwiGLU):
    """The whole second half of a dense layer: x ``[B, T, C]`` plus the SwiGLU of norm(x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, kernels: Kernels):
        super().__init__(hidden_size, intermediate_size)
        self._kernels = kernels

    def __call__(self, x: mx.array, norm: nn.RMSNorm) -> mx.array:
        weights = weights_of(*self.stacks()[0])
        gate, up = self._kernels.project(x, weights, norm=norm.weight, eps=norm.eps, flat=True)
        return self._kernels.add_shared(x, None, gate, up, weight_of(self.down_proj))


class PreciseLinear(nn.Module):
    """A matrix ``weight [out, in]`` whose products are float32, whatever x is; never quantised."""

    def __init__(self, input_dims: int, output_dims: int):
        super().__init__()
        scale = input_dims**-0.5
        self.weight = mx.random.uniform(-scale, scale, (output_dims, input_dims))

    def __call__(self, x: mx.array) -> mx.array:
        return weight_of(self).matmul(x)


@dataclass(frozen=True)
class Applied:
    """A module in the place of a matrix: an adapter, a linear layer with a bias, anything."""

    module: nn.Module
    weight: None = None
    scales: None = None
    spec: None = None

    def stored(self) -> dict[str, mx.array]:
        """Nothing that could be laid elsewhere."""
        return {}

    def matmul(self, x: mx.array) -> mx.array:
        tied = getattr(self.module, "as_linear", None)
        return self.module(x) if tied is None else tied(x)


def weight_of(linear: nn.Module) -> Weight | Applied:
    """The matrix of a linear layer, or of an embedding that is one, as kernels take it; it is what
    it is at this moment."""
    if isinstance(linear, PreciseLinear):
        return Weight(linear.weight.astype(mx.float32), precise=True)
    if "bias" not in linear:
        # By key: an attribute of a module takes ten times as long, and a step has 60 matrices.
        if type(linear) in (nn.Linear, nn.Embedding):
            return Weight(linear["weight"])
        if type(linear) in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            spec = _spec(linear.bits, linear.group_size, linear.mode)
            return Weight(linear["weight"], linear["scales"], linear.get("biases"), spec)
    return Applied(linear)


_spec = functools.cache(QuantSpec)


@dataclass(frozen=True)
class Stack:
    """Matrices of one input that were laid one behind another: fewer arrays for a launch.

    linears: Whose parameters are now rows of `weights`; they are as `rows` while nobody replaces
    them.
    """

    linears: tuple[nn.Module, ...]
    weights: list[Weight]
    rows: list[tuple[mx.array | None, mx.array | None]]
    joined: Weight | None
    """All as one matrix, if they are stored alike."""

    def arrays(self) -> list[mx.array]:
        """All of `weights`."""
        return [array for weight in self.weights for array in weight.stored().values()]

    def parts(self) -> list[mx.array]:
        """Parameters that are rows of an array of `weights`, and not all of it."""
        whole = {id(array) for array in self.arrays()}
        names = ("weight", "scales", "biases")
        stored = [each[name] for each in self.linears for name in names if name in each]
        return [array for array in stored if id(array) not in whole]

    def holds(self, linears: tuple[nn.Module, ...]) -> bool:
        """Whether `linears` are these, with the parameters that were stacked."""
        return len(linears) == len(self.linears) and all(
            a is b and a.get("weight") is w and a.get("scales") is s
            for a, b, (w, s) in zip(linears, self.linears, self.rows, strict=True)
        )


def stack(*linears: nn.Module) -> None:
    """Lay neighbours among `linears` that are stored alike one behind another. Their parameters
    become rows of what comes of it, under their own names; nothing is held twice.

    Evaluates: the new arrays.
    """
    weights, done = [], 0
    while done < len(linears):
        first = weight_of(linears[done])
        group = [linears[done]]
        for other in linears[done + 1 :]:
            if not _alike(first, weight_of(other)):
                break
            group.append(other)
        weights.append(first if len(group) == 1 else _stacked(group, first))
        done += len(group)
    linears[0]._stack = restack(linears, weights)


def restack(linears: tuple[nn.Module, ...], weights: list[Weight | Applied]) -> Stack:
    """Make the parameters of `linears` rows of `weights`, in which they lie in this order.

    Evaluates: the rows.
    """
    rest = iter(linears)
    for weight in weights:
        outs = getattr(weight, "outs", ())
        group, start = [next(rest) for _ in outs or (0,)], 0
        for each, out in zip(group, outs, strict=False):
            for name, whole in weight.stored().items():
                each[name] = whole[start : start + out]
                mx.eval(each[name])
            start += out
    rows = [(each.get("weight"), each.get("scales")) for each in linears]
    one = len(weights) == 1 and len(linears) > 1
    return Stack(linears, weights, rows, replace(weights[0], outs=()) if one else None)


def _alike(a: Weight | Applied, b: Weight | Applied) -> bool:
    if not isinstance(a, Weight) or not isinstance(b, Weight) or a.spec != b.spec:
        return False
    scales = [None if w.scales is None else w.scales.dtype for w in (a, b)]
    return (
        a.weight.shape[1:] == b.weight.shape[1:]
        and a.weight.dtype == b.weight.dtype
        and scales[0] == scales[1]
    )


def _stacked(group: list[nn.Module], first: Weight) -> Weight:
    outs = tuple(each.weight.shape[0] for each in group)
    whole = {}
    for name in ("weight", "scales", "biases"):
        if getattr(first, name) is None:
            continue
        whole[name] = mx.concatenate([each[name] for each in group])
        mx.eval(whole[name])
    return Weight(**whole, spec=first.spec, outs=outs)


def weights_of(*linears: nn.Module) -> list[Weight | Applied]:
    """The matrices of `linears`; those that were stacked, and lead, as one."""
    known = getattr(linears[0], "_stack", None)
    weights = []
    if known is not None and known.holds(linears[: len(known.linears)]):
        weights, linears = list(known.weights), linears[len(known.linears) :]
    for each in linears:
        weights.append(weight_of(each))
    return weights


def joined_weight(*linears: nn.Module) -> Weight | None:
    """The one matrix that :func:`stack` made of them, if it did."""
    known = getattr(linears[0], "_stack", None)
    return known.joined if known is not None and known.holds(linears) else None


def forget_dense(model: nn.Module) -> None:
    """Free what :mod:`mlx_moeflux.kernels.cpu.blas` keeps of a model's matrices."""
    for module in model.modules():
        known = getattr(module, "_stack", None)
        arrays = [] if known is None else [weight.weight for weight in known.weights]
        for array in (*arrays, *module.values()):
            blas.kept.forget(id(array))
