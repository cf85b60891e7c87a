"""Oracle: each array by itself. What an entry does to one declared array it does to every other."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux.cache import AttentionCache, RecurrentCache
from mlx_moeflux.cache.state.spec import adopt, export, spec_of
from mlx_moeflux.cache.traced import ChosenPositions, Step
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.state_arrays import ATTENTION, EntryKind, Field
from tests.cache.entries import same

INDEXED = EntryKind("indexed", (*ATTENTION.fields, Field("index_keys", grows=True)), 64)
FIELDS = Field("conv"), Field("tail", dtype="I32"), Field("delta", dtype="F32")
TAILED = EntryKind("tailed", FIELDS)
ROWS = {"keys": (3, 5), "values": (3, 7), "index_keys": (1, 4)}
WHOLE = {"conv": (3, 6), "tail": (2,), "delta": (4, 7, 5)}


class Indexed(AttentionCache):
    declared, kind = INDEXED, INDEXED.name


class Tailed(RecurrentCache):
    declared, kind = TAILED, TAILED.name


def indexed(T, B=1):
    rows = [mx.random.normal((B, heads, T, width)) for heads, width in ROWS.values()]
    entry = Indexed()
    entry.update_and_fetch(*rows)
    return entry, rows


def tailed(T, B=1):
    arrays = [
        mx.random.normal((B, 3, 6)),
        mx.random.randint(0, 9, (B, 2)),
        mx.random.normal((B, 4, 7, 5)),
    ]
    entry = Tailed()
    entry.end_step(*arrays)
    entry.columns = T
    return entry, arrays


def test_specs_are_what_was_declared():
    assert spec_of(indexed(3)[0]) == INDEXED.spec("F32", **ROWS)
    assert spec_of(tailed(3)[0]) == TAILED.spec("F32", **WHOLE)
    assert INDEXED.spec("F32", **ROWS).nbytes(9) == 4 * 64 * (15 + 21 + 4)
    packed = INDEXED.spec("BF16", keys=(2, 64), values=(2, 64), index_keys=(1, 128)).quantized(
        4, 64
    )
    assert packed.kind == "indexed, 4 bits in groups of 64"
    assert packed.row_bytes == (2 + 2 + 2) * (32 + 4)


def test_steps_append_to_every_array():
    entry, rows = indexed(7)
    for _ in range(3):
        new = [mx.random.normal((1, heads, 1, width)) for heads, width in ROWS.values()]
        *buffers, keys, values, index = entry.begin_step()
        assert len(buffers) == 3
        tail, at = [], entry.columns % 64
        for array, row in zip((keys, values, index), new, strict=True):
            array = mx.array(array)
            array[:, :, at : at + 1] = row
            tail.append(array)
        entry.end_step(*tail)
        rows = [mx.concatenate(pair, axis=2) for pair in zip(rows, new, strict=True)]
    assert all(map(same, entry.views(), rows))


@pytest.mark.parametrize("count", [1, 3])
def test_traced_steps_append_to_every_array(count):
    """A kind needs no traced form of its own unless it appends in another way."""
    entry, rows = indexed(7)
    counts = [mx.array([7 + row], dtype=mx.int32) for row in range(count + 1)]
    form = entry.traced(Step(counts, None, ChosenPositions()), entry.begin_step(count))
    for column in range(7, 7 + count):
        new = [mx.random.normal((1, heads, 1, width)) for heads, width in ROWS.values()]
        assert form.columns.item() == column
        seen = form.append(Kernels(), *new)
        assert seen["length"].item() == column + 1
        rows = [mx.concatenate(pair, axis=2) for pair in zip(rows, new, strict=True)]
    assert all(map(same, seen["tail"], form.ends[-1][:2]))
    for _ in range(count):
        entry.end_step(*form.ends[-1])
    assert all(map(same, entry.views(), rows))


def test_traced_steps_replace_arrays_that_do_not_grow():
    entry, arrays = tailed(7)
    counts = [mx.array([7 + row], dtype=mx.int32) for row in range(3)]
    form = entry.traced(Step(counts, None, ChosenPositions()), entry.begin_step(2))
    for _ in range(2):
        form._set(array * 2 for array in form.arrays)
        form.advance(1)
    assert len(form.ends) == 2
    for row, end in enumerate(form.ends, 1):
        assert all(map(same, end, [array * 2**row for array in arrays]))
    assert all(map(same, entry.arrays, arrays))


def test_batches_keep_every_array():
    one, two = indexed(7), indexed(4)
    merged = Indexed.merge([one[0], two[0]])
    more, third = indexed(2)
    merged.extend(more)
    merged.filter([2, 0])
    for i, (rows, T) in enumerate(((third, 2), (one[1], 7))):
        assert all(map(same, merged.extract(i).views(), rows))
        assert merged.seen()[i] == T
    merged.trim(1)
    assert all(map(same, merged.extract(1).views(), [row[:, :, :6] for row in one[1]]))


def test_padding_moves_every_array():
    entry, rows = Indexed(), [mx.random.normal((2, h, 5, w)) for h, w in ROWS.values()]
    entry.prepare(lengths=[5, 3])
    entry.update_and_fetch(*rows)
    entry.finalize()
    for i, T in enumerate((5, 3)):
        assert all(map(same, entry.extract(i).views(), [row[i : i + 1, :, :T] for row in rows]))


def test_arrays_that_do_not_grow_stay_together():
    one, two = tailed(7), tailed(4)
    merged = Tailed.merge([one[0], two[0]])
    mark = merged.mark()
    merged.filter([1])
    assert all(map(same, merged.extract(0).arrays, two[1]))
    merged.rollback(mark)
    assert all(map(same, merged.extract(0).arrays, one[1]))
    merged.watch([8])
    later = [array + 1 for array in merged.arrays]
    merged.end_step(*later)
    assert all(map(same, merged.seen_at(8), later))


@pytest.mark.parametrize("filled", [indexed, tailed])
def test_what_is_exported_is_adopted(filled):
    entry, arrays = filled(9)
    written = export([entry])
    assert list(written) == [f"layers.0.{field.name}" for field in entry.declared.fields]
    again = type(entry)()
    adopt([again], written, position=9)
    assert again.columns == 9
    assert all(map(same, again.views() if entry.declared.grows else again.arrays, arrays))
    if entry.declared.grows:
        part = export([entry], 2, 5)
        assert all(map(same, part.values(), [array[:, :, 2:5] for array in arrays]))
