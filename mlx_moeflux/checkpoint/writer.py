"""Writing safetensors bit by bit: any tensor in any order, nothing held whole, all or nothing.

The headers follow from names, dtypes and shapes alone, so every byte's place is known before the
first is written. Files carry a temporary name until :meth:`SafetensorsWriter.finish`.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_moeflux.checkpoint.files import (
    in_groups,
    open_regular,
    tagged,
    write_atomically,
    write_exact,
)
from mlx_moeflux.checkpoint.tensors import INDEX_NAME, SINGLE_NAME, Shaped
from mlx_moeflux.errors import CheckpointError

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Tensor(Shaped):
    """A tensor to be written: safetensors dtype code and shape."""

    dtype: str
    shape: tuple[int, ...]


class SafetensorsWriter:
    """Writes ``model.safetensors``, or shards with an index above `shard_bytes`.

    Use as a context manager: leaving it by an exception removes what was written.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, Tensor],
        *,
        metadata: Mapping[str, str],
        shard_bytes: int = SHARD_BYTES,
    ):
        self.directory, self.total_bytes = directory, sum(t.nbytes for t in tensors.values())
        self._metadata = dict(metadata)
        self._place: dict[
            str, tuple[int, int, int]
        ] = {}  # name -> shard, offset in its data, bytes
        names = iter(tensors)
        self._shards = [
            {next(names): tensor for tensor in group}
            for group in in_groups(tensors.values(), shard_bytes)
        ] or [{}]
        count = len(self._shards)
        self._names = [SINGLE_NAME]
        if count > 1:
            self._names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        self._fds: list[int] = []
        self._data_starts: list[int] = []

    @property
    def files(self) -> list[str]:
        """Names of all files that are there in the end."""
        return self._names + [INDEX_NAME] * (len(self._names) > 1)

    def __enter__(self) -> SafetensorsWriter:
        try:
            for number, shard in enumerate(self._shards):
                flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR
                self._fds.append(open_regular(self._temporary(number), flags, 0o644))
                self._start(number, shard)
        except BaseException as error:
            self._discard()
            if isinstance(error, OSError):
                raise self._failed(error) from error
            raise
        return self

    def __exit__(self, kind, value, trace) -> None:
        if kind is None:
            self.finish()
        else:
            self._discard()

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Put bytes at `offset` inside a tensor.

        Raises:
            CheckpointError: The disk is full or failed.
        """
        number, start, size = self._place[name]
        start += self._data_starts[number] + offset
        view = memoryview(data).cast("B")
        assert offset + view.nbytes <= size, name
        try:
            write_exact(self._fds[number], view, offset=start)
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Make everything durable under its final name, the index last."""
        try:
            for number, name in enumerate(self._names):
                os.fsync(self._fds[0])
                os.close(self._fds.pop(0))
                os.replace(self._temporary(number), self.directory / name)
        except BaseException as error:
            self._discard()
            if isinstance(error, OSError):
                raise self._failed(error) from error
            raise
        if len(self._shards) > 1:
            where = {n: self._names[place[0]] for n, place in self._place.items()}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": where}
            write_json(self.directory / INDEX_NAME, index)

    def _start(self, number: int, shard: Mapping[str, Tensor]) -> None:
        entries: dict[str, Any] = {"__metadata__": self._metadata}
        position = 0
        for name, tensor in shard.items():
            span = [position, position + tensor.nbytes]
            shape = list(tensor.shape)
            entries[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": span}
            self._place[name] = (number, position, tensor.nbytes)
            position = span[1]
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        header = len(header).to_bytes(8, "little") + header
        write_exact(self._fds[number], memoryview(header), offset=0)
        os.ftruncate(self._fds[number], len(header) + position)
        self._data_starts.append(len(header))

    def _temporary(self, number: int) -> Path:
        return self.directory / f"{self._names[number]}.tmp"

    def _discard(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        for number in range(len(self._shards)):
            self._temporary(number).unlink(missing_ok=True)

    def _failed(self, error: OSError) -> CheckpointError:
        why = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            why = f"the disk is full, {self.total_bytes} bytes are needed; make room and try again"
        return CheckpointError(f"Writing {self.directory / self._names[0]} failed: {why}.")


def write_json(file: Path, value: object) -> None:
    """Write JSON so that readers see all of it or what was there before; floats that JSON cannot
    spell in transformers' form.

    Raises:
        CheckpointError: The disk is full or failed.
    """
    try:
        write_atomically(file, (json.dumps(tagged(value), indent=2) + "\n").encode())
    except OSError as error:
        raise CheckpointError(f"Writing {file} failed: {error.strerror or error}.") from error
