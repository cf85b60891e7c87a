"""The speed of a disk for blocks of experts: measured past the page cache, and kept.

A kept speed is a file ``disk-*.json`` in the user's cache, one for each device.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from stat import S_ISREG
from statistics import median
from typing import NamedTuple

import numpy as np

from mlx_moeflux import user_cache
from mlx_moeflux.checkpoint.files import (
    format_size,
    nearest_existing,
    pass_page_cache,
    read_json_object,
    write_exact,
)
from mlx_moeflux.checkpoint.tensors import ExpertRefs, TensorRef
from mlx_moeflux.errors import ExpertFileError, InputError, UnsupportedError
from mlx_moeflux.experts.io.layout import RAW
from mlx_moeflux.experts.io.readers import Reader, largest_block, make_reader
from mlx_moeflux.experts.system_memory import available_memory
from mlx_moeflux.measure.benchmark.pages import (
    COLD_SHARE,
    FROM_DISK,
    bytes_from_disk,
    cached_share,
    evict,
)

Experts = Mapping[int, Mapping[str, ExpertRefs]]
Clock = Callable[[], float]

# Those of a streamed store; its module imports MLX.
THREADS = 8
# Of one measurement: whichever comes first.
DISK_BYTES, DISK_SECONDS = 8 * 10**9, 2.0
# About an expert of a 35B model in 4 bits.
BLOCK_BYTES = 2 << 20
# Of the temporary file: on a slow disk it is what this time allows, on a full one this share of
# what is free. Below the least bytes nothing is measured.
FILE_BYTES, WRITE_SECONDS, FREE_SHARE = 8 * 10**9, 5.0, 1 / 4
LEAST_FILE_BYTES = 256 << 20
# The beginning of its name, and the age in seconds at which it is one of a killed process.
TEMPORARY, OLD_SECONDS = "disk-speed-", 3600
# Parts of a measurement that are compared. The disk was busy if the second fastest is so many times
# as fast as the second slowest: one part of each kind may be chance.
PARTS, UNEVEN = 8, 1.5
# Days that a speed is kept, and one that was measured on a busy machine.
DAYS, BUSY_DAYS = 30, 1


class DiskSpeed(NamedTuple):
    """The measured speed of a disk.

    day: Date of the measurement. available_bytes: Memory that could be had then. busy: Other
    programs used the disk or the processors. from_memory: The bytes came from memory, as in a file
    system without a disk.
    """

    bytes_per_second: float
    day: date
    available_bytes: int | None = None
    busy: bool = False
    from_memory: bool = False

    @property
    def days(self) -> int:
        """The age in days; negative if the clock was set back."""
        return (date.today() - self.day).days

    @property
    def age(self) -> str:
        """ "today" or the number of days."""
        return "today" if self.days < 1 else f"{self.days} day{'s' * (self.days > 1)} ago"

    @property
    def valid(self) -> bool:
        """True for 30 days; if the machine was busy, for that day."""
        return 0 <= self.days < (BUSY_DAYS if self.busy else DAYS)

    def __str__(self) -> str:
        facts = [f"measured {self.age}"]
        if self.available_bytes is not None:
            facts.append(f"{format_size(self.available_bytes)} of memory free")
        if self.from_memory:
            facts.append("read from memory and not from a disk")
        if self.busy:
            facts.append("machine busy: 'plan --measure-disk' measures again")
        return ", ".join(facts)


class Block(NamedTuple):
    """A block that was read. seconds: Time from the beginning of the measurement."""

    seconds: float
    nbytes: int


class Reads(NamedTuple):
    """The speed of random reads.

    uneven: Some parts of the measurement were much faster than others. whole: The reads took
    :data:`DISK_SECONDS` or were :data:`DISK_BYTES`. from_memory: See :class:`DiskSpeed`.
    """

    bytes_per_second: float
    uneven: bool
    whole: bool
    from_memory: bool = False


def disk_speed(place: Path) -> DiskSpeed | None:
    """Return the speed of the disk that `place` is on, or will be: the kept one if it still counts,
    else that of :func:`measure_disk`."""
    kept = kept_speed(place)
    return kept if kept is not None and kept.valid else measure_disk(place)


def measure_disk(place: Path) -> DiskSpeed | None:
    """Measure the disk that `place` is on, or will be, and keep the speed; say so on stderr, as it
    takes up to 10 seconds.

    Where direct reads pass the page cache by, it reads random blocks of the largest files in
    `place`, which may be a file. If they are too small, and on macOS, which gives a page that it
    has in memory to direct reads too, it reads a temporary file on that disk. The file takes at
    most a quarter of what is free.

    None: The file system allows neither, or has too little room.
    """
    print("measuring the disk: up to 10 seconds, once in 30 days", file=sys.stderr)  # noqa: T201
    available, _ = available_memory()
    loaded = _is_loaded()  # before the reads, whose threads are load too
    reads = _measure(place)
    if reads is None:
        return None
    found = DiskSpeed(
        bytes_per_second=reads.bytes_per_second,
        day=date.today(),
        available_bytes=available,
        busy=reads.uneven or loaded,
        from_memory=reads.from_memory,
    )
    file, entry = _file(place), found._asdict() | {"day": found.day.isoformat()}
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        user_cache.write(file, json.dumps(entry).encode())
    return found


def kept_speed(place: Path) -> DiskSpeed | None:
    """Return what was last measured of the disk that `place` is on, of any age; None: nothing."""
    try:
        entry = read_json_object(_file(place), error=InputError)
        found = DiskSpeed(
            bytes_per_second=float(entry["bytes_per_second"]),
            day=date.fromisoformat(entry["day"]),
            available_bytes=int(entry["available_bytes"]),
            busy=bool(entry["busy"]),
            from_memory=bool(entry["from_memory"]),
        )
    except (InputError, KeyError, TypeError, ValueError, OverflowError):
        return None
    return found if 0 < found.bytes_per_second < float("inf") else None


def _file(place: Path) -> Path:
    return user_cache.root() / f"disk-{os.stat(nearest_existing(place)).st_dev:x}.json"


def _is_loaded() -> bool:
    """Return whether more processes than there are processors wanted to run in the last minute;
    False where the system does not tell."""
    try:
        return os.getloadavg()[0] > (os.cpu_count() or 1)
    except OSError:
        return False


def _measure(place: Path) -> Reads | None:
    """Return the reads of a place's files or of a temporary one; None: they cannot be measured."""
    own = None
    if hasattr(os, "O_DIRECT") and (files := _large_files(place)):
        # The page cache of somebody's model stays as it is.
        with contextlib.suppress(ExpertFileError):
            own = read_experts(_blocks_of(*files), threads=THREADS, readers=("direct",))
        if own is not None and own.whole and not own.from_memory:
            return own
    with contextlib.suppress(OSError, ExpertFileError):
        folder = _folder_on_disk(place)
        _remove_old(folder)
        size = min(FILE_BYTES, int(FREE_SHARE * shutil.disk_usage(folder).free))
        if size >= LEAST_FILE_BYTES:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=TEMPORARY) as file:
                _fill(file.fileno(), Path(file.name), size)
                return read_experts(_blocks_of(Path(file.name)), threads=THREADS)
    return own


def _folder_on_disk(place: Path) -> Path:
    """Return the folder of the user's cache if it is on the disk of `place`, else `place`."""
    place, own = nearest_existing(place), user_cache.private()
    if own is not None and own.stat().st_dev == place.stat().st_dev:
        return own
    return place if place.is_dir() else place.parent


def _remove_old(folder: Path) -> None:
    for file in folder.glob(f"{TEMPORARY}*"):
        if time.time() - file.stat().st_mtime > OLD_SECONDS:
            file.unlink(missing_ok=True)


def _large_files(place: Path) -> list[Path]:
    """Return the largest files in a folder and its folders, or the file itself, that are on its
    device and hold all of their bytes: as many as a measurement needs."""
    sizes: dict[tuple[int, int], tuple[int, Path]] = {}
    device = os.stat(nearest_existing(place)).st_dev
    for file in [place] if place.is_file() else place.rglob("*"):
        with contextlib.suppress(OSError):  # a link to nothing
            stat = file.stat()
            # A download in progress has holes, which are read from no disk.
            full = stat.st_blocks * 512 >= stat.st_size >= BLOCK_BYTES
            if S_ISREG(stat.st_mode) and stat.st_dev == device and full:
                sizes[stat.st_dev, stat.st_ino] = stat.st_size, file
    files, total = [], 0
    for size, file in sorted(sizes.values(), reverse=True):
        if total < DISK_BYTES:
            files.append(file)
            total += size
    return files


def _fill(fd: int, file: Path, size: int, clock: Clock = time.perf_counter) -> None:
    """Write up to `size` random bytes to an open file, past the page cache where the system allows.

    A file that stays in memory gets the least bytes: its file system is one in memory.
    """
    pass_page_cache(fd)
    deadline = clock() + WRITE_SECONDS
    # Page-aligned: of other memory macOS makes a copy in the page cache first.
    chunk = memoryview(mmap.mmap(-1, 4 * BLOCK_BYTES))
    chunk[:] = np.random.default_rng().bytes(len(chunk))
    written = 0
    while written + len(chunk) <= size and clock() < deadline:
        write_exact(fd, chunk, offset=written)
        written += len(chunk)
        if not evict((file,)):
            os.fsync(fd)
        if written == len(chunk) and (cached_share((file,)) or 0) > COLD_SHARE:
            size = min(size, LEAST_FILE_BYTES)


def _blocks_of(*files: Path) -> Experts:
    """Return random blocks of :data:`BLOCK_BYTES` of files as the experts of one layer: all, or as
    many as a measurement needs."""
    ends = np.cumsum([file.stat().st_size // BLOCK_BYTES for file in files])
    chosen = np.random.default_rng().permutation(ends[-1])[: -(-DISK_BYTES // BLOCK_BYTES)]
    which = np.searchsorted(ends, chosen, side="right")
    starts = np.concatenate(([0], ends))[which]
    blocks = [
        TensorRef("block", files[i], at * BLOCK_BYTES, "U8", (BLOCK_BYTES,))
        for i, at in zip(which.tolist(), (chosen - starts).tolist(), strict=True)
    ]
    return {0: {f"{RAW}block": blocks}}


def disk_bandwidth(experts: Experts, *, threads: int, seed: int = 0) -> float | None:
    """Measure the bytes a second of random experts that no cache holds, by `threads` threads, see
    :func:`read_experts`. None if the file system allows no such reads."""
    found = read_experts(experts, threads=threads, seed=seed)
    return None if found is None or found.from_memory else found.bytes_per_second


def read_experts(
    experts: Experts,
    *,
    threads: int,
    seed: int | None = None,
    readers: Sequence[str] = ("direct", "pread"),
) -> Reads | None:
    """Read random experts past the page cache, by the first of `readers` that the system allows;
    ``pread`` needs one that can empty the cache. None if it allows none of them.

    seed: Of the order; None: another order each time.
    """
    files = expert_files(experts)
    for name in readers:
        try:
            reader = make_reader(name, experts)
        except UnsupportedError:
            continue
        try:
            if name == "direct" or evict(files):
                cached, before = cached_share(files), bytes_from_disk()
                done = read_blocks(reader, threads, seed)
                return summary(done, threads, in_cache=cached, from_disk=_since(before))
        finally:
            reader.close()
    return None


def _since(before: int | None) -> int | None:
    now = bytes_from_disk()
    return None if now is None or before is None else now - before


def read_blocks(
    reader: Reader, threads: int, seed: int | None, clock: Clock = time.perf_counter
) -> list[Block]:
    """Read random blocks, each once, for :data:`DISK_SECONDS` or up to :data:`DISK_BYTES`, into one
    page-aligned buffer for each thread. Return the blocks, the first that was done first."""
    at = [(layer, e) for layer in reader.layers for e in range(reader.num_experts)]
    largest = largest_block(reader)
    most = -(-DISK_BYTES // largest)
    chosen = iter(np.random.default_rng(seed).permutation(len(at))[:most].tolist())
    done: list[Block] = []
    began = clock()

    def work() -> None:
        buffer, seconds = memoryview(mmap.mmap(-1, largest)), 0.0
        while seconds < DISK_SECONDS and (i := next(chosen, None)) is not None:
            layer, expert = at[i]
            stops = np.cumsum([c.nbytes for c in reader.layout(layer).components]).tolist()
            views = [buffer[a:b] for a, b in zip([0, *stops], stops, strict=False)]
            nbytes = reader.read(layer, expert, views)
            seconds = clock() - began
            done.append(Block(seconds, nbytes))

    with ThreadPoolExecutor(threads) as pool:
        for worker in [pool.submit(work) for _ in range(threads)]:
            worker.result()
    return sorted(done)


def summary(
    done: Sequence[Block], threads: int, *, in_cache: float | None, from_disk: int | None
) -> Reads:
    """Return the speed of reads: the median of some :data:`PARTS` parts of as many blocks each.
    Another program that uses the disk for a moment changes it little.

    in_cache: Share of the files that was in memory before the reads; None: unknown. from_disk:
    Bytes that disks gave during the reads; None: unknown.
    """
    # Threads begin together, so blocks are done in bunches.
    step = max(1, len(done) // PARTS // threads) * threads
    ends = list(range(step, len(done) + 1, step)) or [len(done)]
    speeds, before = [], 0.0
    for start, end in zip([0, *ends], ends, strict=False):
        seconds = max(done[end - 1].seconds - before, 1e-9)
        speeds.append(sum(block.nbytes for block in done[start:end]) / seconds)
        before = done[end - 1].seconds
    ordered, nbytes = sorted(speeds), sum(block.nbytes for block in done)
    warm = in_cache is not None and in_cache > COLD_SHARE
    return Reads(
        bytes_per_second=median(speeds),
        uneven=len(speeds) >= PARTS and ordered[-2] > UNEVEN * ordered[1],
        whole=done[-1].seconds >= DISK_SECONDS or nbytes >= DISK_BYTES,
        from_memory=warm and (from_disk is None or from_disk < FROM_DISK * nbytes),
    )


def expert_files(experts: Experts) -> tuple[Path, ...]:
    """The files that hold routed experts."""
    every = (ref for parts in experts.values() for refs in parts.values() for ref in refs)
    sources = (source for ref in every for source in getattr(ref, "sources", (ref,)))
    return tuple({source.file: None for source in sources})
