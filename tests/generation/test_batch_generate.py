"""Oracle: generate() on each prompt alone."""

from __future__ import annotations

import pytest

from mlx_moeflux import PromptCache, batch_generate, generate, load
from mlx_moeflux.errors import InputError


@pytest.fixture(scope="module")
def talking(two_bundled_layers):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    with model:
        yield model, tokenizer


PROMPTS = ["import os\n\ndef main(argv):\n", "class A:", "return self."]


def test_texts_are_those_of_generate(talking, capsys):
    model, tokenizer = talking
    expected = [generate(model, tokenizer, prompt, max_tokens=9) for prompt in PROMPTS]
    reply = batch_generate(
        model, tokenizer, PROMPTS, max_tokens=9, verbose=True,
        return_token_ids=True, return_logprobs=True, return_prompt_caches=True,
    )  # fmt: skip
    assert reply.texts == expected
    assert [tokenizer.decode(ids) for ids in reply.token_ids] == expected
    assert all(len(row) == 9 and max(row) <= 0 for row in reply.logprobs)
    sizes = [len(tokenizer.encode(prompt)) + 9 for prompt in PROMPTS]
    assert [state.position for state in reply.caches] == sizes
    assert reply.stats.prompt_tokens == sum(sizes) - 27
    assert reply.stats.generation_tokens == 27
    assert reply.stats.experts.total.bytes_read > 0
    assert "3 of 3 replies" in capsys.readouterr().out
    plain = batch_generate(model, tokenizer, PROMPTS, max_tokens=[1, 2, 3])
    assert plain.caches is plain.token_ids is plain.logprobs is None
    assert all(b.startswith(a) for a, b in zip(plain.texts, expected, strict=True))


def test_stop_texts_and_ids_end_one_reply_only(talking):
    model, tokenizer = talking
    free = batch_generate(model, tokenizer, PROMPTS, max_tokens=9, return_token_ids=True)
    stop = free.texts[0][len(free.texts[0]) // 2 :][:3]
    for keep in (False, True):
        reply = batch_generate(
            model, tokenizer, PROMPTS, max_tokens=9, stop=stop, return_prompt_caches=keep
        )
        for got, text in zip(reply.texts, free.texts, strict=True):
            assert got == (text[: text.index(stop)] if stop in text else text)
    end = free.token_ids[1][2]
    reply = batch_generate(
        model, tokenizer, PROMPTS, max_tokens=9, stop_ids=[end], return_token_ids=True
    )
    for got, ids in zip(reply.token_ids, free.token_ids, strict=True):
        assert got == (ids[: ids.index(end)] if end in ids else ids)


def test_options_and_errors_are_those_of_one_prompt(talking):
    model, tokenizer = talking
    drawn = [
        batch_generate(model, tokenizer, PROMPTS, max_tokens=5, temp=1.0, seed=3).texts
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    with pytest.raises(InputError, match="nothing is called 'tmep'"):
        batch_generate(model, tokenizer, PROMPTS, tmep=1)
    with pytest.raises(InputError, match="the prompt is empty"):
        batch_generate(model, tokenizer, ["a", ""])
    with pytest.raises(InputError, match="max_tokens has 1 entries for 3"):
        batch_generate(model, tokenizer, PROMPTS, max_tokens=[1])
    assert batch_generate(model, tokenizer, []).texts == []


@pytest.mark.slow
@pytest.mark.parametrize("together", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_prompt_cache_saves_what_prompts_share(talking, tmp_path, together):
    model, tokenizer = talking
    prompts = [
        f"import os\nimport sys\nimport json\n\n{end}" for end in ("def a(", "class B", "x =")
    ]
    expected = [generate(model, tokenizer, prompt, max_tokens=6) for prompt in prompts]
    read = []
    for _ in range(2):
        with PromptCache(tmp_path / "prompts") as cache:
            before = model.store.stats().layers[0].tokens
            reply = batch_generate(
                model,
                tokenizer,
                prompts,
                max_tokens=6,
                prefill_batch_size=together,
                prompt_cache=cache,
            )
            read.append(model.store.stats().layers[0].tokens - before)
            assert reply.texts == expected
            # A single call goes on from what the batch has read.
            last = generate(
                model,
                tokenizer,
                prompts[1],
                max_tokens=6,
                prompt_cache=cache,
                return_response=True,
            )
            assert (last.text, last.cached_tokens) == (expected[1], last.prompt_tokens)
    # All tokens, none of them padding, and five steps of each; then the steps alone.
    assert read == [sum(len(tokenizer.encode(prompt)) for prompt in prompts) + 15, 15]
