"""A back end that takes launches down instead of running them, and what each asks of a device."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.operation import REFERENCE
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, set_backend
from tests.kernels.implementations import IMPLEMENTATIONS
from tests.kernels.metal.emulator import owners_of
from tests.kernels.metal.variant import plain_name

# Bytes of the types of threadgroup arrays.
SIZES = {
    "float": 4,
    "uint": 4,
    "atomic_uint": 4,
    "int": 4,
    "half": 2,
    "bfloat": 2,
    "char": 1,
    "uchar": 1,
}
# Where an array in threadgroup memory may have to begin.
ALIGNED = 16

_DECLARED = re.compile(
    r"threadgroup\s+(?:alignas\(\w+\)\s+)?(\w+(?:<[^;>]*>)?)\s+(\w+)\[([^\];]*)\];"
)
_MENTIONED = re.compile(r"\bthreadgroup\s+(?!\w+\s*\*)")
_PACK = re.compile(r"pack<\s*([^,]+?)\s*,(.*)>")


def value(expression: str, names: Mapping[str, Any]) -> int:
    """A C expression of whole numbers, in which `names` have their values."""
    choice = re.fullmatch(r"([^?]*)\?([^:]*):(.*)", expression, re.S)
    if choice:
        condition, one, other = choice.groups()
        return value(one if value(condition, names) else other, names)
    text = re.sub(r"sizeof\((\w+)\)", lambda m: str(bytes_of(m[1], names)), expression)
    if not re.fullmatch(r"[\w\s+\-*/%|&<>=!()]*", text):
        raise AssertionError(f"what is '{expression}'?")
    return int(eval(text.replace("/", "//"), {"__builtins__": {}}, dict(names)))


def bytes_of(kind: str, names: Mapping[str, Any]) -> int:
    """Bytes of one value of a type."""
    if pack := _PACK.fullmatch(kind):
        return bytes_of(pack[1], names) * value(pack[2], names)
    return names[kind].size if isinstance(names.get(kind), mx.Dtype) else SIZES[kind]


def threadgroup_bytes(kernel: MetalKernel, template: Mapping[str, Any]) -> int:
    """Bytes of the threadgroup arrays that a kernel's body declares, every one of which must be
    understood."""
    found = _DECLARED.findall(kernel.body)
    if len(found) != len(_MENTIONED.findall(kernel.body)):
        raise AssertionError(f"kernel '{kernel.name}': a declaration is not 'threadgroup T x[n];'")
    sizes = [bytes_of(kind, template) * value(count, template) for kind, _, count in found]
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


@dataclass(frozen=True)
class Launch:
    """One launch.

    inputs, outputs: Name -> bytes; of a short view those of its array.
    """

    kernel: MetalKernel
    template: dict[str, Any]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    inputs: dict[str, int]
    outputs: dict[str, int]

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def threads(self) -> int:
        return math.prod(self.threadgroup)

    @property
    def memory(self) -> int:
        """Bytes of threadgroup memory."""
        return threadgroup_bytes(self.kernel, self.template)

    @property
    def buffers(self) -> int:
        """Arrays that the generated function takes, with those that say the shapes of others."""
        told = (f"{name}_{what}" for name in self.inputs for what in ("shape", "strides", "ndim"))
        said = sum(bool(re.search(rf"\b{name}\b", self.kernel.body)) for name in told)
        return len(self.inputs) + len(self.outputs) + said


class Recorder:
    """A back end for :func:`mlx_moeflux.kernels.runtime.launcher.set_backend`. Nothing runs: what a
    launch returns are zeros that nobody has asked for yet.

    name: The back end that implementations shall think they run on. launches: What was launched.
    refused: What a kernel itself did not take.
    """

    pads_inputs, follows_device, checks_first_use = True, False, False

    def __init__(self, name: str = "metal"):
        self.name = name
        self.launches: list[Launch] = []
        self.refused: list[str] = []

    def names(self) -> set[str]:
        """Of the kernels that were launched."""
        return {plain_name(launch.name) for launch in self.launches}

    def build(self, kernel: MetalKernel):
        def launch(*, inputs, template, grid, threadgroup, output_shapes, output_dtypes):
            outputs = [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]
            self.launches.append(
                Launch(
                    kernel, dict(template or ()), grid, threadgroup,
                    {n: a.nbytes for n, a in zip(kernel.inputs, owners_of(inputs), strict=True)},
                    {n: a.nbytes for n, a in zip(kernel.outputs, outputs, strict=True)},
                )
            )  # fmt: skip
            return outputs

        return launch


@contextlib.contextmanager
def recorded(name: str = "metal", *, every_implementation: bool = False) -> Iterator[Recorder]:
    """Launch on a :class:`Recorder`, and evaluate nothing. every_implementation: A call of an
    operation goes through its reference and all its implementations for GPUs besides the one that
    is asked."""
    recorder, start = Recorder(name), MetalKernel._start

    def started(kernel, *args):
        try:
            return start(kernel, *args)
        except ShapeError as error:
            recorder.refused.append(str(error))
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetalKernel, "_start", started)
        patch.setattr(mx, "eval", lambda *arrays: None)
        patch.setattr(mx, "async_eval", lambda *arrays: None)
        # Steps are laid out as for a trace.
        patch.setattr(mx, "compile", lambda function: function)
        for operation, implementations in IMPLEMENTATIONS.items() if every_implementation else ():
            for name, implementation in _through_all(implementations).items():
                patch.setitem(IMPLEMENTATIONS[operation], name, implementation)
        before = set_backend(recorder)
        try:
            yield recorder
        finally:
            set_backend(before)


def _through_all(implementations):
    """Implementations that call the others first."""
    others = {n: f for n, f in implementations.items() if f.kernels or n == REFERENCE}
    busy = []

    def through_all(name, implementation):
        @functools.wraps(implementation.function)
        def call(*args, **kwargs):
            for other, each in others.items() if not busy else ():
                if other != name:
                    busy.append(other)
                    # An implementation may say that it does not take a call.
                    with contextlib.suppress(ShapeError, UnsupportedError):
                        each(*args, **kwargs)
                    busy.pop()
            return implementation.function(*args, **kwargs)

        return call

    return {n: replace(f, function=through_all(n, f)) for n, f in implementations.items()}
