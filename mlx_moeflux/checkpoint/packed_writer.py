"""Writing the packed directory so that a crash at any moment loses at most one layer.

A layer is written to ``layer_NN.bin.tmp``, hashed, synced and renamed; only then is it listed in
``.progress.json``, which a later run with the same source reads to skip it. ``index.json``, which
makes the directory a checkpoint, comes last and takes the place of the progress file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from mlx_moeflux.checkpoint.files import (
    TEMPORARY_SUFFIX,
    hash_file,
    read_json_object,
    sync_directory,
    unreadable,
    write_atomically,
)
from mlx_moeflux.checkpoint.packed_format import (
    EXPERTS_DIRECTORY,
    INDEX_NAME,
    PROGRESS_NAME,
    ComponentLike,
    LayerFile,
    PackedComponent,
    PackedIndex,
    TrunkFile,
)
from mlx_moeflux.errors import CheckpointError, ExpertFileError

_OURS = re.compile(
    r"(layer_\d{2,}\.bin|index\.json|\.progress\.json)" + re.escape(TEMPORARY_SUFFIX)
)
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Buffer = Any
"""Anything whose memory a C-contiguous ``memoryview`` can show: bytes, bytearray, numpy, mlx."""


class PackedWriter:
    """Writes ``experts/`` of one checkpoint directory, layer by layer, in any order of layers.

    ``source_identity`` names what is converted and how (a hash): layers that an interrupted run
    with the same identity finished count as :meth:`done`, those of another identity are removed.
    Raises ExpertFileError if the directory already holds the finished experts of another source.
    """

    def __init__(
        self, directory: str | os.PathLike[str], num_experts: int, source_identity: str
    ) -> None:
        if num_experts < 1:
            raise ExpertFileError(f"{directory} cannot get {num_experts} experts a layer.")
        self.directory = Path(directory)
        self.experts = self.directory / EXPERTS_DIRECTORY
        self.num_experts, self.source = num_experts, source_identity
        self._layers: dict[int, LayerFile] = {}
        try:
            self.experts.mkdir(parents=True, exist_ok=True)
            for file in list(self.experts.iterdir()):
                if _OURS.fullmatch(file.name):
                    file.unlink()
            self._resume()
        except OSError as cause:
            raise ExpertFileError(
                f"{self.experts} cannot be prepared: {cause.strerror or cause}; choose a"
                " directory that can be written."
            ) from cause

    def done(self, layer: int) -> bool:
        """Whether a finished file of this layer, from the same source, is there to be kept."""
        entry = self._layers.get(layer)
        if entry is None:
            return False
        file = self.experts / entry.file
        return file.is_file() and file.stat().st_size == entry.stride * self.num_experts

    def layer(self, layer: int, components: Iterable[ComponentLike]) -> LayerWriter:
        """A context manager that writes one layer; its file appears when the block ends well.

        ``components`` are those of one expert in block order, such as ``BlockLayout.components``.
        """
        return LayerWriter(self, layer, LayerFile.plan(layer, components))

    def finish(self, layers: Iterable[int] | None = None, *, trunk: Iterable[str] = ()) -> None:
        """Write ``index.json``: the directory is a checkpoint from then on.

        ``layers`` are all that must be done (default: those that are); ExpertFileError if one
        is not. ``trunk`` are the names of the finished files of the trunk in the directory, to be
        hashed. Calling it again changes nothing.
        """
        wanted = sorted(self._layers if layers is None else layers)
        missing = [layer for layer in wanted if not self.done(layer)]
        if missing or not wanted:
            raise ExpertFileError(
                f"{self.experts} cannot be finished: layer {missing[0]} is not written."
                if missing
                else f"{self.experts} cannot be finished: no layer is written."
            )
        files = tuple(_hashed(self.directory, name) for name in trunk)
        self._write(INDEX_NAME, {layer: self._layers[layer] for layer in wanted}, files)
        try:
            (self.experts / PROGRESS_NAME).unlink(missing_ok=True)
            sync_directory(self.experts)
        except OSError as cause:
            raise_write_error(self.experts / PROGRESS_NAME, cause, needed=0)

    def _resume(self) -> None:
        """Take over what an earlier run finished, or clear away what it left."""
        foreign = (
            f"{self.experts} already holds the experts of another checkpoint or quantisation;"
            " delete it or choose another directory."
        )
        try:
            index = self._read(INDEX_NAME)
        except ExpertFileError as cause:
            raise ExpertFileError(foreign) from cause
        if index is not None:
            if (index.source, index.num_experts) != (self.source, self.num_experts):
                raise ExpertFileError(foreign)
            self._layers = dict(index.layers)
            return
        try:
            progress = self._read(PROGRESS_NAME)
        except ExpertFileError:
            (self.experts / PROGRESS_NAME).unlink()
            return
        if progress is None:
            return
        if (progress.source, progress.num_experts) == (self.source, self.num_experts):
            self._layers = dict(progress.layers)
            return
        for entry in progress.layers.values():
            (self.experts / entry.file).unlink(missing_ok=True)
        (self.experts / PROGRESS_NAME).unlink()

    def _read(self, name: str) -> PackedIndex | None:
        file = self.experts / name
        if not file.exists():
            return None
        return PackedIndex.from_json(read_json_object(file, error=ExpertFileError), file)

    def _add(self, layer: int, entry: LayerFile) -> None:
        self._layers[layer] = entry
        self._write(PROGRESS_NAME, self._layers)

    def _write(
        self, name: str, layers: dict[int, LayerFile], trunk: tuple[TrunkFile, ...] = ()
    ) -> None:
        index = PackedIndex(self.num_experts, layers, self.source, trunk)
        content = json.dumps(index.to_json(), indent=1).encode() + b"\n"
        try:
            write_atomically(self.experts / name, content)
        except OSError as cause:
            raise_write_error(self.experts / name, cause, needed=len(content))


class LayerWriter:
    """Writes the blocks of one layer at their places, in any order and from any thread.

    A context manager: leaving it after an error removes the temporary file, leaving it well checks
    that every row of every expert was written, and gives the file its name.
    """

    def __init__(self, writer: PackedWriter, layer: int, plan: LayerFile) -> None:
        self.layer, self.plan = layer, plan
        self._writer = writer
        self._target = writer.experts / plan.file
        self._file = self._target.with_name(plan.file + TEMPORARY_SUFFIX)
        self._components = {component.name: component for component in plan.components}
        self._fd = -1
        # One byte for every row of every expert: tells a hole from a finished file exactly.
        self._written = {
            component.name: bytearray(writer.num_experts * component.shape[0])
            for component in plan.components
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.plan.stride * self._writer.num_experts

    def write_expert(self, expert: int, parts: Sequence[Buffer]) -> None:
        """Write a whole block: one buffer for each component, in block order."""
        if len(parts) != len(self.plan.components):
            raise ExpertFileError(
                f"Layer {self.layer} has {len(self.plan.components)} components, but"
                f" {len(parts)} buffers were given for expert {expert}."
            )
        views = [_bytes_of(part) for part in parts]
        for component, view in zip(self.plan.components, views, strict=True):
            if view.nbytes != component.nbytes:
                raise self._wrong_size(component, expert, 0, view.nbytes)
        self._check_expert(expert)
        self._write_at(expert * self.plan.stride, views)
        for component in self.plan.components:
            self._mark(component, expert, 0, component.shape[0])

    def write(self, expert: int, component: str, row_start: int, data: Buffer) -> None:
        """Write rows of one component of one expert, from ``row_start`` on: whole rows only."""
        self._check_expert(expert)
        if component not in self._components:
            raise ExpertFileError(
                f"Layer {self.layer} has no component {component!r}; it has"
                f" {', '.join(self._components)}."
            )
        part, view = self._components[component], _bytes_of(data)
        rows, rest = divmod(view.nbytes, part.row_bytes)
        if rest or row_start < 0 or row_start + rows > part.shape[0]:
            raise self._wrong_size(part, expert, row_start, view.nbytes)
        start = expert * self.plan.stride + part.offset + row_start * part.row_bytes
        self._write_at(start, [view])
        self._mark(part, expert, row_start, rows)

    def __enter__(self) -> LayerWriter:
        try:
            self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            _reserve(self._fd, self.nbytes)
        except BaseException as cause:
            self._abandon()
            if isinstance(cause, OSError):
                raise_write_error(self._file, cause, needed=self.nbytes)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._commit()
        finally:
            self._abandon()

    def _commit(self) -> None:
        for component in self.plan.components:
            hole = self._written[component.name].find(0)
            if hole >= 0:
                expert, row = divmod(hole, component.shape[0])
                raise ExpertFileError(
                    f"Layer {self.layer} is not complete: row {row} of {component.name} of expert"
                    f" {expert} was not written."
                )
        try:
            os.fsync(self._fd)
            digest = hash_file(self._file, size=self.nbytes, error=ExpertFileError)
            os.replace(self._file, self._target)
            sync_directory(self._target.parent)
        except OSError as cause:
            raise_write_error(self._file, cause, needed=self.nbytes)
        self._writer._add(self.layer, replace(self.plan, blake2b=digest))

    def _abandon(self) -> None:
        """Close, and remove the temporary file where it still has that name."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._file.unlink(missing_ok=True)

    def _write_at(self, offset: int, views: list[memoryview]) -> None:
        views = [view for view in views if view.nbytes]
        while views:
            try:
                count = os.pwritev(self._fd, views, offset)
            except OSError as cause:
                raise_write_error(self._file, cause, needed=self.nbytes, offset=offset)
            offset += count
            while views and count >= views[0].nbytes:
                count -= views.pop(0).nbytes
            if count:
                views[0] = views[0][count:]

    def _check_expert(self, expert: int) -> None:
        if self._fd < 0:
            raise ExpertFileError(f"Layer {self.layer} is closed; write inside its with block.")
        if not 0 <= expert < self._writer.num_experts:
            raise ExpertFileError(
                f"Layer {self.layer} has {self._writer.num_experts} experts: there is no {expert}."
            )

    def _mark(self, component: PackedComponent, expert: int, row: int, rows: int) -> None:
        start = expert * component.shape[0] + row
        self._written[component.name][start : start + rows] = b"\1" * rows

    def _wrong_size(
        self, component: PackedComponent, expert: int, row: int, nbytes: int
    ) -> ExpertFileError:
        return ExpertFileError(
            f"{nbytes} bytes at row {row} of {component.name} of expert {expert} do not fit:"
            f" {component.dtype} {list(component.shape)} has rows of {component.row_bytes} bytes."
        )


def raise_write_error(
    file: Path, cause: OSError, *, needed: int, offset: int | None = None
) -> NoReturn:
    """Turn a failed write into one sentence; a full disk says what was needed and what is free."""
    place = str(file) if offset is None else f"{file} at offset {offset}"
    reason = cause.strerror or str(cause)
    if cause.errno in _DISK_FULL:
        try:
            free = f"{shutil.disk_usage(file.parent).free} are free"
        except OSError:
            free = "free space is unknown"
        raise ExpertFileError(
            f"Writing {place} failed: {reason}; the file needs {needed} bytes and {free}: make"
            " room, then run the same command again, which keeps the finished layers."
        ) from cause
    raise ExpertFileError(
        f"Writing {place} failed: {reason}; finished layers are kept, run the same command again."
    ) from cause


def _hashed(directory: Path, name: str) -> TrunkFile:
    file = directory / name
    try:
        size = file.stat().st_size
    except OSError as cause:
        raise unreadable(file, cause) from cause
    return TrunkFile(name, size, hash_file(file, size=size, error=CheckpointError))


def _reserve(fd: int, size: int) -> None:
    """Make the file ``size`` bytes long, on reserved space where the system can do that.

    A full disk then shows before the work, and chunks written out of order lie together.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:
        os.ftruncate(fd, size)
    except OSError as cause:
        if cause.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)


def _bytes_of(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")
