"""Oracle: files by the `gguf` package's writer, as its reader sees them."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from mlx_moeflux.checkpoint.formats import gguf_container
from mlx_moeflux.checkpoint.formats.gguf_container import TYPES, read_container
from mlx_moeflux.errors import CheckpointError, UnsupportedError

NUMBERS = {
    GGUFValueType.UINT8: 250,
    GGUFValueType.INT8: -7,
    GGUFValueType.UINT16: 65_000,
    GGUFValueType.INT16: -30_000,
    GGUFValueType.UINT32: 4_000_000_000,
    GGUFValueType.INT32: -2_000_000_000,
    GGUFValueType.UINT64: 1 << 63,
    GGUFValueType.INT64: -(1 << 62),
    GGUFValueType.FLOAT32: 0.1,
    GGUFValueType.FLOAT64: 0.1,
    GGUFValueType.BOOL: True,
    GGUFValueType.STRING: "é ␀ 日本",
}


def written(path, *, alignment=None):
    """A file with a key and an array of every type, and tensors of several."""
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, "qwen3moe")
    if alignment:
        writer.add_custom_alignment(alignment)
    for kind, value in NUMBERS.items():
        writer.add_key_value(f"one.{kind.name}", value, kind)
    for values in ([-5, 7], [0.1, -2.5], [True, False], ["x", ""]):
        writer.add_array(f"list.{type(values[0]).__name__}", values)
    writer.add_token_list([f"token {i}" for i in range(3000)])
    writer.add_string("empty.text", "")
    for i, (name, shape) in enumerate({"a": (3,), "b.weight": (5, 7), "c": (2, 3, 4)}.items()):
        dtype = (np.float32, np.float16)[i % 2]
        writer.add_tensor(name, random.normal(size=shape).astype(dtype))
    rows = random.integers(0, 256, (6, 2 * 144), dtype=np.uint8)
    writer.add_tensor("blocks", rows, raw_dtype=GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return written(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.mark.parametrize("alignment", [None, 8, 128])
def test_everything_is_what_the_package_reads(tmp_path, alignment):
    path = written(tmp_path / "model.gguf", alignment=alignment)
    reader, found = GGUFReader(path), read_container(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert found.metadata == fields
    for key, value in fields.items():
        assert type(found.metadata[key]) is type(value), key
    theirs = [
        (t.name, t.tensor_type.name, tuple(map(int, t.shape[::-1])), int(t.data_offset),
         int(t.n_bytes))
        for t in reader.tensors
    ]  # fmt: skip
    assert [(t.name, t.kind.name, t.shape, t.offset, t.nbytes) for t in found.tensors] == theirs
    assert found.header_bytes <= reader.data_offset < found.header_bytes + (alignment or 32)


def test_the_types_are_those_of_ggml():
    theirs = {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    # The package counts two floats of four bytes, ggml two of two.
    theirs[9] = ("Q8_1", 32, 36)
    assert {n: (kind.name, kind.elements, kind.nbytes) for n, kind in TYPES.items()} == theirs


def test_a_header_comes_in_pieces(file, monkeypatch):
    whole = read_container(file)
    monkeypatch.setattr(gguf_container, "_READ_BYTES", 100)
    assert read_container(file) == whole


def test_a_header_that_ends_anywhere_is_one_line(file, tmp_path):
    data, end = file.read_bytes(), read_container(file).header_bytes
    short = tmp_path / "short.gguf"
    for length in [*range(0, 600, 7), *range(600, end, 1999), end - 1]:
        short.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=re.escape(str(short))) as raised:
            read_container(short)
        assert "ends within the header" in str(raised.value)
    short.write_bytes(data[:end])
    assert read_container(short) == read_container(file)


@pytest.mark.parametrize("seed", range(4))
def test_wrong_bytes_are_one_line_or_read(file, tmp_path, seed):
    data, end = bytearray(file.read_bytes()), read_container(file).header_bytes
    random, wrong = np.random.default_rng(seed), tmp_path / "wrong.gguf"
    refused = []
    for _ in range(100):
        changed = bytearray(data)
        # Most of a header are tokens.
        for at in random.integers(0, 1500 if random.integers(2) else end, random.integers(1, 4)):
            changed[at] = random.integers(256)
        wrong.write_bytes(changed)
        try:
            read_container(wrong)
        except (CheckpointError, UnsupportedError) as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert all(str(wrong) in text and "\n" not in text for text in refused)


def head(*, version=3, tensors=0, keys=b"", count=None):
    count = (1 if keys else 0) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + keys


def key(name, kind, value):
    name = name.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


ARRAYS = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    10: "u8",
    11: "i8",
    12: "f8",
}


@pytest.mark.parametrize(("number", "dtype"), ARRAYS.items())
def test_arrays_of_all_numbers(tmp_path, number, dtype):
    values, path = np.array([1, 100, 3], f"<{dtype}"), tmp_path / "model.gguf"
    array = struct.pack("<IQ", number, len(values)) + values.tobytes()
    path.write_bytes(head(keys=key("a.b", 9, array)))
    assert read_container(path).metadata == {"a.b": values.tolist()}


TENSOR = struct.pack("<Q", 1) + b"t"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(100), "is no GGUF file"),
        (head(version=1), "version 1"),
        (head(version=3 << 24), "big-endian"),
        (head(count=1 << 40), "are too many"),
        (head(tensors=1 << 40), "are too many"),
        (head(keys=key("a.b", 99, b"")), "'a.b' is of type 99"),
        (head(keys=key("a.b", 9, struct.pack("<IQ", 9, 1))), "an array of type 9"),
        (head(keys=key("a.b", 9, struct.pack("<IQ", 0, 1 << 60))), "more than 4000000 values"),
        (head(keys=key("a.b", 8, struct.pack("<Q", 1 << 60))), "ends within the header"),
        (head(keys=key("a.b", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "no UTF-8"),
        (head(keys=2 * key("a.b", 0, b"\1"), count=2), "'a.b' is there twice"),
        (head(keys=key("general.alignment", 4, bytes(4))), "'general.alignment' is 0"),
        (head(keys=key("general.alignment", 4, b"\x60\0\0\0")), "'general.alignment' is 96"),
        (head(tensors=1) + TENSOR + struct.pack("<I", 9), "has 9 axes"),
        (head(tensors=1) + TENSOR + struct.pack("<IQIQ", 1, 32, 77, 0), "type 77"),
        (head(tensors=1) + TENSOR + struct.pack("<IQIQ", 1, 33, 8, 0), "no whole blocks of Q8_0"),
        (head(tensors=1) + TENSOR + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0), "has shape"),
        (head(tensors=2) + 2 * (TENSOR + struct.pack("<IQIQ", 1, 32, 0, 0)), "'t' is there twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, data, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises((CheckpointError, UnsupportedError), match=re.escape(message)) as raised:
        read_container(path)
    assert str(path) in str(raised.value)


def test_long_headers_are_bounded(file, monkeypatch):
    monkeypatch.setattr(gguf_container, "MOST_HEADER_BYTES", 1000)
    with pytest.raises(CheckpointError, match="1000 bytes end within the header"):
        read_container(file)
