"""Which experts a token takes, and with what weight.

softmax_top_k:
    p = softmax(logits);  ids = the K largest logits;  w = p[ids] (/ sum p[ids])

sigmoid_top_k:
    s = sigmoid(logits);  c = s + bias;  w = scale s[ids] (/ sum s[ids])
    ids = the K largest c in the best groups; a group's score is the sum of its two largest c

Shapes:
    logits: ``[N, E]``; bias: ``[E]`` float32.
    returns: ids ``[N, K]`` uint32, ascending in each row; weights ``[N, K]`` float32.

Ties go to the lower id. Ids come out ascending, because expert outputs are added in that order.

Source: transformers `Qwen3_5MoeTopKRouter` and `DeepseekV3TopkRouter`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof, is_prompt
from mlx_moeflux.kernels.runtime.launcher import LEAST_INPUT, MetalKernel, float_bits

MOST_EXPERTS, MOST_CHOSEN, MOST_GROUPS = 512, 16, 32
SIMDGROUPS = 4  # tokens of a threadgroup

_SOFTMAX = MetalKernel(
    "softmax_top_k",
    file="router.metal",
    inputs=("logits",),
    outputs=("ids", "weights"),
    body="""
        softmax_top_k<T, E, K, NORMALISE>(
            logits, ids, weights, logits_shape[0], thread_position_in_grid.x / 32,
            thread_index_in_simdgroup);
    """,
)
_SIGMOID = MetalKernel(
    "sigmoid_top_k",
    file="router.metal",
    inputs=("logits", "bias"),
    outputs=("ids", "weights"),
    body="""
        sigmoid_top_k<T, E, K, GROUPS, KEPT, NORMALISE, SCALE>(
            logits, bias, ids, weights, logits_shape[0], thread_position_in_grid.x / 32,
            thread_index_in_simdgroup);
    """,
)


def softmax_top_k(logits: mx.array, *, k: int, normalise: bool = True) -> tuple[mx.array, mx.array]:
    """The module's first formula; the softmax is over all experts in float32."""
    p = mx.softmax(logits.astype(mx.float32), axis=-1)
    ids = mx.stop_gradient(mx.sort(top_k_ids(logits, k), axis=-1))
    weights = mx.take_along_axis(p, ids, axis=-1)
    if normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids.astype(mx.uint32), weights


def sigmoid_top_k(
    logits: mx.array,
    bias: mx.array,
    *,
    k: int,
    groups: int = 1,
    kept_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[mx.array, mx.array]:
    """The module's second formula, in float32. `bias` moves the choice, never the weights.

    groups, kept_groups: The experts are cut into `groups` neighbours of equal number, of which
    each token may use the `kept_groups` best.
    """
    N, E = logits.shape
    scores = mx.sigmoid(logits.astype(mx.float32))
    choice = mx.stop_gradient(scores) + bias
    if kept_groups < groups:
        grouped = choice.reshape(N, groups, E // groups)
        best = mx.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)  # [N, groups]
        kept = top_k_ids(best, kept_groups)  # [N, kept_groups]
        open_ = (kept[:, None] == mx.arange(groups)[:, None]).any(axis=-1)  # [N, groups]
        choice = mx.where(open_[..., None], grouped, -mx.inf).reshape(N, E)
    ids = mx.stop_gradient(mx.sort(top_k_ids(choice, k), axis=-1))
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids.astype(mx.uint32), weights * scale


def top_k_ids(scores: mx.array, k: int) -> mx.array:
    """The k largest of ``[N, E]`` per row, best first; ties to the lower index.

    A stable sort of the negated scores: argpartition promises no order among equals.
    """
    return mx.argsort(-scores, axis=-1)[:, :k]


def softmax_top_k_fused(logits, *, k, normalise=True) -> tuple[mx.array, mx.array]:
    """:func:`softmax_top_k` in one launch, a simdgroup a token.

    Raises:
        ShapeError: More than 512 experts, K above 16 or above E, or (on Metal) less than 8 logits.
    """
    E = _checked(logits, k)
    template = {"T": logits.dtype, "E": E, "K": k, "NORMALISE": normalise}
    return _launch(_SOFTMAX, logits, k=k, template=template)


def sigmoid_top_k_fused(
    logits, bias, *, k, groups=1, kept_groups=1, normalise=True, scale=1.0
) -> tuple[mx.array, mx.array]:
    """:func:`sigmoid_top_k` in one launch, a simdgroup a token.

    Raises:
        ShapeError: As :func:`softmax_top_k_fused`; or the experts cannot be cut into `groups` of
            two or more, there are more than 32 groups, or the kept ones hold fewer than K experts.
    """
    E = _checked(logits, k)
    if bias.shape != (E,) or bias.dtype != mx.float32:
        raise ShapeError(f"router: bias is {bias.dtype} {list(bias.shape)}, not float32 [{E}].")
    if kept_groups < groups and (
        groups > MOST_GROUPS or E % groups or 2 * groups > E or E // groups * kept_groups < k
    ):
        raise ShapeError(
            f"router: {k} of {E} experts in {kept_groups} of {groups} groups; the kernel takes up "
            f"to {MOST_GROUPS} equal groups of 2 or more experts, with {k} in the kept ones."
        )
    template = {"T": logits.dtype, "E": E, "K": k, "NORMALISE": normalise, "GROUPS": groups}
    template |= {"KEPT": min(kept_groups, groups), "SCALE": float_bits(scale)}
    return _launch(_SIGMOID, logits, bias, k=k, template=template)


def _checked(logits: mx.array, k: int) -> int:
    if logits.ndim != 2:
        raise ShapeError(f"router: logits are {list(logits.shape)}, expected [N, E].")
    E = logits.shape[1]
    if not 1 <= k <= min(E, MOST_CHOSEN) or E > MOST_EXPERTS:
        raise ShapeError(
            f"router: {k} of {E} experts; the kernel takes up to {MOST_CHOSEN} of up to "
            f"{MOST_EXPERTS}."
        )
    return E


def _launch(
    kernel: MetalKernel, *inputs: mx.array, k: int, template: dict
) -> tuple[mx.array, mx.array]:
    N = inputs[0].shape[0]
    simdgroups = min(SIMDGROUPS, N)
    groups, shapes, dtypes = (-(-N // simdgroups), 1), [(N, k), (N, k)], (mx.uint32, mx.float32)
    ids, weights = kernel(*inputs, **launch_of(template, groups, 32 * simdgroups, shapes, *dtypes))
    return ids, weights


def _are_wide(logits: mx.array, *others: mx.array, **options: Any) -> bool:
    """Return True if Metal does not refuse a single row for its size."""
    return logits.shape[-1] >= LEAST_INPUT


def _softmax_workload(s: Sizes, n: int, x: Normal) -> Arguments:
    return (x(n, s.E),), {"k": s.K}


SOFTMAX_TOP_K = Operation(
    name="softmax_top_k",
    reference=softmax_top_k,
    others={
        "fused": Implementation(softmax_top_k_fused, kernels=(_SOFTMAX,), joins=_are_wide),
        "blas": Implementation(blas.softmax_top_k_blas, on_cpu=True, joins=True),
    },
    size=slice(0, 1),
    tokens={"logits": 0},
    reference_joins=True,
    proof=Proof(
        example=_softmax_workload,
        example_tokens=examples.N,
        workloads={"": _softmax_workload},
        by_rows=True,
        chooses=True,
        timed=is_prompt,
    ),
)


def _sigmoid_workload(s: Sizes, n: int, x: Normal) -> Arguments:
    E, options = s.E + -s.E % 8, {"k": s.K, "groups": 8, "kept_groups": 4, "scale": 2.5}
    return (x(n, E), x(E, dtype=mx.float32)), options


SIGMOID_TOP_K = Operation(
    name="sigmoid_top_k",
    reference=sigmoid_top_k,
    others={"fused": Implementation(sigmoid_top_k_fused, kernels=(_SIGMOID,), joins=_are_wide)},
    size=slice(0, 1),
    tokens={"logits": 0},
    reference_joins=True,
    proof=Proof(
        example=_sigmoid_workload,
        example_tokens=examples.N,
        workloads={"": _sigmoid_workload},
        by_rows=True,
        chooses=True,
        timed=is_prompt,
    ),
)
