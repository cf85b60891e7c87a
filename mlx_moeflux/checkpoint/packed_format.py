"""The packed directory's index: what ``experts/index.json`` says of every file.

``experts/layer_NN.bin`` holds E blocks at a fixed stride, a multiple of 16 KiB. A block is the
components of one expert, one after the other in :data:`COMPONENT_ORDER`; their offsets follow
from the shapes and are stored nowhere. The rest of the stride is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

from mlx_moeflux.checkpoint.files import HASH_BYTES, inside_path
from mlx_moeflux.checkpoint.names import COMPONENT_ORDER
from mlx_moeflux.checkpoint.refs import ITEMSIZE
from mlx_moeflux.errors import ExpertFileError

FORMAT = "mlx_moeflux.experts"
VERSION = 1
ALIGNMENT = 16384
"""Blocks start at multiples of this many bytes: a page of every platform, and of direct I/O."""

EXPERTS_DIRECTORY = "experts"
INDEX_NAME = "index.json"
PROGRESS_NAME = ".progress.json"


class ComponentLike(Protocol):
    """A name such as ``gate_proj.weight``, a safetensors dtype and one expert's shape."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class PackedComponent:
    """One tensor of every block of a layer file, and where in the block it begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in one block."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of axis 0."""
        return self.nbytes // self.shape[0]


@dataclass(frozen=True, slots=True)
class LayerFile:
    """One layer file: its name in the experts directory, block layout and hash (hex)."""

    file: str
    components: tuple[PackedComponent, ...]
    stride: int
    blake2b: str = ""

    @classmethod
    def plan(cls, layer: int, components: Iterable[ComponentLike]) -> LayerFile:
        """The file for a layer to be written; ExpertFileError if the components are not usable."""
        entries = [{"name": c.name, "dtype": c.dtype, "shape": list(c.shape)} for c in components]
        name = f"layer_{layer:02d}.bin"
        parsed = _components(entries, Path(name), f"layer {layer}")
        block = sum(component.nbytes for component in parsed)
        return cls(name, parsed, -(-block // ALIGNMENT) * ALIGNMENT)

    @property
    def block_bytes(self) -> int:
        """Bytes of one expert without the padding to the stride."""
        return sum(component.nbytes for component in self.components)

    def to_json(self, num_experts: int) -> dict[str, object]:
        """The layer's entry of the index."""
        return {
            "file": self.file,
            "stride": self.stride,
            "bytes": self.stride * num_experts,
            "blake2b": self.blake2b,
            "components": [
                {"name": c.name, "dtype": c.dtype, "shape": list(c.shape)} for c in self.components
            ],
        }


@dataclass(frozen=True, slots=True)
class TrunkFile:
    """One file of the trunk: its name in the checkpoint's directory, bytes and hash (hex)."""

    file: str
    nbytes: int
    blake2b: str

    def to_json(self) -> dict[str, object]:
        """The file's entry of the index."""
        return {"file": self.file, "bytes": self.nbytes, "blake2b": self.blake2b}


@dataclass(frozen=True, slots=True)
class PackedIndex:
    """The content of an index: experts a layer, files by layer id, and what they were made of.

    trunk: Its files; empty in an index of before they were hashed.
    """

    num_experts: int
    layers: Mapping[int, LayerFile]
    source: str = ""
    trunk: tuple[TrunkFile, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The object that :meth:`from_json` reads."""
        trunk = {"trunk": [entry.to_json() for entry in self.trunk]} if self.trunk else {}
        return {
            "format": FORMAT,
            "version": VERSION,
            "num_experts": self.num_experts,
            "source": self.source,
            "layers": {
                str(layer): self.layers[layer].to_json(self.num_experts)
                for layer in sorted(self.layers)
            },
            **trunk,
        }

    @classmethod
    def from_json(cls, value: Mapping, file: Path) -> PackedIndex:
        """Check everything that an index says by itself; ExpertFileError names what is wrong."""
        if value.get("format") != FORMAT:
            raise _damaged(file, f"format is {value.get('format')!r}, not {FORMAT!r}")
        if value.get("version") != VERSION:
            raise ExpertFileError(
                f"{file} has version {value.get('version')!r}, but this package reads {VERSION};"
                " use the version of the package that wrote it, or convert again."
            )
        num_experts, layers = value.get("num_experts"), value.get("layers")
        if not _is_positive(num_experts):
            raise _damaged(file, f"num_experts is {num_experts!r}")
        if not isinstance(layers, dict):
            raise _damaged(file, f"layers is {layers!r}")
        source = value.get("source", "")
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
        return cls(num_experts, dict(sorted(parsed.items())), source, _trunk(value, file))


def _trunk(value: Mapping, file: Path) -> tuple[TrunkFile, ...]:
    entries, result = value.get("trunk", []), []
    if not isinstance(entries, list):
        raise _damaged(file, f"trunk is {entries!r}")
    for entry in entries:
        if not isinstance(entry, dict):
            raise _damaged(file, f"trunk has {entry!r}")
        directory = file.parent.parent
        name = inside_path(directory, entry.get("file"), source=file, error=ExpertFileError)
        size, digest = entry.get("bytes"), entry.get("blake2b")
        if not _is_positive(size):
            raise _damaged(file, f"{name} has bytes {size!r}")
        if not isinstance(digest, str) or not _is_hash(digest):
            raise _damaged(file, f"{name} has blake2b {digest!r}")
        result.append(TrunkFile(name, size, digest))
    return tuple(result)


def _layer(entry: object, file: Path, place: str, num_experts: int) -> LayerFile:
    if not isinstance(entry, dict):
        raise _damaged(file, f"{place} is {entry!r}")
    name = inside_path(file.parent, entry.get("file"), source=file, error=ExpertFileError)
    stride, total, digest = entry.get("stride"), entry.get("bytes"), entry.get("blake2b")
    components = _components(entry.get("components"), file, place)
    result = LayerFile(name, components, stride, digest)
    if not _is_positive(stride) or stride % ALIGNMENT:
        raise _damaged(file, f"{place} has stride {stride!r}, no multiple of {ALIGNMENT}")
    if stride < result.block_bytes:
        raise _damaged(
            file, f"{place} has stride {stride}, but its block takes {result.block_bytes} bytes"
        )
    if type(total) is not int or total != stride * num_experts:
        raise _damaged(
            file, f"{place} has bytes {total!r}, but stride x experts is {stride * num_experts}"
        )
    if not isinstance(digest, str) or not _is_hash(digest):
        raise _damaged(file, f"{place} has blake2b {digest!r}")
    return result


def _components(entries: object, file: Path, place: str) -> tuple[PackedComponent, ...]:
    if not isinstance(entries, list):
        raise _damaged(file, f"{place} has components {entries!r}")
    result, offset = [], 0
    for entry in entries:
        name, dtype, shape = (
            (entry.get(key) for key in ("name", "dtype", "shape"))
            if isinstance(entry, dict)
            else (entry, None, None)
        )
        if not isinstance(name, str) or name not in COMPONENT_ORDER:
            raise _damaged(file, f"{place} has the unknown component {name!r}")
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise _damaged(file, f"{name} of {place} has dtype {dtype!r}")
        if not isinstance(shape, list) or not shape or not all(map(_is_positive, shape)):
            raise _damaged(file, f"{name} of {place} has shape {shape!r}")
        result.append(PackedComponent(name, dtype, tuple(shape), offset))
        offset += result[-1].nbytes
    names = [component.name for component in result]
    if not names or names != [name for name in COMPONENT_ORDER if name in names]:
        raise _damaged(
            file,
            f"{place} has the components {', '.join(names) or 'none'}, not some of"
            f" {', '.join(COMPONENT_ORDER)} in this order",
        )
    return tuple(result)


def _is_positive(value: object) -> bool:
    return type(value) is int and value > 0


def _is_hash(text: str) -> bool:
    return len(text) == 2 * HASH_BYTES and set(text) <= set("0123456789abcdef")


def _damaged(file: Path, fault: str) -> ExpertFileError:
    return ExpertFileError(f"{file} is not usable: {fault}; convert the checkpoint again.")
