"""Running one test of a kernel in two places: emulated on the CPU, and on a real GPU.

A test module says ``pytestmark = pytest.mark.usefixtures("device")`` (or a test takes the fixture
`device`, "emulator" or "gpu") and calls the functions of the package that launch kernels. The
emulated half runs everywhere, the other with ``-m gpu``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.kernels.runtime.launcher import KERNELS, MetalKernel, set_backend
from tests.kernels.metal.emulator import Emulator, missing
from tests.kernels.metal.variant import plain_name

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@functools.cache
def _shared_emulator(name: str) -> Emulator:
    return Emulator(name=name)


@contextlib.contextmanager
def emulated(*, name: str = "metal", **options: Any) -> Iterator[None]:
    """Launch every kernel on the CPU; options are those of
    :class:`~tests.kernels.metal.emulator.Emulator`. Where nothing runs, any machine will do."""
    if options.get("runs", True):
        require_emulator()
    # Compiled variants live as long as their emulator: the plain one is kept.
    before = set_backend(Emulator(name=name, **options) if options else _shared_emulator(name))
    try:
        yield
    finally:
        set_backend(before)


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """References run there, exactly in float32. It saves a minute on CUDA: stock operations that a
    model's references take are compiled at their first use."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(before)


def require_emulator() -> None:
    """Skip, or fail with MOEFLUX_REQUIRE_EMULATOR=1, where the emulator cannot run."""
    require(missing(), "MOEFLUX_REQUIRE_EMULATOR")


def require_gpu() -> None:
    """Skip, or fail with MOEFLUX_REQUIRE_GPU=1, where MLX drives no GPU."""
    there = mx.metal.is_available() or mx.cuda.is_available()
    require(None if there else "MLX drives no GPU here", "MOEFLUX_REQUIRE_GPU")


def require(reason: str | None, variable: str) -> None:
    """Nothing if `reason` is None; else skip with it, or fail where `variable` is 1."""
    if reason is None:
        return
    if os.environ.get(variable) == "1":
        pytest.fail(f"{reason}, and {variable}=1")
    pytest.skip(reason)


def usually(every: Sequence[Any], usual: Collection[int]) -> list[Any]:
    """Parameters of a test: by default those whose places are `usual`, the others with -m slow."""
    return [
        pytest.param(each, marks=[pytest.mark.slow] * (i not in usual))
        for i, each in enumerate(every)
    ]


def scratch_kernel(name: str, **options: Any) -> MetalKernel:
    """A kernel of a test: not registered with those of the package."""
    options.setdefault("file", "common.metal")
    kernel = MetalKernel(f"scratch_{name}", **options)
    del KERNELS[kernel.name]
    return kernel


def float64(array: mx.array | np.ndarray) -> np.ndarray:
    """Exactly, whatever the dtype."""
    if isinstance(array, mx.array):
        array = np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
    return array.astype(np.float64)


def error(actual: mx.array, truth: mx.array | np.ndarray) -> float:
    """Largest difference; infinite if shapes differ or a value is not finite."""
    a, b = float64(actual), float64(truth)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    return float(np.abs(a - b).max(initial=0.0))


def one_rounding(truth: np.ndarray, dtype: mx.Dtype) -> float:
    """Half a unit in the last place of the largest value: what rounding the result alone may cost.

    The least error that a naive computation is taken to have; by luck it has none (attention over
    one key: its weight is exactly 1, nothing is left to round).
    """
    bits = {mx.float32: 24, mx.float16: 11, mx.bfloat16: 8}[dtype]
    largest = float(np.abs(truth).max(initial=0.0))
    return 0.0 if largest == 0.0 else 2.0 ** (np.floor(np.log2(largest)) - bits)


@contextlib.contextmanager
def patched(module: Any, *caches: Any, **values: Any) -> Iterator[None]:
    """Other values of a module's constants; caches: Functions that remember what came of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(module, name, value)
        for cached in caches:
            cached.cache_clear()
        try:
            yield
        finally:
            for cached in caches:
                cached.cache_clear()


@contextlib.contextmanager
def launched() -> Iterator[list[str]]:
    """Names of the kernels that are launched meanwhile, in order."""
    names: list[str] = []
    call = MetalKernel.__call__

    def watched(kernel, *args, **kwargs):
        names.append(plain_name(kernel.name))
        return call(kernel, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetalKernel, "__call__", watched)
        yield names


@dataclass(frozen=True)
class Case:
    """A small call of a kernel for the mutation test: what it must return.

    call: Launches and returns arrays; expected: the arrays wanted; limit: for their error.
    What is slow to work out may be worked out when it is asked for.
    partly_written: Names of outputs that need not be filled. within: Entered around the call.
    """

    name: str
    call: Callable[[], Sequence[mx.array]]
    expected: Callable[[], Sequence[mx.array | np.ndarray]]
    limit: float | Callable[[], float]
    partly_written: tuple[str, ...] = ()
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def check(self) -> None:
        """Raise AssertionError unless the call returns what is expected."""
        with self.within():
            actual = list(self.call())
        expected = list(self.expected())
        limit = self.limit() if callable(self.limit) else self.limit
        assert len(actual) == len(expected), f"{self.name}: {len(actual)} arrays"
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            off = error(a, b)
            assert off <= limit, f"{self.name}: array {i} is off by {off:.3g}"
