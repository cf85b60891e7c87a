"""The packed directory; the oracle is the random bytes that were written, and hashlib."""

import errno
import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest

from mlx_moeflux.checkpoint.formats.packed import (
    ALIGNMENT,
    PackedExperts,
    PackedWriter,
    is_packed,
    verify,
)
from mlx_moeflux.checkpoint.tensors import ITEMSIZE
from mlx_moeflux.errors import ExpertFileError

E = 3


@dataclass(frozen=True)
class Part:
    name: str
    dtype: str
    shape: tuple

    @property
    def nbytes(self):
        return prod(self.shape) * ITEMSIZE[self.dtype]


PARTS = (("weight", "U32", 8), ("scales", "BF16", 64), ("biases", "BF16", 64))
QUANTISED = [
    Part(f"{projection}_proj.{part}", dtype, (rows, width // packing))
    for projection, rows, width in (("gate", 5, 128), ("up", 5, 128), ("down", 128, 64))
    for part, dtype, packing in PARTS
]
PLAIN = [
    Part("gate_proj.weight", "F32", (7, 30)),
    Part("up_proj.weight", "F32", (7, 30)),
    Part("down_proj.weight", "BF16", (3000, 7)),
]


def random_blocks(parts, seed=0, experts=E):
    rng = np.random.default_rng(seed)
    return [[rng.bytes(part.nbytes) for part in parts] for _ in range(experts)]


def write_block(out, expert, parts):
    for component, data in zip(out.plan.components, parts, strict=True):
        out.write(expert, component.name, 0, data)


def write(directory, layers, source="source", experts=E):
    """Write layers (id -> parts) of random blocks and finish; returns id -> blocks."""
    writer = PackedWriter(directory, experts, source)
    blocks = {layer: random_blocks(parts, layer, experts) for layer, parts in layers.items()}
    for layer, parts in layers.items():
        with writer.layer(layer, parts) as out:
            for e, block in enumerate(blocks[layer]):
                write_block(out, e, block)
    writer.finish(layers)
    return blocks


def read(ref):
    raw = bytearray(ref.nbytes)
    ref.read_into(memoryview(raw))
    return bytes(raw)


def one_sentence(message, *parts):
    assert "\n" not in message
    assert message.endswith(".")
    for part in parts:
        assert str(part) in message, (part, message)


def test_what_is_written_is_read_back_through_refs(tmp_path):
    layers = {3: QUANTISED, 4: PLAIN, 117: QUANTISED}
    blocks = write(tmp_path, layers)
    packed = PackedExperts.open(tmp_path)
    assert packed.layers == (3, 4, 117)
    assert packed.num_experts == E
    for layer, parts in layers.items():
        refs = packed.refs(layer)
        assert list(refs) == [part.name for part in parts]
        for i, part in enumerate(parts):
            assert len(refs[part.name]) == E
            for e in range(E):
                ref = refs[part.name][e]
                assert (ref.dtype, ref.shape) == (part.dtype, part.shape)
                assert read(ref) == blocks[layer][e][i]
    verify(tmp_path)


def test_the_files_are_exactly_as_the_format_says(tmp_path):
    blocks = write(tmp_path, {3: PLAIN})
    block = b"".join(blocks[3][1])
    stride = -(-len(block) // 16384) * 16384
    assert (len(block), stride) == (43680, 49152), "the case needs padding of a block"
    content = (tmp_path / "experts" / "layer_03.bin").read_bytes()
    assert len(content) == E * stride
    assert content[stride : stride + len(block)] == block
    assert content[stride + len(block) : 2 * stride] == b"\0" * (stride - len(block))
    assert sorted(os.listdir(tmp_path / "experts")) == ["index.json", "layer_03.bin"]
    index = json.loads((tmp_path / "experts" / "index.json").read_text())
    digest, text = index.pop("blake2b"), json.dumps(index, sort_keys=True).encode()
    assert digest == hashlib.blake2b(text, digest_size=32).hexdigest()
    assert index == {
        "format": "mlx_moeflux.experts",
        "version": 1,
        "num_experts": E,
        "source": "source",
        "layers": {
            "3": {
                "file": "layer_03.bin",
                "stride": stride,
                "bytes": E * stride,
                "blake2b": hashlib.blake2b(content, digest_size=32).hexdigest(),
                "crc32": "".join(f"{zlib.crc32(b''.join(b)):08x}" for b in blocks[3]),
                "components": [
                    {"name": part.name, "dtype": part.dtype, "shape": list(part.shape)}
                    for part in PLAIN
                ],
            }
        },
    }


def test_row_chunks_in_any_order_make_the_same_file(tmp_path):
    blocks = write(tmp_path / "whole", {0: QUANTISED})[0]
    writer = PackedWriter(tmp_path / "chunks", E, "source")
    chunks = []
    for e in range(E):
        for part, data in zip(QUANTISED, blocks[e], strict=True):
            row = part.nbytes // part.shape[0]
            for start in range(0, part.shape[0], 3):
                chunks.append((e, part.name, start, data[start * row : (start + 3) * row]))
    np.random.default_rng(5).shuffle(chunks)
    with writer.layer(0, QUANTISED) as out:
        for chunk in chunks:
            out.write(*chunk)
    writer.finish()
    for name in ("layer_00.bin", "index.json"):
        assert (tmp_path / "whole" / "experts" / name).read_bytes() == (
            tmp_path / "chunks" / "experts" / name
        ).read_bytes()


def test_buffers_may_be_arrays_of_any_type(tmp_path):
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(part.shape).astype(np.float32) for part in PLAIN[:2]]
    arrays.append(rng.integers(0, 2**16, PLAIN[2].shape, np.uint16))
    writer = PackedWriter(tmp_path, 1, "source")
    with writer.layer(0, PLAIN) as out:
        write_block(out, 0, arrays)
    writer.finish()
    refs = PackedExperts.open(tmp_path).refs(0)
    assert [read(refs[part.name][0]) for part in PLAIN] == [a.tobytes() for a in arrays]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real, calls = os.pwrite, []

    def short(fd, view, offset):
        calls.append(offset)
        return real(fd, view[:999], offset)

    monkeypatch.setattr(os, "pwrite", short)
    blocks = write(tmp_path, {0: PLAIN}, experts=1)
    assert len(calls) == sum(-(-part.nbytes // 999) for part in PLAIN)
    refs = PackedExperts.open(tmp_path).refs(0)
    assert [read(refs[part.name][0]) for part in PLAIN] == blocks[0][0]


# The next tests are of calls that the writer must refuse.


@pytest.mark.parametrize(("call", "words"), [
    (lambda out, b: out.write(E, "up_proj.weight", 0, b[1]), "has 3 experts: there is no 3"),
    (lambda out, b: out.write(-1, "up_proj.weight", 0, b[1]), "there is no -1"),
    (lambda out, b: out.write(0, "gate_proj.scales", 0, b""), "no component 'gate_proj.scales'"),
    (lambda out, b: out.write(0, "up_proj.weight", 6, bytes(240)), "240 bytes at row 6 of up_proj"),
    (lambda out, b: out.write(0, "up_proj.weight", -1, bytes(120)), "at row -1 of up_proj.weight"),
    (lambda out, b: out.write(0, "up_proj.weight", 0, bytes(121)), "has rows of 120 bytes"),
    (lambda out, b: out.write(5, "up_proj.weight", 0, bytes(120)), "there is no 5"),
])  # fmt: skip
def test_writes_that_do_not_fit_are_refused_and_leave_nothing(call, words, tmp_path):
    writer = PackedWriter(tmp_path, E, "source")
    with pytest.raises(ExpertFileError) as caught, writer.layer(0, PLAIN) as out:
        call(out, random_blocks(PLAIN)[0])
    one_sentence(str(caught.value), words)
    assert os.listdir(tmp_path / "experts") == []
    assert not writer.done(0)


def test_a_layer_with_a_hole_is_not_finished(tmp_path):
    writer = PackedWriter(tmp_path, E, "source")
    blocks = random_blocks(PLAIN)

    def write_all_but_one_row():
        with writer.layer(7, PLAIN) as out:
            write_block(out, 0, blocks[0])
            write_block(out, 2, blocks[2])
            out.write(1, "gate_proj.weight", 0, blocks[1][0])
            out.write(1, "up_proj.weight", 0, blocks[1][1][:480])
            out.write(1, "up_proj.weight", 5, blocks[1][1][600:])
            out.write(1, "down_proj.weight", 0, blocks[1][2])

    with pytest.raises(ExpertFileError) as caught:
        write_all_but_one_row()
    one_sentence(str(caught.value), "Layer 7", "row 4 of up_proj.weight of expert 1")
    assert os.listdir(tmp_path / "experts") == []


def test_writing_after_the_end_is_refused(tmp_path):
    writer = PackedWriter(tmp_path, 1, "source")
    block = random_blocks(PLAIN)[0]
    with writer.layer(0, PLAIN) as out:
        write_block(out, 0, block)
    with pytest.raises(ExpertFileError, match="is closed"):
        write_block(out, 0, block)


@pytest.mark.parametrize("parts", [
    [], PLAIN[:1] + PLAIN[:1], PLAIN[::-1], [Part("gate", "F32", (3, 4))],
    [Part("gate_proj.weight", "F4", (3, 4))], [Part("gate_proj.weight", "F32", (3, 0))],
    [Part("gate_proj.weight", "F32", ())],
])  # fmt: skip
def test_components_that_are_no_block_are_refused(parts, tmp_path):
    with pytest.raises(ExpertFileError):
        PackedWriter(tmp_path, E, "source").layer(0, parts)


def test_finishing_without_a_layer_is_refused(tmp_path):
    writer = PackedWriter(tmp_path, E, "source")
    with pytest.raises(ExpertFileError, match="no layer is written"):
        writer.finish()
    with pytest.raises(ExpertFileError, match="layer 4 is not written"):
        writer.finish([4])
    with pytest.raises(ExpertFileError, match="0 experts"):
        PackedWriter(tmp_path, 0, "source")


# What a directory that is not right says when it is opened or verified.


@pytest.fixture
def packed(tmp_path):
    """A finished directory of the layers 3 and 4."""
    write(tmp_path, {3: PLAIN, 4: QUANTISED})
    return tmp_path


def test_a_missing_layer_file_is_named_at_open(packed):
    (packed / "experts" / "layer_04.bin").unlink()
    with pytest.raises(ExpertFileError) as caught:
        PackedExperts.open(packed)
    one_sentence(str(caught.value), packed / "experts" / "layer_04.bin", "layer 4", "is missing")


@pytest.mark.parametrize("change", [-1, 1, -ALIGNMENT])
def test_a_layer_file_of_another_size_is_named_at_open(packed, change):
    file = packed / "experts" / "layer_03.bin"
    size = file.stat().st_size
    os.truncate(file, size + change)
    with pytest.raises(ExpertFileError) as caught:
        PackedExperts.open(packed)
    one_sentence(str(caught.value), file, f"has {size + change} bytes, but must have {size}")


@pytest.mark.parametrize("where", [0, 40_000, -1])
def test_one_flipped_bit_opens_but_does_not_verify(packed, where):
    file = packed / "experts" / "layer_03.bin"
    content = bytearray(file.read_bytes())
    content[where] ^= 16
    file.write_bytes(content)
    PackedExperts.open(packed)
    with pytest.raises(ExpertFileError) as caught:
        verify(packed)
    one_sentence(str(caught.value), file, "differs from what was written")
    assert "layer_04" not in str(caught.value)


def test_verify_reports_its_progress(packed):
    seen = []
    verify(packed, lambda done, total: seen.append((done, total)))
    size = sum(f.stat().st_size for f in (packed / "experts").glob("layer_*.bin"))
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_input_output_error_while_verifying_is_named(packed, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ExpertFileError) as caught:
        verify(packed)
    one_sentence(str(caught.value), packed / "experts" / "layer_03.bin", os.strerror(errno.EIO))


def test_a_layer_that_is_not_there(packed):
    with pytest.raises(
        ExpertFileError, match=r"no experts of layer 5; it has those of layers 3, 4"
    ):
        PackedExperts.open(packed).refs(5)


def test_directories_that_are_not_packed(tmp_path):
    assert not is_packed(tmp_path)
    with pytest.raises(ExpertFileError, match=r"index\.json is missing"):
        PackedExperts.open(tmp_path)
    writer = PackedWriter(tmp_path, 1, "source")
    with writer.layer(0, PLAIN) as out:
        write_block(out, 0, random_blocks(PLAIN)[0])
    assert is_packed(tmp_path)
    with pytest.raises(ExpertFileError, match="unfinished conversion; run the same conversion"):
        PackedExperts.open(tmp_path)


def change_layer(**changes):
    return lambda index: index["layers"]["3"].update(changes)


def change_component(**changes):
    return lambda index: index["layers"]["3"]["components"][0].update(changes)


WRONG = {
    "format": (lambda index: index.update(format="other"), "format is 'other'"),
    "version": (lambda index: index.update(version=2), "version 2, but this package reads 1"),
    "num_experts": (lambda index: index.update(num_experts=0), "num_experts is 0"),
    "num_experts true": (lambda index: index.update(num_experts=True), "num_experts is True"),
    "other num_experts": (lambda index: index.update(num_experts=4), "has bytes 147456, but str"),
    "layers list": (lambda index: index.update(layers=[1]), "layers is [1]"),
    "no layers": (lambda index: index.update(layers={}), "its blake2b is another"),
    "source": (lambda index: index.update(source=3), "source is 3"),
    "layer id": (lambda index: index["layers"].update(x={}), "'x' is not a layer id"),
    "layer id padded": (lambda index: index["layers"].update({"03": {}}), "'03' is not a layer id"),
    "layer id long": (lambda index: index["layers"].update({"9" * 5000: {}}), "not a layer id"),
    "layer null": (lambda index: index["layers"].update({"3": None}), "layer 3 is None"),
    "one file twice": (change_layer(file="layer_04.bin"), "two layers share one file"),
    "path up": (change_layer(file="../layer_03.bin"), "'../layer_03.bin', which is not a path in"),
    "path absolute": (change_layer(file="/etc/passwd"), "'/etc/passwd', which is not a path in"),
    "path missing": (change_layer(file=None), "None, which is not a path inside"),
    "stride short": (change_layer(stride=ALIGNMENT), "stride 16384, but its block takes 43680"),
    "stride odd": (change_layer(stride=49153), "has stride 49153, no multiple of 16384"),
    "stride text": (change_layer(stride="49152"), "has stride '49152'"),
    "bytes": (change_layer(bytes=1), "has bytes 1"),
    "hash": (change_layer(blake2b="xyz"), "has blake2b 'xyz'"),
    "hash missing": (change_layer(blake2b=None), "has blake2b None"),
    "components": (change_layer(components={}), "has components {}"),
    "component no object": (change_layer(components=["w"]), "unknown component 'w'"),
    "no components": (change_layer(components=[]), "has the components none"),
    "component name": (change_component(name="w"), "unknown component 'w'"),
    "component twice": (change_component(name="up_proj.weight"), "has the components up_proj.weig"),
    "component dtype": (change_component(dtype="F4"), "gate_proj.weight of layer 3 has dtype 'F4'"),
    "component shape": (change_component(shape=[3, -1]), "has shape [3, -1]"),
    "component shape empty": (change_component(shape=[]), "has shape []"),
    "trunk": (lambda index: index.update(trunk={}), "trunk is {}"),
    "trunk entry": (lambda index: index.update(trunk=["a"]), "trunk has 'a'"),
    "trunk path": (lambda index: index.update(trunk=[{"file": "../a"}]), "'../a', which is not a"),
    "trunk bytes": (lambda index: index.update(trunk=[{"file": "a", "bytes": 0}]), "a has bytes 0"),
    "trunk hash": (lambda index: index.update(trunk=[{"file": "a", "bytes": 1}]), "blake2b None"),
    "component larger": (change_component(shape=[7, 3000]), "but its block takes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_index_is_one_sentence_that_names_it(case, packed):
    change, words = WRONG[case]
    file = packed / "experts" / "index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    with pytest.raises(ExpertFileError) as caught:
        PackedExperts.open(packed)
    one_sentence(str(caught.value), file, words)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"a": 1, "a": 2}'])
def test_an_index_that_is_no_json_object(text, packed):
    (packed / "experts" / "index.json").write_bytes(text)
    with pytest.raises(ExpertFileError) as caught:
        PackedExperts.open(packed)
    one_sentence(str(caught.value), packed / "experts" / "index.json")
