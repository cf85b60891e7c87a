"""How long a call takes on the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

try:
    import torch
    from torch.profiler import ProfilerActivity, profile
except ImportError:
    torch = None

SLOPES = 5


@dataclass(frozen=True)
class CallTime:
    """Seconds of a call.

    wall: Slope over the number of calls in one `mx.eval`. A call cannot take less than the host
    takes to launch it. kernels: While one of its kernels ran, gaps left out; None if nothing saw
    them.
    """

    wall: float
    kernels: float | None = None

    @property
    def gpu(self) -> float:
        """What the GPU needs, as near as it is known."""
        return self.wall if self.kernels is None else min(self.wall, self.kernels)


def call_time(
    calls: Callable[[int], Any], few: int, many: int, *, profiled: bool = False
) -> CallTime:
    """calls: n -> results of so many calls, not evaluated. few: 0 for the time of one evaluation
    of `many` calls. profiled: Ask CUPTI too, through PyTorch where it is installed with CUDA."""

    def run(n: int) -> float:
        results = calls(n)
        start = time.perf_counter()
        mx.eval(results)
        mx.synchronize()
        return time.perf_counter() - start

    run(max(few, 1))
    if few == 0:
        return CallTime(run(many) / many)
    run(many)
    slopes = [(run(many) - run(few)) / (many - few) for _ in range(SLOPES)]
    kernels = _busy_seconds(run, many) if profiled and _cupti() else None
    return CallTime(statistics.median(slopes), kernels)


def _cupti() -> bool:
    return torch is not None and mx.cuda.is_available() and torch.cuda.is_available()


def _busy_seconds(run: Callable[[int], Any], n: int) -> float:
    torch.zeros(1).cuda()  # CUPTI sees what runs after PyTorch has a context
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(n)
    on_gpu = torch.autograd.DeviceType.CUDA
    ranges = [e.time_range for e in profiler.events() if e.device_type == on_gpu]
    busy, until = 0.0, 0.0
    for one in sorted(ranges, key=lambda one: one.start):  # calls that depend on nothing overlap
        busy += max(0.0, one.end - max(one.start, until))
        until = max(until, one.end)
    return busy * 1e-6 / n
