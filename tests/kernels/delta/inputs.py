"""Random inputs of the delta rule and its surroundings, and what float64 loops make of them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from tests.kernels.harness import float64

Arrays = dict[str, mx.array]


def rule_inputs(
    B: int,
    T: int,
    Hk: int,
    Hv: int,
    Dk: int,
    Dv: int,
    *,
    dtype: mx.Dtype = mx.float32,
    masked: bool = False,
    forgets: bool = False,
    seed: int = 0,
) -> Arrays:
    """Keywords of a delta rule; `forgets`: some decays are exactly zero."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, T, Hk, Dk))
    q /= np.linalg.norm(q, axis=-1, keepdims=True) * np.sqrt(Dk)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -rng.exponential(0.3, (B, T, Hv))
    if forgets:
        log_decay[rng.random((B, T, Hv)) < 0.1] = -np.inf
    arrays = {
        "q": mx.array(q, dtype),
        "k": mx.array(k, dtype),
        "v": mx.array(rng.normal(size=(B, T, Hv, Dv)), dtype),
        "log_decay": mx.array(log_decay, mx.float32),
        "beta": mx.array(rng.random((B, T, Hv)), mx.float32),
        "state": mx.array(rng.normal(size=(B, Hv, Dv, Dk)), mx.float32),
    }
    if masked:
        arrays["mask"] = mx.array(rng.random((B, T)) < 0.7)
    return arrays


def rule(inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """y and the new state, token by token."""
    q, k, v, log_decay, beta, state = (
        float64(inputs[n]) for n in ("q", "k", "v", "log_decay", "beta", "state")
    )
    repeats = v.shape[2] // k.shape[2]
    q, k = np.repeat(q, repeats, axis=2), np.repeat(k, repeats, axis=2)
    mask = np.array(inputs["mask"]) if "mask" in inputs else np.ones(v.shape[:2], bool)
    decay = np.where(mask[..., None], np.exp(log_decay), 1.0)
    beta = np.where(mask[..., None], beta, 0.0)
    y = np.empty_like(v)
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None, None]
        recalled = (state @ k[:, t, :, :, None])[..., 0]
        delta = (v[:, t] - recalled) * beta[:, t, :, None]
        state = state + delta[..., None] * k[:, t, :, None, :]
        y[:, t] = (state @ q[:, t, :, :, None])[..., 0]
    return y, state


def mixer_inputs(
    B: int,
    T: int,
    Hk: int,
    Hv: int,
    Dk: int,
    Dv: int,
    W: int,
    *,
    dtype: mx.Dtype = mx.float32,
    masked: bool = False,
    ragged: bool = False,
    gate: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Keywords of a delta mixer. gate: None: not given."""
    rng = np.random.default_rng(seed)
    D = 2 * Hk * Dk + Hv * Dv
    shapes = {
        "qkv": (B, T, D),
        "z": (B, T, Hv * Dv),
        "a": (B, T, Hv),
        "b": (B, T, Hv),
        "conv_weight": (D, W),
        "conv_state": (B, W - 1, D),
        "norm_weight": (Dv,),
    }
    inputs: dict[str, Any] = {n: mx.array(rng.normal(size=s), dtype) for n, s in shapes.items()}
    inputs["a"] *= 6.0  # both ends of softplus
    for name, shape in (("state", (B, Hv, Dv, Dk)), ("a_log", (Hv,)), ("dt_bias", (Hv,))):
        inputs[name] = mx.array(rng.normal(size=shape), mx.float32)
    inputs["eps"] = 1e-6
    if gate is not None:
        inputs["gate"] = gate
    if masked:
        inputs["mask"] = mx.array(rng.random((B, T)) < 0.7)
    if ragged:
        inputs["lengths"] = mx.array([min(T, i) for i in range(B)], mx.int32)
    return inputs


def prepared(inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """q, k, v, log decay and beta (both 0 where masked), and the new conv state."""
    qkv, weight, window = (float64(inputs[n]) for n in ("qkv", "conv_weight", "conv_state"))
    Hv, Dv, Dk = inputs["state"].shape[1:]
    B, T, D = qkv.shape
    W, keys = weight.shape[1], (D - Hv * Dv) // 2
    mask = np.array(inputs["mask"]) if "mask" in inputs else np.ones((B, T), bool)
    window = np.concatenate([window, np.where(mask[..., None], qkv, 0.0)], axis=1)
    y = _silu(sum(window[:, j : j + T] * weight[:, j] for j in range(W)))
    q, k, v = np.split(y, [keys, 2 * keys], axis=-1)
    q, k = (_unit(x.reshape(B, T, -1, Dk)) for x in (q, k))
    a, b, a_log, dt_bias = (float64(inputs[n]) for n in ("a", "b", "a_log", "dt_bias"))
    lengths = np.array(inputs["lengths"]) if "lengths" in inputs else np.full(B, T)
    return {
        "q": q * Dk**-0.5,
        "k": k,
        "v": v.reshape(B, T, Hv, Dv),
        "log_decay": np.where(mask[..., None], -np.exp(a_log) * np.logaddexp(0, a + dt_bias), 0),
        "beta": np.where(mask[..., None], _sigmoid(b), 0.0),
        "conv": np.stack([window[i, n : n + W - 1] for i, n in enumerate(lengths)]),
    }


def mixer(inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, the new conv state and the new state."""
    parts = prepared(inputs)
    y, state = rule({**parts, "state": inputs["state"]})
    z = float64(inputs["z"])
    gate = inputs.get("gate", "silu")
    y = gated_norm(y, z.reshape(y.shape), inputs["norm_weight"], inputs["eps"], gate)
    return y.reshape(z.shape), parts["conv"], state


def gated_norm(x: Any, z: Any, weight: mx.array, eps: float, gate: str = "silu") -> np.ndarray:
    x, z = float64(x), float64(z)
    scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x * scale * float64(weight) * (_silu(z) if gate == "silu" else _sigmoid(z))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)
