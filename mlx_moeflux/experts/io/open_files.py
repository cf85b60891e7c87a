"""Files that are kept open, read at offsets and watched: what all readers of files share."""

from __future__ import annotations

import contextlib
import os
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path

from mlx_moeflux.checkpoint.files import Stamp, changed, open_regular, unreadable, window
from mlx_moeflux.errors import ExpertFileError, MoefluxError
from mlx_moeflux.experts.io.byte_ranges import Run

# Other open files of a process: libraries, sockets, a second reader.
OTHER_FILES = 512


def make_room(files: int) -> None:
    """Raise the limit of open files by `files`, as far as the system allows.

    macOS allows 256 by default; DeepSeek-V3 has 163 shards, and two readers may keep them open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


class OpenFiles:
    """Open files. :attr:`Run.file` is an index into `files`. Several threads may read.

    paths, stamps: Of each file, as it was opened.

    Raises:
        ExpertFileError: A file cannot be opened.
    """

    alignment = 1
    """Reads begin and end at multiples of this, in files and in memory."""
    staging_bytes = 0
    """Bytes of private buffers for each reading thread."""
    least_piece: int = 1 << 20
    """Bytes; no part of a read that threads share is much smaller."""
    _flags = os.O_RDONLY

    def __init__(self, files: Sequence[Path]):
        self.files = files
        self._fds: list[int] = []
        # Absolute: the process may change its directory.
        self.paths = [os.path.abspath(file) for file in files]
        self.stamps: list[Stamp] = []
        self._close_files = weakref.finalize(self, _close_all, self._fds)
        make_room(len(files))
        for file in files:
            try:
                self._fds.append(open_regular(file, self._flags))
                self.stamps.append(Stamp.of(file))
            except OSError as cause:
                self.close()
                raise self._cannot_open(file, cause) from cause

    @property
    def descriptors(self) -> Sequence[int]:
        """The descriptor of each file."""
        return self._fds

    def advise_random(self) -> bool:
        """Tell the system not to read ahead beyond a run; return whether it takes such advice."""
        advises = hasattr(os, "posix_fadvise")
        for fd in self._fds if advises else ():
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return advises

    def fill(self, run: Run, views: Sequence[memoryview]) -> None:
        """Read `run` into consecutive views of its size; :meth:`check` says later of which file.

        Raises:
            ExpertFileError: The bytes cannot be read.
        """
        done = self._preadv(run, views, run.offset)
        while done < run.nbytes:
            done += self._preadv(run, window(views, done, run.nbytes), run.offset + done)

    def check(self, file: int) -> None:
        """Raise ExpertFileError unless the path of a file leads to what was opened."""
        try:
            if Stamp.of(self.paths[file]) == self.stamps[file]:
                return
        except OSError as cause:
            raise self.changed(file) from cause
        raise self.changed(file)

    def close(self) -> None:
        """Close the files; no read is under way."""
        self._close_files()

    def _cannot_open(self, file: Path, cause: OSError) -> Exception:
        return unreadable(file, cause, error=ExpertFileError)

    def _preadv(self, run: Run, views: Sequence[memoryview], offset: int) -> int:
        """Read at least one byte of file `run.file` at `offset`; errors name file and offset."""
        try:
            count = os.preadv(self._fds[run.file], views, offset)
        except OSError as cause:
            raise self.failed(run, offset, cause) from cause
        if not count:
            raise self.ends_early(run, offset)
        return count

    def failed(self, run: Run, offset: int, cause: OSError) -> ExpertFileError:
        """Return the error of a read at `offset`."""
        return ExpertFileError(
            f"Reading {self.files[run.file]} at offset {offset} failed: "
            f"{cause.strerror or cause}; check the disk and the file."
        )

    def changed(self, file: int) -> MoefluxError:
        """Return the error of a file that is not what was opened."""
        return changed(self.files[file], error=ExpertFileError)

    def ends_early(self, run: Run, offset: int) -> ExpertFileError:
        """Return the error of a file that ends at `offset`, inside `run`."""
        return ExpertFileError(
            f"{self.files[run.file]} ends early: expected {run.nbytes} bytes at offset "
            f"{run.offset}, got {max(offset - run.offset, 0)}; download or convert it again."
        )


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
