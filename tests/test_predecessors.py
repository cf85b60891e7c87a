"""What the predecessors got wrong in state and routing, and would have been seen here. Oracle: the
same tokens one by one, the other store, the other order.

Elsewhere: a rewind that left recurrent layers in the future (test_checkpoints.py, and truncation in
test_state.py), positions that disagree with the cache (test_state.py), DeepSeek's numerics and
group masks (models/test_deepseek_v3.py), rows of matrices that are no multiple of eight
(kernels/).
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion import synthesize
from mlx_moeflux.loading import load_model
from tests.models_at_hand import KINDS, model_of, run, same_bits, tokens_of

USUAL = ("hybrid", "deepseek_v3_groups")


@pytest.mark.parametrize(
    "kind",
    [k if k in USUAL or hasattr(k, "marks") else pytest.param(k, marks=pytest.mark.slow)
     for k in KINDS],
)  # fmt: skip
def test_steps_after_a_prefill_see_all_of_it(kind, tmp_path):
    """A mirror of the cache that prefill did not fill let steps see zeros after 32 tokens."""
    tokens, prompt = tokens_of(80), 75
    with model_of(kind, tmp_path) as model:
        expected = run(model, model.make_cache(), tokens)[prompt - 1 :]
        state = model.make_cache()
        first = model(tokens[:, :prompt], state, last_only=True)[0]
        got = mx.concatenate([first, run(model, state, tokens[:, prompt:])])
    # Chunks and steps take other implementations; 4 bits round what differs by 1e-6 to steps of a
    # fifteenth.
    limit = 0.05 if kind == "4 bits" else 1e-4
    assert mx.abs(got - expected).max() <= limit * mx.abs(expected).max()


def test_ten_experts_a_token_are_all_used(tmp_path, monkeypatch):
    """A bound of eight dropped two of ten, whose weights still counted in the normalisation."""
    shape = replace(synthesize.SHAPES["qwen3.5-tiny"], num_experts_per_tok=10)
    monkeypatch.setitem(synthesize.SHAPES, "ten", shape)
    path = synthesize.synthesize("ten", tmp_path / "ten", layers=4, experts=16)
    tokens = tokens_of(9)
    logits = []
    for memory, kernels in (("75%", None), ("100%", None), ("100%", "reference")):
        with load_model(path, expert_memory=memory, kernels=kernels, dtype=mx.float32) as model:
            with model.record(names=["ids", "weights"]) as kept:
                logits.append(model(tokens, model.make_cache())[0])
                mx.eval(logits[-1], kept)
            for layer in kept.values():
                ids, weights = (np.array(layer[name]) for name in ("ids", "weights"))
                assert ids.shape == (9, 10)
                assert (np.diff(ids.astype(int), axis=1) > 0).all()
                assert np.abs(weights.sum(axis=1) - 1).max() <= 1e-6
    streamed, resident, reference = logits
    assert same_bits(streamed, resident)
    assert mx.abs(resident - reference).max() <= 1e-4 * mx.abs(reference).max()


def test_two_models_in_one_process_do_not_meet(tmp_path):
    """State of the process gave a second context NaN."""
    tokens = tokens_of(12)
    with model_of("hybrid", tmp_path) as one, model_of("kimi_k2_group1", tmp_path) as other:
        models = (one, other)
        expected = [run(model, model.make_cache(), tokens) for model in models]
        states, got = [model.make_cache() for model in models], [[], []]
        for i in range(tokens.shape[1]):
            for model, state, rows in zip(models, states, got, strict=True):
                rows.append(run(model, state, tokens[:, i : i + 1]))
    for rows, right in zip(got, expected, strict=True):
        assert same_bits(mx.concatenate(rows), right)
