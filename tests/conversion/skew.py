"""How skewed the routing of a checkpoint is, measured on random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.telemetry.events import Chosen
from mlx_moeflux.loading import load_model


@dataclass(frozen=True)
class Skew:
    """The skew of routing, measured on random tokens.

    distinct: Mean number of distinct experts of a layer that 32 tokens need. hit_rate: Of an LRU
    cache of half the experts. uniform: The same on choices without any preference.
    """

    distinct: float
    hit_rate: float
    uniform: float


def measure_skew(directory: str | Path, *, tokens: int = 256, seed: int = 0) -> Skew:
    """Run random tokens through a checkpoint, streamed at the smallest budget that works, and
    see what its router chose."""
    chosen: dict[int, list[np.ndarray]] = {}

    def listen(event: object) -> None:
        if isinstance(event, Chosen):
            chosen.setdefault(event.layer, []).append(event.ids)

    with load_model(directory, expert_memory="auto", events=listen) as model:
        random = np.random.default_rng(seed)
        ids = random.integers(0, model.config.vocab_size, (1, tokens))
        mx.eval(model(mx.array(ids), last_only=True))
        slots = max(model.config.num_experts // 2, model.config.num_experts_per_tok)
    traces = [np.concatenate(parts) for parts in chosen.values()]
    experts, k = model.config.num_experts, traces[0].shape[1]
    even = np.stack([random.permutation(experts)[:k] for _ in range(tokens)])
    return Skew(
        distinct=float(np.mean([len(np.unique(trace[:32])) for trace in traces])),
        uniform=lru_hit_rate(even, slots),
        hit_rate=float(np.mean([lru_hit_rate(trace, slots) for trace in traces])),
    )


def lru_hit_rate(trace: np.ndarray, slots: int) -> float:
    """Hits of an LRU cache of `slots` experts over ``trace [tokens, K]``, by look-ups."""
    order: dict[int, None] = {}
    hits = 0
    for expert in trace.reshape(-1).tolist():
        if expert in order:
            hits += 1
            del order[expert]
        elif len(order) >= slots:
            del order[next(iter(order))]
        order[expert] = None
    return hits / max(1, trace.size)
