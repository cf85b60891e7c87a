"""Linear layers and MLPs that two or more architectures share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
    """Second half of a dense layer: x + SwiGLU(norm(x)), x ``[B, T, C]``."""

    def __init__(self, hidden_size: int, intermediate_size: int, kernels: Kernels):
        super().__init__(hidden_size, intermediate_size)
        self._kernels = kernels

    def __call__(self, x: mx.array, norm: nn.RMSNorm) -> mx.array:
        weights = weights_of(*self.stacks()[0])
        gate, up = self._kernels.project(x, weights, norm=norm.weight, eps=norm.eps, flat=True)
        return self._kernels.add_shared(x, None, gate, up, weight_of(self.down_proj))


class PreciseLinear(nn.Module):
    """Matrix ``weight [out, in]`` with float32 products for any dtype of x; never quantised."""

    def __init__(self, input_dims: int, output_dims: int):
        super().__init__()
        scale = input_dims**-0.5
        self.weight = mx.random.uniform(-scale, scale, (output_dims, input_dims))

    def __call__(self, x: mx.array) -> mx.array:
        return weight_of(self).matmul(x)


@dataclass(frozen=True)
class Applied:
    """Module that stands in for a matrix: an adapter, or a linear layer with a bias."""

    module: nn.Module
    weight: None = None
    scales: None = None
    spec: None = None

    def stored(self) -> dict[str, mx.array]:
        """Return no arrays: none can be packed."""
        return {}

    def matmul(self, x: mx.array) -> mx.array:
        tied = getattr(self.module, "as_linear", None)
        return self.module(x) if tied is None else tied(x)


def weight_of(linear: nn.Module) -> Weight | Applied:
    """Return the current matrix of a linear layer or tied embedding, as kernels take it."""
    if isinstance(linear, PreciseLinear):
        return Weight(linear.weight.astype(mx.float32), precise=True)
    if "bias" not in linear:
        # By key: attribute lookup of a module is slow, and this runs for each matrix of a step.
        if type(linear) in (nn.Linear, nn.Embedding):
            return Weight(linear["weight"])
        if type(linear) in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            spec = _spec(linear.bits, linear.group_size, linear.mode)
            return Weight(linear["weight"], linear["scales"], linear.get("biases"), spec)
    return Applied(linear)


_spec = functools.cache(QuantSpec)


@dataclass(frozen=True)
class Stack:
    """Concatenated projections of one input, so that a launch takes fewer arrays.

    linears: Modules whose parameters are rows of `weights`. rows: Those parameters (weight and
    scales) when the stack was made; another array means that a parameter was replaced.
    """

    linears: tuple[nn.Module, ...]
    weights: Sequence[Weight | Applied]
    rows: list[tuple[mx.array | None, mx.array | None]]
    joined: Weight | None
    """All of `weights` as one matrix, or None if they are stored differently."""

    def arrays(self) -> list[mx.array]:
        """Return all arrays of `weights`."""
        return [array for weight in self.weights for array in weight.stored().values()]

    def parts(self) -> list[mx.array]:
        """Return the parameters that are proper slices of an array of `weights`."""
        whole = {id(array) for array in self.arrays()}
        names = ("weight", "scales", "biases")
        stored = [each[name] for each in self.linears for name in names if name in each]
        return [array for array in stored if id(array) not in whole]

    def holds(self, linears: tuple[nn.Module, ...]) -> bool:
        """Return True if `linears` are the stacked modules and no parameter was replaced."""
        return len(linears) == len(self.linears) and all(
            a is b and a.get("weight") is w and a.get("scales") is s
            for a, b, (w, s) in zip(linears, self.linears, self.rows, strict=True)
        )


def stack(*linears: nn.Module) -> None:
    """Concatenate neighbours among `linears` that are stored alike. Their parameters become views
    of the concatenation and keep their names.

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
        weights.append(_stacked(group, first) if isinstance(first, Weight) else first)
        done += len(group)
    linears[0]._stack = restack(linears, weights)


def restack(linears: tuple[nn.Module, ...], weights: Sequence[Weight | Applied]) -> Stack:
    """Make the parameters of `linears` views of `weights`, which hold them in this order.

    Evaluates: the views.
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
    first = weights[0] if len(weights) == 1 and len(linears) > 1 else None
    joined = replace(first, outs=()) if isinstance(first, Weight) else None
    return Stack(linears, weights, rows, joined)


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
    """Return the matrices of `group`, which are stored like `first`, as one."""
    if len(group) == 1:
        return first
    outs = tuple(each["weight"].shape[0] for each in group)
    whole = {}
    for name in ("weight", "scales", "biases"):
        if getattr(first, name) is None:
            continue
        whole[name] = mx.concatenate([each[name] for each in group])
        mx.eval(whole[name])
    return Weight(**whole, spec=first.spec, outs=outs)


def weights_of(*linears: nn.Module) -> list[Weight | Applied]:
    """Return the matrices of `linears`; a leading stack comes as its concatenations."""
    known = getattr(linears[0], "_stack", None)
    weights = []
    if known is not None and known.holds(linears[: len(known.linears)]):
        weights, linears = list(known.weights), linears[len(known.linears) :]
    for each in linears:
        weights.append(weight_of(each))
    return weights


def joined_weight(*linears: nn.Module) -> Weight | None:
    """Return the one matrix that :func:`stack` made of `linears`, or None."""
    known = getattr(linears[0], "_stack", None)
    return known.joined if known is not None and known.holds(linears) else None


def forget_dense(model: nn.Module) -> None:
    """Free the copies that :mod:`mlx_moeflux.kernels.cpu.blas` caches of a model's matrices."""
    for module in model.modules():
        known = getattr(module, "_stack", None)
        arrays = [] if known is None else [weight.weight for weight in known.weights]
        for array in (*arrays, *module.values()):
            blas.kept.forget(id(array))
