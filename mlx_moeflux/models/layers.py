"""Layers that two or more architectures share: decoder layer, MLPs, linear layers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.cache import BaseCache
from mlx_moeflux.checkpoint.formats.decoded import NVFP4_UNIT
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.linear.quantised import scaled, settings, wide
from mlx_moeflux.kernels.linear.weight import Weight, multiplied
from mlx_moeflux.kernels.nested import describe
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.hooks import Hooks
from mlx_moeflux.models.modules import (
    RMS_NORMS,
    Embedding,
    Linear,
    Module,
    QuantizedEmbedding,
    QuantizedLinear,
    RMSNorm,
)
from mlx_moeflux.models.record import Recorder


class SwiGLU(Module):
    """``down(silu(gate(x)) * up(x))``: x ``[..., C]`` -> ``[..., C]``, inner width F."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

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
        gate, up = project_normed(self._kernels, x, weights, norm, flat=True)
        return self._kernels.add_shared(x, None, gate, up, weights_of(self.down_proj)[0])


class DecoderLayer(Module):
    """One layer: mixer, then MLP or MoE block, each after a norm and with a residual.

    mixer: Name in the checkpoint (``self_attn``, ``linear_attn``) and module; the module maps
    (x ``[B, T, C]``, cache entry, norm) to x + mixer(norm(x)) ``[B, T, C]``, or, without a norm, to
    mixer(x). mlp: A :class:`DenseMlp` or a :class:`~mlx_moeflux.models.moe.SparseMoeBlock`, which
    does the same.
    """

    _recorder: Recorder | None = None
    _hooks: Hooks | None = None
    _plain = True
    """False if its code is another's, which must be called as a whole."""

    def __init__(
        self,
        config: Any,
        *,
        mixer: tuple[str, nn.Module],
        mlp: DenseMlp | nn.Module,
    ):
        super().__init__()
        self._mixer_name, module = mixer
        self[self._mixer_name] = module
        self.make_residuals(config)
        self.mlp = mlp

    def make_residuals(self, config: Any) -> None:
        """Create what stands around the mixer and around the MLP."""
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, x: mx.array, cache: BaseCache, mask: mx.array | None = None, *, chunk: int
    ) -> mx.array:
        """Map x ``[B, T, C]`` to ``[B, T, C]``, see :meth:`walk`."""
        if self.training and cache.scratch:
            # Gradient checkpointing calls a layer a second time with the same entry.
            cache = copy.deepcopy(cache)
        return run(self.walk([x], [cache], mask, chunk=chunk))[0]

    def walk(
        self,
        xs: Sequence[mx.array],
        caches: Sequence[BaseCache],
        mask: mx.array | None,
        *,
        chunk: int,
    ) -> Generator[Pause, None, list[mx.array]]:
        """Map the x ``[B, T, C]`` of several caches, each with its own T, and pause after each part
        of a mixer's input. Several have B = 1. mask: ``[B, T]`` bool, False for padding; None if
        there is none, and for several.

        The mixer takes one x after the other. It and a dense MLP take `chunk` tokens at a time,
        which bounds their scratch. A MoE block takes all tokens, so that every expert is read once.
        """
        recorder = self._recorder if len(xs) == 1 else None
        if recorder is not None:
            recorder.begin(xs[0].shape[0])
        hooks = self._hooks
        if hooks is not None:
            xs = [hooks.apply("before_mixer", x, mask=mask)[0] for x in xs]
        mixed, parts = [], []
        for x, cache in zip(xs, caches, strict=True):
            # A traced form of an entry has no parts.
            parts = [(0, 1)] if x.shape[1] == 1 else cache.parts(x.shape[1], chunk)
            if len(parts) == 1:
                mixed.append(self.mix(x, cache))
            else:
                mixed.append((yield from self._mix_parts(x, cache, parts)))
        if hooks is not None:
            mixed = [hooks.apply("after_mixer", h, mask=mask)[0] for h in mixed]
        if len(mixed) == 1:
            h = mixed[0]
        else:
            h = mx.concatenate(mixed, axis=1)
            parts = BaseCache().parts(h.shape[1], chunk)
        out = self.feed_forward(h, mask, parts)
        if recorder is not None and isinstance(self.mlp, DenseMlp) and recorder.wants("h_post"):
            recorder.note(h_post=self.post_attention_layernorm(h))
        if recorder is not None:
            recorder.note_mask(mask, xs[0].shape[:2])
            recorder.note(input=xs[0], h_mid=h, output=out)
        if len(mixed) == 1:
            return [out]
        return list(mx.split(out, list(accumulate(m.shape[1] for m in mixed))[:-1], axis=1))

    def mix(self, x: mx.array, cache: BaseCache) -> mx.array:
        """Apply the first half, mixer and residual, to x ``[B, T, C]`` as one part."""
        return self[self._mixer_name](x, cache, self.input_layernorm)

    def feed_forward(
        self, h: mx.array, mask: mx.array | None, parts: list[tuple[int, int]]
    ) -> mx.array:
        """Apply the second half to h ``[B, T, C]``, a dense MLP part by part."""
        mlp, norm = self.mlp, self.post_attention_layernorm
        if not isinstance(mlp, DenseMlp):
            return mlp(h, norm, mask)
        return _chunked(lambda part: mlp(part, norm), h, parts)

    @property
    def router_norm(self) -> nn.Module:
        """Norm of what the router of a MoE block reads."""
        return self.post_attention_layernorm

    def begin_experts(self, h: mx.array) -> Any:
        """Apply the second half to h ``[B, 1, C]`` up to the choice of experts; return the block's
        :class:`~mlx_moeflux.models.moe.Prepared`."""
        mlp: Any = self.mlp
        return mlp.prepare(h, self.post_attention_layernorm)

    def end_experts(self, h: mx.array, experts: mx.array, shared: tuple[mx.array, ...]) -> mx.array:
        """Apply the rest to the sum of the routed experts ``[N, C]``."""
        mlp: Any = self.mlp
        return mlp.combine(h, experts, shared)

    def _mix_parts(
        self, x: mx.array, cache: BaseCache, parts: list[tuple[int, int]]
    ) -> Generator[Pause, None, mx.array]:
        """Do what :meth:`mix` does, part by part, and pause after each."""
        outputs = []
        for start, stop in parts:
            outputs.append(self.mix(x[:, start:stop], cache))
            yield Pause(outputs, [cache], left=len(parts) - len(outputs))
        h = mx.concatenate(outputs, axis=1)
        outputs.clear()  # the consumer may still hold the last pause
        return h

    def halves(self) -> list[tuple[nn.Module, ...]]:
        """Return groups of modules whose parameters the same launches read."""
        first = self[self._mixer_name], self.input_layernorm
        return [first, (self.mlp, self.post_attention_layernorm)]


class Pause(NamedTuple):
    """Point of a walk through layers at which its consumer may have evaluated what was built, and
    other calls of the model may run.

    outputs: After a layer, its outputs; within one, those of the mixer for the parts so far, until
    the walk goes on. entries: Cache entries that were written since the last pause. layers: Number
    of layers that are done, 0 within a layer. left: Number of parts that are still to come.
    """

    outputs: list[mx.array]
    entries: Sequence[BaseCache]
    layers: int = 0
    left: int = 0


def run(
    walk: Generator[Pause, None, list[mx.array]],
    after_layer: Callable[[Pause], None] | None = None,
) -> list[mx.array]:
    """Take a walk through layers to its end, and return its result. Parts of a mixer's input are
    evaluated one by one, on a GPU while the next is built. after_layer: Called at a pause after a
    layer."""
    while True:
        try:
            pause = next(walk)
        except StopIteration as end:
            return end.value
        if not pause.layers:
            _evaluate(pause.outputs)
        elif after_layer is not None:
            after_layer(pause)


def _evaluate(parts: list[mx.array]) -> None:
    """Submit the newest of `parts` and wait for it, or on a GPU for the one before: the next
    part's graph is built meanwhile."""
    device.settle()
    mx.async_eval(parts[-1])
    ahead = int(device.kind() != "cpu")
    mx.eval(parts[-1 - ahead : len(parts) - ahead])


def _chunked(function, x: mx.array, parts: list[tuple[int, int]]) -> mx.array:
    """Apply `function` to x ``[B, T, C]`` part by part. Several are evaluated one by one."""
    if len(parts) == 1:
        return function(x)
    results = []
    for start, stop in parts:
        results.append(function(x[:, start:stop]))
        _evaluate(results)
    return mx.concatenate(results, axis=1)


class PreciseLinear(Module):
    """Matrix ``weight [out, in]`` with float32 products for any dtype of x; never quantised."""

    def __init__(self, input_dims: int, output_dims: int):
        super().__init__()
        scale = input_dims**-0.5
        self.weight = mx.random.uniform(-scale, scale, (output_dims, input_dims))

    def __call__(self, x: mx.array) -> mx.array:
        return weights_of(self)[0].matmul(x)


class ScaledLinear(QuantizedLinear):
    """Linear layer in NVFP4 whose matrix has a ``global_scale [1]`` float32 besides the scales of
    its groups; see :mod:`mlx_moeflux.checkpoint.quantization`."""

    @classmethod
    def of(cls, linear: nn.QuantizedLinear) -> ScaledLinear:
        """Return `linear` with a global scale, which a checkpoint sets."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.group_size, module.bits, module.mode = linear.group_size, linear.bits, linear.mode
        for name, array in linear.parameters().items():
            module[name] = array
        module.global_scale = mx.array([float(NVFP4_UNIT)])
        module.freeze()
        return module

    @property
    def biases(self) -> None:
        """Refuse what mlx-lm's adapters read when they are fused into a matrix; there are none.

        Raises:
            UnsupportedError: Always: the numbers would lack the global scale.
        """
        raise UnsupportedError(
            "an adapter cannot be fused into a matrix in NVFP4 with a global_scale; keep the "
            "adapter, or convert the checkpoint with --dequantize first."
        )

    def __call__(self, x: mx.array) -> mx.array:
        known = settings(_spec(self.bits, self.group_size, self.mode))
        weight, scales = self["weight"], self["scales"]

        def product(rows: mx.array) -> mx.array:
            return mx.quantized_matmul(rows, weight, scales, transpose=True, **known)

        out = multiplied(product, wide(x), weight.shape[0])
        out = scaled(out, self["global_scale"], x.dtype)
        return out + self["bias"] if "bias" in self else out

    def dense(self, dtype: mx.Dtype) -> mx.array:
        """``[out, in]`` in `dtype`."""
        known = settings(_spec(self.bits, self.group_size, self.mode))
        groups = mx.dequantize(self["weight"], self["scales"], **known)
        return scaled(groups, self["global_scale"], dtype)


class BlocksLinear(Module):
    """Linear layer whose matrix is in ggml's blocks, ``weight [out, bytes of a row]`` uint8.

    mode: See :data:`~mlx_moeflux.checkpoint.blocks.BLOCK_MODES`. width: Elements of a row.
    """

    def __init__(self, input_dims: int, output_dims: int, mode: str):
        super().__init__()
        self.mode, self.width = mode, input_dims
        row = QuantSpec.of_mode(mode).row(input_dims)[1]
        self.weight = mx.zeros((output_dims, row), mx.uint8)
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        return weights_of(self)[0].matmul(x)

    def to_lora(self, **options: Any) -> nn.Module:
        """Return an adapter of this layer, for mlx-lm. options: r, scale and dropout."""
        from mlx_lm.tuner.lora import LoRALinear

        adapter: Any = LoRALinear(self.width, self.weight.shape[0], **options)
        adapter.linear = self
        return adapter


@dataclass(frozen=True)
class Applied:
    """Function that stands in for a matrix: an adapter, or a linear layer with a bias."""

    matmul: Callable[[mx.array], mx.array]
    """x ``[..., in]`` -> ``[..., out]``."""
    weight: ClassVar[None] = None
    scales: ClassVar[None] = None
    spec: ClassVar[None] = None
    outs: ClassVar[tuple[int, ...]] = ()
    precise: ClassVar[bool] = False

    def stored(self) -> dict[str, mx.array]:
        """Return no arrays: none can be packed."""
        return {}


def weights_of(*linears: nn.Module, joined: bool = True) -> list[Weight | Applied]:
    """Return the current matrices of linear layers or tied embeddings, as kernels take them.

    joined: Leading layers that were stacked come as their concatenations.
    """
    first, weights = linears[0], []
    known = first._stack if joined and isinstance(first, Module) else None
    if known is not None and known.holds(linears[: len(known.linears)]):
        weights, linears = list(known.weights), linears[len(known.linears) :]
    for each in linears:
        # By key: attribute lookup of a module is slow, and this runs for each matrix of a step.
        kind = type(each)
        if kind.__call__ is PreciseLinear.__call__:
            weights.append(Weight(each["weight"].astype(mx.float32), precise=True))
        elif kind is BlocksLinear:
            weights.append(Weight(each["weight"], spec=_of_mode(each.mode)))
        elif "bias" not in each and kind in _DENSE:
            weights.append(Weight(each["weight"]))
        elif "bias" not in each and kind in _QUANTIZED:
            spec = _spec(each.bits, each.group_size, each.mode)
            weights.append(Weight(each["weight"], each["scales"], each.get("biases"), spec))
        else:
            weights.append(_applied(each))
    return weights


def _applied(linear: nn.Module) -> Applied:
    base = linear.get("linear", linear)  # of an adapter
    known = isinstance(base, nn.Module) and "weight" in base
    out = base["weight"].shape[0] if known else 0
    return Applied(functools.partial(multiplied, linear, out=out))


_spec, _of_mode = functools.cache(QuantSpec), functools.cache(QuantSpec.of_mode)
_DENSE = {nn.Linear, nn.Embedding, Linear, Embedding}
_QUANTIZED = {nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedLinear, QuantizedEmbedding}


def project_normed(
    kernels: Kernels,
    x: mx.array,
    weights: Sequence[Weight | Applied],
    norm: Any,
    *,
    normed: bool = False,
    flat: bool = False,
) -> list[mx.array]:
    """Return the operation ``project`` of norm(x). A norm that is no plain RMS norm is called;
    without one, x is taken as it is.

    Raises:
        ShapeError: The result of `norm` has another shape than x.
    """
    if norm is not None and type(norm) in RMS_NORMS:
        options: dict[str, Any] = {"norm": norm.weight, "eps": norm.eps, "flat": flat}
        if normed:
            options["normed"] = True
        return kernels.project(x, weights, **options)
    post = x if norm is None else norm(x)
    if not isinstance(post, mx.array) or post.shape != x.shape:
        raise ShapeError(
            f"the norm {type(norm).__name__} returned {describe(post)} for {describe(x)}; expected "
            "the same shape."
        )
    post = post.astype(x.dtype)
    results = kernels.project(post, weights, flat=flat)
    if normed:
        results = [*results, post.reshape(-1, post.shape[-1]) if flat else post]
    return results


STORED = ("weight", "scales", "biases")


@dataclass(frozen=True)
class Stack:
    """Concatenated projections of one input, so that a launch takes fewer arrays.

    linears: Modules whose parameters are rows of `weights`. rows: Those parameters (STORED) when
    the stack was made; another array means that a parameter was replaced.
    """

    linears: tuple[nn.Module, ...]
    weights: Sequence[Weight | Applied]
    rows: list[tuple[mx.array | None, ...]]
    joined: Weight | None
    """All of `weights` as one matrix, or None if they are stored differently."""

    def arrays(self) -> list[mx.array]:
        """Return all arrays of `weights`."""
        return [array for weight in self.weights for array in weight.stored().values()]

    def parts(self) -> list[mx.array]:
        """Return the parameters that are proper slices of an array of `weights`."""
        whole = {id(array) for array in self.arrays()}
        stored = [each[name] for each in self.linears for name in STORED if name in each]
        return [array for array in stored if id(array) not in whole]

    def holds(self, linears: tuple[nn.Module, ...]) -> bool:
        """Return True if `linears` are the stacked modules and no parameter was replaced."""
        if len(linears) != len(self.linears):
            return False
        for each, own, (weight, scales, biases) in zip(
            linears, self.linears, self.rows, strict=True
        ):
            if each is not own or each.get("weight") is not weight:
                return False
            if each.get("scales") is not scales or each.get("biases") is not biases:
                return False
        return True


def stack(*linears: nn.Module) -> None:
    """Concatenate neighbours among `linears` that are stored alike. Their parameters become views
    of the concatenation and keep their names. Nothing is done if the first is no module of this
    package.

    Evaluates: the new arrays.
    """
    leader = linears[0]
    if not isinstance(leader, Module):
        return
    stored, weights, done = weights_of(*linears, joined=False), [], 0
    while done < len(linears):
        first, *others = stored[done:]
        alike = list(takewhile(functools.partial(_alike, first), others))
        group = linears[done : done + 1 + len(alike)]
        weights.append(_stacked(group, first) if isinstance(first, Weight) else first)
        done += len(group)
    leader._stack = restack(linears, weights)


def restack(linears: tuple[nn.Module, ...], weights: Sequence[Weight | Applied]) -> Stack:
    """Make the parameters of `linears` views of `weights`, which hold them in this order.

    Evaluates: the views.
    """
    rest = iter(linears)
    for weight in weights:
        group, start = [next(rest) for _ in weight.outs or (0,)], 0
        for each, out in zip(group, weight.outs, strict=False):
            for name, whole in weight.stored().items():
                each[name] = whole[start : start + out]
                mx.eval(each[name])
            start += out
    rows = [tuple(map(each.get, STORED)) for each in linears]
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


def _stacked(group: Sequence[nn.Module], first: Weight) -> Weight:
    """Return the matrices of `group`, which are stored like `first`, as one."""
    if len(group) == 1:
        return first
    outs = tuple(each["weight"].shape[0] for each in group)
    whole = {}
    for name in STORED:
        if getattr(first, name) is None:
            continue
        whole[name] = mx.concatenate([each[name] for each in group])
        mx.eval(whole[name])
    return Weight(**whole, spec=first.spec, outs=outs)


def joined_weight(*linears: nn.Module) -> Weight | None:
    """Return the one matrix that :func:`stack` made of `linears`, or None."""
    known = stack_of(linears[0])
    return known.joined if known is not None and known.holds(linears) else None


def stack_of(module: nn.Module) -> Stack | None:
    """Return the stack that begins with `module`, whether or not it holds, or None."""
    return module._stack if isinstance(module, Module) else None


def forget_dense(model: nn.Module) -> None:
    """Free the copies that the back end keeps of a model's matrices."""
    for module in model.modules():
        known = stack_of(module)
        arrays = [] if known is None else [weight.weight for weight in known.weights]
        for array in (*arrays, *module.values()):
            if isinstance(array, mx.array):
                device.forget(array)


def decoder_layer(layer: Any) -> DecoderLayer | None:
    """Return a layer of a model, or the one that it wraps, or None."""
    if isinstance(layer, DecoderLayer):
        return layer
    inside = layer.modules() if isinstance(layer, nn.Module) else ()
    return next((each for each in inside if isinstance(each, DecoderLayer)), None)
