"""Oracle: the files, which other programs change while they are open."""

import os
import shutil
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io import file_readers, native_pool
from mlx_moeflux.experts.io.file_readers import DirectReader
from mlx_moeflux.experts.io.native_pool import NativePool, open_pool
from mlx_moeflux.experts.io.read_pool import HostSlots
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.loading import load_model
from tests.experts.helpers import FORMS, E, random_experts, write_experts

TWIN = Path(__file__).parents[2] / "golden" / "text_top3"
PACKED_FIRST = "packed", *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS[1:])
WAYS = (
    *(("native", name) for name in ("pread", "direct")),
    *(("python", name) for name in ("pread", "direct", "mmap")),
)


def overwritten(file: Path) -> None:
    with open(file, "r+b") as handle:
        handle.write(b"other")


def longer(file: Path) -> None:
    with open(file, "ab") as handle:
        handle.write(b"more")


def replaced(file: Path) -> None:
    shutil.copy2(file, file.with_name("copy"))
    os.replace(file.with_name("copy"), file)


CHANGES = (overwritten, longer, replaced, Path.unlink)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("form", PACKED_FIRST)
@pytest.mark.parametrize(("threads", "name"), WAYS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_one_line(tmp_path, monkeypatch, form, threads, name, change):
    if threads == "python":
        monkeypatch.setattr(native_pool, "library", lambda: None)
    monkeypatch.chdir(tmp_path)
    # A relative path: the process changes its directory below.
    reader = make_reader(name, write_experts(Path("model"), random_experts(), form).refs)
    pool = open_pool(reader, 2, None)
    assert isinstance(pool, NativePool) == (threads == "native")
    monkeypatch.chdir("/")

    def read(*experts):
        fetch = pool.fetch(3, HostSlots(reader.layout(3), E), [(e, e) for e in experts])
        fetch.start()
        return fetch.wait(), [arrival.expert for arrival in fetch.arrivals()]

    assert read(1, 2) == (None, [1, 2])
    file = reader.ranges.files[reader.ranges.runs(3, 2)[0].file]
    time.sleep(0.02)  # the system's clock for files is coarse
    change(tmp_path / file)
    error, arrived = read(2)
    assert isinstance(error, ExpertFileError)
    assert str(error).startswith(f"{file} was changed, replaced or removed while in use")
    assert arrived == []
    pool.close()
    reader.close()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct reads need no alignment here")
@pytest.mark.parametrize("unit", [512, 4096])
@pytest.mark.parametrize("bounce", [8192, 1 << 20])
def test_short_direct_reads_go_on_at_the_next_sector(tmp_path, monkeypatch, unit, bounce):
    experts = write_experts(tmp_path, random_experts(), "stacked")
    monkeypatch.setattr(file_readers, "MAX_BOUNCE_BYTES", bounce)
    reader, preadv = DirectReader(experts.refs), os.preadv
    random = np.random.default_rng(unit)

    def short(fd, views, offset):
        (view,) = views
        assert offset % 512 == len(view) % 512 == 0
        return preadv(fd, [view[: unit * int(random.integers(1, len(view) // unit + 1))]], offset)

    monkeypatch.setattr(os, "preadv", short)
    for e in range(E):
        into = [memoryview(bytearray(c.nbytes)) for c in reader.layout(5).components]
        reader.read(5, e, into)
        assert b"".join(into) == experts.block(5, e)
    reader.close()


def test_a_prompt_after_a_change_is_refused_and_the_next_model_is_right(tmp_path):
    directory = convert(TWIN, tmp_path / "model")
    ids = mx.array([[3, 5, 7, 11]])
    with load_model(directory, expert_memory="75%") as model:
        expected = np.array(model(ids))
        assert np.isfinite(expected).all()
        replaced(directory / "experts" / "layer_01.bin")
        every = mx.array(np.random.default_rng(0).integers(0, 60, (1, 64)))
        with pytest.raises(ExpertFileError, match=r"layer_01\.bin was changed"):
            model(every)
    with load_model(directory, expert_memory="75%") as model:
        assert np.array_equal(model(ids), expected)


def test_resident_experts_are_not_read_again_from_another_file(tmp_path):
    directory = convert(TWIN, tmp_path / "model")
    ids = mx.array([[3, 5, 7, 11]])
    with load_model(directory, expert_memory="100%") as model:
        expected = np.array(model(ids))
        model.release()
        assert np.array_equal(model(ids), expected)
        model.release()
        replaced(directory / "experts" / "layer_01.bin")
        with pytest.raises(ExpertFileError, match=r"layer_01\.bin was changed"):
            model(ids)
