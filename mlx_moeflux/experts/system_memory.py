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
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# The level of macOS: 1 is normal, 2 a warning, 4 critical.
MACOS_LEVEL = "kern.memorystatus_vm_pressure_level"
MACOS_WARNING = 2
# The level turns to a warning when the compressor holds more than half of what is not wired, so
# growth between two looks counts too, in bytes a second. A Mac with room swaps out little at a
# time: pages that no program touched for days.
MACOS_SWAPPED = {"Swapouts": 4 << 20}
# 16 MB a second are an eighth of a Mac of 8 GB in a minute; pages compress to about a third.
MACOS_COMPRESSED = {"Pages occupied by compressor": 16 << 20, "Compressions": 48 << 20}
# macOS compresses pages of idle programs also to keep more files. That is no shortage where more
# than this share of all pages can be had, or where so much more can be had each second.
MACOS_SHARE, MACOS_RISE = 1 / 2, 16 << 20
MACOS_PAGES = ("free", "active", "inactive", "speculative", "wired down", "occupied by compressor")
# Looks that are closer than this, in seconds, count as so far apart.
MACOS_LOOK = 0.5

# Running programs map some pages of files as code. No counter has them, and macOS would only read
# them again, so the lesser of a share of what can be had and an amount is left out, at most all
# pages of files.
TEXT_SHARE, TEXT_BYTES = 0.08, 1_000_000_000
TEXT = "assumed to be code of running programs"

# The first words of a part of the available memory that no counter gave.
ASSUMED = "assumed, because "


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
    A container's limit counts too. A negative part is left out of the others. Where the system
    tells nothing, all memory of the machine counts, as a part whose name begins with
    :data:`ASSUMED`."""
    if sys.platform == "darwin":
        return _vm_stat()
    found = re.findall(r"MemAvailable:\s+(\d+)", _text(MEMINFO))
    nbytes = 1024 * int(found[0]) if found else _machine_bytes()
    parts = {} if found else {f"{ASSUMED}{MEMINFO} has no MemAvailable": nbytes}
    return min([nbytes, *(left for _, left in _limits())]), parts


def least_available() -> int:
    """Return the available bytes below which memory is scarce even if nothing waits for it. macOS
    compresses pages first, so there it is 0."""
    return 0 if sys.platform == "darwin" else int(LEAST_SHARE * whole_memory())


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
        enough = AVAILABLE_SHARE * whole_memory() if waits else least_available()
        return available_memory()[0] < enough

    def _waited(self) -> tuple[float, list[int]]:
        """Return the time, and the microseconds that tasks have waited by each file."""
        found = (re.search(r"^some .*\btotal=(\d+)", _text(file), re.M) for file in self._files)
        return self._clock(), [int(match[1]) if match else 0 for match in found]


class MacPressure:
    """The level of macOS, and what it compressed and swapped between two looks. A large compressor
    that does not grow is no shortage."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._last = clock(), _counters()

    def scarce(self) -> bool:
        """See :class:`MemoryPressure`."""
        (then, before), (now, found) = self._last, (self._clock(), _counters())
        self._last = now, found
        if (sysctl(MACOS_LEVEL) or 0) >= MACOS_WARNING:
            return True
        seconds = max(now - then, MACOS_LOOK)

        def grew(limits: dict[str, int]) -> bool:
            known = limits.keys() & before.keys() & found.keys()
            return any(found[n] - before[n] >= limits[n] * seconds for n in known)

        left, last = sum(_parts(found).values()), sum(_parts(before).values())
        pages = sum(found.get(f"Pages {name}", 0) for name in MACOS_PAGES)
        little = left < MACOS_SHARE * pages and left - last < MACOS_RISE * seconds
        return grew(MACOS_SWAPPED) or (little and grew(MACOS_COMPRESSED))


def open_pressure() -> MemoryPressure | None:
    """Return what tells of this system's memory pressure; None: nothing does."""
    if sys.platform == "darwin":
        known = sysctl(MACOS_LEVEL) is not None or _tell(_counters())
        return MacPressure() if known else None
    of_group = (folder / "memory.pressure" for folder in _folders(VERSIONS[0]))
    own = next((file for file in of_group if _text(file)), None)
    files = [file for file in (PRESSURE, own) if file is not None and _text(file)]
    return LinuxPressure(files) if files else None


def pressure_gap() -> str | None:
    """Return in a line what macOS does not tell of its memory, and what follows; None: it tells
    all."""
    if sys.platform != "darwin":
        return None
    level, counters = sysctl(MACOS_LEVEL) is not None, _counters()
    if not (level or _tell(counters)):
        return f"neither vm_stat nor sysctl {MACOS_LEVEL} answers: experts keep their memory"
    if not level:
        return f"sysctl {MACOS_LEVEL} does not answer: vm_stat alone says when memory is scarce"
    if _tell(counters):
        return None
    all_counts = "" if _parts(counters) else ", and all memory counts as available"
    return (
        f"vm_stat gives too few counters: sysctl {MACOS_LEVEL} alone says when memory is "
        f"scarce{all_counts}"
    )


def sysctl(name: str) -> int | None:
    """Return a number of 32 bits that macOS keeps under this name; None: there is none."""
    value = ctypes.c_int32()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    call = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if call is None:
        return None
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
    """See :func:`available_memory`. The counters of ``vm_stat`` that count: free pages, purgeable
    ones, and those of files. Some of the latter are assumed to be code of running programs and left
    out (:data:`TEXT_BYTES`, :data:`TEXT_SHARE`)."""
    parts = _parts(_counters())
    if not parts:
        parts = {f"{ASSUMED}vm_stat gives no counters": _machine_bytes()}
    return min(sum(parts.values()), _machine_bytes()), parts


def _parts(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the parts of what can be had; empty if the counters do not tell.

    xnu: "File-backed pages" are active, inactive and speculative ones; "Pages free" excludes the
    speculative ones; purgeable pages are anonymous. A macOS without one of the three counters says
    less: there the inactive pages of files and of programs count, and no active ones.
    """
    free, inactive = counters.get("Pages free"), counters.get("Pages inactive")
    purgeable, files = counters.get("Pages purgeable"), counters.get("File-backed pages")
    if free is None:
        return {}
    if files is not None and purgeable is not None:
        text = min(TEXT_BYTES, int(TEXT_SHARE * (free + purgeable + files)), files)
        return {"free": free, "purgeable": purgeable, "of files": files, TEXT: -text}
    if inactive is None:
        return {}
    lacking = "File-backed pages" if files is None else "Pages purgeable"
    parts = {
        "free": free + counters.get("Pages speculative", 0),
        f'{ASSUMED}vm_stat has no "{lacking}", of inactive pages': inactive,
    }
    return parts if purgeable is None else {**parts, "purgeable": purgeable}


def _tell(counters: Mapping[str, int]) -> bool:
    """Return True if the counters say what can be had, and what is compressed or swapped."""
    growing = {*MACOS_SWAPPED, *MACOS_COMPRESSED}
    return bool(_parts(counters)) and not growing.isdisjoint(counters)


class _Silent:
    """The time until which ``vm_stat``, which did not answer, is not asked."""

    until = 0.0


def _counters() -> dict[str, int]:
    """Return the counters of ``vm_stat`` times the bytes of a page; empty if it gives none. If it
    did not answer, it is not asked again for a minute."""
    if time.monotonic() < _Silent.until:
        return {}
    try:
        # Without the sweep of file descriptors CPython spawns on macOS, and does not fork this
        # process with all that it has mapped.
        done = subprocess.run(
            ["/usr/bin/vm_stat"], capture_output=True, timeout=2, check=True, close_fds=False
        )
    except subprocess.TimeoutExpired:
        _Silent.until = time.monotonic() + 60
        return {}
    except (OSError, subprocess.SubprocessError):
        return {}
    text = done.stdout.decode("ascii", "replace")
    size = re.search(r"page size of ([1-9]\d*) bytes", text)
    if size is None:
        return {}
    found = re.findall(r'^"?([A-Z][A-Za-z -]*)"?: +(\d+)\.', text, re.M)
    return {name: int(size[1]) * int(count) for name, count in found}


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
