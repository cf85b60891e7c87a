"""What the routers chose while a stream ran, and what any cache could make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlx_moeflux.experts.events import Chosen


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

    def shuffled_hit_rate(self, slots: Mapping[int, int], *, seed: int) -> float:
        """Hits of as many look-ups as decoding made, in an LRU of `slots` experts a layer, all
        tokens in random order: what is left when neighbours have nothing in common."""
        random, hits, lookups = np.random.default_rng(seed), 0, 0
        for layer, decode in self.decode.items():
            pool = [np.unique(ids) for ids in self._groups(layer)]
            order = [pool[i] for i in random.permutation(len(pool))]
            cache = _LRU(slots[layer])
            cache.hits(order[: -len(decode)])
            hits += cache.hits(order[-len(decode) :])
            lookups += sum(len(step) for step in order[-len(decode) :])
        return hits / lookups

    def _groups(self, layer: int) -> list[np.ndarray]:
        """All tokens in groups as large as a decode step."""
        rows, size = np.concatenate(self.calls[layer]), self.decode[layer][0].shape[0]
        return np.split(rows, range(size, len(rows), size))


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
    """Run `action` and see what `store` is asked for; its listener is put back afterwards."""
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
