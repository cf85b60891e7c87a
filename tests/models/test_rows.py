"""Oracle: calls of one token. Rows that are read together have their bits, and so has the state
after any number of rows that stay."""

from __future__ import annotations

import functools
import random

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import MOST_ROWS, BaseCache, keep_rows
from mlx_moeflux.cache.state.spec import export
from mlx_moeflux.errors import CacheError, ExpertFileError, InputError, UnsupportedError
from mlx_moeflux.generation.batch import Batch
from mlx_moeflux.kernels.nested import describe
from mlx_moeflux.loading import load_model
from tests.kernels.experts import BETWEEN
from tests.kernels.harness import emulated, require_gpu
from tests.kernels.metal.emulator import Emulator
from tests.models.twins import CASES, GOLDEN, smallest_memory
from tests.models_at_hand import TWIN, directory_of, tokens_of

# A delta net; a window; latents; latents and positions that an indexer chooses; keys that are the
# values too, in a window; n-grams, blocks that an indexer chooses, and streams.
BY_DEFAULT = (
    *("text_top3", "qwen3_moe_window", "deepseek_v3_groups", "glm_moe_dsa_shared"),
    *("gemma4_shared", "qwen4_exp_rows"),
)
WITH_KERNELS = ("qwen3.5-tiny", "qwen4-exp-tiny", "deepseek-tiny", "glm-5-tiny")
# Tokens before the rows: before the end of a tail, and before what ends sooner: a window, or what
# sees everything.
TAIL, SOONER = 62, {"qwen4_exp_rows": 9, "qwen4_exp_vision": 17}


def cases(*by_default: str):
    """All twins, of which these are not slow."""
    marks = {True: [], False: [pytest.mark.slow]}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=marks[case in by_default]) for case in CASES]
    )


@functools.cache
def model_of(case: str, memory: str | None = None, dtype: mx.Dtype = mx.float32):
    directory = GOLDEN / case
    memory = smallest_memory(directory) if memory is None else memory
    return load_model(directory, expert_memory=memory, dtype=dtype)


def state_after(model, T: int):
    state = model.make_cache()
    model(tokens_of(T), state)
    return state


def same_bits(a: mx.array, b: mx.array) -> bool:
    both = a.dtype == b.dtype and a.shape == b.shape
    return both and bool((mx.isfinite(a) & (a == b)).all())


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
    rows, after, kept = tokens_of(R, seed=R), tokens_of(2, seed=9), None
    kept = state_after(model, before).snapshot()
    for n in range(R + 1):
        state, single = model.make_cache(), model.make_cache()
        state.restore(kept)
        single.restore(kept)
        logits = model.read_rows(rows, state)
        assert logits.shape == (1, R, model.config.vocab_size)
        if n:
            assert same_bits(logits[:, :n], steps(model, rows[:, :n], single))
        keep_rows(state, n)
        same_state(state, single)
        # A rejected row leaves nothing for tokens behind it.
        assert same_bits(model.read_rows(after, state), steps(model, after, single))
        same_state(state, single)
        made = [describe([getattr(e, "_blocks", None) for e in each]) for each in (state, single)]
        assert made[0] == made[1]


def steps(model, tokens: mx.array, state) -> mx.array:
    """Logits ``[1, T, V]`` of one token a call."""
    one = [model(tokens[:, i : i + 1], state) for i in range(tokens.shape[1])]
    return mx.concatenate(one, axis=1)


@cases(*BY_DEFAULT)
@pytest.mark.parametrize("R", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_rows_have_the_bits_of_single_calls(case, R):
    compare(model_of(case), SOONER.get(case, 5), R)


@cases("text_top3", "glm_moe_dsa_shared")
@pytest.mark.parametrize("R", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_rows_across_the_end_of_a_tail(case, R):
    compare(model_of(case), TAIL, R)


@pytest.mark.slow
@cases()
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_rows_in_16_bits(case, dtype):
    compare(model_of(case, "100%", dtype), SOONER.get(case, 5), R=4)


@cases("text_top3")
@pytest.mark.usefixtures("uncompiled")
def test_traced_rows_have_the_bits_of_traced_steps(case, monkeypatch):
    model = model_of(case, "100%")
    monkeypatch.setattr(model, "compile_steps", True)
    traces = model.steps.whole.traces
    for before in (TAIL, SOONER.get(case, 5)):
        compare(model, before, R=3)
    if case != "qwen4_exp_vision":  # which no trace serves
        assert model.steps.whole.traces > traces


@pytest.mark.slow
@cases()
@pytest.mark.usefixtures("uncompiled")
def test_traced_rows_of_a_streamed_model(case, monkeypatch):
    memory = {"gpt_oss_sinks": "80%", "text_top_all": "100%"}.get(case, "75%")
    model = model_of(case, memory)
    monkeypatch.setattr(model, "compile_steps", True)
    for before in (TAIL, SOONER.get(case, 5)):
        compare(model, before, R=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_KERNELS)
@pytest.mark.parametrize("memory", ["25%", "100%"])
def test_rows_through_kernels(two_layers, family, memory):
    with emulated(schedules=Emulator.FIRST, partly_written=BETWEEN):
        compare(load_model(two_layers / family, expert_memory=memory), 5, R=2)


@pytest.mark.gpu
@pytest.mark.usefixtures("buffers_are_free")
@pytest.mark.parametrize("family", WITH_KERNELS)
@pytest.mark.parametrize("memory", ["80%", "100%"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_rows_on_a_gpu(two_layers, family, memory, dtype):
    require_gpu()
    model = load_model(two_layers / family, expert_memory=memory, dtype=dtype)
    for R in (2, 3, 4):
        for before in (5, TAIL, 254):
            compare(model, before, R)


@pytest.mark.parametrize("case", ["text_top3", "deepseek_v3_groups", "qwen4_exp_rows"])
def test_rows_across_the_growth_of_buffers(case):
    compare(model_of(case), 254, R=4)


def test_keys_in_few_bits(tmp_path):
    options = {"dtype": mx.float32, "kv_bits": 4, "kv_group_size": 32}
    compare(load_model(directory_of("4 bits", tmp_path), **options), TAIL, R=3)


def test_rows_of_a_sequence_in_pages():
    model = model_of("text_top3")
    block = sum(entry.row_bytes for entry in model.state_spec().entries) * 16
    batch, rows = Batch(model, kv_pool_bytes=8 * block), tokens_of(3, seed=4)
    prompt = state_after(model, TAIL)
    batch.join(["one"], prompt)
    for n in (2, 0, 3):
        single = batch.state("one")
        logits = model.read_rows(rows, batch.entries)
        expected = steps(model, rows[:, :n], single) if n else logits[:, :0]
        assert mx.array_equal(logits[:, :n], expected).item()
        keep_rows(batch.entries, n)
        found, single = export(batch.state("one")), export(single)
        assert all(same_bits(found[name], single[name]) for name in single)


def test_rows_go_through_the_layers_together(monkeypatch):
    model = model_of("text_top3")
    state, turns = state_after(model, 5), []
    begin = type(model.store).begin_load

    def noted(self, layer, ids, *args, **options):
        turns.append((layer, ids.shape[0]))
        return begin(self, layer, ids, *args, **options)

    monkeypatch.setattr(type(model.store), "begin_load", noted)
    mx.eval(model.read_rows(tokens_of(3), state))
    assert turns == [(layer, 3) for layer in model.store.layers]


@pytest.mark.parametrize("why", ["hook", "events", "training"])
def test_whoever_looks_at_tokens_sees_one_after_another(why):
    model, calls = load_model(TWIN, dtype=mx.float32), []
    state = state_after(model, 5)
    if why == "hook":
        model.hook(0, "before_mixer", lambda x: calls.append(x.shape[:2]))
    elif why == "events":
        model.store.events = lambda event: calls.append(event.ids.shape[:1])
    else:
        model.train()
    model.read_rows(tokens_of(2), state)
    expected = {"hook": [(1, 1)] * 2, "events": [(1,)] * 2 * len(model.store.layers)}
    assert calls == expected.get(why, [])


def test_drafts_of_any_quality_leave_a_greedy_reply_and_its_file_as_they_are(tmp_path):
    model, draw = model_of("text_top3"), random.Random(3)
    single, state = state_after(model, 40), state_after(model, 40)
    true, token = [7], mx.array([[7]])
    for _ in range(30):
        token = mx.argmax(model(token, single)[:, -1:], axis=-1)
        true.append(token.item())
    reply, wrong = [7], 0
    while len(reply) < len(true):
        count = min(draw.randrange(MOST_ROWS), len(true) - len(reply) - 1)
        drafts = [t if draw.random() < 0.7 else (t + 1) % 64 for t in true[len(reply) :][:count]]
        logits = model.read_rows(mx.array([[reply[-1], *drafts]]), state)
        drawn = mx.argmax(logits[0], axis=-1).tolist()
        n = next((i for i, draft in enumerate(drafts) if draft != drawn[i]), count)
        keep_rows(state, n + 1)
        wrong += count - n
        reply += drawn[: n + 1]
    assert wrong > 3
    assert reply == true
    files = [tmp_path / "rows", tmp_path / "single"]
    for file, each in zip(files, (state, single), strict=True):
        each.save(file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_rows_that_fail_leave_the_state(monkeypatch):
    model = model_of("text_top3")
    state, single = state_after(model, 5), state_after(model, 5)
    rows = tokens_of(3)

    def failing(self, *arguments, **options):
        raise ExpertFileError("no disk")

    with monkeypatch.context() as patch:
        patch.setattr(type(model.store), "wait", failing)
        with pytest.raises(ExpertFileError):
            model.read_rows(rows, state)
    same_state(state, single)
    with pytest.raises(CacheError):
        keep_rows(state, 1)
    assert same_bits(model.read_rows(rows, state), steps(model, rows, single))


def test_what_cannot_be_read_is_refused_and_changes_nothing():
    model = load_model(TWIN, dtype=mx.float32)
    state = state_after(model, 5)
    before = export(state)
    wrong = (
        (mx.zeros((2, 2), mx.int32), state, InputError, "give \\[1, R\\]"),
        (mx.zeros((1, 0), mx.int32), state, InputError, "T > 0"),
        (tokens_of(MOST_ROWS + 1), state, InputError, "at most 4"),
        (tokens_of(2), model.make_cache(), CacheError, "read the prompt"),
        (mx.zeros((1, 2)), state, InputError, "integer ids"),
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
