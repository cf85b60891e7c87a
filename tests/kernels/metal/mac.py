"""A whole Mac in place of this machine: its GPU, its system calls and its limits."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux import backend
from mlx_moeflux.experts.io import file_readers
from mlx_moeflux.kernels.verify import tune
from mlx_moeflux.measure.benchmark import pages
from tests.kernels.metal.metal_device import MetalDevice, on_metal

NO_CACHE = 48  # fcntl.F_NOCACHE of macOS
OPEN_FILES = 256


@dataclass
class Mac:
    """device: Its GPU. uncached: File descriptors whose page cache was switched off."""

    device: MetalDevice
    uncached: list[int] = field(default_factory=list)


@contextlib.contextmanager
def on_a_mac(home: Path, *, memory: int = 8 << 30, buffer: int | None = None) -> Iterator[Mac]:
    """Run on an M1 with `memory` bytes. home: An empty folder for caches. buffer: Bytes of the
    largest buffer; None: half of the memory. MLX itself is not told."""
    with on_metal(home) as device, pytest.MonkeyPatch.context() as patch:
        mac = Mac(device)
        info = {
            "device_name": "Apple M1",
            "architecture": "applegpu_g13g",
            "memory_size": memory,
            "max_recommended_working_set_size": memory * 2 // 3,
            "max_buffer_length": buffer or memory // 2,
            "resource_limit": 499000,
        }
        patch.setattr(mx, "device_info", lambda device=None: info)
        patch.setattr(mx.metal, "is_available", lambda: True)
        # The emulator has computed before a measurement begins, which then repeats without end.
        patch.setattr(tune, "SECONDS", 0.0)
        _calls_of_macos(patch, mac)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, before[1]))
        try:
            yield mac
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _calls_of_macos(patch: pytest.MonkeyPatch, mac: Mac) -> None:
    system = types.SimpleNamespace(**vars(sys) | {"platform": "darwin"})
    for module in (backend, file_readers, pages):
        patch.setattr(module, "sys", system)
    for name in [name for name in dir(os) if name.startswith(("POSIX_FADV", "posix_fadv"))]:
        patch.delattr(os, name)
    patch.delattr(os, "O_DIRECT")
    patch.setattr(file_readers.DirectReader, "_flags", file_readers.FileReader._flags)
    patch.setattr(fcntl, "F_NOCACHE", NO_CACHE, raising=False)
    call = fcntl.fcntl

    def control(fd, command, *arguments):
        if command == NO_CACHE:
            return mac.uncached.append(fd)
        return call(fd, command, *arguments)

    patch.setattr(fcntl, "fcntl", control)
    read_text = Path.read_text

    def read(path, *args, **kwargs):
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return read_text(path, *args, **kwargs)

    patch.setattr(Path, "read_text", read)


def main() -> int:
    """Run a command on a Mac: ``python -m tests.kernels.metal.mac HOME COMMAND ...``. Steps are not
    compiled, because the emulator cannot launch what is traced."""
    from mlx_moeflux.cli import main as command
    from tests.kernels.harness import on_the_cpu

    mx.disable_compile()
    with on_the_cpu(), on_a_mac(Path(sys.argv[1])) as mac:
        status = command(sys.argv[2:])
    sys.stderr.write(
        f"kernels launched: {len(mac.device.launched)}\n"
        f"launches: {mac.device.launches}\n"
        f"files past the page cache: {len(mac.uncached)}\n"
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
