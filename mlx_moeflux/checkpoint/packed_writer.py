"""Writing the packed directory: layer by layer, each file whole or absent, the index last.

A layer grows under a temporary name; its hash is taken from the finished file. What is finished
is noted in ``experts/.progress.json``, so that a killed conversion goes on with the next layer.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from mlx_moeflux.checkpoint.files import read_exact, read_json_object, write_atomically
from mlx_moeflux.checkpoint.packed_format import (
    EXPERTS_DIRECTORY,
    HASH_BYTES,
    INDEX_NAME,
    PROGRESS_NAME,
    ComponentLike,
    LayerFile,
    PackedIndex,
)
from mlx_moeflux.errors import ExpertFileError

_HASH_CHUNK = 8 << 20


def hash_file(file: Path, size: int, report: Callable[[int], None] = lambda count: None) -> str:
    """blake2b of the first `size` bytes of a file, hex; `report` is told of each chunk's bytes."""
    hasher = hashlib.blake2b(digest_size=HASH_BYTES)
    buffer = memoryview(bytearray(min(_HASH_CHUNK, size)))
    with open(file, "rb", buffering=0) as handle:
        for start in range(0, size, _HASH_CHUNK):
            part = buffer[: min(_HASH_CHUNK, size - start)]
            read_exact(handle.fileno(), part, offset=start, file=file, error=ExpertFileError)
            hasher.update(part)
            report(part.nbytes)
    return hasher.hexdigest()


class LayerWriter:
    """One layer file under way; made by :meth:`PackedWriter.layer`."""

    def __init__(self, file: Path, entry: LayerFile, num_experts: int):
        self._temporary, self._file = file.with_name(f"{file.name}.tmp"), file
        self._by_name = {component.name: component for component in entry.components}
        self.entry, self.num_experts, self._written = entry, num_experts, 0
        self._fd = os.open(self._temporary, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o644)
        os.ftruncate(self._fd, entry.stride * num_experts)

    def write(self, expert: int, component: str, row: int, data: bytes | memoryview) -> None:
        """Put whole rows of a component at `row` of axis 0.

        Raises:
            ExpertFileError: The disk is full or failed.
        """
        part, view = self._by_name[component], memoryview(data).cast("B")
        offset = row * part.row_bytes
        assert 0 <= expert < self.num_experts, expert
        assert offset + view.nbytes <= part.nbytes, component
        position = expert * self.entry.stride + part.offset + offset
        self._written += view.nbytes
        while view.nbytes:
            count = os.pwrite(self._fd, view[: 1 << 30], position)
            view, position = view[count:], position + count

    def _finish(self) -> LayerFile:
        expected = self.entry.block_bytes * self.num_experts
        if self._written != expected:
            raise ExpertFileError(
                f"{self._file} was given {self._written} of {expected} bytes; every component of "
                "every expert must be written once."
            )
        os.fsync(self._fd)
        self._close()
        digest = hash_file(self._temporary, self.entry.stride * self.num_experts)
        os.replace(self._temporary, self._file)
        return replace(self.entry, blake2b=digest)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _discard(self) -> None:
        self._close()
        self._temporary.unlink(missing_ok=True)


class PackedWriter:
    """Writes ``experts/``; as a context manager, leaving it normally writes the index.

    directory: The checkpoint directory; made if absent. source_identity: What is written; an
    unfinished directory of the same source goes on, of another is refused.

    Raises:
        ExpertFileError: The directory holds something else, or the disk is full or failed.
    """

    def __init__(self, directory: str | os.PathLike[str], num_experts: int, source_identity: str):
        self.directory = Path(directory) / EXPERTS_DIRECTORY
        self.num_experts, self.source = num_experts, source_identity
        self._finished: dict[int, LayerFile] = {}

    def __enter__(self) -> PackedWriter:
        self.directory.mkdir(parents=True, exist_ok=True)
        progress, index = self.directory / PROGRESS_NAME, self.directory / INDEX_NAME
        for file in (progress, index):
            if file.exists():
                found = PackedIndex.from_json(read_json_object(file, error=ExpertFileError), file)
                if (found.source, found.num_experts) != (self.source, self.num_experts):
                    raise ExpertFileError(
                        f"{self.directory} holds the experts of another conversion; remove it or "
                        "choose another directory."
                    )
                self._finished = dict(found.layers)
                break
        for leftover in self.directory.glob("*.tmp"):
            leftover.unlink()
        self._finished = {
            layer: entry for layer, entry in self._finished.items() if self._is_whole(entry)
        }
        return self

    def __exit__(self, kind, value, trace) -> None:
        if kind is None:
            self._save(INDEX_NAME)
            (self.directory / PROGRESS_NAME).unlink(missing_ok=True)

    def done(self, layer: int) -> bool:
        """Whether this layer's file is finished, perhaps by an earlier run."""
        return layer in self._finished

    def layer(self, layer: int, components: Iterable[ComponentLike]) -> _LayerContext:
        """``with writer.layer(3, components) as out: out.write(...)``."""
        return _LayerContext(self, layer, LayerFile.plan(layer, components))

    def _is_whole(self, entry: LayerFile) -> bool:
        file = self.directory / entry.file
        return file.is_file() and file.stat().st_size == entry.stride * self.num_experts

    def _save(self, name: str) -> None:
        index = PackedIndex(self.num_experts, self._finished, self.source)
        text = json.dumps(index.to_json(), indent=1) + "\n"
        write_atomically(self.directory / name, text.encode())

    def _note(self, layer: int, entry: LayerFile) -> None:
        self._finished[layer] = entry
        self._save(PROGRESS_NAME)


class _LayerContext:
    """Opens a layer file, and finishes or discards it."""

    def __init__(self, writer: PackedWriter, layer: int, entry: LayerFile):
        self._writer, self._layer, self._entry = writer, layer, entry

    def __enter__(self) -> LayerWriter:
        with _told(self._entry, self._writer):
            file = self._writer.directory / self._entry.file
            self._out = LayerWriter(file, self._entry, self._writer.num_experts)
        return self._out

    def __exit__(self, kind, value, trace) -> None:
        try:
            with _told(self._entry, self._writer):
                if isinstance(value, OSError):
                    raise value
                if kind is None:
                    self._writer._note(self._layer, self._out._finish())
        finally:
            self._out._discard()


class _told:
    """Turns an OSError of writing a layer into one sentence."""

    def __init__(self, entry: LayerFile, writer: PackedWriter):
        self._file, self._bytes = writer.directory / entry.file, entry.stride * writer.num_experts

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, value, trace) -> None:
        if not isinstance(value, OSError):
            return
        why = value.strerror or str(value)
        if value.errno == errno.ENOSPC:
            why = f"the disk is full, {self._bytes} bytes are needed; make room and go on"
        raise ExpertFileError(f"Writing {self._file} failed: {why}.") from value
