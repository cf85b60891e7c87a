"""The link between ranks, measured as :mod:`~mlx_moeflux.measure.plan_machines` counts it."""

from __future__ import annotations

import statistics
from time import perf_counter

import mlx.core as mx

from mlx_moeflux.distributed.ranks import Ranks
from mlx_moeflux.errors import DistributedError
from mlx_moeflux.measure.plan_machines import Link

# Of a sum whose bytes take no time, and of one whose messages take none; how many follow each
# other, as in a step. A gigabit a second takes half a second for a large one.
SMALL_BYTES, SMALL_SUMS = 1 << 10, 40
LARGE_BYTES, LARGE_SUMS = 64 << 20, 2
REPEATS = 5


def measure_link(ranks: Ranks) -> Link:
    """Time small and large sums over `ranks`, of which all call it.

    Raises:
        DistributedError: There is one rank, or a collective failed.
    """
    if ranks.size == 1:
        raise DistributedError("one rank has no link; start at least two with mlx.launch -n 2.")
    small = _seconds(ranks, SMALL_BYTES, SMALL_SUMS)
    large = _seconds(ranks, LARGE_BYTES, LARGE_SUMS)
    return Link.measured(ranks.size, small, nbytes=LARGE_BYTES, large=large)


def _seconds(ranks: Ranks, nbytes: int, sums: int) -> float:
    """Return the median time of a sum of float32 in a chain."""
    found = []
    for _ in range(REPEATS + 1):
        x = mx.zeros((nbytes // 4,))
        mx.eval(ranks.sum(mx.zeros((1,))), x)  # all begin together
        ranks.wait()
        start = perf_counter()
        for _ in range(sums):
            x = ranks.sum(x)
        ranks.wait()
        found.append((perf_counter() - start) / sums)
    return statistics.median(found[1:])
