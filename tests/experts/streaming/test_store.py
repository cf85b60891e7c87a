"""Oracle: the resident store, bit for bit; the reader's own count of bytes."""

import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import InputError, MemoryBudgetError, ShapeError
from mlx_moeflux.experts import compute
from mlx_moeflux.experts.io.readers import READERS, make_reader
from mlx_moeflux.experts.streaming import store as store_module
from mlx_moeflux.experts.streaming.bank import LayerBank
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.experts.streaming.warm_up import warm_up
from tests.experts.conftest import BOTH_READ
from tests.experts.helpers import (
    LAYERS,
    MIXED,
    C,
    E,
    K,
    all_is_well,
    bank_is_right,
    random_call,
    random_experts,
    same_bits,
    write_experts,
)

SPECS = {f"{b}-bit": (QuantSpec(b),) * 3 for b in (2, 3, 4, 5, 6, 8)}
SPECS |= {"bf16": (None,) * 3, "mixed": MIXED}


# Every quantisation with one reader, every reader with some.
SOME = ("4-bit", "bf16", "mixed")


@pytest.mark.parametrize(
    ("specs", "name"),
    [
        pytest.param(
            SPECS[spec], name, id=f"{spec}-{name}",
            marks=[pytest.mark.slow] * (name != "pread" and spec not in SOME),
        )
        for spec in SPECS
        for name in READERS
    ],
)  # fmt: skip
def test_every_reader_and_quantisation(tmp_path, name, specs):
    form = "stacked" if name == "pread" else "packed"
    experts = write_experts(tmp_path, random_experts(specs), form)
    resident = experts.resident()
    with StreamedStore(make_reader(name, experts.refs), K) as store:
        for seed, n in enumerate((1, 6, 30, 1)):
            call = random_call(n, seed=seed, padding=n // 6)
            assert same_bits(store.experts(5, *call), resident.experts(5, *call))


@pytest.mark.parametrize(
    "slots", [K, E - 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, E))]
)
def test_bank_size_changes_no_bit(experts, open_store, slots):
    store, resident = open_store(slots, scratch_bytes=100_000), experts.resident()
    for seed, n in enumerate((1, 1, 2, 1, 63, 64, 65, 1, 1, 200, 3)):
        for layer in LAYERS:
            call = random_call(n, seed=10 * seed + layer, padding=n // 7)
            assert same_bits(store.experts(layer, *call), resident.experts(layer, *call))


@pytest.mark.parametrize("k", [1, E])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_one_expert_or_all(experts, open_store, k, n):
    store = open_store(max(k, 2))
    call = random_call(n, k=k)
    assert same_bits(store.experts(3, *call), experts.resident().experts(3, *call))


def test_a_row_does_not_depend_on_its_call(open_store):
    store = open_store(4)
    x, ids, weights = random_call(30)
    together = store.experts(3, x, ids, weights)
    alone = [store.experts(3, *(a[i : i + 1] for a in (x, ids, weights))) for i in range(30)]
    assert same_bits(together, mx.concatenate(alone))


def test_signs_of_zeros_agree(experts, open_store):
    """Sums of nothing but -0.0, where adding a 0.0 on the way would show."""
    store, resident = open_store(K), experts.resident()
    for n in (1, 30):
        x, ids, weights = random_call(n, padding=n // 30)
        expected = resident.experts(3, 0 * x, ids, -weights)
        assert np.signbit(np.array(expected)).all()
        assert same_bits(store.experts(3, 0 * x, ids, -weights), expected)


def test_float16_and_bfloat16_activations(experts, open_store):
    store, resident = open_store(4), experts.resident()
    x, ids, weights = random_call(30)
    for dtype in (mx.float16, mx.bfloat16):
        for n in (1, 30):
            call = (x[:n].astype(dtype), ids[:n], weights[:n])
            assert same_bits(store.experts(3, *call), resident.experts(3, *call))


def test_lazy_outputs_keep_their_experts(experts, open_store):
    """The fence: a slot is not rewritten while work that reads it is still lazy."""
    store, resident = open_store(K), experts.resident()
    calls = [random_call(1, seed=seed) for seed in range(20)]
    for calls_of_thread in (calls, calls[::-1]):
        lazy = [store.experts(3, *call) for call in calls_of_thread]
        mx.eval(lazy)
        for y, call in zip(lazy, calls_of_thread, strict=True):
            assert same_bits(y, resident.experts(3, *call))


def test_lazy_output_survives_a_sweep_and_a_resize(experts, open_store):
    store, resident = open_store(K), experts.resident()
    one, many = random_call(1, seed=2), random_call(40, seed=3)
    a = store.experts(3, *one)
    b = store.experts(3, *many)
    c = store.experts(3, *one)
    store.resize(3, E)
    d = store.experts(3, *many)
    store.resize(3, K)
    e = store.experts(3, *one)
    store.experts(3, *many)
    for y, call in ((a, one), (b, many), (c, one), (d, many), (e, one)):
        assert same_bits(y, resident.experts(3, *call))


@pytest.mark.parametrize("slots", [K, 5, E])
@pytest.mark.parametrize("n", [1, 8, 50])
def test_bytes_read_are_misses(experts, open_store, slots, n):
    class Counting:
        def __init__(self, reader):
            self._reader, self.bytes, self.blocks = reader, 0, []
            self.name, self.layers = "counting", reader.layers
            self.num_experts, self.layout, self.close = E, reader.layout, reader.close

        def read(self, layer, expert, into):
            self.blocks.append((layer, expert))
            count = self._reader.read(layer, expert, into)
            self.bytes += count
            return count

    reader = Counting(make_reader("pread", experts.refs))
    store = open_store(slots, reader)
    for seed in range(6):
        del reader.blocks[:]
        call = random_call(n, seed=seed)
        store.experts(5, *call)
        assert len(reader.blocks) == len(set(reader.blocks)), "a block was read twice in a call"
        assert {e for _, e in reader.blocks} <= set(np.array(call[1]).ravel().tolist())
    stats = store.stats().layers[5]
    block = experts.layouts[5].nbytes
    assert stats.bytes_read == reader.bytes == stats.misses * block == stats.reads * block > 0
    assert stats.lookups == stats.hits + stats.misses
    assert stats.tokens == 6 * n
    assert stats.evictions == stats.misses - len(store.residents(5))
    assert store.stats().layers[3].lookups == 0
    assert bank_is_right(store, experts)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="/proc/self/io is Linux's")
def test_the_process_reads_no_more(open_store, experts):
    """rchar of the process, which counts every byte that read calls return."""

    def rchar():
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])

    store = open_store(4)
    calls = [random_call(n, seed=n) for n in (1, 9, 1, 1)]
    before = rchar()
    own = rchar() - before
    before = rchar()
    for call in calls:
        store.experts(5, *call)
    assert rchar() - before - own == store.stats().total.bytes_read > 0


def test_second_call_on_a_full_bank_reads_nothing(open_store):
    store = open_store(E)
    call = random_call(50)
    first = store.experts(3, *call)
    store.stats().reset()
    assert same_bits(first, store.experts(3, *call))
    assert store.stats().total.bytes_read == store.stats().total.misses == 0
    assert store.stats().total.hit_rate == 1


def test_complete_layer_is_not_waited_for(experts, open_store, monkeypatch):
    store = open_store(E)
    call, padded = random_call(40), random_call(3, padding=1)
    store.preload([3])
    total = store.stats().total
    assert (total.reads, total.misses) == (E, 0)
    store.experts(3, *call)

    def forbidden(*args, **kwargs):
        raise AssertionError("the device was waited for")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", forbidden)
        patch.setattr(store_module.np, "array", forbidden)
        lazy = [store.experts(3, *c) for c in (call, padded)]
        with pytest.raises(AssertionError, match="waited"):
            store.experts(5, *call)
    for y, c in zip(lazy, (call, padded), strict=True):
        assert same_bits(y, experts.resident().experts(3, *c))


def test_one_wait_for_each_call_of_a_partial_layer(open_store, monkeypatch):
    store = open_store(E - 1)
    call = random_call(1)
    store.experts(3, *call)
    waits = []
    real = np.array
    monkeypatch.setattr(store_module.np, "array", lambda *a: (waits.append(a), real(*a))[1])
    monkeypatch.setattr(mx, "eval", lambda *a: waits.append(a))
    store.experts(3, *call)
    assert len(waits) == 1


def test_halves_of_a_call_say_where_experts_will_be(experts, open_store):
    store, resident = open_store(4), experts.resident()
    for seed in range(12):
        x, ids, weights = random_call(1, seed=seed)
        with store.exclusive():
            call = store.begin_load(3, ids, weights)
            slots = store.slots_of(call)
            # Those who may look at a bank under way: a trace that is built meanwhile.
            bank = store.bank(3)
            store.wait(call)
            there = zip(np.array(ids)[0].tolist(), np.array(slots)[0].tolist(), strict=True)
            assert dict(there).items() <= store.residents(3).items()
            y = store.compute_slots(x, slots, weights, bank)
            store.release_after(call, y)
        assert same_bits(y, resident.experts(3, x, ids, weights))
    assert bank_is_right(store, experts)


def test_a_call_that_ends_in_its_middle_is_put_right_by_the_next(experts, open_store):
    store, resident = open_store(4), experts.resident()
    for seed in range(12):
        call = random_call(1, seed=seed)
        with store.exclusive():
            store.begin_load(3, *call[1:])
        other = random_call(1, seed=seed + 100)
        assert same_bits(store.experts(3, *other), resident.experts(3, *other))
        assert bank_is_right(store, experts)


def test_the_cpu_takes_rows_before_it_casts(open_store, monkeypatch):
    seen = []
    real = compute.expert_ffn

    def ffn(x, slots, bank):
        seen.append((bank.slots, bank.up.scales.dtype))
        return real(x, slots, bank)

    monkeypatch.setattr(compute, "expert_ffn", ffn)
    open_store(E - 1).experts(3, *random_call(1))
    assert seen == [(K, mx.float32)]


def test_rows_are_taken_in_bounded_groups(experts, open_store):
    store = open_store(E)
    block = experts.layouts[3].nbytes
    store.expert_compute = store_module.ExpertCompute(take_bytes=2 * block)
    call = random_call(40)
    assert same_bits(store.experts(3, *call), experts.resident().experts(3, *call))


def test_resize_keeps_the_most_recent(experts, open_store):
    store = open_store(E)
    for row in ([0, 1, 2], [3, 4, 5], [1, 2, 6]):
        store.experts(3, mx.ones((1, C)), mx.array([row], mx.uint32), mx.ones((1, 3)))
    store.resize(3, 4)
    assert set(store.residents(3)) == {1, 2, 5, 6}
    assert store.slots == {3: 4, 5: E}
    assert bank_is_right(store, experts)
    store.stats().reset()
    store.experts(3, mx.ones((1, C)), mx.array([[1, 5, 6]], mx.uint32), mx.ones((1, 3)))
    assert store.stats().total.misses == 0
    store.resize(3, 6)
    assert set(store.residents(3)) == {1, 2, 5, 6}
    assert bank_is_right(store, experts)
    with pytest.raises(InputError, match="cannot have 8 slots; give 1 to 7"):
        store.resize(3, E + 1)


def test_preload_fills_free_slots(experts, open_store):
    store = open_store(4)
    store.experts(3, *random_call(1, k=1))
    store.preload()
    assert len(store.residents(3)) == len(store.residents(5)) == 4
    assert store.stats().total.evictions == 0
    assert bank_is_right(store, experts)
    assert store.stats().total.reads == 8


def test_only_padding(open_store):
    store = open_store(K)
    for n in (1, 30):
        x = mx.full((n, C), float("nan"))
        y = store.experts(3, x, mx.full((n, K), E, mx.uint32), mx.full((n, K), float("nan")))
        assert not np.array(y).any()
    assert store.stats().total.lookups == store.stats().total.reads == 0


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([[0, 1, 2, 3]], MemoryBudgetError, "needs 4 experts but layer 3 has 3 slots"),
        ([[0, 2, 1]], ShapeError, "ascend"),
        ([[0, 1, E + 1]], ShapeError, "below 7"),
    ],
)
def test_wrong_ids_are_refused(open_store, ids, error, message):
    store = open_store(K)
    with pytest.raises(error, match=message):
        store.experts(3, mx.ones((1, C)), mx.array(ids, mx.uint32), mx.ones((1, len(ids[0]))))
    with pytest.raises(ShapeError, match=r"layer 4 has no routed experts; layers \(3, 5\)"):
        store.experts(4, *random_call(1))


def test_wrong_options_are_refused(open_store):
    with pytest.raises(InputError, match="0 threads"):
        open_store(K, threads=0)
    with pytest.raises(InputError, match="layer 5 cannot have 0 slots"):
        open_store({3: K})
    with pytest.raises(InputError, match="no eviction"):
        open_store(K, eviction="mru")


def test_slots_differ_by_layer_and_are_counted(experts, open_store):
    store = open_store({3: K, 5: E}, reader="direct", threads=2)
    sizes = [experts.layouts[layer].nbytes for layer in LAYERS]
    assert store.nbytes == K * sizes[0] + E * sizes[1] + 3 * store.reader.staging_bytes


def test_rewarm_reads_what_is_missing_in_the_place_of_others(experts, open_store):
    """The experts asked for are there afterwards, whatever was before."""
    store = open_store(4)
    for seed in range(6):
        mx.eval(store.experts(LAYERS[0], *random_call(1, seed=seed)))
    store.start_eval()
    wanted = {layer: [0, 2, 3, E - 1] for layer in LAYERS}
    before = store.stats().total
    misses, reads = before.misses, before.reads
    warm_up(store, wanted).join()
    assert all(set(store.residents(layer)) == set(wanted[layer]) for layer in LAYERS)
    assert store.stats().total.misses == misses
    assert store.stats().total.reads > reads
    assert bank_is_right(store, experts)
    warm_up(store, {LAYERS[0]: [1, E, 10_000]}).join()
    assert 1 in store.residents(LAYERS[0])
    assert bank_is_right(store, experts)
    assert warm_up(store, {}) is None
    store.close()
    warm_up(store, wanted).join()


@BOTH_READ
def test_reading_is_a_stall_in_a_thread_and_in_the_caller(wrapped, small_blocks):
    store = wrapped(lambda *_: time.sleep(0.02), slots=K, threads=K)
    x, ids, weights = random_call(1)[:3]
    start = time.perf_counter()
    store.experts(3, x, ids, weights)
    elapsed, total = time.perf_counter() - start, store.stats().total
    assert total.stall_seconds >= 0.015
    assert total.stall_seconds + total.compute_seconds <= elapsed, "the stall was counted twice"


@pytest.mark.parametrize("after", [{3: 3, 5: 3}, {3: 7, 5: 6}, {3: 7, 5: 3}, {3: 3, 5: 7}])
def test_memory_of_all_banks_exceeds_neither_before_nor_after(
    open_store, experts, monkeypatch, after
):
    store, allocate, found = open_store({3: 5, 5: 5}), LayerBank._allocate, []

    def watched(bank, slots):
        found.append(store.bank_bytes + slots * bank.layout.nbytes)
        return allocate(bank, slots)

    store.preload()
    held, before = {layer: set(store.residents(layer)) for layer in LAYERS}, store.bank_bytes
    monkeypatch.setattr(LayerBank, "_allocate", watched)
    store.resize_all(after, tight=True)
    assert store.slots == after
    assert len(found) == len(LAYERS)
    assert max(found) <= max(before, store.bank_bytes)
    for layer in LAYERS:
        now = set(store.residents(layer))
        assert len(now) == min(len(held[layer]), after[layer])
        assert now <= held[layer]
    assert store.generation == 1
    all_is_well(store, experts)
