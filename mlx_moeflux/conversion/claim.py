"""One conversion owns its output directory: a lock while it runs, a marker until it is done."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_moeflux.checkpoint.files import TEMPORARY_SUFFIX
from mlx_moeflux.checkpoint.writer import write_json
from mlx_moeflux.errors import InputError, MemoryBudgetError

MARKER_NAME = ".conversion.json"
LOCK_NAME = ".conversion.lock"
# What a conversion that died before its marker was written leaves behind.
_NOTHING_YET = {LOCK_NAME, MARKER_NAME + TEMPORARY_SUFFIX}


@contextmanager
def claim(out: Path, identity: str, *, needed: int) -> Iterator[None]:
    """Own `out` for the conversion `identity`, which writes `needed` bytes.

    The directory may be new, empty, or hold an unfinished conversion of the same identity. The
    system drops the lock when the process dies; the marker goes when the block ends well.

    Raises:
        InputError: The directory holds something else, cannot be written, or is being written.
        MemoryBudgetError: The disk has no room.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a directory.")
    _check_content(out, identity)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}.") from error
    try:
        _lock(lock, out)
        try:
            # Once more: another conversion may have come and gone since the first look.
            if _check_content(out, identity):
                for leftover in out.glob("*.tmp"):
                    leftover.unlink()
            else:
                write_json(out / MARKER_NAME, {"identity": identity})
            _check_disk(out, needed)
            yield
            (out / MARKER_NAME).unlink(missing_ok=True)
        finally:
            (out / LOCK_NAME).unlink(missing_ok=True)
    finally:
        os.close(lock)


def _lock(lock: int, out: Path) -> None:
    busy = InputError(
        f"{out} is being written by another conversion; wait for it or give another directory."
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError:
        # A file system without locks: two conversions at once are then the user's business.
        return
    try:
        present = os.stat(out / LOCK_NAME)
    except FileNotFoundError:
        raise busy from None
    if not os.path.samestat(present, os.fstat(lock)):
        # The owner removed the file that was opened here, and someone made the next.
        raise busy


def _check_content(out: Path, identity: str) -> bool:
    """Whether an unfinished conversion of the same kind is there; False if nothing is."""
    marker = out / MARKER_NAME
    if not out.exists() or all(file.name in _NOTHING_YET for file in out.iterdir()):
        return False
    try:
        before = json.loads(marker.read_text())["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{out} is not empty and holds no unfinished conversion; give another directory."
        ) from None
    if before != identity:
        raise InputError(
            f"{out} holds an unfinished conversion of another checkpoint or with other "
            "options; remove it first."
        )
    return True


def _check_disk(out: Path, needed: int) -> None:
    present = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    free = shutil.disk_usage(out).free
    if needed > free + present:
        raise MemoryBudgetError(
            f"{out} needs {needed} bytes ({needed / 1e9:.2f} GB) and has {free} free "
            f"({free / 1e9:.2f} GB); make room or choose another disk."
        )
