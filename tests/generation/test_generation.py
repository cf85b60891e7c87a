"""Oracle: a greedy loop without a cache that runs the model on the whole text for every token."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_moeflux import generate, load, stream_generate
from mlx_moeflux.errors import CacheError, ExpertFileError
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.generation.text import generate_step
from mlx_moeflux.loading import BUNDLED_MODEL
from tests.experts.helpers import banks

PROMPT = "import os\n\ndef main(argv):\n"


@pytest.fixture(scope="module")
def pair(two_bundled_layers):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    with model:
        yield model, tokenizer


def naive(model, ids: list[int], count: int) -> list[int]:
    out = list(ids)
    for _ in range(count):
        logits = model(mx.array([out]), last_only=True)
        out.append(mx.argmax(logits[0, -1]).item())
    return out[len(ids) :]


@pytest.fixture(scope="module")
def expected(pair) -> list[int]:
    model, tokenizer = pair
    return naive(model, tokenizer.encode(PROMPT), 24)


def test_text_is_that_of_a_loop_without_a_cache(pair, expected):
    model, tokenizer = pair
    assert generate(model, tokenizer, PROMPT, max_tokens=24) == tokenizer.decode(expected)


def test_stream_has_the_tokens_the_fields_and_the_account(pair, expected):
    model, tokenizer = pair
    responses = list(stream_generate(model, tokenizer, PROMPT, max_tokens=24))
    assert "".join(r.text for r in responses) == tokenizer.decode(expected)
    assert [r.token for r in responses] == expected
    assert [r.generation_tokens for r in responses] == list(range(1, 25))
    last = responses[-1]
    assert last.finish_reason == "length"
    assert all(r.finish_reason is None and r.experts is None for r in responses[:-1])
    assert last.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert last.generation_tokens == 24
    assert last.prompt_tps > 0
    assert last.generation_tps > 0
    assert last.peak_memory > 0
    total = last.experts.total
    assert total.bytes_read == total.misses * 27648 > 0
    assert total.tokens == last.prompt_tokens + 23


@pytest.mark.parametrize(
    ("memory", "count"),
    [
        *(("25%", 2), ("25%", 7), ("100%", 1)),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("25%", 1), ("100%", 2), ("100%", 7))),
    ],
)
def test_speeds_count_each_token_and_each_second_once(monkeypatch, count, memory):
    """A clock that reading a part of the prompt moves by 100 seconds, and sampling by one."""
    now = [0.0]

    def sampler(logprobs):
        now[0] += 1.0
        return mx.argmax(logprobs, axis=-1)

    def progress(done, total):
        now[0] += 100.0 * (done < total)
        seen.append(done < total)

    seen = []
    monkeypatch.setattr("mlx_moeflux.generation.text.time.perf_counter", lambda: now[0])
    model, tokenizer = load(BUNDLED_MODEL, expert_memory=memory)
    with model:
        options = {"sampler": sampler, "prompt_progress_callback": progress}
        *_, last = stream_generate(model, tokenizer, PROMPT, max_tokens=count, **options)
    assert last.generation_tokens == count
    assert last.generation_tps == 1.0
    assert last.prompt_tps == last.prompt_tokens / (100.0 * sum(seen))


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 1000))])
def test_prefill_steps_do_not_change_the_text(pair, expected, size):
    model, tokenizer = pair
    seen = []
    text = generate(
        model,
        tokenizer,
        PROMPT,
        max_tokens=24,
        prefill_step_size=size,
        prompt_progress_callback=lambda done, total: seen.append((done, total)),
    )
    assert text == tokenizer.decode(expected)
    T = len(tokenizer.encode(PROMPT))
    assert seen[0] == (0, T)
    assert seen[-1] == (T, T)
    assert seen == sorted(seen)


def test_progress_follows_the_layers_of_a_prompt(pair):
    model, tokenizer = pair
    ids = tokenizer.encode(PROMPT)
    cache, seen, T, L = model.make_cache(), [], len(ids), len(model.layers)

    def progress(done: int, total: int) -> None:
        seen.append((done, total, sum(not entry.empty() for entry in cache)))

    generate(
        model, tokenizer, ids, max_tokens=2, prompt_cache=cache, prompt_progress_callback=progress
    )
    steps = {T * layer // L: layer + 1 for layer in range(L)} | {0: 0, T: L}
    assert seen == [(done, T, entered) for done, entered in sorted(steps.items())]
    assert len(seen) == 3
    assert all(entry.on_advance is None for entry in cache)


def test_prompts_of_every_form(pair, expected):
    model, tokenizer = pair
    ids = tokenizer.encode(PROMPT)
    begun = tokenizer.decode(expected[:6])
    for prompt in (ids, tuple(ids), mx.array(ids), np.array(ids)):
        assert generate(model, tokenizer, prompt, max_tokens=6) == begun
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    try:
        text = generate(model, tokenizer, [{"role": "user", "content": PROMPT}], max_tokens=6)
    finally:
        tokenizer.chat_template = None
    assert text == begun


def test_the_context_is_checked_before_the_first_token(pair):
    model, tokenizer = pair
    model.states.max_context = 8
    try:
        before = model.store.stats().total.tokens
        with pytest.raises(CacheError, match="context of 8"):
            stream_generate(model, tokenizer, list(range(1, 10)))
        assert model.store.stats().total.tokens == before
        last = generate(model, tokenizer, [1, 2, 3], max_tokens=-1, return_response=True)
        assert last.generation_tokens <= 6
    finally:
        model.states.max_context = 8192


def test_limits_stop_ids_and_stop_texts(pair, expected):
    model, tokenizer = pair
    assert generate(model, tokenizer, PROMPT, max_tokens=0) == ""
    assert generate(model, tokenizer, PROMPT, max_tokens=1) == tokenizer.decode(expected[:1])
    ended = generate(
        model, tokenizer, PROMPT, max_tokens=24, stop_ids=[expected[5]], return_response=True
    )
    first = expected.index(expected[5])
    assert ended.finish_reason == "stop"
    assert ended.text == tokenizer.decode(expected[:first])
    text = tokenizer.decode(expected)
    middle = text[len(text) // 2 : len(text) // 2 + 9]
    ended = generate(model, tokenizer, PROMPT, max_tokens=24, stop=middle, return_response=True)
    assert ended.text == text[: text.index(middle)]
    assert ended.finish_reason == "stop"


def test_a_cache_goes_on_where_it_stood(pair):
    model, tokenizer = pair
    ids = tokenizer.encode(PROMPT)
    cache = model.make_cache()
    first = [t for t, _ in generate_step(mx.array(ids), model, max_tokens=5, prompt_cache=cache)]
    assert {entry.offset for entry in cache} == {len(ids) + 5}
    then = tokenizer.encode("    pass\n")
    second = [t for t, _ in generate_step(mx.array(then), model, max_tokens=6, prompt_cache=cache)]
    assert second == naive(model, ids + first + then, 6)


@pytest.mark.parametrize("stops", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_cache_ends_where_mlx_lm_leaves_it(pair, expected, stops):
    model, tokenizer = pair
    ours, theirs = model.make_cache(), model.make_cache()
    wrapper = TokenizerWrapper(tokenizer)
    if stops:
        wrapper.eos_token_ids = {expected[5]}
    options = {"stop_ids": [expected[5]]} if stops else {}
    found = list(stream_generate(model, tokenizer, PROMPT, 9, prompt_cache=ours, **options))
    other = list(mlx_lm.stream_generate(model, wrapper, PROMPT, max_tokens=9, prompt_cache=theirs))
    assert [(r.token, r.finish_reason) for r in found] == [
        (r.token, r.finish_reason) for r in other
    ]
    assert "".join(r.text for r in found) == "".join(r.text for r in other)
    if not stops:  # mlx-lm looks for the end a step late
        assert [e.offset for e in ours] == [e.offset for e in theirs]
    assert {e.offset for e in ours} == {len(tokenizer.encode(PROMPT)) + len(found)}


def test_a_cache_has_a_place_for_every_token(pair):
    model, tokenizer = pair
    model.states.max_context = 8
    try:
        cache = model.make_cache()
        last = generate(
            model, tokenizer, [1, 2, 3], max_tokens=-1, prompt_cache=cache, return_response=True
        )
        assert last.generation_tokens <= 5
        assert {entry.offset for entry in cache} == {3 + last.generation_tokens}
    finally:
        model.states.max_context = 8192


def states(cache) -> list[np.ndarray]:
    arrays = []
    for entry in cache:
        if hasattr(entry, "delta"):
            arrays += [entry.conv, entry.delta]
        else:
            arrays += entry.views() if entry.keys is not None else []
    return [np.array(a) for a in arrays if a is not None]


class Interrupting(ExpertStore):
    """A store that fails at its n-th call."""

    def __init__(self, store, calls: int, error: BaseException):
        self.store, self.calls, self.error = store, calls, error
        self.layers, self.num_experts = store.layers, store.num_experts

    def stats(self):
        return self.store.stats()

    def experts(self, *arguments):
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return self.store.experts(*arguments)

    def close(self): ...


ERRORS = KeyboardInterrupt(), ExpertFileError("EIO at offset 5")


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        pytest.param(calls, error, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, calls in enumerate((0, 1, 2, 3, 5, 9))
        for j, error in enumerate(ERRORS)
    ],
)
def test_an_interrupted_call_leaves_the_cache_as_it_was(pair, calls, error):
    model, tokenizer = pair
    ids = mx.array(tokenizer.encode(PROMPT))
    cache, store, yielded = model.make_cache(), model.store, []
    start = mx.array([5, 6, 7])
    mx.eval(model(start[None], cache, last_only=True))
    before = states(cache)
    model.set_store(Interrupting(store, calls, error))
    try:
        steps = generate_step(ids, model, max_tokens=9, prompt_cache=cache)
        with pytest.raises(type(error)):
            yielded.extend(token for token, _ in steps)
    finally:
        model.set_store(store)
    if calls < 2:  # in the prompt: two layers
        assert not yielded
        after = states(cache)
        assert len(after) == len(before)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        return
    # In decoding: as after the tokens that were yielded.
    seen = [*start.tolist(), *ids.tolist(), *yielded]
    assert cache[0].offset == len(seen)
    following = model(mx.array([[9]]), cache)
    whole = model(mx.array([[*seen, 9]]), last_only=True)
    error = mx.abs(following - whole).max() / mx.abs(whole).max()
    assert error.item() <= 1e-5


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ExpertFileError("EIO at offset 5")])
@pytest.mark.parametrize("calls", [0, 3, 5, 6])
def test_a_prompt_in_steps_that_fails_leaves_the_cache_as_it_was(pair, calls, error):
    model, tokenizer = pair
    ids = tokenizer.encode(PROMPT)
    cache, store = model.make_cache(), model.store
    mx.eval(model(mx.array([[5, 6, 7]]), cache, last_only=True))
    before, seen = states(cache), []
    model.set_store(Interrupting(store, calls, error))
    try:
        with pytest.raises(type(error)):
            generate(
                model,
                tokenizer,
                ids,
                prompt_cache=cache,
                prefill_step_size=2,
                prompt_progress_callback=lambda done, total: seen.append(done),
            )
    finally:
        model.set_store(store)
    # Steps of two tokens through two layers: each layer is one token more.
    assert seen == list(range(calls + 1))
    assert {entry.offset for entry in cache} == {3}
    after = states(cache)
    assert len(after) == len(before)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("calls", [2, 5])
def test_an_interrupt_between_model_and_token_moves_nothing(
    pair, uncompiled, monkeypatch, calls, ahead
):
    """As Ctrl-C does while a token is awaited: the model's call itself has succeeded."""
    model, tokenizer = pair
    if ahead:
        monkeypatch.setattr("mlx_moeflux.generation.text.mx.cpu", mx.gpu)
    cache, drawn, yielded = model.make_cache(), [], []

    def sampler(logprobs):
        drawn.append(1)
        if len(drawn) == calls:
            raise KeyboardInterrupt
        return mx.argmax(logprobs, axis=-1)

    stream = stream_generate(model, tokenizer, PROMPT, sampler=sampler, prompt_cache=cache)
    with pytest.raises(KeyboardInterrupt):
        yielded.extend(response.token for response in stream)
    assert {e.offset for e in cache} == {len(tokenizer.encode(PROMPT)) + len(yielded)}
    assert len(yielded) == calls - 2


def test_threads_wait_for_each_other(pair, expected):
    (model, tokenizer), results = pair, {}
    before = banks(model)

    def work(name: int) -> None:
        results[name] = generate(model, tokenizer, PROMPT, max_tokens=24, return_response=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.text for r in results.values()] == [tokenizer.decode(expected)] * 3
    # Each account is of its own call.
    assert all(r.experts.total.tokens == r.prompt_tokens + 23 for r in results.values())
    assert banks(model) == before


def no_more(*arguments):
    raise ValueError("no more")


def no_second_chunk(done: int, total: int) -> None:
    if done == 4:
        no_more()


def no_later_layers(done: int, total: int) -> None:
    if 0 < done < total:
        no_more()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": 3, "cached": True},
        {"logits_processors": [no_more]},
        {"sampler": no_more},
        {"prefill_step_size": 2, "prompt_progress_callback": no_second_chunk},
        {"prefill_step_size": 2, "prompt_progress_callback": no_later_layers},
        {"prompt_progress_callback": no_later_layers},
        {"prompt_progress_callback": no_later_layers, "cached": True},
    ],
)
@pytest.mark.parametrize("prompt", [PROMPT, [7]])
def test_a_thread_that_ends_leaves_nothing_for_others_to_evaluate(pair, expected, options, prompt):
    model, tokenizer = pair
    options, before = dict(options), banks(model)
    if options.pop("cached", False):
        options["prompt_cache"] = model.make_cache()

    def work() -> None:
        with contextlib.suppress(ValueError):
            generate(model, tokenizer, prompt, **options)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert generate(model, tokenizer, PROMPT, max_tokens=24) == tokenizer.decode(expected)
    assert banks(model) == before


@pytest.mark.parametrize("size", [2, None])
def test_processors_see_every_token_so_far(pair, expected, size):
    tokenizer, seen = pair[1], []

    def processor(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    generate(*pair, PROMPT, max_tokens=4, prefill_step_size=size, logits_processors=[processor])
    ids = tokenizer.encode(PROMPT)
    assert seen == [ids + expected[:n] for n in range(4)]


def test_a_seed_holds_in_the_thread_that_draws(pair):
    model, tokenizer = pair
    options = {"temp": 1.0, "seed": 2**64 + 3, "max_tokens": 8}
    here = generate(model, tokenizer, PROMPT, **options)
    stream = stream_generate(model, tokenizer, PROMPT, **options)
    mx.random.seed(99)
    texts = []
    thread = threading.Thread(target=lambda: texts.extend(r.text for r in stream))
    thread.start()
    thread.join()
    assert "".join(texts) == here


def test_mlx_lms_tokenizer_and_positions(pair, expected):
    model, tokenizer = pair
    responses = list(stream_generate(model, TokenizerWrapper(tokenizer), PROMPT, 24))
    assert "".join(r.text for r in responses) == tokenizer.decode(expected)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_models_loaded_and_closed_leave_little_behind():
    code = """
import gc, os
import mlx_moeflux
from mlx_moeflux.loading import BUNDLED_MODEL
from tests.experts.helpers import banks

def once():
    model, tokenizer = mlx_moeflux.load(BUNDLED_MODEL, expert_memory="50%")
    with model:
        mlx_moeflux.generate(model, tokenizer, "import", max_tokens=3)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

for _ in range(3):
    once()
gc.collect()
before, files = resident(), len(os.listdir("/proc/self/fd"))
for _ in range(8):
    once()
gc.collect()
print(resident() - before, len(os.listdir("/proc/self/fd")) - files)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, files = map(int, done.stdout.split())
    assert grown < 20_000_000
    assert files == 0
