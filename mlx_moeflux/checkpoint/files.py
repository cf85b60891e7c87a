"""Small acts on files that every checkpoint format needs, with errors that name the file."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, Protocol, TypeVar

from mlx_moeflux.errors import CheckpointError, InputError, MoefluxError

# One call moves at most 2 GiB - 4 KiB on Linux and fails beyond 2 GiB - 1 on macOS.
_MAX_PIECE = 1 << 30

TEMPORARY_SUFFIX = ".tmp"
# Of a file that is read whole: the largest tokenizers and indexes have some 30 MB.
MOST_BYTES = 100_000_000
HASH_BYTES = 32
_HASH_CHUNK = 1 << 22


Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

Report = Callable[[int], None]
"""Called with the bytes that were done since the last call."""


def counted(progress: Progress | None, total: int) -> Report:
    """Return a function that adds up its calls and tells `progress` each sum, of `total` bytes."""
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return report


class HasBytes(Protocol):
    """An object with a size in bytes."""

    @property
    def nbytes(self) -> int: ...


Sized = TypeVar("Sized", bound=HasBytes)


def read_exact(
    fd: int,
    views: Sequence[memoryview],
    *,
    offset: int,
    file: Path,
    error: type[MoefluxError],
) -> None:
    """Fill byte views in order from ``offset`` of an open file; continue short reads.

    Raises ``error``, naming file and offset, at the end of the file and on an OSError.
    """
    done, wanted = 0, sum(view.nbytes for view in views)
    while done < wanted:
        whole = not done and wanted <= _MAX_PIECE
        left = views if whole else window(views, done, min(wanted, done + _MAX_PIECE))
        try:
            count = os.preadv(fd, left, offset + done)
        except OSError as cause:
            raise error(
                f"Reading {file} at offset {offset + done} failed: {cause.strerror or cause}."
            ) from cause
        if count == 0:
            raise error(
                f"{file} ends early: expected {wanted} bytes at offset {offset}, got {done};"
                " download or convert it again."
            )
        done += count


def window(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """The parts of consecutive byte views that hold bytes [start, stop) of their concatenation."""
    parts, position = [], 0
    for view in views:
        begin, end = max(start - position, 0), min(stop - position, view.nbytes)
        if begin < end:
            parts.append(view if (begin, end) == (0, view.nbytes) else view[begin:end])
        position += view.nbytes
    return parts


def write_exact(fd: int, view: memoryview, *, offset: int) -> None:
    """Write all of ``view`` (bytes) at ``offset`` of an open file; raises OSError."""
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done : done + _MAX_PIECE], offset + done)


LFS_POINTER = b"version https://git-lfs"


def refuse_pointer(
    start: bytes, file: Path | str, *, error: type[MoefluxError] = CheckpointError
) -> None:
    """Raise ``error`` if a file that begins with `start` is Git LFS's note of where it is."""
    if start.startswith(LFS_POINTER):
        raise error(
            f"{file} is a pointer of Git LFS and not the file itself; run 'git lfs pull' in its "
            "folder, or download it."
        )


def parse_json_object(
    text: bytes, file: Path, *, what: str, error: type[MoefluxError] = CheckpointError
) -> dict:
    """A JSON object with no key given twice; ``error`` names ``what`` of which file.

    An object ``{"__float__": "Infinity"}``, by which transformers writes what JSON has no number
    for, becomes that float, and so does one with the text of a finite float, such as "1e-6".
    """
    refuse_pointer(text, file, error=error)
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as cause:
        raise error(
            f"The {what} of {file} is not valid JSON ({cause}); download the file again."
        ) from cause
    if not isinstance(value, dict):
        raise error(
            f"The {what} of {file} is a JSON {type(value).__name__}, but must be an object."
        )
    return value


def read_json_object(file: Path, *, error: type[MoefluxError] = CheckpointError) -> dict:
    """The JSON object in a file; ``error`` if it cannot be read or is not one."""
    return parse_json_object(read_whole(file, error=error), file, what="content", error=error)


_uncached = False


@contextmanager
def uncached() -> Iterator[None]:
    """Pass the page cache by, see :func:`pass_page_cache`, in each file that :func:`open_regular`
    opens meanwhile, in any thread."""
    global _uncached
    before, _uncached = _uncached, True
    try:
        yield
    finally:
        _uncached = before


def pass_page_cache(fd: int) -> bool:
    """Let reads and writes of an open file leave no pages in memory; False where the system cannot.
    macOS can (F_NOCACHE), and takes pages that are in memory already from there."""
    if not hasattr(fcntl, "F_NOCACHE"):
        return False
    fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
    return True


def open_regular(file: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor. mode: Of a file that is made.

    A pipe would be waited for, a device read without end: these raise OSError at once.
    """
    fd = os.open(file, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        if _uncached:
            pass_page_cache(fd)
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no regular file", os.fspath(file))


class Stamp(NamedTuple):
    """Facts of a file that change when its content does."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Stamp:
        """The stamp of what a path leads to now; raises OSError."""
        found = os.stat(path)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def changed(file: str | os.PathLike[str], *, error: type[MoefluxError]) -> MoefluxError:
    """The one-sentence error for a file whose stamp is not what it was."""
    return error(f"{file} was changed, replaced or removed while in use; load the model again.")


def read_whole(
    file: Path, *, most: int = MOST_BYTES, error: type[MoefluxError] = CheckpointError
) -> bytes:
    """Return the bytes of a regular file; ``error`` if it has more than `most` or cannot be
    read."""
    try:
        with os.fdopen(open_regular(file), "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size > most:
                raise OSError(errno.EFBIG, f"it has {size} bytes, more than {most}", str(file))
            return handle.read(size)
    except OSError as cause:
        raise unreadable(file, cause, error=error) from cause


def inside_path(
    directory: Path, name: object, *, source: Path, error: type[MoefluxError] = CheckpointError
) -> str:
    """``name`` if it is a relative file path that stays inside ``directory``, else an error.

    The check is of the text: a hub cache's files are links that lead outside on purpose.
    """
    if isinstance(name, str) and name and "\0" not in name and _is_unicode(name):
        posix, windows = PurePosixPath(name), PureWindowsPath(name)
        parts = {*posix.parts, *windows.parts}
        if not posix.is_absolute() and not windows.anchor and parts and ".." not in parts:
            return str(posix)
    raise error(
        f"{source} names the file {name!r}, which is not a path inside {directory}; only plain"
        " relative paths are followed."
    )


def hash_file(
    file: Path, *, size: int, error: type[MoefluxError], report: Report | None = None
) -> str:
    """BLAKE2b (hex, 32 bytes) of the first ``size`` bytes; ``report`` gets each chunk's size."""
    with opened(file, error=error) as fd:
        hasher, buffer = hashlib.blake2b(digest_size=HASH_BYTES), bytearray(min(size, _HASH_CHUNK))
        for offset in range(0, size, _HASH_CHUNK):
            chunk = memoryview(buffer)[: size - offset]
            read_exact(fd, [chunk], offset=offset, file=file, error=error)
            hasher.update(chunk)
            if report is not None:
                report(len(chunk))
    return hasher.hexdigest()


def write_output(
    file: str | os.PathLike[str], content: bytes, *, error: type[MoefluxError] = InputError
) -> None:
    """Write a file that a user named, as :func:`write_atomically` does; `error` if that fails."""
    try:
        write_atomically(Path(file), content)
    except OSError as cause:
        raise unwritable(file, cause, error=error) from cause


def check_replaceable(file: Path) -> None:
    """Raise OSError if `file` is a device, a pipe or a folder: a rename would remove it."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(file))


def write_atomically(file: Path, content: bytes) -> None:
    """Replace a file so that a crash at any moment leaves the old content or the new one.

    Leaves no temporary file behind unless the process dies; raises OSError.
    """
    check_replaceable(file)
    temporary = file.with_name(file.name + TEMPORARY_SUFFIX)
    try:
        with open(temporary, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(file.parent)


def sync_directory(directory: Path) -> None:
    """Make renames and removals in a directory survive a power cut; raises OSError."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unreadable(
    file: Path, cause: OSError, *, error: type[MoefluxError] = CheckpointError
) -> MoefluxError:
    """The one-sentence error for a file that could not be opened or read."""
    return error(f"{file} cannot be read: {cause.strerror or cause}.")


def unwritable(
    file: str | os.PathLike[str], cause: OSError, *, error: type[MoefluxError] = InputError
) -> MoefluxError:
    """The one-sentence error for a file that could not be written."""
    return error(f"{os.fspath(file)} cannot be written: {cause.strerror or cause}.")


@contextmanager
def opened(file: Path, *, error: type[MoefluxError] = CheckpointError) -> Iterator[int]:
    """Open a file for reading and yield its descriptor; raise ``error`` if that fails."""
    try:
        fd = open_regular(file)
    except OSError as cause:
        raise unreadable(file, cause, error=error) from cause
    try:
        yield fd
    finally:
        os.close(fd)


def size_of(
    file: Path, *, error: type[MoefluxError] = CheckpointError, missing: str | None = None
) -> int:
    """Bytes of a file; ``error`` if the system does not say, in the words ``missing`` if there is
    no such file."""
    try:
        return file.stat().st_size
    except OSError as cause:
        if missing is not None and isinstance(cause, FileNotFoundError):
            raise error(missing) from cause
        raise unreadable(file, cause, error=error) from cause


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def format_size(nbytes: int) -> str:
    """Return bytes as one reads them, decimal."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def in_groups(items: Iterable[Sized], most: int) -> Iterator[list[Sized]]:
    """Cut items, in their order, into groups of at most `most` bytes; a larger item is a group of
    its own."""
    group: list[Sized] = []
    size = 0
    for item in items:
        if group and size + item.nbytes > most:
            yield group
            group, size = [], 0
        group.append(item)
        size += item.nbytes
    if group:
        yield group


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can spell and no file can be named."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


# transformers' tags of floats: those that JSON cannot spell, and in some files any other.
_TAG = "__float__"
_TAGGED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_FLOAT = re.compile(r"-?[0-9]{1,400}(\.[0-9]{1,400})?([eE][+-]?[0-9]{1,9})?")


def tagged(value: Any) -> Any:
    """Return a value of JSON with floats that JSON cannot spell in transformers' form."""
    if isinstance(value, dict):
        return {key: tagged(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [tagged(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    return value


def _object(pairs: list[tuple[str, object]]) -> object:
    if len(pairs) == 1:
        key, value = pairs[0]
        if key == _TAG and isinstance(value, str):
            if value in _TAGGED:
                return _TAGGED[value]
            if _FLOAT.fullmatch(value) and math.isfinite(number := float(value)):
                return number
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r} is given twice")
    return result
