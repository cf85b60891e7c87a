"""Small models of every kind of state, for tests of what they remember."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion import synthesize
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.base import StreamingModel

TWIN = Path(__file__).parent / "golden" / "text_top3"
VOCABULARY = 64
FAMILIES = (
    *("deepseek_v3_groups", "kimi_k2_group1", "qwen3_moe_window", "qwen3_next_top3"),
    *("qwen4_exp_rows", "gemma4_shared", "glm_moe_dsa_shared"),
)
# Kinds of state that another one of these has too, and some that are slow.
SAME = ("gemma4_shared", "kimi_k2_group1", "qwen3_next_top3", "qwen4_exp_rows")
SAME += ("glm_moe_dsa_shared",)
KINDS = (
    *("hybrid", "attention", "4 bits", "deepseek_v3_groups", "qwen3_moe_window"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in SAME),
)


def by_default(*names: str, without: tuple[str, ...] = ()):
    """A test's fixture ``model`` is of these kinds; with -m slow, of the others but `without`."""
    every = ("hybrid", "attention", "4 bits", "deepseek_v3_groups", "qwen3_moe_window", *SAME)
    kinds = [kind for kind in every if kind not in without]
    assert set(names) <= set(kinds)
    assert set(without) <= set(every)
    chosen = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in names)) for kind in kinds]
    return pytest.mark.parametrize("model", chosen, indirect=True)


def directory_of(kind: str, tmp_path: Path, **options) -> Path:
    """hybrid: recurrent and attention layers. attention: nothing else. 4 bits: hybrid, with keys
    and values in 4 bits."""
    if kind != "attention":
        return TWIN.parent / kind if kind in FAMILIES else TWIN
    shape = replace(synthesize.SHAPES["qwen3.5-tiny"], full_attention_interval=1)
    before = dict(synthesize.SHAPES)
    synthesize.SHAPES["attention-only"] = shape
    try:
        return synthesize.synthesize(
            "attention-only", tmp_path / "attention", layers=2, experts=8, **options
        )
    finally:
        synthesize.SHAPES.clear()
        synthesize.SHAPES.update(before)


def model_of(kind: str, tmp_path: Path, **options) -> StreamingModel:
    """Streamed with the fewest slots, in float32."""
    options = {"expert_memory": "75%", "dtype": mx.float32} | options
    if kind == "4 bits":
        options |= {"kv_bits": 4, "kv_group_size": 32}
    return load_model(directory_of(kind, tmp_path), **options)


def tokens_of(T: int, seed: int = 0) -> mx.array:
    """ids [1, T] that every model has."""
    return mx.array(np.random.default_rng([T, seed]).integers(0, VOCABULARY, (1, T)))


def same_bits(a: mx.array, b: mx.array) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    assert np.isfinite(a).all()
    assert np.isfinite(b).all()
    return a.dtype == b.dtype and np.array_equal(a, b)


def run(model: StreamingModel, state: list, tokens: mx.array) -> mx.array:
    """Token by token: ids [1, T] -> logits [T, V]."""
    if not tokens.shape[1]:
        return mx.zeros((0, model.config.vocab_size))
    steps = [model(tokens[:, i : i + 1], state)[0] for i in range(tokens.shape[1])]
    logits = mx.concatenate(steps)
    mx.eval(logits)
    return logits


def asked(model) -> int:
    """Tokens that went through the layers so far."""
    return next(iter(model.store.stats().layers.values())).tokens


def reply(model, ids, cache=None, *, count=5, breakpoints=()):
    """(ids, tokens that were read for the first of them) of a greedy reply."""
    resumed = None if cache is None else cache.resume(model, ids, breakpoints=breakpoints)
    before = asked(model)
    steps = generate_step(mx.array(ids), model, max_tokens=count, resumed=resumed)
    first = next(steps)[0]
    # On the CPU nothing runs ahead of the caller.
    read = asked(model) - before - (count > 1)
    return [first, *(token for token, _ in steps)], read


def texts(*names: int) -> list[list[int]]:
    """Prompts with one beginning and different ends."""
    beginning = tokens_of(40, seed=1)[0].tolist()
    return [beginning + tokens_of(9, seed=100 + name)[0].tolist() for name in names]
