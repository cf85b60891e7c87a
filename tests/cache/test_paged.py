"""Oracle: contiguous buffers. Blocks of a pool give the same bits, and every block is freed."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache.kv import TAIL_ROWS
from mlx_moeflux.cache.paged import BLOCK_TOKENS, KVPool
from mlx_moeflux.errors import CacheError, ExpertFileError, InputError, MemoryBudgetError
from mlx_moeflux.generation.batch import Batch, BatchGenerator
from mlx_moeflux.kernels.runtime import device, views
from tests.models_at_hand import KINDS, VOCABULARY, by_default, model_of, same_bits, tokens_of

# A pool holds no index keys.
INDEXED = ("glm_moe_dsa_shared", "qwen4_exp_rows")


def has_pool(kind) -> bool:
    """Whether the states of a model of KINDS fit into a pool."""
    return not any(name in str(kind) for name in INDEXED)


@pytest.fixture(scope="module", params=filter(has_pool, KINDS))
def model(request, tmp_path_factory):
    with model_of(request.param, tmp_path_factory.mktemp(request.param)) as model:
        yield model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    with model_of("hybrid", tmp_path_factory.mktemp("hybrid")) as model:
        yield model


def block_bytes(model) -> int:
    return BLOCK_TOKENS * model.bytes_per_position()


def state_of(model, length, seed=0):
    state = model.make_cache()
    mx.eval(model(tokens_of(length, seed), state))
    return state


def test_sizes_are_bytes_of_all_layers(model):
    pool = KVPool(model.state_spec(), 10 * block_bytes(model) + 1)
    assert (pool.blocks, pool.free, pool.block_bytes) == (10, 10, block_bytes(model))
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    with pytest.raises(InputError, match=f"give at least {block_bytes(model)}"):
        KVPool(model.state_spec(), block_bytes(model) - 1)


@by_default("hybrid", "deepseek_v3_groups", without=INDEXED)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_paged_is_contiguous_bit_for_bit(model, seed):
    draw = random.Random(seed)
    batches = [Batch(model), Batch(model, kv_pool_bytes=60 * block_bytes(model))]
    for step in range(30):
        names = batches[0].names
        if len(names) < 4 and (not names or draw.random() < 0.4):
            length = draw.choice([1, 3, 15, 16, 17, 33])
            for batch in batches:
                batch.join([step], state_of(model, length, seed=step))
        if len(names) > 1 and draw.random() < 0.2:
            gone = draw.choice(names)
            states = [batch.state(gone) for batch in batches]
            probe = mx.array([[9]])
            assert same_bits(model(probe, states[0]), model(probe, states[1]))
            for batch in batches:
                batch.leave([gone])
        tokens = mx.array([draw.randrange(VOCABULARY) for _ in batches[0].names])
        logits = [batch.step(tokens) for batch in batches]
        for batch in batches:
            batch.evaluate()
        assert same_bits(*logits)
    pool = batches[1].pool
    assert pool.free + sum(map(len, pool.tables)) == pool.blocks
    for batch in batches:
        batch.leave(list(batch.names))
        assert batch.nbytes == 0
    assert pool.free == pool.blocks
    assert sorted(pool._free) == list(range(1, pool.blocks + 1))


@pytest.fixture(scope="module")
def on_device(tmp_path_factory):
    with model_of("hybrid", tmp_path_factory.mktemp("hybrid"), expert_memory="100%") as model:
        yield model


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_traced_steps_through_the_table_are_contiguous_bit_for_bit(on_device):
    """Across tails, growth, joins and leaves; what is traced stands beside what is not."""
    on_device.compile_steps = True
    contiguous, paged = (
        Batch(on_device),
        Batch(on_device, kv_pool_bytes=60 * block_bytes(on_device)),
    )
    lengths = {0: {"a": 5, "b": 40}, 20: {"c": 230}, 60: {"d": 1}, 61: {"e": 70}}
    gone, before = {25: "b", 50: "a", 70: "c"}, on_device.steps.whole.traces
    for step in range(80):
        for name, length in lengths.get(step, {}).items():
            for batch in (contiguous, paged):
                batch.join([name], state_of(on_device, length))
        if step in gone:
            kept = [batch.state(gone[step]) for batch in (contiguous, paged)]
            probe = mx.array([[9]])
            assert same_bits(on_device(probe, kept[0]), on_device(probe, kept[1]))
            for batch in (contiguous, paged):
                batch.leave([gone[step]])
        tokens = mx.array([step % VOCABULARY] * len(paged))
        logits = [batch.step(tokens) for batch in (contiguous, paged)]
        assert same_bits(*logits)
    assert on_device.steps.whole.traces >= before + 6
    on_device.compile_steps = False
    assert np.abs(np.array(paged.step(tokens) - contiguous.step(tokens))).max() == 0
    pool = paged.pool
    assert pool.free + sum(map(len, pool.tables)) == pool.blocks


def test_several_sequences_join_at_once(model):
    expected = Batch(model)
    together = Batch(model, kv_pool_bytes=20 * block_bytes(model))
    singles = [state_of(model, n, seed=n) for n in (4, 19, 7)]
    merged = [type(row[0]).merge(list(row)) for row in zip(*singles, strict=True)]
    for i, state in enumerate(singles):
        expected.join([i], state)
    together.join([0, 1, 2], merged)
    for _ in range(3):
        tokens = mx.array([5, 6, 7])
        assert same_bits(expected.step(tokens), together.step(tokens))


def test_a_full_pool_says_so_with_the_numbers_and_takes_nothing(hybrid):
    batch = Batch(hybrid, kv_pool_bytes=3 * block_bytes(hybrid))
    batch.join("a", state_of(hybrid, 17))
    with pytest.raises(
        CacheError, match=r"2 blocks of 16 tokens are needed, 1 of 3 are free and 1"
    ):
        batch.join("b", state_of(hybrid, 20))
    assert batch.names == ["a"]
    batch.join("c", state_of(hybrid, 16))
    before = [batch.state(name).snapshot() for name in "ac"]
    with pytest.raises(CacheError, match="The KV pool is full"):
        batch.step(mx.array([1, 2]))
    for name, kept in zip("ac", before, strict=True):
        state = hybrid.make_cache()
        state.restore(kept)
        probe = mx.array([[4]])
        assert same_bits(hybrid(probe, batch.state(name)), hybrid(probe, state))
    batch.leave("a")
    logits = batch.step(mx.array([2]))
    assert same_bits(logits[0], hybrid(mx.array([[2]]), state_of(hybrid, 16))[0, -1])


def test_a_step_that_fails_leaves_every_sequence_as_it_was(hybrid, monkeypatch):
    batch = Batch(hybrid, kv_pool_bytes=9 * block_bytes(hybrid))
    for name, length in (("a", 16), ("b", 5)):
        batch.join(name, state_of(hybrid, length, seed=1))
    tokens, store = mx.array([3, 4]), hybrid.store
    original, calls = type(store).experts, []

    def failing(self, layer, *arguments, **options):
        calls.append(layer)
        if len(calls) == 3:
            raise ExpertFileError("pulled out")
        return original(self, layer, *arguments, **options)

    monkeypatch.setattr(type(store), "experts", failing)
    with pytest.raises(ExpertFileError, match="pulled out"):
        batch.step(tokens)
    monkeypatch.undo()
    fresh = Batch(hybrid)
    for name, length in (("a", 16), ("b", 5)):
        fresh.join(name, state_of(hybrid, length, seed=1))
    for _ in range(2):
        assert same_bits(batch.step(tokens), fresh.step(tokens))


def test_rows_are_written_in_place(hybrid):
    batch = Batch(hybrid, kv_pool_bytes=9 * block_bytes(hybrid))
    batch.join("a", state_of(hybrid, 5))
    entry = next(iter(batch._paged.values()))
    addresses = set()
    for token in range(4):
        batch.evaluate(batch.step(mx.array([token])))
        addresses.add(np.asarray(entry.keys).__array_interface__["data"][0])
    assert len(addresses) == 1


@pytest.mark.usefixtures("uncompiled")
def test_traced_steps_with_short_views_write_in_place(on_device, monkeypatch):
    monkeypatch.setattr(views, "LEAST_ELEMENTS", 16)
    monkeypatch.setattr(device, "takes_views", lambda: True)
    monkeypatch.setattr(on_device, "compile_steps", True)
    batch = Batch(on_device, kv_pool_bytes=9 * block_bytes(on_device))
    batch.join("a", state_of(on_device, 5))
    entry = next(iter(batch._paged.values()))
    addresses = set()
    for step in range(TAIL_ROWS + 10):
        mx.eval(batch.step(mx.array([step % VOCABULARY])))
        assert len(entry._tail.views) == len(entry._buffers)
        addresses.add(device.address_of(device.bytes_of(entry._buffers[0])))
    assert len(addresses) == 1


def test_prompts_wait_for_room_and_one_that_never_fits_is_refused(hybrid):
    prompts = [tokens_of(20, seed)[0].tolist() for seed in range(6)]
    with BatchGenerator(hybrid, max_tokens=5, kv_pool_bytes=5 * block_bytes(hybrid)) as generator:
        with pytest.raises(MemoryBudgetError, match="6 blocks of 16 tokens, the KV pool has 5"):
            generator.insert([prompts[0] * 4])
        uids = generator.insert(prompts)
        done, together = set(), []
        while replies := generator.next():
            together.append(len(replies))
            done |= {reply.uid for reply in replies if reply.finish_reason}
        assert done == set(uids)
        assert max(together) == 2
        assert generator._batch.pool.free == 5
