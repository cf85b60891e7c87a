"""Kernels written once in Metal's language and launched on every GPU that MLX drives.

A :class:`MetalKernel` owns a kernel: its name, the file with its functions, the body that calls
them, and one lazily built launcher for each back end. Checks of shapes and dtypes belong to the
functions that launch; this class only makes sure that MLX can take the call.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.runtime import packing, source, views
from mlx_moeflux.kernels.runtime.cuda import cache as cuda_cache
from mlx_moeflux.kernels.runtime.cuda import module as cuda_module
from mlx_moeflux.kernels.runtime.views import LEAST_INPUT

# Threads that a threadgroup may have. Apple's GPUs refuse a launch of more than the compiled kernel
# allows: 1024, but the fewer the more registers a thread takes (640 and 896 were seen). So many
# threads may have 128 registers each, which is all that there are for one.
MOST_THREADS, MOST_THREADS_ELSEWHERE = {"metal": 384}, 1024
# Bytes of threadgroup memory: Metal's limit, and CUDA's without asking for more.
MOST_BYTES = {"metal": 32 * 1024, "cuda": 48 * 1024}

KERNELS: dict[str, MetalKernel] = {}

Launcher = Callable[..., "list[mx.array]"]


class Backend(Protocol):
    """A place where kernels run: one of the two GPU back ends below, or a test's."""

    name: str
    # Small inputs are padded, and large ones of few rows are short views.
    pads_inputs: bool
    # Kernels run only while MLX's default device is a GPU.
    follows_device: bool
    # "auto" uses nothing before its trial (kernels/verify/trials.py).
    checks_first_use: bool

    def build(self, kernel: MetalKernel) -> Launcher:
        """A callable with the keywords of the object that ``mx.fast.metal_kernel`` returns."""
        ...


class MetalBackend:
    """Apple GPUs."""

    name, pads_inputs = "metal", True
    follows_device, checks_first_use = True, True

    def build(self, kernel: MetalKernel) -> Launcher:
        header, body = kernel.metal_text()
        return mx.fast.metal_kernel(  # pyright: ignore[reportReturnType]  # stubs say: object
            name=f"moeflux_{kernel.name}",
            input_names=list(kernel.inputs),
            output_names=list(kernel.outputs),
            source=body,
            header=header,
        )


class CudaBackend:
    """NVIDIA GPUs: the same text behind a dialect of CUDA."""

    name, pads_inputs = "cuda", False
    follows_device, checks_first_use = True, False

    @functools.cached_property
    def cache(self) -> cuda_cache.Cache:
        """Files with texts and machine code, opened when the first kernel is built."""
        return cuda_cache.open_cache()

    def build(self, kernel: MetalKernel) -> Launcher:
        text = cuda_module.Kernel(
            f"moeflux_{kernel.name}", *kernel.cuda_text(), kernel.inputs, kernel.outputs
        )
        return self.cache.launcher(text, kernel.memory)


class NoBackend:
    """No GPU: every launch is refused."""

    name, pads_inputs = "cpu", False
    follows_device, checks_first_use = False, False

    def build(self, kernel: MetalKernel) -> Launcher:
        raise UnsupportedError(
            f"kernel '{kernel.name}' needs a GPU and MLX drives none here; take the reference "
            "(MOEFLUX_KERNELS=reference)."
        )


@functools.cache
def _detected() -> Backend:
    if mx.metal.is_available():
        return MetalBackend()
    if mx.cuda.is_available():
        return CudaBackend()
    return NoBackend()


class Active:
    """The back end in use; tests put another one here."""

    backend: Backend | None = None


class _Recorded(threading.local):
    launches: list[Any] | None = None


_recorded = _Recorded()


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Collect what this thread launches: kernel, digest of its text, template and dtypes."""
    before, _recorded.launches = _recorded.launches, []
    try:
        yield _recorded.launches
    finally:
        _recorded.launches = before


def backend() -> Backend:
    """The back end that launches go to."""
    if Active.backend is None:
        Active.backend = _detected()
    return Active.backend


def most_threads() -> int:
    """Threads that a threadgroup may have on the back end in use. What lays a launch out by them
    and remembers it takes them as an argument."""
    return MOST_THREADS.get(backend().name, MOST_THREADS_ELSEWHERE)


def most_bytes() -> int:
    """Bytes of threadgroup memory, as :func:`most_threads`."""
    return MOST_BYTES.get(backend().name, min(MOST_BYTES.values()))


def on_nvidia() -> bool:
    """Return True if stock operations run on NVIDIA's GPU."""
    return mx.cuda.is_available() and mx.default_device().type == mx.gpu


def set_backend(new: Backend | None) -> Backend | None:
    """Launch on `new` from now on (None: on what MLX has); returns what was set before."""
    before, Active.backend = Active.backend, new
    return before


def cuda_files() -> cuda_cache.Cache | None:
    """The files between MLX and NVIDIA's GPU, if kernels would run there now.

    The first call must come before MLX itself compiles something: it then looks there for modules.
    """
    active = backend()
    if isinstance(active, CudaBackend) and mx.default_device() != mx.cpu:
        return active.cache
    return None


def float_bits(value: float) -> int:
    """`value` as a template argument: templates take no floats, bodies say
    ``as_type<float>(NAME)``."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


class MetalKernel:
    """One kernel: source, launch and name.

    Args:
        name: Unique; the profiler shows it.
        file: Its functions, beside this module; those of ``common.metal`` are known too.
        inputs, outputs: Names of its arrays in the body.
        body: ``threadgroup`` arrays and one call. It must use at least one thread attribute.
        packed: Whether inputs that lie in one buffer are passed as one, which takes a text for each
            of the places that they have there.
        memory: Template -> bytes of threadgroup memory. With it CUDA gives a launch as much as it
            asks for; without it a kernel has what it declares, 48 KB at most.

    Raises:
        ValueError: The name is taken.
    """

    def __init__(
        self,
        name: str,
        *,
        file: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        body: str,
        packed: bool = True,
        memory: Callable[[Mapping[str, Any]], int] | None = None,
    ):
        if name in KERNELS:
            raise ValueError(f"two kernels are called '{name}'")
        KERNELS[name] = self
        self.name, self.file, self.body, self.memory = name, file, body, memory
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        # Inputs whose shape the body reads: whether it reads the first axis alone.
        self._shaped = {
            n: not re.search(rf"\b{n}_shape(?!\[0\])", body) for n in inputs if f"{n}_shape" in body
        }
        self._packed, self._arranger = packed, packing.Arranger(self.inputs, self._shaped)
        self._arranged: dict[tuple[packing.Binding, ...], MetalKernel] = {}
        self._typed: dict[tuple[tuple[str, str], ...], MetalKernel] = {}
        self._bound: object = MetalKernel  # no back end yet, not even None
        self._launch: Launcher
        self._axes: dict[str, set[int]] = {}
        self._pads, self._most = False, 0
        self._text_digest = ""

    def __repr__(self) -> str:
        return f"MetalKernel({self.name!r}, file={self.file!r})"

    def metal_text(self) -> tuple[str, str]:
        """header, body as Metal's compiler gets them."""
        return source.metal_text(self.file, self.body)

    def _digest(self) -> str:
        if not self._text_digest:
            text = "".join(self.metal_text())
            self._text_digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return self._text_digest

    def cuda_text(self) -> tuple[str, str]:
        """header, body as CUDA's compiler gets them."""
        return source.cuda_text(self.file, self.body, on_demand=self.memory is not None)

    def __call__(
        self,
        *inputs: mx.array,
        template: Mapping[str, mx.Dtype | int | bool] | None = None,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Launch the kernel; `grid` counts threads and is divisible by `threadgroup`.

        MLX makes the inputs row-contiguous. The outputs are new; the kernel writes nothing else.

        Raises:
            UnsupportedError: MLX drives no GPU.
            ShapeError: `grid` is not divisible. `threadgroup` is larger than the back end allows.
                An input is too small for Metal, and the body reads its shape. A number of
                `template` is negative: MLX makes it part of a name.
        """
        kernel, arrays = self, inputs
        if self._packed and packing.PLACES and (found := self._arranger(inputs)) is not None:
            arrangement, arrays = found
            kernel = self._arranged.get(arrangement.bindings) or self._of(arrangement.bindings)
            if arrangement.template:
                template = {**(template or {}), **arrangement.template}
        return kernel._start(arrays, template, grid, threadgroup, output_shapes, output_dtypes)

    def _start(self, inputs, template, grid, threadgroup, output_shapes, output_dtypes):
        """Launch the kernel with inputs as they are, see :meth:`__call__`."""
        if Active.backend is not self._bound:
            self._bind()
        if _recorded.launches is not None:
            dtypes = [str(array.dtype) for array in inputs]
            launch = self.name, self._digest(), str(template), str((dtypes, output_dtypes))
            _recorded.launches.append(launch)
        x, y, z = threadgroup
        if grid[0] % x or grid[1] % y or grid[2] % z:
            raise ShapeError(
                f"kernel '{self.name}': grid {grid} is not divisible by threadgroup {threadgroup}."
            )
        if x * y * z > self._most:
            raise ShapeError(
                f"kernel '{self.name}': threadgroup {threadgroup} is larger than the {self._most} "
                "threads that it may have here."
            )
        if self._pads:
            source.refuse_negative(self.name, template or {})
            inputs = self._fitted(inputs)
        return self._launch(
            inputs=inputs,
            template=template and [*template.items()],
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
        )

    def using(self, **types: str) -> MetalKernel:
        """Return the same kernel, not registered, where names in its body stand for types of its
        file: the text holds no others."""
        key = tuple(types.items())
        if (kernel := self._typed.get(key)) is None:
            opening = "".join(f"using {name} = {of};\n" for name, of in key)
            kernel = self._typed[key] = self._opened(key, opening)
        return kernel

    def _of(self, bindings: tuple[packing.Binding, ...]) -> MetalKernel:
        """The same kernel for inputs that are passed in other arrays, not registered."""
        opening = packing.opening(self.inputs, bindings)
        kernel = self._arranged[bindings] = self._opened(bindings, opening)
        kernel.inputs = tuple(packing.source_names(self.inputs, bindings))
        kernel._shaped = {n: whole for n, whole in self._shaped.items() if n in kernel.inputs}
        kernel._arranger = packing.Arranger(kernel.inputs, kernel._shaped)
        return kernel

    def _opened(self, key: object, opening: str) -> MetalKernel:
        """A copy with a longer body, of another name: MLX keeps one text for each."""
        digest = hashlib.blake2b(repr(key).encode(), digest_size=3).hexdigest()
        kernel = copy.copy(self)
        kernel.name, kernel.body = f"{self.name}_{digest}", opening + self.body
        kernel._bound, kernel._arranged, kernel._text_digest = MetalKernel, {}, ""
        return kernel

    def _bind(self) -> None:
        active = backend()
        if active is not self._bound:
            self._launch = active.build(self)
            self._axes = _axes_read(self.inputs, self.body)
            self._bound, self._pads, self._most = active, active.pads_inputs, most_threads()

    def _fitted(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Inputs of fewer than 8 elements become flat ones of 8. In a launch of few rows large ones
        become their short views, unless the body reads a length that a view has not."""
        first, fitted = inputs[0], []
        few = first.size <= views.MOST_ROWS * (first.shape[-1] if first.ndim else 1)
        for name, array in zip(self.inputs, inputs, strict=True):
            if array.size < LEAST_INPUT:
                if name in self._shaped:
                    raise ShapeError(
                        f"kernel '{self.name}': '{name}' has {array.size} elements; Metal needs "
                        f"{LEAST_INPUT} where the kernel reads its shape."
                    )
                array = mx.pad(array.reshape(-1), (0, LEAST_INPUT - array.size))
            elif (known := views.SHORTS.get(id(array))) is not None and (few or known.any_rows):
                axes = self._axes.get(name, range(array.ndim))
                if all(known.view.shape[axis] == array.shape[axis] for axis in axes):
                    array = known.view
            fitted.append(array)
        return fitted


def _axes_read(names: Sequence[str], body: str) -> dict[str, set[int]]:
    """Input -> axes whose length `body` reads; an input of which it reads all is not there."""
    found = {}
    for name in names:
        read = re.findall(rf"\b{name}_shape\b(?:\[(\d)\])?", body)
        if "" not in read:
            found[name] = {*map(int, read)}
    return found
