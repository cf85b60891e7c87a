"""Attention, latent attention and norm + rope at the shapes of Qwen3.6-35B-A3B and DeepSeek-V3,
for kernels.py.

At one token each launch takes a result of the one before, so that
launches do not overlap; longer ones fill the GPU alone. Stock is the fastest of MLX's own: its
attention on views of the buffers, for latents also products, softmax, products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from timing import call_time

from mlx_moeflux.kernels.attention import causal_sdpa, sdpa_fused
from mlx_moeflux.kernels.latent_attention import latent_attention_fused
from mlx_moeflux.kernels.norm_rope import norm_rope, norm_rope_fused

DTYPE = mx.bfloat16
ROTATED_BYTES = 200e6

Inputs = dict[str, Any]


@dataclass(frozen=True)
class BenchmarkCase:
    """One operation at one size.

    inputs: Keyword arguments, from a seed; ours: What is timed; stock: Alternatives; chain: The
    argument that the first result replaces in the next launch, if any; moved: Bytes that must go
    through device memory; products: Multiply-adds; truth: Inputs -> float64 of some rows of the
    first result, and where those lie; target: Microseconds; least_ratio: To stock.
    """

    name: str
    inputs: Callable[[int], Inputs]
    ours: Callable[..., Any]
    stock: tuple[Callable[..., Any], ...]
    chain: str | None
    moved: float
    products: float
    truth: Callable[[Inputs], tuple[np.ndarray, Any]] | None
    target: float | None = None
    least_ratio: float | None = None


def sdpa_inputs(Hq: int, Hkv: int, T: int, S: int, D: int, Dv: int, seed: int) -> Inputs:
    """T new tokens after S - T; buffers of S rows, all in use."""
    mx.random.seed(seed)
    draw = lambda *shape: mx.random.normal(shape).astype(DTYPE)  # noqa: E731
    q, k, v = draw(1, Hq, T, D), draw(1, Hkv, S, D), draw(1, Hkv, S, Dv)
    mask = None if T == 1 else "causal"
    return {"q": q, "k": k, "v": v, "scale": D**-0.5, "mask": mask, "length": S}


def latent_inputs(H: int, T: int, S: int, R: int, P: int, seed: int) -> Inputs:
    """As sdpa_inputs, for latents."""
    mx.random.seed(seed)
    draw = lambda *shape: mx.random.normal(shape).astype(DTYPE)  # noqa: E731
    return {
        "q_latent": draw(1, H, T, R),
        "q_rotary": draw(1, H, T, P),
        "latents": draw(1, 1, S, R),
        "rotary_keys": draw(1, 1, S, P),
        "scale": 192**-0.5,
        "mask": None if T == 1 else "causal",
        "length": S,
    }


def stock_latent(*, q_latent, q_rotary, latents, rotary_keys, scale, mask, length) -> mx.array:
    """Products of whole matrices, heads and tokens in one axis."""
    B, H, T, R = q_latent.shape
    q, q_rotary = (x.reshape(B, 1, H * T, -1) for x in (q_latent, q_rotary))
    k, rotary = latents[:, :, :length], rotary_keys[:, :, :length]
    scores = (q @ k.swapaxes(-1, -2) + q_rotary @ rotary.swapaxes(-1, -2)) * scale
    if mask is not None:
        past = length - T + mx.arange(H * T)[:, None] % T
        scores = mx.where(mx.arange(length) <= past, scores, mx.finfo(DTYPE).min)
    return (mx.softmax(scores, axis=-1, precise=True) @ k).reshape(B, H, T, R)


def rope_inputs(T: int, seed: int) -> Inputs:
    """Raw projections of Qwen3.6's attention."""
    mx.random.seed(seed)
    draw = lambda *shape: mx.random.normal(shape).astype(DTYPE)  # noqa: E731
    q, k, v = draw(1, T, 16, 512), draw(1, T, 2, 256), draw(1, T, 2, 256)
    options = {"eps": 1e-6, "dims": 64, "base": 1e7, "offset": 1000}
    return {"k": k, "q": q, "v": v, "q_weight": draw(256), "k_weight": draw(256), **options}


def keys_first(form: Callable[..., Any]) -> Callable[..., tuple[mx.array, ...]]:
    """norm_rope with k first among the results and in the layout of its argument."""

    def run(**inputs):
        q, k, v = form(**inputs)
        return k.reshape(inputs["k"].shape) if k.shape[2] == 1 else k, q, v

    return run


def attention_truth(inputs: Inputs) -> tuple[np.ndarray, Any]:
    """float64 loops over two heads and three tokens."""
    if "q" in inputs:
        q, k, v = (_numpy(inputs[n]) for n in "qkv")
    else:
        q, k = (
            np.concatenate([_numpy(inputs[a]), _numpy(inputs[b])], axis=-1)
            for a, b in (("q_latent", "q_rotary"), ("latents", "rotary_keys"))
        )
        v = _numpy(inputs["latents"])
    _, Hq, T, _ = q.shape
    heads, tokens = [0, Hq - 1], sorted({0, T // 2, T - 1})
    y = np.empty((1, len(heads), len(tokens), v.shape[-1]))
    for (i, h), (j, t) in ((a, b) for a in enumerate(heads) for b in enumerate(tokens)):
        kv, past = h * k.shape[1] // Hq, inputs["length"] - T + t + 1
        scores = k[0, kv, :past] @ q[0, h, t] * inputs["scale"]
        weights = np.exp(scores - scores.max())
        y[0, i, j] = weights @ v[0, kv, :past] / weights.sum()
    return y, np.ix_([0], heads, tokens)


def sdpa_case(
    Hq: int,
    Hkv: int,
    T: int,
    S: int,
    D: int,
    Dv: int,
    target: float | None = None,
    *,
    least_ratio: float | None = None,
) -> BenchmarkCase:
    """Attention over S keys."""
    pairs = T * S - T * (T - 1) // 2
    return BenchmarkCase(
        f"sdpa {Hq}/{Hkv} {D}/{Dv} T={T} S={S}",
        lambda seed: sdpa_inputs(Hq, Hkv, T, S, D, Dv, seed),
        sdpa_fused,
        (causal_sdpa,),
        "q" if T == 1 else None,
        2.0 * (Hkv * S + Hq * T) * (D + Dv),
        float(Hq * pairs * (D + Dv)),
        attention_truth,
        target,
        least_ratio,
    )


def latent_case(H: int, T: int, S: int, target: float | None = None) -> BenchmarkCase:
    """Latent attention over S keys."""
    R, P = 512, 64
    pairs = T * S - T * (T - 1) // 2
    return BenchmarkCase(
        f"mla {H} T={T} S={S}",
        lambda seed: latent_inputs(H, T, S, R, P, seed),
        latent_attention_fused,
        (stock_latent,),
        "q_latent" if T == 1 else None,
        2.0 * (S * (R + P) + H * T * (2 * R + P)),
        float(H * pairs * (2 * R + P)),
        attention_truth,
        target,
    )


def rope_case(T: int) -> BenchmarkCase:
    """norm_rope of T tokens."""
    return BenchmarkCase(
        f"norm_rope T={T}",
        lambda seed: rope_inputs(T, seed),
        keys_first(norm_rope_fused),
        (keys_first(norm_rope),),
        "k" if T == 1 else None,
        4.0 * T * 20 * 256,
        0.0,
        None,
    )


def cases() -> list[BenchmarkCase]:
    """The targets first."""
    return [
        sdpa_case(16, 2, 1, 16384, 256, 256, 50),
        sdpa_case(16, 2, 1, 32768, 256, 256, 90),
        sdpa_case(16, 2, 2048, 2048, 256, 256, least_ratio=0.9),
        sdpa_case(16, 2, 8192, 8192, 256, 256, least_ratio=0.9),
        latent_case(128, 1, 8192, 80),
        sdpa_case(16, 2, 1, 512, 256, 256),
        sdpa_case(16, 2, 1, 2048, 256, 256),
        sdpa_case(16, 2, 4, 16384, 256, 256),
        sdpa_case(16, 2, 64, 16384, 256, 256),
        sdpa_case(16, 2, 512, 16384, 256, 256),
        sdpa_case(32, 4, 1, 16384, 128, 128),
        sdpa_case(32, 4, 2048, 2048, 128, 128),
        sdpa_case(32, 8, 2048, 2048, 64, 64),
        sdpa_case(128, 128, 2048, 2048, 192, 128),
        latent_case(128, 1, 1024),
        latent_case(128, 512, 2048),
        rope_case(1),
        rope_case(2048),
    ]


def calls(form: Callable[..., Any], case: BenchmarkCase) -> Callable[[int], list[Any]]:
    """n -> so many calls, over inputs of more than ROTATED_BYTES."""
    one = sum(a.nbytes for a in case.inputs(0).values() if isinstance(a, mx.array))
    rotated = [case.inputs(i) for i in range(max(1, min(100, round(ROTATED_BYTES / one))))]
    mx.eval(rotated)

    def made(n: int) -> list[Any]:
        outputs: list[Any] = []
        for i in range(n):
            inputs = rotated[i % len(rotated)]
            if outputs and case.chain:
                last = outputs[-1]
                first = last if isinstance(last, mx.array) else last[0]
                inputs = {**inputs, case.chain: first}
            outputs.append(form(**inputs))
        return outputs

    return made


def counts(case: BenchmarkCase, made: Callable[[int], list[Any]]) -> tuple[int, int]:
    """Numbers of calls for the slope. Stock attention of long prompts keeps gigabytes of scores
    for every call."""
    if case.products < 1e9:
        return 50, 250
    return (5, 20) if call_time(made, 0, 1).wall < 2e-3 else (1, 3)


def error(y: mx.array, truth: np.ndarray, where: Any) -> float:
    """Largest difference from the truth relative to its largest value."""
    return float(np.abs(_numpy(y)[where] - truth).max() / np.abs(truth).max())


def _numpy(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)
