"""S3-FIFO: ``load(eviction=S3FIFO())``."""

from collections import OrderedDict, defaultdict
from typing import NamedTuple

from mlx_moeflux.experts.policies.lazy_min_heap import unknown


class _Queues(NamedTuple):
    """One layer of S3-FIFO: expert -> uses (at most 3) in the order of arrival. Dicts keep that
    order; an expert that goes to the end is taken out and put in again."""

    small: dict[int, int]
    main: dict[int, int]
    ghost: OrderedDict[int, None]
    asked: dict[int, int]


class S3FIFO:
    """Three queues: newcomers pass through a small one, and only those that are used again enter
    the main one; a ghost queue remembers those that left the small one.

    small: Share of the residents that the small queue may hold.

    Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
    """

    name = "s3fifo"

    def __init__(self, small: float = 0.1):
        self._share = small
        self.reset()

    def touch(self, layer, experts, last, uses):
        small, main, _, asked = self._layers[layer]
        for expert, n in zip(experts, uses, strict=True):
            queue = main if expert in main else small
            known = queue.get(expert)
            if known is None:
                asked[expert] = n - 1  # the first use is the one that brings it in
            elif known < 3:
                queue[expert] = known + n if known + n < 3 else 3

    def choose(self, layer, count, *, resident, protected):
        small, main, *_ = self._layers[layer]
        share = max(1, int(self._share * len(resident)))
        victims = []
        # Both in order. An expert that is passed over once, as absent, protected or a victim, stays
        # so; one that goes to the end of the main queue goes to the end of its list.
        newcomers, regulars = list(small), list(main)
        a, b, leaving = 0, 0, 0
        while len(victims) < count:
            while a < len(newcomers):
                expert = newcomers[a]
                if expert in resident and expert not in protected:
                    break
                a += 1
            if a < len(newcomers) and len(small) - leaving >= share:
                a += 1
                if small[expert] > 1:
                    del small[expert]
                    main[expert] = 0
                    regulars.append(expert)
                    continue
                leaving += 1
                victims.append(expert)
                continue
            while b < len(regulars):
                expert = regulars[b]
                if expert in resident and expert not in protected:
                    break
                b += 1
            if b < len(regulars):
                b += 1
                if uses := main[expert]:
                    del main[expert]
                    main[expert] = uses - 1
                    regulars.append(expert)
                    continue
            elif a < len(newcomers):
                expert = newcomers[a]
                a += 1
                leaving += 1
            elif others := unknown(small | main, resident, protected):
                small.update(dict.fromkeys(others, 0))
                newcomers += others
                continue
            else:
                break
            victims.append(expert)
        return victims

    def evict(self, layer, expert):
        small, main, ghost, _ = self._layers[layer]
        if small.pop(expert, None) is None:
            main.pop(expert, None)
            return
        held = 1 + len(small) + len(main)
        ghost[expert] = None
        for _ in range(len(ghost) - held + int(self._share * held)):
            ghost.popitem(last=False)

    def admit(self, layer, expert):
        small, main, ghost, asked = self._layers[layer]
        if expert in small or expert in main:
            return
        uses = asked.pop(expert, 0)
        queue = small
        if expert in ghost:
            del ghost[expert]
            queue = main
        queue[expert] = uses if uses < 3 else 3

    def reset(self):
        self._layers = defaultdict(lambda: _Queues({}, {}, OrderedDict(), {}))
