"""Oracle: invalid input raises one sentence before any work is done."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from inspect import signature

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import generate, load, stream_generate
from mlx_moeflux.cli import main
from mlx_moeflux.errors import InputError
from mlx_moeflux.generation import sampling
from mlx_moeflux.generation.text import GenerationOptions
from mlx_moeflux.loading import BUNDLED_MODEL

PROMPT = "import os\n"


@pytest.fixture(scope="module")
def pair(two_bundled_layers):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    with model:
        yield model, tokenizer


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
        (mx.array([0.5]), "float32"),
        (np.array([[1, 2]]), r"\[1, 2\]"),
        (np.array(1), "expected ids"),
        (b"abc", "expected text"),
        ("a\udcff", "UTF-8"),
        ([{"role": "user", "content": "x"}], "chat template"),
    ],
)
def test_prompts_that_cannot_be(pair, prompt, match):
    with pytest.raises(InputError, match=match):
        generate(*pair, prompt)


@pytest.mark.parametrize(
    "end", [2**40, *(pytest.param(n, marks=pytest.mark.slow) for n in (4096, 151_645, 2**31))]
)
def test_an_end_without_a_row_ends_nothing(tmp_path, capsys, pair, two_bundled_layers, end):
    """A config may name an end token that the weights have no row for: it changes nothing."""
    model = shutil.copytree(two_bundled_layers, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    assert pair[0].config.vocab_size == 4096
    drawn = ["--temp", "1", "--seed", "1", "--xtc-probability", "1"]
    for options in ([], drawn):
        texts = []
        for path in (model, two_bundled_layers):
            words = ["generate", "--model", str(path), "-p", PROMPT, "-m", "4", *options]
            assert main(words) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1]
    ends = {"xtc_special_tokens": [end]}
    assert generate(*pair, PROMPT, max_tokens=4, **ends) == generate(*pair, PROMPT, max_tokens=4)
    with pytest.raises(InputError, match=f"xtc_special_tokens has token id {end}"):
        generate(*pair, PROMPT, max_tokens=4, temp=1.0, xtc_probability=1.0, **ends)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": "4"}, "max_tokens is '4'"),
        ({"max_tokens": -2}, "max_tokens is -2"),
        ({"prefill_step_size": 0}, "prefill_step_size is 0"),
        ({"prefill_step_size": -1}, "prefill_step_size is -1"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": 5}, "stop is"),
        ({"stop": ["x", ""]}, "stop string"),
        ({"stop_ids": 5}, "stop_ids is 5"),
        ({"stop_ids": "ab"}, "stop_ids is 'ab'"),
        ({"logit_bias": {4096: 1.0}}, "4096, which is out of range"),
        ({"temp": 1.0, "xtc_probability": 1.0, "xtc_special_tokens": [4096]}, "out of range"),
        ({"verbos": True}, "did you mean 'verbose'"),
        ({"prompt_cach": None}, "did you mean 'prompt_cache'"),
        ({"options": {}}, "nothing is called 'options'"),
        ({"kv_bits": 4}, "nothing is called 'kv_bits'"),
    ],
)
def test_options_that_cannot_be(pair, options, match):
    before = pair[0].store.stats().total.tokens
    with pytest.raises(InputError, match=match) as caught:
        generate(*pair, PROMPT, **options)
    assert "\n" not in str(caught.value)
    assert pair[0].store.stats().total.tokens == before


def test_typed_options_are_those_of_the_functions():
    own = set(signature(stream_generate).parameters) - {"model", "tokenizer", "prompt", "options"}
    makers = [sampling.make_sampler, sampling.make_logits_processors]
    # A seed of the text, not of one sampler.
    plain = {name for make in makers for name in signature(make).parameters} - {"seed"}
    assert set(sampling.SamplingOptions.__annotations__) == plain
    assert set(GenerationOptions.__annotations__) == own | plain


@pytest.mark.parametrize("options", [5, {"tokenize": False}, {"tools": []}])
def test_template_options_that_cannot_be(pair, options):
    with pytest.raises(InputError, match="template_options"):
        generate(*pair, [{"role": "user", "content": "x"}], template_options=options)


SEEDED = """
import sys
import mlx.core as mx
from mlx_moeflux import generate, load

mx.random.seed(7)
load(sys.argv[1], expert_memory="100%")
model, tokenizer = load(sys.argv[1], expert_memory="25%")
with model:
    options = {"temp": 1.0, "max_tokens": 6}
    print(generate(model, tokenizer, PROMPT, **options).encode())
    mx.random.seed(7)
    print(generate(model, tokenizer, PROMPT, **options).encode())
    print(generate(model, tokenizer, PROMPT, seed=7, **options).encode())
"""


def test_a_seed_gives_one_text_in_first_and_later_calls_of_every_process(pair, two_bundled_layers):
    model, tokenizer = pair
    text = generate(model, tokenizer, PROMPT, temp=1.0, max_tokens=6, seed=7)
    code = f"PROMPT = {PROMPT!r}{SEEDED}"
    command = [sys.executable, "-c", code, str(two_bundled_layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(text.encode())] * 3
    assert text != generate(model, tokenizer, PROMPT, temp=1.0, max_tokens=6, seed=8)


def test_sampling_is_mlx_lms_or_plain_but_not_both(pair):
    model, tokenizer = pair
    plain = {"temp": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3, "max_tokens": 6}
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
