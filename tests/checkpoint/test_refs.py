"""References to byte ranges; the oracle is numpy slicing of the array that was written."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from mlx_moeflux.checkpoint.tensors import (
    SAFETENSORS,
    StackedRefs,
    StridedRefs,
    TensorIndex,
    TensorRef,
    mlx_dtype,
)
from mlx_moeflux.errors import CheckpointError, ShapeError


def one_sentence(message, *parts):
    assert "\n" not in message
    assert message.endswith(".")
    for part in parts:
        assert part in message, (part, message)


@pytest.mark.parametrize("code", sorted(SAFETENSORS))
def test_load_keeps_every_bit_of_every_dtype(code, tmp_path, write_safetensors):
    shape = (3, 5, 2)
    raw = np.random.default_rng(7).integers(0, 256, 30 * SAFETENSORS[code], np.uint8)
    raw = raw & 1 if code == "BOOL" else raw
    end = 3 + raw.nbytes
    header = {
        "pad": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": code, "shape": list(shape), "data_offsets": [3, end]},
    }
    write_safetensors(tmp_path / "model.safetensors", header, b"abc" + raw.tobytes())
    array = TensorIndex.open(tmp_path)["x"].load()
    assert array.dtype == mlx_dtype(code)
    assert array.shape == shape
    assert bytes(memoryview(array).cast("B")) == raw.tobytes()


@pytest.mark.parametrize(("shape", "values"), [([], [2.5]), ([0, 3], []), ([1], [-7.0])])
def test_load_of_scalars_and_of_nothing(shape, values, tmp_path, write_safetensors):
    data = np.array(values, np.float32)
    header = {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, data.nbytes]}}
    write_safetensors(tmp_path / "model.safetensors", header, data.tobytes())
    array = TensorIndex.open(tmp_path)["x"].load()
    assert array.shape == tuple(shape)
    assert array.tolist() == data.reshape(shape).tolist()


def test_loaded_arrays_are_evaluated_and_usable_from_another_thread(tmp_path):
    weights = {"x": mx.random.normal((4, 3)).astype(mx.bfloat16)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    array = TensorIndex.open(tmp_path)["x"].load()
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(lambda: array.astype(mx.float32).tolist()).result()
    assert there == weights["x"].astype(mx.float32).tolist()


@pytest.fixture
def stacked(tmp_path):
    """A stacked tensor [E, 2F, C] = [5, 6, 7] of float32 and its reference."""
    values = np.random.default_rng(3).standard_normal((5, 6, 7)).astype(np.float32)
    file = tmp_path / "model.safetensors"
    safetensors_numpy.save_file({"first": np.arange(3, dtype=np.uint8), "x": values}, file)
    return values, TensorIndex.open(tmp_path)["x"]


def test_index_and_rows_are_the_slices_of_the_array(stacked):
    values, ref = stacked
    assert np.array_equal(ref.index(4).load(), values[4])
    assert np.array_equal(ref.rows(1, 4).load(), values[1:4])
    assert np.array_equal(ref.index(2).rows(3, 6).index(1).load(), values[2, 3:6][1])
    assert ref.rows(2, 2).shape == (0, 6, 7)
    assert ref.rows(2, 2).load().shape == (0, 6, 7)


@pytest.mark.parametrize(("method", "args"), [
    ("index", (5,)), ("index", (-1,)), ("rows", (0, 6)), ("rows", (3, 2)), ("rows", (-1, 2)),
])  # fmt: skip
def test_parts_outside_the_tensor_raise(stacked, method, args):
    with pytest.raises(IndexError, match=r"shape \[5, 6, 7\]"):
        getattr(stacked[1], method)(*args)


def test_stacked_refs_are_the_experts_and_their_row_windows(stacked):
    values, ref = stacked
    whole, gate, up = StackedRefs(ref), StackedRefs(ref, (0, 2)), StackedRefs(ref, (2, 6))
    assert (len(whole), whole.shape, gate.shape, up.shape) == (5, (6, 7), (2, 7), (4, 7))
    for e in range(5):
        assert np.array_equal(whole[e].load(), values[e])
        assert np.array_equal(gate[e].load(), values[e, :2])
        assert np.array_equal(up[e].load(), values[e, 2:])
    assert up[-1] == up[4]
    assert [r.offset for r in up] == [r.offset for r in up[:]]
    assert up.nbytes == up[0].nbytes == 4 * 7 * 4


@pytest.mark.parametrize("e", [5, -6])
def test_stacked_refs_end_where_the_experts_end(stacked, e):
    with pytest.raises(IndexError, match="5 experts"):
        StackedRefs(stacked[1])[e]


def test_strided_refs_follow_the_stride(stacked):
    values, ref = stacked
    row = 7 * 4
    refs = StridedRefs(name="every second row", file=ref.file, offset=ref.offset + row,
                       stride=2 * row, num_experts=15, dtype="F32", shape=(7,))  # fmt: skip
    assert np.array_equal([r.load() for r in refs], values.reshape(30, 7)[1::2])
    assert "15 x F32 [7]" in repr(refs)


def test_a_scalar_is_no_stack_of_experts():
    with pytest.raises(CheckpointError, match="stack of experts"):
        StackedRefs(TensorRef("x", Path("f"), 0, "F32", ()))


def test_short_reads_are_continued(stacked, monkeypatch):
    values, ref = stacked
    real, calls = os.preadv, []

    def short(fd, buffers, offset):
        calls.append(offset)
        return real(fd, [buffers[0][:11]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert np.array_equal(ref.load(), values)
    assert len(calls) == -(-values.nbytes // 11)


def test_the_end_of_the_file_inside_a_tensor_is_an_error(stacked):
    _, ref = stacked
    os.truncate(ref.file, ref.offset + 100)
    with pytest.raises(CheckpointError) as caught:
        ref.load()
    one_sentence(
        str(caught.value), str(ref.file), f"expected {ref.nbytes} bytes at offset {ref.offset}",
        "got 100",
    )  # fmt: skip


def test_an_input_output_error_names_file_and_offset(stacked, monkeypatch):
    _, ref = stacked
    real = os.preadv

    def fails_later(fd, buffers, offset):
        if offset > ref.offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, [buffers[0][:64]], offset)

    monkeypatch.setattr(os, "preadv", fails_later)
    with pytest.raises(CheckpointError) as caught:
        ref.load()
    one_sentence(
        str(caught.value), str(ref.file), f"offset {ref.offset + 64}", os.strerror(errno.EIO)
    )
    assert isinstance(caught.value.__cause__, OSError)


def test_a_file_that_went_away_is_named(stacked):
    _, ref = stacked
    ref.file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        ref.load()


def test_no_descriptor_is_left_open(stacked):
    _, ref = stacked
    before = len(os.listdir("/dev/fd"))
    for _ in range(5):
        ref.load()
        TensorIndex.open(ref.file.parent)
    os.truncate(ref.file, 20)
    with pytest.raises(CheckpointError):
        ref.load()
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("count", [0, 839, 841])
def test_a_buffer_of_the_wrong_size_is_refused(stacked, count):
    with pytest.raises(ShapeError, match=f"840 bytes, but the buffer to fill has {count}"):
        stacked[1].read_into(memoryview(bytearray(count)))


def test_unknown_dtype_codes_are_refused():
    with pytest.raises(CheckpointError, match="'F4'"):
        mlx_dtype("F4")
