"""A trace on several machines: what each would read, and how long a token would take. No MLX.

The store takes its rank's columns of a call as this module does, so a replay reads what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlx_moeflux.distributed.placement import Placement, Places, placed
from mlx_moeflux.experts.policies.eviction import DEFAULT_EVICTION
from mlx_moeflux.experts.telemetry.simulate import Simulation, simulate
from mlx_moeflux.experts.telemetry.trace import Call, Trace

# Calls of more tokens are prompts, whose sums are reduced before they are sent.
EXACT_TOKENS = 64


def own_columns(local: np.ndarray, count: int) -> np.ndarray:
    """Return an order of the columns of `local`, ``[N, min(K, count)]``, in which each row ascends
    and other ranks' experts, which are padding, come last.

    local: Ids ``[N, K]`` in a rank's numbers, see :meth:`Places.local_ids`. count: Its experts.
    """
    return np.argsort(local, axis=1, kind="stable")[:, : min(local.shape[1], count)]


def rank_trace(trace: Trace, places: Places, rank: int) -> Trace:
    """Return the calls that `rank` makes of its own store."""
    info, count = trace.info, places.counts[rank]
    tables = {layer: places.local_ids(layer, rank) for layer in info.layers}
    following = dict(zip(info.layers, info.layers[1:] + info.layers[:1], strict=True))
    calls = []
    for call in trace:
        local = tables[call.layer][call.ids]
        order = own_columns(local, count)
        guess = call.guess
        if guess is not None:
            own = tables[following[call.layer]][list(guess)].tolist()
            guess = tuple(e for e in own if e < count)
        ids = np.take_along_axis(local, order, axis=1)
        weights = np.take_along_axis(call.weights, order, axis=1)
        calls.append(Call(call.layer, call.token, ids, weights, guess=guess))
    own_info = replace(
        info, num_experts=count, experts_per_token=min(info.experts_per_token, count), slots=None
    )
    return Trace(own_info, calls)


@dataclass(frozen=True)
class Link:
    """The connection between neighbours of a ring. latency: Seconds of a message besides its
    bytes."""

    bytes_per_second: float
    latency: float = 1e-4

    def seconds(self, nbytes: float, ranks: int) -> float:
        """Return the time of a sum of `nbytes` over the ranks: 2 (N - 1) messages of an N-th."""
        steps = 2 * (ranks - 1)
        return steps * (self.latency + nbytes / ranks / self.bytes_per_second)


@dataclass(frozen=True)
class Machines:
    """A replay on several machines.

    ranks: The replay of each. read_seconds, exchange_seconds: Mean over decode steps; layers wait
    for the machine that reads most.
    """

    ranks: list[Simulation]
    read_seconds: float
    exchange_seconds: float

    @property
    def bytes_read(self) -> list[int]:
        """Bytes that each machine reads in the whole trace."""
        return [one.total.bytes_read for one in self.ranks]


def replay_machines(
    trace: Trace,
    placement: Placement,
    budgets: Sequence[str | float],
    *,
    hidden_size: int,
    disk: float,
    link: Link,
    eviction: str = DEFAULT_EVICTION,
) -> Machines:
    """Replay `trace` on one machine for each of `budgets`, the memory of its experts.

    disk: Bytes per second of each. A decode step is a call of one token.

    Raises:
        InputError, MemoryBudgetError: See :func:`simulate` and :func:`placed`.
    """
    info, ranks = trace.info, len(budgets)
    places = placed(placement, info.layers, info.num_experts, ranks)
    most, simulations = np.zeros(len(trace)), []
    for rank, budget in enumerate(budgets):
        own = rank_trace(trace, places, rank)
        whole = sum(info.block_bytes.values()) * places.counts[rank]
        amount = min(budget, whole) if isinstance(budget, (int, float)) else budget
        found = simulate(own, amount, eviction=eviction)
        simulations.append(found)
        blocks = np.array([info.block_bytes[call.layer] for call in own])
        most = np.maximum(most, np.array(found.misses) * blocks)
    steps = np.array([len(call.ids) == 1 for call in trace], bool)
    tokens = max(1, steps.sum() / len(info.layers))
    message = 4 * (info.experts_per_token * hidden_size + 2 * ranks)
    exchange = link.seconds(message, ranks) * len(info.layers)
    return Machines(simulations, float(most[steps].sum() / disk / tokens), exchange)
