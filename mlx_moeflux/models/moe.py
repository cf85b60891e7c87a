"""The Mixture-of-Experts block: router, routed experts in a store, shared expert.

The experts of a resident model are parameters (``switch_mlp``, mlx-lm's names): they are saved,
loaded, quantised and, unless quantised, trained. Experts of a streamed model belong to its store
and are not parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checks import has_parameter, is_positive, shown
from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.experts.compute import check_ids
from mlx_moeflux.experts.policies.prefetch import MOST_PAIRS
from mlx_moeflux.experts.store import check_result
from mlx_moeflux.kernels.moe.expert_ffn import Activation, ExpertBank, ProjectionBank, swiglu
from mlx_moeflux.kernels.nested import describe
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.hooks import Hooks
from mlx_moeflux.models.layers import PreciseLinear, SwiGLU, project_normed, weights_of
from mlx_moeflux.models.modules import RMS_NORMS, Linear, Module, declares_traceable
from mlx_moeflux.models.record import Recorder


class Router(Protocol):
    """Chooses experts. Replace it with ``load(router=...)``.

    One object serves all layers. If its ``__call__`` has a parameter ``layer``, it gets the id of
    the MoE layer as ``layer=``.

    A class with ``traceable = True`` in its own body depends on the logits and the layer alone and
    chooses K experts for every token, so that decode steps may be traced, see
    :func:`~mlx_moeflux.models.modules.declares_traceable`. Other routers run at every step.
    """

    num_experts_per_tok: int

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Map logits ``[N, E]`` to ids ``[N, K]`` uint32, ascending and distinct in each row, and
        weights ``[N, K]`` float32, normalised and scaled.

        A row with fewer than K experts ends in ids E, which stand for no expert: nothing is read
        for them, nothing is added, and their weights are ignored."""
        ...


@runtime_checkable
class HasKernels(Protocol):
    """Part that computes with the implementations of ``kernels``; a router need not."""

    kernels: Kernels


@dataclass
class SoftmaxRouter:
    """Router with softmax over all experts: the K largest, divided by their sum if
    ``norm_topk_prob``."""

    traceable: ClassVar[bool] = True
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    kernels: Kernels = field(default_factory=Kernels)

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        return self.kernels.softmax_top_k(
            logits, k=self.num_experts_per_tok, normalise=self.norm_topk_prob
        )


def takes_layer(router: Any) -> bool:
    """Return True if a router's ``__call__`` has a parameter ``layer``."""
    return has_parameter(router, "layer")


def check_router_members(router: Any) -> None:
    """Raise an InputError if a given router is a class, cannot be called or states no K."""
    if isinstance(router, type):
        raise InputError(f"the router {router.__name__} is a class; pass an instance of it.")
    K = getattr(router, "num_experts_per_tok", None)
    if not callable(router) or not is_positive(K):
        raise InputError(
            f"the router {shown(router)} has as num_experts_per_tok {shown(K)}; give a callable "
            "with an int from 1 on; see the Router protocol."
        )


def check_router(router: Router, num_experts: int, layers: Iterable[int]) -> None:
    """Run `router` on random logits: once, or for each of `layers` if it takes its layer.

    Raises:
        InputError: It fails.
        ShapeError: K is more than the experts; or ids or weights are missing, or have a wrong
            shape, dtype, order or range.
    """
    N, K = 5, router.num_experts_per_tok
    name = type(router).__name__
    if num_experts < K:
        raise ShapeError(f"{name}.num_experts_per_tok is {K}; this model has {num_experts}.")
    logits = mx.random.normal((N, num_experts), key=mx.random.key(0))
    layered = takes_layer(router)
    for layer in layers if layered else (0,):
        try:
            answer = router(logits, **({"layer": layer} if layered else {}))
        except Exception as error:
            where = f" of layer {layer}" if layered else ""
            raise InputError(
                f"{name} fails on random logits{where}: {type(error).__name__}: {error}."
            ) from error
        _check_answer(name, answer, N, K, num_experts, layer)


def _check_answer(name: str, answer: Any, N: int, K: int, num_experts: int, layer: int) -> None:
    expected = f"(uint32[{N}, {K}], float32[{N}, {K}])"
    found = describe(answer)
    if found != expected:
        raise ShapeError(
            f"{name} returned {found} as ids and weights of {N} tokens; expected {expected}."
        )
    ids, weights = answer
    if not mx.where(ids == num_experts, True, mx.isfinite(weights)).all().item():
        raise ShapeError(f"{name} returned weights that are not finite.")
    check_ids(layer, np.array(ids), num_experts, name)


@dataclass(frozen=True)
class RouterLookahead:
    """Predicts the next MoE layer's experts: applies its router to this layer's hidden state."""

    norm: nn.Module
    block: SparseMoeBlock

    def __call__(self, hidden: mx.array, ids: mx.array) -> mx.array:
        """Map hidden ``[N, C]`` and this layer's ids ``[N, K]`` (E marks padding) to predicted ids
        ``[N, K]`` uint32, the likeliest first."""
        guess, weights = self.block.route(self.block.gate(self.norm(hidden)))
        guess = mx.take_along_axis(guess, mx.argsort(-weights, axis=-1), axis=-1)
        return mx.where(ids[:, :1] == self.block.num_experts, ids[:, :1], guess)


class ExpertProjection(Module):
    """One projection of all experts of a layer as parameters: weight, scales and biases if
    quantised, global_scale ``[E]`` and bias if it has one. See
    :class:`~mlx_moeflux.kernels.moe.expert_ffn.ProjectionBank` for shapes."""

    def __init__(self, num_experts: int, output_dims: int, input_dims: int):
        super().__init__()
        scale = input_dims**-0.5
        self.weight = mx.random.uniform(-scale, scale, (num_experts, output_dims, input_dims))
        self.spec: QuantSpec | None = None

    @property
    def bits(self) -> int:
        """Bits of a quantised weight; mlx-lm counts parameters by them."""
        if self.spec is None:
            raise AttributeError("an unquantised projection has no bits")
        if self.spec.block is not None:
            raise AttributeError("blocks are no packed words, of which mlx-lm counts bits")
        return self.spec.bits

    def to_quantized(self, group_size: int, bits: int, mode: str = "affine") -> ExpertProjection:
        """Return this projection quantised along its inputs, as mlx-lm's conversion asks for."""
        module = ExpertProjection.__new__(ExpertProjection)
        nn.Module.__init__(module)
        module.spec = QuantSpec(bits, group_size, mode)
        module.weight, module.scales, *biases = mx.quantize(
            self.weight, group_size, bits, mode=mode
        )
        if biases:
            module.biases = biases[0]
        if "bias" in self:
            module.bias = self.bias
        module.freeze()
        return module

    def bank(self) -> ProjectionBank:
        scales, biases = self.get("scales"), self.get("biases")
        bias, whole = self.get("bias"), self.get("global_scale")
        return ProjectionBank(self.weight, scales, biases, self.spec, bias, whole)


class SwitchGLU(Module):
    """The routed experts of one resident layer."""

    reads: ClassVar[Mapping[str, type]] = dict.fromkeys(
        ("gate_proj", "up_proj", "down_proj"), ExpertProjection
    )
    _bank: ExpertBank | None = None
    _activation: Activation = staticmethod(swiglu)

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = ExpertProjection(num_experts, intermediate_size, hidden_size)
        self.up_proj = ExpertProjection(num_experts, intermediate_size, hidden_size)
        self.down_proj = ExpertProjection(num_experts, hidden_size, intermediate_size)

    def bank(self) -> ExpertBank:
        """Return the current parameters as a bank, cached while none is replaced."""
        parts = (self["gate_proj"], self["up_proj"], self["down_proj"])
        cached = None if self.training else self._bank
        if cached is not None and all(
            part["weight"] is of.weight
            and part.get("scales") is of.scales
            and part.get("biases") is of.biases
            and part.get("bias") is of.bias
            and part.get("global_scale") is of.global_scale
            for part, of in zip(parts, (cached.gate, cached.up, cached.down), strict=True)
        ):
            return cached
        gate, up, down = (part.bank() for part in parts)
        fixed, activation = not self.training, self._activation
        bank = ExpertBank(gate, up, down, fixed=fixed, activation=activation)
        # Training replaces parameters; a cached bank would keep the old ones in memory.
        self._bank = None if self.training else bank
        return bank


class Prepared(NamedTuple):
    """A block's call after the choice of experts.

    post: norm(x) ``[N, C]``. ids, weights: ``[N, K]``. shared: None or a tuple of arrays, passed
    to :meth:`SparseMoeBlock.combine`. ahead: Ids ``[N, K]`` of :class:`RouterLookahead`, or None.
    """

    post: mx.array
    ids: mx.array
    weights: mx.array
    shared: Any
    ahead: mx.array | None


class SparseMoeBlock(Module):
    """Route every token to K of E experts.

    Shapes:
        x: ``[B, T, C]``, the residual; norm: applied before router and experts, or None: x is
        normed and no residual; mask: ``[B, T]`` bool or None, False for padding.
        returns: ``[B, T, C]``, the residual included.

    Parameters (names as in the checkpoint): ``gate.weight [E, C]``; ``switch_mlp.*`` in a
    resident model.

    Evaluates: nothing with a resident store, whose experts are in no ggml's blocks; the expert ids
    once per call of a partly resident layer.

    Source: transformers `Qwen3MoeSparseMoeBlock`.
    """

    _recorder: Recorder | None = None
    _hooks: Hooks | None = None
    _plain = True
    """False if code of a module in it is another's, which a fused step would pass over."""
    reads: ClassVar[Mapping[str, type]] = {"switch_mlp": SwitchGLU}

    def __init__(
        self,
        *,
        layer: int,
        hidden_size: int,
        num_experts: int,
        router: Router,
        kernels: Kernels,
    ):
        super().__init__()
        self.gate = Linear(hidden_size, num_experts, bias=False)
        self.layer, self.num_experts = layer, num_experts
        self._router, self._kernels = router, kernels
        # Asked once: a profiler puts another router around this one.
        self._takes_layer = takes_layer(router)
        # One that may be traced depends on the logits alone, and was checked at load.
        self._trusts_router = declares_traceable(router)
        self._store: Any = None
        self._lookahead: RouterLookahead | None = None

    def __call__(
        self, x: mx.array, norm: nn.RMSNorm | None, mask: mx.array | None = None
    ) -> mx.array:
        if mask is None:
            y = self._fused_step(x, norm)
            if y is not None:
                return y
        post, ids, weights, shared, ahead = self.prepare(x, norm, mask)
        options = {} if ahead is None else {"ahead": ahead}
        hooks = self._hooks
        if hooks is not None:
            (post,) = hooks.apply("before_experts", post, mask=mask)
        experts = self._store.experts(self.layer, post, ids, weights, **options)  # [N, C] float32
        if (
            not isinstance(experts, mx.array)
            or experts.dtype != mx.float32
            or experts.shape != post.shape
        ):
            check_result(self._store, self.layer, post, experts)
        if hooks is not None:
            (experts,) = hooks.apply("after_experts", experts, mask=mask)
        return self.combine(mx.zeros_like(x) if norm is None else x, experts, shared)

    def prepare(
        self, x: mx.array, norm: nn.RMSNorm | None, mask: mx.array | None = None
    ) -> Prepared:
        """Compute everything up to the choice of experts."""
        post, logits, shared = self.project_inputs(x, norm)  # [N, C], [N, E]
        hooks = self._hooks
        if hooks is not None:
            (logits,) = hooks.apply("before_router", logits, mask=mask)
        ids, weights = self.route(logits)  # [N, K]
        if mask is not None:
            ids, weights = self._without_padding(ids, weights, mask)
        if not self._trusts_router:
            self._check(ids, type(self._router).__name__)
        if hooks is not None:
            chosen = ids
            ids, weights = hooks.apply("after_router", ids, weights, mask=mask)
            if ids is not chosen:
                if mask is not None:
                    ids, weights = self._without_padding(ids, weights, mask)
                self._check(ids, "the hook after_router")
        ahead, guess = None, self._lookahead if self._store.looks_ahead else None
        if guess is not None and ids.size <= MOST_PAIRS:
            ahead = guess(x.reshape(post.shape), ids)
        if self._recorder is not None:
            self._recorder.note_mask(mask, post.shape[:1])
            self._recorder.note(
                h_post=post.reshape(x.shape), router_logits=logits, ids=ids, weights=weights
            )
        return Prepared(post, ids, weights, shared, ahead)

    def _without_padding(
        self, ids: mx.array, weights: mx.array, mask: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return ids and weights with id E, which requests no expert, where `mask` is False: so
        padding causes no reads."""
        real = mask.reshape(-1, 1)
        absent = mx.array(self.num_experts, dtype=ids.dtype)
        return mx.where(real, ids, absent), mx.where(real, weights, 0.0)

    def _check(self, ids: mx.array, source: str) -> None:
        """Check ids that code of a user chose, whatever store gets them."""
        try:
            host = np.array(ids)
        except ValueError:  # a graph transformation refuses evaluation
            return
        if host.ndim == 2 and host.size:
            check_ids(self.layer, host, self.num_experts, source)

    def _fused_step(self, x: mx.array, norm: nn.RMSNorm | None) -> mx.array | None:
        """Compute the whole block as one operation with the same bits, or return None.

        It needs an implementation for these inputs, all experts on the device, no recorder and no
        hook.
        """
        operation = self._kernels.moe_step
        if (
            type(self) not in WITH_STEP
            or not self._plain
            or norm is None
            or type(norm) not in RMS_NORMS
            or type(self._router) is not SoftmaxRouter
            or not operation.goes_beyond_reference(x)
            or self._recorder is not None
            or self._hooks is not None
        ):
            return None
        linears, down = self.matrices()
        weights = weights_of(*linears)
        direct = self._store.direct
        if direct is None or (complete := direct.whole(self.layer)) is None:
            return None
        bank, table = complete
        options = {
            "norm": norm.weight,
            "eps": norm.eps,
            "k": self._router.num_experts_per_tok,
            "normalise": self._router.norm_topk_prob,
            "table": table,
            "down": None if down is None else weights_of(down)[0],
            "exchange": direct.exchange and partial(direct.exchange, self.layer),
            "steps": self._kernels,
        }
        implementation = operation.implementation(x, weights, bank, **options)
        if implementation is operation.reference:
            return None
        direct.count(x.size // x.shape[-1], self.layer)
        return implementation.function(x, weights, bank, **options)

    def matrices(self) -> tuple[tuple[nn.Module, ...], nn.Module | None]:
        """Return the projections of norm(x), the router's first, and the shared expert's down."""
        return (self.gate,), None

    def project_inputs(
        self, x: mx.array, norm: nn.RMSNorm | None
    ) -> tuple[mx.array, mx.array, Any]:
        """Return norm(x) ``[N, C]``, router logits ``[N, E]`` and the shared expert's part for
        :meth:`combine`, of x ``[B, T, C]``."""
        weights = weights_of(self.gate)
        logits, post = project_normed(self._kernels, x, weights, norm, normed=True, flat=True)
        return post, logits, None

    def route(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Return ids and weights of logits ``[N, E]``, see :class:`Router`."""
        choose: Any = self._router
        answer = choose(logits, layer=self.layer) if self._takes_layer else choose(logits)
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise ShapeError(
                f"{type(self._router).__name__} returned {describe(answer)} in layer {self.layer}; "
                "expected ids and weights."
            )
        ids, weights = answer
        return ids, weights

    def combine(self, x: mx.array, experts: mx.array, shared: Any) -> mx.array:
        """Add residual x ``[B, T, C]``, routed experts' sum ``[N, C]`` and shared expert."""
        rows = x.reshape(experts.shape)
        return self._kernels.moe_combine(rows, experts).reshape(x.shape)


class SharedExpertMoeBlock(SparseMoeBlock):
    """MoE block with one more expert for all tokens, scaled by a sigmoid gate.

    Additional parameters: ``shared_expert.*``; ``shared_expert_gate.weight [1, C]``.

    Source: transformers `Qwen3_5MoeSparseMoeBlock`.
    """

    reads: ClassVar[Mapping[str, type]] = {**SparseMoeBlock.reads, "shared_expert": SwiGLU}

    def __init__(self, *, hidden_size: int, shared_intermediate_size: int, **block):
        super().__init__(hidden_size=hidden_size, **block)
        self.shared_expert = SwiGLU(hidden_size, shared_intermediate_size)
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False)

    def project_inputs(
        self, x: mx.array, norm: nn.RMSNorm | None
    ) -> tuple[mx.array, mx.array, Any]:
        """See :meth:`SparseMoeBlock.project_inputs`; adds the shared expert's gate, up, score."""
        weights = weights_of(*self.stacks()[0])
        logits, score, gate, up, post = project_normed(
            self._kernels, x, weights, norm, normed=True, flat=True
        )
        if self._recorder is not None:
            self._recorder.note(gate_score=score)
        return post, logits, (gate, up, score)

    def matrices(self) -> tuple[tuple[nn.Module, ...], nn.Module | None]:
        """See :meth:`SparseMoeBlock.matrices`."""
        return self.stacks()[0], self.shared_expert.down_proj

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        expert = self.shared_expert
        return [(self.gate, self.shared_expert_gate, expert.gate_proj, expert.up_proj)]

    def combine(self, x: mx.array, experts: mx.array, shared: Any) -> mx.array:
        """See :meth:`SparseMoeBlock.combine`."""
        gate, up, score = shared
        down = weights_of(self.shared_expert.down_proj)[0]
        if self._recorder is not None and self._recorder.wants("shared_out"):
            self._recorder.note(shared_out=down.matmul(nn.silu(gate) * up))
        return self._kernels.add_shared(x, experts, gate, up, down, score=score)


# Blocks of which moe_step computes the whole; a subclass of one may compute something else.
WITH_STEP = (SparseMoeBlock, SharedExpertMoeBlock)


@dataclass
class GroupedRouter:
    """Router with sigmoid scores: the K best experts of the best groups, chosen with a bias.

    :class:`SigmoidMoeBlock` passes its layer's ``e_score_correction_bias`` to this router, and to
    no router of another kind. It affects the choice and not the weights.
    """

    traceable: ClassVar[bool] = True
    num_experts_per_tok: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    scale: float = 1.0
    kernels: Kernels = field(default_factory=Kernels)

    def __call__(self, logits: mx.array, bias: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Return ids and weights of logits ``[N, E]`` and bias ``[E]``, as a
        :class:`Router` does."""
        return self.kernels.sigmoid_top_k(
            logits,
            mx.zeros(logits.shape[-1:]) if bias is None else bias,
            k=self.num_experts_per_tok,
            groups=self.n_group,
            kept_groups=self.topk_group,
            normalise=self.norm_topk_prob,
            scale=self.scale,
        )


class Gate(PreciseLinear):
    """Parameters ``gate.weight [E, C]`` and ``gate.e_score_correction_bias [E]``; logits are
    computed in float32, as in transformers."""

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__(hidden_size, num_experts)
        self.e_score_correction_bias = mx.zeros((num_experts,))


class SigmoidMoeBlock(SparseMoeBlock):
    """MoE block with a bias per expert, and shared experts, if any, as one SwiGLU added unscaled.

    shared_intermediate_size: Inner width of the shared experts together; 0 for none. precise_gate:
    The router is a :class:`Gate`; otherwise a linear layer of the compute dtype, which may be
    quantised.

    Additional parameters: ``e_score_correction_bias [E]``, of ``gate`` if it is precise;
    ``shared_experts.*``.

    Source: transformers 5.23 `DeepseekV3MoE`, which GLM-4 and MiniMax-M2 follow; mlx-lm 0.32.2
    differs: it scores masked groups 0, not minus infinity.
    """

    reads: ClassVar[Mapping[str, type]] = {**SparseMoeBlock.reads, "shared_experts": SwiGLU}

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        shared_intermediate_size: int = 0,
        precise_gate: bool = True,
        **block: Any,
    ):
        super().__init__(hidden_size=hidden_size, num_experts=num_experts, **block)
        # Asked once: a profiler puts another router around this one.
        self._passes_bias = isinstance(self._router, GroupedRouter)
        if precise_gate:
            self.gate = Gate(hidden_size, num_experts)
        else:
            self.e_score_correction_bias = mx.zeros((num_experts,))
        if shared_intermediate_size:
            self.shared_experts = SwiGLU(hidden_size, shared_intermediate_size)

    def prepare(
        self, x: mx.array, norm: nn.RMSNorm | None, mask: mx.array | None = None
    ) -> Prepared:
        """Do what :meth:`SparseMoeBlock.prepare` does and add the shared experts' gate and up.

        They depend on the ids, so that the top-k kernel launches first: for one token it is a
        single threadgroup, which would otherwise wait behind them.
        """
        prepared = super().prepare(x, norm, mask)
        post = mx.depends([prepared.post], [prepared.ids])[0]
        shared = []
        for linears in self.stacks():
            shared += self._kernels.project(post, weights_of(*linears), flat=True)
        return prepared._replace(shared=shared)

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        expert = self.get("shared_experts")
        return [] if expert is None else [(expert.gate_proj, expert.up_proj)]

    def route(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """See :meth:`SparseMoeBlock.route`."""
        if self._passes_bias:
            choose: Any = self._router
            owner = self if "e_score_correction_bias" in self else self.gate
            bias = owner["e_score_correction_bias"]
            if self._takes_layer:
                return choose(logits, bias, layer=self.layer)
            return choose(logits, bias)
        return super().route(logits)

    def combine(self, x: mx.array, experts: mx.array, shared: Any) -> mx.array:
        """See :meth:`SparseMoeBlock.combine`; the shared experts' sum is not scaled."""
        if not shared:
            return super().combine(x, experts, shared)
        gate, up = shared
        down = weights_of(self.shared_experts.down_proj)[0]
        if self._recorder is not None and self._recorder.wants("shared_out"):
            self._recorder.note(shared_out=down.matmul(nn.silu(gate) * up))
        return self._kernels.add_shared(x, experts, gate, up, down)


def grouped_router(config: Any, kernels: Kernels, experts_per_token: int | None) -> GroupedRouter:
    """Return the router of a config with DeepSeek-V3's keys; `experts_per_token` overrides the
    config's number."""
    return GroupedRouter(
        experts_per_token or config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        norm_topk_prob=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        kernels=kernels,
    )


def routes_in_float32(name: str) -> bool:
    """Return True for parameters of a :class:`Gate`; see :meth:`DecoderModel.keeps_float32`."""
    return ".mlp.gate." in name
