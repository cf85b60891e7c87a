"""Oracle: a store that is never released, bit for bit and hit for hit."""

from itertools import product

import mlx.core as mx
import pytest

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io.readers import READERS, make_reader
from tests.experts.helpers import LAYERS, E, Wrapped, all_is_well, random_call, same_bits


def outputs(store, calls, *, released=()):
    """Results of calls of every layer, with a release before some of them."""
    for i, n in enumerate(calls):
        if i in released:
            store.release()
        for layer in LAYERS:
            yield store.experts(layer, *random_call(n, seed=10 * i + layer))


WAYS = ("threads", "caller", "python threads", "python caller")
# Every way to read with a small bank and a whole one, under one eviction or the other.
USUAL = {*zip(WAYS, (4, E, E, 4), ("lru", "lfu", "lru", "lfu"), strict=True)}


@pytest.mark.parametrize(
    ("small_blocks", "slots", "eviction"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in USUAL))
        for case in product(WAYS, (4, E), ("lru", "lfu"))
    ],
    indirect=["small_blocks"],
)
def test_a_release_changes_no_bit_and_no_hit(open_store, slots, eviction):
    calls = (1, 3, 1, 40, 1, 1)
    plain, store = (open_store(slots, eviction=eviction) for _ in range(2))
    expected = outputs(plain, calls)
    for a, b in zip(outputs(store, calls, released=(0, 2, 3, 5)), expected, strict=True):
        assert same_bits(a, b)
    for layer in LAYERS:
        assert store.residents(layer) == plain.residents(layer)
    ours, theirs = store.stats().total, plain.stats().total
    assert (ours.hits, ours.misses) == (theirs.hits, theirs.misses)
    assert ours.reads > theirs.reads


@pytest.mark.parametrize("reader", READERS)
def test_the_memory_of_all_slots_is_given_back(experts, open_store, reader):
    store = open_store(E, reader=make_reader(reader, experts.refs))
    list(outputs(store, (20,)))
    before, bank_bytes = mx.get_active_memory(), store.bank_bytes
    store.release()
    store.release()
    assert before - mx.get_active_memory() >= bank_bytes
    assert store.bank_bytes == 0
    store.restore()
    assert store.bank_bytes == bank_bytes
    all_is_well(store, experts)


def test_what_is_pending_stays_right(experts, open_store):
    store, call = open_store(4), random_call(1)
    y = store.experts(5, *call)
    store.release()
    other = store.experts(5, *random_call(1, seed=3))
    mx.eval(other)
    assert same_bits(y, experts.resident().experts(5, *call))


@pytest.mark.parametrize("error", [ExpertFileError("gone"), KeyboardInterrupt()])
def test_a_read_that_fails_is_tried_again(experts, open_store, error):
    failing = []

    def sometimes(layer, expert, into):
        if failing and expert == failing[0]:
            raise error

    store = open_store(E, reader=Wrapped(make_reader("pread", experts.refs), sometimes))
    store.preload()
    store.release()
    failing.append(3)
    with pytest.raises(type(error)):
        store.experts(5, *random_call(1))
    failing.clear()
    all_is_well(store, experts)


def test_a_closed_store_has_nothing_to_release(open_store):
    store = open_store(4)
    store.close()
    store.release()
    store.restore()
