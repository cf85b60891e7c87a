"""Ways to fetch one expert's bytes, by name: ``pread``, ``direct``, ``mmap``, ``memory``.

Every reader fills the caller's buffers, one for each component of the block, from the byte ranges
of :class:`~mlx_moeflux.experts.io.byte_ranges.ByteRanges`. Readers know nothing of MLX, slots or
policies. Several threads may call `read` concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from mlx_moeflux.checkpoint.tensors import ExpertRefs
from mlx_moeflux.checks import check_method, shown
from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.experts.io.byte_ranges import copy_into
from mlx_moeflux.experts.io.decoding import (
    DecodingReader,
    Experts,
    StoredReader,
    needs_decoding,
)
from mlx_moeflux.experts.io.file_readers import DirectReader, MmapReader, PreadReader
from mlx_moeflux.experts.io.layout import BlockLayout, Layout


class Reader(Protocol):
    """Fetches blocks. Replace it with ``load(reader=...)``; checked by :func:`check_methods` and
    :func:`check_reader`.

    A reader may have two members more: ``staging_bytes``, the bytes of private buffers for each
    reading thread, and ``stored_bytes(layer)``, the bytes that one read fetches, if those are not
    the block's. :func:`private_bytes` and :func:`fetched_bytes` give what they are without.
    """

    name: str
    layers: tuple[int, ...]
    num_experts: int

    def layout(self, layer: int) -> BlockLayout:
        """Return the components of that layer's blocks, in the order of `into`."""
        ...

    def read(self, layer: int, expert: int, into: Sequence[memoryview]) -> int:
        """Fill one writable byte view per component and return the number of bytes read.

        Several threads call it concurrently; it must not use MLX.

        Raises:
            ExpertFileError: The bytes cannot be read; `into` is then undefined.
        """
        ...

    def close(self) -> None:
        """Free files and memory. The store calls it once, when no read is under way."""
        ...


def private_bytes(reader: Reader) -> int:
    """Return the bytes of private buffers that `reader` has for each reading thread."""
    return getattr(reader, "staging_bytes", 0)


def fetched_bytes(reader: Reader, layer: int) -> int:
    """Return the bytes that one read of a block of `layer` fetches."""
    stored = getattr(reader, "stored_bytes", None)
    return reader.layout(layer).nbytes if stored is None else stored(layer)


def largest_block(reader: Reader) -> int:
    """Return the bytes of the largest block of any layer."""
    return max(reader.layout(layer).nbytes for layer in reader.layers)


class MemoryReader:
    """All experts in ordinary memory: the speed of an infinitely fast disk."""

    name = "memory"
    staging_bytes = 0

    def __init__(self, experts: Mapping[int, Mapping[str, ExpertRefs]]):
        files = PreadReader(experts)
        try:
            self.layers, self.num_experts = files.layers, files.num_experts
            self._layouts = {layer: files.layout(layer) for layer in self.layers}
            self._blocks = {layer: self._load(files, layer) for layer in self.layers}
        finally:
            files.close()

    def layout(self, layer: int) -> Layout:
        """See :meth:`Reader.layout`."""
        return self._layouts[layer]

    def read(self, layer: int, expert: int, into: Sequence[memoryview]) -> int:
        """See :meth:`Reader.read`."""
        block = self._blocks[layer][expert]
        copy_into(into, block)
        return block.nbytes

    def close(self) -> None:
        """See :meth:`Reader.close`."""
        self._blocks = {}

    def _load(self, files: PreadReader, layer: int) -> np.ndarray:
        """Read all blocks of a layer: ``[E, block bytes]`` uint8."""
        layout = self._layouts[layer]
        blocks = np.empty((self.num_experts, layout.nbytes), np.uint8)
        for expert in range(self.num_experts):
            block = blocks[expert].data
            views = [block[o : o + c.nbytes] for c, o in _placed(layout)]
            files.read(layer, expert, views)
        return blocks


READERS: dict[str, Callable[[Experts], StoredReader]] = {
    "pread": PreadReader,
    "direct": DirectReader,
    "mmap": MmapReader,
    "memory": MemoryReader,
}
AUTO_READER = "pread"
# Those whose blocks the page cache keeps, so that it and the bank share the memory.
PAGE_CACHED = frozenset({"pread", "mmap"})


def reader_called(name: str) -> str:
    """Return the reader's own name, ``pread`` for ``auto``.

    Raises:
        InputError: There is no such reader.
    """
    chosen = AUTO_READER if name == "auto" else name
    if chosen not in READERS:
        raise InputError(
            f"no reader is called {shown(name)}; there are auto, {', '.join(READERS)}."
        )
    return chosen


def make_reader(name: str, experts: Mapping[int, Mapping[str, ExpertRefs]]) -> Reader:
    """Make the reader called `name` (``auto`` is ``pread``) of a checkpoint's experts.

    experts: MoE layer id -> component name -> one ref per expert.

    Raises:
        InputError: There is no such reader.
        CheckpointError: The experts do not fit together.
        ExpertFileError: A file cannot be opened.
        UnsupportedError: The file system refuses ``direct``.
    """
    chosen = reader_called(name)
    if needs_decoding(experts):
        return DecodingReader(READERS[chosen], experts)
    # Nothing is decoded, so what is stored are whole blocks.
    return cast("Reader", READERS[chosen](experts))


def check_methods(reader: Reader) -> None:
    """Raise an InputError if a given reader is a class, or a method is missing or takes other
    arguments."""
    if isinstance(reader, type):
        raise InputError(f"the reader {reader.__name__} is a class; pass an instance of it.")
    label = _label(reader)
    for wanted in (Reader.layout, Reader.read, Reader.close):
        method = getattr(reader, wanted.__name__, None)
        if not callable(method):
            raise InputError(f"{label} has no method '{wanted.__name__}'; see the Reader protocol.")
        check_method(label, method, wanted)


def check_reader(
    reader: Reader,
    *,
    layers: Sequence[int],
    num_experts: int,
    hidden: int | None = None,
    intermediate: int | None = None,
) -> None:
    """Check that a reader serves a model: MoE layers, number of experts, shapes.

    Raises:
        ShapeError: Layers, experts or shapes differ from the model's.
    """
    label = _label(reader)
    missing = sorted(set(layers) - set(getattr(reader, "layers", ())))
    if missing:
        raise ShapeError(f"{label} has no experts for layer {missing[0]} of the model.")
    if getattr(reader, "num_experts", None) != num_experts:
        found = getattr(reader, "num_experts", None)
        raise ShapeError(f"{label} has {found} experts a layer, the model has {num_experts}.")
    for layer in layers:
        layout = reader.layout(layer)
        if not isinstance(layout, BlockLayout):
            raise ShapeError(f"{label} gives {type(layout).__name__} as layout, not BlockLayout.")
        found = layout.hidden, layout.intermediate
        if (hidden or found[0], intermediate or found[1]) != found:
            raise ShapeError(
                f"{label} has experts of hidden width {found[0]} and inner width {found[1]} in "
                f"layer {layer}, the model has {hidden} and {intermediate}."
            )


def _label(reader: Reader) -> str:
    return f"the reader '{getattr(reader, 'name', type(reader).__name__)}'"


def _placed(layout: Layout) -> list[tuple]:
    return [(c, layout.offsets[c.name]) for c in layout.components]
