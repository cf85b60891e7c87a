"""The page cache between the disk and a measurement: emptied, and looked at.

A file that was read once is read from memory the next time; without these two acts nothing that
streams is measured. Eviction needs ``posix_fadvise`` and looking needs ``mincore`` (Linux);
elsewhere the answers are None, and a measurement says that it is unverified.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

COLD_SHARE = 0.02
"""Pages that may stay when the page cache was emptied."""


def evict(files: Iterable[Path]) -> bool:
    """Drop the clean pages of `files` from the page cache; False where that is impossible."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return True


def cached_share(files: Iterable[Path]) -> float | None:
    """The share of the pages of `files` that is in memory, 0 to 1; None where nobody can tell."""
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
    """What this process has caused to be read from disks so far; None where nobody counts."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    return int(re.search(r"^read_bytes: (\d+)$", text, re.MULTILINE)[1])


def peak_process_bytes() -> int | None:
    """The most memory that this process has had, the page cache not counted."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)[1]) * 1024
