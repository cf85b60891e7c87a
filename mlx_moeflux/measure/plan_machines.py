"""The plan of :mod:`mlx_moeflux.measure.plan` for experts spread over machines. No MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from mlx_moeflux.distributed.placement import shares
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import Memory, format_bytes
from mlx_moeflux.loading.options import LoadOptions
from mlx_moeflux.measure.plan import (
    BANDWIDTH_SHARE,
    LAUNCH_SECONDS,
    MEMORY_GBPS,
    SSD_GBPS,
    SYNC_SECONDS,
    Sizes,
    described_memory,
    fetch_seconds,
    in_gib,
    needed_bytes,
    plan_loading,
    range_around,
    span,
)

# Tokens that are drawn for the mean of the machine with most of a token's experts.
DRAWS = 20_000


@dataclass(frozen=True)
class Link:
    """The connection between neighbours of a ring. latency: Seconds of a message besides its
    bytes."""

    bytes_per_second: float
    latency: float = 1e-4

    @classmethod
    def measured(cls, ranks: int, small: float, *, nbytes: float, large: float) -> Link:
        """Return the link over which a sum of a few bytes takes `small` seconds, and one of
        `nbytes` takes `large`."""
        steps = 2 * (ranks - 1)
        return cls(steps * nbytes / ranks / max(large - small, 1e-9), small / steps)

    def seconds(self, nbytes: float, ranks: int) -> float:
        """Return the time of a sum of `nbytes` over the ranks: 2 (N - 1) messages of an N-th."""
        steps = 2 * (ranks - 1)
        return steps * (self.latency + nbytes / ranks / self.bytes_per_second)


@dataclass(frozen=True)
class Machine:
    """One machine: its experts a layer, those of them with a slot, and whether all fit."""

    memory_bytes: int
    experts: int
    slots: int
    fits: bool

    @property
    def share(self) -> float:
        """Slots by experts."""
        return self.slots / self.experts


@dataclass(frozen=True)
class MachinesPlan:
    """The answer; :meth:`as_dict` is plain numbers. slow, fast: As of
    :class:`~mlx_moeflux.measure.plan.ModelPlan`. alone: The same of the largest machine by itself;
    None if it holds no token's experts, or if there is one machine."""

    name: str
    sizes: Sizes
    machines: tuple[Machine, ...]
    slow: float
    fast: float
    arithmetic: tuple[str, ...]
    alone: tuple[float, float] | None = None

    @property
    def fits(self) -> bool:
        """True if every machine holds the trunk and its least part of the experts."""
        return all(machine.fits for machine in self.machines)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        data = asdict(self) | {"fits": self.fits}
        data["sizes"] = {**asdict(self.sizes), "blocks": dict(self.sizes.blocks)}
        return data

    def __str__(self) -> str:
        rows = [("model", f"{self.name} ({self.sizes.model_type})")]
        for rank, one in enumerate(self.machines):
            fits = "" if one.fits else "; does not fit"
            rows.append(
                (
                    f"rank {rank}",
                    f"{in_gib(one.memory_bytes)}: {one.experts} experts a layer, "
                    f"{one.slots} slots ({100 * one.share:.0f} %){fits}",
                )
            )
        speed = f"{span(self.slow, self.fast)} tokens per second, estimated:"
        rows += [("speed", speed), *(("", line) for line in self.arithmetic)]
        if self.alone is not None:
            better = ": one machine is better" if self.alone[1] >= self.fast else ""
            largest = f"{span(*self.alone)} tokens per second on the largest by itself"
            rows.append(("alone", f"{largest}{better}"))
        return "\n".join(f"{name:8} {text}" for name, text in rows)


def plan_machines(
    name: str,
    sizes: Sizes,
    *,
    memories: Sequence[str | float | Memory],
    link: Link,
    expert_memory: str | float = "auto",
    row_memory: str | float = LoadOptions.row_memory,
    ssd_gbps: float = SSD_GBPS,
    memory_gbps: float = MEMORY_GBPS,
) -> MachinesPlan:
    """Plan a model on machines with `memories`, each as
    :func:`~mlx_moeflux.measure.plan.plan_model` takes it.

    Each runs the trunk and keeps a state, and holds experts in proportion to what is left; how many
    have a slot, loading decides on each. `expert_memory` is of each machine's experts. Layers
    wait for the machine with most work: of its experts that a token needs, reads, copies and
    products, and what the host has to do for reads.

    Raises:
        InputError: A number makes no sense.
        MemoryBudgetError: `expert_memory` is too small for one token.
    """
    for what, number in (("ssd_gbps", ssd_gbps), ("memory_gbps", memory_gbps)):
        if not 0 < number < float("inf"):
            raise InputError(f"{what} is {number}; it must be finite and greater than 0.")
    if not (link.bytes_per_second > 0 and link.latency >= 0):
        raise InputError("the link must have bytes per second; give one such as 2.5GB/s.")
    found = [one if isinstance(one, Memory) else described_memory(one) for one in memories]
    left = [one.usable_bytes - sizes.trunk_bytes - sizes.state_bytes for one in found]
    counts = shares(sizes.num_experts, len(memories), [max(1, rest) for rest in left])
    budgets = {"expert_memory": expert_memory, "row_memory": row_memory}
    layers, N = len(sizes.blocks), len(memories)
    block = sum(sizes.blocks.values()) / layers
    machines, costs = [], []
    for memory, count in zip(found, counts, strict=True):
        plan = plan_loading(sizes, memory, num_experts=count, **budgets)
        needs, slots = needed_bytes(plan, sizes), min(plan.slots.values())
        one = Machine(memory.free_bytes, count, slots, needs <= memory.usable_bytes)
        machines.append(one)
        pages = max(0, memory.system_bytes - needs)
        kept = min(1.0, one.share + pages / plan.expert_bytes)
        products = block / (1e9 * BANDWIDTH_SHARE * memory_gbps)
        costs.append(sum(fetch_seconds(block, one.share, kept, ssd_gbps)) + products)
    message = 4 * sizes.experts_per_token * sizes.hidden_size
    exchange = layers * link.seconds(message, N) + link.seconds(4, N)  # and the token
    resident = all(machine.share == 1 for machine in machines)
    compute = (sizes.trunk_bytes - sizes.embedding_bytes) / (1e9 * BANDWIDTH_SHARE * memory_gbps)
    trunk = layers * LAUNCH_SECONDS + compute
    work = layers * mean_of_most(tuple(counts), sizes.experts_per_token, tuple(costs))
    sync = 0 if resident else layers * SYNC_SECONDS
    seconds = trunk + exchange + work + sync
    slow, fast = range_around(seconds)
    lines = (
        f"trunk and launches {1e3 * trunk:.1f} ms on each at {memory_gbps:g} GB/s of memory; "
        f"exchange {1e3 * exchange:.1f} ms: {layers} x {format_bytes(message)} at "
        f"{format_bytes(link.bytes_per_second)}/s and {1e3 * link.latency:.2g} ms a message",
        f"experts of the busiest {1e3 * work:.1f} ms at {ssd_gbps:g} GB/s + synchronisation "
        f"{1e3 * sync:.1f} ms; together {1e3 * seconds:.1f} ms a token",
    )
    alone = None
    if N > 1:
        rates = {"ssd_gbps": ssd_gbps, "memory_gbps": memory_gbps}
        largest = max(found, key=lambda memory: memory.usable_bytes)
        one = plan_machines(name, sizes, memories=[largest], link=link, **budgets, **rates)
        alone = (one.slow, one.fast) if one.fits else None
    return MachinesPlan(name, sizes, tuple(machines), slow, fast, lines, alone)


@cache
def mean_of_most(counts: tuple[int, ...], chosen: int, costs: tuple[float, ...]) -> float:
    """Return the mean over tokens, which need `chosen` different experts with equal chances, of the
    largest ``costs[i] x (those on machine i)``. counts: Experts of each machine."""
    drawn = np.random.default_rng(0).multivariate_hypergeometric(counts, chosen, DRAWS)
    return float((drawn * np.array(costs)).max(axis=1).mean())
