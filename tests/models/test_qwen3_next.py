"""Oracles: mlx-lm's Qwen3-Next on the same checkpoint, and the order of the fused rows by hand.
Logits of transformers: test_twins.py."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import model_class
from mlx_moeflux.models.qwen3_next import FusedDeltaNet
from tests.models.twins import GOLDEN, LIMIT, relative_error

TWIN = GOLDEN / "qwen3_next_top3"
TOKENS = mx.array(np.random.default_rng(0).integers(0, 107, (2, 40)))


def config_of(**keys):
    config = json.loads((TWIN / "config.json").read_text()) | keys
    return model_class("qwen3_next").Config.from_dict(config, file="config.json")


@pytest.mark.parametrize("bits", [None, 8])
def test_mlx_lm_agrees(tmp_path, bits):
    from mlx_lm.utils import load_model as mlx_lm_load

    options = {} if bits is None else {"quantize": True, "q_bits": bits}
    path = convert(TWIN, tmp_path / "x", layout="safetensors", dtype="float32", **options)
    theirs, _ = mlx_lm_load(path)
    theirs.set_dtype(mx.float32)
    with load_model(path, expert_memory="70%") as model:
        assert set(model.moe_blocks()) == {0, 1, 3}
        assert relative_error(model(TOKENS), theirs(TOKENS)) <= LIMIT


@pytest.mark.parametrize("kind", ["cpu", "metal"])
def test_rows_go_by_key_head(kind, monkeypatch):
    """2 key heads of 24 and 3 value heads of 32 to each: q, k, v v v, z z z; then b b b, a a a."""
    mixer = FusedDeltaNet(config_of(), Kernels())
    x = mx.zeros((1, 1, 64))
    x[0, 0, 0] = 1.0
    for projection in (mixer.in_proj_qkvz, mixer.in_proj_ba):
        rows = projection.weight.shape[0]
        projection.weight = mx.zeros((rows, 64))
        projection.weight[:, 0] = mx.arange(rows)
    monkeypatch.setattr(device, "kind", lambda: kind)
    # One of 64 values is 1: the norm makes it 8.
    parts = mixer.project(x, nn.RMSNorm(64, eps=1e-12))
    qkv, z, a, b = (np.round(np.array(part[0, 0]) / 8).astype(int).tolist() for part in parts)
    head = 24 + 24 + 96 + 96

    def stretch(start, length):
        return [*range(start, start + length), *range(head + start, head + start + length)]

    assert qkv == [*stretch(0, 24), *stretch(24, 24), *stretch(48, 96)]
    assert z == stretch(144, 96)
    assert b == [0, 1, 2, 6, 7, 8]
    assert a == [3, 4, 5, 9, 10, 11]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_experts_per_tok": 7}, "7"),
    ],
)
def test_configs_that_are_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        config_of(**keys)
