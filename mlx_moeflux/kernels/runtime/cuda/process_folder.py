"""The folder in which MLX of one process keeps modules, apart from those of other processes.

A module is code and a list of names. MLX writes one after the other, and another process that finds
the first alone says "There is no kernel named ...". So each process has a folder of its own, with
links to the complete modules of a shared folder, and adds at its end what MLX has compiled for it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mlx_moeflux import user_cache

CODE, NAMES, SOURCE = ".ptx", ".txt", ".cu"
PROCESSES = "processes"
# Beginning of the names of custom kernels' modules.
CUSTOM = "custom_kernel_"
_LOCK = ".lock"


class ProcessFolder:
    """A new folder below `shared`, removed at the end of the process.

    shared: Complete modules, of all processes. path: Where MLX of this process reads and writes.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, shared: Path):
        self.shared, self._process = shared, os.getpid()
        folders = shared / PROCESSES
        folders.mkdir(mode=0o700, exist_ok=True)
        _remove_abandoned(folders)
        self._held, self._lock = _new_lock(folders)
        self.path = self._lock.with_suffix("")
        self.path.mkdir(mode=0o700)
        for name in _names(shared, CODE):
            # Custom kernels are taken when they are first built; MLX asks for its own at any time.
            if not name.startswith(CUSTOM):
                self.take(name)
        atexit.register(self.close)

    def take(self, name: str) -> bool:
        """Let MLX find a module of the shared folder; return False if there is no complete one."""
        try:
            # MLX looks for the code first.
            for suffix in (NAMES, CODE):
                _link(self.shared / f"{name}{suffix}", self.path / f"{name}{suffix}")
        except OSError:
            return False
        if self.has(name):
            return True
        (self.path / f"{name}{CODE}").unlink(missing_ok=True)
        return False

    def has(self, name: str) -> bool:
        """Return True if MLX of this process finds a complete module."""
        return _is_complete(self.path, name)

    def store(self, name: str, names: str, code: bytes) -> None:
        """Add a module for all processes. names: Lines with a kernel, a tab and its name in the
        code.

        Raises:
            OSError: It cannot be written.
        """
        # MLX passes over lines without a tab.
        content = f"{names}{_digest(names, code)}\n".encode()
        for suffix, part in ((NAMES, content), (CODE, code)):
            file = self.shared / f"{name}{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            user_cache.write(file, part)
        self.take(name)

    def publish(self) -> None:
        """Give the other processes what MLX has compiled.

        Raises:
            OSError: The shared folder cannot be written.
        """
        # MLX writes the source last: the other two are complete.
        for name in list(_names(self.path, SOURCE)):
            if not _is_complete(self.shared, name):
                names = (self.path / f"{name}{NAMES}").read_text()
                self.store(name, names, (self.path / f"{name}{CODE}").read_bytes())

    def close(self) -> None:
        """Publish, and remove the folder; for the process that made it."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return
        with contextlib.suppress(OSError):
            self.publish()
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._lock.unlink()
        os.close(self._held)


def _names(folder: Path, suffix: str) -> Iterator[str]:
    """Yield the names of the modules below a folder, without the suffix. Long ones have slashes."""
    for parent, below, files in os.walk(folder):
        if PROCESSES in below:
            below.remove(PROCESSES)
        for file in files:
            if file.endswith(suffix):
                yield os.path.relpath(os.path.join(parent, file), folder).removesuffix(suffix)


def _is_complete(folder: Path, name: str) -> bool:
    """Return True if a module has the digest that :meth:`ProcessFolder.store` adds: power may fail
    between a file's name and content."""
    try:
        code = (folder / f"{name}{CODE}").read_bytes()
        *names, digest = (folder / f"{name}{NAMES}").read_text().splitlines(keepends=True)
    except (OSError, ValueError):
        return False
    return digest == f"{_digest(''.join(names), code)}\n"


def _digest(names: str, code: bytes) -> str:
    return hashlib.blake2b(names.encode() + code, digest_size=16).hexdigest()


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.new")
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)
    # Of two links to the same file the system removes none.
    temporary.unlink(missing_ok=True)


def _new_lock(folders: Path) -> tuple[int, Path]:
    """Return a locked file, as long as the process lives, and its path."""
    while True:
        descriptor, name = tempfile.mkstemp(_LOCK, f"{os.getpid()}-", folders)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(name):
                return descriptor, Path(name)
        except BlockingIOError:
            pass  # another process takes it for abandoned, and removes it
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_abandoned(folders: Path) -> None:
    """Remove the folders of processes that were killed."""
    for lock in folders.glob(f"*{_LOCK}"):
        with contextlib.suppress(OSError), open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink()
