"""Oracles, for every family: bit equality of resident and streamed, ids of evaluating the whole
text anew, and what a user of the command line sees. Shapes are the tiny ones of `synthesize`."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.generation.text import generate_step
from mlx_moeflux.loading import load, load_model
from mlx_moeflux.mlx_lm_plugin import register_cache_classes
from mlx_moeflux.models.shapes import SHAPES

# Their parts are those of other shapes here.
ALIKE = ("glm-flash-tiny", "glm-tiny", "kimi-k2.5-tiny", "laguna-tiny", "minimax-tiny")
ALIKE += ("qwen3-tiny",)
TINY = [
    pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name
    for name in sorted(SHAPES)
    if name.endswith("-tiny")
]
PROMPTS = [5, 17, 2]
MAX_TOKENS = 6


def by_default(*names: str):
    """A test's fixture ``directory`` is of these families, and with -m slow of the others."""
    tiny = [name for name in sorted(SHAPES) if name.endswith("-tiny")]
    families = [pytest.param(n, marks=[pytest.mark.slow] * (n not in names)) for n in tiny]
    return pytest.mark.parametrize("directory", families, indirect=True)


@pytest.fixture(scope="module", params=TINY)
def directory(request, tmp_path_factory) -> Path:
    return synthesize(request.param, tmp_path_factory.mktemp("family") / request.param)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, 1023, n).tolist() for n in PROMPTS]


def whole_text(model, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(MAX_TOKENS):
        ids.append(int(mx.argmax(model(mx.array([ids]), last_only=True)[0, -1]).item()))
    return ids[len(prompt) :]


@pytest.mark.slow
def test_streamed_is_resident_bit_for_bit(directory, tmp_path):
    """With every reader and packed; tests/test_same_bits.py has each family by default."""
    packed = convert(directory, tmp_path / "packed", verify_written=True)
    tokens = mx.array(np.random.default_rng(1).integers(0, 1024, (2, 45)))

    def answers(path, **options):
        with load_model(path, **options) as model:
            cache = model.make_cache()
            parts = [model(tokens[:, :30], cache)]
            parts += [model(tokens[:, t : t + 1], cache) for t in range(30, 45)]
            return np.array(mx.concatenate(parts, axis=1))

    expected = answers(directory)
    assert np.isfinite(expected).all()
    for path, memory, reader in (
        (directory, "13%", "pread"),
        (directory, "40%", "mmap"),
        (directory, "50%", "direct"),
        (packed, "13%", "pread"),
        (packed, "99%", "memory"),
    ):
        given = answers(path, expert_memory=memory, expert_reader=reader)
        assert np.array_equal(given, expected), (path, memory, reader)


# test_mlx_lm_client.py has more of it for Qwen3.5.
@by_default()
def test_generation_and_mlx_lm_as_the_client(directory):
    mlx_lm = pytest.importorskip("mlx_lm")
    model, tokenizer = load(directory, expert_memory="20%")
    with model:
        expected = [whole_text(model, prompt) for prompt in prompts()]
        for prompt, ids in zip(prompts(), expected, strict=True):
            ours = generate_step(mx.array(prompt), model, max_tokens=MAX_TOKENS)
            assert [int(token) for token, _ in ours] == ids
            theirs = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=MAX_TOKENS)
            assert [reply.token for reply in theirs] == ids
        together = mlx_lm.batch_generate(
            model, tokenizer, prompts(), max_tokens=MAX_TOKENS, return_token_ids=True
        )
        assert together.token_ids == expected


@by_default("deepseek-tiny", "qwen3-next-tiny")
def test_a_saved_prompt_goes_on(directory, tmp_path):
    """Through mlx-lm's files, whose loader looks our entries up by name."""
    cache = pytest.importorskip("mlx_lm.models.cache")
    register_cache_classes()
    prompt, file = prompts()[1], str(tmp_path / "cache.safetensors")
    with load_model(directory, expert_memory="20%") as model:
        expected = whole_text(model, prompt)
        entries = cache.make_prompt_cache(model)
        mx.eval(model(mx.array([prompt[:-1]]), entries))
        cache.save_prompt_cache(file, entries)
        loaded = cache.load_prompt_cache(file)
        assert [type(entry) for entry in loaded] == [type(entry) for entry in entries]
        for resumed in (loaded, entries):
            ids = generate_step(
                mx.array(prompt[-1:]), model, max_tokens=MAX_TOKENS, prompt_cache=resumed
            )
            assert [int(token) for token, _ in ids] == expected


def test_the_command_line(directory, capsys):
    arguments = ["--model", str(directory), "-p", "t1 t2", "-m", "4", "--expert-memory", "30%"]
    assert main(["generate", *arguments, "--temp", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "experts streamed" in err
