"""Kernels on NVIDIA, between MLX and the disk: their text and their machine code in files.

Two costs are saved. MLX hashes the text of a custom kernel at every launch, 1.3 us for one of
10 KB: so the definitions and the body lie in files that are named after their content, and MLX's
compiler includes them. And MLX compiles every custom kernel anew in every process, 0.3 to 1.5 s
each, but looks first for a module of the same name among those that it keeps: so the machine code
is put there, compiled once, with a lighter header and several at a time. Each process has links to
it in a folder of its own, where MLX looks.

Whether MLX takes what is put there is tried once in a process, with a kernel that tells. Where it
does not, or something cannot be read, written or compiled, MLX compiles as it always does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moeflux import user_cache
from mlx_moeflux.backend import usable_cores
from mlx_moeflux.kernels.runtime import source
from mlx_moeflux.kernels.runtime.cuda import module as cuda_module
from mlx_moeflux.kernels.runtime.cuda import nvrtc
from mlx_moeflux.kernels.runtime.cuda.module import Kernel
from mlx_moeflux.kernels.runtime.cuda.process_folder import ProcessFolder

FOLDER = "cuda"
# Where MLX keeps modules; it reads this when it compiles or loads the first.
MLX_FOLDER = "MLX_PTX_CACHE_DIR"
MOST_THREADS = 8

Launcher = Callable[..., list[mx.array]]
Memory = Callable[[Mapping[str, Any]], int]
_DTYPE = operator.attrgetter("dtype")

# What a path must be made of to stand in an #include.
_PLAIN = re.compile(r"[\w./+@~ -]+", re.ASCII)


@dataclass
class Count:
    """Variants (a kernel, template and dtypes) that this process has launched.

    cached, compiled: Taken from files, and compiled into them; the rest MLX compiled for itself.
    seconds: Compiling, summed over threads.
    """

    variants: int = 0
    cached: int = 0
    compiled: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        left = self.variants - self.cached - self.compiled
        counts = f"{self.variants} variants, {self.cached} from files, {self.compiled} new "
        return counts + f"in {self.seconds:.1f} s" + (f", {left} by MLX" if left else "")


class Cache:
    """Files of one version of MLX, compiler and GPU.

    folder: For texts; None: they stay inline. modules: Where MLX finds modules; None: nowhere.
    """

    def __init__(
        self,
        folder: Path | None,
        modules: ProcessFolder | None,
        compiler: nvrtc.Compiler | None = None,
    ):
        self.folder, self.modules, self.compiler = folder, modules, compiler
        self.count = Count()
        self._lock = threading.Lock()
        self._pending: list[Future] = []
        self._gathering = 0

    def launcher(self, kernel: Kernel, memory: Memory | None = None) -> Launcher:
        """Return a launcher like that of ``mx.fast.cuda_kernel``. memory: Template -> bytes of
        threadgroup memory of a launch."""
        variants: dict[tuple, Launcher] = {}

        def launch(*, inputs: Any, template: Any, output_dtypes: Any, **rest: Any):
            key = (*(template or ()), *map(_DTYPE, inputs), *output_dtypes)
            function = variants.get(key)
            if function is None:
                constants = dict(template or ())
                source.refuse_negative(kernel.name, constants)
                own = kernel.with_constants(constants)
                if memory is not None:
                    own = replace(own, memory=memory(constants))
                function = self._variant(own, [x.dtype for x in inputs], output_dtypes)
                variants[key] = function
            return function(inputs=inputs, output_dtypes=output_dtypes, **rest)

        return launch

    @property
    def where(self) -> str:
        """The folders in words."""
        if self.folder is None:
            return "no private folder for files"
        if self.modules is None:
            return f"{self.folder}, where MLX does not look for machine code"
        return str(self.modules.shared)

    def _variant(
        self, kernel: Kernel, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]
    ) -> Launcher:
        """A kernel as MLX launches it; MLX finds its machine code, while kernels are gathered
        soon."""
        with self._lock:
            self.count.variants += 1
            sent = self.outsourced(kernel)
            if self.modules is not None and self.compiler is not None and sent != kernel:
                module = cuda_module.module(sent, inputs, outputs)
                if self.modules.has(module.name) or self.modules.take(module.name):
                    self.count.cached += 1
                else:
                    job = _pool().submit(self._compile, self.compiler, self.modules, module)
                    self._pending.append(job)
            gathering = self._gathering
        if not gathering:
            self.settle()
        return sent.build()

    def outsourced(self, kernel: Kernel) -> Kernel:
        """The kernel with its text in files to include; as it is without a folder.

        MLX finds by their names which shapes a body reads: they are named in a comment.
        """
        if self.folder is None:
            return kernel
        user_cache.private(FOLDER, self.folder.name)  # somebody may have emptied the cache
        try:
            files = [stored(self.folder, text) for text in (kernel.header, kernel.body)]
        except OSError:
            return kernel
        shapes = [f"{name}_shape" for name in kernel.inputs if f"{name}_shape" in kernel.body]
        header, body = (f'#include "{file}"\n' for file in files)
        named = f"// {' '.join(shapes)}\n" if shapes else ""
        return replace(kernel, header=header, body=body + named)

    def _compile(
        self, compiler: nvrtc.Compiler, modules: ProcessFolder, module: cuda_module.Module
    ) -> None:
        start = time.perf_counter()
        try:
            store(modules, module, *compiler.compile(module.light_text, module.function))
        except (nvrtc.CompilerError, OSError):
            return  # MLX compiles it, or says why it cannot
        with self._lock:
            self.count.compiled += 1
            self.count.seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, launches do not wait for their compilation: several run at a time. What is
        evaluated inside MLX compiles too, unless :meth:`settle` comes first."""
        with self._lock:
            self._gathering += 1
        try:
            yield
        finally:
            with self._lock:
                self._gathering -= 1
            self.settle()

    def settle(self) -> None:
        """Wait for what is being compiled."""
        while self._pending:
            with self._lock:
                pending, self._pending = self._pending, []
            for future in pending:
                future.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    threads = min(MOST_THREADS, usable_cores())
    return ThreadPoolExecutor(threads, thread_name_prefix="moeflux-compile")


def stored(folder: Path, text: str) -> Path:
    """A file with this text, named after it.

    Raises:
        OSError: It cannot be written.
    """
    content = text.encode("ascii")
    file = folder / f"{hashlib.blake2b(content, digest_size=8).hexdigest()}.cuh"
    with contextlib.suppress(OSError):
        if file.read_bytes() == content:
            return file
    user_cache.write(file, content)
    return file


def store(modules: ProcessFolder, module: cuda_module.Module, code: bytes, function: str) -> None:
    """Put machine code where MLX of every process looks for it.

    Raises:
        OSError: It cannot be written.
    """
    modules.store(module.name, f"{module.function}\t{function}\n", code)


# ---- Finding out what works here


def open_cache() -> Cache:
    """The files of this machine's MLX, compiler and GPU; tries whether MLX reads modules.

    Evaluates: one small kernel.
    """
    architecture = str(mx.device_info(mx.gpu).get("architecture", ""))
    compiler = nvrtc.find(architecture) if architecture else None
    version = mx.__version__  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
    parts = [f"mlx-{version}", architecture or "gpu"]
    if compiler is not None:
        parts.append(f"nvrtc-{compiler.version}")
    folder = user_cache.private(FOLDER, "-".join([*parts, _RULES_DIGEST]))
    if folder is None or not _PLAIN.fullmatch(str(folder)):
        return Cache(None, None)
    if compiler is None:
        return Cache(folder, None)
    with _mlx_folder(folder) as modules:
        if modules is not None and not _is_read(modules, folder.name, compiler):
            modules.close()
            modules = None
    return Cache(folder, modules, compiler)


# What else decides about the machine code of a text.
_RULES = f"{cuda_module.HEADER}{nvrtc.OPTIONS}"
_RULES_DIGEST = hashlib.blake2b(_RULES.encode(), digest_size=16).hexdigest()[:6]


@contextlib.contextmanager
def _mlx_folder(ours: Path) -> Iterator[ProcessFolder | None]:
    """Yield the folder in which MLX looks for modules, or None if others can write to it.

    MLX's default is in the folder for temporary files. MLX gets a folder of this process, below
    `ours` or below the one that the user chose.
    """
    before = os.environ.get(MLX_FOLDER)
    try:
        shared = ours if before is None else Path(before).resolve(strict=True)
        modules = ProcessFolder(shared) if user_cache.is_private(shared) else None
    except OSError:
        modules = None
    if modules is None:
        yield None
        return
    os.environ[MLX_FOLDER] = str(modules.path)
    try:
        yield modules
    finally:
        if before is None:
            del os.environ[MLX_FOLDER]
        else:
            os.environ[MLX_FOLDER] = before


def _is_read(modules: ProcessFolder, key: str, compiler: nvrtc.Compiler) -> bool:
    """Return True if MLX takes a module from the folder, and passes shapes as the module expects.

    The text that MLX gets answers 0 everywhere; the module in the folder answers a size.
    """
    kernel = Kernel(
        "moeflux_probe",
        f"// {key}\n#define ANSWER(x) 0\n",
        "y[threadIdx.x] = ANSWER(x_shape[threadIdx.x]);\n",
        ("x",),
        ("y",),
    )
    try:
        module = cuda_module.module(kernel, [mx.float32], [mx.int32])
        if not modules.take(module.name):
            text = module.light_text.replace("ANSWER(x) 0", "ANSWER(x) (1000 + x)")
            store(modules, module, *compiler.compile(text, module.function))
        (answer,) = kernel.build()(
            inputs=[mx.zeros((2, 3, 5))],
            grid=(3, 1, 1),
            threadgroup=(3, 1, 1),
            output_shapes=[(3,)],
            output_dtypes=[mx.int32],
        )
        return answer.tolist() == [1002, 1003, 1005]
    except (nvrtc.CompilerError, OSError, AttributeError, RuntimeError):
        # No library with MLX's hash; or what MLX raises where a module cannot be loaded.
        return False
