"""One sequence's cache entries against plain arrays: every operation must leave, bit for bit,
what concatenating or cutting the rows by hand leaves."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import KVCache, RecurrentCache, check_positions, transaction
from mlx_moeflux.errors import CacheError
from tests.cache.entries import DK, DV, HKV, filled, recurrent, rows, same

# Appending.


@pytest.mark.parametrize("chunks", [[600], [1] * 9, [255, 1, 1], [256, 1], [3, 260, 300, 2]])
def test_chunked_appends_equal_one(chunks):
    keys, values = rows(sum(chunks), B=2)
    cache, start = KVCache(), 0
    for T in chunks:
        assert cache.offset == cache.positions(T) == start
        seen = cache.update_and_fetch(
            keys[:, :, start : start + T], values[:, :, start : start + T]
        )
        start += T
        assert same(seen[0], keys[:, :, :start])
        assert same(seen[1], values[:, :, :start])
    assert cache.capacity == -(-start // 256) * 256
    (whole_keys, whole_values), length = cache.buffers(), cache.columns
    assert length == start
    assert same(whole_keys[:, :, :length], keys)
    assert whole_values.shape == (2, HKV, cache.capacity, DV)
    assert cache.nbytes == 2 * HKV * cache.capacity * (DK + DV) * 4


def test_new_rows_are_written_in_place():
    cache, *_ = filled(10)
    mx.eval(cache.state)
    address = memory_of(cache.keys)
    small = cache.keys.nbytes + cache.values.nbytes
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(40):
        keys, values = cache.update_and_fetch(*rows(1))
        mx.eval(keys.sum() + values.sum())
        del keys, values
    assert memory_of(cache.keys) == address
    assert mx.get_peak_memory() - before < small / 2
    mark = cache.mark()
    mx.eval(cache.update_and_fetch(*rows(1)))
    assert memory_of(cache.keys) == address, "a mark must not force a copy"
    cache.rollback(mark)


def memory_of(array):
    mx.eval(array)
    return np.asarray(array).__array_interface__["data"][0]


def test_a_copy_keeps_its_rows_when_the_original_moves_on():
    cache, keys, values = filled(5)
    mark, state, other = cache.mark(), cache.state, copy.deepcopy(cache)
    copy.deepcopy(cache).trim(5)
    cache.rollback(mark)
    cache.update_and_fetch(*rows(3))
    cache.trim(6)
    cache.update_and_fetch(*rows(2))
    assert same(other.views()[0], keys)
    assert same(other.views()[1], values)
    assert same(state[0][:, :, :5], keys)
    assert other.offset == 5
    mine = recurrent(5)
    twin, conv, delta = copy.deepcopy(mine), mine.conv, mine.delta
    mine.conv, mine.delta = mine.conv + 1, mine.delta + 1
    mine.advance(1)
    assert same(twin.conv, conv)
    assert same(twin.delta, delta)
    assert twin.offset == 5


@pytest.mark.parametrize(("keep", "cut"), [(0, 9), (4, 5), (250, 20), (256, 1), (257, 300)])
def test_trim_then_append_equals_never_appended(keep, cut):
    keys, values = rows(keep + 6)
    cache = KVCache()
    if keep:
        cache.update_and_fetch(keys[:, :, :keep], values[:, :, :keep])
    cache.update_and_fetch(*rows(cut))
    assert cache.trim(cut) == cut
    assert cache.empty() == (keep == 0)
    seen = cache.update_and_fetch(keys[:, :, keep:], values[:, :, keep:])
    assert same(seen[0], keys)
    assert same(seen[1], values)
    assert cache.trim(10_000) == keep + 6
    assert cache.size() == 0


# Going back.


@pytest.mark.parametrize("start", [0, 7, 255])
def test_rollback_restores_the_marked_moment_across_growth(start):
    keys, values = rows(start + 4)
    cache = KVCache()
    if start:
        cache.update_and_fetch(keys[:, :, :start], values[:, :, :start])
    outer = cache.mark()
    cache.update_and_fetch(*rows(3))
    inner = cache.mark()
    cache.update_and_fetch(*rows(400))
    cache.rollback(inner)
    cache.rollback(outer)
    assert cache.offset == start
    assert cache.empty() == (start == 0)
    assert (cache.keys is None) == (start == 0)
    with pytest.raises(CacheError, match="spent"):
        cache.rollback(inner)
    cache.rollback(outer)
    seen = cache.update_and_fetch(keys[:, :, start:], values[:, :, start:])
    assert same(seen[0], keys)
    assert same(seen[1], values)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.trim(1),
        lambda c: c.filter([1, 0]),
        lambda c: c.extend(filled(2)[0]),
        lambda c: (c.prepare(lengths=[2, 1]), c.update_and_fetch(*rows(2, B=2)), c.finalize()),
    ],
)
def test_a_mark_is_refused_once_its_rows_moved(change):
    cache, *_ = filled(5, B=2)
    mark = cache.mark()
    change(cache)
    with pytest.raises(CacheError, match="spent"):
        cache.rollback(mark)


def test_recurrent_rollback_and_refused_trim():
    cache = recurrent(9)
    conv, delta, mark = cache.conv, cache.delta, cache.mark()
    cache.conv, cache.delta = conv * 2, delta * 2
    cache.advance(4)
    cache.rollback(mark)
    assert cache.offset == 9
    assert same(cache.conv, conv)
    assert same(cache.delta, delta)
    assert not cache.is_trimmable()
    assert cache.trim(0) == 0
    with pytest.raises(CacheError, match="snapshot"):
        cache.trim(1)
    fresh = RecurrentCache()
    mark = fresh.mark()
    fresh.conv, fresh.delta = conv, delta
    fresh.advance(1)
    fresh.rollback(mark)
    assert fresh.empty()
    assert fresh.conv is None
    assert fresh.nbytes == 0


def replace_first(cache, error):
    cache[0] = KVCache()
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, GeneratorExit])
def test_transaction_restores_every_entry_on_any_exception(error):
    cache = [filled(255)[0], recurrent(255), KVCache(), RecurrentCache()]
    cache[2:] = [filled(255)[0], recurrent(255)]
    expected = [np.asarray(cache[0].views()[0]), np.asarray(cache[1].delta)]

    def step():
        for entry in cache[:3]:
            if isinstance(entry, KVCache):
                entry.update_and_fetch(*rows(3))
            else:
                entry.delta = entry.delta + 1
                entry.advance(3)
        raise error

    with pytest.raises(error), transaction(cache):
        step()
    assert check_positions(cache) == [255]
    assert same(cache[0].views()[0], expected[0])
    assert same(cache[1].delta, expected[1])
    with transaction(cache):
        cache[0].update_and_fetch(*rows(3))
    assert cache[0].offset == 258
    with pytest.raises(CacheError, match=r"entry 1 has seen \[255\]"):
        check_positions(cache)
    cache[1].advance(3)
    entries = list(cache)
    with pytest.raises(error), transaction(cache):
        replace_first(cache, error)
    assert all(now is before for now, before in zip(cache, entries, strict=True))
    with transaction(None):
        pass


# Refusals and files.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.prepare(right_padding=[1, 0]), "needs lengths"),
        (lambda c: c.prepare(lengths=[3, 2], right_padding=[0, 2]), "do not add up"),
        (lambda c: c.prepare(lengths=[3]), "has 1 numbers for 2"),
        (lambda c: c.prepare(lengths=[3, -1]), "negative"),
        (lambda c: c.prepare(left_padding=[0, 1]), "must come first"),
        (lambda c: (c.prepare(lengths=[1, 1]), c.prepare(lengths=[1, 1])), "twice"),
        (lambda c: (c.prepare(lengths=[1, 1]), c.extend(c)), "finalize"),
        (lambda c: c.filter(None), "list of integers"),
    ],
)
@pytest.mark.parametrize("make", [lambda: filled(4, B=2)[0], lambda: recurrent(4, B=2)])
def test_calls_that_cannot_be_right_are_refused(make, call, message):
    cache = make()
    with pytest.raises(CacheError, match=message):
        call(cache)


def test_a_call_without_columns_is_refused():
    with pytest.raises(CacheError, match="at least one token"):
        filled(4, B=2)[0].positions(0)


def test_damaged_states_are_refused():
    cache, *_ = filled(5)
    keys, values, *_ = cache.state
    with pytest.raises(CacheError, match="claims 257 columns of 256"):
        KVCache.from_state((keys, values, 257, None, None))
    with pytest.raises(CacheError, match="pads 2 sequences but holds 1"):
        KVCache.from_state((keys, values, 5, mx.array([0, 1]), None))
    with pytest.raises(CacheError, match="assign the delta rule's array to delta"):
        RecurrentCache().state = mx.zeros((1, 2, 3, 4))
    with pytest.raises(CacheError, match="trim"):
        cache.trim(-1)


def test_state_round_trip_through_mlx_lm_files(tmp_path):
    client = pytest.importorskip("mlx_lm.models.cache")
    plugin = pytest.importorskip("mlx_moeflux.mlx_lm_plugin")
    plugin.register_cache_classes()
    ragged = KVCache.merge([filled(3)[0], filled(260)[0]])
    prepared = KVCache.merge([filled(2)[0], filled(2)[0]])
    prepared.prepare(lengths=[2, 1])
    cache = [filled(5)[0], recurrent(5), KVCache(), RecurrentCache(), ragged, prepared]
    assert not client.can_trim_prompt_cache(cache)
    assert client.can_trim_prompt_cache(cache[:1])
    assert client.trim_prompt_cache(cache, 2) == 0
    first, second = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    client.save_prompt_cache(first, cache, {"model": "tiny"})
    loaded, metadata = client.load_prompt_cache(first, return_metadata=True)
    assert metadata == {"model": "tiny"}
    assert [type(entry) for entry in loaded] == [type(entry) for entry in cache]
    for mine, theirs in zip(cache, loaded, strict=True):
        assert mine.seen() == theirs.seen()
        assert mine.nbytes == theirs.nbytes
        assert (mine.lengths is None) == (theirs.lengths is None)
        for a, b in zip(mine._arrays(), theirs._arrays(), strict=True):
            assert (a is None) == (b is None)
            assert a is None or same(a, b)
    for entry in (cache[4], loaded[4]):
        mx.random.seed(3)
        entry.update_and_fetch(*rows(2, B=2))
    assert same(cache[4].views()[0], loaded[4].views()[0])
    client.save_prompt_cache(second, client.load_prompt_cache(first), {"model": "tiny"})
    assert client.trim_prompt_cache(loaded[:1], 2) == 2
    assert loaded[0].offset == 3
    assert load_arrays(second) == load_arrays(first)


def load_arrays(path):
    return {name: np.asarray(array).tolist() for name, array in mx.load(path).items()}


def test_watched_states_are_remembered_as_they_were():
    cache = RecurrentCache()
    cache.watch([2, 5, 9])
    assert cache.parts(8, 3) == [(0, 2), (2, 5), (5, 8)]
    assert cache.parts(8, 100) == [(0, 2), (2, 5), (5, 8)]
    states = {}
    for start, stop in cache.parts(8, 100):
        cache.conv, cache.delta = mx.random.normal((1, 3, 6)), mx.random.normal((1, 4, 7, 5))
        states[stop] = cache.conv, cache.delta
        cache.advance(stop - start)
    other = copy.deepcopy(cache)
    assert cache.seen_at(2) == states[2]
    assert cache.seen_at(5) == states[5]
    assert cache.seen_at(8) is cache.seen_at(9) is other.seen_at(2) is None
    assert cache.parts(2, 100) == [(0, 1), (1, 2)]
    assert other.parts(2, 100) == [(0, 2)]
    cache.watch(())
    assert cache.seen_at(2) is None
    assert KVCache().parts(5, 2) == [(0, 2), (2, 4), (4, 5)]
