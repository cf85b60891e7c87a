"""Placements: which rank holds which experts. No MLX.

A placement is an object like the other policies. It gives every rank the same number of experts in
each layer, so that a rank's store looks like that of a smaller model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mlx_moeflux.checks import shown
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import parse_budget
from mlx_moeflux.experts.policies.named import label, policy_of
from mlx_moeflux.experts.telemetry.trace import Trace, requests_of


class Placement(Protocol):
    """Assigns experts to ranks. Replace it with ``load(placement=...)``."""

    name: str

    def place(
        self, layers: Sequence[int], num_experts: int, ranks: int
    ) -> Mapping[int, Sequence[int]]:
        """Return MoE layer id -> the rank of each expert. Every layer gives a rank as many
        experts, at least one."""
        ...


@dataclass(frozen=True)
class Places:
    """The checked answer of a placement.

    rank_of: MoE layer id -> the rank of each expert. counts: Experts a layer of each rank.
    """

    rank_of: Mapping[int, tuple[int, ...]]
    counts: tuple[int, ...]

    @property
    def num_experts(self) -> int:
        """Experts a layer of all ranks."""
        return sum(self.counts)

    def held(self, layer: int, rank: int) -> tuple[int, ...]:
        """Return the experts of a layer that `rank` holds, ascending."""
        return tuple(e for e, owner in enumerate(self.rank_of[layer]) if owner == rank)

    def local_ids(self, layer: int, rank: int) -> np.ndarray:
        """Return expert -> its number among those of `rank`, ``[E + 1]`` int64; of other experts,
        and of E, which marks padding, the number of those of `rank`."""
        local = np.full(self.num_experts + 1, self.counts[rank])
        local[list(self.held(layer, rank))] = np.arange(self.counts[rank])
        return local


class ById:
    """Neighbouring ids are on one rank; ranks have as many experts, or in proportion to
    `memory`, bytes of each rank."""

    name = "id"

    def __init__(self, memory: Sequence[float] | None = None):
        self.memory = memory

    def place(
        self, layers: Sequence[int], num_experts: int, ranks: int
    ) -> Mapping[int, Sequence[int]]:
        counts = shares(num_experts, ranks, self.memory)
        row = [rank for rank, count in enumerate(counts) for _ in range(count)]
        return dict.fromkeys(layers, row)


class ByPopularity:
    """Ranks get an equal part of the requests in `trace`, and as many experts as with
    :class:`ById`: from the most popular on, an expert goes to the rank with the fewest requests
    for each expert that it is to hold."""

    name = "popularity"

    def __init__(self, trace: Trace, memory: Sequence[float] | None = None):
        self.trace, self.memory = trace, memory

    def place(
        self, layers: Sequence[int], num_experts: int, ranks: int
    ) -> Mapping[int, Sequence[int]]:
        if self.trace.info.num_experts != num_experts:
            raise InputError(
                f"the trace is of a model with {self.trace.info.num_experts} experts a layer, this "
                f"one has {num_experts}; record one with this model."
            )
        counts = shares(num_experts, ranks, self.memory)
        uses = {layer: np.zeros(num_experts, int) for layer in layers}
        for call, request in zip(self.trace, requests_of(self.trace), strict=True):
            if call.layer in uses:
                np.add.at(uses[call.layer], list(request.experts), list(request.uses))
        return {layer: _balanced(uses[layer], counts) for layer in layers}


def _balanced(uses: np.ndarray, counts: Sequence[int]) -> list[int]:
    """Return the rank of each expert."""
    rank_of, room, load = [0] * len(uses), list(counts), [0.0] * len(counts)
    for expert in np.argsort(-uses, kind="stable").tolist():
        open_ranks = (rank for rank, left in enumerate(room) if left)
        rank = min(open_ranks, key=lambda rank: (load[rank] / counts[rank], rank))
        rank_of[expert] = rank
        room[rank] -= 1
        load[rank] += float(uses[expert])
    return rank_of


def shares(num_experts: int, ranks: int, memory: Sequence[float] | None = None) -> list[int]:
    """Return how many experts a layer each rank holds: as many, or in proportion to `memory`, bytes
    of each rank; at least one.

    Raises:
        InputError: There are fewer experts than ranks, or not one memory for each rank.
    """
    if not 1 <= ranks <= num_experts:
        raise InputError(
            f"{num_experts} experts a layer cannot be on {ranks} ranks; take 1 to {num_experts}."
        )
    if memory is None:
        memory = [1.0] * ranks
    if len(memory) != ranks or min(memory) <= 0:
        raise InputError(
            f"the placement has the memory of {len(memory)} machines, and there are {ranks} ranks; "
            "give one amount for each."
        )
    exact = [num_experts * part / sum(memory) for part in memory]
    counts = [max(1, int(part)) for part in exact]
    while (short := num_experts - sum(counts)) != 0:
        # The rank that is furthest from its part gets one more, or one less.
        step = 1 if short > 0 else -1
        open_ranks = [rank for rank in range(ranks) if counts[rank] + step >= 1]
        rank = max(open_ranks, key=lambda rank: step * (exact[rank] - counts[rank]))
        counts[rank] += step
    return counts


def make_placement(policy: str | Placement) -> Placement:
    """Return a placement: ``id``, ``memory:16GB,32GB`` (ids in proportion to the memory of each
    rank), ``popularity:FILE`` (a trace), or the given object.

    Raises:
        InputError: It is none of these, or the trace cannot be read.
    """
    check_placement(policy)
    if not isinstance(policy, str):
        return policy
    kind, _, argument = policy.partition(":")
    return PLACEMENTS[kind](argument)


def check_placement(policy: Any) -> None:
    """Raise an InputError unless :func:`make_placement` knows such a placement. What stands behind
    the colon is not read."""
    if not isinstance(policy, str):
        policy_of(Placement, policy, {})
        return
    kind, _, argument = policy.partition(":")
    if kind not in PLACEMENTS or bool(argument) != (kind != ById.name):
        raise InputError(
            f"the placement is {shown(policy)}; give id, memory:16GB,32GB or popularity:FILE (a "
            "trace)."
        )


def shard_of(
    shard: str, policy: str | Placement
) -> Callable[[Sequence[int], int], dict[int, tuple[int, ...]]]:
    """Return a function of MoE layer ids and the number of experts, which returns layer -> the
    experts of rank i of N ranks. shard: ``i/N``.

    Raises:
        InputError: It is no such rank, or the placement cannot be used.
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", shard)
    rank, ranks = map(int, match.groups()) if match else (0, 0)
    if rank >= ranks:
        raise InputError(f"the shard is {shard!r}; give i/N, rank i of N, such as 0/2 and 1/2.")
    placement = make_placement(policy)

    def held(layers: Sequence[int], num_experts: int) -> dict[int, tuple[int, ...]]:
        places = make_places(placement, layers, num_experts, ranks)
        return {layer: places.held(layer, rank) for layer in layers}

    return held


PLACEMENTS: dict[str, Callable[[str], Placement]] = {
    "id": lambda _: ById(),
    "memory": lambda amounts: ById(parse_memory(amounts)),
    "popularity": lambda file: ByPopularity(Trace.open(os.path.expanduser(file))),
}


def parse_memory(amounts: str) -> list[int]:
    """Return the bytes of amounts such as ``16GB,32GB``, one for each rank.

    Raises:
        InputError: One is no number of bytes.
    """
    parsed = [parse_budget(amount, 0, what="memory of a machine") for amount in amounts.split(",")]
    if None in parsed:
        raise InputError(f"the memory {amounts!r} is auto for a machine; give an amount.")
    return [amount for amount in parsed if amount is not None]


def make_places(
    placement: str | Placement, layers: Sequence[int], num_experts: int, ranks: int
) -> Places:
    """Let a placement place the experts of these MoE layers, and check its answer.

    Raises:
        InputError: There is no such placement, an expert has no rank, or a rank has another number
            of experts in some layer.
    """
    policy = make_placement(placement)
    answer = policy.place(layers, num_experts, ranks)
    rank_of = {layer: tuple(map(int, answer[layer])) for layer in layers}
    counts: tuple[int, ...] | None = None
    for layer, row in rank_of.items():
        if len(row) != num_experts or not all(0 <= rank < ranks for rank in row):
            raise InputError(
                f"the placement {label(policy)} names no rank below {ranks} for each of "
                f"{num_experts} experts of layer {layer}."
            )
        found = tuple(row.count(rank) for rank in range(ranks))
        counts = counts or found
        if found != counts or not min(found):
            raise InputError(
                f"the placement {label(policy)} gives the ranks {list(found)} experts of layer "
                f"{layer}; each rank must have as many in every layer, at least one."
            )
    assert counts is not None, "a model without MoE layers"
    return Places(rank_of, counts)
