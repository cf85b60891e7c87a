"""Oracle: the same tokens without interruption. Saved, restored, rewound: bit for bit the same."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import KVCache, RecurrentCache
from mlx_moeflux.cache.state.spec import spec_of
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import CacheError
from mlx_moeflux.generation.batch import Batch
from mlx_moeflux.loading import load_model
from tests.models_at_hand import KINDS, TWIN, by_default, model_of, run, same_bits, tokens_of

T = 13


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    with model_of(request.param, tmp_path_factory.mktemp(request.param)) as model:
        yield model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    with model_of("hybrid", tmp_path_factory.mktemp("hybrid")) as model:
        yield model


def continues_from_everywhere(model, tmp_path, positions):
    tokens, file = tokens_of(max(positions) + 3), tmp_path / "state.safetensors"
    whole = run(model, model.make_cache(), tokens)
    state = model.make_cache()
    for position in range(max(positions) + 1):
        if position in positions:
            logits = whole[position - 1] if position else None
            kept = state.snapshot(logits)
            assert kept.position == position
            state.save(file, logits)
            in_memory, on_disk = model.make_cache(), model.make_cache()
            in_memory.restore(kept)
            loaded = on_disk.load(file)
            assert (loaded is None) == (position == 0)
            assert position == 0 or same_bits(loaded, whole[position - 1])
            for other in (in_memory, on_disk):
                assert other.position == position
                rest = run(model, other, tokens[:, position : position + 3])
                assert same_bits(rest, whole[position : position + 3]), position
        run(model, state, tokens[:, position : position + 1])


def test_restored_continues_as_if_never_interrupted(model, tmp_path):
    continues_from_everywhere(model, tmp_path, {0, 1, 3, 4, 9})


@pytest.mark.slow
@by_default("4 bits", "deepseek_v3_groups")
def test_restored_across_a_growth_step_continues(model, tmp_path, monkeypatch):
    monkeypatch.setattr(KVCache, "declared", replace(KVCache.declared, step=4))
    continues_from_everywhere(model, tmp_path, {3, 4, 5, 8})


@pytest.mark.slow
def test_restored_at_every_position_continues(model, tmp_path):
    continues_from_everywhere(model, tmp_path, set(range(41)))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", ["qwen3.5-tiny", "deepseek-tiny"])
def test_restored_at_every_position_in_bits_continues(shape, bits, tmp_path):
    """Keys and values; latents."""
    path = synthesize(shape, tmp_path / "model", layers=4, experts=32)
    options = {"kv_bits": bits, "dtype": mx.float32}
    with load_model(path, expert_memory="75%", **options) as model:
        continues_from_everywhere(model, tmp_path, set(range(41)))


@by_default("hybrid", "qwen3_moe_window")
def test_two_sequences_restored_in_turns_do_not_disturb_each_other(model):
    sequences = [tokens_of(T, seed) for seed in (1, 2)]
    expected = [run(model, model.make_cache(), tokens) for tokens in sequences]
    state, kept, got = model.make_cache(), [None, None], [[], []]
    kept = [state.snapshot(), state.snapshot()]
    for i in range(T):
        for s in (0, 1):
            state.restore(kept[s])
            got[s].append(run(model, state, sequences[s][:, i : i + 1]))
            kept[s] = state.snapshot()
    for s in (0, 1):
        assert same_bits(mx.concatenate(got[s]), expected[s])


@by_default("hybrid", "attention")
def test_a_snapshot_is_not_changed_by_what_comes_after(model):
    state, tokens = model.make_cache(), tokens_of(T)
    run(model, state, tokens[:, :9])
    kept = state.snapshot()
    first = run(model, state, tokens[:, 9:])
    for _ in range(2):
        state.restore(kept)
        assert same_bits(run(model, state, tokens[:, 9:]), first)
        assert kept.position == 9


@by_default("4 bits", "deepseek_v3_groups")
def test_saving_what_was_loaded_gives_the_same_bytes(model, tmp_path):
    state, tokens = model.make_cache(), tokens_of(T)
    logits = run(model, state, tokens)[-1]
    one, two, three = (tmp_path / name for name in "abc")
    assert state.save(one, logits) == one.stat().st_size
    other = model.make_cache()
    other.save(two, other.load(one))
    state.save(three, logits)
    assert one.read_bytes() == two.read_bytes() == three.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_state_that_was_extracted_from_a_batch_can_be_saved(hybrid, tmp_path):
    singles = []
    for seed, length in ((1, 3), (2, 7)):
        state = hybrid.make_cache()
        run(hybrid, state, tokens_of(length, seed))
        singles.append(state)
    merged = hybrid.states.new(type(row[0]).merge(list(row)) for row in zip(*singles, strict=True))
    with pytest.raises(CacheError, match="2 sequences; extract"):
        merged.save(tmp_path / "state")
    kept, tokens = merged.snapshot(), mx.array([[5], [6]])
    expected = hybrid(tokens, merged)
    merged.restore(kept)
    assert same_bits(hybrid(tokens, merged), expected)
    merged.restore(kept)
    for entry in merged:
        entry.filter([0])
    merged.save(tmp_path / "merged")
    singles[0].save(tmp_path / "single")
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "single").read_bytes()


# Truncation, positions and sizes.


@by_default("hybrid", "deepseek_v3_groups", "qwen3_moe_window")
def test_attention_alone_is_truncated_and_recurrence_refuses(model):
    state, tokens = model.make_cache(), tokens_of(T)
    whole = run(model, state, tokens)
    state.checkpoint()
    with pytest.raises(CacheError, match="no position 14 in a state of 13"):
        state.truncate(T + 1)
    with pytest.raises(CacheError, match="no position -1"):
        state.truncate(-1)
    state.truncate(T)
    assert state.checkpoints == [T]
    if any(isinstance(entry, RecurrentCache) for entry in state):
        with pytest.raises(CacheError, match="restore a snapshot or a checkpoint"):
            state.truncate(9)
        assert state.position == T
        assert state.checkpoints == [T]
        return
    state.truncate(9)
    assert state.position == 9
    assert state.checkpoints == []
    assert same_bits(run(model, state, tokens[:, 9:]), whole[9:])


def test_entries_that_disagree_are_refused(hybrid):
    state = hybrid.make_cache()
    run(hybrid, state, tokens_of(3))
    state[1].trim(1)
    for act in (lambda: state.position, state.snapshot, lambda: hybrid.context_left(state)):
        with pytest.raises(CacheError, match=r"entry 1 has seen \[2\] tokens but entry 0"):
            act()


def test_context_left_and_bytes_per_position(model):
    state = model.make_cache()
    longest = model.config.max_position_embeddings
    assert model.context_left() == model.context_left(state) == longest
    run(model, state, tokens_of(3))
    assert model.context_left(state) == longest - 3
    model.states.set_context_limit(7)
    try:
        assert model.context_left(state) == 4
    finally:
        model.states.set_context_limit(None)
    rows = sum(
        array.nbytes // array.shape[2]
        for entry in state
        if isinstance(entry, KVCache)
        for array in entry._arrays()
    )
    assert model.bytes_per_position() == rows


def test_the_spec_is_what_every_layer_holds_after_a_token(model):
    """One mixer of a kind speaks for all of them."""
    state = model.make_cache()
    run(model, state, tokens_of(1))
    assert model.state_spec().entries == tuple(spec_of(entry) for entry in state)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "position", [21, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 16))]
)
def test_traced_steps_are_kept_and_restored_with_their_tails(tmp_path, position):
    with load_model(TWIN, expert_memory="100%", dtype=mx.float32) as model:
        model.compile_steps = True
        tokens, state = tokens_of(position + 10), model.make_cache()
        run(model, state, tokens[:, :position])
        kept = state.snapshot()
        state.save(tmp_path / "state")
        expected = run(model, state, tokens[:, position:])
        assert model.steps.whole.traces > 0
        for restore in ("memory", "disk"):
            other = model.make_cache()
            if restore == "memory":
                other.restore(kept)
            else:
                other.load(tmp_path / "state")
            got = run(model, other, tokens[:, position:])
            assert np.abs(np.array(got - expected)).max() <= 1e-5 * np.abs(np.array(expected)).max()
        batch = Batch(model)
        for name, length in (("a", 4), ("b", position)):
            single = model.make_cache()
            run(model, single, tokens_of(length, seed=7))
            batch.join([name], single)
        logits = batch.step(mx.array([1, 2]))
        batch.evaluate(logits)
        batch.leave(["a"])
        assert batch.state("b").position == position + 1
