"""Evict by chance: ``load(eviction=Random())``."""

import random
from collections import defaultdict


class Random:
    """Evicts any expert: what a policy must beat."""

    name = "random"

    def __init__(self, seed=0):
        self._seed = seed
        self.reset()

    def touch(self, layer, experts, last, uses): ...

    def choose(self, layer, count, *, resident, protected):
        able = sorted(expert for expert in resident if expert not in protected)
        return self._draws[layer].sample(able, min(count, len(able)))

    def evict(self, layer, expert): ...

    def admit(self, layer, expert): ...

    def reset(self):
        self._draws = defaultdict(lambda: random.Random(self._seed))
