"""Stored tensors against what config.json or an index says about them: the tensors decide.

Oracle: the same twin without the contradiction; transformers 5.23 for the values of a head."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CheckpointError
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import parsed_config
from mlx_moeflux.models.head import is_tied
from tests.models.twins import GOLDEN

TOKENS = mx.array([[1, 2, 3, 4, 5, 6]])
UNTIED = ("qwen3_moe_top2", "vision_top2", "kimi_k25_wrapped")
MTP = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
       "shared_head.head.weight", "embed_tokens.weight", "self_attn.o_proj.weight",
       "mlp.experts.0.gate_proj.weight", "mlp.gate.weight")  # fmt: skip


def copy(twin: str, folder: Path, **keys) -> Path:
    model = shutil.copytree(GOLDEN / twin, folder)
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", {})
    for holder in (config, text):
        holder |= {key: value for key, value in keys.items() if key in holder}
    (model / "config.json").write_text(json.dumps(config))
    return model


def edit(model: Path, change) -> None:
    file = model / "model.safetensors"
    tensors = mx.load(str(file))
    mx.eval(tensors)
    change(tensors)
    mx.save_safetensors(str(file), tensors)


def logits(model: Path, **options) -> np.ndarray:
    with load_model(model, **options) as loaded:
        return np.array(loaded(TOKENS))


def tie_of(model: Path) -> set[bool]:
    config = json.loads((model / "config.json").read_text())
    found = (config, config.get("text_config", {}))
    return {keys["tie_word_embeddings"] for keys in found if "tie_word_embeddings" in keys}


# By default one whose head lies beside the trunk and one whose trunk is in a wrapper.
SOME = ("qwen3_moe_top2", "kimi_k25_wrapped")
TWINS = [pytest.param(twin, marks=[pytest.mark.slow] * (twin not in SOME)) for twin in UNTIED]


@pytest.mark.parametrize("twin", TWINS)
def test_a_stored_head_counts(tmp_path, twin):
    model = copy(twin, tmp_path / "model", tie_word_embeddings=True)
    expected = logits(GOLDEN / twin)
    with pytest.warns(UserWarning, match="'tie_word_embeddings' is True, but a head"):
        found = logits(model)
    assert np.array_equal(found, expected)
    for layout in ("packed", "safetensors"):
        with pytest.warns(UserWarning, match="the stored head is used"):
            out = convert(model, tmp_path / layout, layout=layout)
        assert tie_of(out) == {False}
        # mlx-lm's layout rounds norms that are stored about zero.
        limit = 0.0 if layout == "packed" else 1e-2
        assert np.abs(logits(out) - expected).max() <= limit


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("twin", TWINS)
def test_a_head_equal_to_the_embedding_says_nothing(tmp_path, twin, tied):
    model = copy(twin, tmp_path / "model", tie_word_embeddings=tied)
    names = {}

    def same(tensors):
        names["embedding"] = next(n for n in tensors if n.endswith("embed_tokens.weight"))
        names["head"] = next(n for n in tensors if n.endswith("lm_head.weight"))
        tensors[names["head"]] = tensors[names["embedding"]]

    edit(model, same)
    found = logits(model)  # a warning would be an error
    edit(model, lambda t: t.pop(names["head"]))
    copied = copy(twin, tmp_path / "other", tie_word_embeddings=True)
    shutil.copy(model / "model.safetensors", copied)
    assert np.array_equal(logits(copied), found)
    assert not np.array_equal(found, logits(GOLDEN / twin))


@pytest.mark.parametrize("twin", TWINS)
def test_without_a_head_the_embedding_is_used(tmp_path, twin):
    model = copy(twin, tmp_path / "model")

    def remove(tensors):
        tensors.pop(next(n for n in tensors if n.endswith("lm_head.weight")))

    edit(model, remove)
    with pytest.warns(UserWarning, match="is False, but no other head is stored; the embedding"):
        found = logits(model)
    tied = copy(twin, tmp_path / "tied", tie_word_embeddings=True)
    shutil.copy(model / "model.safetensors", tied)
    assert np.array_equal(found, logits(tied))
    with pytest.warns(UserWarning, match="the embedding is used"):
        out = convert(model, tmp_path / "out")
    assert tie_of(out) == {True}
    assert np.array_equal(found, logits(out))


def test_a_head_that_an_index_names_is_missing(tmp_path):
    model = copy("qwen3_moe_top2", tmp_path / "model")
    edit(model, lambda t: t.pop("lm_head.weight"))
    names = [*mx.load(str(model / "model.safetensors")), "lm_head.weight"]
    index(model, dict.fromkeys(names, "model.safetensors"))
    for action in (lambda: load_model(model), lambda: convert(model, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"lacks the tensors: lm_head\.weight; "):
            action()


def test_a_quantised_head_counts(tmp_path):
    """An embedding of floats beside a head of 4 bits, or of other bits: no value is compared."""
    model = convert(GOLDEN / "text_top3", tmp_path / "model", quantize=True, q_group_size=32)
    expected = logits(model)
    config = json.loads((model / "config.json").read_text())
    for holder in (config, config.get("text_config", {})):
        holder["tie_word_embeddings"] = True
    (model / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="stored head is used"):
        assert np.array_equal(logits(model), expected)


@pytest.mark.parametrize("difference", [0, 1])
def test_a_difference_in_the_last_row_is_seen(tmp_path, difference):
    model = copy("qwen3_moe_top2", tmp_path / "model", tie_word_embeddings=True)

    def last(tensors):
        head = np.array(tensors["model.embed_tokens.weight"].astype(mx.float32))
        head[-1, -1] += difference
        tensors["lm_head.weight"] = mx.array(head, tensors["model.embed_tokens.weight"].dtype)

    edit(model, last)
    checkpoint = open_checkpoint(model)
    tied = is_tied(checkpoint, parsed_config(checkpoint), piece_bytes=1000)
    assert tied == (difference == 0)


PREDICTING = ("deepseek_v3_groups", "glm4_moe_plain", "glm4_moe_lite_flash")
# Fewer, as many and more in config.json than there are.
USUAL = {*zip(PREDICTING, (2, 1, 1), (0, 1, 2), strict=True), ("deepseek_v3_groups", 1, 2)}


@pytest.mark.parametrize(
    ("twin", "stored", "count"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in USUAL))
        for case in product(PREDICTING, (1, 2), (0, 1, 2))
    ],
)
def test_layers_of_prediction_are_dropped_whatever_their_count(tmp_path, twin, count, stored):
    model = copy(twin, tmp_path / "model", num_nextn_predict_layers=count)
    config = json.loads((model / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == count
    first = config["num_hidden_layers"]
    edit(model, lambda t: t.update({
        f"model.layers.{first + i}.{part}": mx.ones((3, 2)) for i in range(stored) for part in MTP
    }))  # fmt: skip
    assert np.array_equal(logits(model), logits(GOLDEN / twin))
    out = convert(model, tmp_path / "out", mtp=False)
    assert np.array_equal(logits(out), logits(GOLDEN / twin))


def test_layers_of_prediction_in_a_wrapper_are_dropped(tmp_path):
    model = copy("kimi_k25_wrapped", tmp_path / "model")
    layers = json.loads((model / "config.json").read_text())["text_config"]["num_hidden_layers"]
    at = f"language_model.model.layers.{layers}."
    edit(model, lambda t: t.update({at + part: mx.ones((3, 2)) for part in MTP}))
    assert np.array_equal(logits(model), logits(GOLDEN / "kimi_k25_wrapped"))


@pytest.mark.parametrize("twin", ["deepseek_v3_groups", "glm4_moe_plain", "qwen3_moe_top2"])
def test_more_layers_of_the_model_stay_an_error(tmp_path, twin):
    """A layer without the parts of a layer of prediction is the model's."""
    model = copy(twin, tmp_path / "model")
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    at = f"model.layers.{layers}."
    edit(model, lambda t: t.update({
        at + part: mx.ones((3, 2)) for part in ("input_layernorm.weight", "self_attn.x.weight")
    }))  # fmt: skip
    for action in (lambda: load_model(model), lambda: convert(model, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=f"the weights have {layers + 1} layers"):
            action()


def index(model: Path, weight_map: dict[str, str]) -> None:
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )


def shards(model: Path, files: int) -> dict[str, str]:
    """Cut a model into shards; returns its index."""
    tensors = mx.load(str(model / "model.safetensors"))
    mx.eval(tensors)
    (model / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        mx.save_safetensors(str(model / name), {n: tensors[n] for n in names[i::files]})
        weight_map |= dict.fromkeys(names[i::files], name)
    index(model, weight_map)
    return weight_map


def test_a_stale_index_beside_whole_weights(tmp_path):
    model = copy("qwen3_moe_top2", tmp_path / "model")
    names = list(mx.load(str(model / "model.safetensors")))
    expected = logits(GOLDEN / "qwen3_moe_top2")
    many = {n: f"model-{i % 10 + 1:05d}-of-00010.safetensors" for i, n in enumerate(names)}
    for weight_map in (
        many,
        dict.fromkeys([*names, "mtp.fc.weight"], "model.safetensors"),
        dict.fromkeys(names, "model.safetensors") | {"vision.x": "optiq/optiq_vision.safetensors"},
        dict.fromkeys(names[:3], "model.safetensors"),
        {"model.layers.0.mlp.switch_mlp.gate_proj.scales": "model.safetensors"},
        {},
    ):
        index(model, weight_map)
        assert np.array_equal(logits(model), expected)
    out = convert(model, tmp_path / "out")
    assert np.array_equal(logits(out), expected)


def test_a_missing_shard_is_one_line_that_names_it(tmp_path):
    model = copy("qwen3_moe_top2", tmp_path / "model")
    weight_map = shards(model, 3)
    assert np.array_equal(logits(model), logits(GOLDEN / "qwen3_moe_top2"))
    for name in sorted(set(weight_map.values())):
        content = (model / name).read_bytes()
        (model / name).unlink()
        for action in (lambda: load_model(model), lambda: convert(model, tmp_path / "out")):
            with pytest.raises(CheckpointError, match=rf"^[^\n]*{name}[^\n]*download") as error:
                action()
            assert len(str(error.value)) < 700
        assert not (tmp_path / "out").exists()
        (model / name).write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.self_attn.q_proj.weight",
    ],
)
def test_a_missing_tensor_stays_an_error(tmp_path, name):
    model = copy("qwen3_moe_top2", tmp_path / "model")
    edit(model, lambda t: t.pop(name))
    for action in (lambda: load_model(model), lambda: convert(model, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=f"lacks the tensors: {name}"):
            action()
    assert not (tmp_path / "out").exists()


HEAD_OF_TRANSFORMERS = """
import sys, numpy, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
numpy.save(sys.argv[2], model(torch.tensor([[1, 2, 3, 4, 5, 6]])).logits.detach().numpy())
"""


@pytest.mark.slow
def test_transformers_uses_the_stored_head_too(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model = copy("qwen3_moe_top2", tmp_path / "model", tie_word_embeddings=True)
    out = tmp_path / "logits.npy"
    words = [sys.executable, "-c", HEAD_OF_TRANSFORMERS, str(model), str(out)]
    subprocess.run(words, check=True, capture_output=True)
    with pytest.warns(UserWarning, match="stored head"):
        assert np.abs(logits(model) - np.load(out)).max() <= 1e-4


def quantise(model: Path, module: str, *, floats: bool = False, **settings) -> int:
    """Store matrices whose names match `module` quantised, or their numbers; return how many."""
    found = []

    def change(tensors):
        found.extend(n for n in tensors if re.search(rf"{module}\.weight$", n))
        for name in found:
            parts = mx.quantize(tensors[name].astype(mx.float32), **settings)
            if floats:
                tensors[name] = mx.dequantize(*parts, **settings).astype(mx.float32)
                continue
            names = ("weight", "scales", "biases")
            base = name.removesuffix("weight")
            tensors |= {base + part: array for part, array in zip(names, parts, strict=False)}

    edit(model, change)
    return len(found)


ROUTER = r"(mlp\.gate|mlp\.router|router\.proj|block_sparse_moe\.gate)"
ROUTERS = (
    ("deepseek_v3_yarn40", {"bits": 8, "group_size": 32}),
    ("glm4_moe_norms", {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
    ("kimi_k25_wrapped", {"bits": 3, "group_size": 32}),
    ("deepseek_v32_yarn40", {"bits": 8, "group_size": 64}),
    ("laguna_heads", {"bits": 5, "group_size": 32}),
    ("gemma4_shared", {"bits": 8, "group_size": 32}),
    ("gpt_oss_sinks", {"bits": 8, "group_size": 32}),
)


@pytest.mark.parametrize(
    ("twin", "settings"),
    [pytest.param(*r, marks=[pytest.mark.slow] * (i > 2)) for i, r in enumerate(ROUTERS)],
)
def test_a_router_that_computes_in_floats_may_be_stored_quantised(tmp_path, twin, settings):
    stored, floats = copy(twin, tmp_path / "stored"), copy(twin, tmp_path / "floats")
    assert quantise(stored, ROUTER, **settings)
    assert quantise(floats, ROUTER, floats=True, **settings)
    expected = logits(floats)
    assert np.array_equal(logits(stored), expected)
    assert not np.array_equal(expected, logits(GOLDEN / twin))
    assert np.array_equal(logits(convert(stored, tmp_path / "packed")), expected)
    # mlx-lm has routers in floats there.
    plain = convert(stored, tmp_path / "plain", layout="safetensors", dtype="float32")
    assert not any(".gate.scales" in name for name in open_checkpoint(plain).tensors)
    assert np.abs(logits(plain) - expected).max() <= 1e-2


@pytest.mark.parametrize("change", [
    lambda t, base: t.pop(f"{base}.biases"),
    lambda t, base: t.update({f"{base}.biases": t[f"{base}.biases"][:2]}),
    lambda t, base: t.update({f"{base}.weight": t[f"{base}.weight"][:2]}),
    lambda t, base: t.update({f"{base}.scales": t[f"{base}.scales"][:, :0]}),
])  # fmt: skip
def test_a_router_whose_parts_do_not_fit_is_one_line(tmp_path, change):
    model = copy("deepseek_v3_yarn40", tmp_path / "model")
    quantise(model, r"mlp\.gate", bits=8, group_size=32)
    edit(model, lambda t: change(t, min(n for n in t if n.endswith("mlp.gate.scales"))[:-7]))
    with pytest.raises(CheckpointError, match=r"^[^\n]*mlp\.gate\.weight[^\n]*$"):
        load_model(model)


def says(model: Path, **blocks) -> None:
    config = json.loads((model / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    (model / "config.json").write_text(json.dumps(config | blocks))


EXPERTS = "model.layers.0.mlp.switch_mlp.down_proj"
HINTS = {
    "the default alone": {"bits": 2, "group_size": 32},
    "groups": {"bits": 4, "group_size": 128},
    "a mode": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "experts": {"bits": 4, "group_size": 32, EXPERTS: {"bits": 8, "group_size": 32}},
    "no quantisation of one": {"bits": 4, "group_size": 32, "lm_head": False},
}


@pytest.mark.parametrize("hint", HINTS)
def test_stored_bits_count_over_those_of_the_config(tmp_path, hint):
    model = convert(
        GOLDEN / "qwen3_moe_top2",
        tmp_path / "model",
        layout="safetensors",
        quantize=True,
        q_group_size=32,
    )
    expected = logits(model)
    says(model, quantization=HINTS[hint])
    with pytest.warns(UserWarning, match="what is stored is used") as said:
        assert np.array_equal(logits(model), expected)
    assert len([w for w in said if "stored" in str(w.message)]) == 1
    with pytest.warns(UserWarning, match="what is stored is used"):
        out = convert(model, tmp_path / "out")
    assert np.array_equal(logits(out), expected)  # whose config.json says what is stored


def test_experts_and_trunk_of_mixed_bits(tmp_path):
    """Every kind of matrix in bits of its own, the config with one default."""
    stored, floats = (copy("qwen3_moe_top2", tmp_path / n) for n in ("stored", "floats"))
    mixed = (
        (r"down_proj", {"bits": 3, "group_size": 64}),
        (r"(gate|up)_proj", {"bits": 2, "group_size": 32}),
        (r"self_attn\.[qkvo]_proj", {"bits": 6, "group_size": 32}),
        (r"embed_tokens", {"bits": 8, "group_size": 64}),
        (r"lm_head", {"bits": 5, "group_size": 32}),
    )
    for module, settings in mixed:
        assert quantise(stored, module, **settings)
        quantise(floats, module, floats=True, **settings)
    says(stored, quantization={"bits": 4, "group_size": 64})
    with pytest.warns(UserWarning, match="what is stored is used"):
        found = logits(stored)
    assert np.abs(found - logits(floats)).max() <= 1e-4
