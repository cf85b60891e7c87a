"""The speed of a disk for blocks of experts: measured past the page cache, and kept.

A kept speed is a file ``disk-*.json`` in the user's cache, one for each device. Delete it to
measure anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

import numpy as np

from mlx_moeflux import user_cache
from mlx_moeflux.checkpoint.files import nearest_existing, pass_page_cache, read_json_object
from mlx_moeflux.checkpoint.tensors import ExpertRefs, StridedRefs
from mlx_moeflux.errors import ExpertFileError, InputError, UnsupportedError
from mlx_moeflux.experts.io.layout import RAW
from mlx_moeflux.experts.io.readers import Reader, make_reader
from mlx_moeflux.measure.benchmark.pages import COLD_SHARE, cached_share, evict

Experts = Mapping[int, Mapping[str, ExpertRefs]]

# Those of a streamed store; its module imports MLX.
THREADS = 8
# Of one reader's measurement: whichever comes first.
DISK_BYTES = 1 << 30
DISK_SECONDS = 1.5
# About an expert of a 35B model in 4 bits.
BLOCK_BYTES = 2 << 20
# A smaller file is read before all threads are busy.
LEAST_FILE_BYTES = 256 << 20
# Of the temporary file; on a slow disk it is what this time allows.
FILE_BYTES, WRITE_SECONDS = 512 << 20, 1.5


class DiskSpeed(NamedTuple):
    """What was measured. day: When."""

    bytes_per_second: float
    day: date

    @property
    def age(self) -> str:
        """ "today" or the number of days."""
        days = (date.today() - self.day).days
        return "today" if days < 1 else f"{days} day{'s' * (days > 1)} ago"


def disk_speed(place: Path) -> DiskSpeed | None:
    """Return the speed of the disk that `place` is on, or will be: the kept one, or else measure
    it, which takes 5 seconds at most, and keep it.

    It reads random blocks of the largest file in `place`, which may be the file, where direct reads
    pass the page cache by. Otherwise it reads a temporary file on that disk: macOS gives a page
    that it has in memory to direct reads too.

    None: The file system allows neither.
    """
    if (kept := kept_speed(place)) is not None:
        return kept
    measured = _measure(place)
    if measured is None:
        return None
    found = DiskSpeed(measured, date.today())
    file, entry = _file(place), {"bytes_per_second": measured, "day": found.day.isoformat()}
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        user_cache.write(file, json.dumps(entry).encode())
    return found


def kept_speed(place: Path) -> DiskSpeed | None:
    """Return what was measured of the disk that `place` is on; None: nothing."""
    try:
        entry = read_json_object(_file(place), error=InputError)
        found = DiskSpeed(float(entry["bytes_per_second"]), date.fromisoformat(entry["day"]))
    except (InputError, KeyError, TypeError, ValueError, OverflowError):
        return None
    return found if 0 < found.bytes_per_second < float("inf") else None


def _file(place: Path) -> Path:
    return user_cache.root() / f"disk-{os.stat(nearest_existing(place)).st_dev:x}.json"


def _measure(place: Path) -> float | None:
    """Return bytes per second of the disk of a place; None: they cannot be measured."""
    if hasattr(os, "O_DIRECT") and (file := _largest_file(place)) is not None:
        # The page cache of somebody's model stays as it is.
        with contextlib.suppress(ExpertFileError):
            found = disk_bandwidth(_blocks_of(file), threads=THREADS, readers=("direct",))
            if found is not None:
                return found
    try:
        with tempfile.NamedTemporaryFile(dir=_folder_on_disk(place)) as file:
            _fill(file.fileno())
            return disk_bandwidth(_blocks_of(Path(file.name)), threads=THREADS)
    except (OSError, ExpertFileError):
        return None


def _folder_on_disk(place: Path) -> Path:
    """Return the folder of the user's cache if it is on the disk of `place`, else `place`."""
    place, own = nearest_existing(place), user_cache.private()
    if own is not None and own.stat().st_dev == place.stat().st_dev:
        return own
    return place if place.is_dir() else place.parent


def _largest_file(place: Path) -> Path | None:
    """Return the largest file in a folder and its folders, or the file itself, if it is large
    enough."""
    sizes = {}
    for file in [place] if place.is_file() else place.rglob("*"):
        with contextlib.suppress(OSError):  # a link to nothing
            stat = file.stat()
            if S_ISREG(stat.st_mode):
                sizes[file] = stat.st_size
    largest = max(sizes, key=lambda file: sizes[file], default=None)
    return None if largest is None or sizes[largest] < LEAST_FILE_BYTES else largest


def _fill(fd: int) -> None:
    """Write random bytes to a file, past the page cache where the system allows."""
    pass_page_cache(fd)
    deadline = time.perf_counter() + WRITE_SECONDS
    chunk = np.random.default_rng().bytes(4 * BLOCK_BYTES)
    for _ in range(FILE_BYTES // len(chunk)):
        os.write(fd, chunk)
        os.fsync(fd)
        if time.perf_counter() > deadline:
            break


def _blocks_of(file: Path) -> Experts:
    """Return a file as the experts of one layer, blocks of :data:`BLOCK_BYTES`."""
    count = file.stat().st_size // BLOCK_BYTES
    blocks = StridedRefs(
        name="block",
        file=file,
        offset=0,
        stride=BLOCK_BYTES,
        num_experts=count,
        dtype="U8",
        shape=(BLOCK_BYTES,),
    )
    return {0: {f"{RAW}block": blocks}}


def disk_bandwidth(
    experts: Experts,
    *,
    threads: int,
    seed: int = 0,
    readers: Sequence[str] = ("direct", "pread"),
) -> float | None:
    """Measure the bytes a second of random experts that no cache holds, by `threads` threads: the
    faster of direct reads and reads through an empty page cache.

    None if the file system allows none of `readers`.
    """
    speeds = []
    for name in readers:
        try:
            reader = make_reader(name, experts)
        except UnsupportedError:
            continue
        try:
            if name == "direct" or _emptied(expert_files(experts)):
                speeds.append(_read_speed(reader, threads, seed))
        finally:
            reader.close()
    return max(speeds, default=None)


def _emptied(files: tuple[Path, ...]) -> bool:
    share = cached_share(files) if evict(files) else None
    return share is not None and share <= COLD_SHARE


def _read_speed(reader: Reader, threads: int, seed: int) -> float:
    at = [(layer, e) for layer in reader.layers for e in range(reader.num_experts)]
    order = np.random.default_rng(seed).permutation(len(at))
    deadline = time.perf_counter() + DISK_SECONDS

    def read(i: int) -> int:
        layer, expert = at[i]
        if time.perf_counter() > deadline:
            return 0
        views = [memoryview(bytearray(c.nbytes)) for c in reader.layout(layer).components]
        return reader.read(layer, expert, views)

    most = max(1, DISK_BYTES // reader.layout(reader.layers[0]).nbytes)
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        total = sum(pool.map(read, order[:most].tolist()))
        return total / (time.perf_counter() - began)


def expert_files(experts: Experts) -> tuple[Path, ...]:
    """The files that hold routed experts."""
    every = (ref for parts in experts.values() for refs in parts.values() for ref in refs)
    sources = (source for ref in every for source in getattr(ref, "sources", (ref,)))
    return tuple({source.file: None for source in sources})
