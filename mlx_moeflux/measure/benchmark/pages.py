"""The page cache between the disk and a measurement: emptied, looked at, and accounted for.

A file that was read once is read from memory the next time; without these acts nothing that
streams is measured. Eviction needs ``posix_fadvise`` and looking needs ``mincore`` (Linux);
elsewhere the answers are None, and a measurement says that it is unverified. macOS can read and
write a file so that no pages stay in memory, see
:func:`~mlx_moeflux.checkpoint.files.pass_page_cache`.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_moeflux.experts.telemetry.stats import ExpertStats

COLD_SHARE = 0.02
"""Pages that may stay when the page cache was emptied."""


class ColdReads(NamedTuple):
    """A way to read the disk and not the page cache. title: A few words for it. note: A sentence
    for reports if this does not empty the page cache."""

    title: str
    note: str = ""


def cold_reads() -> ColdReads:
    """Return the way of this system."""
    if can_evict():
        return ColdReads("cold disk")
    if hasattr(fcntl, "F_NOCACHE"):
        return ColdReads(
            "past the page cache",
            "The page cache was not emptied: files are written and read past it (F_NOCACHE), but "
            "what was in memory before is read from there.",
        )
    return ColdReads(
        "page cache not emptied", "The page cache was not emptied: this system offers no way."
    )


def can_evict() -> bool:
    """Return whether :func:`evict` can empty the page cache."""
    return hasattr(os, "posix_fadvise")


def evict(files: Iterable[Path]) -> bool:
    """Drop the clean pages of `files` from the page cache; False where that is impossible."""
    if not can_evict():
        return False
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return True


def cached_share(files: Iterable[Path]) -> float | None:
    """Return the share of the pages of `files` in memory, 0 to 1; None where it is unknown."""
    if sys.platform != "linux":
        return None
    pages = cached = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        flags = _resident_pages(file, size)
        if flags is None:
            return None
        pages += flags.size
        cached += int(np.count_nonzero(flags & 1))
    return cached / pages if pages else None


def _resident_pages(file: Path, size: int) -> np.ndarray | None:
    """One byte for each page of `file`, its lowest bit set where the page is in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ) as view:
        flags = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        whole = np.frombuffer(view, np.uint8)
        address = ctypes.c_void_p(whole.ctypes.data)
        status = libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data))
        del whole
    return None if status else flags


def bytes_from_disk() -> int | None:
    """Return the bytes that disks have read for this process; None where it is unknown."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    return next(map(int, re.findall(r"^read_bytes: (\d+)$", text, re.MULTILINE)), None)


def peak_process_bytes() -> int | None:
    """The most memory that this process has had, the page cache not counted."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    return next((1024 * int(n) for n in re.findall(r"^VmHWM:\s+(\d+) kB$", text, re.M)), None)


FROM_DISK = 0.95
"""Bytes read that must have come from the disk for a run to count as cold; for a warm one, the
rest may."""


class Account:
    """The reads of one trial.

    cached: Share of the experts' pages that were in memory before it. from_disk: Bytes that came
    from disks by bytes read; both None where unknown. prompt, decode: The store's statistics up to
    the first token, and from there.
    """

    def __init__(self, stats: ExpertStats, *, cached: float | None):
        self._stats, self.cached = stats, cached
        self._start = self._first = stats.snapshot()
        self._disk = bytes_from_disk()
        self.from_disk: float | None = None
        self.prompt = self.decode = stats

    def first_token(self) -> None:
        self._first = self._stats.snapshot()

    def end(self) -> None:
        self.decode = self._stats.since(self._first)
        self.prompt = self._first.since(self._start)
        read, now = self._stats.since(self._start).total.bytes_read, bytes_from_disk()
        if now is not None and self._disk is not None and read:
            self.from_disk = (now - self._disk) / read


def cache_state(accounts: Sequence[Account], *, cold: bool) -> str:
    """Return "cold", "warm" or "unverified", by the counters and not by the option."""
    shares = [account.from_disk for account in accounts if account.from_disk is not None]
    cached = [account.cached for account in accounts if account.cached is not None]
    if not len(shares) == len(cached) == len(accounts):
        return "unverified"
    if cold and max(cached) <= COLD_SHARE and min(shares) >= FROM_DISK:
        return "cold"
    if not cold and max(shares) <= 1 - FROM_DISK:
        return "warm"
    return "unverified"
