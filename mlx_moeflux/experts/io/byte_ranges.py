"""The byte ranges of all routed experts: files and offsets, for every checkpoint format.

Packed blobs, stacked tensors, one tensor per expert, shards: each gives one byte range per layer,
component and expert. Adjacent ranges of a file form one run, which is one read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_moeflux.checkpoint.tensors import Blocks, ExpertRefs, StridedRefs
from mlx_moeflux.errors import CheckpointError, ExpertFileError
from mlx_moeflux.experts.io.layout import Layout, layout_of


class Run(NamedTuple):
    """Consecutive bytes of a file. components: Those in them; empty for a part of a block."""

    file: int
    offset: int
    nbytes: int
    components: tuple[int, ...]


class Piece(NamedTuple):
    """Bytes [start, stop) of a contiguous block.

    parts: The same bytes as (component, begin, end).
    """

    start: int
    stop: int
    parts: tuple[tuple[int, int, int], ...]


class ByteRanges:
    """The byte ranges of all experts.

    experts: MoE layer id -> component name -> one ref per expert, as
    :func:`mlx_moeflux.checkpoint.names.map_tensors` and the packed directories give them.

    Raises:
        CheckpointError: Components of a layer disagree about the number of experts, entries of
            one component disagree about dtype or shape, or there is no layer.
    """

    def __init__(self, experts: Mapping[int, Mapping[str, ExpertRefs]]):
        if not experts:
            raise CheckpointError("the checkpoint has no routed experts; nothing can stream.")
        self.layers: tuple[int, ...] = tuple(sorted(experts))
        self._layouts = {layer: layout_of(experts[layer]) for layer in self.layers}
        first = next(iter(experts[self.layers[0]].values()))
        self.num_experts: int = len(first)
        self._file_ids: dict[Path, int] = {}
        self._files = {}
        self._offsets = {}
        self._orders: dict[int, tuple[int, ...]] = {}
        self._checksums: dict[int, np.ndarray] = {}
        for layer in self.layers:
            parts = experts[layer]
            self._files[layer], self._offsets[layer] = self._table(layer, parts)
            if isinstance(parts, Blocks) and parts.checksums:
                self._checksums[layer] = np.array(parts.checksums, np.uint32)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds experts; `Run.file` is an index into it."""
        return tuple(self._file_ids)

    def layout(self, layer: int) -> Layout:
        """Return the block layout of a layer; raise ExpertFileError for a layer without experts."""
        if layer not in self._layouts:
            raise ExpertFileError(
                f"layer {layer} has no routed experts here; layers {self.layers[0]} to "
                f"{self.layers[-1]} do."
            )
        return self._layouts[layer]

    def runs(self, layer: int, expert: int) -> list[Run]:
        """Return the runs of one expert's block, ascending by file and offset."""
        components = self.layout(layer).components
        if not 0 <= expert < self.num_experts:
            raise ExpertFileError(
                f"layer {layer} has no expert {expert}; there are {self.num_experts}."
            )
        files = self._files[layer][expert].tolist()
        offsets = self._offsets[layer][expert].tolist()
        runs: list[Run] = []
        for i in sorted(range(len(components)), key=lambda i: (files[i], offsets[i])):
            nbytes = components[i].nbytes
            last = runs[-1] if runs else None
            if last and last.file == files[i] and last.offset + last.nbytes == offsets[i]:
                merged = (*last.components, i)
                runs[-1] = Run(last.file, last.offset, last.nbytes + nbytes, merged)
            else:
                runs.append(Run(files[i], offsets[i], nbytes, (i,)))
        return runs

    def table(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the file and the offset of each component of every block, ``[E, components]``."""
        return self._files[layer], self._offsets[layer]

    def checksums(self, layer: int) -> np.ndarray | None:
        """Return the CRC-32 of each expert's contiguous block, uint32 ``[E]``; None if there are
        none."""
        return self._checksums.get(layer)

    def piece(self, layer: int, expert: int, piece: Piece) -> Run:
        """Return the run of a piece of an expert's block; the layer has an :meth:`order`."""
        first = self._orders[layer][0]
        offset = int(self._offsets[layer][expert, first]) + piece.start
        return Run(int(self._files[layer][expert, first]), offset, piece.stop - piece.start, ())

    def order(self, layer: int) -> tuple[int, ...]:
        """Return the order in which components follow one another without gaps in every block of a
        layer; empty if blocks are not contiguous."""
        if layer not in self._orders:
            self._orders[layer] = self._order(layer)
        return self._orders[layer]

    def _order(self, layer: int) -> tuple[int, ...]:
        files, offsets = self._files[layer], self._offsets[layer]
        sizes = np.array([c.nbytes for c in self.layout(layer).components])
        order = np.argsort(offsets[0])
        ends = (offsets + sizes)[:, order]
        joined = (ends[:, :-1] == offsets[:, order][:, 1:]).all() and (files == files[:, :1]).all()
        return tuple(order.tolist()) if joined else ()

    def _table(self, layer: int, refs: Mapping[str, ExpertRefs]) -> tuple[np.ndarray, np.ndarray]:
        """Return file index and offset of every expert's components: two ``[E, components]``."""
        components = self._layouts[layer].components
        files = np.empty((self.num_experts, len(components)), np.int32)
        offsets = np.empty((self.num_experts, len(components)), np.int64)
        for column, component in enumerate(components):
            by_expert = refs[component.name]
            if len(by_expert) != self.num_experts:
                raise CheckpointError(
                    f"{by_expert[0].file}: layer {layer} has {len(by_expert)} experts in "
                    f"'{component.name}', expected {self.num_experts} as elsewhere."
                )
            if isinstance(by_expert, StridedRefs):
                files[:, column] = self._file_id(by_expert.file)
                offsets[:, column] = by_expert.offset + by_expert.stride * np.arange(
                    self.num_experts, dtype=np.int64
                )
                continue
            for expert, ref in enumerate(by_expert):
                if (ref.dtype, tuple(ref.shape)) != (component.dtype, component.shape):
                    raise CheckpointError(
                        f"{ref.file}: '{ref.name}' is {ref.dtype} {list(ref.shape)}, but expert 0 "
                        f"of layer {layer} has {component.dtype} {list(component.shape)}."
                    )
                files[expert, column] = self._file_id(ref.file)
                offsets[expert, column] = ref.offset
        return files, offsets

    def _file_id(self, file: Path) -> int:
        return self._file_ids.setdefault(Path(file), len(self._file_ids))


def copy_into(views: Sequence[memoryview], source: np.ndarray) -> None:
    """Fill consecutive byte views from a uint8 array of their total size, without the GIL."""
    position = 0
    for view in views:
        np.copyto(np.frombuffer(view, np.uint8), source[position : position + view.nbytes])
        position += view.nbytes
