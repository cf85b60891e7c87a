"""The packed directory: blobs of experts beside an ordinary trunk; opened, verified and written.

``experts/layer_NN.bin`` holds E blocks at a fixed stride, a multiple of 16 KiB. A block is the
components of one expert, one after the other in :data:`COMPONENT_ORDER`; their offsets follow
from the shapes and are stored nowhere. The rest of the stride is zero. The index holds a checksum
of each block, which readers verify, a hash of each file, and one of itself.

A crash while writing loses at most one layer: it is written to ``layer_NN.bin.tmp``, hashed, synced
and renamed; only then is it listed in ``.progress.json``, which a later run with the same source
reads to skip it. ``index.json``, which makes the directory a checkpoint, comes last and takes the
place of the progress file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from mlx_moeflux.checkpoint.files import (
    HASH_BYTES,
    TEMPORARY_SUFFIX,
    Progress,
    counted,
    hash_file,
    inside_path,
    opened,
    read_exact,
    read_json_object,
    size_of,
    sync_directory,
    write_atomically,
    write_exact,
)
from mlx_moeflux.checkpoint.names import COMPONENT_ORDER
from mlx_moeflux.checkpoint.tensors import ITEMSIZE, Blocks, Shaped, block_refs, check_layer
from mlx_moeflux.checks import is_positive, is_shape
from mlx_moeflux.errors import CheckpointError, ExpertFileError, MoefluxError

FORMAT = "mlx_moeflux.experts"
VERSION = 1
ALIGNMENT = 16384
"""Blocks start at multiples of this many bytes: a page of every platform, and of direct I/O."""

EXPERTS_DIRECTORY = "experts"
INDEX_NAME = "index.json"
PROGRESS_NAME = ".progress.json"
TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PackedComponent(Shaped):
    """One tensor of every block of a layer file, and where in the block it begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of axis 0."""
        return self.nbytes // self.shape[0]

    def to_json(self) -> dict[str, object]:
        """The component's entry of the index."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class LayerFile:
    """One layer file: its name in the experts directory, block layout and hash (hex).

    checksums: CRC-32 of each block; empty in an index of before they were added.
    """

    file: str
    components: tuple[PackedComponent, ...]
    stride: int
    blake2b: str = ""
    checksums: tuple[int, ...] = ()

    @classmethod
    def plan(cls, layer: int, components: Iterable[Any]) -> LayerFile:
        """The file for a layer to be written; ExpertFileError if the components are not usable.

        Each has a name such as ``gate_proj.weight``, a safetensors dtype and one expert's shape.
        """
        entries = [PackedComponent(c.name, c.dtype, c.shape, 0).to_json() for c in components]
        name = f"layer_{layer:02d}.bin"
        parsed = _components(entries, Path(name), f"layer {layer}")
        return cls(name, parsed, -(-_block_bytes(parsed) // ALIGNMENT) * ALIGNMENT)

    def to_json(self, num_experts: int) -> dict[str, object]:
        """The layer's entry of the index."""
        result: dict[str, object] = {
            "file": self.file,
            "stride": self.stride,
            "bytes": self.stride * num_experts,
            "blake2b": self.blake2b,
        }
        if self.checksums:
            result["crc32"] = "".join(f"{checksum:08x}" for checksum in self.checksums)
        result["components"] = [component.to_json() for component in self.components]
        return result

    def hashed(self, file: Path, num_experts: int) -> LayerFile:
        """The same with the hash and the checksums of a complete file; raises ExpertFileError."""
        hasher, checksums = hashlib.blake2b(digest_size=HASH_BYTES), []
        whole, block = memoryview(bytearray(self.stride)), _block_bytes(self.components)
        with opened(file, error=ExpertFileError) as fd:
            for e in range(num_experts):
                read_exact(fd, [whole], offset=e * self.stride, file=file, error=ExpertFileError)
                hasher.update(whole)
                checksums.append(zlib.crc32(whole[:block]))
        return replace(self, blake2b=hasher.hexdigest(), checksums=tuple(checksums))


@dataclass(frozen=True, slots=True)
class TrunkFile:
    """One file of the trunk: its name in the checkpoint's directory, bytes and hash (hex).

    tail: CRC-32 of its last TAIL_BYTES; None in an index of before it was added.
    """

    file: str
    nbytes: int
    blake2b: str
    tail: int | None = None

    @classmethod
    def of(cls, directory: Path, name: str) -> TrunkFile:
        """Hash a complete file; raises CheckpointError."""
        file = directory / name
        size = size_of(file)
        digest = hash_file(file, size=size, error=CheckpointError)
        return cls(name, size, digest, _tail(file, size))

    def check(self, directory: Path) -> None:
        """Compare size and end with the file's: one that was cut off and filled up differs.

        Raises:
            CheckpointError: They differ, or the file cannot be read.
        """
        file = directory / self.file
        _check_size(file, "the trunk", self.nbytes, error=CheckpointError)
        if self.tail is not None and _tail(file, self.nbytes) != self.tail:
            raise CheckpointError(
                f"{file} differs from what was written: its end is another; copy it or convert the "
                "checkpoint again."
            )

    def to_json(self) -> dict[str, object]:
        """The file's entry of the index."""
        entry: dict[str, object] = {"file": self.file, "bytes": self.nbytes}
        entry["blake2b"] = self.blake2b
        return entry if self.tail is None else entry | {"tail_crc32": f"{self.tail:08x}"}


def _tail(file: Path, size: int) -> int:
    data = bytearray(min(size, TAIL_BYTES))
    with opened(file) as fd:
        view, start = memoryview(data), size - len(data)
        read_exact(fd, [view], offset=start, file=file, error=CheckpointError)
    return zlib.crc32(data)


@dataclass(frozen=True, slots=True)
class PackedIndex:
    """The content of an index: experts a layer, files by layer id, and what they were made of.

    trunk: Its files; empty in an index of before they were hashed. held: Layer id -> the experts
    whose blocks a part of a model has, ascending; empty for all. `num_experts` is their number,
    `of` that of the whole model.
    """

    num_experts: int
    layers: Mapping[int, LayerFile]
    source: str = ""
    trunk: tuple[TrunkFile, ...] = ()
    held: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    of: int = 0

    def to_json(self) -> dict[str, object]:
        """The object that :meth:`from_json` reads."""
        layers = {str(i): self.layers[i].to_json(self.num_experts) for i in sorted(self.layers)}
        result: dict[str, object] = {
            "format": FORMAT,
            "version": VERSION,
            "num_experts": self.num_experts,
            "source": self.source,
            "layers": layers,
        }
        if self.held:
            result["held"] = {str(i): list(experts) for i, experts in sorted(self.held.items())}
            result["of"] = self.of
        if self.trunk:
            result["trunk"] = [t.to_json() for t in self.trunk]
        return result | {"blake2b": _digest_of(result)}

    @classmethod
    def read(cls, file: Path) -> PackedIndex:
        """Check everything that an index says by itself; ExpertFileError names what is wrong."""
        value: dict[str, Any] = read_json_object(file, error=ExpertFileError)
        digest = value.pop("blake2b", None)
        if value.get("format") != FORMAT:
            raise _damaged(file, f"format is {value.get('format')!r}, not {FORMAT!r}")
        if value.get("version") != VERSION:
            raise ExpertFileError(
                f"{file} has version {value.get('version')!r}, but this package reads {VERSION};"
                " use the version of the package that wrote it, or convert again."
            )
        num_experts, layers = value.get("num_experts"), value.get("layers")
        source = value.get("source", "")
        if not is_positive(num_experts):
            raise _damaged(file, f"num_experts is {num_experts!r}")
        if not isinstance(layers, dict):
            raise _damaged(file, f"layers is {layers!r}")
        if not isinstance(source, str):
            raise _damaged(file, f"source is {source!r}")
        parsed = {}
        for key, entry in layers.items():
            if len(key) > 9 or not (key.isascii() and key.isdigit() and str(int(key)) == key):
                raise _damaged(file, f"{key!r} is not a layer id")
            parsed[int(key)] = _layer(entry, file, f"layer {key}", num_experts)
        names = [layer.file for layer in parsed.values()]
        if len(set(names)) != len(names):
            raise _damaged(file, "two layers share one file")
        layers = dict(sorted(parsed.items()))
        of = value.get("of", 0)
        held = _held(value["held"], file, layers, num_experts, of) if "held" in value else {}
        index = cls(num_experts, layers, source, _trunk(value, file), held, of)
        if digest is not None and digest != _digest_of(value):
            raise _damaged(file, "it was changed, its blake2b is another")
        if digest is None and len({bool(layer.checksums) for layer in layers.values()}) > 1:
            raise _damaged(file, "some layers have no crc32")
        return index


def _digest_of(value: Mapping[str, object]) -> str:
    """BLAKE2b of an index without its own."""
    text = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=HASH_BYTES).hexdigest()


def _held(
    value: object, file: Path, layers: Iterable[int], num_experts: int, of: object
) -> dict[int, tuple[int, ...]]:
    found: dict[str, Any] = value if isinstance(value, dict) else {}
    most, held = of if isinstance(of, int) else 0, {}
    for layer in layers:
        experts: Any = found.get(str(layer))
        right = isinstance(experts, list) and all(type(e) is int and 0 <= e < most for e in experts)
        if not right or experts != sorted(set(experts)) or len(experts) != num_experts:
            raise _damaged(file, f"held has no {num_experts} experts of layer {layer}")
        held[layer] = tuple(experts)
    return held


def _trunk(value: Mapping[str, Any], file: Path) -> tuple[TrunkFile, ...]:
    entries, result = value.get("trunk", []), []
    if not isinstance(entries, list):
        raise _damaged(file, f"trunk is {entries!r}")
    for entry in entries:
        if not isinstance(entry, dict):
            raise _damaged(file, f"trunk has {entry!r}")
        directory = file.parent.parent
        name = inside_path(directory, entry.get("file"), source=file, error=ExpertFileError)
        size = entry.get("bytes")
        if not is_positive(size):
            raise _damaged(file, f"{name} has bytes {size!r}")
        tail = _checksums({"crc32": entry.get("tail_crc32")}, file, f"the end of {name}", 1)
        result.append(TrunkFile(name, size, _digest(entry, file, name), *tail))
    return tuple(result)


def _layer(entry: object, file: Path, place: str, num_experts: int) -> LayerFile:
    if not isinstance(entry, dict):
        raise _damaged(file, f"{place} is {entry!r}")
    name = inside_path(file.parent, entry.get("file"), source=file, error=ExpertFileError)
    stride, total = entry.get("stride"), entry.get("bytes")
    components = _components(entry.get("components"), file, place)
    block = _block_bytes(components)
    if not is_positive(stride) or stride % ALIGNMENT:
        raise _damaged(file, f"{place} has stride {stride!r}, no multiple of {ALIGNMENT}")
    if stride < block:
        raise _damaged(file, f"{place} has stride {stride}, but its block takes {block} bytes")
    if type(total) is not int or total != stride * num_experts:
        needed = stride * num_experts
        raise _damaged(file, f"{place} has bytes {total!r}, but stride x experts is {needed}")
    checksums = _checksums(entry, file, place, num_experts)
    return LayerFile(name, components, stride, _digest(entry, file, place), checksums)


def _checksums(entry: dict[str, Any], file: Path, place: str, num_experts: int) -> tuple[int, ...]:
    text = entry.get("crc32")
    if text is None:
        return ()
    if not isinstance(text, str) or not _HEX.fullmatch(text) or len(text) != 8 * num_experts:
        raise _damaged(file, f"{place} has a crc32 that is not 8 hex digits an expert")
    return tuple(int(text[8 * e : 8 * e + 8], 16) for e in range(num_experts))


def _digest(entry: dict[str, Any], file: Path, place: str) -> str:
    digest = entry.get("blake2b")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise _damaged(file, f"{place} has blake2b {digest!r}")
    return digest


def _components(entries: object, file: Path, place: str) -> tuple[PackedComponent, ...]:
    if not isinstance(entries, list):
        raise _damaged(file, f"{place} has components {entries!r}")
    result, offset = [], 0
    for entry in entries:
        known = entry if isinstance(entry, dict) else {"name": entry}
        name, dtype, shape = (known.get(key) for key in ("name", "dtype", "shape"))
        if not isinstance(name, str) or name not in COMPONENT_ORDER:
            raise _damaged(file, f"{place} has the unknown component {name!r}")
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise _damaged(file, f"{name} of {place} has dtype {dtype!r}")
        if not is_shape(shape) or not shape or not all(shape):
            raise _damaged(file, f"{name} of {place} has shape {shape!r}")
        result.append(PackedComponent(name, dtype, tuple(shape), offset))
        offset += result[-1].nbytes
    names = [component.name for component in result]
    if not names or names != [name for name in COMPONENT_ORDER if name in names]:
        found, order = ", ".join(names) or "none", ", ".join(COMPONENT_ORDER)
        raise _damaged(
            file, f"{place} has the components {found}, not some of {order} in this order"
        )
    return tuple(result)


def _block_bytes(components: Iterable[PackedComponent]) -> int:
    """Bytes of one expert without the padding to the stride."""
    return sum(component.nbytes for component in components)


def _damaged(file: Path, fault: str) -> ExpertFileError:
    return ExpertFileError(f"{file} is not usable: {fault}; convert the checkpoint again.")


def is_packed(directory: str | os.PathLike[str]) -> bool:
    """Return True if a directory holds packed experts, complete or of an interrupted conversion."""
    experts = Path(directory) / EXPERTS_DIRECTORY
    return (experts / INDEX_NAME).exists() or (experts / PROGRESS_NAME).exists()


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The layer files of a packed directory, checked by size; made by :meth:`open`."""

    directory: Path
    index: PackedIndex

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> PackedExperts:
        """Read ``experts/index.json`` of a directory and check that the files fit it.

        Raises ExpertFileError if the index is missing or wrong, or if a layer file is missing or
        not exactly as long as the index says, CheckpointError for files of the trunk, whose ends
        are read too. No block is read.
        """
        directory = Path(directory)
        experts = directory / EXPERTS_DIRECTORY
        file = experts / INDEX_NAME
        if not file.exists():
            if (experts / PROGRESS_NAME).exists():
                raise ExpertFileError(
                    f"{experts} holds an unfinished conversion; run the same conversion again,"
                    " which goes on where it stopped."
                )
            raise ExpertFileError(f"{file} is missing; convert the checkpoint again.")
        index = PackedIndex.read(file)
        if not index.layers:
            raise ExpertFileError(f"{file} lists no layers; convert the checkpoint again.")
        for trunk in index.trunk:
            trunk.check(directory)
        for layer, entry in index.layers.items():
            size = entry.stride * index.num_experts
            _check_size(experts / entry.file, f"the experts of layer {layer}", size)
        return cls(directory, index)

    @property
    def layers(self) -> tuple[int, ...]:
        """MoE layer ids, ascending; they need not start at 0."""
        return tuple(self.index.layers)

    @property
    def num_experts(self) -> int:
        """Experts of each layer that are there."""
        return self.index.num_experts

    def refs(self, layer: int) -> Blocks:
        """Component name -> the experts' byte ranges, in the order of the block."""
        check_layer(layer, self.layers, self.directory)
        entry = self.index.layers[layer]
        components = {c.name: (c.dtype, c.shape) for c in entry.components}
        refs = block_refs(
            self.file(layer), layer, components, stride=entry.stride, num_experts=self.num_experts
        )
        refs.checksums, refs.digest = entry.checksums, entry.blake2b
        return refs

    def file(self, layer: int) -> Path:
        """The layer's file."""
        return self.directory / EXPERTS_DIRECTORY / self.index.layers[layer].file


def verify(directory: str | os.PathLike[str], progress: Progress | None = None) -> None:
    """Hash every file; the error names those that are not what was written.

    Raises ExpertFileError for layer files, CheckpointError for files of the trunk, which an index
    of before they were hashed does not list.
    """
    packed = PackedExperts.open(directory)
    index, E = packed.index, packed.num_experts
    layers = [(packed.file(i), e.stride * E, e.blake2b) for i, e in index.layers.items()]
    trunk = [(packed.directory / t.file, t.nbytes, t.blake2b) for t in index.trunk]
    report = counted(progress, sum(size for _, size, _ in layers + trunk))
    for files, error in ((layers, ExpertFileError), (trunk, CheckpointError)):
        wrong = [
            str(file)
            for file, size, digest in files
            if hash_file(file, size=size, error=error, report=report) != digest
        ]
        if wrong:
            raise error(
                f"{', '.join(wrong)} differ{'s' if len(wrong) == 1 else ''} from what was written:"
                " the blake2b hash is another; convert the checkpoint again."
            )


def _check_size(
    file: Path, content: str, expected: int, *, error: type[MoefluxError] = ExpertFileError
) -> None:
    missing = f"{file} with {content} is missing; convert the checkpoint again."
    size = size_of(file, error=error, missing=missing)
    if size != expected or not file.is_file():
        raise error(
            f"{file} with {content} has {size} bytes, but must have {expected};"
            " convert the checkpoint again."
        )


_HEX = re.compile(r"[0-9a-f]*")
_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
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
    ``held``, ``of``: See :class:`PackedIndex`; the blocks are written under their numbers in it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        num_experts: int,
        source_identity: str,
        held: Mapping[int, tuple[int, ...]] | None = None,
        of: int = 0,
    ) -> None:
        if num_experts < 1:
            raise ExpertFileError(f"{directory} cannot get {num_experts} experts a layer.")
        self.directory = Path(directory)
        self.experts = self.directory / EXPERTS_DIRECTORY
        self.num_experts, self.source = num_experts, source_identity
        self._held, self._of = dict(held or {}), of
        self._layers: dict[int, LayerFile] = {}
        # Layers whose files are known to have the bytes that were written.
        self._whole: set[int] = set()
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
        """Return True if a finished file of this layer from the same source exists.

        One of an earlier run is read once: a machine that stopped may have lost its bytes.
        """
        entry = self._layers.get(layer)
        if entry is None:
            return False
        file, size = self.experts / entry.file, entry.stride * self.num_experts
        if not file.is_file() or file.stat().st_size != size:
            return False
        if layer not in self._whole:
            if hash_file(file, size=size, error=ExpertFileError) != entry.blake2b:
                return False
            self._whole.add(layer)
        return True

    def layer(self, layer: int, components: Iterable[Any]) -> LayerWriter:
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
            fault = f"layer {missing[0]} is not written" if missing else "no layer is written"
            raise ExpertFileError(f"{self.experts} cannot be finished: {fault}.")
        files = tuple(TrunkFile.of(self.directory, name) for name in trunk)
        self._write(INDEX_NAME, {layer: self._layers[layer] for layer in wanted}, files)
        try:
            (self.experts / PROGRESS_NAME).unlink(missing_ok=True)
            sync_directory(self.experts)
        except OSError as cause:
            _raise_write_error(self.experts / PROGRESS_NAME, cause, needed=0)

    def _resume(self) -> None:
        """Take over what an earlier run finished, or clear away what it left."""
        foreign = (
            f"{self.experts} already holds the experts of another checkpoint or quantisation;"
            " delete it or choose another directory."
        )
        ours = (self.source, self.num_experts)
        index, progress = self.experts / INDEX_NAME, self.experts / PROGRESS_NAME
        if index.exists():
            try:
                found = PackedIndex.read(index)
            except ExpertFileError as cause:
                raise ExpertFileError(foreign) from cause
            if (found.source, found.num_experts) != ours:
                raise ExpertFileError(foreign)
            self._layers = dict(found.layers)
        elif progress.exists():
            found = None
            with suppress(ExpertFileError):
                found = PackedIndex.read(progress)
            if found is not None and (found.source, found.num_experts) == ours:
                self._layers = dict(found.layers)
                return
            for entry in found.layers.values() if found is not None else ():
                (self.experts / entry.file).unlink(missing_ok=True)
            progress.unlink()

    def _add(self, layer: int, entry: LayerFile) -> None:
        self._layers[layer] = entry
        self._whole.add(layer)
        self._write(PROGRESS_NAME, self._layers)

    def _write(
        self, name: str, layers: dict[int, LayerFile], trunk: tuple[TrunkFile, ...] = ()
    ) -> None:
        index = PackedIndex(self.num_experts, layers, self.source, trunk, self._held, self._of)
        content = json.dumps(index.to_json(), indent=1).encode() + b"\n"
        try:
            write_atomically(self.experts / name, content)
        except OSError as cause:
            _raise_write_error(self.experts / name, cause, needed=len(content))


class LayerWriter:
    """Writes the blocks of one layer at their places, in any order and from any thread.

    A context manager: leaving it after an error removes the temporary file, leaving it well checks
    that every row of every expert was written, and gives the file its name.
    """

    def __init__(self, writer: PackedWriter, layer: int, plan: LayerFile) -> None:
        self.layer, self.plan = layer, plan
        self._nbytes = plan.stride * writer.num_experts
        self._writer = writer
        self._target = writer.experts / plan.file
        self._file = self._target.with_name(plan.file + TEMPORARY_SUFFIX)
        self._components = {component.name: component for component in plan.components}
        self._fd = -1
        # One byte for every row of every expert: tells a hole from a finished file exactly.
        self._written = {
            name: bytearray(writer.num_experts * component.shape[0])
            for name, component in self._components.items()
        }

    def write(self, expert: int, component: str, row_start: int, data: Buffer) -> None:
        """Write rows of one component of one expert, from ``row_start`` on: whole rows only."""
        if self._fd < 0:
            raise ExpertFileError(f"Layer {self.layer} is closed; write inside its with block.")
        experts = self._writer.num_experts
        if not 0 <= expert < experts:
            raise ExpertFileError(
                f"Layer {self.layer} has {experts} experts: there is no {expert}."
            )
        if component not in self._components:
            raise ExpertFileError(
                f"Layer {self.layer} has no component {component!r}; it has"
                f" {', '.join(self._components)}."
            )
        part, view = self._components[component], memoryview(data)
        # An empty view cannot be cast.
        view = view.cast("B") if view.nbytes else memoryview(b"")
        rows, rest = divmod(view.nbytes, part.row_bytes)
        if rest or row_start < 0 or row_start + rows > part.shape[0]:
            raise ExpertFileError(
                f"{view.nbytes} bytes at row {row_start} of {part.name} of expert {expert} do not"
                f" fit: {part.dtype} {list(part.shape)} has rows of {part.row_bytes} bytes."
            )
        start = expert * self.plan.stride + part.offset + row_start * part.row_bytes
        try:
            write_exact(self._fd, view, offset=start)
        except OSError as cause:
            _raise_write_error(self._file, cause, needed=self._nbytes, offset=start)
        first = expert * part.shape[0] + row_start
        self._written[component][first : first + rows] = b"\1" * rows

    def __enter__(self) -> LayerWriter:
        try:
            self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            _reserve(self._fd, self._nbytes)
        except BaseException as cause:
            self._abandon()
            if isinstance(cause, OSError):
                _raise_write_error(self._file, cause, needed=self._nbytes)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
            done = self.plan.hashed(self._file, self._writer.num_experts)
            os.replace(self._file, self._target)
            sync_directory(self._target.parent)
        except OSError as cause:
            _raise_write_error(self._file, cause, needed=self._nbytes)
        self._writer._add(self.layer, done)

    def _abandon(self) -> None:
        """Close, and remove the temporary file where it still has that name."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._file.unlink(missing_ok=True)


def _raise_write_error(
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
