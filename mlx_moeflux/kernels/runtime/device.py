"""What the rest of the package knows of the back end: the one way there.

Models, caches, stores and generation ask here, and import nothing of ``kernels.cpu`` and
``kernels.runtime.cuda``. Every answer is about MLX's default device at the moment of the call. Any
thread may call any function.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import mlx.core as mx

from mlx_moeflux.backend import clear_at_thread_end
from mlx_moeflux.kernels.cpu.blas import KEPT_BYTES, kept, reshape, rows_of
from mlx_moeflux.kernels.runtime.cuda import handshake as cuda_handshake
from mlx_moeflux.kernels.runtime.cuda.upload import (
    Uploads,
    address_of,
    bytes_of,
    keep_on_gpu,
    upload_bytes,
    uploads_for,
)
from mlx_moeflux.kernels.runtime.launcher import backend, cuda_files
from mlx_moeflux.kernels.runtime.metal import handshake as metal_handshake
from mlx_moeflux.kernels.runtime.packing import largest_buffer

__all__ = [
    "Pull",
    "Uploads",
    "address_of",
    "backend",
    "bytes_of",
    "forget",
    "gathered",
    "keep_on_gpu",
    "kept_bytes",
    "kind",
    "largest_buffer",
    "open_files",
    "pull_for",
    "reshape",
    "rounds_to_tf32",
    "rows_of",
    "settle",
    "takes_views",
    "upload_bytes",
    "uploads_for",
]


class Pull(Protocol):
    """Launches the kernel that waits for the experts of a token in one layer.

    k: Experts of a token. copies: Whether it copies blocks from staging into slots; else the host
    writes slots, and answers when the blocks are there.
    """

    k: int
    copies: bool

    def locked(self, nbytes: int) -> memoryview:
        """Allocate memory that the host and the kernel share."""
        ...

    def control(self, common: int, box: int, limit: int) -> Any:
        """Return what :meth:`slots` needs for a layer. common, box: Addresses, in memory of
        :meth:`locked`, of the words of all layers and of this one. limit: Nanoseconds of the
        longest wait."""
        ...

    def slots(self, ids: mx.array, control: Any) -> mx.array:
        """Return the slots ``[1, K]`` uint32 of the experts `ids`, which hold their blocks once it
        is evaluated."""
        ...

    def finish(self) -> None:
        """Wait until no kernel runs."""
        ...


def pull_for(k: int) -> Pull | None:
    """Return the kernel that waits for `k` experts; None where there is none."""
    room = {"cuda": cuda_handshake, "metal": metal_handshake}.get(kind())
    return None if room is None else room.pull_for(k)


def kind() -> Literal["cpu", "metal", "cuda"]:
    """Return the kind of MLX's default device."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def rounds_to_tf32() -> bool:
    """Return True if stock MLX rounds the operands of float32 products to TF32 here, 11 bits.

    NVIDIA's GPUs do, and Apple's from M5 on with macOS 26.2, unless ``MLX_ENABLE_TF32=0``. The
    first call on a device computes a small product and evaluates it.
    """
    return _rounds_to_tf32(kind())


@functools.cache
def _rounds_to_tf32(kind: str) -> bool:
    # The shortest float32 above 1 that TF32 rounds to 1.
    number = 1 + 2.0**-12
    product = mx.matmul(mx.full((64, 64), number), mx.eye(64))
    return product[0, 0].item() != number


def takes_views() -> bool:
    """Return True if launches take short views of large arrays, see
    :mod:`~mlx_moeflux.kernels.runtime.views`."""
    return backend().pads_inputs


def open_files() -> None:
    """Open the files that hold compiled kernels, if kernels would run on NVIDIA's GPU now.

    The first call must come before MLX itself compiles something: it then looks there for modules.
    """
    cuda_files()


def gathered() -> AbstractContextManager[None]:
    """While a graph is built: its kernels are compiled side by side, and are there at the end."""
    clear_at_thread_end()
    files = cuda_files()
    return nullcontext() if files is None else files.gathered()


def settle() -> None:
    """Before something is evaluated while kernels are gathered: wait for them."""
    if (files := cuda_files()) is not None:
        files.settle()


def kept_bytes() -> int:
    """Return the bytes that copies of weights may take besides the weights."""
    return KEPT_BYTES if kind() == "cpu" else 0


def forget(array: mx.array) -> None:
    """Free the copies that are kept of `array`, a weight that is not computed with any more."""
    kept.forget(id(array))
