"""Load many tensors: large reads on several threads, straight into the arrays' memory.

Threads of this module read into arrays that MLX has made. MLX's own threads run no Python: they are
few, and those of several loads would wait for each other. The host cannot write what an NVIDIA GPU
has allocated without moving it; there a group of tensors is presented to ``mx.load`` as one
safetensors file, which MLX reads in the thread that calls it.
"""

from __future__ import annotations

import functools
import io
import json
import threading
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.checksum import joined
from mlx_moeflux.checkpoint.files import in_groups, opened, read_exact
from mlx_moeflux.checkpoint.tensors import Blocks, ExpertRefs, StridedRefs, TensorRef, mlx_dtype
from mlx_moeflux.errors import CheckpointError, ExpertFileError

THREADS = 8
# Bytes of one read: a disk needs no larger ones, and threads share a tensor evenly.
READ_BYTES = 16 << 20
# The system takes at most 1024 buffers in one read.
MOST_VIEWS = 512
# Tensors of a model's trunk are loaded in groups of about so many bytes.
GROUP_BYTES = 256 << 20
# Groups that are read at a time: the disk works on one while the other one's arrays are completed.
GROUPS = 2


class Stack(NamedTuple):
    """All experts of one component, loaded as one array ``[E, ...]``.

    checksums: An array uint32 ``[E]`` that takes the CRC-32 of each expert's bytes; None if they
    are not needed.
    """

    refs: ExpertRefs
    checksums: np.ndarray | None = None

    @property
    def dtype(self) -> str:
        return self.refs[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.refs), *self.refs[0].shape)

    @property
    def nbytes(self) -> int:
        return len(self.refs) * self.refs[0].nbytes


def stacks_of(components: Mapping[str, ExpertRefs]) -> list[Stack]:
    """Return a stack of each component of a layer, for :func:`check_stacks`."""
    checked = isinstance(components, Blocks) and components.checksums
    return [
        Stack(refs, np.empty(len(refs), np.uint32) if checked else None)
        for refs in components.values()
    ]


def check_stacks(components: Mapping[str, ExpertRefs], stacks: Sequence[Stack]) -> None:
    """Compare what was loaded as `stacks` with the checksums of the blocks, if there are any.

    Raises:
        ExpertFileError: An expert differs.
    """
    if not (isinstance(components, Blocks) and components.checksums):
        return
    expected = np.array(components.checksums, np.uint32)
    found = np.zeros(len(expected), np.uint32)
    for stack in stacks:
        assert stack.checksums is not None
        found = joined(found, stack.checksums, stack.refs[0].nbytes)
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        ref = next(iter(components.values()))[int(wrong[0])]
        raise ExpertFileError(
            f"{ref.file}: expert {wrong[0]} differs from its checksum; check disk and memory, then "
            "convert the checkpoint again."
        )


def load_all(tensors: Iterable[Any], *, group_bytes: int = GROUP_BYTES) -> Iterator[mx.array]:
    """Yield the evaluated array of each tensor, in order; see :func:`load_groups`. group_bytes: Of
    the tensors that are read together."""
    for arrays in load_groups(in_groups(tensors, group_bytes)):
        yield from arrays


def load_groups(groups: Iterable[Sequence[Any]]) -> Iterator[list[mx.array]]:
    """Yield the evaluated arrays of each group of tensors, in order.

    groups: Each a sequence of :class:`Stack` or of refs
    (:class:`~mlx_moeflux.checkpoint.tensors.TensorRef` or a decoded one). While the caller uses the
    arrays of one group, the next two are read: three groups are in memory.

    Raises:
        CheckpointError: A file cannot be read or ends early; names file and offset.
    """
    with (
        ThreadPoolExecutor(THREADS, thread_name_prefix="moeflux-load") as readers,
        ThreadPoolExecutor(GROUPS, thread_name_prefix="moeflux-load-group") as loaders,
    ):
        loading: deque[Future] = deque()
        try:
            for tensors in groups:
                loading.append(loaders.submit(_load, list(tensors), readers))
                if len(loading) > GROUPS:
                    yield loading.popleft().result()
            while loading:
                yield loading.popleft().result()
        finally:
            # Who stops early waits for the reads that run, not for those of whole groups.
            readers.shutdown(cancel_futures=True)
            loaders.shutdown(cancel_futures=True)


_making = threading.Lock()


@functools.cache
def _stream() -> mx.Stream:
    """Return the stream of all loads, for who holds `_making`. A thread that evaluates on a stream
    of its own leaves it to MLX for ever, with a thread that each change of the limit of freed
    buffers waits for."""
    return mx.new_thread_unsafe_stream(mx.cpu)


def _load(tensors: list[Any], readers: ThreadPoolExecutor) -> list[mx.array]:
    if mx.default_device().type == mx.gpu and mx.cuda.is_available():
        return _load_cuda(tensors, readers)
    # On the CPU, also with Metal: these threads start no work on a GPU beside the caller's.
    with _making:
        stream = _stream()
        arrays = [mx.zeros(t.shape, mlx_dtype(t.dtype), stream=stream) for t in tensors]
        mx.eval(arrays)
    # MLX's stubs do not declare the buffer protocol, and an empty view cannot be cast.
    views = [
        memoryview(array).cast("B")  # pyright: ignore[reportArgumentType]
        if array.nbytes
        else memoryview(b"")
        for array in arrays
    ]
    with _Files() as files:
        _fill(list(zip(tensors, views, strict=True)), files, readers)
    return arrays


def _load_cuda(tensors: list[Any], readers: ThreadPoolExecutor) -> list[mx.array]:
    """Load arrays that the GPU allocates; MLX reads the file in the calling thread."""
    with _Files() as files:
        file = _VirtualFile(tensors, files, readers)
        # Any object with a file's methods will do.
        arrays = mx.load(file, format="safetensors")  # pyright: ignore[reportArgumentType]
    if file.error is not None:
        raise file.error
    assert isinstance(arrays, dict)
    return [arrays[str(i)] for i in range(len(tensors))]


class _VirtualFile:
    """Tensors named "0", "1", ... as a safetensors file.

    error: The first error of a read. An exception must not pass through MLX.
    """

    closed = False

    def __init__(self, tensors: list[Any], files: _Files, readers: ThreadPoolExecutor):
        self._tensors, self._files, self._readers = tensors, files, readers
        self.error: Exception | None = None
        entries, end = {}, 0
        for i, tensor in enumerate(tensors):
            dtype = "U8" if mlx_dtype(tensor.dtype) == mx.uint8 else tensor.dtype
            span = [end, end + tensor.nbytes]
            entries[str(i)] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": span}
            end = span[1]
        header = json.dumps(entries).encode()
        self._header = len(header).to_bytes(8, "little") + header
        self._starts = [len(self._header) + e["data_offsets"][0] for e in entries.values()]
        self._size = len(self._header) + end
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the offset."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with bytes of the header or with one whole tensor."""
        view, start = memoryview(buffer).cast("B"), self._position
        self._position += view.nbytes
        if start < len(self._header):
            view[:] = self._header[start : start + view.nbytes]
        elif view.nbytes and self.error is None:
            tensor = self._tensors[bisect_right(self._starts, start) - 1]
            try:
                _fill([(tensor, view)], self._files, self._readers)
            except Exception as error:  # noqa: BLE001 (raised again where MLX has returned)
                # Frames of the traceback hold views of memory that MLX frees.
                self.error = error.with_traceback(None)
        return view.nbytes


def _fill(pieces: list[tuple[Any, memoryview]], files: _Files, readers: ThreadPoolExecutor) -> None:
    """Read each tensor into its view, a writable one of exactly its bytes."""
    plain: list[tuple[TensorRef, memoryview]] = []
    jobs: list[Future] = []
    try:
        for tensor, view in pieces:
            for ref, part in _parts(tensor, view):
                if isinstance(ref, TensorRef):
                    plain.append((ref, part))
                else:
                    jobs.append(readers.submit(ref.read_into, part))
        # One thread makes the reads of one group; this one, if nothing is left for others.
        groups = list(in_groups(_reads(plain), READ_BYTES))
        if len(groups) == 1 and not jobs:
            files.read(groups[0])
        else:
            jobs += [readers.submit(files.read, reads) for reads in groups]
    finally:
        # Also if the readers take no more: no file is closed under a read.
        _finish(jobs)
    _finish(
        [
            readers.submit(_take_checksums, tensor, view, e, step)
            for tensor, view in pieces
            if isinstance(tensor, Stack) and tensor.checksums is not None
            for step in [-(-len(tensor.refs) // THREADS)]
            for e in range(0, len(tensor.refs), step)
        ]
    )


def _finish(jobs: Sequence[Future]) -> None:
    """Wait for all jobs; raise the first one's error."""
    errors = []
    for job in jobs:
        try:
            job.result()
        except Exception as error:  # noqa: BLE001
            errors.append(error)
    if errors:
        raise errors[0]


class _Files(ExitStack):
    """Files that several threads read; each is opened once."""

    def __init__(self):
        super().__init__()
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, reads: list[_Read]) -> None:
        for file, offset, views, _ in reads:
            read_exact(self._fd(file), views, offset=offset, file=file, error=CheckpointError)

    def _fd(self, file: Path) -> int:
        with self._lock:
            if file not in self._fds:
                self._fds[file] = self.enter_context(opened(file))
            return self._fds[file]


class _Read(NamedTuple):
    """One read: consecutive bytes of a file into several buffers."""

    file: Path
    offset: int
    views: list[memoryview]
    nbytes: int


def _take_checksums(stack: Stack, view: memoryview, start: int, count: int) -> None:
    """Take those of up to `count` experts from `start` on."""
    n = stack.refs[0].nbytes
    assert stack.checksums is not None
    for e in range(start, min(start + count, len(stack.refs))):
        stack.checksums[e] = zlib.crc32(view[e * n : (e + 1) * n])


def _parts(tensor: Any, view: memoryview) -> Iterator[tuple[Any, memoryview]]:
    """The refs that fill `view`, each with its part of it."""
    if not isinstance(tensor, Stack):
        yield tensor, view
        return
    refs = tensor.refs
    if isinstance(refs, StridedRefs) and refs.stride == refs.nbytes:
        # One range of the file holds all experts.
        yield TensorRef(refs.name, refs.file, refs.offset, refs.dtype, tensor.shape), view
        return
    n = refs[0].nbytes
    for e, ref in enumerate(refs):
        yield ref, view[e * n : (e + 1) * n]


def _reads(pieces: Sequence[tuple[TensorRef, memoryview]]) -> list[_Read]:
    """Reads of at most ``READ_BYTES``, in the order of the files; bytes that adjoin are joined."""
    reads: list[_Read] = []
    for ref, view in sorted(pieces, key=lambda piece: (piece[0].file, piece[0].offset)):
        for start in range(0, view.nbytes, READ_BYTES):
            part, offset = view[start : start + READ_BYTES], ref.offset + start
            last = reads[-1] if reads else None
            if (
                last is not None
                and last.file == ref.file
                and last.offset + last.nbytes == offset
                and last.nbytes + part.nbytes <= READ_BYTES
                and len(last.views) < MOST_VIEWS
            ):
                last.views.append(part)
                reads[-1] = last._replace(nbytes=last.nbytes + part.nbytes)
            else:
                reads.append(_Read(ref.file, offset, [part], part.nbytes))
    return reads
