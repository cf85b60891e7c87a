"""Apple's back end without a Mac: whatever the package asks before and around a launch is asked as
on Metal, and launches are emulated."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_moeflux.experts.io import read_pool
from mlx_moeflux.kernels.runtime.launcher import Launcher, MetalBackend, MetalKernel, set_backend
from mlx_moeflux.kernels.verify import verdicts
from tests.kernels.experts import BETWEEN
from tests.kernels.harness import require_emulator
from tests.kernels.metal.emulator import Emulator
from tests.kernels.metal.variant import plain_name


class MetalDevice(MetalBackend):
    """Launches in the emulator what :class:`MetalBackend` launches on Apple's GPUs.

    A launch on arrays of a trace returns unevaluated arrays that depend on them: the emulator needs
    values, and MLX has no operation that calls Python when it is evaluated. Floats are zero then.
    Integers count along the last axis, because a router must choose different experts.

    emulator: What runs the other launches. traced, launched: Names of the kernels launched in a
    trace, and otherwise; launches: How many of the latter. broken: Names of kernels that Metal's
    compiler refuses, which MLX says when it evaluates their results. most: Threads that a
    threadgroup may have; more fail alike.
    """

    emulator: Emulator
    traced: list[str]
    launched: set[str]
    launches: int
    broken: frozenset[str]
    most: int

    def build(self, kernel: MetalKernel) -> Launcher:
        run = self.emulator.build(kernel)
        return functools.partial(_launch, self, plain_name(kernel.name), run)


def _launch(
    device: MetalDevice,
    name: str,
    run: Launcher,
    *,
    inputs: Sequence[mx.array],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    **options: Any,
) -> list[mx.array]:
    def each(make: Callable[[Sequence[int], mx.Dtype], mx.array]) -> list[mx.array]:
        return [make(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

    try:
        traced = are_traced(inputs)
    except RuntimeError:
        return each(_failing)  # another launch before has failed
    if traced:
        device.traced.append(name)
        return mx.depends(each(_blank), list(inputs))
    device.launched.add(name)
    device.launches += 1
    if name in device.broken or math.prod(options["threadgroup"]) > device.most:
        return each(_failing)
    shapes = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
    return run(inputs=inputs, **shapes, **options)


def never() -> mx.array:
    """A number whose evaluation raises a RuntimeError in the calling thread, as Metal's compiler
    makes it. What fails in a thread of the CPU's stream leaves others waiting for ever."""
    ones = mx.ones((32, 32))
    return mx.qqmm(ones, ones, mode="mxfp8", stream=mx.cpu)[0, 0]  # MLX has none for the CPU


def _failing(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    return mx.broadcast_to(never(), shape).astype(dtype)


def _blank(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    if mx.issubdtype(dtype, mx.floating) or not shape:
        return mx.zeros(shape, dtype)
    return mx.broadcast_to(mx.arange(shape[-1]).astype(dtype), shape)


def are_traced(arrays: Sequence[mx.array]) -> bool:
    """Whether any of these arrays stands for a value that a trace has not got."""
    try:
        mx.eval(*arrays)
    except ValueError:
        return True
    return False


@contextlib.contextmanager
def on_metal(cache: Path) -> Iterator[MetalDevice]:
    """Run as on a Mac whose kernels nobody has checked yet, except that stock operations stay on
    the CPU and nothing is read in the background. cache: An empty folder for verdicts."""
    require_emulator()
    device = MetalDevice()
    device.emulator = Emulator(schedules=Emulator.FIRST, partly_written=BETWEEN)
    device.traced, device.launched, device.launches = [], set(), 0
    device.broken, device.most = frozenset(), 1024
    before = set_backend(device)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
            patch.setenv("MOEFLUX_CACHE_DIR", str(cache))
            patch.setattr(verdicts, "_known", verdicts._Known())
            # Times of the emulator say nothing: tests of choices have their own.
            patch.setattr(verdicts, "is_virtual", lambda: True)
            # Graphs of streamed steps are built while blocks come, and the emulator runs at once.
            patch.setattr(read_pool, "SMALL_BYTES", 1 << 40)
            yield device
    finally:
        set_backend(before)
