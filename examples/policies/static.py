"""A hot set that is learnt once: ``load(eviction=Static())``."""

from collections import Counter, defaultdict


class Static:
    """Keeps the experts that were used most; the others share the remaining slots by LRU.

    counts: Layer -> expert -> uses, such as a trace gives. Without it the first `learn` tokens of
    each layer are counted, and nothing after them.
    """

    name = "static"

    def __init__(self, counts=None, learn=256):
        self._counts, self._learn = counts or {}, 0 if counts else learn
        self.reset()

    def touch(self, layer, experts, last, uses):
        for expert, at, n in zip(experts, last, uses, strict=True):
            if at < self._learn:
                self._known[layer][expert] += n
            self._time += 1
            self._keys[layer][expert] = self._known[layer][expert], self._time

    def choose(self, layer, count, *, resident, protected):
        keys = self._keys[layer]
        able = [expert for expert in resident if expert not in protected]
        able.sort(key=lambda expert: (*keys.get(expert, (-1, -1)), expert))
        return able[:count]

    def evict(self, layer, expert): ...

    def admit(self, layer, expert): ...

    def reset(self):
        self._time = 0
        self._known = defaultdict(Counter, {i: Counter(c) for i, c in self._counts.items()})
        self._keys = defaultdict(dict)  # layer -> expert -> (uses, time of the last use)
