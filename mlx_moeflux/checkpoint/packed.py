"""Opening and verifying the packed directory: expert blobs beside an ordinary trunk.

See ``packed_format.py`` for the format and ``packed_writer.py`` for how files come to be whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mlx_moeflux.checkpoint.files import read_json_object, unreadable
from mlx_moeflux.checkpoint.packed_format import (
    ALIGNMENT,
    EXPERTS_DIRECTORY,
    INDEX_NAME,
    PROGRESS_NAME,
    LayerFile,
    PackedIndex,
)
from mlx_moeflux.checkpoint.packed_writer import LayerWriter, PackedWriter, hash_file
from mlx_moeflux.checkpoint.refs import ExpertRefs, StridedRefs
from mlx_moeflux.errors import CheckpointError, ExpertFileError, MoefluxError

__all__ = ["ALIGNMENT", "LayerWriter", "PackedExperts", "PackedWriter", "is_packed", "verify"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def is_packed(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds packed experts, or what an interrupted conversion left of them."""
    experts = Path(directory) / EXPERTS_DIRECTORY
    return (experts / INDEX_NAME).exists() or (experts / PROGRESS_NAME).exists()


class PackedExperts:
    """The layer files of a packed directory, checked by size; made by :meth:`open`."""

    def __init__(self, directory: Path, index: PackedIndex) -> None:
        self.directory, self.index = directory, index

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> PackedExperts:
        """Read ``experts/index.json`` of a directory and check that the files fit it.

        Raises ExpertFileError if the index is missing or wrong, or if a layer file is missing or
        not exactly as long as the index says. No block is read.
        """
        directory = Path(directory)
        experts = directory / EXPERTS_DIRECTORY
        file = experts / INDEX_NAME
        if not file.exists():
            raise ExpertFileError(_why_no_index(experts))
        index = PackedIndex.from_json(read_json_object(file, error=ExpertFileError), file)
        if not index.layers:
            raise ExpertFileError(f"{file} lists no layers; convert the checkpoint again.")
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
        """E, the same in every layer."""
        return self.index.num_experts

    def refs(self, layer: int) -> dict[str, ExpertRefs]:
        """Component name -> the experts' byte ranges, in the order of the block."""
        entry = self._entry(layer)
        file = self.file(layer)
        return {
            component.name: StridedRefs(
                name=f"layer {layer} {component.name}",
                file=file,
                offset=component.offset,
                stride=entry.stride,
                num_experts=self.num_experts,
                dtype=component.dtype,
                shape=component.shape,
            )
            for component in entry.components
        }

    def file(self, layer: int) -> Path:
        """The layer's file."""
        return self.directory / EXPERTS_DIRECTORY / self._entry(layer).file

    def _entry(self, layer: int) -> LayerFile:
        try:
            return self.index.layers[layer]
        except KeyError:
            raise ExpertFileError(
                f"{self.directory} has no experts of layer {layer}; it has those of layers"
                f" {', '.join(map(str, self.layers))}."
            ) from None


def verify(directory: str | os.PathLike[str], progress: Progress | None = None) -> None:
    """Hash every file; the error names those that are not what was written.

    Raises ExpertFileError for layer files, CheckpointError for files of the trunk, which an index
    of before they were hashed does not list.
    """
    packed = PackedExperts.open(directory)
    index, E = packed.index, packed.num_experts
    layers = [(packed.file(i), e.stride * E, e.blake2b) for i, e in index.layers.items()]
    trunk = [(packed.directory / t.file, t.nbytes, t.blake2b) for t in index.trunk]
    for file, size, _ in trunk:
        _check_size(file, "the trunk", size, error=CheckpointError)
    total, done = sum(size for _, size, _ in layers + trunk), 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

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


def _why_no_index(experts: Path) -> str:
    if (experts / PROGRESS_NAME).exists():
        return (
            f"{experts} holds an unfinished conversion; run the same conversion again, which goes"
            " on where it stopped."
        )
    return f"{experts / INDEX_NAME} is missing; convert the checkpoint again."


def _check_size(
    file: Path, content: str, expected: int, *, error: type[MoefluxError] = ExpertFileError
) -> None:
    try:
        size = file.stat().st_size
    except FileNotFoundError as cause:
        raise error(f"{file} with {content} is missing; convert the checkpoint again.") from cause
    except OSError as cause:
        raise unreadable(file, cause, error=error) from cause
    if size != expected or not file.is_file():
        raise error(
            f"{file} with {content} has {size} bytes, but must have {expected};"
            " convert the checkpoint again."
        )
