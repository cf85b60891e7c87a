"""Oracle: the same checkpoint in the names of mlx-lm."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.plan import open_sizes


@pytest.fixture(scope="module")
def stacked(tmp_path_factory) -> Path:
    return synthesize("qwen4-exp-tiny", tmp_path_factory.mktemp("names") / "stacked", layers=2)


def fused(stacked: Path, folder: Path, end: str) -> Path:
    """Copy a checkpoint in the names of transformers' tensors, packed. end: Of experts' weights."""
    (model := folder / "fused").mkdir()
    tensors, found = mx.load(str(stacked / "model.safetensors")), {}
    for stored, array in tensors.items():
        name = stored.replace("language_model.model.", "model.language_model.")
        name = name.replace("language_model.lm_head.", "lm_head.")
        name = name.replace(".shards.", ".shard_").replace(".switch_mlp.", ".experts.")
        if ".experts.up_proj." in name:
            continue
        if ".experts.gate_proj." in name:
            up = tensors[stored.replace(".gate_proj.", ".up_proj.")]
            array = mx.concatenate([array, up], axis=1)
            name = name.replace("gate_proj", "gate_up_proj")
        if ".experts." in name and name.endswith(".weight"):
            name = name.removesuffix(".weight") + end
        found[name] = array
    mx.save_safetensors(str(model / "model.safetensors"), found)
    shutil.copy(stacked / "config.json", model)
    return model


@pytest.mark.parametrize("end", ["", ".weight"])
def test_packed_experts_under_the_names_of_fused_tensors(stacked, tmp_path, end):
    model, tokens = fused(stacked, tmp_path, end), mx.array([[1, 2, 3, 4, 5, 6]])
    assert open_sizes(model).blocks == open_sizes(stacked).blocks
    for budget in ("100%", "25%"):
        with (
            load_model(stacked, expert_memory=budget) as expected,
            load_model(model, expert_memory=budget) as found,
        ):
            assert np.array_equal(np.array(found(tokens)), np.array(expected(tokens)))
