"""Safetensors headers and byte ranges; the oracle is the safetensors package, or bytes by hand."""

import json
import os
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as safetensors_numpy

from mlx_moeflux.checkpoint.tensors import (
    ITEMSIZE,
    StackedRefs,
    TensorIndex,
    read_header,
)
from mlx_moeflux.errors import CheckpointError

NUMPY_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}


def entry(begin, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape,
            "data_offsets": [begin, end]}  # fmt: skip


def one_sentence(message, *parts):
    assert "\n" not in message
    assert message.endswith(".")
    for part in parts:
        assert part in message, (part, message)


@st.composite
def named_arrays(draw):
    names = st.text(
        st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=12
    ).filter(lambda name: name != "__metadata__")
    arrays = {}
    # The package writes broken JSON for no tensors with empty metadata.
    for name in draw(st.lists(names, unique=True, min_size=1, max_size=6)):
        dtype = draw(st.sampled_from(sorted(NUMPY_CODES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = draw(st.binary(min_size=count, max_size=count))
        if dtype == "bool":
            raw = bytes(byte & 1 for byte in raw)
        arrays[name] = np.frombuffer(raw, dtype).reshape(shape)
    return arrays


@settings(max_examples=60)
@given(named_arrays(), st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_any_file_of_the_safetensors_package_opens_to_the_same_bytes(arrays, metadata):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        safetensors_numpy.save_file(arrays, file, metadata=metadata)
        index = TensorIndex.open(folder)
        assert set(index) == set(arrays)
        assert {ref.file for ref in index.values()} <= {file}
        assert read_header(file)[1] + sum(a.nbytes for a in arrays.values()) == file.stat().st_size
        for name, array in arrays.items():
            ref = index[name]
            assert (ref.dtype, ref.shape) == (NUMPY_CODES[array.dtype.name], array.shape)
            raw = bytearray(ref.nbytes)
            ref.read_into(memoryview(raw))
            assert bytes(raw) == array.tobytes()


def test_a_file_that_mlx_wrote_loads_to_the_same_arrays(tmp_path):
    weights = {
        "a.weight": mx.random.normal((5, 3, 7)).astype(mx.bfloat16),
        "b": mx.random.randint(0, 2**31, (6, 4)).astype(mx.uint32),
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "mlx"})
    index = TensorIndex.open(tmp_path)
    for name, array in weights.items():
        assert mx.array_equal(index[name].load(), array), name


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )


def test_shards_of_an_index_are_read_and_nothing_beside_them(tmp_path, write_safetensors):
    (tmp_path / "deep").mkdir()
    write_safetensors(tmp_path / "one.safetensors", {"a": entry(0, 1)}, b"A")
    write_safetensors(tmp_path / "deep" / "two.safetensors", {"b": entry(0, 2)}, b"BB")
    (tmp_path / "model-old.safetensors").write_bytes(b"junk")
    write_index(tmp_path, {"a": "one.safetensors", "b": "deep/two.safetensors"})
    index = TensorIndex.open(tmp_path)
    assert {name: ref.file.name for name, ref in index.items()} == {
        "a": "one.safetensors", "b": "two.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize(("present", "taken"), [
    (["model.safetensors", "model-x.safetensors", "z.safetensors"], {"model.safetensors"}),
    (["model-x.safetensors", "model.b.safetensors", "z.safetensors"],
     {"model-x.safetensors", "model.b.safetensors"}),
    (["z.safetensors", "y.safetensors"], {"z.safetensors", "y.safetensors"}),
])  # fmt: skip
def test_without_an_index_the_best_names_are_taken(present, taken, tmp_path, write_safetensors):
    for i, name in enumerate(present):
        write_safetensors(tmp_path / name, {f"t{i}": entry(0, 1)}, b"A")
    (tmp_path / "._model.safetensors").write_bytes(b"a file system's own")
    (tmp_path / "README.md").write_text("junk")
    assert {ref.file.name for ref in TensorIndex.open(tmp_path).values()} == taken


def test_shards_that_are_links_out_of_the_directory_are_followed(tmp_path, write_safetensors):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_safetensors(tmp_path / "blobs" / "c0ffee", {"a": entry(0, 1)}, b"A")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/c0ffee")
    write_index(tmp_path / "snapshot", {"a": "model.safetensors"})
    assert TensorIndex.open(tmp_path / "snapshot")["a"].load().tolist() == [ord("A")]


@pytest.mark.parametrize("path", [
    "../model.safetensors", "/etc/passwd", "a/../../b", "..", ".", "", "C:\\b", "a\\..\\..\\b",
    "x\0y", "\ud800", 3, None,
])  # fmt: skip
def test_an_index_that_leads_outside_is_refused(path, tmp_path):
    write_index(tmp_path, {"a": path})
    with pytest.raises(CheckpointError, match="not a path inside") as caught:
        TensorIndex.open(tmp_path)
    one_sentence(str(caught.value), "model.safetensors.index.json", repr(path))


@pytest.mark.parametrize(("text", "words"), [
    (b"{", "not valid JSON"), (b"[]", "must be an object"), (b"\xff\xfe", "not valid JSON"),
    (b'{"weight_map": ["a"]}', "is no object"), (b'{"weight_map": null}', "is no object"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"weight_map": {"a": "f", "a": "g"}}', "'a' is given twice"),
])  # fmt: skip
def test_a_broken_index_is_named(text, words, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=words) as caught:
        TensorIndex.open(tmp_path)
    one_sentence(str(caught.value), "model.safetensors.index.json")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"metadata": {"total_size": 3}}'])
def test_an_index_that_names_nothing_is_none(text, tmp_path, write_safetensors):
    write_safetensors(tmp_path / "model.safetensors", {"a": entry(0, 1)}, b"A")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert set(TensorIndex.open(tmp_path)) == {"a"}


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
# Case: tensors of each file, the index, tensors that are found, and those that are absent.
INDEXES = {
    "all in another file": (
        {"model.safetensors": "ab"}, {"a": "x-1.safetensors", "b": "x-2.safetensors"}, "ab", {}),
    "some in another file": (
        {"model.safetensors": "ab", SHARDS[0]: "a"}, {"a": SHARDS[0], "b": SHARDS[1]}, "ab", {}),
    "a tensor in another shard": (
        {SHARDS[0]: "a", SHARDS[1]: "b"}, {"a": SHARDS[1], "b": SHARDS[0]}, "ab", {}),
    "a tensor left out": (
        {"model.safetensors": "a"}, {"a": "model.safetensors", "mtp": "model.safetensors"}, "a",
        {"mtp": "model.safetensors"}),
    "a file left out": (
        {SHARDS[0]: "a"}, {"a": SHARDS[0], "v": "optiq/vision.safetensors"}, "a",
        {"v": "optiq/vision.safetensors"}),
    "a tensor not named": (
        {SHARDS[0]: "a", SHARDS[1]: "bc"}, {"a": SHARDS[0], "b": SHARDS[1]}, "abc", {}),
    "a shard not named": ({SHARDS[0]: "a", SHARDS[1]: "b"}, {"a": SHARDS[0]}, "ab", {}),
    "a sidecar that is there": (
        {"model.safetensors": "a", "s.safetensors": "b"},
        {"a": "model.safetensors", "b": "s.safetensors"}, "ab", {}),
    "another count": (
        {SHARDS[0]: "a", SHARDS[1]: "b"},
        {"a": "model-00001-of-00003.safetensors", "b": "model-00003-of-00003.safetensors"}, "ab",
        {}),
    "a stale file beside": (
        {SHARDS[0]: "a", SHARDS[1]: "b", "model-00001-of-00009.safetensors": "a"},
        {"a": SHARDS[0], "b": SHARDS[1]}, "ab", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_the_headers_decide_over_an_index(case, tmp_path, write_safetensors):
    files, index, found, absent = INDEXES[case]
    for name, tensors in files.items():
        header = {t: entry(i, i + 1) for i, t in enumerate(tensors)}
        write_safetensors(tmp_path / name, header, tensors.encode())
    write_index(tmp_path, index)
    tensors = TensorIndex.open(tmp_path)
    assert sorted(tensors) == sorted(found)
    assert [chr(tensors[name].load().item()) for name in found] == list(found)
    assert tensors.absent == absent


def test_shards_that_count_more_are_missing_whatever_an_index_says(tmp_path, write_safetensors):
    write_safetensors(tmp_path / SHARDS[0], {"a": entry(0, 1)}, b"A")
    write_index(tmp_path, {"a": "other.safetensors"})
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]} is missing"):
        TensorIndex.open(tmp_path)


def test_a_name_in_two_shards_is_refused(tmp_path, write_safetensors):
    for name in ("model-a.safetensors", "model-b.safetensors"):
        write_safetensors(tmp_path / name, {"x": entry(0, 1)}, b"A")
    with pytest.raises(CheckpointError, match="'x' is in both") as caught:
        TensorIndex.open(tmp_path)
    one_sentence(str(caught.value), "model-a.safetensors", "model-b.safetensors")


def test_a_numbered_shard_that_is_not_there_is_named(tmp_path, write_safetensors):
    for i in (1, 3):
        name = f"model-0000{i}-of-00003.safetensors"
        write_safetensors(tmp_path / name, {f"x{i}": entry(0, 1)}, b"A")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing"):
        TensorIndex.open(tmp_path)


def test_directories_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        TensorIndex.open(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        TensorIndex.open(tmp_path / "missing")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: it is no regular file"):
        TensorIndex.open(tmp_path)


WRONG_HEADERS = {
    "negative size": ({"x": entry(0, 4, "U8", [-4])}, "has shape [-4]"),
    "size no integer": ({"x": entry(0, 4, "U8", [4.0])}, "has shape [4.0]"),
    "size a boolean": ({"x": entry(0, 4, "U8", [4, True])}, "has shape [4, True]"),
    "shape no list": ({"x": entry(0, 4, "U8", 4)}, "has shape 4"),
    "shape missing": ({"x": {"dtype": "U8", "data_offsets": [0, 4]}}, "has shape None"),
    "dtype unknown": ({"x": entry(0, 4, "F4", [8])}, "has dtype 'F4'"),
    "dtype of GGUF": ({"x": entry(0, 4, "q4_k", [4])}, "has dtype 'q4_k'"),
    "dtype no text": ({"x": entry(0, 4, ["U8"], [4])}, "has dtype ['U8']"),
    "dtype missing": ({"x": {"shape": [4], "data_offsets": [0, 4]}}, "has dtype None"),
    "begin no integer": ({"x": entry(0.0, 4, "U8", [4])}, "data_offsets [0.0, 4]"),
    "begin negative": ({"x": entry(-4, 0, "U8", [4])}, "data_offsets [-4, 0]"),
    "three offsets": (
        {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}}, "data_offsets [0, 2, 4]"),
    "offsets missing": ({"x": {"dtype": "U8", "shape": [4]}}, "data_offsets None"),
    "end before begin": ({"x": entry(4, 0, "U8", [4])}, "spans -4 bytes"),
    "span too short": ({"x": entry(0, 4, "F32", [2])}, "spans 4 bytes, but F32 [2] takes 8"),
    "span too long": ({"x": entry(0, 4, "U8", [3])}, "spans 4 bytes, but U8 [3] takes 3"),
    "sizes beyond 64 bits": ({"x": entry(0, 4, "U8", [2**40, 2**40])}, "spans 4 bytes"),
    "overlap": ({"x": entry(0, 3), "y": entry(2, 4)}, "overlaps the tensor before it"),
    "same place": ({"x": entry(0, 4), "y": entry(0, 4)}, "overlaps the tensor before it"),
    "hole": ({"x": entry(0, 1), "y": entry(2, 4)}, "leaves a hole before it"),
    "hole at the start": ({"x": entry(1, 4)}, "leaves a hole before it"),
    "truncated": ({"x": entry(0, 5)}, "is truncated: tensor 'x' ends at byte"),
    "oversized": ({"x": entry(0, 3)}, "is oversized: its header describes"),
    "no tensors but data": ({}, "is oversized"),
    "entry no object": ({"x": [0, 4]}, "is described by [0, 4]"),
    "metadata no object": ({"__metadata__": "mlx", "x": entry(0, 4)}, "must map strings"),
    "metadata not text": ({"__metadata__": {"a": 1}, "x": entry(0, 4)}, "must map strings"),
    "not an object": (b"[1]", "is a JSON list, but must be an object"),
    "not JSON": (b"{'x': 1}", "is not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "is not valid JSON"),
    "too deep": (b"[" * 100_000, "is not valid JSON"),
    "empty": (b"", "is not valid JSON"),
    "key twice": (
        b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "key 'x' is given twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_HEADERS)
def test_a_wrong_header_is_one_sentence_that_names_the_file(case, tmp_path, write_safetensors):
    header, words = WRONG_HEADERS[case]
    write_safetensors(tmp_path / "model.safetensors", header, b"data")
    with pytest.raises(CheckpointError) as caught:
        TensorIndex.open(tmp_path)
    one_sentence(str(caught.value), str(tmp_path / "model.safetensors"), words)


@pytest.mark.parametrize(("length", "words"), [
    (1_000, "announces a header of 1000 bytes but has"),
    (100_000_001, "above the limit of 100000000"),
    (2**64 - 1, "above the limit of 100000000"),
])  # fmt: skip
def test_a_wrong_header_length(length, words, tmp_path, write_safetensors):
    write_safetensors(tmp_path / "model.safetensors", {"x": entry(0, 4)}, b"data", length=length)
    with pytest.raises(CheckpointError) as caught:
        TensorIndex.open(tmp_path)
    one_sentence(str(caught.value), words)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"<!DOCTYPE html>\n<html>", "a text that begins with '<!DOCTYPE html>'"),
        (b'{"error":"Repository not found"}', "a text that begins with"),
        (b"/annex/objects/SHA256E-s1--a.safetensors\n", "a text that begins with '/annex/obj"),
        (b"GGUF\3\0\0\0" + b"\0" * 20, "is a GGUF file"),
        (b"PK\3\4\0\0\10\10" + b"\0" * 20, "an archive, as PyTorch writes"),
    ],
)
def test_another_file_in_the_place_of_weights_is_named(start, words, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(start)
    with pytest.raises(CheckpointError) as caught:
        TensorIndex.open(tmp_path)
    one_sentence(str(caught.value), str(tmp_path / "model.safetensors"), words)


@pytest.mark.parametrize(
    ("name", "program"),
    [("pytorch_model-00001-of-00002.bin", "PyTorch"), ("a.pth", "PyTorch"), ("w.npz", "NumPy")],
)
def test_weights_of_another_program_are_named(name, program, tmp_path):
    (tmp_path / "training_args.bin").touch()
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        TensorIndex.open(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError) as caught:
        TensorIndex.open(tmp_path)
    one_sentence(str(caught.value), f"holds weights of {program} ({name})")


@pytest.mark.parametrize("size", range(8))
def test_a_file_too_short_for_a_header(size, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match=f"has {size} bytes, too few"):
        TensorIndex.open(tmp_path)


def test_every_truncation_and_every_extension_is_noticed(tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors_numpy.save_file({"x": np.arange(3, dtype=np.int16), "y": np.ones(1)}, file)
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            TensorIndex.open(tmp_path)
    file.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="oversized"):
        TensorIndex.open(tmp_path)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_a_file_with_any_bytes_changed_opens_or_is_refused_in_one_sentence(data):
    header = json.dumps({"a": entry(0, 4, "F32", [1]), "b": entry(4, 10, "U8", [2, 3])}).encode()
    content = bytearray(len(header).to_bytes(8, "little") + header + bytes(10))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        count = data.draw(st.integers(0, 4))
        content[start : start + count] = data.draw(st.binary(max_size=4) | st.sampled_from(
            [b"-", b"9", b"9" * 40, b".5", b"1e9", b"null", b"{", b"[", b'"', b"\\ud800"]
        ))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(content)
        try:
            index = TensorIndex.open(folder)
        except CheckpointError as error:
            one_sentence(str(error), "model.safetensors")
            return
        assert read_header(file)[1] + sum(ref.nbytes for ref in index.values()) == len(content)
        for ref in index.values():
            assert ref.load().shape == ref.shape


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000])
def test_a_shard_name_that_no_file_can_have_is_missing(name, tmp_path):
    write_index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match="is missing"):
        TensorIndex.open(tmp_path)


def test_opening_20_gb_of_experts_reads_headers_only(tmp_path, write_safetensors, monkeypatch):
    """40 layers of 9 stacked tensors in sparse files, as a quantised 35B model has them."""
    weight_map, size = {}, 0
    for layer in range(40):
        header, end = {}, 0
        for projection, out, width in (("gate", 512, 2048), ("up", 512, 2048), ("down", 2048, 512)):
            parts = (("weight", "U32", 8), ("scales", "BF16", 64), ("biases", "BF16", 64))
            for part, dtype, packing in parts:
                cols = width // packing
                nbytes = 256 * out * cols * ITEMSIZE[dtype]
                name = f"model.layers.{layer}.mlp.switch_mlp.{projection}_proj.{part}"
                header[name] = entry(end, end + nbytes, dtype, [256, out, cols])
                end += nbytes
        file = tmp_path / f"model-{layer}.safetensors"
        write_safetensors(file, header)
        os.truncate(file, file.stat().st_size + end)
        weight_map |= dict.fromkeys(header, file.name)
        size += end
    write_index(tmp_path, weight_map)
    read, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(real(*args)) or read[-1])
    index = TensorIndex.open(tmp_path)
    experts = {name: StackedRefs(ref) for name, ref in index.items()}
    assert size > 18e9
    assert len(experts) == 360
    assert sum(read) < 100_000
    assert len(read) == 80
