"""Oracle: a greedy loop that evaluates the whole text anew for every token, with no cache."""

from __future__ import annotations

import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import generate, load, stream_generate
from mlx_moeflux.errors import CacheError, ExpertFileError, InputError
from mlx_moeflux.generation import StopText, generate_step
from mlx_moeflux.loading import BUNDLED_MODEL

PROMPT = "import os\n\ndef main(argv):\n"


@pytest.fixture(scope="module")
def pair():
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%")
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
    assert [r.token for r in responses[:24]] == expected
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


@pytest.mark.parametrize("size", [1, 3, 1000])
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


def test_prompts_of_every_form(pair, expected):
    model, tokenizer = pair
    ids = tokenizer.encode(PROMPT)
    for prompt in (ids, tuple(ids), mx.array(ids), np.array(ids)):
        assert generate(model, tokenizer, prompt, max_tokens=24) == tokenizer.decode(expected)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    try:
        text = generate(model, tokenizer, [{"role": "user", "content": PROMPT}], max_tokens=24)
    finally:
        tokenizer.chat_template = None
    assert text == tokenizer.decode(expected)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, -1], "-1"),
        ([1, 4096], "4096"),
        ([0.5], "expected text"),
        (7, "expected text"),
        (mx.array([[1]]), r"\[1, 1\]"),
        ([{"role": "user", "content": "x"}], "chat template"),
    ],
)
def test_prompts_that_cannot_be(pair, prompt, match):
    with pytest.raises(InputError, match=match):
        generate(*pair, prompt)


def test_the_context_is_checked_before_the_first_token(pair):
    model, tokenizer = pair
    model.max_context = 8
    try:
        before = model.store.stats().total.tokens
        with pytest.raises(CacheError, match="context of 8"):
            stream_generate(model, tokenizer, list(range(1, 10)))
        assert model.store.stats().total.tokens == before
        last = generate(model, tokenizer, [1, 2, 3], max_tokens=-1, return_response=True)
        assert last.generation_tokens <= 6
    finally:
        model.max_context = 8192


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


@pytest.mark.parametrize("seed", range(20))
def test_stop_texts_in_pieces(seed):
    random = np.random.default_rng(seed)
    text = "".join(random.choice(list("ab"), 40))
    stops = ["".join(random.choice(list("ab"), n)) for n in (3, 6)]
    stop, shown, i = StopText(stops), "", 0
    while i < len(text) and not stop.found:
        n = int(random.integers(1, 4))
        shown += stop.add(text[i : i + n])
        i += n
    if not stop.found:
        shown += stop.finish("")
    first = min((text.find(s) for s in stops if s in text), default=len(text))
    assert shown == text[:first]


def test_a_cache_goes_on_where_it_stood(pair):
    model, tokenizer = pair
    ids = tokenizer.encode(PROMPT)
    cache = model.make_cache()
    first = [t for t, _ in generate_step(mx.array(ids), model, max_tokens=5, prompt_cache=cache)]
    assert cache[0].offset == len(ids) + 4
    then = [first[-1], *tokenizer.encode("    pass\n")]
    second = [t for t, _ in generate_step(mx.array(then), model, max_tokens=6, prompt_cache=cache)]
    assert second == naive(model, ids + first[:-1] + then, 6)


def states(cache) -> list[np.ndarray]:
    arrays = []
    for entry in cache:
        if hasattr(entry, "delta"):
            arrays += [entry.conv, entry.delta]
        else:
            arrays += entry.keys_and_values() if entry.keys is not None else []
    return [np.array(a) for a in arrays if a is not None]


class Interrupting:
    """A store that fails at its n-th call."""

    def __init__(self, store, calls: int, error: BaseException):
        self.store, self.calls, self.error = store, calls, error

    def __getattr__(self, name):
        return getattr(self.store, name)

    def experts(self, *arguments):
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return self.store.experts(*arguments)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ExpertFileError("EIO at offset 5")])
@pytest.mark.parametrize("calls", [0, 2, 5, 6, 8, 15])
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
    if calls < 6:  # in the prompt: six layers
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


def test_threads_wait_for_each_other(pair, expected):
    model, tokenizer = pair
    results = {}

    def work(name: int) -> None:
        results[name] = generate(model, tokenizer, PROMPT, max_tokens=24)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [tokenizer.decode(expected)] * 3


def test_sampling_is_mlx_lms_or_plain_but_not_both(pair):
    model, tokenizer = pair
    plain = {"temp": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3, "max_tokens": 12}
    one = generate(model, tokenizer, PROMPT, **plain)
    assert one == generate(model, tokenizer, PROMPT, **plain)
    assert one != generate(model, tokenizer, PROMPT, **{**plain, "seed": 4})
    with pytest.raises(InputError, match="sampler or 'temp'"):
        generate(model, tokenizer, PROMPT, sampler=lambda x: mx.argmax(x, axis=-1), temp=0.5)
    with pytest.raises(InputError, match="did you mean 'temp'"):
        generate(model, tokenizer, PROMPT, tempp=0.5)
    with pytest.raises(InputError, match="temp is -1"):
        generate(model, tokenizer, PROMPT, temp=-1)
    banned = mx.argmax(model(mx.array([tokenizer.encode(PROMPT)]))[0, -1]).item()
    biased = generate(
        model, tokenizer, PROMPT, max_tokens=1, logit_bias={banned: -100.0}, return_response=True
    )
    assert biased.token != banned


def test_closing_twice_and_using_after_close():
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%")
    model.close()
    model.close()
    with pytest.raises(InputError, match="closed"):
        generate(model, tokenizer, PROMPT, max_tokens=1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_twenty_models_loaded_and_closed_leave_little_behind():
    code = """
import gc, os
import mlx_moeflux
from mlx_moeflux.loading import BUNDLED_MODEL

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
for _ in range(20):
    once()
gc.collect()
print(resident() - before, len(os.listdir("/proc/self/fd")) - files)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, files = map(int, done.stdout.split())
    assert grown < 50_000_000
    assert files == 0
