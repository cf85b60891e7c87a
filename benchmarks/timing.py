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
    takes to launch it. kernels: While one of its kernels ran, gaps left out; None if CUPTI was not
    there to see them.
    """

    wall: float
    kernels: float | None = None


def call_time(calls: Callable[[int], Any], few: int, many: int) -> CallTime:
    """calls: n -> results of so many calls, not evaluated."""

    def run(n: int) -> float:
        results = calls(n)
        start = time.perf_counter()
        mx.eval(results)
        mx.synchronize()
        return time.perf_counter() - start

    run(few)
    run(many)
    slopes = [(run(many) - run(few)) / (many - few) for _ in range(SLOPES)]
    seen = kernel_seconds(lambda: run(many))
    kernels = None if seen is None else sum(seen.values()) / many
    return CallTime(statistics.median(slopes), kernels)


def kernel_seconds(run: Callable[[], Any]) -> dict[str, float] | None:
    """Name -> seconds of the kernels of `run`, gaps left out and what overlaps counted once; None
    unless PyTorch is installed with CUDA to ask CUPTI."""
    if torch is None or not mx.cuda.is_available() or not torch.cuda.is_available():
        return None
    torch.zeros(1).cuda()  # CUPTI sees what runs after PyTorch has a context
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        mx.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [e for e in profiler.events() if e.device_type == on_gpu]
    seconds: dict[str, float] = {}
    until = 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        own = max(0.0, end - max(start, until)) * 1e-6
        seconds[event.name] = seconds.get(event.name, 0.0) + own
        until = max(until, end)
    return seconds
