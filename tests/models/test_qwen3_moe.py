"""Oracles: mlx-lm's Qwen3-MoE on the same quantised checkpoint, greedy ids of evaluating the whole
text anew, and a window worked by hand. Logits of transformers: test_twins.py."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import ConfigError, UnsupportedError
from mlx_moeflux.generation.text import generate_step
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import model_class
from tests.models.twins import GOLDEN, LIMIT, relative_error

TWIN, WINDOW = GOLDEN / "qwen3_moe_top2", GOLDEN / "qwen3_moe_window"


def tokens_of(directory, count=40):
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    return mx.array(np.random.default_rng(0).integers(0, vocabulary, (2, count)))


@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_lm_agrees_on_the_quantised_checkpoint(tmp_path, bits):
    from mlx_lm.utils import load_model as mlx_lm_load

    path = convert(TWIN, tmp_path / "q", layout="safetensors", quantize=True, q_bits=bits)
    theirs, config = mlx_lm_load(path)
    theirs.set_dtype(mx.float32)
    assert config["quantization"]["bits"] == bits
    assert config["quantization"].get("model.layers.1.mlp.gate", {"bits": bits})["bits"] == 8
    tokens = tokens_of(TWIN)
    with load_model(path, expert_memory="40%") as model:
        assert model.layers[1].mlp.gate.bits == 8
        assert model.layers[1].self_attn.q_proj.bits == bits
        assert relative_error(model(tokens), theirs(tokens)) <= LIMIT


def test_mlx_lm_knows_no_window(tmp_path):
    """Source: mlx-lm 0.32.2 models/qwen3_moe.py masks causally only; transformers 5.23
    Qwen3MoeModel takes create_sliding_window_causal_mask where use_sliding_window is set."""
    from mlx_lm.utils import load_model as mlx_lm_load

    plain = shutil.copytree(TWIN, tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    tokens = tokens_of(TWIN)
    theirs, _ = mlx_lm_load(convert(plain, tmp_path / "theirs", layout="safetensors"))
    theirs.set_dtype(mx.float32)
    expected = theirs(tokens)
    for window, agrees in ((3, False), (64, True)):
        changed = config | {"use_sliding_window": True, "sliding_window": window}
        (plain / "config.json").write_text(json.dumps(changed))
        with load_model(plain) as model:
            logits = model(tokens)
        assert (relative_error(logits, expected) <= LIMIT) == agrees
        # The first tokens see everything in either case.
        assert relative_error(logits[:, :3], expected[:, :3]) <= LIMIT


def test_a_token_outside_the_window_changes_nothing():
    """Five tokens a layer, four layers: logits reach back 4 (5 - 1) = 16 tokens."""
    tokens = np.array(tokens_of(WINDOW))
    changed = tokens.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 97
    with load_model(WINDOW) as model:
        moved = np.abs(np.array(model(mx.array(tokens)) - model(mx.array(changed))))
    moved = moved.max(axis=(0, 2))
    assert (moved[:7] == 0).all()
    assert moved[7] > 1e-3
    assert moved[7 + 16] > 0
    assert (moved[7 + 17 :] == 0).all()


@pytest.mark.parametrize("directory", [TWIN, WINDOW], ids=lambda d: d.name)
@pytest.mark.parametrize("memory", ["100%", "60%"])
def test_generation_is_that_of_the_whole_text(directory, memory):
    prompt = tokens_of(directory)[0, :13].tolist()
    with load_model(directory, expert_memory=memory) as model:
        ids, expected = list(prompt), []
        for _ in range(9):
            expected.append(int(mx.argmax(model(mx.array([ids]))[0, -1]).item()))
            ids.append(expected[-1])
        got = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=9)]
    assert got == expected


def test_which_layers_are_sparse():
    config = model_class("qwen3_moe").Config.from_dict(
        json.loads((WINDOW / "config.json").read_text()), file="config.json"
    )
    assert [config.is_sparse(i) for i in range(8)] == [False] * 3 + [True] + [False, True] * 2
    with load_model(WINDOW) as model:
        assert set(model.moe_blocks()) == {3}
        assert model.layers[0].mlp.up_proj.weight.shape == (56, 48)


@pytest.mark.parametrize(
    ("keys", "kind", "words"),
    [
        ({"use_sliding_window": True, "sliding_window": 0}, ConfigError, "sliding_window"),
        ({"use_qk_norm": False}, UnsupportedError, "use_qk_norm"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, UnsupportedError, "linear"),
        ({"rope_scaling": 7}, ConfigError, "rope_scaling"),
        ({"hidden_act": "gelu"}, UnsupportedError, "gelu"),
        ({"num_local_experts": None, "num_experts": None}, ConfigError, "num_experts"),
        ({"num_experts_per_tok": 77}, ConfigError, "77"),
        ({"shared_expert_intermediate_size": 9}, ConfigError, "shared_expert"),
    ],
)
def test_configs_that_are_refused(keys, kind, words):
    config = json.loads((TWIN / "config.json").read_text()) | keys
    with pytest.raises(kind, match=words):
        model_class("qwen3_moe").Config.from_dict(config, file="config.json")
