"""Files that outlive a process: verdicts on kernels and budgets, kernels' text and machine code.

They are in ``$MOEFLUX_CACHE_DIR``, else in ``mlx_moeflux`` below ``$XDG_CACHE_HOME`` or
``~/.cache``. Everything there can be deleted at any time. What is compiled or executed is taken
only from a folder that no other user can write to.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def root() -> Path:
    """The folder; it may not exist."""
    if own := os.environ.get("MOEFLUX_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(parent).absolute() / "mlx_moeflux"


def private(*parts: str) -> Path | None:
    """A folder below :func:`root`, made if need be, that only this user can write to.

    None where there is no such folder: it cannot be made or written, belongs to somebody else, or
    others may rename what lies above it.
    """
    try:
        folder = root()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in parts:
            folder = folder / part
            folder.mkdir(mode=0o700, exist_ok=True)
        folder = folder.resolve(strict=True)
        safe = is_private(folder) and os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):
        # RuntimeError: no home directory, or links that go in a circle.
        return None
    return folder if safe else None


def is_private(folder: Path) -> bool:
    """Return True if only this user, or the system's administrator, can write to a resolved folder
    or replace it."""
    own = folder.stat()
    if own.st_uid != os.getuid() or own.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    return all(_keeps_names(above.stat()) for above in folder.parents)


def _keeps_names(above: os.stat_result) -> bool:
    if above.st_uid not in (0, os.getuid()):
        return False
    return not above.st_mode & stat.S_IWOTH or bool(above.st_mode & stat.S_ISVTX)


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: no reader sees half of it.

    Raises:
        OSError: It cannot be written; no partial file remains.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as new:
            new.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
