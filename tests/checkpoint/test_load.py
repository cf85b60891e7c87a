"""Oracle: NumPy on the bytes that the test wrote."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint import files, load
from mlx_moeflux.checkpoint.formats.decoded import DecodedRef
from mlx_moeflux.checkpoint.load import Stack, load_all, load_groups
from mlx_moeflux.checkpoint.tensors import StackedRefs, StridedRefs, TensorRef
from mlx_moeflux.errors import CheckpointError

BYTES = np.random.default_rng(0).integers(0, 250, 50_000).astype(np.uint8)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(BYTES.tobytes())
    return path


def same(array: mx.array, start: int, dtype: str, shape: tuple[int, ...]) -> bool:
    wanted = BYTES[start:].view(dtype) if start % 4 == 0 else BYTES[start:]
    wanted = wanted[: int(np.prod(shape))].reshape(shape)
    return array.shape == shape and np.array_equal(np.array(array), wanted)


@pytest.mark.parametrize("nvidia", [False, True])
@pytest.mark.parametrize("read_bytes", [64, 1 << 20])
def test_every_kind_of_source(file, monkeypatch, read_bytes, nvidia):
    monkeypatch.setattr(load, "READ_BYTES", read_bytes)
    if nvidia:  # on a CPU MLX reads such a file in a thread of its own
        monkeypatch.setattr(load, "_load", load._load_cuda)
    plain = TensorRef("a", file, 400, "U32", (7, 3))
    empty = TensorRef("none", file, 400, "F32", (0, 3))
    stacked = StackedRefs(TensorRef("s", file, 1000, "U8", (5, 4, 30)))
    rows = StackedRefs(TensorRef("s", file, 1000, "U8", (5, 4, 30)), (1, 3))
    strided = StridedRefs(
        name="b", file=file, offset=8000, stride=512, num_experts=6, dtype="U32", shape=(9,)
    )
    singles = [TensorRef(f"e{i}", file, 20_000 + 700 * i, "U8", (33,)) for i in (3, 0, 2)]
    group = [plain, empty, Stack(stacked), Stack(rows), Stack(strided), Stack(singles)]
    (a, none, s, r, b, e), (again,) = load_groups([group, [plain]])
    assert same(a, 400, "u4", (7, 3))
    assert same(again, 400, "u4", (7, 3))
    assert none.shape == (0, 3)
    assert none.dtype == mx.float32
    assert same(s, 1000, "u1", (5, 4, 30))
    assert all(same(r[i], 1000 + 120 * i + 30, "u1", (2, 30)) for i in range(5))
    assert all(same(b[i], 8000 + 512 * i, "u4", (9,)) for i in range(6))
    assert all(same(e[i], 20_000 + 700 * j, "u1", (33,)) for i, j in enumerate((3, 0, 2)))


@pytest.mark.parametrize("nvidia", [False, True])
def test_floats_of_8_bits_and_blocks_come_as_bytes_and_others_as_they_are(
    file, monkeypatch, nvidia
):
    if nvidia:
        monkeypatch.setattr(load, "_load", load._load_cuda)
    codes = ("F8_E4M3", "q4_k", "BF16", "F16", "I64")
    found = list(load_all(TensorRef("f", file, 4, code, (6,)) for code in codes))
    assert [a.dtype for a in found] == [mx.uint8, mx.uint8, mx.bfloat16, mx.float16, mx.int64]
    assert same(found[0], 4, "u1", (6,))
    assert same(found[1], 4, "u1", (6,))
    assert same(found[2].view(mx.uint16), 4, "<u2", (6,))


class Inverted(DecodedRef):
    """255 minus its source's bytes."""

    __slots__ = ()

    def decode(self, raw, out):
        out[:] = 255 - raw[0]

    def rows(self, start, stop):
        raise NotImplementedError


def test_decoded_tensors_alone_and_stacked(file):
    source = lambda at: TensorRef("raw", file, at, "U8", (50,))  # noqa: E731
    refs = [Inverted(f"d{at}", (source(at),), dtype="U8", shape=(50,)) for at in (0, 90, 300)]
    (one, stack), = load_groups([[refs[1], Stack(refs)]])  # fmt: skip
    assert np.array_equal(np.array(one), 255 - BYTES[90:140])
    assert np.array_equal(np.array(stack[2]), 255 - BYTES[300:350])


def test_short_reads_are_continued(file, monkeypatch):
    real = os.preadv

    def short(fd, views, offset):
        return real(fd, [views[0][:100]], offset)

    monkeypatch.setattr(files.os, "preadv", short)
    pieces = [TensorRef(f"e{i}", file, 130 * i, "U8", (130,)) for i in range(20)]
    (stack,) = load_all([Stack(pieces)])
    assert np.array_equal(np.array(stack).reshape(-1), BYTES[: 130 * 20])


def test_groups_are_cut_by_bytes(file):
    refs = [TensorRef(f"t{i}", file, 60 * i, "U8", (60,)) for i in range(5)]
    assert all(same(a, 60 * i, "u1", (60,)) for i, a in enumerate(load_all(refs, group_bytes=100)))
    assert list(load_all([])) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_a_truncated_file_is_named_with_the_offset(file, ahead):
    good, bad = (TensorRef("x", file, at, "U8", (200,)) for at in (0, 49_900))
    groups = load_groups([[good], [bad]] if ahead else [[bad, good]])
    if ahead:
        assert same(next(groups)[0], 0, "u1", (200,))
    with pytest.raises(
        CheckpointError, match=r"weights.bin ends early: expected 200.*at offset 49900"
    ):
        list(groups)


def test_a_missing_file_is_named_and_no_file_stays_open(file, tmp_path):
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(CheckpointError, match=r"gone.bin cannot be read"):
        list(load_all([TensorRef("x", tmp_path / "gone.bin", 0, "U8", (3,))]))
    list(load_all([TensorRef("x", file, 0, "U8", (3,))]))
    assert len(os.listdir("/dev/fd")) == before


def test_stopping_early_leaves_no_thread_and_reads_no_more(file, monkeypatch):
    begun, cancelled, real = [], threading.Event(), load.read_exact

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            cancelled.set()
            super().shutdown(wait)

    def read(fd, views, *, offset, **options):
        begun.append(offset)
        if offset >= 10_000:
            assert cancelled.wait(60)
        real(fd, views, offset=offset, **options)

    monkeypatch.setattr(load, "READ_BYTES", 10)
    monkeypatch.setattr(load, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(load, "read_exact", read)
    small, large = TensorRef("x", file, 0, "U8", (3,)), TensorRef("y", file, 10_000, "U8", (9_000,))
    groups = load_groups([[small], [large], [large], [large]])
    next(groups)
    groups.close()
    assert len(begun) <= 1 + load.THREADS  # of 1 + 900 + 900
    assert not [t for t in threading.enumerate() if t.name.startswith("moeflux-load")]


class Threaded(Inverted):
    """Notes which thread decodes it."""

    __slots__ = ()
    threads: ClassVar[list[threading.Thread]] = []

    def decode(self, raw, out):
        self.threads.append(threading.current_thread())
        super().decode(raw, out)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_only_threads_of_this_module_run_python(file, monkeypatch, request, device):
    before = mx.default_device()
    request.addfinalizer(lambda: mx.set_default_device(before))
    mx.set_default_device(getattr(mx, device))
    seen, real, by_mlx = Threaded.threads, load.read_exact, load._VirtualFile.readinto

    def read(*arguments, **options):
        seen.append(threading.current_thread())
        real(*arguments, **options)

    def readinto(self, buffer):
        called.append(threading.current_thread())
        return by_mlx(self, buffer)

    seen.clear()
    called: list[threading.Thread] = []
    monkeypatch.setattr(load, "read_exact", read)
    monkeypatch.setattr(load._VirtualFile, "readinto", readinto)
    plain = TensorRef("x", file, 0, "U8", (60,))
    decoded = Threaded("d", (TensorRef("raw", file, 90, "U8", (50,)),), dtype="U8", shape=(50,))
    whole, one = load_all([plain, decoded])
    assert same(whole, 0, "u1", (60,))
    assert np.array_equal(np.array(one), 255 - BYTES[90:140])
    assert len(seen) == 2
    assert bool(called) == (device == "gpu" and mx.cuda.is_available())
    # A thread that Python did not start, such as one of MLX's, is called "Dummy-...".
    assert all(thread.name.startswith("moeflux-load") for thread in seen + called)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts in /proc")
def test_loads_leave_no_threads_to_mlx(file):
    def load_in_groups():
        refs = [TensorRef(str(i), file, 100 * i, "U8", (100,)) for i in range(6)]
        assert len(list(load_all(refs, group_bytes=100))) == 6
        limit = mx.set_cache_limit(0)  # waits for every stream, of which each has a thread then
        mx.set_cache_limit(limit)
        return len(os.listdir("/proc/self/task"))

    before, loads = load_in_groups(), 10
    # Something else of the process may begin a thread meanwhile.
    assert [load_in_groups() for _ in range(loads)][-1] < before + loads


def test_pieces_of_one_tensor_that_fail_end_before_the_file_is_closed(file, monkeypatch):
    """A read of a closed descriptor may meet another file."""
    late, failed, real = threading.Event(), threading.Event(), load.read_exact
    done: list[int] = []

    def read(fd, views, *, offset, **options):
        if offset == 0:
            failed.set()
            raise CheckpointError("the first piece")
        assert failed.wait(10)
        late.wait(0.05)
        os.fstat(fd)
        real(fd, views, offset=offset, **options)
        done.append(offset)

    monkeypatch.setattr(load, "READ_BYTES", 1000)
    monkeypatch.setattr(load, "read_exact", read)
    with pytest.raises(CheckpointError, match="the first piece"):
        list(load_all([TensorRef("x", file, 0, "U8", (3000,))]))
    assert sorted(done) == [1000, 2000]
