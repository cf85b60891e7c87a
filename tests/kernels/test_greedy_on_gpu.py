"""Oracle: the same models with references, on the GPU and in float32 on the CPU.

In float32 logits may differ by 1e-4 of the largest. In bfloat16 those of kernels are at most twice
as far from float32's as those of references: where a router's choice hangs on rounding, both jump.
Greedy tokens are the same up to the first step at which the references' two best logits are so
close that either might have moved past the other within these limits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.tokenizer import load_tokenizer
from tests.kernels.harness import on_the_cpu, require_gpu

pytestmark = pytest.mark.gpu

LOG = logging.getLogger(__name__)
PROMPT, COUNT, RELATIVE = 40, 32, 1e-4
MODELS = ("bundled", "qwen3.5-small", "deepseek-tiny", "qwen3-tiny", "glm-tiny", "gpt-oss-tiny")


@dataclass(frozen=True)
class Said:
    """Greedy tokens, and logits ``[COUNT, V]`` of the steps that gave them."""

    tokens: list[int]
    logits: np.ndarray


@pytest.fixture(scope="module", params=MODELS)
def directory(request, tmp_path_factory):
    require_gpu()
    if request.param == "bundled":
        return BUNDLED_MODEL
    return synthesize(request.param, tmp_path_factory.mktemp("models") / request.param)


def prompt_of(directory, vocabulary: int) -> list[int]:
    if directory == BUNDLED_MODEL:
        ids = load_tokenizer(directory).encode("Shared experts are added to " * PROMPT)
        return ids[:PROMPT]
    return np.random.default_rng(PROMPT).integers(0, vocabulary, PROMPT).tolist()


def greedy(model, prompt: list[int]) -> list[int]:
    return [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=COUNT)]


def logits(model, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Of `tokens`, each given the prompt and those before it; a token a call, as they came."""
    cache, found = model.make_cache(), []
    for part in [prompt, *([token] for token in tokens[:-1])]:
        found.append(model(mx.array([part]), cache, last_only=True)[0, -1].astype(mx.float32))
        mx.eval(found)
    return np.array(mx.stack(found))


@pytest.fixture(scope="module")
def prompt(directory):
    with load_model(directory) as model:
        return prompt_of(directory, model.config.vocab_size)


def in_float32(directory, prompt: list[int], tokens: list[int]) -> np.ndarray:
    with on_the_cpu(), load_model(directory, dtype=mx.float32) as model:
        return logits(model, prompt, tokens)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_kernels_say_what_references_say(directory, prompt, dtype):
    with load_model(directory, dtype=dtype, kernels="reference") as model:
        tokens = greedy(model, prompt)
        expected = Said(tokens, logits(model, prompt, tokens))
    with load_model(directory, dtype=dtype) as model:
        assert set(model.kernels.names().values()) != {"reference"}
        said = Said(greedy(model, prompt), logits(model, prompt, tokens))
    largest = np.abs(expected.logits).max()
    if dtype == mx.float32:
        limit = RELATIVE * largest
        off, apart = np.abs(said.logits - expected.logits).max(), limit
    else:
        truth = in_float32(directory, prompt, tokens)
        naive = np.abs(expected.logits - truth).max()
        off, limit, apart = np.abs(said.logits - truth).max(), 2 * naive, 3 * naive
    LOG.info("logits off by %.3g, %.3g allowed, largest %.3g", off, limit, largest)
    assert np.isfinite(said.logits).all()
    assert off <= limit
    same = [a == b for a, b in zip(said.tokens, expected.tokens, strict=True)]
    if not all(same):
        second, first = np.sort(expected.logits[same.index(False)])[-2:]
        LOG.info("token %d: best two %.3g apart", same.index(False), first - second)
        assert first - second <= 2 * apart
