"""Samples of the experts' bytes: what tells one model's from another's, and experts that were never
written."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from mlx_moeflux.checkpoint.files import Stamp, changed, opened, read_exact, unreadable
from mlx_moeflux.checkpoint.tensors import Blocks, ExpertRefs, StridedRefs, TensorRef
from mlx_moeflux.errors import CheckpointError, ExpertFileError
from mlx_moeflux.experts.io.byte_ranges import ByteRanges
from mlx_moeflux.experts.io.decoding import Experts, stored_form
from mlx_moeflux.experts.io.layout import layout_of

SAMPLE_BYTES = 64
# A slow SSD makes so many reads in about a second.
MOST_SAMPLES = 25_000
# Experts of each layer, and bytes of each of their scales.
LOOKED_AT, SCALES_BYTES = 4, 4096


def experts_identity(experts: Experts, *, most_samples: int = MOST_SAMPLES) -> str:
    """Hash each layer's experts: by the checksums or the digest of its blocks, else by samples of
    every expert.

    An expert gives a sample of as many components as `most_samples` of all experts allow, at
    least of one; the next expert goes on with the next component. Two copies of the same tensors
    have one identity, wherever they lie in files.

    Raises:
        ExpertFileError: A file cannot be read.
    """
    hasher, sampled = hashlib.blake2b(digest_size=16), {}
    for layer, parts in experts.items():
        if isinstance(parts, Blocks) and (parts.checksums or parts.digest):
            hasher.update(f"{layer} {parts.checksums or parts.digest}\n".encode())
        else:
            sampled[layer] = parts
    if sampled:
        ranges = ByteRanges(stored_form(sampled))
        count = max(1, most_samples // (len(ranges.layers) * ranges.num_experts))
        with ExitStack() as stack:
            fds = [stack.enter_context(opened(f, error=ExpertFileError)) for f in ranges.files]
            maps = [stack.enter_context(_mapped(*of)) for of in zip(fds, ranges.files, strict=True)]
            for layer in ranges.layers:
                hasher.update(_samples(ranges, layer, count, fds, maps))
    return hasher.hexdigest()


def check_replica(experts: Experts, replica: Experts, *, place: str) -> None:
    """Compare the experts of `place` with those that it is a copy of: layouts, byte ranges and
    :func:`experts_identity`.

    Raises:
        CheckpointError: They differ.
        ExpertFileError: A file cannot be read.
    """

    def check(same: bool, difference: str) -> None:
        if not same:
            raise CheckpointError(
                f"{place} is no copy of the first expert_path: {difference}; copy the files again, "
                "or leave it out."
            )

    check(sorted(experts) == sorted(replica), "it has experts of other layers")
    for layer, parts in experts.items():
        counts = [len(next(iter(of[layer].values()))) for of in (experts, replica)]
        check(counts[0] == counts[1], f"layer {layer} has {counts[1]} experts, not {counts[0]}")
        same = layout_of(parts) == layout_of(replica[layer])
        check(same, f"the experts of layer {layer} have other shapes or dtypes")
    ours, theirs = ByteRanges(stored_form(experts)), ByteRanges(stored_form(replica))
    for layer in ours.layers:
        tables = zip(ours.table(layer), theirs.table(layer), strict=True)
        same = all(np.array_equal(*pair) for pair in tables)
        check(same, f"the experts of layer {layer} lie at other offsets")
    samples = MOST_SAMPLES // len(experts)
    for layer in experts:
        own, copied = (
            experts_identity({layer: of[layer]}, most_samples=samples) for of in (experts, replica)
        )
        check(own == copied, f"the experts of layer {layer} have other bytes")


def _mapped(fd: int, file: Path) -> mmap.mmap:
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as cause:
        raise ExpertFileError(f"{file} cannot be mapped: {cause}.") from cause


def _samples(
    ranges: ByteRanges, layer: int, count: int, fds: Sequence[int], maps: Sequence[mmap.mmap]
) -> bytes:
    """Return `count` samples of each expert of a layer. maps: Of the files, for advice."""
    sizes = np.array([c.nbytes for c in ranges.layout(layer).components])
    count, experts = min(count, len(sizes)), ranges.num_experts
    lengths = np.minimum(sizes, SAMPLE_BYTES)
    random = np.random.default_rng(layer).random((experts, len(sizes)))
    rows = np.arange(experts)[:, None]
    chosen = (rows * count + np.arange(count)) % len(sizes)
    files, offsets = ranges.table(layer)
    starts = offsets + (random * (sizes - lengths)).astype(np.int64)
    places = [(array[rows, chosen].ravel()).tolist() for array in (files, starts)]
    reads = list(zip(*places, lengths[chosen].ravel().tolist(), strict=True))
    # A disk answers many waiting requests in little more time than one.
    for file, start, length in reads:
        page = start - start % mmap.PAGESIZE
        maps[file].madvise(mmap.MADV_WILLNEED, page, start + length - page)
    found = [f"{layer}".encode()]
    for file, start, length in reads:
        try:
            found.append(os.pread(fds[file], length, start))
        except OSError as cause:
            raise unreadable(ranges.files[file], cause, error=ExpertFileError) from cause
    return b"".join(found)


def check_scales(experts: Experts) -> None:
    """Look at the scales of a few experts of each layer.

    Raises:
        ExpertFileError: They are zeros, as in a file of which space alone was reserved.
    """
    for layer, parts in experts.items():
        for name, refs in parts.items():
            if not name.endswith(".scales") or not isinstance(refs[0], TensorRef):
                continue
            count = len(refs)
            for e in sorted({i * (count - 1) // (LOOKED_AT - 1) for i in range(LOOKED_AT)}):
                _check_sample(refs[e], layer, name, e)


def _check_sample(ref: TensorRef, layer: int, name: str, expert: int) -> None:
    data = bytearray(min(ref.nbytes, SCALES_BYTES))
    with opened(ref.file, error=ExpertFileError) as fd:
        view = memoryview(data)
        read_exact(fd, [view], offset=ref.offset, file=ref.file, error=ExpertFileError)
    if not any(data):
        raise ExpertFileError(
            f"{ref.file} has zeros as '{name}' of expert {expert} of layer {layer}; it was not "
            "written completely: copy, download or convert it again."
        )


class Watch:
    """The files of some experts as they were when this was made."""

    def __init__(self, experts: Experts):
        parts = stored_form(experts).values()
        files = {
            file for refs in parts for by_expert in refs.values() for file in _files(by_expert)
        }
        self._stamps = {os.path.abspath(file): Stamp.of(file) for file in files}

    def check(self) -> None:
        """Raise ExpertFileError if a file is another one, or was written to."""
        for path, stamp in self._stamps.items():
            try:
                now = Stamp.of(path)
            except OSError as cause:
                raise changed(path, error=ExpertFileError) from cause
            if now != stamp:
                raise changed(path, error=ExpertFileError)


def _files(refs: ExpertRefs) -> set[Path]:
    return {refs.file} if isinstance(refs, StridedRefs) else {ref.file for ref in refs}
