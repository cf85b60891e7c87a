"""The routers and the layer's last sum at published shapes, for kernels.py.

Launches are independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.kernels import moe_combine, router

ROTATED = 8
Inputs = dict[str, Any]


@dataclass(frozen=True)
class BenchmarkCase:
    """One operation at one size.

    inputs: Keyword arguments; ours, stock: What is timed; truth: The floats that both return, in
    float64; moved: Bytes that must go through device memory; target: Microseconds.
    """

    name: str
    inputs: Callable[[], Inputs]
    ours: Callable[..., Any]
    stock: Callable[..., Any]
    truth: Callable[..., np.ndarray]
    moved: int
    target: float | None = None


def softmax_case(n: int, e: int, k: int, target: float | None = None) -> BenchmarkCase:
    def truth(logits, k):
        x = _float64(logits)
        p = np.exp(x - x.max(-1, keepdims=True))
        ids = np.sort(np.argsort(-x, axis=-1, kind="stable")[:, :k], axis=-1)
        chosen = np.take_along_axis(p, ids, axis=-1)
        return chosen / chosen.sum(-1, keepdims=True)

    return BenchmarkCase(
        f"softmax router {n} x {e} top {k}",
        lambda: {"logits": mx.random.normal((n, e)).astype(mx.bfloat16), "k": k},
        router.softmax_top_k_fused, router.softmax_top_k, truth, n * (2 * e + 8 * k), target,
    )  # fmt: skip


def sigmoid_case(n: int) -> BenchmarkCase:
    e, k, groups, kept = 256, 8, 8, 4

    def truth(logits, bias, k, groups, kept_groups, scale):
        s = 1 / (1 + np.exp(-_float64(logits)))
        choice = (s + _float64(bias)).reshape(n, groups, -1)
        best = np.sort(choice, axis=-1)[..., -2:].sum(-1)
        shut = np.argsort(-best, axis=-1, kind="stable")[:, kept_groups:]
        np.put_along_axis(choice, shut[..., None], -np.inf, axis=1)
        choice = choice.reshape(n, -1)
        ids = np.sort(np.argsort(-choice, axis=-1, kind="stable")[:, :k], axis=-1)
        chosen = np.take_along_axis(s, ids, axis=-1)
        return scale * chosen / chosen.sum(-1, keepdims=True)

    return BenchmarkCase(
        f"sigmoid router {n} x {e} top {k} in {kept} of {groups} groups",
        lambda: {
            "logits": mx.random.normal((n, e)).astype(mx.bfloat16),
            "bias": 0.1 * mx.random.normal((e,)),
            "k": k, "groups": groups, "kept_groups": kept, "scale": 2.5,
        },
        router.sigmoid_top_k_fused, router.sigmoid_top_k, truth, n * (2 * e + 8 * k), 8.0,
    )  # fmt: skip


def combine_case(n: int, c: int, *, norm: bool) -> BenchmarkCase:
    def inputs():
        made = {"residual": mx.random.normal((n, c)).astype(mx.bfloat16),
                "experts": mx.random.normal((n, c)),
                "shared": mx.random.normal((n, c)).astype(mx.bfloat16),
                "score": mx.random.normal((n, 1)).astype(mx.bfloat16)}  # fmt: skip
        if norm:
            made["norm"] = mx.random.normal((c,)).astype(mx.bfloat16)
        return made

    def truth(residual, experts, shared, score, norm=None):
        gate = 1 / (1 + np.exp(-_float64(score)))
        y = _float64(residual) + _float64(experts) + gate * _float64(shared)
        if norm is None:
            return y
        return _float64(norm) * y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)

    return BenchmarkCase(
        f"combine {n} x {c}{' and norm' if norm else ''}",
        inputs, moe_combine.moe_combine_fused, moe_combine.moe_combine, truth,
        n * c * (12 if norm else 10),
    )  # fmt: skip


def cases() -> list[BenchmarkCase]:
    """The shapes of Qwen3.5-35B-A3B and 397B-A17B, and DeepSeek-V3's router."""
    return [
        softmax_case(1, 256, 8, 8.0),
        softmax_case(2048, 256, 8),
        softmax_case(8192, 256, 8),
        softmax_case(1, 512, 10, 8.0),
        sigmoid_case(1),
        sigmoid_case(2048),
        *(combine_case(n, 2048, norm=norm) for n in (1, 2048) for norm in (False, True)),
    ]


def rotated(case: BenchmarkCase) -> list[Inputs]:
    """Evaluated inputs."""
    made = [case.inputs() for _ in range(ROTATED)]
    mx.eval(made)
    return made


def calls(form: Callable[..., Any], rotated: list[Inputs]) -> Callable[[int], Any]:
    """n -> so many calls."""
    return lambda n: [form(**rotated[i % ROTATED]) for i in range(n)]


def error(returned: Any, truth: np.ndarray) -> float:
    """Of the last float array that a form returns, relative to the largest value."""
    last = returned[-1] if isinstance(returned, tuple) else returned
    return float(np.abs(_float64(last) - truth).max() / np.abs(truth).max())


def _float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)
