"""NVIDIA's run-time compiler, through the library that MLX itself has loaded.

Options and headers are those that MLX compiles custom kernels with (``jit_module.cpp``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx

# The sonames that MLX's back ends link, and where their pip packages keep CUDA's headers.
LIBRARIES = {"libnvrtc.so.12": "cuda_runtime", "libnvrtc.so.13": "cu13"}
OPTIONS = ("--device-as-default-execution-space",)


class CompilerError(Exception):
    """NVRTC refused something; the message is its own."""


class Compiler:
    """NVRTC of a version, for one architecture such as ``sm_90a``; used from any thread.

    library: A loaded libnvrtc. headers: Folders that it looks for headers in.
    """

    def __init__(self, library: ctypes.CDLL, headers: Sequence[Path], architecture: str):
        self._library = library
        include = [f"--include-path={folder}" for folder in headers]
        options = (*OPTIONS, f"--gpu-architecture={architecture}", *include)
        self._options = [option.encode() for option in options]
        self.architecture = architecture
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, text: str, function: str) -> tuple[bytes, str]:
        """Machine code, and what the kernel `function` (its qualified name) is called in it.

        Raises:
            CompilerError: With the compiler's words.
        """
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
        )
        try:
            name = function.encode()
            self._call("nvrtcAddNameExpression", program, name)
            options = (ctypes.c_char_p * len(self._options))(*self._options)
            try:
                self._call("nvrtcCompileProgram", program, len(self._options), options)
            except CompilerError as error:
                words = self._bytes("nvrtcGetProgramLog", program).rstrip(b"\0").decode()
                raise CompilerError(f"{error}: {words}") from None
            lowered = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", program, name, ctypes.byref(lowered))
            return self._bytes("nvrtcGetCUBIN", program), (lowered.value or b"").decode()
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(what, program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            words = self._library.nvrtcGetErrorString
            words.restype = ctypes.c_char_p
            raise CompilerError(f"{name} failed: {words(code).decode()}")


def find(architecture: str) -> Compiler | None:
    """The compiler that MLX would use for ``sm_90`` and its like; None if it is not to be found."""
    for name, package in LIBRARIES.items():
        try:
            # Only what is loaded already: another version may not fit MLX's headers.
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        headers = [folder for folder in _headers(package) if folder.is_dir()]
        try:
            return Compiler(library, headers, _own_target(architecture))
        except (CompilerError, AttributeError):
            return None
    return None


def _own_target(architecture: str) -> str:
    """From Hopper on MLX compiles for exactly this architecture: ``sm_90`` -> ``sm_90a``."""
    digits = architecture.removeprefix("sm_")
    return f"{architecture}a" if digits.isdecimal() and int(digits) >= 90 else architecture


def _headers(package: str) -> Iterator[Path]:
    """MLX's own headers, CUDA's C++ library, CUDA's headers, in MLX's order."""
    own = Path(mx.__file__).parent
    yield own / "include"
    yield own / "include" / "cccl"
    installed = own.parent / "nvidia" / package / "include"
    if installed.is_dir():
        yield installed
    else:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        yield Path(home) / "include"
