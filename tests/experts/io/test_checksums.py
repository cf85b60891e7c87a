"""Oracle: zlib.crc32, and the bits that were flipped."""

import ctypes
import json
import os
import shutil
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.checksum import joined
from mlx_moeflux.checkpoint.formats.packed import PackedExperts, PackedWriter
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io import native_pool
from mlx_moeflux.experts.io.native_pool import NativePool, open_pool
from mlx_moeflux.experts.io.read_pool import HostSlots
from mlx_moeflux.experts.io.readers import READERS
from mlx_moeflux.loading import load_model
from tests.experts.helpers import LAYERS, E, in_pieces, random_experts

TWIN = Path(__file__).parents[2] / "golden" / "text_top3"
FLIPS = 10_000
WAYS = (
    *(("native", name) for name in ("pread", "direct")),
    *(("python", name) for name in ("pread", "direct", "mmap")),
)

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def flip(file: Path, at: int, bit: int) -> None:
    """Flip a bit as a disk does: the system notices nothing."""
    times = file.stat()
    with open(file, "r+b") as handle:
        handle.seek(at)
        (byte,) = handle.read(1)
        handle.seek(at)
        handle.write(bytes([byte ^ 1 << bit]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def packed(tmp_path):
    """A packed directory of tiny experts, and the experts."""
    experts = random_experts()
    writer = PackedWriter(tmp_path, E, "source")
    for layer in LAYERS:
        with writer.layer(layer, experts.layouts[layer].components) as out:
            for e in range(E):
                for name, array in experts.arrays[layer].items():
                    out.write(e, name, 0, memoryview(array[e]))
    writer.finish()
    return PackedExperts.open(tmp_path), experts


@pytest.fixture
def open_way(packed, monkeypatch):
    """A function that opens a reader and its pool; blocks are cut into small parts."""
    opened = []

    def open_way(threads, name):
        if threads == "python":
            monkeypatch.setattr(native_pool, "library", lambda: None)
        refs = {layer: packed[0].refs(layer) for layer in LAYERS}
        reader = in_pieces(READERS[name](refs))
        pool = open_pool(reader, 3, None)
        assert isinstance(pool, NativePool) == (threads == "native")
        opened.extend((reader, pool))
        return reader, pool

    yield open_way
    for each in reversed(opened):
        each.close()


@needs_compiler
def test_the_native_checksum_is_that_of_zlib():
    function = native_pool.library().checksum
    function.restype = ctypes.c_uint32
    function.argtypes = ctypes.c_uint32, ctypes.c_char_p, ctypes.c_int64
    data = np.random.default_rng(0).bytes(70_000)
    for n in (*range(700), 4095, 4096, 69_993):
        start = n % 9
        part = data[start : start + n]
        assert function(0, part, n) == zlib.crc32(part)
        assert function(zlib.crc32(data[:start]), part, n) == zlib.crc32(data[: start + n])


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, 123_457])
def test_joined_is_the_checksum_of_the_concatenation(nbytes):
    random = np.random.default_rng(nbytes)
    pairs = [(random.bytes(int(random.integers(99))), random.bytes(nbytes)) for _ in range(5)]
    first, second, both = (
        np.array([zlib.crc32(text) for text in texts], np.uint32)
        for texts in ([a for a, _ in pairs], [b for _, b in pairs], [a + b for a, b in pairs])
    )
    assert joined(first, second, nbytes).tolist() == both.tolist()


@pytest.mark.parametrize(
    "flips", [40, pytest.param(FLIPS // len(WAYS), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(("threads", "name"), WAYS)
@needs_compiler
def test_every_flipped_bit_is_found(packed, open_way, threads, name, flips):
    found, experts = packed
    reader, pool = open_way(threads, name)
    random = np.random.default_rng([flips, len(name)])
    for _ in range(flips):
        layer, expert = LAYERS[random.integers(2)], int(random.integers(E))
        block = experts.layouts[layer].nbytes
        at = expert * found.index.layers[layer].stride + int(random.integers(block))
        bit, slots = int(random.integers(8)), HostSlots(reader.layout(layer), E)

        def read(layer=layer, expert=expert, slots=slots):
            fetch = pool.fetch(layer, slots, [(e, e) for e in {expert, (expert + 1) % E}])
            fetch.start()
            return fetch.wait(), {arrival.expert for arrival in fetch.arrivals()}

        flip(found.file(layer), at, bit)
        error, arrived = read()
        assert isinstance(error, ExpertFileError), (layer, expert, at, bit)
        assert f"layer_{layer:02d}.bin: expert {expert} of layer {layer} differs" in str(error)
        assert arrived == {(expert + 1) % E}
        flip(found.file(layer), at, bit)
    assert read() == (None, {expert, (expert + 1) % E})
    parts = [bytes(view[expert * n : (expert + 1) * n]) for view, n in slots.views]
    assert b"".join(parts) == experts.block(layer, expert)


def test_bytes_behind_a_block_do_not_count(packed, open_way):
    found, _ = packed
    reader, pool = open_way("python", "pread")
    entry = found.index.layers[3]
    flip(found.file(3), 3 * entry.stride - 1, 0)
    fetch = pool.fetch(3, HostSlots(reader.layout(3), E), [(2, 2)])
    fetch.start()
    assert fetch.wait() is None


@pytest.fixture
def model_dir(tmp_path):
    return convert(TWIN, tmp_path / "model")


def flip_expert(model_dir: Path) -> str:
    """Flip a bit of the last expert of layer 1."""
    found = PackedExperts.open(model_dir)
    flip(found.file(1), (found.num_experts - 1) * found.index.layers[1].stride + 5, 3)
    return f"expert {found.num_experts - 1}"


@pytest.mark.parametrize("options", [{"expert_memory": "100%"}, {"expert_reader": "memory"}])
def test_a_flipped_bit_is_an_error_where_all_experts_are_read_at_load(model_dir, options):
    options = {"expert_memory": "75%", "dtype": mx.float32} | options
    load_model(model_dir, **options).close()
    words = flip_expert(model_dir)
    with pytest.raises(ExpertFileError, match=rf"layer_01\.bin: {words} .*differs"):
        load_model(model_dir, **options)


def test_directories_without_checksums_load_and_say_so(model_dir, capsys):
    load_model(model_dir, expert_memory="75%", verbose=True).close()
    assert "checksums" not in capsys.readouterr().err
    index = model_dir / "experts" / "index.json"
    content = json.loads(index.read_text())
    del content["blake2b"]  # an index of before checksums were added
    for layer in content["layers"].values():
        assert len(layer.pop("crc32")) == 8 * content["num_experts"]
    index.write_text(json.dumps(content))
    flip_expert(model_dir)
    for memory in ("75%", "100%"):
        load_model(model_dir, expert_memory=memory, verbose=True).close()
        assert "has no checksums" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0" * 9, "G" * 8 * 8, 5, ["00000000"]])
def test_checksums_that_are_none(model_dir, text):
    index = model_dir / "experts" / "index.json"
    content = json.loads(index.read_text())
    content["layers"]["1"]["crc32"] = text
    index.write_text(json.dumps(content))
    with pytest.raises(ExpertFileError, match="layer 1 has a crc32 that is not 8 hex digits"):
        PackedExperts.open(model_dir)
