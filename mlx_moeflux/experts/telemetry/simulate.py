"""Replays a trace through any policy at any budget, as the streamed store would. No MLX.

The store and this share what decides: requests and policies
(:mod:`mlx_moeflux.experts.policies.eviction`), the order of a sweep and the rules of reading ahead.
What they count is therefore equal, not similar.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

from mlx_moeflux.errors import InputError, MemoryBudgetError
from mlx_moeflux.experts.budget import parse_budget, slots_for_budget
from mlx_moeflux.experts.policies.chooser import Cost
from mlx_moeflux.experts.policies.eviction import (
    DEFAULT_EVICTION,
    EVICTIONS,
    Eviction,
    ExpertRequest,
    choose_victims,
)
from mlx_moeflux.experts.policies.named import policy_of
from mlx_moeflux.experts.policies.prefetch import (
    MOST_PAIRS,
    Prefetch,
    Switched,
    blocks_ahead,
    make_prefetch,
    next_layer,
    proposed,
)
from mlx_moeflux.experts.policies.timed_switch import DecodeSteps
from mlx_moeflux.experts.policies.wave_schedule import (
    Wave,
    WaveSchedule,
    begin_early,
    layer_to_begin,
    run_waves,
)
from mlx_moeflux.experts.telemetry.bounds import Belady
from mlx_moeflux.experts.telemetry.stats import LayerStats, total_of
from mlx_moeflux.experts.telemetry.trace import Trace, TraceInfo, requests_of


@dataclass
class Simulation:
    """The result of a replay. layers: MoE layer id -> counts, without reads and times. misses,
    ahead: For every call, in the trace's order, the number of blocks that it had to read, and that
    were prefetched for it."""

    info: TraceInfo
    eviction: str
    slots: dict[int, int]
    layers: dict[int, LayerStats]
    misses: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)

    @property
    def total(self) -> LayerStats:
        """The sum over the layers."""
        return total_of(self.layers.values())

    @property
    def hit_rate(self) -> float:
        """Hit rate over all layers."""
        return self.total.hit_rate

    def __str__(self) -> str:
        total = self.total
        return (
            f"{self.eviction}: hit rate {100 * total.hit_rate:.1f} % of {total.lookups}, "
            f"{total.bytes_read / 1e9:.3f} GB read"
        )


def simulate(
    trace: Trace,
    budget: str | float | Mapping[int, int] = "25%",
    *,
    eviction: str | Eviction = DEFAULT_EVICTION,
    prefetch: str | Prefetch | None = None,
    recorded: bool = False,
    cost: Callable[[int, int], Cost] | None = None,
) -> Simulation:
    """Replay `trace` from empty banks.

    Args:
        budget: As ``load(expert_memory=...)`` takes it, or layer -> slots.
        eviction: A name, ``belady`` for the best that is possible, or an object, which is reset.
        prefetch: A name, None, or an object, which is reset. Everything that is read ahead arrives,
            as in a store with `keep_all_ahead`; with `recorded`, all but what the trace says was
            given up, and banks are resized as it says, which is right for the set-up that
            recorded it.
        cost: What a call of a layer costs by the blocks that it has to read and those that were
            prefetched for it, such as
            :meth:`~mlx_moeflux.experts.telemetry.forecast.Profile.call_cost` of a machine; a
            prefetcher with a switch then decides by it. Without it, such a prefetcher is on where
            the trace has a guess, so that the trace of a run gives the hits of that run.

    Raises:
        InputError: The budget or a policy cannot be used.
        MemoryBudgetError: It does not hold one token's experts.
    """
    slots = slots_of(trace, budget)
    known = {**EVICTIONS, Belady.name: lambda: Belady(trace)}
    policy = policy_of(Eviction, eviction, known)
    policy.reset()
    name = getattr(policy, "name", type(policy).__name__)
    ahead = make_prefetch(prefetch)
    if ahead is not None:
        ahead.reset()
        needs_guesses = ahead.looks_ahead or (isinstance(ahead, Switched) and cost is not None)
        if needs_guesses and all(call.guess is None for call in trace):
            raise InputError("the trace has no guesses to look ahead with; record it with ahead.")
    replay, clock = _Replay(trace.info, policy, slots), _Clock()
    steps, switch = None, None
    if isinstance(ahead, Switched) and cost is not None:
        switch = ahead.switch
        steps = DecodeSteps(switch, lambda: clock.now, MOST_PAIRS)
        switch.reset()
    result = Simulation(trace.info, name, slots, replay.counts)
    calls = zip(trace.calls, requests_of(trace), strict=True)
    if ahead is None and not recorded:
        result.misses = [replay.call(call.layer, request) for call, request in calls]
        calls = ()
    for call, request in calls:
        layer = call.layer
        if steps is not None:
            steps.begin(call.ids.size, first=layer == trace.info.layers[0])
        if ahead is not None:
            result.ahead.append(len(replay.banks[layer].ahead))
            replay.commit_prefetch(ahead, layer, request, call.dropped if recorded else ())
        result.misses.append(replay.call(layer, request))
        if switch is not None:
            active = switch.on
        else:
            active = not isinstance(ahead, Switched) or call.guess is not None
        if ahead is not None and active and call.ids.size <= MOST_PAIRS:
            replay.read_ahead(ahead, layer, call.guess or ())
        if steps is not None and cost is not None:
            clock.pass_by(cost(result.misses[-1], result.ahead[-1]))
            if layer == trace.info.layers[-1]:
                steps.end()
        for each, count in call.resized if recorded else ():
            replay.resize(each, count)
            if steps is not None and switch is not None:
                steps.disturb()
                switch.reset()
    for layer, counts in replay.counts.items():
        counts.hits = counts.lookups - counts.misses
        blocks = counts.misses + counts.prefetches
        counts.bytes_read = blocks * trace.info.block_bytes[layer]
    return result


def slots_of(trace: Trace, budget: str | float | Mapping[int, int]) -> dict[int, int]:
    """MoE layer id -> slots, as loading would give them.

    Raises:
        InputError, MemoryBudgetError: See :func:`simulate`.
    """
    info = trace.info
    if isinstance(budget, Mapping):
        slots = {layer: budget.get(layer, 0) for layer in info.layers}
        for layer, count in slots.items():
            if not info.experts_per_token <= count <= info.num_experts:
                raise MemoryBudgetError(
                    f"layer {layer} cannot have {count} slots; give {info.experts_per_token} to "
                    f"{info.num_experts}."
                )
        return slots
    total = sum(info.block_bytes.values()) * info.num_experts
    asked = parse_budget(budget, total)
    if asked is None:
        raise InputError("a replay needs a budget in numbers; give one such as 2GB or 25%.")
    return slots_for_budget(
        asked,
        info.block_bytes,
        num_experts=info.num_experts,
        experts_per_token=info.experts_per_token,
    )


class _Clock:
    """The time, and the time waited for reads, of a replay."""

    def __init__(self):
        self.now = Cost(0.0, 0.0)

    def pass_by(self, cost: Cost) -> None:
        """Let so much time pass."""
        self.now = Cost(self.now.seconds + cost.seconds, self.now.stalled + cost.stalled)


class _Bank:
    """One layer's residents; a dict, so that they have the order that the store's have."""

    def __init__(self, slots: int):
        self.slots = slots
        self.residents: dict[int, None] = {}
        self.ahead: list[int] = []
        self.early: list[Wave] = []
        self.fresh: set[int] = set()
        self.proposal: frozenset[int] = frozenset()

    def __contains__(self, expert: object) -> bool:
        return expert in self.residents

    @property
    def reading_ahead(self) -> bool:
        return bool(self.ahead or self.early)


class _Replay:
    """Does to names of experts what :class:`StreamedStore` does to their bytes."""

    def __init__(self, info: TraceInfo, policy: Eviction, slots: Mapping[int, int]):
        self.policy, self.layers, self.info = policy, info.layers, info
        self.banks = {layer: _Bank(slots[layer]) for layer in info.layers}
        self.counts = {layer: LayerStats() for layer in info.layers}

    def call(self, layer: int, request: ExpertRequest) -> int:
        """One call of a layer; its misses."""
        bank, counts, needed = self.banks[layer], self.counts[layer], request.needed
        self.policy.touch(layer, request.experts, request.last, request.uses)
        counts.lookups += len(needed)
        if len(needed) > bank.slots:
            return self._sweep(layer, bank, needed)
        self._arrive_early(layer, bank)
        residents = bank.residents
        if bank.fresh:
            self._use(layer, bank, needed)
        missing = [expert for expert in needed if expert not in residents]
        if missing:
            counts.misses += len(missing)
            self._make_room(layer, bank, len(missing), frozenset(needed))
            self._read(layer, bank, missing)
        return len(missing)

    def commit_prefetch(
        self, prefetch: Prefetch, layer: int, request: ExpertRequest, dropped: Collection[int]
    ) -> None:
        """Enter what was read ahead, but `dropped`; count what was foreseen."""
        bank, counts, needed = self.banks[layer], self.counts[layer], frozenset(request.needed)
        arrived = [expert for expert in bank.ahead if expert not in dropped]
        self._arrive(layer, bank, arrived)
        counts.proposed += len(bank.proposal)
        counts.foreseen += len(bank.proposal & needed)
        bank.proposal = frozenset()
        prefetch.requested(layer, request.experts, request.last)

    def read_ahead(self, prefetch: Prefetch, layer: int, guess: Sequence[int]) -> None:
        """Begin to read what the next layer may need."""
        following = next_layer(self.layers, layer)
        if following is None or self.banks[following].reading_ahead:
            return
        bank = self.banks[following]
        proposal = proposed(prefetch, following, guess, self.info.num_experts)
        bank.proposal = frozenset(proposal)
        blocks = blocks_ahead(prefetch, proposal, bank, bank.slots)
        if blocks:
            self._make_room(following, bank, len(blocks), bank.proposal)
            bank.ahead = blocks

    def resize(self, layer: int, slots: int) -> None:
        """Give a layer so many slots; the policy chooses who leaves a smaller bank."""
        bank = self.banks[layer]
        self._arrive_early(layer, bank)
        self._arrive(layer, bank, bank.ahead)
        bank.slots = slots
        self._make_room(layer, bank, 0, ())

    def _arrive(self, layer: int, bank: _Bank, experts: Sequence[int]) -> None:
        self._read(layer, bank, experts)
        bank.fresh.update(experts)
        bank.ahead = []
        self.counts[layer].prefetches += len(experts)

    def _arrive_early(self, layer: int, bank: _Bank) -> None:
        while bank.early:
            self._arrive_wave(layer, bank)

    def _arrive_wave(self, layer: int, bank: _Bank) -> None:
        missing = bank.early.pop(0).missing
        self._read(layer, bank, missing)
        self.counts[layer].prefetches += len(missing)

    def _begin_early(self, layer: int, needed: int) -> None:
        following = layer_to_begin(self.layers, layer, needed, self.info.num_experts)
        if following is None or needed <= self.banks[following].slots:
            return
        bank = self.banks[following]
        if bank.reading_ahead:
            return
        plan = WaveSchedule(bank, range(self.info.num_experts))

        def begin(wave: Wave) -> None:
            taken = sum(len(early.missing) for early in bank.early)
            self._make_room(following, bank, taken + len(wave.missing), plan.protected)
            bank.early.append(wave)
            bank.fresh.update(wave.missing)

        begin_early(plan, begin)

    def _use(self, layer: int, bank: _Bank, experts: Sequence[int]) -> None:
        used = bank.fresh.intersection(experts)
        self.counts[layer].prefetched_hits += len(used)
        bank.fresh -= used

    def _sweep(self, layer: int, bank: _Bank, needed: list[int]) -> int:
        before = self.counts[layer].misses
        plan, reading = WaveSchedule(bank, needed, begun=bank.early), deque()
        if bank.early:
            last = bank.early[-1].experts[-1]
            self._use(layer, bank, [expert for expert in needed if expert <= last])

        def begin(full: Wave) -> None:
            self.counts[layer].misses += len(full.missing)
            self._use(layer, bank, full.experts)
            taken = sum(map(len, reading)) + sum(len(early.missing) for early in bank.early)
            self._make_room(layer, bank, taken + len(full.missing), plan.protected)
            reading.append(full.missing)

        def finish() -> None:
            if bank.early:
                self._arrive_wave(layer, bank)
            else:
                self._read(layer, bank, reading.popleft())

        run_waves(
            *(plan, begin, finish, lambda full: None), lambda: self._begin_early(layer, len(needed))
        )
        return self.counts[layer].misses - before

    def _make_room(self, layer: int, bank: _Bank, count: int, protected: Container[int]) -> None:
        residents = bank.residents
        short = count + len(residents) - bank.slots
        if short <= 0:
            return
        victims = choose_victims(
            self.policy, layer, short, resident=residents.keys(), protected=protected
        )
        evict = self.policy.evict
        for expert in victims:
            del residents[expert]
            evict(layer, expert)
        if bank.fresh:
            bank.fresh.difference_update(victims)
        self.counts[layer].evictions += short

    def _read(self, layer: int, bank: _Bank, missing: Sequence[int]) -> None:
        residents, admit = bank.residents, self.policy.admit
        for expert in missing:
            residents[expert] = None
            admit(layer, expert)
