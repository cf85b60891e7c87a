"""CLOCK, or second chance: ``load(eviction=CLOCK())``."""

from collections import OrderedDict, defaultdict

from mlx_moeflux.experts.policies.lazy_min_heap import unknown


class CLOCK:
    """Second chance: residents in a ring, and a hand that passes by, and unmarks, those that were
    asked for since it came last."""

    name = "clock"

    def __init__(self):
        self.reset()

    def touch(self, layer, experts, last, uses):
        ring = self._rings[layer]
        for expert in experts:
            if expert in ring:
                ring[expert] = True
            else:
                self._asked[layer].add(expert)

    def choose(self, layer, count, *, resident, protected):
        ring = self._rings[layer]
        victims = []
        steps, complete = 2 * len(ring), False  # two rounds take everyone whom the ring knows
        while len(victims) < count:
            if not steps or not ring:
                if complete:
                    break
                complete = True
                ring.update(dict.fromkeys(unknown(ring, resident, ()), False))
                steps = 2 * len(ring)
            steps -= 1
            expert, marked = next(iter(ring.items()))
            if expert not in resident:
                del ring[expert]
                continue
            ring.move_to_end(expert)
            if expert in protected or expert in victims:
                continue
            if marked:
                ring[expert] = False
            else:
                victims.append(expert)
        return victims

    def evict(self, layer, expert):
        self._rings[layer].pop(expert, None)

    def admit(self, layer, expert):
        asked = self._asked[layer]
        self._rings[layer][expert] = expert in asked
        asked.discard(expert)

    def reset(self):
        # Layer -> its ring, first to last from the hand on; the value says whether it is marked.
        self._rings = defaultdict(OrderedDict)
        self._asked = defaultdict(set)  # layer -> experts that were asked for before they came
