"""Eviction policies: what they receive, their protocol, and those of the package. They choose the
expert that loses its slot. Pure Python, no MLX.

A policy sees a logical clock, never time, so that a recorded trace can be replayed. The set of
residents that a policy receives is the truth, also after an interrupted call of which it missed a
part. In the policies here layers are independent, and a call costs the length of its arguments
unless its docstring says otherwise.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.lazy_min_heap import LazyMinHeap, unknown
from mlx_moeflux.experts.policies.named import distinct_ids, label, policy_of

if TYPE_CHECKING:
    import numpy as np


class ExpertRequest(NamedTuple):
    """The distinct experts of a call.

    needed: Ascending. experts, last, uses: The same in the order of their last use, see
    :meth:`Eviction.touch`.
    """

    needed: list[int]
    experts: list[int]
    last: list[int]
    uses: list[int]

    @classmethod
    def of(cls, ids: np.ndarray, num_experts: int, first: int) -> ExpertRequest:
        """ids ``[N, K]``, ascending in each row; entries equal to `num_experts` are padding.

        first: How many tokens the layer had seen before.
        """
        if len(ids) == 1:
            needed = ids[0].tolist()
            while needed and needed[-1] == num_experts:
                needed.pop()
            return cls(needed, needed, [first] * len(needed), [1] * len(needed))
        import numpy as np  # not above: the command line lists policies without it

        flat = ids.reshape(-1)
        uses = np.bincount(flat, minlength=num_experts)[:num_experts]
        needed = np.flatnonzero(uses)
        last = np.empty(num_experts + 1, np.int64)
        last[flat] = np.arange(len(flat))  # of several assignments the last one stays
        last, uses = last[needed], uses[needed]
        order = np.argsort(last)
        return cls(
            needed.tolist(),
            needed[order].tolist(),
            (first + last[order] // ids.shape[1]).tolist(),
            uses[order].tolist(),
        )


class Eviction(Protocol):
    """Chooses victims. Replace it with ``load(eviction=...)``.

    For each call of a layer the store calls `touch` once, with all requested experts; then, once
    or several times, `choose`, `evict` for each victim, and `admit` for each expert whose block has
    arrived. Between calls of a layer `choose`, `evict` and `admit` serve prefetches and changes of
    the bank's size.
    """

    name: str

    def touch(
        self, layer: int, experts: Sequence[int], last: Sequence[int], uses: Sequence[int]
    ) -> None:
        """Note that the tokens of a call need `experts`, resident or not.

        experts: Different ones, in the order of their last use: by token, then in the router's
        order (ascending ids). last: The token of that use, counted by the layer since the store
        was opened. uses: Number of tokens of the call that need it.
        """
        ...

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        """Return exactly `count` different members of `resident` that are not in `protected`; there
        are always enough."""
        ...

    def evict(self, layer: int, expert: int) -> None:
        """Note that `expert` has lost its slot."""
        ...

    def admit(self, layer: int, expert: int) -> None:
        """Note that `expert` has been read into a slot."""
        ...

    def reset(self) -> None:
        """Forget everything: all banks are empty."""
        ...


class LRU:
    """Evicts the least recently used expert; one that was never used goes first."""

    name = "lru"

    def __init__(self):
        self._order: dict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def touch(
        self, layer: int, experts: Sequence[int], last: Sequence[int], uses: Sequence[int]
    ) -> None:
        order = self._order[layer]
        for expert in experts:
            order[expert] = None
            order.move_to_end(expert)

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        order = self._order[layer]
        victims: list[int] = []
        for expert in order:
            if len(victims) == count:
                return victims
            if expert in resident and expert not in protected:
                victims.append(expert)
        if len(victims) < count:
            # Residents that this object does not know are older than those it knows.
            victims = unknown(order, resident, protected) + victims
        return victims[:count]

    def evict(self, layer: int, expert: int) -> None:
        self._order[layer].pop(expert, None)

    def admit(self, layer: int, expert: int) -> None:
        order = self._order[layer]
        if expert not in order:
            order[expert] = None
            order.move_to_end(expert, last=False)

    def reset(self) -> None:
        self._order.clear()


class LFU:
    """Evicts the expert with the fewest uses, each of which counts half after `half_life` tokens.

    Uses are remembered of experts that are not resident, too.
    """

    name = "lfu"

    # A use weighs 2^(its token / half-life), so that no expert's sum changes while it is not used.
    # When the weights have grown by 2^500 all sums are divided by as much.
    _MOST = 500

    def __init__(self, half_life: float = 32):
        self._rate = 1 / half_life
        self.reset()

    def touch(
        self, layer: int, experts: Sequence[int], last: Sequence[int], uses: Sequence[int]
    ) -> None:
        queue = self._queues[layer]
        if experts and last[-1] * self._rate - self._base[layer] > self._MOST:
            growth = last[-1] * self._rate - self._base[layer]
            self._base[layer] += growth
            queue.scale(2.0**-growth)
        keys, base, rate = queue.keys, self._base[layer], self._rate
        if last and last[0] == last[-1]:
            weight = 2.0 ** (last[0] * rate - base)
            for expert, n in zip(experts, uses, strict=True):
                keys[expert] = keys.get(expert, 0.0) + n * weight
            return
        time, weight = -1, 0.0
        for expert, at, n in zip(experts, last, uses, strict=True):
            if at != time:
                time, weight = at, 2.0 ** (at * rate - base)
            keys[expert] = keys.get(expert, 0.0) + n * weight

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        return self._queues[layer].lowest(count, resident, protected)

    def evict(self, layer: int, expert: int) -> None:
        pass

    def admit(self, layer: int, expert: int) -> None:
        self._queues[layer].admit(expert)

    def reset(self) -> None:
        self._queues: dict[int, LazyMinHeap] = defaultdict(lambda: LazyMinHeap(0.0))
        self._base: dict[int, float] = defaultdict(float)


class Static:
    """Keeps the experts that were used most; the others share the remaining slots by LRU.

    counts: Layer -> expert -> uses, such as a trace gives. Without it the first `learn` tokens of
    each layer are counted, and nothing after them.
    """

    name = "static"

    # A key is the uses, and below them the last use: a whole number compares faster than a pair.
    _TIME_BITS = 48

    def __init__(self, counts: Mapping[int, Mapping[int, int]] | None = None, learn: int = 256):
        self._counts, self._learn = counts, 0 if counts else learn
        self.reset()

    def touch(
        self, layer: int, experts: Sequence[int], last: Sequence[int], uses: Sequence[int]
    ) -> None:
        known, keys = self._known[layer], self._queues[layer].keys
        if last and last[0] < self._learn:
            for expert, at, n in zip(experts, last, uses, strict=True):
                if at < self._learn:
                    known[expert] = known.get(expert, 0) + n
        for time, expert in enumerate(experts, self._time):
            keys[expert] = (known.get(expert, 0) << self._TIME_BITS) + time
        self._time += len(experts)

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        return self._queues[layer].lowest(count, resident, protected)

    def evict(self, layer: int, expert: int) -> None:
        pass

    def admit(self, layer: int, expert: int) -> None:
        self._queues[layer].admit(expert)

    def reset(self) -> None:
        self._time = 0
        self._known: dict[int, dict[int, int]] = defaultdict(dict)
        for layer, counts in (self._counts or {}).items():
            self._known[layer] = dict(counts)
        self._queues: dict[int, LazyMinHeap] = defaultdict(lambda: LazyMinHeap(-1))


class CLOCK:
    """Second chance: residents in a ring, and a hand that passes by, and unmarks, those that were
    asked for since it came last."""

    name = "clock"

    def __init__(self):
        # First to last is the ring from the hand on; the value says whether it is marked.
        self._rings: dict[int, OrderedDict[int, bool]] = defaultdict(OrderedDict)
        self._asked: dict[int, set[int]] = defaultdict(set)

    def touch(
        self, layer: int, experts: Sequence[int], last: Sequence[int], uses: Sequence[int]
    ) -> None:
        ring = self._rings[layer]
        for expert in experts:
            if expert in ring:
                ring[expert] = True
            else:
                self._asked[layer].add(expert)

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        ring = self._rings[layer]
        victims: list[int] = []
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

    def evict(self, layer: int, expert: int) -> None:
        self._rings[layer].pop(expert, None)

    def admit(self, layer: int, expert: int) -> None:
        asked = self._asked[layer]
        self._rings[layer][expert] = expert in asked
        asked.discard(expert)

    def reset(self) -> None:
        self._rings.clear()
        self._asked.clear()


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
        self._layers: dict[int, _Queues] = defaultdict(lambda: _Queues({}, {}, OrderedDict(), {}))

    def touch(
        self, layer: int, experts: Sequence[int], last: Sequence[int], uses: Sequence[int]
    ) -> None:
        small, main, _, asked = self._layers[layer]
        for expert, n in zip(experts, uses, strict=True):
            queue = main if expert in main else small
            known = queue.get(expert)
            if known is None:
                asked[expert] = n - 1  # the first use is the one that brings it in
            elif known < 3:
                queue[expert] = known + n if known + n < 3 else 3

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        small, main, *_ = self._layers[layer]
        share = max(1, int(self._share * len(resident)))
        victims: list[int] = []
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

    def evict(self, layer: int, expert: int) -> None:
        small, main, ghost, _ = self._layers[layer]
        if small.pop(expert, None) is None:
            main.pop(expert, None)
            return
        held = 1 + len(small) + len(main)
        ghost[expert] = None
        for _ in range(len(ghost) - held + int(self._share * held)):
            ghost.popitem(last=False)

    def admit(self, layer: int, expert: int) -> None:
        small, main, ghost, asked = self._layers[layer]
        if expert in small or expert in main:
            return
        uses = asked.pop(expert, 0)
        queue = small
        if expert in ghost:
            del ghost[expert]
            queue = main
        queue[expert] = uses if uses < 3 else 3

    def reset(self) -> None:
        self._layers.clear()


class Random:
    """Evicts anyone: what a policy must beat."""

    name = "random"

    def __init__(self, seed: int = 0):
        self._seed = seed
        self.reset()

    def touch(
        self, layer: int, experts: Sequence[int], last: Sequence[int], uses: Sequence[int]
    ) -> None:
        pass

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        members, draw = self._members[layer], self._generator(layer).random
        victims: list[int] = []
        # Draw from the known experts, until nearly all draws must have failed.
        for _ in range(8 * count + 8 if members else 0):
            if len(victims) == count:
                return victims
            expert = members[int(draw() * len(members))]
            if expert in resident and expert not in protected and expert not in victims:
                victims.append(expert)
        able = sorted(e for e in resident if e not in protected and e not in victims)
        rest = min(count - len(victims), len(able))
        return victims + self._generator(layer).sample(able, rest)

    def evict(self, layer: int, expert: int) -> None:
        if expert in self._members[layer]:
            self._members[layer].remove(expert)

    def admit(self, layer: int, expert: int) -> None:
        if expert not in self._members[layer]:
            self._members[layer].append(expert)

    def reset(self) -> None:
        self._generators: dict[int, random.Random] = {}
        self._members: dict[int, list[int]] = defaultdict(list)

    def _generator(self, layer: int) -> random.Random:
        if layer not in self._generators:
            self._generators[layer] = random.Random(f"{self._seed} {layer}")
        return self._generators[layer]


EVICTIONS: dict[str, Callable[[], Any]] = {
    kind.name: kind for kind in (LRU, LFU, CLOCK, S3FIFO, Static, Random)
}
# Hit more often than LRU on every trace at every budget: docs/notes/hit-rates.md.
DEFAULT_EVICTION = LFU.name


def make_eviction(policy: str | Eviction) -> Eviction:
    """Return a policy by name, or the given object if it has the methods of :class:`Eviction`.

    Raises:
        InputError: See :func:`~mlx_moeflux.experts.policies.named.policy_of`.
    """
    return policy_of(Eviction, policy, EVICTIONS)


def choose_victims(
    policy: Eviction,
    layer: int,
    count: int,
    *,
    resident: Collection[int],
    protected: Container[int],
) -> list[int]:
    """Let `policy` choose, and check its answer. ``StreamedLayer.make_room`` calls this.

    Raises:
        InputError: It chose too few, too many, one twice, or one that is not allowed.
    """
    answer = policy.choose(layer, count, resident=resident, protected=protected)
    victims = distinct_ids(answer)
    if victims is None or len(victims) != count or not all(
        expert in resident and expert not in protected for expert in victims
    ):  # fmt: skip
        raise InputError(
            f"the eviction {label(policy)} chose {answer!r} in layer {layer}; expected {count} "
            "different unprotected residents."
        )
    return victims
