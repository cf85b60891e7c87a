"""Metal kernels on the CPU: the text that MLX generates for Metal, compiled by GCC and run.

Every thread is a fibre. Memory accesses are checked one by one: bounds, alignment, writes into
inputs, and order: two threads may touch the same element only with a barrier between them.
Outputs are poisoned before the launch, and each of their elements must be written. Each launch
runs under several schedules, whose results must be the same bits.

What it cannot show: Apple's compiler, registers, speed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moeflux.kernels.runtime import device, source, views
from mlx_moeflux.kernels.runtime.launcher import Launcher, MetalKernel
from tests.kernels.metal.variant import Argument, EmulatorError, Variant, generated_text

HERE = Path(__file__).parent
COMPILER = "g++"
# A kernel takes a third less time to compile by -Og than by -O1, and no more to run.
FLAGS = shlex.split(
    "-std=c++20 -Og -g1 -fPIC -ffp-contract=off -fno-strict-aliasing -fno-exceptions "
    "-fsanitize=thread,bounds-strict --param=tsan-instrument-func-entry-exit=0 "
    "-fno-tree-loop-distribute-patterns -Wall -Wno-unused -Wno-unknown-pragmas -Wno-sign-compare "
    "-Wno-parentheses -Wno-maybe-uninitialized -Werror"
)
SCHEDULES = (("forward", 0), ("reverse", 0), ("random", 1))
OWN = frozenset(
    {"check_rows", "load_pack", "store_pack"}
)  # of common.metal, but defined in language.h
ORDER = {"forward": 0, "reverse": 1, "random": 2}

# Metal's attributes -> what the runtime knows of the running thread.
ATTRIBUTES = {
    "thread_position_in_grid": "now->in_grid",
    "thread_position_in_threadgroup": "now->in_group",
    "threadgroup_position_in_grid": "now->group",
    "threadgroups_per_grid": "now->groups",
    "threads_per_threadgroup": "now->threads",
    "threads_per_grid": "now->grid",
    "thread_index_in_threadgroup": "now->index",
    "thread_index_in_simdgroup": "now->index & 31u",
    "simdgroup_index_in_threadgroup": "now->index >> 5",
}

_DECLARATOR = r"\w+\s*(?:\[[^\];]*\]\s*)+"
_ARRAY = re.compile(
    r"(^|[;{}\n])(\s*)(?:alignas\(\w+\)\s+)?threadgroup\s+([\w:]+(?:<[^;>]*>)?)\s+"
    rf"({_DECLARATOR}(?:,\s*{_DECLARATOR})*);"
)
_ODD_ARRAY = re.compile(r"\bthreadgroup\s+[\w:<>, ]+\s\w+\s*[;\[=,]")


def missing() -> str | None:
    """Why the emulator cannot run here, or None."""
    system, machine = getattr(sys, "emulated_on", (sys.platform, platform.machine()))
    if system != "linux" or machine not in ("x86_64", "aarch64"):
        return "the emulator needs Linux on x86-64 or AArch64"
    if shutil.which(COMPILER) is None:
        return f"the emulator needs {COMPILER}"
    return None


class Emulator:
    """A back end for :func:`mlx_moeflux.kernels.runtime.launcher.set_backend`.

    Args:
        schedules: Order of threads and threadgroups, and a seed.
        partly_written: Outputs whose elements need not all be written.
        rewrite: Changes header and body before they are compiled, for mutations.
        inspect: Called with each new :class:`Variant` before it is compiled, and again where a
            launch has another number of threads.
        name: The back end that implementations shall think they run on.
        runs: False: nothing is compiled, and launches give zeros.
    """

    pads_inputs, follows_device, checks_first_use = True, False, False
    FIRST = SCHEDULES[:1]

    def __init__(
        self,
        *,
        schedules: Sequence[tuple[str, int]] = SCHEDULES,
        partly_written: Collection[str] = (),
        rewrite: Callable[[MetalKernel, str, str], tuple[str, str]] | None = None,
        inspect: Callable[[Variant], None] | None = None,
        name: str = "metal",
        runs: bool = True,
    ):
        self.inspect, self.runs = inspect, runs
        self.name, self.schedules, self.rewrite = name, tuple(schedules), rewrite
        self.partly_written = frozenset(partly_written)

    def build(self, kernel: MetalKernel) -> Launcher:
        header, body = kernel.metal_text()
        if self.rewrite is not None:
            header, body = self.rewrite(kernel, header, body)
        call = mx.fast.metal_kernel(
            name=f"moeflux_{kernel.name}",
            input_names=list(kernel.inputs),
            output_names=list(kernel.outputs),
            source=body,
            header=header,
        )
        return functools.partial(self._launch, kernel, call, header, {})

    def _launch(
        self, kernel, call, header, variants, *,
        inputs, template, grid, threadgroup, output_shapes, output_dtypes,
    ):  # fmt: skip
        template = list(template or ())
        key = (tuple(template), *((a.ndim == 0, a.size < 8, a.dtype) for a in inputs),
               tuple(output_dtypes))  # fmt: skip
        if key not in variants:
            text = generated_text(
                call, header, inputs, template=template, grid=grid, threadgroup=threadgroup,
                output_shapes=output_shapes, output_dtypes=output_dtypes,
            )  # fmt: skip
            dtypes = tuple(a.dtype for a in inputs), tuple(output_dtypes)
            variants[key] = _Known(
                Variant(kernel, header, text.removeprefix(header), tuple(template), *dtypes, 0)
            )
        known, threads = variants[key], math.prod(threadgroup)
        if self.inspect is not None and threads not in known.threads:
            self.inspect(replace(known.variant, threads=threads))
        known.threads.add(threads)
        if not self.runs:
            return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]
        program, arrays = known.program, _bound(kernel, inputs)
        shapes = [a.shape for a in inputs]
        first = None
        for order, seed in self.schedules:
            outputs = [_poisoned(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]
            program.run(
                arrays, outputs, shapes, grid=grid, threadgroup=threadgroup, order=order, seed=seed,
                partly_written=self.partly_written,
            )  # fmt: skip
            if first is None:
                first = outputs
            for name, a, b in zip(kernel.outputs, first, outputs, strict=True):
                if a.tobytes() != b.tobytes():
                    raise EmulatorError(
                        f"kernel '{kernel.name}': '{name}' depends on the order of threads "
                        f"({self.schedules[0][0]} against {order} {seed})"
                    )
        return [_to_mlx(a, d) for a, d in zip(first, output_dtypes, strict=True)]


@dataclass
class _Known:
    """A variant, and the numbers of threads that it was launched with."""

    variant: Variant
    threads: set[int] = field(default_factory=set)

    @functools.cached_property
    def program(self) -> Program:
        return Program.of(self.variant)


def _bound(kernel: MetalKernel, inputs: Sequence[mx.array]) -> list[np.ndarray]:
    """What a launch may read: of a short view the whole array.

    Raises:
        EmulatorError: A view does not begin where its array does.
    """
    owners = owners_of(inputs)
    for owner, array in zip(owners, inputs, strict=True):
        if owner is array:
            continue
        begin = [device.address_of(device.bytes_of(each)) for each in (owner, array)]
        if begin[0] != begin[1]:
            raise EmulatorError(
                f"kernel '{kernel.name}': a short view does not begin where its array does"
            )
    return [_to_numpy(owner) for owner in owners]


class Program:
    """One compiled variant of a kernel."""

    def __init__(
        self, kernel: MetalKernel, library: Path, text: str, arguments: Sequence[Argument]
    ):
        self.kernel = kernel
        self.buffers = [a for a in arguments if a.buffer]
        self._library, self._text = library, text
        self._launch = _emu_launch()
        self._loaded = ctypes.CDLL(str(library))
        self._program = ctypes.byref(ctypes.c_char.in_dll(self._loaded, "emu_this"))

    @classmethod
    def of(cls, variant: Variant) -> Program:
        text = to_cpp(variant)
        library = compiled(text, variant.kernel.name)
        return cls(variant.kernel, library, text, variant.arguments)

    def run(self, inputs, outputs, shapes, *, grid, threadgroup, order, seed, partly_written):
        """Fill `outputs`. shapes: What the kernel is told of its inputs.

        Raises:
            EmulatorError: The kernel broke a rule, or left an element unwritten.
        """
        arrays = dict(zip(self.kernel.inputs, inputs, strict=True))
        arrays |= dict(zip(self.kernel.outputs, outputs, strict=True))
        for shape, name in zip(shapes, self.kernel.inputs, strict=True):
            arrays[f"{name}_shape"] = np.array(shape, dtype=np.int32)
        buffers, kept = (_Buffer * len(self.buffers))(), []
        for entry, argument in zip(buffers, self.buffers, strict=True):
            array = arrays[argument.name]
            kept.append(array)
            entry.name, entry.data = argument.name.encode(), array.ctypes.data
            entry.bytes, entry.item, entry.output = array.nbytes, array.itemsize, argument.output
        message = ctypes.create_string_buffer(1000)
        three = ctypes.c_uint * 3
        status = self._launch(
            self._program, buffers, len(buffers), three(*grid), three(*threadgroup),
            ORDER[order], seed, message, len(message),
        )  # fmt: skip
        name = f"kernel '{self.kernel.name}'"
        if status:
            words, _, address = message.value.decode().partition("@")
            raise EmulatorError(f"{name}: {words}, schedule {order} {seed}{self._lines(address)}")
        for entry, argument in zip(buffers, self.buffers, strict=True):
            if argument.output and entry.unwritten >= 0 and argument.name not in partly_written:
                at = np.unravel_index(entry.unwritten, arrays[argument.name].shape)
                raise EmulatorError(
                    f"{name}: '{argument.name}'{[int(i) for i in at]} is never written"
                )

    def _lines(self, address: str) -> str:
        """The lines of the kernel that an address belongs to, innermost first."""
        if not address or shutil.which("addr2line") is None:
            return ""
        # A return address: the call is before it.
        command = ["addr2line", "-i", "-e", str(self._library), hex(int(address, 16) - 1)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = self._text.partition(f'"{self.kernel.file}"\n')[2].splitlines()
        found = re.findall(rf"{re.escape(self.kernel.file)}:(\d+)", done.stdout)
        return "".join(f"\n    {lines[int(n) - 1]}" for n in found if int(n) <= len(lines))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("item", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("unwritten", ctypes.c_int64),
    )


@functools.cache
def merged_overloads(header: str) -> str:
    """`header` without definitions that differ from another in nothing but address spaces, and
    without those that the emulator has itself."""
    kept = {}
    for chunk in source.split(header):
        if source.definition(chunk).name not in OWN:
            kept.setdefault(source.without_address_spaces(chunk), chunk)
    return "".join(f"{chunk}\n" for chunk in kept.values())


def to_cpp(variant: Variant) -> str:
    """A C++ file that defines ``emu_kernel``; language.h goes before it."""
    values = variant.template_values()
    kinds = ("bool" if isinstance(v, bool) else "int" if isinstance(v, int) else "typename"
             for _, v in variant.template)  # fmt: skip
    named = ", ".join(f"{k} {n}" for k, n in zip(kinds, values, strict=True))
    body = _ARRAY.sub(_arrays, variant.body)
    if odd := _ODD_ARRAY.search(body):
        raise EmulatorError(
            f"kernel '{variant.kernel.name}': write '{odd[0]}' as 'threadgroup TYPE name[SIZE];'"
        )
    passed, buffer = [], 0
    for argument in variant.arguments:
        if argument.buffer:
            passed.append(f"({argument.type}*)buffers[{buffer}]")
            buffer += 1
        else:
            passed.append(ATTRIBUTES[argument.name])
    call = "kernel_function"
    if values:
        call += f"<{', '.join(values.values())}>"
    return (
        f'#line 1 "{variant.kernel.file}"\n'
        f"{merged_overloads(variant.header)}{f'template <{named}>' if named else ''}\n"
        f"__attribute__((noinline)) void kernel_function({variant.parameters}) {{\n{body}\n}}\n"
        'static __attribute__((no_sanitize("thread"))) '
        f"void emu_kernel(void** buffers, const emu_thread* now) {{\n"
        f"  {call}({', '.join(passed)});\n}}\n"
        'extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], _end[];\n'
        'extern "C" { emu_program emu_this = {emu_kernel, __ehdr_start, _end}; }\n'
    )


def _arrays(match: re.Match[str]) -> str:
    before, space, kind, names = match.groups()
    made = []
    for declarator in re.findall(_DECLARATOR, names):
        name, bracket, sizes = declarator.partition("[")
        name = name.strip()
        made.append(
            f"using emu_{name} = {kind}{bracket}{sizes}; emu_{name}& {name} = *(emu_{name}*)"
            f'emu_threadgroup_array("{name}", sizeof(emu_{name}), sizeof({kind}), '
            f"emu_is_real<{kind}>, __LINE__);"
        )
    return before + space + " ".join(made)


@functools.cache
def cache_directory() -> Path:
    root = os.environ.get("MOEFLUX_EMULATOR_CACHE")
    path = Path(root) if root else Path(tempfile.gettempdir()) / f"moeflux-emulator-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@functools.cache
def _fixed() -> str:
    """What every library depends on besides its kernel's text."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True)
    names = ("language.h", "runtime.h", "memory.h", "switch.h", "runtime.cpp")
    files = [(HERE / name).read_text() for name in names]
    return "\n".join([version.stdout, *FLAGS, *files])


def _cached(name: str, text: str, make: Callable[[Path], None]) -> Path:
    """A file of the cache that depends on `text`: `make` writes it, unless it is there."""
    digest = hashlib.blake2b((_fixed() + text).encode(), digest_size=10).hexdigest()
    stem, ending = name.split(".", 1)
    path = cache_directory() / f"{stem}-{digest}.{ending}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache_directory()) as directory:
            new = Path(directory) / name
            make(new)
            new.replace(path)
    return path


def compiled(cpp: str, name: str) -> Path:
    """The shared library of a C++ file, from the cache if it is there.

    Raises:
        EmulatorError: It does not compile.
    """

    def make(library: Path) -> None:
        file = library.with_suffix(".cpp")
        file.write_text(cpp)
        # It finds what it calls in the runtime's library; linking without others is quick.
        options = ["-include", str(_language()), "-shared", "-nostdlib", "-o", str(library)]
        _compile([*FLAGS, *options, str(file)], name)

    return _cached(f"{name}.so", cpp, make)


@functools.cache
def _language() -> Path:
    """A header that includes language.h. Beside it lies what GCC reads in its place: the same
    precompiled, under its name and .gch."""
    text = f'#include "{HERE}/language.h"\n'
    header = _cached("language.h", text, lambda new: new.write_text(text))
    options = [*FLAGS, "-x", "c++-header", str(header)]
    _cached("language.h.gch", text, lambda new: _compile([*options, "-o", str(new)], "language"))
    return header


@functools.cache
def _emu_launch() -> Callable[..., int]:
    """``emu_launch`` of the runtime, in whose library kernels find what they call."""
    options = ["-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Werror"]
    options.append(str(HERE / "runtime.cpp"))
    made = _cached("runtime.so", "", lambda new: _compile([*options, "-o", str(new)], "runtime"))
    return ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL).emu_launch


def _compile(arguments: list[str], name: str) -> None:
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"'{name}' does not compile:\n{done.stderr[:4000]}")


def owners_of(arrays: Iterable[mx.array]) -> list[mx.array]:
    """The arrays whose short views these are, or the arrays themselves."""
    owners = {id(one.view): one.owner for one in views.SHORTS.values()}
    found = ((array, owners.get(id(array))) for array in arrays)
    return [array if owner is None else owner() for array, owner in found]


def _to_numpy(array: mx.array) -> np.ndarray:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array, order="C")


def _to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    made = mx.array(array)
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


def _poisoned(shape: Sequence[int], dtype: mx.Dtype) -> np.ndarray:
    """NaN in floats, 0xCD in other bytes."""
    empty = _to_numpy(mx.zeros(tuple(shape), dtype))
    fill = 0xFF if mx.issubdtype(dtype, mx.floating) else 0xCD
    empty.view(np.uint8).reshape(-1)[:] = fill if empty.size else 0
    return empty
