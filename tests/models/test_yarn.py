"""Oracles: mlx-lm on the same checkpoint, and configs read and written again. Logits of
transformers: test_twins.py."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import model_class
from mlx_moeflux.models.shapes import SHAPES
from tests.models.twins import GOLDEN, LIMIT, relative_error

TWINS = ("qwen3_moe_yarn4", "qwen3_next_yarn2")


def config_of(twin):
    return json.loads((GOLDEN / twin / "config.json").read_text())


@pytest.mark.parametrize("twin", TWINS)
def test_a_written_config_says_the_same(twin):
    config = config_of(twin)
    kind = model_class(config["model_type"]).Config
    parsed = kind.from_dict(config, file="config.json")
    assert parsed.yarn is not None
    again = json.loads(json.dumps(parsed.published()))
    assert kind.from_dict(again, file="config.json") == parsed


def test_mlx_lm_knows_no_yarn_here(tmp_path):
    """Source: mlx-lm 0.32.2 models/qwen3_moe.py makes nn.RoPE(base=rope_theta), whatever
    rope_scaling says; transformers 5.23 Qwen3MoeRotaryEmbedding takes rope_parameters."""
    from mlx_lm.utils import load_model as mlx_lm_load

    path = convert(GOLDEN / TWINS[0], tmp_path / "q", layout="safetensors")
    theirs, _ = mlx_lm_load(path)
    theirs.set_dtype(mx.float32)
    tokens = mx.array(np.random.default_rng(0).integers(0, 71, (2, 40)))
    config = config_of(TWINS[0])
    for scaling, agrees in ((config["rope_scaling"], False), (None, True)):
        (path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
        with load_model(path) as model:
            assert (relative_error(model(tokens), theirs(tokens)) <= LIMIT) == agrees


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "longrope"])
def test_other_ropes_are_refused(kind):
    config = config_of(TWINS[0])
    config["rope_scaling"]["type"] = kind
    with pytest.raises(UnsupportedError, match="only 'default' and 'yarn'"):
        model_class("qwen3_moe").Config.from_dict(config, file="config.json")


@pytest.mark.parametrize("name", ["gpt-oss-tiny", "minimax-tiny"])
def test_the_base_of_a_family_is_that_of_yarn_too(name):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    keys = SHAPES[name].published() | {"rope_scaling": scaling}
    kind = type(SHAPES[name])
    without = kind.from_dict({k: v for k, v in keys.items() if k != "rope_theta"}, file="x")
    assert without == kind.from_dict(keys, file="x")
    assert without.yarn is not None
    assert without.yarn.theta == without.rope_theta == SHAPES[name].rope_theta
