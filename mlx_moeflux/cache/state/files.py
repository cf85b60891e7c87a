"""Arrays and facts in one safetensors file, verified by a digest.

``__metadata__`` holds ``format``, ``version``, the facts of the format (strings), and ``digest``:
BLAKE2b of everything else, header and data. The same content gives the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache.state.spec import DTYPE_CODES, ArraySpec
from mlx_moeflux.checkpoint.files import (
    HASH_BYTES,
    TEMPORARY_SUFFIX,
    check_replaceable,
    opened,
    sync_directory,
)
from mlx_moeflux.checkpoint.tensors import TensorRef, mlx_dtype, read_header
from mlx_moeflux.errors import CacheError, CheckpointError


@dataclass(frozen=True)
class Format:
    """Name of a kind of file and the version that this package writes and reads."""

    name: str
    version: int


@dataclass(frozen=True)
class HostArray:
    """Bytes of an evaluated array; any thread may read them."""

    spec: ArraySpec
    data: memoryview


def to_host(arrays: Mapping[str, mx.array]) -> dict[str, HostArray]:
    """Return views of the arrays' bytes. Evaluates: all of them."""
    # numpy has no bfloat16: view 16-bit floats as integers.
    plain = {n: a.view(mx.uint16) if a.itemsize == 2 else a for n, a in arrays.items()}
    mx.eval(plain)
    return {
        name: HostArray(
            ArraySpec(DTYPE_CODES[arrays[name].dtype], tuple(array.shape)),
            np.ascontiguousarray(np.asarray(array)).data.cast("B"),
        )
        for name, array in plain.items()
    }


class StateFile:
    """A file with a checked header; made by :func:`open_file`.

    facts: The strings of the format. specs: name -> dtype and shape.
    """

    def __init__(self, path: Path, facts: dict[str, str], refs: dict[str, TensorRef], digest: str):
        self.path, self.facts, self._refs, self._digest = path, facts, refs, digest
        self.specs = {name: ArraySpec(ref.dtype, ref.shape) for name, ref in refs.items()}

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(ref.nbytes for ref in self._refs.values())

    def number(self, name: str) -> int:
        """Return a fact that must be an integer >= 0."""
        text = self.facts.get(name, "")
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise CacheError(f"{self.path} has {name!r} {text!r}, not a number; remove the file.")
        return int(text)

    def json(self, name: str) -> Any:
        """Return a fact that must be JSON."""
        try:
            return json.loads(self.facts[name])
        except (KeyError, ValueError, RecursionError) as error:
            raise CacheError(f"{self.path} has no readable {name!r}; remove the file.") from error

    def array(self, name: str) -> mx.array:
        """Read one array without verifying the digest."""
        if name not in self._refs:
            raise CacheError(f"{self.path} has no array {name!r}; remove the file.")
        ref = self._refs[name]
        array = _to_mlx(_host(ref, np.empty(ref.nbytes, np.uint8)))
        mx.eval(array)
        return array

    def read(self) -> dict[str, mx.array]:
        """Read all arrays and verify the digest.

        Raises:
            CacheError: The file is damaged.
        """
        hasher, loaded, position = _hasher(self.facts, self.specs), {}, 0
        # One allocation: the system gives it larger pages than many small ones.
        memory = np.empty(self.nbytes, np.uint8)
        # Another thread hashes an array while this one reads the next.
        with ThreadPoolExecutor(1) as pool:
            hashed = []
            for name, ref in sorted(self._refs.items()):
                array = _host(ref, memory[position : position + ref.nbytes])
                position += ref.nbytes
                hashed.append(pool.submit(hasher.update, array.data))
                loaded[name] = _to_mlx(array)
            mx.eval(loaded)
            for job in hashed:
                job.result()
        if hasher.hexdigest() != self._digest:
            raise CacheError(f"{self.path} is damaged: its digest does not match; remove the file.")
        return loaded


def open_file(path: str | os.PathLike[str], format: Format) -> StateFile:
    """Read and check the header.

    Raises:
        CacheError: It cannot be read, is cut short, or is of another format or version.
    """
    path = Path(path)
    try:
        refs, size = read_header(path)
        with opened(path) as fd:
            facts = json.loads(os.pread(fd, size, 0)[8:]).get("__metadata__") or {}
    except (CheckpointError, OSError) as error:
        why = str(error).rstrip(".")
        raise CacheError(f"No readable {format.name} file: {why}.") from error
    if facts.get("format") != format.name:
        raise CacheError(
            f"{path} is no {format.name} file (format {facts.get('format')!r}); give one that "
            "this package wrote."
        )
    if facts.get("version") != str(format.version):
        raise CacheError(
            f"{path} has version {facts.get('version')!r} of {format.name}, this package reads "
            f"{format.version}; write it anew."
        )
    return StateFile(path, facts, refs, facts.pop("digest", ""))


def write_file(
    path: str | os.PathLike[str],
    format: Format,
    *,
    facts: Mapping[str, str],
    arrays: Mapping[str, HostArray],
) -> int:
    """Write a file atomically and return its size in bytes.

    Raises:
        CacheError: The disk is full or failed; an earlier file of this name is unchanged.
    """
    path = Path(path)
    facts = {"format": format.name, "version": str(format.version), **facts}
    arrays = dict(sorted(arrays.items()))
    metadata: dict[str, Any] = dict(sorted({**facts, "digest": _digest(facts, arrays)}.items()))
    header, position = {"__metadata__": metadata}, 0
    for name, array in arrays.items():
        end = position + array.data.nbytes
        header[name] = {
            "dtype": array.spec.dtype,
            "shape": list(array.spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces = [len(text).to_bytes(8, "little") + text, *(a.data for a in arrays.values())]
    try:
        _write(path, pieces)
    except OSError as error:
        size = 8 + len(text) + position
        why = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            why = f"the disk is full, {size} bytes are needed; make room"
        raise CacheError(f"Writing {path} failed: {why}.") from error
    return 8 + len(text) + position


def _write(path: Path, pieces: list[bytes | memoryview]) -> None:
    check_replaceable(path)
    # A unique name: two processes may write the same file concurrently.
    fd, temporary = tempfile.mkstemp(TEMPORARY_SUFFIX, f".{path.name}.", path.parent)
    try:
        with open(fd, "wb") as handle:
            for piece in pieces:
                handle.write(piece)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def _digest(facts: Mapping[str, str], arrays: Mapping[str, HostArray]) -> str:
    hasher = _hasher(facts, {name: array.spec for name, array in arrays.items()})
    for name in sorted(arrays):
        hasher.update(arrays[name].data)
    return hasher.hexdigest()


def _hasher(facts: Mapping[str, str], specs: Mapping[str, ArraySpec]) -> hashlib.blake2b:
    """Return the digest's hasher before the arrays' bytes, which follow in order of names."""
    described = {name: [spec.dtype, list(spec.shape)] for name, spec in specs.items()}
    hasher = hashlib.blake2b(digest_size=HASH_BYTES)
    hasher.update(json.dumps([dict(facts), described], sort_keys=True).encode())
    return hasher


def _host(ref: TensorRef, raw: np.ndarray) -> HostArray:
    try:
        ref.read_into(raw.data)
    except CheckpointError as error:
        raise CacheError(f"{ref.file} cannot be read ({str(error).rstrip('.')}).") from error
    return HostArray(ArraySpec(ref.dtype, ref.shape), raw.data)


def _to_mlx(array: HostArray) -> mx.array:
    loaded = mx.array(np.frombuffer(array.data, np.uint8)).view(mlx_dtype(array.spec.dtype))
    return loaded.reshape(array.spec.shape)
