"""The Mixture-of-Experts block: router, routed experts in a store, shared expert.

The experts of a resident model are parameters (``switch_mlp``, mlx-lm's names), so that they
are saved, loaded, quantised and trained like any other. Those of a streamed model belong to its
store and are no parameters at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError
from mlx_moeflux.experts.prefetch import MOST_PAIRS
from mlx_moeflux.kernels.choice import Kernels
from mlx_moeflux.kernels.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.models.layers import SwiGLU
from mlx_moeflux.models.record import note


class Router(Protocol):
    """Chooses experts. Replace it with ``load(router=...)``."""

    num_experts_per_tok: int

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """logits ``[N, E]`` -> ids ``[N, K]`` uint32, ascending and distinct in each row, and
        weights ``[N, K]`` float32, already normalised and scaled."""
        ...


@dataclass
class SoftmaxRouter:
    """Softmax over all experts, the K largest, divided by their sum unless told otherwise."""

    num_experts_per_tok: int
    norm_topk_prob: bool = True
    kernels: Kernels = field(default_factory=Kernels)

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        return self.kernels.softmax_top_k(
            logits, k=self.num_experts_per_tok, normalise=self.norm_topk_prob
        )


def check_router(router: Router, num_experts: int) -> None:
    """Run `router` once on random logits.

    Raises:
        ShapeError: Ids or weights have a wrong shape, dtype, order or range.
    """
    N, K = 5, getattr(router, "num_experts_per_tok", None)
    name = type(router).__name__
    if not isinstance(K, int) or not 1 <= K <= num_experts:
        raise ShapeError(
            f"{name}.num_experts_per_tok is {K!r}; it must be an int between 1 and {num_experts}."
        )
    ids, weights = router(mx.random.normal((N, num_experts), key=mx.random.key(0)))
    for what, array, dtype in (("ids", ids, mx.uint32), ("weights", weights, mx.float32)):
        if array.shape != (N, K) or array.dtype != dtype:
            raise ShapeError(
                f"{name} returned {what} {array.dtype} {list(array.shape)} for {N} tokens; "
                f"expected {dtype} [{N}, {K}]."
            )
    rows = ids.tolist()
    if any(sorted(set(row)) != row or row[-1] >= num_experts for row in rows):
        raise ShapeError(
            f"{name} returned ids {rows[0]}; each row must be ascending, distinct and below "
            f"{num_experts}."
        )


@dataclass(frozen=True)
class Following:
    """What the next MoE layer's router would choose on a hidden state of this one: a guess, since
    the layers between have not seen it yet."""

    norm: nn.Module
    gate: nn.Module
    router: Router
    num_experts: int

    def __call__(self, hidden: mx.array, ids: mx.array) -> mx.array:
        """hidden ``[N, C]``, this layer's ids ``[N, K]`` (E marks padding) -> ``[N, K]`` uint32,
        the likeliest first."""
        guess, weights = self.router(self.gate(self.norm(hidden)))
        guess = mx.take_along_axis(guess, mx.argsort(-weights, axis=-1), axis=-1)
        return mx.where(ids[:, :1] == self.num_experts, ids[:, :1], guess)


class ExpertProjection(nn.Module):
    """One projection of all experts of a layer as parameters: weight, and scales and biases
    when quantised. See :class:`~mlx_moeflux.kernels.expert_ffn.ProjectionBank` for shapes."""

    def __init__(self, num_experts: int, output_dims: int, input_dims: int):
        super().__init__()
        scale = input_dims**-0.5
        self.weight = mx.random.uniform(-scale, scale, (num_experts, output_dims, input_dims))
        self.spec: QuantSpec | None = None

    def bank(self) -> ProjectionBank:
        return ProjectionBank(self.weight, self.get("scales"), self.get("biases"), self.spec)


class SwitchGLU(nn.Module):
    """The routed experts of one resident layer."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = ExpertProjection(num_experts, intermediate_size, hidden_size)
        self.up_proj = ExpertProjection(num_experts, intermediate_size, hidden_size)
        self.down_proj = ExpertProjection(num_experts, hidden_size, intermediate_size)

    def bank(self) -> ExpertBank:
        """The parameters as they are now: training replaces the arrays."""
        return ExpertBank(
            gate=self.gate_proj.bank(), up=self.up_proj.bank(), down=self.down_proj.bank()
        )


class SparseMoeBlock(nn.Module):
    """Route every token to K of E experts and add the shared expert.

    Shapes:
        x: ``[B, T, C]``, the normalised hidden state; residual: ``[B, T, C]``;
        mask: ``[B, T]`` bool or None, False where a token is padding.
        returns: ``[B, T, C]``, the residual included.

    Parameters (names as in the checkpoint): ``gate.weight [E, C]``; ``shared_expert.*``;
    ``shared_expert_gate.weight [1, C]``; ``switch_mlp.*`` in a resident model.

    Evaluates: what the store evaluates: nothing when it is resident, the expert ids once per
    call when a layer is partly resident.

    Source: transformers `Qwen3_5MoeSparseMoeBlock`.
    """

    def __init__(
        self,
        *,
        layer: int,
        hidden_size: int,
        num_experts: int,
        shared_intermediate_size: int,
        router: Router,
        kernels: Kernels,
    ):
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.shared_expert = SwiGLU(hidden_size, shared_intermediate_size)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)
        self.layer, self.num_experts = layer, num_experts
        self._router, self._kernels = router, kernels
        self._store = self._following = None

    def __call__(self, x: mx.array, residual: mx.array, mask: mx.array | None = None) -> mx.array:
        B, T, C = x.shape
        tokens = x.reshape(B * T, C)  # [N, C]
        logits = self.gate(tokens)  # [N, E]
        ids, weights = self._router(logits)  # [N, K]
        if mask is not None:
            # Padding asks for no expert: nothing is read for it and no expert is shared with it.
            real = mask.reshape(B * T, 1)
            ids = mx.where(real, ids, mx.array(self.num_experts, dtype=ids.dtype))
            weights = mx.where(real, weights, 0.0)
        options = {}
        if self._following is not None and ids.size <= MOST_PAIRS:
            options["ahead"] = self._following(residual.reshape(B * T, C), ids)
        experts = self._store.experts(self.layer, tokens, ids, weights, **options)  # [N, C] f32
        shared, score = self.shared_expert(tokens), self.shared_expert_gate(tokens)
        note(self, router_logits=logits, ids=ids, weights=weights)
        note(self, shared_out=shared, gate_score=score)
        return self._kernels.moe_combine(
            residual.reshape(B * T, C), experts, shared=shared, score=score
        ).reshape(B, T, C)
