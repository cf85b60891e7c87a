"""Oracle: every parameter moves the loss. Kernels have no gradients: training takes references
where kernels would run."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_moeflux.loading import load_model
from mlx_moeflux.models import MODEL_TYPES
from tests.kernels.harness import emulated
from tests.models.twins import CASES, GOLDEN

OF_TYPE = {json.loads((GOLDEN / c / "config.json").read_text())["model_type"]: c for c in CASES}


def test_every_family_has_a_twin():
    # joyai_llm_flash is another name of deepseek_v3.
    assert OF_TYPE.keys() == MODEL_TYPES.keys() - {"joyai_llm_flash"}


@pytest.mark.parametrize("family", OF_TYPE)
def test_gradients_reach_every_parameter(family):
    """But a router's bias and an indexer, which only choose."""
    case = GOLDEN / OF_TYPE[family]
    with emulated(), load_model(case, dtype=mx.float32) as model:
        model.train()
        tokens = mx.load(str(case / "golden.safetensors"))["tokens"]

        def loss(batch):
            logits = model(batch[:, :-1])
            return nn.losses.cross_entropy(logits, batch[:, 1:], reduction="mean")

        _, gradients = nn.value_and_grad(model, loss)(tokens)
        gradients = dict(tree_flatten(gradients))
        mx.eval(gradients)
        assert gradients.keys() == dict(tree_flatten(model.trainable_parameters())).keys()
    for name, gradient in gradients.items():
        assert mx.isfinite(gradient).all().item(), name
        moved = mx.abs(gradient).max().item() > 0
        chooses = name.endswith("e_score_correction_bias") or ".indexer." in name
        assert moved != chooses, name
