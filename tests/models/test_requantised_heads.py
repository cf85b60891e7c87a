"""Why mlx-lm's logits differ by some percent on a checkpoint with quantised ``kv_b_proj``.

Source: mlx-lm 0.32.2 models/deepseek_v3.py `sanitize` splits ``kv_b_proj`` into ``embed_q`` and
``unembed_out`` and, where it is quantised, quantises both a second time. Here ``kv_b_proj`` is used
as it is. Oracle: mlx-lm on what it made of it, and dense matrices.
"""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.loading import load_model
from tests.models.twins import LIMIT, relative_error

TOKENS = mx.array(np.random.default_rng(0).integers(0, 1000, (2, 33)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Scores of experts are positive, so that lost groups lose in mlx-lm too."""
    directory = synthesize("deepseek-tiny", tmp_path_factory.mktemp("model") / "tiny")
    weights = mx.load(str(directory / "model.safetensors"))
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = mx.abs(weights[name])
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return directory


def ours(directory):
    with load_model(directory, dtype=mx.float32) as model:
        return model(TOKENS)


def test_mlx_lm_quantises_the_heads_twice(directory, tmp_path):
    from mlx_lm.utils import load_model as mlx_lm_load

    theirs, _ = mlx_lm_load(directory)
    theirs.set_dtype(mx.float32)
    logits = theirs(TOKENS)
    assert relative_error(ours(directory), logits) > 1e-2
    # What it made of them, in our model.
    split = tmp_path / "split"
    split.mkdir()
    mx.save_safetensors(
        str(split / "model.safetensors"),
        dict(tree_flatten(theirs.parameters())),
        metadata={"format": "mlx"},
    )
    (split / "config.json").write_text((directory / "config.json").read_text())
    assert relative_error(ours(split), logits) <= LIMIT


def test_ours_are_the_matrices_of_the_checkpoint(directory, tmp_path):
    """``kv_b_proj`` made dense, and left out of the quantised ones."""
    weights = mx.load(str(directory / "model.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    for name in [n for n in weights if n.endswith("kv_b_proj.weight")]:
        base = name.removesuffix(".weight")
        parts = [weights.pop(f"{base}.{part}") for part in ("weight", "scales", "biases")]
        parts[1:] = [p.astype(mx.float32) for p in parts[1:]]
        weights[name] = mx.dequantize(*parts, group_size=64, bits=4)
        for key in ("quantization", "quantization_config"):
            config[key][base] = False
    dense = tmp_path / "dense"
    dense.mkdir()
    mx.save_safetensors(str(dense / "model.safetensors"), weights, metadata={"format": "mlx"})
    (dense / "config.json").write_text(json.dumps(config))
    assert relative_error(ours(directory), ours(dense)) <= LIMIT
