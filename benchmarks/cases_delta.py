"""The delta rule and its surroundings at the shapes of Qwen3.6-35B-A3B, for kernels.py.

Each launch of a case depends on the one before through a small array, and the inputs rotate over
more than 200 MB, so that launches neither overlap nor find their inputs in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.kernels import delta_mixer, delta_mixer_fused, gated_delta_fused
from mlx_moeflux.kernels.gated_delta import gated_delta_recurrent

B, HK, HV, D, W = 1, 16, 32, 128, 4
DTYPE = mx.bfloat16
ROTATED_BYTES = 200e6
ERROR_TOKENS = 256
_BY_TOKEN = frozenset(("q", "k", "v", "log_decay", "beta", "qkv", "z", "a", "b"))

Inputs = dict[str, Any]
Outputs = tuple[mx.array, ...]


@dataclass(frozen=True)
class BenchmarkCase:
    """One operation at one size.

    inputs: Keyword arguments, from a seed; ours, stock: What is timed; chain: The argument and the
    index of the output that replaces it in the next launch; moved, products: Bytes that must go
    through device memory, and multiply-adds; target: Microseconds.
    """

    name: str
    inputs: Callable[[int], Inputs]
    ours: Callable[..., Outputs]
    stock: Callable[..., Outputs]
    chain: tuple[str, int]
    moved: float
    products: float
    target: float | None = None


def rule_inputs(T: int, seed: int) -> Inputs:
    """Arguments of a delta rule; keys of unit length."""
    mx.random.seed(seed)
    normal = mx.random.normal
    q, k = (_unit(normal((B, T, HK, D))) for _ in range(2))
    return {
        "q": (q * D**-0.5).astype(DTYPE),
        "k": k.astype(DTYPE),
        "v": normal((B, T, HV, D)).astype(DTYPE),
        "log_decay": -0.3 * mx.abs(normal((B, T, HV))),
        "beta": mx.sigmoid(normal((B, T, HV))),
        "state": normal((B, HV, D, D)),
    }


def mixer_inputs(T: int, seed: int) -> Inputs:
    """Arguments of a delta mixer."""
    mx.random.seed(seed)
    normal, channels = mx.random.normal, (2 * HK + HV) * D
    return {
        "qkv": normal((B, T, channels)).astype(DTYPE),
        "z": normal((B, T, HV * D)).astype(DTYPE),
        "a": normal((B, T, HV)).astype(DTYPE),
        "b": normal((B, T, HV)).astype(DTYPE),
        "conv_weight": (0.4 * normal((channels, W))).astype(DTYPE),
        "conv_state": normal((B, W - 1, channels)).astype(DTYPE),
        "state": normal((B, HV, D, D)),
        "a_log": normal((HV,)),
        "dt_bias": normal((HV,)),
        "norm_weight": normal((D,)).astype(DTYPE),
        "eps": 1e-6,
    }


def stock_rule(*, q, k, v, log_decay, beta, state) -> Outputs:
    """MLX's own operation; a fallback of single operations on CUDA."""
    return tuple(mx.fast.gated_delta_update(q, k, v, mx.exp(log_decay), beta, state))


def cases() -> list[BenchmarkCase]:
    """The targets first."""
    state = 2 * 4 * B * HV * D * D
    found = []
    for T, target in ((1, 10), (16, None), (64, None), (1024, 400), (4096, 1300), (16384, 5000)):
        found.append(
            BenchmarkCase(
                f"gated_delta T={T}",
                lambda seed, T=T: rule_inputs(T, seed),
                gated_delta_fused.gated_delta_fused,
                stock_rule,
                ("v", 0),
                state + B * T * (2 * 2 * HK * D + 2 * 2 * HV * D + 8 * HV),
                3 * B * T * HV * D * D,
                target,
            )
        )
    for T, target in ((1, 15), (4, None), (1024, None), (4096, None)):
        found.append(
            BenchmarkCase(
                f"delta_mixer T={T}",
                lambda seed, T=T: mixer_inputs(T, seed),
                delta_mixer_fused.delta_mixer_fused,
                delta_mixer.delta_mixer,
                ("conv_state", 1),
                state + B * (T + W) * 2 * (2 * HK + 3 * HV) * D,
                3 * B * T * HV * D * D,
                target,
            )
        )
    return found


def counts(case: BenchmarkCase, form: Callable[..., Outputs]) -> tuple[int, int]:
    """Numbers of launches for the slope; (0, 1) of a form that takes a step a token: one launch."""
    T = int(case.name.split("=")[1])
    if form is not case.ours and T > 64:
        return 0, 1
    return (50, 250) if T <= 16 else (10, 60) if T <= 64 else (2, 10)


def calls(form: Callable[..., Outputs], case: BenchmarkCase) -> Callable[[int], list[Outputs]]:
    """n -> so many calls, each with a state of the one before it; all results count, for a chain
    through one of them would leave the others out."""
    one = _bytes(case.inputs(0))
    rotated = [case.inputs(i) for i in range(max(1, min(100, round(ROTATED_BYTES / one))))]
    mx.eval(rotated)
    argument, output = case.chain

    def made(n: int) -> list[Outputs]:
        outputs: list[Outputs] = []
        for i in range(n):
            inputs = rotated[i % len(rotated)]
            if outputs:
                inputs = {**inputs, argument: outputs[-1][output]}
            outputs.append(form(**inputs))
        return outputs

    return made


def errors(case: BenchmarkCase) -> tuple[list[float], list[float]]:
    """Largest differences from float64 loops relative to the largest value, ours and those of the
    composition in plain MLX; of long calls over the first tokens, of the rule on two heads."""
    inputs = case.inputs(1)
    cut = {n: a[:, :ERROR_TOKENS] for n, a in inputs.items() if n in _BY_TOKEN}
    inputs = inputs | cut
    if "qkv" in inputs:
        truth, naive = _float64_mixer(**inputs), delta_mixer.delta_mixer
    else:
        inputs = {n: a[:, :, :2] if n != "state" else a[:, :2] for n, a in inputs.items()}
        inputs |= {n: inputs[n][:, :, :1] for n in ("q", "k")}
        truth, naive = _float64_rule(**inputs), gated_delta_recurrent
    ours, theirs = case.ours(**inputs), naive(**inputs)
    return tuple(
        [
            float(np.abs(_numpy(a) - b).max() / np.abs(b).max())
            for a, b in zip(found, truth, strict=True)
        ]
        for found in (ours, theirs)
    )


def _float64_mixer(
    qkv, z, a, b, conv_weight, conv_state, state, a_log, dt_bias, norm_weight, eps
) -> Outputs:
    T = qkv.shape[1]
    window = np.concatenate([_numpy(conv_state), _numpy(qkv)], axis=1)
    y = _silu(sum(window[:, w : w + T] * _numpy(conv_weight)[:, w] for w in range(W)))
    q, k, v = np.split(y, [HK * D, 2 * HK * D], axis=-1)
    q, k = (x.reshape(B, T, HK, D) for x in (q, k))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, HV // HK, axis=2) for x in (q * D**-0.5, k))
    decay = -np.exp(_numpy(a_log)) * np.logaddexp(0, _numpy(a) + _numpy(dt_bias))
    beta = 1 / (1 + np.exp(-_numpy(b)))
    y, state = _rule(q, k, v.reshape(B, T, HV, D), decay, beta, _numpy(state))
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + eps) * _numpy(norm_weight)
    return y.reshape(B, T, -1) * _silu(_numpy(z)), window[:, T:], state


def _float64_rule(q, k, v, log_decay, beta, state) -> Outputs:
    return _rule(*map(_numpy, (q, k, v, log_decay, beta, state)))


def _rule(q, k, v, log_decay, beta, state) -> Outputs:
    """q, k of one head or of as many as v has."""
    y = np.empty_like(v)
    for t in range(v.shape[1]):
        key, query = k[:, t, :, :, None], q[:, t, :, :, None]
        state = state * np.exp(log_decay[:, t])[..., None, None]
        delta = (v[:, t] - (state @ key)[..., 0]) * beta[:, t, :, None]
        state = state + delta[..., None] * key.swapaxes(-1, -2)
        y[:, t] = (state @ query)[..., 0]
    return y, state


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _unit(x: mx.array) -> mx.array:
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def _numpy(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def _bytes(inputs: Inputs) -> int:
    return sum(a.nbytes for a in inputs.values() if isinstance(a, mx.array))
