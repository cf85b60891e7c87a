"""What the operating system says about memory: how much is available, and whether it is scarce.

Linux: ``/proc/meminfo``, pressure stall information (Documentation/accounting/psi.rst), and control
groups of both versions. macOS: ``vm_stat`` and sysctl. No MLX.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

GROUPS = Path("/sys/fs/cgroup")
MEMINFO, PRESSURE = Path("/proc/meminfo"), Path("/proc/pressure/memory")

# Memory is scarce on Linux where tasks wait for it for this share of the time and less than that
# share of it is available: reading many files from disk makes tasks wait too.
WAITING_SHARE, AVAILABLE_SHARE = 0.1, 1 / 3
# Below this share it is scarce although nobody waits: without swap a machine kills a process before
# one has waited for long.
LEAST_SHARE = 1 / 20

# What kern.memorystatus_vm_pressure_level says from a warning on; 1 is normal, 4 critical.
MACOS_WARNING = 2


class Version(NamedTuple):
    """Files of a version of control groups. controller: Its name in ``/proc/self/cgroup``. cached:
    Names in memory.stat of pages of files, which the kernel gives up first."""

    controller: str
    mount: Path
    limit: str
    used: str
    cached: tuple[str, str]


VERSIONS = (
    Version("", GROUPS, "memory.max", "memory.current", ("inactive_file", "active_file")),
    Version(
        "memory",
        GROUPS / "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def available_memory() -> tuple[int, dict[str, int]]:
    """Return the bytes that can be had without swapping, and their parts if the system tells them.
    A container's limit counts too."""
    if sys.platform == "darwin":
        return _vm_stat()
    found = re.findall(r"MemAvailable:\s+(\d+)", _text(MEMINFO))
    if not found:
        return _machine_bytes(), {}
    return min([1024 * int(found[0]), *(left for _, left in _limits())]), {}


def about_available() -> int:
    """Return what :func:`available_memory` does, on macOS to a percent: quickly."""
    if sys.platform == "darwin" and (percent := sysctl("kern.memorystatus_level")) is not None:
        return percent * _machine_bytes() // 100
    return available_memory()[0]


def whole_memory() -> int:
    """Return the bytes of this machine, or the least limit of this process's control groups."""
    limits = [] if sys.platform == "darwin" else [limit for limit, _ in _limits()]
    return min([_machine_bytes(), *limits])


class MemoryPressure(Protocol):
    """Says whether the system lacks memory."""

    def scarce(self) -> bool:
        """Return True if it does, or did at some time since the last call."""
        ...


class LinuxPressure:
    """Pressure stall information: how long some task waited for memory; and how much there is.

    files: Of the machine, and of this process's control group.
    """

    def __init__(self, files: Sequence[Path], clock: Callable[[], float] = time.monotonic):
        self._files, self._clock = files, clock
        self._last = self._waited()

    def scarce(self) -> bool:
        """See :class:`MemoryPressure`."""
        (then, before), (now, waited) = self._last, self._waited()
        self._last = now, waited
        longest = 1e-6 * max(b - a for a, b in zip(before, waited, strict=True))
        waits = now > then and longest >= WAITING_SHARE * (now - then)
        return about_available() < (AVAILABLE_SHARE if waits else LEAST_SHARE) * whole_memory()

    def _waited(self) -> tuple[float, list[int]]:
        """Return the time, and the microseconds that tasks have waited by each file."""
        found = (re.search(r"^some .*\btotal=(\d+)", _text(file), re.M) for file in self._files)
        return self._clock(), [int(match[1]) if match else 0 for match in found]


class MacPressure:
    """The level of macOS."""

    def scarce(self) -> bool:
        """See :class:`MemoryPressure`."""
        return (sysctl("kern.memorystatus_vm_pressure_level") or 0) >= MACOS_WARNING


def open_pressure() -> MemoryPressure | None:
    """Return what tells of this system's memory pressure; None: nothing does."""
    if sys.platform == "darwin":
        known = sysctl("kern.memorystatus_vm_pressure_level") is not None
        return MacPressure() if known else None
    of_group = (folder / "memory.pressure" for folder in _folders(VERSIONS[0]))
    own = next((file for file in of_group if _text(file)), None)
    files = [file for file in (PRESSURE, own) if file is not None and _text(file)]
    return LinuxPressure(files) if files else None


def sysctl(name: str) -> int | None:
    """Return a number of 32 bits that macOS keeps under this name; None: there is none."""
    value = ctypes.c_int32()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    call = ctypes.CDLL(None).sysctlbyname
    failed = call(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return None if failed or size.value != ctypes.sizeof(value) else value.value


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that this process is in, and what it leaves."""
    for version in VERSIONS:
        for folder in _folders(version):
            try:
                limit, used = (int(_text(folder / n)) for n in (version.limit, version.used))
            except ValueError:  # absent, or "max"
                continue
            counts = dict(re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.M))
            yield limit, limit - used + sum(int(counts.get(name, 0)) for name in version.cached)


def _folders(version: Version) -> list[Path]:
    """Return the folders of this process's control group and of those around it. In a container
    that sees its own group alone, the path may be one of the machine: then the root counts."""
    pattern = rf"^\d+:{version.controller}:(/.*)$"
    own = re.search(pattern, _text(Path("/proc/self/cgroup")), re.M)
    path = PurePosixPath(own[1] if own else "/")
    return [version.mount / str(one).lstrip("/") for one in (path, *path.parents)]


def _text(file: Path) -> str:
    """Return what a file of the kernel says; "" if it is absent."""
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _vm_stat() -> tuple[int, dict[str, int]]:
    """See :func:`available_memory`; of the counters of ``vm_stat``. Its free pages exclude
    speculative ones, which hold files that are read ahead; inactive pages are reused first, and
    purgeable ones are given up when others need memory."""
    try:
        done = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return _machine_bytes(), {}
    text = done.stdout.decode("ascii", "replace")
    size = re.search(r"page size of (\d+) bytes", text)
    counts = {name: int(n) for name, n in re.findall(r"^Pages (\w+): +(\d+)\.", text, re.M)}
    if size is None or not {"free", "inactive"} <= counts.keys():
        return _machine_bytes(), {}
    pages = {
        "free": counts["free"] + counts.get("speculative", 0),
        "inactive": counts["inactive"],
        "purgeable": counts.get("purgeable", 0),
    }
    parts = {name: count * int(size[1]) for name, count in pages.items()}
    return min(sum(parts.values()), _machine_bytes()), parts


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
