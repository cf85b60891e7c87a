"""Oracle: calls of one token. Rows that are read together have their bits, and so has the state
after any number of rows that stay."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import MOST_ROWS, BaseCache, keep_rows
from mlx_moeflux.cache.state.spec import export
from mlx_moeflux.errors import CacheError, InputError, UnsupportedError
from mlx_moeflux.loading import load_model
from tests.models.twins import CASES, GOLDEN, smallest_memory
from tests.models_at_hand import TWIN, same_bits, tokens_of

# A delta net; keys of both kinds of norms; latents; latents and rows that an indexer chooses; a
# window; n-grams, blocks that an indexer chooses, and streams.
BY_DEFAULT = (
    *("text_top3", "qwen3_moe_window", "deepseek_v3_groups", "glm_moe_dsa_shared"),
    *("gemma4_shared", "qwen4_exp_rows"),
)
every_case = pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in BY_DEFAULT)) for c in CASES]
)
# Tokens before the rows: within a tail, across the end of one.
BEFORE = (5, 62)


@functools.cache
def model_of(case: str, memory: str | None = None):
    directory = GOLDEN / case
    memory = smallest_memory(directory) if memory is None else memory
    return load_model(directory, expert_memory=memory, dtype=mx.float32)


def state_after(model, T: int):
    state = model.make_cache()
    model(tokens_of(T), state)
    return state


def same_state(a, b) -> None:
    """Compare all arrays, and the room for rows, by which kernels split them."""
    found, expected = export(a), export(b)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert same_bits(found[name], array), name
    for own, other in zip(a, b, strict=True):
        assert own.columns == other.columns
        if own.declared.grows:
            assert own.capacity == other.capacity


def compare(model, before: int, R: int) -> None:
    """Read R rows behind a prompt and keep every number of them."""
    rows, after, ahead = tokens_of(R, seed=R), tokens_of(2, seed=9), state_after(model, before)
    kept = ahead.snapshot()
    for n in range(R + 1):
        state, single = model.make_cache(), model.make_cache()
        state.restore(kept)
        single.restore(kept)
        logits = model.read_rows(rows, state)
        assert logits.shape == (1, R, model.config.vocab_size)
        for r in range(n):
            assert same_bits(logits[:, r : r + 1], model(rows[:, r : r + 1], single)), r
        keep_rows(state, n)
        same_state(state, single)
        # A rejected row leaves nothing for tokens behind it.
        assert same_bits(model.read_rows(after, state), steps(model, after, single))
        same_state(state, single)


def steps(model, tokens: mx.array, state) -> mx.array:
    one = [model(tokens[:, i : i + 1], state) for i in range(tokens.shape[1])]
    return mx.concatenate(one, axis=1)


@every_case
@pytest.mark.parametrize("before", BEFORE)
def test_rows_have_the_bits_of_single_calls(case, before):
    compare(model_of(case), before, R=3)


def test_what_cannot_be_read_is_refused_and_changes_nothing():
    model = load_model(TWIN, dtype=mx.float32)
    state = state_after(model, 5)
    before = export(state)
    wrong = (
        (mx.zeros((2, 2), mx.int32), state, InputError, "ids \\[1, R\\]"),
        (mx.zeros((1, 0), mx.int32), state, InputError, "0 rows"),
        (tokens_of(MOST_ROWS + 1), state, InputError, "1 to 4"),
        (tokens_of(2), model.make_cache(), CacheError, "read the prompt"),
        (mx.array([[1, 10**6]]), state, InputError, "outside the vocabulary"),
    )
    for tokens, cache, error, message in wrong:
        with pytest.raises(error, match=message):
            model.read_rows(tokens, cache)
    two = model.make_cache()
    model(mx.concatenate([tokens_of(4), tokens_of(4, seed=1)]), two)
    with pytest.raises(CacheError, match="2 sequences"):
        model.read_rows(tokens_of(2), two)
    for name, array in export(state).items():
        assert np.array_equal(array, before[name])


def test_rows_are_kept_once_and_no_more_than_were_read():
    model = load_model(TWIN, dtype=mx.float32)
    state = state_after(model, 5)
    with pytest.raises(CacheError, match="did not read rows"):
        keep_rows(state, 1)
    model.read_rows(tokens_of(2), state)
    with pytest.raises(CacheError, match="keep 0 to all of them, not 3"):
        keep_rows(state, 3)
    keep_rows(state, 1)
    with pytest.raises(CacheError, match="did not read rows"):
        keep_rows(state, 1)
    model.read_rows(tokens_of(2), state)
    model(tokens_of(1), state)
    assert all(entry.rows is None for entry in state)
    with pytest.raises(CacheError, match="did not read rows"):
        keep_rows(state, 1)


def test_an_entry_that_cannot_forget_rows_says_so(monkeypatch):
    model = load_model(TWIN, dtype=mx.float32)
    state = state_after(model, 5)
    monkeypatch.setattr(type(state[0]), "takes_rows", BaseCache.takes_rows)
    with pytest.raises(UnsupportedError, match="without drafts"):
        model.read_rows(tokens_of(2), state)
