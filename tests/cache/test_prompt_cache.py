"""Oracle: the same prompt without a cache. A known prefix changes the time and no result."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import load
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.cache.state.spec import export
from mlx_moeflux.conversion.synthesize import SHAPES, synthesize
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.generation.text import generate
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.models_at_hand import KINDS, TWIN, by_default, model_of, reply, same_bits, texts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    with model_of(request.param, tmp_path_factory.mktemp(request.param)) as model:
        yield model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    with model_of("hybrid", tmp_path_factory.mktemp("hybrid")) as model:
        yield model


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "prompts"


@by_default("hybrid", "deepseek_v3_groups")
def test_a_prompt_that_was_read_costs_nothing_and_says_the_same(model):
    (prompt,) = texts(1)
    expected, read = reply(model, prompt)
    assert read == len(prompt)
    with PromptCache() as cache:
        assert reply(model, prompt, cache) == (expected, len(prompt))
        assert reply(model, prompt, cache) == (expected, 0)
        longer = [*prompt, 3, 1, 4]
        assert reply(model, longer, cache) == (reply(model, longer)[0], 3)
        assert (cache.tokens_asked, cache.tokens_reused) == (3 * len(prompt) + 3, 2 * len(prompt))


@by_default("hybrid", "qwen3_moe_window")
def test_prompts_that_share_a_beginning_share_its_work(model):
    prompts = texts(1, 2, 3, 4)
    expected = [reply(model, prompt)[0] for prompt in prompts]
    with PromptCache() as cache:
        got = [reply(model, prompt, cache) for prompt in prompts]
    assert [ids for ids, _ in got] == expected
    recurrent = any(not entry.declared.grows for entry in model.make_cache())
    # Where the second differs from the first is a place worth keeping; states without recurrence
    # are cut there.
    assert [read for _, read in got] == [49, 49 if recurrent else 9, 9, 9]


@pytest.mark.slow
def test_breakpoints_of_the_caller_and_at_regular_distances(hybrid):
    prompts = texts(1, 2, 3)
    expected = [reply(hybrid, prompt)[0] for prompt in prompts]
    with PromptCache(every=None) as cache:
        got = [reply(hybrid, p, cache, breakpoints=[40, 0, 99]) for p in prompts]
    assert [ids for ids, _ in got] == expected
    assert [read for _, read in got] == [49, 9, 9]
    with PromptCache(every=16) as cache:
        got = [reply(hybrid, prompt, cache) for prompt in prompts]
    assert [ids for ids, _ in got] == expected
    assert [read for _, read in got] == [49, 17, 17]


@by_default("hybrid", "attention")
def test_a_beginning_of_a_known_prompt(model):
    prompt = texts(1)[0]
    with PromptCache() as cache:
        reply(model, prompt, cache)
        expected, _ = reply(model, prompt[:45])
        recurrent = any(not entry.declared.grows for entry in model.make_cache())
        assert reply(model, prompt[:45], cache) == (expected, 45 if recurrent else 1)


def test_the_state_that_comes_back_is_bit_for_bit_that_which_was_kept(model, directory):
    prompt = texts(1)[0]
    state, whole = model.make_cache(), []
    with PromptCache(directory) as cache:
        for cut in (7, 30, 49):
            start = state.position
            logits = model(mx.array([prompt[start:cut]]), state, last_only=True)[0, -1]
            cache.store(model, prompt[:cut], state, logits)
            whole.append((cut, state.snapshot(logits)))
    with PromptCache(directory) as again:
        for cut, kept in whole:
            resumed = again.resume(model, prompt[:cut])
            assert resumed.position == resumed.state.position == cut
            assert same_bits(resumed.logits, kept.logits)
            other = model.make_cache()
            other.restore(kept)
            token = mx.array([[7]])
            assert same_bits(model(token, resumed.state), model(token, other))


@pytest.mark.slow
def test_every_option_sees_the_whole_prompt(two_bundled_layers, directory):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    prompt = "import os\n\ndef main(argv):\n    import os\n"
    options = {"max_tokens": 12, "repetition_penalty": 1.3, "return_response": True}
    with model, PromptCache(directory) as cache:
        expected = generate(model, tokenizer, prompt, **options)
        assert expected.cached_tokens == 0
        for known in (0, expected.prompt_tokens):
            last = generate(model, tokenizer, prompt, prompt_cache=cache, **options)
            assert last.text == expected.text
            assert last.cached_tokens == known
            assert last.prompt_tokens == expected.prompt_tokens
        sampled = options | {"temp": 0.9, "seed": 3}
        text = generate(model, tokenizer, prompt, **sampled).text
        assert generate(model, tokenizer, prompt, prompt_cache=cache, **sampled).text == text
        model.states.max_context = 5
        with pytest.raises(CacheError, match="context of 5"):
            generate(model, tokenizer, prompt, prompt_cache=cache)


@by_default("hybrid", "4 bits")
@pytest.mark.parametrize("chunk", [7, 1000])
def test_states_within_a_prompt_cost_no_second_reading_of_experts(model, monkeypatch, chunk):
    """A call that stops for states inside its layers keeps what calls that end there would."""
    prompt = texts(1)[0]
    monkeypatch.setattr(model, "prefill_chunk", chunk)
    calls, original = [], type(model).__call__

    def counted(self, tokens, cache=None, **options):
        calls.append(tokens.shape[1])
        return original(self, tokens, cache, **options)

    monkeypatch.setattr(type(model), "__call__", counted)
    stops = [5, 14, 40]
    with PromptCache(every=None) as cache:
        reply(model, prompt, cache, count=1, breakpoints=stops)
        assert calls == [len(prompt)]
        state = model.make_cache()
        for start, stop in zip([0, *stops], stops, strict=False):
            mx.eval(model(mx.array([prompt[start:stop]]), state, last_only=True))
            found = cache.resume(model, [*prompt[:stop], 1])
            assert found.position == stop
            for one, other in zip(found.state, state, strict=True):
                for a, b in zip(export([one]).values(), export([other]).values(), strict=True):
                    if a.dtype == mx.uint16:
                        close_in_4_bits(*(type(other).unpacked(x) for x in (a, b)))
                    else:
                        assert mx.abs(a - b).max() <= 1e-5 * mx.abs(b).max()


def close_in_4_bits(a, b):
    """Where calls are cut elsewhere, what is rounded to 16 steps differs by a few 1e-7 of the
    largest: one number of some 100,000 lies so near the middle between two steps, which are 2/15
    apart, that it goes to the other; arrays here have 2,560."""
    apart, largest = mx.abs(a - b), mx.abs(b).max()
    assert (apart > 1e-5 * largest).sum() <= 1
    assert apart.max() <= 1.001 * 2 * largest / 15


def test_reading_without_a_reply_is_enough(hybrid):
    prompt = texts(1)[0]
    with PromptCache() as cache:
        resumed = cache.resume(hybrid, prompt)
        assert list(generate_step(mx.array(prompt), hybrid, max_tokens=0, resumed=resumed)) == []
        assert reply(hybrid, prompt, cache)[1] == 0


def test_a_failure_in_the_prefill_keeps_what_was_reached(hybrid, monkeypatch):
    prompt, calls = texts(1)[0], []
    original = type(hybrid).__call__

    def failing(self, tokens, cache=None, **options):
        calls.append(tokens.shape[1])
        if len(calls) == 2:
            raise OSError("pulled out")
        return original(self, tokens, cache, **options)

    expected, _ = reply(hybrid, prompt)
    with PromptCache() as cache:
        monkeypatch.setattr(type(hybrid), "__call__", failing)
        with pytest.raises(OSError, match="pulled out"):
            # A call keeps four states at most.
            reply(hybrid, prompt, cache, breakpoints=[8, 16, 24, 32, 40])
        monkeypatch.undo()
        assert reply(hybrid, prompt, cache) == (expected, 17)


def test_models_never_meet_in_one_cache(hybrid, tmp_path, directory):
    prompt = texts(1)[0]
    with (
        model_of("attention", tmp_path) as other,
        load_model(TWIN, dtype=mx.float32, experts_per_token=2) as lossy,
    ):
        models = (hybrid, other, lossy)
        expected = [reply(model, prompt)[0] for model in models]
        with PromptCache(directory) as cache:
            for known in (len(prompt), 0):
                for model, ids in zip(models, expected, strict=True):
                    assert reply(model, prompt, cache) == (ids, known)
        assert len(list(directory.iterdir())) == 3


def test_wrong_states_and_limits_are_refused(hybrid, tmp_path):
    state = hybrid.make_cache()
    with PromptCache() as cache, pytest.raises(CacheError, match=r"seen \[0\] tokens, not these 3"):
        cache.store(hybrid, [1, 2, 3], state)
    for option in ("memory_bytes", "disk_bytes", "every"):
        with pytest.raises(InputError, match=f"{option} is 0"):
            PromptCache(**{option: 0})
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be made"):
        PromptCache(tmp_path / "file")


@pytest.mark.slow
def test_memory_is_bounded_and_the_oldest_prompt_goes(hybrid, directory):
    prompts = texts(*range(6))
    expected = [reply(hybrid, prompt)[0] for prompt in prompts]
    with PromptCache(every=None) as cache:
        reply(hybrid, prompts[0], cache)
        one = cache.nbytes
    with PromptCache(every=None, memory_bytes=3 * one) as cache:
        for prompt, ids in zip(prompts, expected, strict=True):
            assert reply(hybrid, prompt, cache)[0] == ids
            assert cache.nbytes <= 3 * one
        assert reply(hybrid, prompts[-1], cache)[1] == 0
        assert reply(hybrid, prompts[0], cache)[1] > 0
    with PromptCache(directory, every=None, memory_bytes=1) as cache:
        for prompt in prompts:
            reply(hybrid, prompt, cache)
            cache.flush()
        for prompt, ids in zip(prompts, expected, strict=True):
            assert reply(hybrid, prompt, cache) == (ids, 0)
        assert cache.nbytes == 0


@by_default("hybrid")
def test_what_prompts_share_is_held_once(model):
    prompts = [p for n in (1, 2, 3) for p in texts(n)]
    sizes = []
    for prompt in prompts:
        with PromptCache(every=None) as cache:
            reply(model, prompt, cache)
            sizes.append(cache.nbytes)
    with PromptCache(every=None) as cache:
        for prompt in prompts:
            reply(model, prompt, cache, breakpoints=[40])
        kv = 40 * model.bytes_per_position()
        recurrent = sum(sizes) // 3 - 49 * model.bytes_per_position()
        # The shared 40 tokens once; a recurrent state for each of the four places.
        assert cache.nbytes <= kv + 3 * 9 * model.bytes_per_position() + 4 * recurrent


def test_experts_that_were_in_memory_come_back(two_bundled_layers, tmp_path, directory):
    model, _ = load(two_bundled_layers, expert_memory="50%")
    prompt = np.random.default_rng(3).integers(0, 4096, 60).tolist()
    with model, PromptCache(directory) as cache:
        reply(model, prompt, cache)
        cache.flush()
        (node,) = directory.glob("*/*.safetensors")
        data = node.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        kept = json.loads(header["__metadata__"]["experts"])
        assert {int(layer) for layer in kept} == set(model.store.layers)
    model, tokenizer = load(two_bundled_layers, expert_memory="50%")
    with model, PromptCache(directory) as cache:
        assert not any(model.store.residents(layer) for layer in model.store.layers)
        generate(model, tokenizer, prompt, max_tokens=1, prompt_cache=cache)
        until = time.monotonic() + 60
        wanted = {layer: set(kept[str(layer)]) for layer in model.store.layers}
        while time.monotonic() < until:
            if all(wanted[n] <= set(model.store.residents(n)) for n in wanted):
                break
            time.sleep(0.01)
        assert all(wanted[n] <= set(model.store.residents(n)) for n in wanted)
        assert model.store.stats().total.misses == 0
        assert model.store.stats().total.reads == sum(map(len, wanted.values())) > 0


FIRST_TOKEN = """
import json, sys, time
import mlx.core as mx
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.loading import load_model
from tests.models_at_hand import reply
path, directory, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with load_model(path, expert_memory="25%") as model:
    start = time.perf_counter()
    if directory:
        with PromptCache(directory) as cache:
            (token,), read = reply(model, ids, cache, count=1)
            seconds = time.perf_counter() - start
    else:
        (token,), read = reply(model, ids, count=1)
        seconds = time.perf_counter() - start
print(json.dumps([token, read, seconds]))
"""


def first_token(path, directory, ids):
    """In a process of its own: the token, how many were read for it, and seconds."""
    given = [str(path), str(directory or ""), json.dumps(ids)]
    child = [sys.executable, "-c", FIRST_TOKEN, *given]
    done = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["bundled", "synthetic"])
def test_the_first_token_comes_in_a_tenth_of_the_time(directory, which, tmp_path, monkeypatch):
    """The best of three and five, in turns: what else the machine does only adds to a time."""
    path = BUNDLED_MODEL
    if which == "synthetic":
        # Wide enough that computing takes more of the time than setting out.
        shape = replace(SHAPES["qwen3.5-tiny"], hidden_size=512, moe_intermediate_size=128)
        monkeypatch.setitem(SHAPES, "wider", shape)
        path = synthesize("wider", tmp_path / "model", layers=8, experts=32)
    draw = np.random.default_rng(4)
    prompt = draw.integers(0, 256, 4000).tolist()
    ends = draw.integers(0, 256, (5, 20)).tolist()
    first_token(path, directory, prompt)
    known = [first_token(path, directory, prompt + end) for end in ends[3:]]
    cold = []
    for end in ends[:3]:
        cold.append(first_token(path, None, prompt + end))
        known.append(first_token(path, directory, prompt + end))
    assert [token for token, _, _ in known[2:]] == [token for token, _, _ in cold]
    assert [read for _, read, _ in cold] == [4020] * 3
    assert [read for _, read, _ in known] == [20] * 5
    seconds = [min(took for _, _, took in runs) for runs in (known, cold)]
    assert seconds[0] <= 0.1 * seconds[1], (known, cold)


def test_a_request_costs_the_same_among_few_and_many_entries(hybrid):
    """Counts the lines of the cache that run, not time: with and without states to remove."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    def watch(frame, event, argument):
        return count if "cache/prompt/" in frame.f_code.co_filename else None

    state = hybrid.make_cache()
    hybrid(mx.array([[1, 2, 3, 4]]), state)

    def request(i):
        """A prompt that shares its first token with a fourth of the others."""
        nonlocal lines
        prompt, lines = [i % 4, 5 + i % 64, 70 + i // 64, 4], 0
        sys.settrace(watch)
        try:
            cache.resume(hybrid, prompt)
            cache.store(hybrid, prompt, state)
        finally:
            sys.settrace(None)
        return lines

    with PromptCache() as cache:
        few = max(request(i) for i in range(40))
        assert few > 40
        # A prompt of four tokens passes at most four places where others differ.
        assert max(request(i) for i in range(40, 300)) <= few + 100
        cache.memory_bytes = cache.nbytes
        assert max(request(i) for i in range(300, 310)) <= few + 200
        assert len(cache) == 300
        assert cache.nbytes <= cache.memory_bytes
