"""The plan of :mod:`mlx_moeflux.measure.plan` for experts spread over machines. No MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from mlx_moeflux.distributed.placement import shares
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import format_bytes, slots_for_budget, smallest_budget
from mlx_moeflux.measure.plan import (
    MEMORY_GBPS,
    SSD_GBPS,
    SYNC_SECONDS,
    Sizes,
    described_memory,
    span,
    typical_hit_rate,
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
                    f"{format_bytes(one.memory_bytes)}: {one.experts} experts a layer, "
                    f"{one.slots} slots ({100 * one.share:.0f} %){fits}",
                )
            )
        if not all(one.share == 1 for one in self.machines):
            all_left = "all that trunk and state leave with nothing else open"
            rows.append(("slots", f"{all_left}; --expert-memory auto takes half of it"))
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
    memories: Sequence[int],
    link: Link,
    ssd_gbps: float = SSD_GBPS,
    memory_gbps: float = MEMORY_GBPS,
) -> MachinesPlan:
    """Plan a model on machines with `memories` bytes, see
    :func:`~mlx_moeflux.measure.plan.described_memory`.

    Each runs the trunk and keeps a state, and holds experts in proportion to what is left. Layers
    wait for the machine with most work: of its experts that a token needs, reads and products, and
    what the host has to do for reads. Where all experts are in memory, products may take twice as
    long.

    Raises:
        InputError: A number makes no sense.
    """
    for what, number in (("ssd_gbps", ssd_gbps), ("memory_gbps", memory_gbps)):
        if not 0 < number < float("inf"):
            raise InputError(f"{what} is {number}; it must be finite and greater than 0.")
    if not (link.bytes_per_second > 0 and link.latency >= 0):
        raise InputError("the link must have bytes per second; give one such as 2.5GB/s.")
    usable = [described_memory(m).usable_bytes for m in memories]
    left = [nbytes - sizes.trunk_bytes - sizes.state_bytes for nbytes in usable]
    counts = shares(sizes.num_experts, len(memories), [max(1, rest) for rest in left])
    machines = []
    for memory, rest, count in zip(memories, left, counts, strict=True):
        least = min(sizes.experts_per_token, count)
        fits = rest >= smallest_budget(sizes.blocks, least, 0)
        slots = least
        if fits:
            given = slots_for_budget(rest, sizes.blocks, num_experts=count, experts_per_token=least)
            slots = min(given.values())
        machines.append(Machine(memory, count, slots, fits))
    layers, N = len(sizes.blocks), len(memories)
    block = sum(sizes.blocks.values()) / layers
    message = 4 * sizes.experts_per_token * sizes.hidden_size
    exchange = layers * link.seconds(message, N) + link.seconds(4, N)  # and the token
    resident = all(machine.share == 1 for machine in machines)
    trunk = (sizes.trunk_bytes - sizes.embedding_bytes) / (1e9 * memory_gbps)
    lines = [
        f"trunk {1e3 * trunk:.1f} ms on each at {memory_gbps:g} GB/s of memory; exchange "
        f"{1e3 * exchange:.1f} ms: {layers} x {format_bytes(message)} at "
        f"{format_bytes(link.bytes_per_second)}/s and {1e3 * link.latency:.2g} ms a message"
    ]
    speeds = []
    for typical, sync, what in (
        (False, max(SYNC_SECONDS), "no preference"),
        (True, min(SYNC_SECONDS), "typical router"),
    ):
        hits = [typical_hit_rate(m.share) if typical else m.share for m in machines]
        costs = [block * ((1 - hit) / (1e9 * ssd_gbps) + 1 / (1e9 * memory_gbps)) for hit in hits]
        work = layers * mean_of_most(tuple(counts), sizes.experts_per_token, tuple(costs))
        host, of_host = layers * sync, "sync"
        if resident:
            host, of_host = 0 if typical else trunk + work, "launches"
        seconds = trunk + exchange + work + host
        speeds.append(1 / seconds)
        lines.append(
            f"{what}: {', '.join(f'{100 * hit:.0f}' for hit in hits)} % hits, experts of the "
            f"busiest {1e3 * work:.0f} ms at {ssd_gbps:g} GB/s + {of_host} {1e3 * host:.0f} ms + "
            f"trunk and exchange = {1e3 * seconds:.0f} ms"
        )
    alone = None
    if N > 1:
        rates = {"ssd_gbps": ssd_gbps, "memory_gbps": memory_gbps}
        one = plan_machines(name, sizes, memories=[max(memories)], link=link, **rates)
        alone = (one.slow, one.fast) if one.fits else None
    slow, fast = speeds
    return MachinesPlan(name, sizes, tuple(machines), slow, fast, tuple(lines), alone)


@cache
def mean_of_most(counts: tuple[int, ...], chosen: int, costs: tuple[float, ...]) -> float:
    """Return the mean over tokens, which need `chosen` different experts with equal chances, of the
    largest ``costs[i] x (those on machine i)``. counts: Experts of each machine."""
    drawn = np.random.default_rng(0).multivariate_hypergeometric(counts, chosen, DRAWS)
    return float((drawn * np.array(costs)).max(axis=1).mean())
