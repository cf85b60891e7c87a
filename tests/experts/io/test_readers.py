"""Oracle: the bytes that were written."""

import errno
import mmap
import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_moeflux.checkpoint.files import window
from mlx_moeflux.checkpoint.tensors import StackedRefs, TensorRef
from mlx_moeflux.errors import (
    CheckpointError,
    ExpertFileError,
    InputError,
    ShapeError,
    UnsupportedError,
)
from mlx_moeflux.experts.io import file_readers
from mlx_moeflux.experts.io.byte_ranges import ByteRanges
from mlx_moeflux.experts.io.open_files import make_room
from mlx_moeflux.experts.io.readers import READERS, check_methods, check_reader, make_reader
from tests.experts.helpers import (
    FORMS,
    LAYERS,
    MIXED,
    C,
    E,
    F,
    in_pieces,
    random_experts,
    write_experts,
)

FILE_READERS = [name for name in READERS if name != "memory"]


@pytest.fixture(params=FORMS)
def experts(request, tmp_path):
    return write_experts(tmp_path, random_experts(MIXED), request.param)


def buffers(layout):
    return [memoryview(bytearray(c.nbytes)) for c in layout.components]


def read_block(reader, layer, expert):
    into = buffers(reader.layout(layer))
    assert reader.read(layer, expert, into) == reader.layout(layer).nbytes
    return b"".join(into)


@pytest.mark.parametrize("name", READERS)
def test_every_reader_gives_every_block(experts, name):
    reader = make_reader(name, experts.refs)
    try:
        assert (reader.name, reader.layers, reader.num_experts) == (name, LAYERS, E)
        where = [(layer, e) for layer in LAYERS for e in range(E)]
        with ThreadPoolExecutor(4) as pool:
            blocks = list(pool.map(lambda at: read_block(reader, *at), where * 3))
        assert blocks == [experts.block(*at) for at in where * 3]
    finally:
        reader.close()


def test_direct_reads_of_many_pages(tmp_path, monkeypatch):
    """Blocks larger than the bounce buffer, at odd offsets, up to the end of the file."""
    experts = write_experts(tmp_path, random_experts(MIXED), "stacked")
    monkeypatch.setattr(file_readers, "MAX_BOUNCE_BYTES", 8192)
    reader = file_readers.DirectReader(experts.refs)
    assert reader.staging_bytes in (0, 8192)
    assert all(read_block(reader, 5, e) == experts.block(5, e) for e in range(E))
    reader.close()


@pytest.mark.parametrize("name", ["pread", "direct", "mmap"])
@pytest.mark.parametrize("count", [1, 2, 5, 1000])
def test_pieces_make_up_the_block(experts, name, count):
    reader = in_pieces(READERS[name](experts.refs))
    layout = reader.layout(5)
    whole = len(reader.ranges.runs(5, 3)) == 1
    into, again = buffers(layout), buffers(layout)
    pieces = reader.pieces(5, count)
    assert bool(pieces) == whole
    assert all(piece.stop - piece.start >= 1000 for piece in pieces[:-1])
    assert not pieces or len(pieces) == max(1, min(count, layout.nbytes // 1000))
    for piece in reversed(pieces):
        run, views = reader.piece(5, 3, piece), [into[c][a:b] for c, a, b in piece.parts]
        assert reader.read_run(run, views) == run.nbytes == piece.stop - piece.start
    # The same through page-aligned memory with two pages to spare.
    stage = memoryview(mmap.mmap(-1, -(-layout.nbytes // 4096) * 4096 + 8192))
    for piece in pieces:
        run = reader.piece(5, 3, piece)
        start = reader.read_staged(run, stage[: run.nbytes + 8192])
        assert start <= 4095
        for c, a, b in piece.parts:
            again[c][a:b] = stage[start : start + b - a]
            start += b - a
    if whole:
        assert b"".join(into) == b"".join(again) == experts.block(5, 3)
    reader.close()


def test_large_pieces_begin_on_pages_and_are_alike():
    sizes = [524288, 32768, 32768] * 3
    for count, step in ((1, 1769472), (2, 884736), (3, 589824), (4, 442368), (9, 294912)):
        pieces = file_readers.cut(range(9), sizes, count)
        lengths = [piece.stop - piece.start for piece in pieces]
        assert sum(lengths) == 1769472
        assert lengths[:-1] == [step] * (len(pieces) - 1)
        assert [sum(b - a for _, a, b in p.parts) for p in pieces] == lengths
    assert [[c for c, *_ in p.parts] for p in file_readers.cut(range(9), sizes, 3)] == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8]
    ]  # fmt: skip


def test_staged_direct_reads_go_on_after_short_ones_and_end(tmp_path, monkeypatch):
    experts = write_experts(tmp_path, random_experts(MIXED), "packed")
    reader, preadv = make_reader("direct", experts.refs), os.preadv
    (piece,) = reader.pieces(3, 1)
    run = reader.piece(3, E - 1, piece)
    stage = memoryview(mmap.mmap(-1, run.nbytes // 4096 * 4096 + 16384))

    def short(fd, views, offset):
        return min(preadv(fd, views, offset), max(4096, len(views[0]) // 3))

    monkeypatch.setattr(os, "preadv", short)
    start = reader.read_staged(run, stage)
    assert bytes(stage[start : start + run.nbytes]) == experts.block(3, E - 1)
    monkeypatch.undo()
    os.truncate(reader.ranges.files[run.file], run.offset + run.nbytes - 1)
    with pytest.raises(ExpertFileError, match="ends early"):
        reader.read_staged(run, stage)
    reader.close()


@pytest.mark.parametrize(("form", "calls"), [("packed", 1), ("stacked", 7), ("separate", 1)])
def test_adjacent_ranges_are_one_system_call(tmp_path, monkeypatch, form, calls):
    """Also in `separate`, where a file holds the seven components back to front."""
    experts = write_experts(tmp_path, random_experts(MIXED), form)
    reader, seen = make_reader("pread", experts.refs), []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: (seen.append(a[2]), preadv(*a))[1])
    assert read_block(reader, 3, 2) == experts.block(3, 2)
    assert len(seen) == calls
    reader.close()


def test_fused_gate_and_up_are_merged(tmp_path):
    """[E, 2F, C] holds both projections of an expert side by side."""
    both = TensorRef("gate_up_proj", tmp_path / "a", 40, "BF16", (E, 2 * F, C))
    down = TensorRef("down_proj", tmp_path / "b", 8, "BF16", (E, C, F))
    ranges = ByteRanges(
        {
            0: {
                "gate_proj.weight": StackedRefs(both, (0, F)),
                "up_proj.weight": StackedRefs(both, (F, 2 * F)),
                "down_proj.weight": StackedRefs(down),
            }
        }
    )
    found = [(r.file, r.offset, r.nbytes, r.components) for r in ranges.runs(0, 2)]
    size = F * C * 2
    assert found == [(0, 40 + 4 * size, 2 * size, (0, 1)), (1, 8 + 2 * size, size, (2,))]


def test_short_reads_are_continued(experts, monkeypatch):
    preadv = os.preadv

    def short(fd, views, offset):
        first = views[0]
        return preadv(fd, [first[: max(1, first.nbytes // 3)]], offset)

    reader = make_reader("pread", experts.refs)
    monkeypatch.setattr(os, "preadv", short)
    assert read_block(reader, 5, 6) == experts.block(5, 6)
    reader.close()


@pytest.mark.parametrize("name", ["pread", "direct"])
def test_io_error_names_file_and_offset(tmp_path, monkeypatch, name):
    experts = write_experts(tmp_path, random_experts(), "packed")
    reader = make_reader(name, experts.refs)

    def broken(fd, views, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(ExpertFileError, match=r"packed_3\.bin at offset \d+ failed: Input/out"):
            read_block(reader, 3, 4)
    assert read_block(reader, 3, 4) == experts.block(3, 4)
    reader.close()


@pytest.mark.parametrize("name", FILE_READERS)
def test_end_of_file_is_an_error(tmp_path, name):
    experts = write_experts(tmp_path, random_experts(), "packed")
    file = tmp_path / "packed_5.bin"
    os.truncate(file, file.stat().st_size - 100 - experts.layouts[5].nbytes // 2)
    reader = make_reader(name, experts.refs)
    assert read_block(reader, 5, E - 2) == experts.block(5, E - 2)
    with pytest.raises(ExpertFileError, match=r"packed_5\.bin ends early"):
        read_block(reader, 5, E - 1)
    reader.close()


@pytest.mark.parametrize("name", READERS)
def test_missing_file_is_an_error_at_open(tmp_path, name):
    experts = write_experts(tmp_path, random_experts(), "separate")
    (tmp_path / "layer_5_expert_2.bin").unlink()
    with pytest.raises(ExpertFileError, match=r"layer_5_expert_2\.bin cannot be read: No such"):
        make_reader(name, experts.refs)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="O_DIRECT is Linux's")
@pytest.mark.parametrize("stage", ["open", "preadv"])
def test_direct_refused_by_the_file_system(tmp_path, monkeypatch, stage):
    experts = write_experts(tmp_path, random_experts(), "packed")
    original = getattr(os, stage)

    def refuse(*args, **options):
        if stage == "preadv" or args[1] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(*args, **options)

    monkeypatch.setattr(os, stage, refuse)
    with pytest.raises(UnsupportedError, match="choose the reader 'pread'"):
        make_reader("direct", experts.refs)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_close_returns_every_descriptor(experts):
    for name in READERS:
        before = len(os.listdir("/proc/self/fd"))
        reader = make_reader(name, experts.refs)
        read_block(reader, 3, 0)
        reader.close()
        reader.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_wrong_requests(experts):
    reader = make_reader("auto", experts.refs)
    assert reader.name == "pread"
    into = buffers(reader.layout(3))
    with pytest.raises(ExpertFileError, match="layer 4 has no routed experts"):
        reader.read(4, 0, into)
    with pytest.raises(ExpertFileError, match="no expert 7"):
        reader.read(3, E, into)
    with pytest.raises(ShapeError, match="buffers"):
        reader.read(3, 0, into[:-1])
    reader.close()
    with pytest.raises(InputError, match="auto, pread, direct, mmap, memory"):
        make_reader("telepathy", experts.refs)


def test_experts_that_do_not_fit_together(tmp_path):
    refs = write_experts(tmp_path, random_experts(), "separate").refs
    with pytest.raises(CheckpointError, match="no routed experts"):
        ByteRanges({})
    few = {3: refs[3] | {"up_proj.scales": refs[3]["up_proj.scales"][:-1]}}
    with pytest.raises(CheckpointError, match=r"6 experts in 'up_proj\.scales', expected 7"):
        ByteRanges(few)
    odd = list(refs[3]["up_proj.scales"])
    odd[4] = TensorRef("odd", Path("odd.bin"), 0, "F32", odd[4].shape)
    with pytest.raises(CheckpointError, match=r"odd\.bin: 'odd' is F32"):
        ByteRanges({3: refs[3] | {"up_proj.scales": tuple(odd)}})


def test_reader_is_checked_against_the_model(experts):
    reader = make_reader("memory", experts.refs)
    check_reader(reader, layers=LAYERS, num_experts=E, hidden=C, intermediate=F)
    with pytest.raises(ShapeError, match="no experts for layer 4"):
        check_reader(reader, layers=(3, 4), num_experts=E)
    with pytest.raises(ShapeError, match="7 experts a layer, the model has 8"):
        check_reader(reader, layers=LAYERS, num_experts=8)
    with pytest.raises(ShapeError, match="hidden width 64 and inner width 128"):
        check_reader(reader, layers=LAYERS, num_experts=E, hidden=C, intermediate=F + 1)
    with pytest.raises(InputError, match="no method 'layout'"):
        check_methods(object())


def test_window_is_the_slice_of_the_concatenation():
    views = [memoryview(bytes(range(a, b))) for a, b in ((0, 5), (5, 6), (6, 13))]
    whole = bytes(range(13))
    for start in range(14):
        for stop in range(start, 14):
            parts = window(views, start, stop)
            assert b"".join(parts) == whole[start:stop]
            assert all(len(part) for part in parts)


def test_more_files_than_macos_lets_a_process_open(tmp_path):
    """A second reader of DeepSeek-V3's 163 shards, where a process begins with 256 files."""
    experts = random_experts()
    stored = write_experts(tmp_path / "x", experts, "packed")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        held += [os.dup(0) for _ in range(200 - len(os.listdir("/dev/fd")))]
        readers = [make_reader("pread", stored.refs) for _ in range(2)]
        held += [os.dup(0) for _ in range(163)]
        for reader in readers:
            reader.close()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert 256 < soft <= hard
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_limit_that_cannot_be_raised_stays(monkeypatch):
    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 300))
    asked = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    make_room(170)
    assert asked == [(300, 300)]
    monkeypatch.setattr(resource, "setrlimit", refuse)
    make_room(170)
