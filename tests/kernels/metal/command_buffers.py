"""Count the Metal command buffers of a model's step, by MLX's rule.

The rule is that of MLX 0.32's ``CommandEncoder`` (backend/metal/device.cpp). After each primitive
it ends a buffer that has more than so many launches, or more than so many Mi elements in the arrays
that launches were given and made; of a Metal buffer it counts the first array, once.

The primitives of a step are those that MLX exports of its trace. Nothing runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_moeflux.kernels.runtime.launcher import MetalBackend, set_backend
from mlx_moeflux.models import compiled
from tests.kernels.metal.emulator import owners_of


class Limits(NamedTuple):
    """The launches of a command buffer, and its elements in 2^20."""

    launches: int
    elements: int


# By kind of chip, see ``get_max_ops_mb_per_buffer`` in MLX's device.cpp.
CHIPS = {"base, pro": Limits(40, 40), "max, ultra": Limits(50, 50)}


class Encoder:
    """Ends command buffers by MLX's rule. ended: Their number, without the open one."""

    def __init__(self, limits: Limits):
        self.limits, self.ended = limits, 0
        self._launches, self._elements = 0, 0
        self._seen: set[Hashable] = set()

    def add(self, arrays: Iterable[tuple[Hashable, int]], launches: int = 1) -> bool:
        """Take a primitive that binds `arrays`, a buffer's identity and an array's elements each;
        return True if it is the last of a command buffer."""
        self._launches += launches
        for buffer, elements in arrays:
            if buffer not in self._seen:
                self._seen.add(buffer)
                self._elements += elements
        full = self._launches > self.limits.launches or self._elements >> 20 > self.limits.elements
        if full:
            self.end()
        return full

    def end(self) -> None:
        """End the command buffer, if it has launches."""
        self.ended += self._launches > 0
        self._launches, self._elements = 0, 0
        self._seen.clear()


def blank(shape: Any, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Zeros that are evaluated and take no memory."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    array = mx.broadcast_to(mx.array(0, dtype), shape)
    _eval(array)
    return array


_eval = mx.eval


# ---- Primitives


@dataclass
class Array:
    """An array as MLX knows it. buffer: The identity of its buffer. static: True if it was there
    before the step."""

    buffer: Hashable
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    static: bool = False

    @property
    def elements(self) -> int:
        """``data_size()``"""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def dense(self) -> bool:
        """Row-contiguous"""
        wanted = contiguous(self.shape)
        pairs = zip(self.shape, self.strides, wanted, strict=True)
        return all(n == 1 or own == want for n, own, want in pairs)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense array."""
    return tuple([*accumulate(shape[:0:-1], mul, initial=1)][::-1]) if shape else ()


def reshaped(array: Array, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a view of another shape; None where MLX copies."""
    if array.dense:
        return contiguous(shape)
    left: list[list[int]] = []
    for n, stride in zip(array.shape, array.strides, strict=True):
        if left and left[-1][1] == n * stride:
            left[-1] = [left[-1][0] * n, stride]
        elif n > 1:
            left.append([n, stride])
    strides = []
    for n in shape:
        if n == 1:
            strides.append(1)
            continue
        if not left or left[0][0] % n:
            return None
        left[0][0] //= n
        strides.append(left[0][0] * left[0][1])
        if left[0][0] == 1:
            left.pop(0)
    return tuple(strides)


def _stretched(array: Array, shape: Sequence[int]) -> tuple[int, ...]:
    missing = len(shape) - len(array.shape)
    own = [*[1] * missing, *array.shape], [*[0] * missing, *array.strides]
    return tuple(0 if n == 1 else s for n, s in zip(*own, strict=True))


# Primitive -> strides of a view of its input, by the output's shape and the arguments.
VIEWS: dict[str, Callable[..., tuple[int, ...] | None]] = {
    "Slice": lambda a, shape, start, stop, step: tuple(map(mul, a.strides, step)),
    "Transpose": lambda a, shape, axes: tuple(a.strides[axis] for axis in axes),
    "AsStrided": lambda a, shape, sizes, strides, offset: tuple(strides),
    "Broadcast": lambda a, shape, *more: _stretched(a, shape),
    "Split": lambda a, shape, *more: a.strides,
    "contiguous": lambda a, shape, *more: a.strides if a.dense else None,
    **dict.fromkeys(("Copy", "StopGradient", "Depends"), lambda a, shape, *more: a.strides),
    **dict.fromkeys(
        ("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze", "View"),
        lambda a, shape, *more: reshaped(a, shape),
    ),
}
# MLX fuses them in a trace.
ELEMENTWISE = {
    *("Abs", "Add", "AsType", "BitwiseBinary", "Divide", "Equal", "Exp", "Floor", "Greater"),
    *("GreaterEqual", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot"),
    *("LogicalOr", "Maximum", "Minimum", "Multiply", "Negative", "NotEqual", "Power"),
    *("Remainder", "Select", "Sigmoid", "Sqrt", "Square", "Subtract", "Tanh"),
}
STOCK = "stock_"


def _stock(name: str, like: Callable[..., tuple[tuple[int, ...], mx.Dtype]]) -> Callable[..., Any]:
    """A launch in place of a stock operation, which on the CPU is many primitives, or one that MLX
    does not export. like: The shape and dtype of its result."""

    def call(*args: Any, **options: Any) -> mx.array:
        arrays = [a for a in (*args, *options.values()) if isinstance(a, mx.array)]
        kernel: Any = mx.fast.metal_kernel(
            name=f"{STOCK}{name}_{len(arrays)}",
            input_names=[f"x{i}" for i in range(len(arrays))],
            output_names=["y"],
            source="y[thread_position_in_grid.x] = 0;",
            ensure_row_contiguous=False,
        )
        shape, dtype = like(*args, **options)
        size = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
        return kernel(inputs=arrays, **size, output_shapes=[shape], output_dtypes=[dtype])[0]

    return call


def _same(x: mx.array, *others: Any, **options: Any) -> tuple[tuple[int, ...], mx.Dtype]:
    return x.shape, x.dtype


def _attention(q, k, v, **options: Any) -> tuple[tuple[int, ...], mx.Dtype]:
    return (*q.shape[:-1], v.shape[-1]), q.dtype


def _dequantised(w, scales, *biases: Any, bits: int = 4, **options: Any):
    return (*w.shape[:-1], w.shape[-1] * 32 // bits), scales.dtype


INSTEAD = [
    (mx.fast, "rms_norm", _stock("rms_norm", _same)),
    (mx.fast, "rope", _stock("rope", _same)),
    (mx.fast, "scaled_dot_product_attention", _stock("attention", _attention)),
    (mx, "dequantize", _stock("dequantize", _dequantised)),
    (mx, "contiguous", _stock("contiguous", _same)),
]


@dataclass
class Step:
    """The launches of a step, in order. work: Arrays (see :meth:`Encoder.add`) and launches of each
    primitive; None where an evaluation ends the command buffer. names: Of the primitives. nodes:
    Number of all primitives, views among them.
    """

    work: list[tuple[list[tuple[Hashable, int]], int] | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    nodes: int = 0
    # Identities are those of arrays that live.
    _kept: list[Any] = field(default_factory=list, repr=False)

    @property
    def launches(self) -> int:
        return sum(one[1] for one in self.work if one is not None)

    def stock(self) -> int:
        """Launches of stock operations."""
        return self.launches - self.names.count("CustomKernel")

    def buffers(self, limits: Limits) -> int:
        """Command buffers by MLX's rule."""
        encoder = Encoder(limits)
        for one in self.work:
            encoder.end() if one is None else encoder.add(*one)
        encoder.end()
        return encoder.ended

    def end(self) -> None:
        """Note an evaluation."""
        if self.work and self.work[-1] is not None:
            self.work.append(None)

    def trace(self, function: Callable[..., Any], inputs: Any, *, fuses: bool = True) -> Any:
        """Take ``function(*inputs)`` down; return what has the shapes of its results. fuses: MLX
        compiles it, and fuses elementwise operations."""
        arrays = [a for _, a in tree_flatten(inputs) if isinstance(a, mx.array)]
        results: list[Any] = []

        def of_arrays(*given: mx.array) -> list[mx.array]:
            results.append(function(*_with(inputs, iter(given))))
            return [a for _, a in tree_flatten(results[-1]) if isinstance(a, mx.array)]

        graph: list[dict[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            for substituted in INSTEAD:
                patch.setattr(*substituted)
            mx.export_function(graph.append, of_arrays, *arrays)
        self._take(graph, arrays, fuses)
        return _map(lambda a: blank(a.shape, a.dtype), results[-1])

    def _take(self, graph: list[dict[str, Any]], inputs: list[mx.array], fuses: bool) -> None:
        known: dict[str, Array] = {}
        readers: dict[str, list[dict[str, Any]]] = {}
        for entry in graph:
            kind = entry["type"]
            if kind == "inputs":
                self._kept += inputs
                for (name, shape, _), owner in zip(entry["inputs"], owners_of(inputs), strict=True):
                    known[name] = Array(id(owner), shape, contiguous(shape))
            elif kind == "constants":
                named = dict(entry["constants"])
                self._kept += named.values()
                owners = owners_of(named.values())
                for (name, array), owner in zip(named.items(), owners, strict=True):
                    known[name] = Array(id(owner), array.shape, contiguous(array.shape), True)
            elif kind == "primitive" and fuses:
                for name, _, _ in entry["inputs"]:
                    readers.setdefault(name, []).append(entry)
        for entry in graph:
            if entry["type"] == "primitive":
                self._primitive(known, readers, entry, id(graph))
        self._kept.append(graph)

    def _primitive(self, known, readers, entry: dict[str, Any], graph: int) -> None:
        name, arguments = entry["name"], entry["arguments"]
        inputs = [known[one] for one, _, _ in entry["inputs"]]
        outputs = {
            one: Array((one, graph), shape, contiguous(shape)) for one, shape, _ in entry["outputs"]
        }
        # MLX evaluated this when the model was loaded.
        static = all(array.static for array in inputs)
        self.nodes += not static
        known |= outputs
        for array in outputs.values():
            array.static = static
        launches = 1
        if name == "CustomKernel" and arguments[0].startswith(f"custom_kernel_{STOCK}"):
            name = arguments[0].removeprefix(f"custom_kernel_{STOCK}").partition("_")[0]
        if name in VIEWS:
            launches = 0
            for array in outputs.values():
                strides = VIEWS[name](inputs[0], array.shape, *arguments)
                if strides is None:
                    launches = 1
                else:
                    array.buffer, array.strides = inputs[0].buffer, strides
        elif name == "Concatenate":
            launches = len(inputs)
        elif name in ELEMENTWISE:
            ((one, shape, _),) = entry["outputs"]
            after = readers.get(one, [])
            fused = len(after) == 1 and after[0]["name"] in ELEMENTWISE
            launches -= fused and after[0]["outputs"][0][1] == shape
        elif name == "CustomKernel":
            launches += sum(not array.dense for array in inputs)
        if launches and not static:
            bound = [(a.buffer, a.elements) for a in (*inputs, *outputs.values())]
            self.work.append((bound, launches))
            self.names.append(name)


def _map(function: Callable[[mx.array], mx.array], tree: Any) -> Any:
    return tree_map(lambda a: function(a) if isinstance(a, mx.array) else a, tree)


def _with(tree: Any, arrays: Iterator[mx.array]) -> Any:
    """The same tree with other arrays."""
    return _map(lambda _: next(arrays), tree)


# ---- Steps of models


@contextlib.contextmanager
def counted_steps() -> Iterator[Step]:
    """Take down what steps from traces bind, with evaluations in between."""
    step = Step()

    class Traced:
        def __init__(self, function: Callable[..., Any]):
            self._function = function

        def __call__(self, *inputs: Any, **options: Any) -> Any:
            return step.trace(self._function, inputs)

    def ended(*arrays: Any) -> None:
        step.end()

    before = set_backend(MetalBackend())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled.trials, "compiled", Traced)
            patch.setattr(MetalBackend, "checks_first_use", False)
            patch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
            patch.setattr(mx.metal, "is_available", lambda: True)
            patch.setattr(mx, "zeros", blank)
            patch.setattr(mx, "eval", ended)
            patch.setattr(mx, "async_eval", ended)
            yield step
    finally:
        set_backend(before)
