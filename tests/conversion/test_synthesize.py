"""Oracles: mlx-lm, which loads the published layout strictly, and routing without preference."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.synthesize import lru_hit_rate, measure_skew, synthesize
from mlx_moeflux.errors import InputError
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.shapes import SHAPES

BITS = {"qwen3.5-tiny": 4, "qwen3-tiny": 2, "qwen3-next-tiny": 8}


@pytest.mark.parametrize(
    ("like", "bits"),
    [
        pytest.param(like, bits, marks=[pytest.mark.slow] * (bits != usual))
        for like, usual in BITS.items()
        for bits in (2, 4, 8)
    ],
)
def test_mlx_lm_loads_it_and_agrees(tmp_path, like, bits):
    from mlx_lm.utils import load_model as mlx_lm_load

    path = synthesize(like, tmp_path / "model", layers=4, bits=bits)
    theirs, _ = mlx_lm_load(path)
    theirs.set_dtype(mx.float32)
    tokens = mx.array(np.random.default_rng(0).integers(0, 1024, (2, 19)))
    expected = theirs(tokens)
    with load_model(path, expert_memory="40%") as model:
        actual = model(tokens)
        assert model.layers[0].mlp.gate.bits == 8
    assert mx.isfinite(actual).all().item()
    assert (mx.abs(actual - expected).max() / mx.abs(expected).max()).item() <= 1e-4


def files(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in path.iterdir()}


def test_the_seed_says_it_all(tmp_path):
    one, same, other = (
        files(synthesize("qwen3.5-tiny", tmp_path / str(i), layers=2, seed=seed))
        for i, seed in enumerate((3, 3, 4))
    )
    assert one == same
    assert one["model.safetensors"] != other["model.safetensors"]
    assert one["config.json"] == other["config.json"]


def test_skew_makes_some_experts_popular(tmp_path):
    even = measure_skew(synthesize("qwen3.5-tiny", tmp_path / "even", skew=0))
    skewed = measure_skew(synthesize("qwen3.5-tiny", tmp_path / "skewed", skew=2))
    assert skewed.hit_rate > skewed.uniform + 0.1
    assert skewed.hit_rate > even.hit_rate + 0.05
    assert skewed.distinct < even.distinct
    assert abs(even.hit_rate - even.uniform) < 0.1


def test_hit_rates_worked_by_hand():
    assert lru_hit_rate(np.array([[1], [2], [1], [3], [2]]), 2) == 1 / 5
    assert lru_hit_rate(np.array([[1, 2], [1, 2], [3, 1]]), 3) == 3 / 6
    assert lru_hit_rate(np.array([[1, 2], [3, 4]]), 1) == 0


def test_what_cannot_be_made(tmp_path):
    with pytest.raises(InputError, match=r"qwen3\.5-35b-a3b"):
        synthesize("gpt-9", tmp_path / "x")
    with pytest.raises(InputError, match="3 experts are fewer"):
        synthesize("qwen3.5-tiny", tmp_path / "x", experts=3)
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(InputError, match="not an empty directory"):
        synthesize("qwen3.5-tiny", tmp_path)
    with pytest.raises(InputError, match="skew"):
        synthesize("qwen3.5-tiny", tmp_path / "x", skew=-1)


def test_published_sizes():
    for name, layers, block in (
        ("qwen3.5-35b-a3b", 40, 1_769_472),
        ("qwen3.5-122b-a10b", 48, 5_308_416),
        ("qwen3.5-397b-a17b", 60, 7_077_888),
        ("qwen3-30b-a3b", 48, 2_654_208),
        ("qwen3-235b-a22b", 94, 10_616_832),
        ("qwen3-coder-480b-a35b", 62, 26_542_080),
        ("deepseek-v3", 61, 24_772_608),
        ("kimi-k2", 61, 24_772_608),
        ("qwen3-next-80b-a3b", 48, 1_769_472),
    ):
        shape = SHAPES[name]
        weights = 3 * shape.hidden_size * shape.moe_intermediate_size
        assert shape.num_hidden_layers == layers
        assert weights * 4.5 / 8 == block
