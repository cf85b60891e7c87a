"""What is no model of this package: one line says what it is and who runs it.

Oracle: the files of the installed mlx-lm."""

from __future__ import annotations

import importlib
import json
from importlib import util

import mlx.core as mx
import pytest

from mlx_moeflux import load
from mlx_moeflux.errors import (
    CheckpointError,
    ConfigError,
    MoefluxError,
    UnsupportedError,
    whole_words,
)
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import MODEL_TYPES, check_config
from mlx_moeflux.models.other_models import has_experts, runs_in_mlx_lm
from tests.models.twins import GOLDEN

MOE, DENSE = "a Mixture-of-Experts model", "a dense model"
MODELS = [
    ({"model_type": "mixtral", "num_local_experts": 8}, f"; mlx-lm runs it, {MOE}."),
    ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, f"; mlx-lm runs it, {MOE}."),
    ({"model_type": "ernie4_5_moe", "moe_num_experts": [64, 64]}, f"; mlx-lm runs it, {MOE}."),
    ({"model_type": "new_moe", "n_routed_experts": 64}, f"; it is {MOE} that mlx-lm does not run"),
    ({"model_type": "llama", "num_experts": None}, f"; mlx-lm runs it, {DENSE}."),
    ({"model_type": "mistral", "num_local_experts": 1}, f"; mlx-lm runs it, {DENSE}."),
    ({"model_type": "qwen3_5", "text_config": {}}, f"; mlx-lm runs it, {DENSE}."),
    ({"model_type": "bert"}, f"; it is {DENSE} that mlx-lm does not run either"),
    ({"model_type": "../utils"}, f"; it is {DENSE} that mlx-lm does not run either"),
]
HEADS = [
    {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]},
    {"model_type": "deepseek_v3", "architectures": ["Eagle3DeepseekV2ForCausalLM"]},
    {"model_type": "qwen3", "architectures": ["DFlashDraftModel"]},
    {"model_type": "gemma4_assistant"},
    {"model_type": "qwen3_next_mtp"},
    {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeMTP"]},
    {"model_type": "qwen3_moe", "draft_vocab_size": 32000},
]


def said(config, tmp_path) -> str:
    """The message of load(), which comes before any about a tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": mx.ones((2, 2))})
    with pytest.raises(UnsupportedError) as error:
        load(tmp_path)
    with pytest.raises(UnsupportedError) as of_model:
        load_model(tmp_path)
    assert str(error.value) == str(of_model.value)
    return str(error.value)


@pytest.mark.parametrize(("config", "words"), MODELS)
def test_a_model_of_another_architecture(tmp_path, config, words):
    pytest.importorskip("mlx_lm")
    message = said(config, tmp_path)
    assert words in message
    assert " ... " not in message
    assert message.count(repr(config.get("model_type"))) == 1


@pytest.mark.parametrize("config", [{}, {"model_type": ""}, {"model_type": ["qwen3_moe"]}])
def test_a_config_without_a_type_says_so(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": mx.ones((2, 2))})
    for function in (load, load_model):
        with pytest.raises(ConfigError, match=r"'model_type' is .*, expected"):
            function(tmp_path)


def test_without_mlx_lm_it_may_run_there(tmp_path, monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert f"; it is {DENSE}, which mlx-lm may run." in said({"model_type": "llama"}, tmp_path)


def test_the_types_of_mlx_lm_are_those_it_imports():
    utils = pytest.importorskip("mlx_lm.utils")
    for name in (
        "llama",
        "mistral",
        "minimax_m2",
        "kimi_k2",
        "phi-msft",
        "nothing",
        *MODEL_TYPES,
    ):
        try:
            module = importlib.import_module(
                f"mlx_lm.models.{utils.MODEL_REMAPPING.get(name, name)}"
            )
        except ImportError:
            module = None
        assert runs_in_mlx_lm(name) == hasattr(module, "Model"), name


@pytest.mark.parametrize("config", HEADS)
def test_a_draft_head(tmp_path, config):
    message = said(config, tmp_path)
    assert "is of a draft head" in message
    assert "vLLM and SGLang run such heads" in message


def test_every_model_of_this_package_has_experts_and_is_no_draft_head():
    for file in GOLDEN.glob("*/config.json"):
        config = json.loads(file.read_text())
        check_config(config, file=file)
        assert has_experts(config), file


TENSORS = [
    ("switch_mlp.gate_proj.tq_packed", UnsupportedError, "belongs to JANGTQ"),
    ("experts.3.w1.tq_packed", UnsupportedError, "belongs to JANGTQ"),
    ("self_attn.q_proj.lora_a", CheckpointError, "belongs to an adapter, which is no model"),
    ("self_attn.q_proj.lora_A.weight", CheckpointError, "belongs to an adapter"),
]


@pytest.mark.parametrize(("name", "kind", "words"), TENSORS)
def test_tensors_say_what_a_checkpoint_is(tmp_path, name, kind, words):
    """Before config.json, whose keys for the same method are unknown here."""
    config = json.loads((GOLDEN / "qwen3_moe_top2" / "config.json").read_text())
    config |= {"weight_format": "mxtq", "mxtq_bits": {"attention": 8}, "quantization": {"bits": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {f"model.layers.0.{name}": mx.ones((2, 2))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    with pytest.raises(kind, match=words):
        load_model(tmp_path)


def test_an_adapter_without_a_config(tmp_path):
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {"x.lora_a": mx.ones((2, 2))})
    (tmp_path / "adapter_config.json").write_text("{}")
    for action in (load, load_model):
        with pytest.raises(CheckpointError, match=r"holds an adapter .* and no model; merge it"):
            action(tmp_path)


def test_a_head_alone(tmp_path):
    config = (GOLDEN / "text_top3" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    mx.save_safetensors(str(tmp_path / "mtp.safetensors"), {"mtp.fc.weight": mx.ones((2, 2))})
    with pytest.raises(CheckpointError, match="has a head of multi-token prediction and no model"):
        load_model(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n"


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "model.safetensors.index.json",
        "model.gguf",
        "mtp.safetensors",
    ],
)
def test_a_pointer_of_git_lfs(tmp_path, name):
    for file in ("model.safetensors", "config.json"):
        if name != "model.gguf":
            (tmp_path / file).write_bytes((GOLDEN / "text_top3" / file).read_bytes())
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(MoefluxError, match=rf"{name} is a pointer of Git LFS .*git lfs pull"):
        load_model(tmp_path / name if name.endswith("gguf") else tmp_path, drafts="mtp")


def test_no_message_is_cut_in_a_word():
    words = [f"name_{i}" for i in range(200)]
    for message in (" ".join(words), f"found [{', '.join(map(repr, words))}]."):
        found = str(MoefluxError(message)).replace("...", " ").split()
        assert set(found) <= set(message.split())
    assert whole_words("one tw") == "one"
    assert whole_words("e two", end=True) == "two"
    assert whole_words("one") == "one"
