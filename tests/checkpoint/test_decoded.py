"""Oracle: NumPy's own concatenation, take and functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.formats.decoded import ColumnsRef, JoinedRef, MappedRef
from mlx_moeflux.checkpoint.formats.gguf_blocks import EXACT, BlocksRef
from mlx_moeflux.checkpoint.tensors import Ref, TensorRef
from mlx_moeflux.errors import CheckpointError

WINDOWS = [(0, 23), (0, 1), (22, 23), (3, 3), (4, 9), (2, 17)]


def stored(path: Path, values: np.ndarray) -> TensorRef:
    path.write_bytes(bytes(7) + values.tobytes())
    return TensorRef("x", path, 7, "F32", values.shape)


def loaded(ref: Ref) -> np.ndarray:
    raw = np.full(ref.nbytes, 0xFF, np.uint8)
    ref.read_into(raw.data)
    return raw.view({"F32": np.float32, "U32": np.uint32}[ref.dtype]).reshape(ref.shape)


@pytest.fixture
def matrix(tmp_path):
    values = np.random.default_rng(2).standard_normal((29, 24)).astype(np.float32)
    return values, stored(tmp_path / "a", values)


@pytest.mark.parametrize(("start", "stop"), WINDOWS)
def test_rows_and_columns_in_another_order(matrix, start, stop):
    values, ref = matrix
    ranges, order = [(20, 29), (3, 4), (7, 20)], (2, 0, 3, 1)
    rows = np.concatenate([values[a:b] for a, b in ranges])
    joined = JoinedRef("j", [ref.rows(a, b) for a, b in ranges])
    expected = rows.reshape(23, 4, 6)[:, order].reshape(23, 24)
    both = ColumnsRef("c", joined, order)
    assert np.array_equal(loaded(joined.rows(start, stop)), rows[start:stop])
    assert np.array_equal(loaded(both.rows(start, stop)), expected[start:stop])
    # One of the other, which is decoded too.
    outer = JoinedRef("o", [both.rows(start, stop), ref.rows(0, 2)])
    assert np.array_equal(loaded(outer), np.concatenate([expected[start:stop], values[:2]]))
    assert outer.scratch_bytes >= both.rows(start, stop).scratch_bytes


def test_blocks_in_another_order(tmp_path):
    """Rows of a head, and columns of whole groups."""
    raw = np.random.default_rng(4).integers(0, 256, (8, 4 * 34), dtype=np.uint8)
    (tmp_path / "b").write_bytes(raw.tobytes())
    source = TensorRef("x", tmp_path / "b", 0, "U8", raw.shape)
    ref = BlocksRef("x", source, kind=BLOCK_MODES["q8_0"], form=EXACT["Q8_0"], part="weight")
    words = loaded(ref)
    joined = JoinedRef("j", [ref.rows(4, 8), ref.rows(0, 4)])
    assert np.array_equal(loaded(joined), np.roll(words, 4, axis=0))
    columns = loaded(ColumnsRef("c", joined, (1, 0)))
    assert np.array_equal(columns, np.roll(np.roll(words, 4, axis=0), 16, axis=1))


def test_functions_are_rounded_once(matrix):
    values, ref = matrix
    mapped = MappedRef("m", ref, np.exp)
    expected = np.exp(values.astype(np.float64)).astype(np.float32)
    assert np.array_equal(loaded(mapped), expected)
    assert np.array_equal(loaded(mapped.rows(5, 11)), expected[5:11])
    with pytest.raises(CheckpointError, match="'x' has numbers that no model has there"):
        loaded(MappedRef("m", ref, np.log))
