"""The routers' choices during a run, and the hit rates that caches could reach on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlx_moeflux.experts.telemetry.events import Chosen

# Of a long prompt, as much fills any cache.
MOST_PROMPT_GROUPS = 1024


class Routing:
    """The chosen ids of every call: layer -> list of ``[N, K]``, the prompt first."""

    def __init__(self, calls: dict[int, list[np.ndarray]]):
        self.calls = calls
        tokens = min(ids.shape[0] for parts in calls.values() for ids in parts)
        # Decode steps are the calls of fewest tokens, at the end.
        self.decode = {
            layer: [ids for ids in parts if ids.shape[0] == tokens]
            for layer, parts in calls.items()
        }

    def distinct_per_step(self) -> float:
        """Different experts that a decode step asks a layer for, on average."""
        counts = [len(np.unique(ids)) for parts in self.decode.values() for ids in parts]
        return float(np.mean(counts))

    def hit_rate(self, slots: Mapping[int, int] | int) -> float:
        """Hits of the decode look-ups in an LRU of `slots` experts a layer."""
        return self._hits(slots, lambda count: np.arange(count))

    def shuffled_hit_rate(self, slots: Mapping[int, int] | int, *, seed: int) -> float:
        """Hits of as many look-ups as decoding made, in an LRU of `slots` experts a layer, all
        tokens in random order: what is left when neighbours have nothing in common."""
        return self._hits(slots, np.random.default_rng(seed).permutation)

    def skew(self, num_experts: int, *, seed: int) -> dict[str, float]:
        """Measure how uneven requests are: distinct experts in 32 tokens, and hit rates of an LRU
        of half of them, in order and shuffled."""
        tails = (np.concatenate(parts)[-32:] for parts in self.calls.values())
        half = max(1, num_experts // 2)
        return {
            "distinct_in_32": float(np.mean([len(np.unique(rows)) for rows in tails])),
            "lru_half": self.hit_rate(half),
            "lru_half_shuffled": self.shuffled_hit_rate(half, seed=seed),
        }

    def _hits(self, slots: Mapping[int, int] | int, order: Callable[[int], np.ndarray]) -> float:
        hits = lookups = 0
        for layer, decode in self.decode.items():
            pool = [np.unique(ids) for ids in self._groups(layer)]
            pool = [pool[i] for i in order(len(pool))]
            cache = _LRU(slots if isinstance(slots, int) else slots[layer])
            cache.hits(pool[: -len(decode)])
            hits += cache.hits(pool[-len(decode) :])
            lookups += sum(len(step) for step in pool[-len(decode) :])
        return hits / lookups

    def _groups(self, layer: int) -> list[np.ndarray]:
        """The last tokens in groups as large as a decode step; the steps are at the end."""
        rows, size = np.concatenate(self.calls[layer]), self.decode[layer][0].shape[0]
        rows = rows[-size * (len(self.decode[layer]) + MOST_PROMPT_GROUPS) :]
        return np.split(rows, range(len(rows) % size or size, len(rows), size))


class _LRU:
    def __init__(self, slots: int):
        self._slots, self._order = slots, {}

    def hits(self, steps: list[np.ndarray]) -> int:
        """Look up every step's experts, which all may stay while the step lasts."""
        found = 0
        for step in steps:
            for expert in step.tolist():
                found += expert in self._order
                self._order.pop(expert, None)
                self._order[expert] = None
            while len(self._order) > self._slots:
                del self._order[next(iter(self._order))]
        return found


def follow(store: Any, action: Callable[[], Any]) -> Routing:
    """Run `action` and record the requests to `store`; restore its listener afterwards."""
    calls: dict[int, list[np.ndarray]] = {}
    before = store.events

    def listen(event: object) -> None:
        if isinstance(event, Chosen):
            calls.setdefault(event.layer, []).append(event.ids)
        if before is not None:
            before(event)

    store.events = listen
    try:
        action()
    finally:
        store.events = before
    return Routing(calls)
