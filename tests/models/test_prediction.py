"""Multi-token prediction is kept apart: not the model's, not in memory without drafts, counted on
disk.

Oracles: names and sizes in the files' headers, read without the package; the twin without it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.cli import main
from mlx_moeflux.errors import CheckpointError
from mlx_moeflux.experts.budget import format_bytes
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.plan import measure_sizes, open_sizes, plan_model
from tests.checkpoint import foreign
from tests.models.twins import GOLDEN

LAYER = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
         "shared_head.head.weight", "embed_tokens.weight", "mlp.gate.weight",
         "mlp.experts.0.up_proj.weight", "self_attn.o_proj.weight")  # fmt: skip
MODULE = ("fc.weight", "norm.weight", "layers.0.mlp.experts.3.down_proj.weight",
          "layers.0.mlp.gate.weight", "pre_fc_norm_hidden.weight")  # fmt: skip
STORED = ("deepseek_v3_yarn40", "deepseek_v32_yarn40", "glm4_moe_norms", "glm4_moe_lite_flash",
          "vision_top2")  # fmt: skip
# {n}: Number of the model's layers.
ADDED = {
    "glm_moe_dsa_shared": [f"model.layers.{{n}}.{part}" for part in LAYER],
    "deepseek_v3_groups": [f"model.layers.{{n}}.{part}" for part in LAYER],
    "kimi_k25_wrapped": [f"language_model.model.layers.{{n}}.{part}" for part in LAYER],
    "qwen3_next_top3": [f"mtp.{part}" for part in MODULE],
    "text_top3": [f"model.mtp.{part}" for part in MODULE],
    "qwen4_exp_rows": [f"mtp.{part}" for part in MODULE],
}


def layers_of(directory: Path) -> int:
    config = json.loads((directory / "config.json").read_text())
    return config.get("text_config", config)["num_hidden_layers"]


def tensors_of(directory: Path) -> dict:
    files = sorted(directory.glob("model*.safetensors"))
    return {k: v for file in files for k, v in foreign.read_safetensors(file).items()}


def with_prediction(twin: str, out: Path, names: list[str]) -> tuple[Path, int]:
    """A copy of a twin with more tensors, and their bytes."""
    directory = Path(shutil.copytree(GOLDEN / twin, out))
    file = directory / "model.safetensors"
    more = {
        name.format(n=layers_of(directory)): foreign.entry(
            "F32", np.full((3, 5 + i), i, np.float32)
        )
        for i, name in enumerate(names)
    }
    foreign.write_safetensors(file, foreign.read_safetensors(file) | more)
    return directory, sum(len(data) for _, _, data in more.values())


@pytest.mark.parametrize("twin", STORED)
def test_what_the_twins_store_is_counted_on_disk_alone(tmp_path, twin):
    starts = (f"model.layers.{layers_of(GOLDEN / twin)}.", "mtp.")
    stored = {k: v for k, v in tensors_of(GOLDEN / twin).items() if k.startswith(starts)}
    sizes = open_sizes(GOLDEN / twin)
    assert sizes.prediction_bytes == sum(len(data) for _, _, data in stored.values()) > 0
    without = tmp_path / "without"
    foreign.copy_config(GOLDEN / twin, without)
    kept = {k: v for k, v in tensors_of(GOLDEN / twin).items() if k not in stored}
    foreign.write_safetensors(without / "model.safetensors", kept)
    other = open_sizes(without)
    assert other.prediction_bytes == 0
    for name in ("trunk_bytes", "expert_bytes", "state_bytes", "bytes_per_token"):
        assert getattr(sizes, name) == getattr(other, name)
    with load_model(GOLDEN / twin) as model, load_model(without) as same:
        assert model.plan.trunk_bytes == same.plan.trunk_bytes
        assert model.parameters().keys() == same.parameters().keys()


@pytest.mark.parametrize("twin", ADDED)
def test_every_family_keeps_it_apart(tmp_path, twin):
    directory, nbytes = with_prediction(twin, tmp_path / "model", ADDED[twin])
    checkpoint = open_checkpoint(directory)
    sizes, before = measure_sizes(checkpoint), open_sizes(GOLDEN / twin)
    assert (sizes.prediction_bytes, before.prediction_bytes) == (nbytes, 0)
    assert (sizes.trunk_bytes, sizes.expert_bytes) == (before.trunk_bytes, before.expert_bytes)
    load_model(directory).close()


@pytest.mark.parametrize(
    ("twin", "name"),
    [
        ("qwen3_moe_top2", "mtp.fc.weight"),
        ("minimax_m2_norms", "model.layers.9.eh_proj.weight"),
        ("vision_top2", "model.mtpx.fc.weight"),
        ("vision_top2", "model.layers.9.eh_proj.weight"),
        ("deepseek_v3_yarn40", "mtp.fc.weight"),
        ("deepseek_v3_yarn40", "model.layers.0.eh_proj.weight"),
        ("glm_moe_dsa_shared", "model.layers.1.enorm.weight"),
    ],
)
def test_such_a_name_where_it_does_not_belong_is_an_error(tmp_path, twin, name):
    directory, _ = with_prediction(twin, tmp_path / "model", [name])
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    assert "\n" not in str(caught.value)


def test_plan_and_convert_say_what_becomes_of_it(tmp_path, capsys):
    twin = GOLDEN / "deepseek_v32_yarn40"
    size = format_bytes(open_sizes(twin).prediction_bytes)
    said = f"{size} of multi-token prediction"
    plan = str(plan_model("it", open_sizes(twin), memory="8GB"))
    assert f"\ndrafts   {said}, which drafts of 'mtp' load besides\n" in plan
    plain = str(plan_model("it", open_sizes(GOLDEN / "deepseek_v3_groups"), memory="8GB"))
    assert "drafts" not in plain
    out = tmp_path / "out"
    assert main(["convert", "--model", str(twin), "--out", str(out), "--no-mtp"]) == 0
    assert f"left out {said}" in capsys.readouterr().err
    assert open_sizes(out).prediction_bytes == 0
    assert main(["convert", "--model", str(out), "--out", str(tmp_path / "again")]) == 0
    assert "left out" not in capsys.readouterr().err
