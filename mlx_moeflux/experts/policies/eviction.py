"""Eviction policies: what they receive, their protocol, and those of the package. They choose the
expert that loses its slot. Pure Python, no MLX.

A policy sees a logical clock, never time, so that a recorded trace can be replayed. The set of
residents that a policy receives is the truth, also after an interrupted call of which it missed a
part. In the policies here layers are independent, and a call costs the length of its arguments
unless its docstring says otherwise.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

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


class Scores(NamedTuple):
    """A policy's scores of the experts of a layer, for threads without an interpreter. The resident
    with the lowest score leaves, of equal ones the lowest id.

    of: Expert -> score above 0; others have 0. base: Subtracted from the exponent of a use's
    weight; of a policy whose rate is 0 the highest score, which grows by 1 with each use.
    """

    of: dict[int, float]
    base: float


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
    rate = 0.0

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

    def scores(self, layer: int) -> Scores:
        """Return what :meth:`set_scores` takes."""
        order = self._order[layer]
        return Scores({expert: 1.0 + i for i, expert in enumerate(order)}, float(len(order)))

    def set_scores(self, layer: int, scores: Scores) -> None:
        """Replace what is known of a layer."""
        ranked = sorted(scores.of, key=scores.of.__getitem__)
        self._order[layer] = OrderedDict.fromkeys(ranked)


class LFU:
    """Evicts the expert with the fewest uses, each of which counts half after `half_life` tokens.

    Uses are remembered of experts that are not resident, too.
    """

    name = "lfu"

    # A use weighs 2^(its token / half-life), so that no expert's sum changes while it is not used.
    # When the weights have grown by 2^500 all sums are divided by as much.
    _MOST = 500

    def __init__(self, half_life: float = 32):
        self.rate = 1 / half_life
        self.reset()

    def touch(
        self, layer: int, experts: Sequence[int], last: Sequence[int], uses: Sequence[int]
    ) -> None:
        queue = self._queues[layer]
        if experts and last[-1] * self.rate - self._base[layer] > self._MOST:
            growth = last[-1] * self.rate - self._base[layer]
            self._base[layer] += growth
            queue.scale(2.0**-growth)
        keys, base, rate = queue.keys, self._base[layer], self.rate
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
        self._queues: dict[int, LazyMinHeap] = defaultdict(LazyMinHeap)
        self._base: dict[int, float] = defaultdict(float)

    def scores(self, layer: int) -> Scores:
        """Return what :meth:`set_scores` takes."""
        return Scores(self._queues[layer].keys, self._base[layer])

    def set_scores(self, layer: int, scores: Scores) -> None:
        """Replace what is known of a layer."""
        self._queues[layer].replace(scores.of)
        self._base[layer] = scores.base


EVICTIONS: dict[str, Callable[[], Any]] = {kind.name: kind for kind in (LRU, LFU)}
# Hit more often than LRU on every trace at every budget: docs/notes/hit-rates.md.
DEFAULT_EVICTION = LFU.name


def is_known(policy: Eviction) -> TypeGuard[LFU | LRU]:
    """Return True if `policy` is of this package, and no subclass, so that its :class:`Scores` say
    all of it. A rate of 0 means LRU there, so that an LFU which forgets nothing has none."""
    return type(policy) is LRU or (type(policy) is LFU and policy.rate > 0)


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
