"""Traces of routers that never were: Zipf popularity and persistence, as much as one likes."""

from __future__ import annotations

import numpy as np

from mlx_moeflux.experts.telemetry.trace import Call, Trace, TraceInfo


def zipf_trace(
    *,
    num_experts: int,
    experts_per_token: int,
    layers: int,
    tokens: int,
    skew: float = 1.0,
    persistence: float = 0.3,
    prompt: int = 0,
    block_bytes: int = 1 << 20,
    seed: int = 0,
) -> Trace:
    """A trace of decode steps, layer after layer.

    Args:
        skew: The expert of rank r is drawn with odds r^-skew; every layer has its own ranks.
        persistence: Probability that an expert of the token before is taken again.
        prompt: Tokens of one call before the decode steps.
    """
    E, K, L = num_experts, experts_per_token, layers
    random = np.random.default_rng(seed)
    odds = -skew * np.log(np.arange(1, E + 1))
    ranks = [random.permutation(E) for _ in range(L)]
    rows = np.empty((L, prompt + tokens, K), np.uint16)
    for layer in range(L):
        noisy = odds[ranks[layer]] + random.gumbel(size=(prompt + tokens, E))
        for t in range(prompt + tokens):
            if t:
                noisy[t, rows[layer, t - 1, random.random(K) < persistence]] = np.inf
            rows[layer, t] = np.sort(np.argpartition(-noisy[t], K - 1)[:K])
    info = TraceInfo(E, K, tuple(range(L)), dict.fromkeys(range(L), block_bytes))
    weights = np.full((prompt + tokens, K), 1 / K, np.float16)
    starts = [0] * (prompt > 0) + list(range(prompt, prompt + tokens))
    stops = [*starts[1:], prompt + tokens]
    calls = [
        Call(layer, start, rows[layer, start:stop], weights[start:stop])
        for start, stop in zip(starts, stops, strict=True)
        for layer in range(L)
        if stop > start
    ]
    return Trace(info, calls)
