"""Keys of config.json that contradict each other or mean what no family computes: one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.models import config_class
from mlx_moeflux.models.shapes import SHAPES
from tests.models.twins import GOLDEN

GLM = SHAPES["glm-tiny"]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("glm4_moe_norms", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
    ("glm4_moe_norms", {"n_shared_experts": -1}, "'n_shared_experts' is -1"),
    ("glm4_moe_norms", {"n_group": 2}, "'n_group' 2 does not divide"),
    ("glm4_moe_norms", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
    ("glm4_moe_norms", {"attention_sinks": True}, "nothing here reads 'attention_sinks'"),
    ("minimax_m2_norms", {"rotary_dim": 33}, "'rotary_dim' is 33, expected 1 to 32"),
    ("minimax_m2_norms", {"partial_rotary_factor": 0.25}, "'rotary_dim' is 16 and"),
    ("minimax_m2_norms", {"qk_norm_type": "per_head"}, "'qk_norm_type' is 'per_head'"),
    ("minimax_m2_norms", {"use_routing_bias": False}, "'use_routing_bias' is False"),
    ("minimax_m2_norms", {"attn_type_list": [1, 0, 1]}, "'attn_type_list' is 0"),
    ("minimax_m2_norms", {"shared_intermediate_size": 8}, "reads 'shared_intermediate_size'"),
    ("minimax_m2_norms", {"num_experts_per_tok": 8}, "is more than 'num_local_experts' 7"),
    ("kimi_k25_wrapped", {"text_config": None}, "'text_config' is None"),
    ("kimi_k25_wrapped", {"text_config": {"model_type": "x"}}, "'text_config.model_type' is 'x'"),
    ("glm4_moe_lite_flash", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
    ("glm4_moe_lite_flash", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types' must list"),
    ("gpt_oss_sinks", {"experts_per_token": 3}, "'experts_per_token' is 3 and"),
    ("gpt_oss_sinks", {"layer_types": ["full_attention"]}, "'layer_types' names 1 layers"),
    ("gpt_oss_sinks", {"layer_types": ["x"] * 3}, "'layer_types' has 'x'"),
    ("gpt_oss_sinks", {"sliding_window": 0}, "'sliding_window' is 0"),
    ("gpt_oss_sinks", {"num_local_experts": 1}, "is more than 'num_local_experts' 1"),
    ("gpt_oss_sinks", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
    (
        "glm4_moe_lite_flash",
        {"mlp_layer_types": ["dense", "dense", "sparse"]},
        "'first_k_dense_replace' is 1",
    ),
    (
        "glm4_moe_lite_flash",
        {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        "'mlp_layer_types' is",
    ),
]


@pytest.mark.parametrize(("case", "wrong", "message"), WRONG)
def test_one_line_says_what_is_wrong(case, wrong, message):
    config = json.loads((GOLDEN / case / "config.json").read_text())
    kind = config_class(config["model_type"])
    kind.from_dict(config, file="config.json")
    with pytest.raises(MoefluxError, match=r"^[^\n]*$") as error:
        kind.from_dict(config | wrong, file="config.json")
    assert str(error.value).startswith("config.json: ")
    assert message in str(error.value)


VALUES: list[Any] = [
    None, "x", "", True, False, [], [1], ["a"], [[1]], {}, {"a": 1}, 0, -1, 1.5, float("nan"),
    float("inf"), 2**70,
]  # fmt: skip
CASES = ("gemma4_shared", "gemma4_vision", "glm_moe_dsa_shared", "deepseek_v32_yarn40",
         "laguna_heads")  # fmt: skip


def changed(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the config without each key, with the opposite of its number, and with each value."""
    for key, value in config.items():
        rest = {k: v for k, v in config.items() if k != key}
        yield rest
        if isinstance(value, dict) and key != "vision_config":
            yield from (rest | {key: inner} for inner in changed(value))
        if type(value) in (int, float):
            yield rest | {key: -value}
        yield from (rest | {key: wrong} for wrong in VALUES)


@pytest.mark.parametrize(
    "step", [pytest.param(11, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", CASES)
def test_keys_that_are_dropped_negated_or_of_another_type(case, step):
    config = json.loads((GOLDEN / case / "config.json").read_text())
    kind = config_class(config["model_type"])
    refused = 0
    for wrong in islice(changed(config), 0, None, step):
        try:
            parsed = kind.from_dict(wrong, file="config.json")
            parsed.name_rules()
            if parsed.num_hidden_layers < 1000:
                parsed.state_bytes(7)
        except MoefluxError as error:
            refused += 1
            assert "\n" not in str(error)  # noqa: PT017
    assert refused > 20
