"""A whole Mac in place of this machine: its Python, its GPU, its counters and its limits."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.cli import check
from mlx_moeflux.experts.io import file_readers
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.verify import timing, tune
from mlx_moeflux.measure import compare_quality, handshake, machine_report
from mlx_moeflux.measure.benchmark import card
from tests.kernels.metal.macos import macos_python
from tests.kernels.metal.metal_device import MetalDevice, on_metal

ROOT = Path(__file__).parents[3]
MACOS = str(ROOT / "tests" / "kernels" / "metal" / "macos")
OPEN_FILES = 256


@dataclass
class Mac:
    """device: Its GPU. uncached: Files whose page cache was switched off."""

    device: MetalDevice
    uncached: list[str]


@contextlib.contextmanager
def on_a_mac(
    home: Path, *, memory: int = macos_python.MEMORY, buffer: int | None = None
) -> Iterator[Mac]:
    """Run on an M1 with `memory` bytes. home: An empty folder for caches. buffer: Bytes of the
    largest buffer; None: half of the memory. MLX itself is not told.

    Decisions of modules at import are Linux's, unless this process began as macOS's, see
    :mod:`tests.kernels.metal.macos.macos_python`.
    """
    with on_metal(home) as device, pytest.MonkeyPatch.context() as patch:
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
        for name, count in (("ROUNDS", 1), ("FEW", 1), ("MANY", 2)):  # the emulator is slow
            patch.setattr(timing, name, count)
        macos_python.substitute(
            lambda *given: patch.setattr(*given, raising=False),
            lambda *given: patch.delattr(*given),
        )
        patch.setattr(file_readers.DirectReader, "_flags", file_readers.FileReader._flags)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, before[1]))
        try:
            yield Mac(device, macos_python.uncached)
        finally:
            # mlx-lm lowers the hard limit.
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], hard), hard))


def environment() -> dict[str, str]:
    """The environment of a process that begins as macOS's, and of its children."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = dict.fromkeys([MACOS, str(ROOT), *filter(None, path)])
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


def main(home: str, *arguments: str) -> int:
    """Run a command on a Mac: ``python -m tests.kernels.metal.mac HOME COMMAND ...``; or ``HOME -m
    MODULE ...``, a child of one. Steps are not compiled, because the emulator cannot launch what is
    traced."""
    from tests.kernels.harness import on_the_cpu

    os.environ |= environment()
    mx.disable_compile()
    place = Path(home)
    place.mkdir(parents=True, exist_ok=True)
    with on_the_cpu(), on_a_mac(place) as mac, children_on_a_mac(home), small_measurements(place):
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            return 0
        from mlx_moeflux.cli import main as command

        status = command(arguments)
    sys.stderr.write(
        f"kernels launched: {len(mac.device.launched)}\n"
        f"launches: {mac.device.launches}\n"
        f"files past the page cache: {len(mac.uncached)}\n"
    )
    return status


@contextlib.contextmanager
def small_measurements(home: Path) -> Iterator[None]:
    """Make short what commands do without an option for it, because the emulator is slow. home: For
    a file."""
    steps, in_processes = machine_report.steps, check._in_processes
    prompts = home / "prompts.json"
    prompt = {"prefix": "{", "ask": "Reply with {}."}
    prompts.write_text(json.dumps({"texts": ["def add(a, b):"], "json": [prompt]}))

    def unhurried(*given, **options):
        return [replace(step, seconds=3000) for step in steps(*given, **options)]

    def of_float32(commands, *others):
        return in_processes([command for command in commands if "float32" in command], *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_report, "steps", unhurried)
        # mlx-lm computes on MLX's own Metal, which is not emulated: it is not installed.
        patch.setattr(machine_report, "util", types.SimpleNamespace(find_spec=lambda name: None))
        patch.setattr(compare_quality, "PROMPTS", prompts)
        patch.setattr(machine_report, "ON_GPU", ("qwen3.5-tiny", 2, 4))
        patch.setattr(machine_report, "PROMPT", 4)
        patch.setattr(machine_report, "TRIALS", ("-g", "2", "--num-trials", "1"))
        # Of report's steps `check` and `tune`; all types and sizes are tested elsewhere. Stock
        # operations are the CPU's, whose gather_mm is of float32 alone.
        patch.setattr(check, "_in_processes", of_float32)
        patch.setattr(tune, "TOKENS", {"gpu": (1,)})
        patch.setattr(tune, "LARGE", examples.TINY)
        patch.setattr(
            handshake, "compare", functools.partial(handshake.compare, tokens=2, rounds=1)
        )
        patch.setattr(card, "MEMORY_BYTES", {"cpu": 4 << 20, "gpu": 4 << 20})
        yield


@contextlib.contextmanager
def children_on_a_mac(home: str) -> Iterator[None]:
    """Start modules of the package that run MLX in processes that have the emulated GPU, too."""
    start = subprocess.Popen.__init__

    def started(self, args, *others, **kwargs):
        if args[0] == sys.executable and "-m" in args:
            at = args.index("-m")
            if args[at + 1].startswith("mlx_moeflux") and "sandbox" not in args[at + 1]:
                args = [*args[:at], "-m", __spec__.name, home, *args[at:]]
        start(self, args, *others, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", started)
        yield


if __name__ == "__main__":
    if sys.platform != "darwin":
        # Once more, so that this process is macOS's from its first import on.
        command = [sys.executable, "-m", "tests.kernels.metal.mac", *sys.argv[1:]]
        os.execve(sys.executable, command, environment())
    sys.exit(main(*sys.argv[1:]))
