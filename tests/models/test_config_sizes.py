"""Numbers in config.json that no checkpoint has: one line, never a crash or a wait."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.loading import load_model
from tests.models.twins import GOLDEN

HUGE = 2_000_000_000
# What a twin does not compute with.
WITHOUT_EFFECT = {
    *("max_position_embeddings", "max_window_layers", "pretraining_tp", "bos_token_id"),
    *("eos_token_id", "pad_token_id"),
}
CASES = (
    *("qwen3_moe_top2", "text_top3", "deepseek_v3_groups", "qwen3_next_top3"),
    *("glm4_moe_norms", "minimax_m2_norms", "glm4_moe_lite_flash", "glm_moe_dsa_shared"),
)
OF_CASE = {
    "glm4_moe_lite_flash": {"qk_head_dim", "num_key_value_heads"},
    # With so many positions every token sees everything.
    "glm_moe_dsa_shared": {"head_dim", "qk_head_dim", "num_key_value_heads", "index_topk"},
    "minimax_m2_norms": {"num_mtp_modules"},
    "qwen3_moe_top2": {"intermediate_size"},
    "deepseek_v3_groups": {"head_dim", "qk_head_dim", "num_key_value_heads"},
}


def whole_numbers(config: dict[str, Any], above: tuple[str, ...] = ()):
    """The places of all whole numbers, those in inner objects too."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from whole_numbers(value, (*above, name))
        elif type(value) is int:
            yield (*above, name)


def config_of(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "config.json").read_text())


@pytest.fixture(autouse=True)
def _at_once():
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("value", [HUGE, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("case", "place"),
    [(case, place) for case in CASES for place in whole_numbers(config_of(case))],
    ids=lambda value: value if isinstance(value, str) else ".".join(value),
)
def test_a_number_that_no_model_has(tmp_path: Path, case, place, value):
    directory = shutil.copytree(GOLDEN / case, tmp_path / "model", copy_function=os.symlink)
    config = inner = copy.deepcopy(config_of(case))
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    if place[-1] in WITHOUT_EFFECT | OF_CASE.get(case, set()):
        load_model(directory, expert_memory="100%").close()
        return
    with pytest.raises(MoefluxError, match=r"^.{20,500}$"):
        load_model(directory, expert_memory="100%")
