"""The container of GGUF: metadata and where each tensor lies.

    magic GGUF, version, number of tensors, number of keys
    each key: name, type, value
    each tensor: name, axes from the innermost, type, offset
    the tensors, each at a multiple of `general.alignment`

Numbers are little-endian; a text is its length in bytes and UTF-8.

Source: ggml's `docs/gguf.md`, versions 2 and 3.
"""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlx_moeflux.checkpoint.blocks import TYPES, BlockType
from mlx_moeflux.checkpoint.files import LFS_POINTER, opened, refuse_pointer, unreadable
from mlx_moeflux.errors import CheckpointError, UnsupportedError

MAGIC, VERSIONS = b"GGUF", (2, 3)
# A header with 250,000 tokens and as many merges has 12 MB and 750,000 values.
MOST_HEADER_BYTES, MOST_VALUES, MOST_TENSORS = 256 << 20, 4_000_000, 1_000_000
# Axes of a tensor in ggml.
MOST_AXES = 4
ALIGNMENT = 32
_READ_BYTES = 4 << 20

# Number of a type of values -> its form for `struct`; besides there are texts and arrays.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _TEXT, _ARRAY = 7, 8, 9


class StoredTensor(NamedTuple):
    """A tensor of a file. shape: In elements, the outermost axis first. offset: In the file."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.kind.elements * self.kind.nbytes


class Container(NamedTuple):
    """A file. metadata: Key -> text, number, truth value or list of such. header_bytes: Up to the
    end of what says where tensors are."""

    metadata: dict[str, Any]
    tensors: list[StoredTensor]
    header_bytes: int


def read_container(file: Path) -> Container:
    """Read the header of a file; no tensor. A tensor may end behind the file.

    Raises:
        CheckpointError: The file cannot be read, is none of GGUF or is damaged.
        UnsupportedError: It is of another version or byte order, or a tensor
        has an unknown type.
    """
    with opened(file) as fd:
        return _Header(file, fd).container()


class _Header:
    """The bytes of a header, of which `at` are read. They come from the file as they are needed."""

    def __init__(self, file: Path, fd: int) -> None:
        self._file, self._fd, self._size = file, fd, os.fstat(fd).st_size
        self._data, self._at, self._values = b"", 0, 0

    def container(self) -> Container:
        """Read all of it; see :func:`read_container`."""
        if (start := self._bytes(4)) != MAGIC:
            rest = self._bytes(min(self._size, len(LFS_POINTER)) - len(start))
            refuse_pointer(start + rest, self._file)
            raise CheckpointError(f"{self._file} is no GGUF file; download it again.")
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "big-endian" if swapped else f"version {version}"
            raise UnsupportedError(
                f"{self._file} is GGUF of {what}; little-endian versions 2 and 3 are read, so "
                "convert the model again."
            )
        tensors, keys = self._number("Q"), self._number("Q")
        if tensors > MOST_TENSORS or keys > MOST_VALUES:
            raise self._damaged(f"{tensors} tensors and {keys} keys are too many")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text()
            if key in metadata:
                raise self._damaged(f"the key {key[:60]!r} is there twice")
            metadata[key] = self._value(self._number("I"), key)
        stored = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"'general.alignment' is {alignment!r}")
        first = -(-self._at // alignment) * alignment
        names = [tensor.name for tensor in stored]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise self._damaged(f"the tensor {twice[:60]!r} is there twice")
        placed = [tensor._replace(offset=first + tensor.offset) for tensor in stored]
        return Container(metadata, placed, self._at)

    def _tensor(self) -> StoredTensor:
        """Read where a tensor is, its offset among the tensors."""
        name, axes = self._text(), self._number("I")
        if axes > MOST_AXES:
            raise self._damaged(f"{name[:60]!r} has {axes} axes")
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = TYPES.get(number)
        if kind is None:
            raise UnsupportedError(
                f"{self._file}: '{name[:60]}' is of type {number}, which nothing here knows; use "
                "another quantisation of the model."
            )
        if shape and shape[-1] % kind.elements:
            raise self._damaged(
                f"rows of {name[:60]!r} have {shape[-1]} elements, no whole blocks of {kind.name}"
            )
        if prod(shape) >= 1 << 62 or offset >= 1 << 62:
            raise self._damaged(f"{name[:60]!r} has shape {list(shape)} at {offset}")
        return StoredTensor(name, kind, shape, offset)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _ARRAY:
            return self._array(key)
        self._count(1)
        if kind == _TEXT:
            return self._text()
        if kind == _BOOL:
            return bool(self._number("B"))
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        raise self._damaged(f"{key[:60]!r} is of type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        self._count(count)
        if kind == _TEXT:
            return self._texts(count)
        form = "B" if kind == _BOOL else _NUMBERS.get(kind)
        if form is None:
            raise self._damaged(f"{key[:60]!r} is an array of type {kind}")
        data = self._bytes(count * struct.calcsize(f"<{form}"))
        values = np.frombuffer(data, np.dtype(form).newbyteorder("<"))
        return (values.astype(bool) if kind == _BOOL else values).tolist()

    def _texts(self, count: int) -> list[str]:
        """Read `count` texts; a loop for hundreds of thousands."""
        texts, length_of = [], struct.Struct("<Q").unpack_from
        for _ in range(count):
            if self._at + 8 > len(self._data):
                self._need(8)
            start = self._at + 8
            stop = start + length_of(self._data, self._at)[0]
            if stop > len(self._data):
                self._need(stop - self._at)
            texts.append(self._data[start:stop])
            self._at = stop
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError as cause:
            raise self._damaged("a text is no UTF-8") from cause

    def _text(self) -> str:
        return self._texts(1)[0]

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0]

    def _bytes(self, count: int) -> bytes:
        self._need(count)
        self._at += count
        return self._data[self._at - count : self._at]

    def _count(self, values: int) -> None:
        """Raise CheckpointError if there are too many values with so many more."""
        self._values += values
        if self._values > MOST_VALUES:
            raise self._damaged(f"the header has more than {MOST_VALUES} values")

    def _need(self, count: int) -> None:
        """Read on until `count` more bytes are there.

        Raises:
            CheckpointError: The file ends before, or the header is too long.
        """
        wanted = self._at + count
        if wanted > min(self._size, MOST_HEADER_BYTES):
            what = "the file ends" if wanted > self._size else f"{MOST_HEADER_BYTES} bytes end"
            raise self._damaged(f"{what} within the header, at offset {self._at}")
        while len(self._data) < wanted:
            missing = max(wanted - len(self._data), _READ_BYTES)
            try:
                more = os.pread(self._fd, missing, len(self._data))
            except OSError as cause:
                raise unreadable(self._file, cause) from cause
            if not more:
                raise self._damaged(f"the file ends within the header, at offset {self._at}")
            self._data += more

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file} is a damaged GGUF file: {what}; download it again.")
