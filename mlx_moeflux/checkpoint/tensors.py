"""Tensors on disk: references to their bytes, and the index of a safetensors checkpoint.

A reference reads nothing until it is used. The index reads and checks headers alone.

A safetensors file is a little-endian u64 N, N bytes of JSON that map names to dtype, shape and
byte range, and the data. The ranges must tile the data exactly, so that after
:meth:`TensorIndex.open` every read lies inside a file that is whole.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, overload

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.files import (
    LFS_POINTER,
    inside_path,
    opened,
    parse_json_object,
    read_exact,
    read_json_object,
    refuse_pointer,
    unreadable,
)
from mlx_moeflux.checks import is_natural, is_shape
from mlx_moeflux.errors import CheckpointError, ExpertFileError, ShapeError

if TYPE_CHECKING:
    import mlx.core as mx

_CODES = {
    1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    2: "U16 I16 F16 BF16",
    4: "U32 I32 F32",
    8: "U64 I64 F64 C64",
}
SAFETENSORS = {code: size for size, codes in _CODES.items() for code in codes.split()}
"""Bytes of one element, by safetensors dtype code."""
ITEMSIZE = SAFETENSORS | dict.fromkeys(BLOCK_MODES, 1)
"""The same, and 1 by each mode of ggml's blocks: rows of it are bytes."""

_MLX_KINDS = {"U": "uint", "I": "int", "F": "float", "BF": "bfloat", "C": "complex"}


def mlx_dtype(code: str) -> mx.Dtype:
    """The MLX dtype that holds a dtype of :data:`ITEMSIZE`; 8-bit floats and blocks are held as
    uint8."""
    import mlx.core as mx

    if code not in ITEMSIZE:
        raise CheckpointError(
            f"dtype {code!r} is not one that this package reads; known are {', '.join(ITEMSIZE)}."
        )
    if code == "BOOL":
        return mx.bool_
    kind = code.rstrip("0123456789")
    bits = code.removeprefix(kind)
    return getattr(mx, _MLX_KINDS[kind] + bits) if kind in _MLX_KINDS else mx.uint8


class Shaped:
    """Base of objects with a dtype (of :data:`ITEMSIZE`) and a shape."""

    __slots__ = ()
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one tensor of this dtype and shape."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


class Ref(Shaped, ABC):
    """A tensor that is read when asked; `file` and `offset` say where its bytes begin."""

    __slots__ = ()
    name: str
    file: Path
    offset: int

    @abstractmethod
    def rows(self, start: int, stop: int) -> Ref:
        """Entries ``start`` to ``stop`` of axis 0, which is kept: [R, ...] -> [stop-start, ...]."""

    @abstractmethod
    def _fill(self, view: memoryview) -> None:
        """Put the tensor's bytes, at least one, into a view of bytes."""

    def read_into(self, view: memoryview) -> None:
        """Read the tensor's bytes into a writable buffer of exactly ``nbytes`` bytes.

        Raises CheckpointError, naming file and offset, if a file cannot be read or ends early.
        """
        if view.nbytes != self.nbytes:
            raise ShapeError(
                f"{self.name!r} has {self.nbytes} bytes, but the buffer to fill has {view.nbytes};"
                " pass a view of exactly the tensor's size."
            )
        if self.nbytes:
            self._fill(view.cast("B"))

    def load(self) -> mx.array:
        """The tensor as an evaluated array of :func:`mlx_dtype`; 8-bit floats come as uint8."""
        import mlx.core as mx
        import numpy as np

        dtype = mlx_dtype(self.dtype)
        if self.nbytes and mx.cuda.is_available():
            # A host view of a CUDA array would move it to managed memory for good.
            raw = np.empty(self.nbytes, dtype=np.uint8)
            self.read_into(raw.data)
            array = mx.array(raw).view(dtype).reshape(self.shape)
        else:
            # Straight into MLX's own storage: a copy would double the peak of a large embedding.
            array = mx.empty(self.shape, dtype=dtype)
            self.read_into(memoryview(array))  # pyright: ignore[reportArgumentType]
        mx.eval(array)
        return array

    def _check_rows(self, start: int, stop: int) -> None:
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(
                f"{self.name!r} has shape {list(self.shape)}: no rows {start} to {stop} on axis 0."
            )


@dataclass(frozen=True, slots=True)
class TensorRef(Ref):
    """A reference to one tensor's bytes in a file.

    ``offset`` is absolute in ``file``; ``dtype`` is a safetensors code; the bytes are row-major
    and little-endian.
    """

    name: str
    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    def index(self, i: int) -> TensorRef:
        """Entry ``i`` of axis 0, which is dropped: [E, ...] -> [...]."""
        return replace(self.rows(i, i + 1), name=f"{self.name}[{i}]", shape=self.shape[1:])

    def rows(self, start: int, stop: int) -> TensorRef:
        """See :meth:`Ref.rows`."""
        self._check_rows(start, stop)
        inner = self.shape[1:]
        offset = self.offset + start * prod(inner) * ITEMSIZE[self.dtype]
        name = f"{self.name}[{start}:{stop}]"
        return TensorRef(name, self.file, offset, self.dtype, (stop - start, *inner))

    def _fill(self, view: memoryview) -> None:
        with opened(self.file) as fd:
            read_exact(fd, [view], offset=self.offset, file=self.file, error=CheckpointError)


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedRefs(Shaped, Sequence[TensorRef]):
    """One component of E experts at a fixed stride in one file; entries are made when asked.

    Entry ``e`` lies at ``offset + e * stride`` and has ``dtype`` and ``shape``.
    """

    name: str
    file: Path
    offset: int
    stride: int
    num_experts: int
    dtype: str
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.num_experts

    @overload
    def __getitem__(self, index: int) -> TensorRef: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorRef]: ...

    def __getitem__(self, index: int | slice) -> TensorRef | Sequence[TensorRef]:
        if isinstance(index, slice):
            return tuple(self[e] for e in range(*index.indices(self.num_experts)))
        e = index + self.num_experts if index < 0 else index
        if not 0 <= e < self.num_experts:
            raise IndexError(f"{self.name!r} has {self.num_experts} experts: there is no {index}.")
        offset = self.offset + e * self.stride
        return TensorRef(f"{self.name}[{e}]", self.file, offset, self.dtype, self.shape)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, {self.num_experts} x {self.dtype}"
            f" {list(self.shape)} at {self.file}:{self.offset} + e * {self.stride})"
        )


class StackedRefs(StridedRefs):
    """The experts of one stacked tensor [E, R, ...], or rows ``start`` to ``stop`` of each.

    The window splits a fused projection: of ``gate_up_proj`` [E, 2F, C] the rows (0, F) are the
    gate and (F, 2F) the up projection.
    """

    __slots__ = ()

    def __init__(self, stacked: TensorRef, rows: tuple[int, int] | None = None) -> None:
        if not stacked.shape or not stacked.shape[0]:
            raise CheckpointError(
                f"{stacked.name!r} in {stacked.file} has shape {list(stacked.shape)}, but a stack"
                " of experts needs an axis 0 of at least one; check that it is the right tensor."
            )
        first = stacked.index(0)
        entry = first if rows is None else first.rows(*rows)
        super().__init__(
            name=stacked.name if rows is None else f"{stacked.name}[:, {rows[0]}:{rows[1]}]",
            file=stacked.file,
            offset=entry.offset,
            stride=first.nbytes,
            num_experts=stacked.shape[0],
            dtype=stacked.dtype,
            shape=entry.shape,
        )


ExpertRefs = Sequence[TensorRef]
"""Entry ``e`` is expert e's bytes of one component; all have the same dtype and shape."""


class Blocks(dict[str, ExpertRefs]):
    """The experts of a layer in blocks without gaps: component name -> byte ranges, in their order.

    checksums: CRC-32, as ``zlib.crc32`` gives it, of each expert's block; empty if the form has
    none. digest: Hash of all blocks, or empty.
    """

    checksums: tuple[int, ...] = ()
    digest: str = ""

    def take(self, experts: Sequence[int]) -> Blocks:
        """Return the blocks of some experts, in this order."""
        found = Blocks((name, [refs[e] for e in experts]) for name, refs in self.items())
        found.checksums = tuple(self.checksums[e] for e in experts) if self.checksums else ()
        return found


def check_layer(layer: int, layers: Sequence[int], directory: Path) -> None:
    """Raise ExpertFileError unless ``layer`` is one of those in a directory."""
    if layer not in layers:
        raise ExpertFileError(
            f"{directory} has no experts of layer {layer}; it has those of layers"
            f" {', '.join(map(str, layers))}."
        )


def block_refs(
    file: Path,
    layer: int,
    components: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    stride: int,
    num_experts: int,
) -> Blocks:
    """The experts' byte ranges in a file with a block each ``stride`` bytes.

    ``components``, name -> (dtype, shape), follow each other in a block without padding.
    """
    refs = Blocks()
    offset = 0
    for name, (dtype, shape) in components.items():
        refs[name] = entry = StridedRefs(
            name=f"layer {layer} {name}",
            file=file,
            offset=offset,
            stride=stride,
            num_experts=num_experts,
            dtype=dtype,
            shape=shape,
        )
        offset += entry.nbytes
    return refs


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEAD_FILES = ("mtp*.safetensors", "model-mtp*.safetensors", "mtp/*.safetensors")
"""Where programs for MLX put a model's head of multi-token prediction beside its files."""
# Names of weights that are not read -> whose they are.
_OTHER_WEIGHTS = {
    "*model*.bin": "PyTorch", "*.pt": "PyTorch", "*.pth": "PyTorch", "*.npz": "NumPy",
    "*.onnx": "ONNX", "*.h5": "Keras", "*.msgpack": "Flax",
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000

_SHARD_NUMBER = re.compile(r"^(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")


class TensorIndex(dict[str, TensorRef]):
    """All tensors of a safetensors checkpoint, by name; made by :meth:`open`.

    absent: Name -> shard, of tensors that the index names and no header has.
    """

    absent: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> TensorIndex:
        """Read and check the headers of a directory's safetensors files, and no tensor.

        Taken are the shards of ``model.safetensors.index.json``, and others of the same number;
        where none of them is there, or without an index, ``model.safetensors``, else all
        ``model*.safetensors``, else all ``*.safetensors``. The headers say which tensors are where:
        an index may be another checkpoint's, or older than its files.
        Raises CheckpointError if no file is there, or one is damaged or missing.
        """
        directory = Path(directory)
        weight_map = _read_weight_map(directory)
        shards = _named_shards(directory, set(weight_map.values())) or _find_shards(directory)
        refs = cls.of(directory / shard for shard in sorted(shards))
        refs.absent = {name: shard for name, shard in weight_map.items() if name not in refs}
        return refs

    @classmethod
    def of(cls, files: Iterable[Path]) -> TensorIndex:
        """Return the tensors of some files.

        Raises:
            CheckpointError: A file is damaged, or two have a tensor of one name.
        """
        refs = cls()
        for file in files:
            for name, ref in read_header(file)[0].items():
                if name in refs:
                    raise CheckpointError(
                        f"Tensor {name!r} is in both {refs[name].file} and {file}; remove the"
                        " file that does not belong to this checkpoint."
                    )
                refs[name] = ref
        return refs


def head_files(directory: Path) -> list[Path]:
    """Return the files beside a model that have its head of multi-token prediction alone."""
    for pattern in HEAD_FILES:
        if found := sorted(directory.glob(pattern)):
            return found
    return []


def read_header(file: Path) -> tuple[dict[str, TensorRef], int]:
    """The tensors of one safetensors file and the bytes that were read to know them.

    Raises CheckpointError if the file cannot be opened or its header is wrong in any way.
    """
    try:
        with opened(file) as fd:
            size = os.fstat(fd).st_size
            data_start = 8 + _header_size(fd, file, size=size)
            text = _read(fd, file, count=data_start - 8, offset=8)
    except OSError as cause:
        raise unreadable(file, cause) from cause
    header = parse_json_object(text, file, what="header")
    refs = _check_entries(file, header, data_start=data_start)
    _check_tiling(file, refs, data_start=data_start, size=size)
    return refs, data_start


def _read_weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> shard file name of the index; empty where there is none, or it names none."""
    file = directory / INDEX_NAME
    if not os.path.lexists(file):
        return {}
    weight_map = read_json_object(file).get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            f"The weight_map of {file} is no object of tensor names and shards; download it again."
        )
    return {name: inside_path(directory, shard, source=file) for name, shard in weight_map.items()}


def _named_shards(directory: Path, named: set[str]) -> set[str]:
    """Return the shards of an index that are there, with their siblings; none if all tensors may
    be in a ``model.safetensors`` that the index of sharded ones does not name.

    Raises:
        CheckpointError: The directory has no shard at all.
    """
    there = {name for name in named if os.path.isfile(directory / name)}
    if named and not there and not any(directory.glob("*.safetensors")):
        raise CheckpointError(
            f"Shard {directory / min(named)} is missing, but {INDEX_NAME} names it; download it."
        )
    if there != named and SINGLE_NAME not in there and os.path.isfile(directory / SINGLE_NAME):
        return set()
    numbered = {(m["stem"], m["count"]) for m in map(_SHARD_NUMBER.match, there) if m}
    for file in directory.glob("*.safetensors") if numbered else ():
        match = _SHARD_NUMBER.match(file.name)
        if match and (match["stem"], match["count"]) in numbered:
            there.add(file.name)
    return there


def naming_absent(error: CheckpointError, absent: Mapping[str, str]) -> CheckpointError:
    """Return an error about tensors that are missing, with the shard where an index places one.

    absent: As :class:`TensorIndex` has it.
    """
    if not absent:
        return error
    name, shard = next(iter(absent.items()))
    return type(error)(
        f"{str(error).rstrip('.')}; {INDEX_NAME} places {len(absent)} tensors that are missing, "
        f"such as {name!r} in {shard}: download that."
    )


def _refuse_weights_of_others(directory: Path) -> None:
    """Raise a CheckpointError if a directory has weights in a form that is not read here."""
    for pattern, program in _OTHER_WEIGHTS.items():
        if found := sorted(file.name for file in directory.glob(pattern)):
            raise CheckpointError(
                f"{directory} holds weights of {program} ({found[0]}) and no .safetensors file; "
                "convert them with the program that wrote them, or pass a checkpoint in "
                "safetensors or GGUF."
            )


def _find_shards(directory: Path) -> set[str]:
    if not os.path.isdir(directory):
        raise CheckpointError(f"{directory} is not a directory; pass the one with the checkpoint.")
    # A name with a leading dot is an archive tool's or a file system's, not a shard.
    names = {p.name for p in directory.glob("*.safetensors") if not p.name.startswith(".")}
    if SINGLE_NAME in names:
        return {SINGLE_NAME}
    # Those of a head alone are the checkpoint only where nothing else is.
    names = names - {file.name for file in head_files(directory)} or names
    shards = {name for name in names if name.startswith("model")} or names
    if not shards:
        _refuse_weights_of_others(directory)
        raise CheckpointError(f"{directory} holds no .safetensors file; pass a checkpoint.")
    for match in filter(None, map(_SHARD_NUMBER.match, sorted(shards))):
        stem, count = match["stem"], match["count"]
        for number in range(1, int(count) + 1):
            name = f"{stem}-{number:0{len(count)}d}-of-{count}.safetensors"
            if name not in shards:
                raise CheckpointError(
                    f"Shard {directory / name} is missing, but {match[0]} counts {int(count)}"
                    " shards; download it."
                )
    return shards


def _read(fd: int, file: Path, *, count: int, offset: int) -> bytes:
    buffer = bytearray(count)
    read_exact(fd, [memoryview(buffer)], offset=offset, file=file, error=CheckpointError)
    return bytes(buffer)


def _header_size(fd: int, file: Path, *, size: int) -> int:
    if size < 8:
        raise CheckpointError(
            f"{file} has {size} bytes, too few for a safetensors header; download it again."
        )
    header_size = int.from_bytes(_read(fd, file, count=8, offset=0), "little")
    if header_size > MAX_HEADER_BYTES:
        start = _read(fd, file, count=min(size, len(LFS_POINTER)), offset=0)
        refuse_pointer(start, file)
        _refuse_other(start, file)
        raise CheckpointError(
            f"{file} announces a header of {header_size} bytes, above the limit of"
            f" {MAX_HEADER_BYTES}; it is damaged or not a safetensors file."
        )
    if 8 + header_size > size:
        raise CheckpointError(
            f"{file} announces a header of {header_size} bytes but has {size} bytes in all;"
            " download it again."
        )
    return header_size


def _refuse_other(start: bytes, file: Path) -> None:
    """Raise a CheckpointError if a file begins with a text or as one of another program."""
    if start.startswith(b"GGUF"):
        raise CheckpointError(f"{file} is a GGUF file; give it a name that ends in .gguf.")
    if start.startswith(b"PK"):
        raise CheckpointError(
            f"{file} is an archive, as PyTorch writes weights, and no safetensors file; convert "
            "it, or download the .safetensors."
        )
    text = start.decode("ascii", "replace").split("\n")[0].strip()
    if text.isascii() and text.isprintable():
        raise CheckpointError(
            f"{file} is a text that begins with {text!r}, such as a web page or a pointer, and not "
            "the file itself; download it again."
        )


def _check_entries(file: Path, header: dict, *, data_start: int) -> dict[str, TensorRef]:
    metadata = header.pop("__metadata__", None)
    if metadata is None:  # mx.save_safetensors writes null where there is none.
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            f"__metadata__ of {file} must map strings to strings; download the file again."
        )
    refs = {}
    for name, entry in header.items():
        if not isinstance(entry, dict):
            raise _bad_entry(file, name, f"is described by {entry!r}, not by an object")
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if not isinstance(dtype, str) or dtype not in SAFETENSORS:
            raise _bad_entry(file, name, f"has dtype {dtype!r}, which this package does not read")
        if not is_shape(shape):
            raise _bad_entry(file, name, f"has shape {shape!r}, not a list of sizes")
        offsets = entry.get("data_offsets")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_natural, offsets)):
            raise _bad_entry(file, name, f"has data_offsets {offsets!r}, not [begin, end]")
        begin, end = offsets
        ref = TensorRef(name, file, data_start + begin, dtype, tuple(shape))
        if end - begin != ref.nbytes:
            raise _bad_entry(
                file, name, f"spans {end - begin} bytes, but {dtype} {shape} takes {ref.nbytes}"
            )
        refs[name] = ref
    return refs


def _check_tiling(file: Path, refs: dict[str, TensorRef], *, data_start: int, size: int) -> None:
    """The tensors must cover the data without overlap, hole, shortage or rest."""
    end = data_start
    for ref in sorted(refs.values(), key=lambda ref: (ref.offset, ref.nbytes)):
        if ref.offset != end:
            fault = "overlaps the tensor" if ref.offset < end else "leaves a hole"
            raise _bad_entry(
                file, ref.name, f"{fault} before it (starts at {ref.offset}, expected {end})"
            )
        end = ref.offset + ref.nbytes
        if end > size:
            raise CheckpointError(
                f"{file} is truncated: tensor {ref.name!r} ends at byte {end}, the file at {size};"
                " download it again."
            )
    if end != size:
        raise CheckpointError(
            f"{file} is oversized: its header describes {end} bytes, the file has {size};"
            " download it again."
        )


def _bad_entry(file: Path, name: str, fault: str) -> CheckpointError:
    return CheckpointError(
        f"Tensor {name!r} of {file} {fault}; the header is damaged, download the file again."
    )
