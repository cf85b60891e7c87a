"""Oracle: the published layouts in tests/published/. Every tensor is taken, every parameter is
filled, every shape fits, and the experts have the published bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_moeflux.checkpoint.formats.foreign import in_our_form
from mlx_moeflux.checkpoint.names import map_head, map_tensors
from mlx_moeflux.checkpoint.quantization import Quantization, QuantSpec
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import CheckpointError
from mlx_moeflux.experts.io.layout import BlockLayout
from mlx_moeflux.models import config_class, model_class
from mlx_moeflux.models.protocol import named_parameters
from mlx_moeflux.models.shapes import SHAPES
from mlx_moeflux.models.weights import match_trunk

PUBLISHED = Path(__file__).parents[1] / "published"
# Routed experts in all, from moeflux's tables (4-bit) and 2 bytes a weight (bf16).
EXPERT_BYTES = {
    "qwen3.5-35b-a3b": 40 * 256 * 3 * 512 * 2048 * 2,
    "qwen3.5-35b-a3b-4bit": 18_119_393_280,
    "qwen3.5-122b-a10b": 48 * 256 * 3 * 1024 * 3072 * 2,
    "qwen3.5-122b-a10b-4bit": 48 * 256 * 5_308_416,
    "qwen3.5-397b-a17b": 60 * 512 * 3 * 1024 * 4096 * 2,
    "qwen3.5-397b-a17b-4bit": 217_432_719_360,
    "qwen3.6-35b-a3b": 40 * 256 * 3 * 512 * 2048 * 2,
    "moeflux-35b-a3b": None,  # experts lie in files of their own
    "qwen3-30b-a3b": 48 * 128 * 3 * 768 * 2048 * 2,
    "qwen3-30b-a3b-4bit": 48 * 128 * 3 * 768 * 2048 * 9 // 16,
    "qwen3-coder-30b-a3b": 48 * 128 * 3 * 768 * 2048 * 2,
    "qwen3-coder-480b-a35b": 62 * 160 * 3 * 2560 * 6144 * 2,
    "deepseek-v3": 58 * 256 * 3 * 2048 * 7168 * 2,  # decoded to bf16
    "deepseek-v3-4bit": 58 * 256 * 24_772_608,
    "deepseek-v3.2": 58 * 256 * 3 * 2048 * 7168 * 2,  # decoded to bf16
    "cogito-v2-671b": 58 * 256 * 3 * 2048 * 7168 * 2,
    "cogito-v2-671b-4bit": 58 * 256 * 24_772_608,
    "kimi-k2": 60 * 384 * 3 * 2048 * 7168 * 2,
    "kimi-k2-thinking": 60 * 384 * 3 * 2048 * 7168 * 5 // 8,  # groups of 32
    "kimi-k2-4bit": 60 * 384 * 24_772_608,
    "qwen3-next-80b-a3b": 48 * 512 * 3 * 512 * 2048 * 2,
    "qwen3-next-80b-a3b-4bit": 48 * 512 * 1_769_472,
    "qwen3-coder-next": 48 * 512 * 3 * 512 * 2048 * 2,
    "qwen3.8-flash-next": 48 * 512 * 3 * 640 * 2560 * 2,
    "qwen3.8-flash-next-4bit": 48 * 512 * 2_764_800,
    "gemma-4-26b-a4b": 30 * 128 * 3 * 704 * 2816 * 2,
    "gemma-4-26b-a4b-4bit": 30 * 128 * 3_345_408,
    "glm-4.6": 89 * 160 * 3 * 1536 * 5120 * 2,
    "glm-4.5-air-4bit": 45 * 128 * 3 * 1408 * 4096 * 9 // 16,
    "laguna-xs.2-4bit": 39 * 256 * 1_769_472,
    "laguna-s-2.1-4bit": 47 * 256 * 5_308_416,
    "gpt-oss-120b": 36 * 128 * (3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2),  # MXFP4, biases
    "gpt-oss-20b-mxfp4-q8": 24 * 32 * (3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2),
    "glm-5.2-fp8": 75 * 256 * 3 * 2048 * 6144 * 2,  # decoded to bf16
    "glm-4.7-flash": 46 * 64 * 3 * 1536 * 2048 * 2,
    "kimi-k2.5": 60 * 384 * 3 * 2048 * 7168 * 5 // 8,  # groups of 32
    "minimax-m2": 62 * 256 * 3 * 1536 * 3072 * 2,  # decoded to bf16
    "minimax-m2.7": 62 * 256 * 3 * 1536 * 3072 * 2,
    "minimax-m2-4bit": 62 * 256 * 3 * 1536 * 3072 * 9 // 16,
    "qwen3-235b-a22b-4bit": 94 * 128 * 3 * 1536 * 4096 * 9 // 16,
}


def test_every_published_file_has_its_size():
    assert {file.stem for file in PUBLISHED.glob("*.json")} == EXPERT_BYTES.keys()


def expand(tensors: dict, kinds: list[str], experts: int) -> Iterator[TensorRef]:
    every = (
        (pattern, one)
        for pattern, of in tensors.items()
        for one in (of if isinstance(of[0], list) else [of])
    )
    for pattern, (kind, dtype, shape) in every:
        layers = [i for i, own in enumerate(kinds) if kind == "all" or f" {kind}" in f" {own}"]
        for layer in layers if "{l}" in pattern else [0]:
            for expert in range(experts) if "{e}" in pattern else [0]:
                name = pattern.replace("{l}", str(layer)).replace("{e}", str(expert))
                yield TensorRef(name, Path("published"), 0, dtype, tuple(shape))


def config_of(name: str):
    """The parsed config of a published checkpoint."""
    config = json.loads((PUBLISHED / f"{name}.json").read_text())["config"]
    return config_class(config["model_type"]).from_dict(config, file="config.json")


def opened(name: str):
    data = json.loads((PUBLISHED / f"{name}.json").read_text())
    config = data["config"]
    kind = model_class(config["model_type"])
    model = kind(kind.Config.from_dict(config, file="config.json"))
    sparse = model.moe_blocks()
    kinds = ["sparse" if i in sparse else "dense" for i in range(len(model.layers))]
    if hasattr(model.config, "is_linear"):
        linear = [model.config.is_linear(i) for i in range(len(model.layers))]
        kinds = ["linear_attention" if one else "full_attention" for one in linear]
    if hasattr(model.config, "of_layer"):
        windows = [model.config.window(i) for i in range(len(model.layers))]
        kinds = [
            f"{'sliding' if one else 'full'} {mlp}" for one, mlp in zip(windows, kinds, strict=True)
        ]
    if hasattr(model.config, "has_indexer"):
        kinds = [k + " indexed" * model.config.has_indexer(i) for i, k in enumerate(kinds)]
    refs = expand(data["tensors"], kinds, model.config.num_experts)
    quantization = Quantization.from_config(config).renamed(
        lambda path: model.config.name_rules().canonical(f"{path}.")[:-1]
    )
    return model, in_our_form({ref.name: ref for ref in refs}), quantization


# Beside Qwen3.5 and 3.6: layers of multi-token prediction, or images.
DROPPING = (
    "deepseek-v3",
    "deepseek-v3.2",
    "glm-5.2-fp8",
    "qwen3.8-flash-next",
    "qwen3-next-80b-a3b",
    "glm-4.6",
    "glm-4.7-flash",
    "kimi-k2.5",
    "gemma-4-26b-a4b",
    "gemma-4-26b-a4b-4bit",
)
# Tensors as deepseek-v3 has them, or, of packed integers, as kimi-k2-thinking.
# Many tensors, named as others are.
LONG = ("qwen3-235b-a22b-4bit", "qwen3.5-397b-a17b", "cogito-v2-671b-4bit", "kimi-k2-4bit")
LONG += ("qwen3.5-122b-a10b-4bit", "laguna-s-2.1-4bit", "deepseek-v3", "gpt-oss-120b")
ALIKE = ("cogito-v2-671b", "kimi-k2", "kimi-k2-thinking", "kimi-k2.5")
ALIKE += ("deepseek-v3.2", "glm-5.2-fp8")
# Tens of thousands of tensors, one for each expert, as qwen3-30b-a3b and, in 8-bit floats,
# deepseek-v3 have; the rest of their families is in glm-4.7-flash, minimax-m2-4bit and others.
MANY = ("qwen3-coder-30b-a3b", "qwen3-next-80b-a3b", "glm-4.6", "minimax-m2")
MANY += ("qwen3-coder-480b-a35b", "qwen3-coder-next", "minimax-m2.7")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE + LONG + MANY)) for n in EXPERT_BYTES],
)
def test_both_sides_come_out_empty(name):
    model, tensors, _ = opened(name)
    mapped = map_tensors(tensors, model.config.name_rules())
    match_trunk(model, mapped, directory=Path(name))
    left = set(tensors) - {ref.name for ref in mapped.trunk.values()}
    shards = [shard for parts in mapped.tables.values() for shard in parts]
    left -= {ref.name for shard in shards for ref in shard.values()}
    model.check_tables(mapped.tables, model.config, name)
    assert len(shards) == 128 * name.startswith("qwen3.8")
    if EXPERT_BYTES[name] is None:
        assert not mapped.experts
        assert not left
        return
    prediction = tuple(f"model.layers.{n}." for n in (47, 61, 78, 92))
    unread = ("mtp.", "model.visual.", "vision_tower.", "mm_projector.", *prediction)
    unread += ("model.vision_tower.", "model.embed_vision.", "embed_vision.")
    hashes = r"\.ple_embedding\.(layer_multipliers|ngram_heads_\w+)$"
    dropped = [n for n in left if not re.search(rf"\.(experts|switch_mlp)\.|{hashes}", n)]
    assert all(n.startswith(unread) for n in dropped)
    assert bool(dropped) == (name.startswith(("qwen3.5", "qwen3.6")) or name in DROPPING)
    layouts = {layer: BlockLayout.of(parts) for layer, parts in mapped.experts.items()}
    assert set(layouts) == set(model.moe_blocks())
    total = sum(layout.nbytes for layout in layouts.values()) * model.config.num_experts
    assert total == EXPERT_BYTES[name]
    assert all(layout.hidden == model.config.hidden_size for layout in layouts.values())


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "deepseek-v3.2", "glm-5.2-fp8", "qwen3.8-flash-next"]
)
def test_a_head_of_multi_token_prediction_comes_out_empty(name):
    """Of those whose files list all its tensors but those of the other experts."""
    data = json.loads((PUBLISHED / f"{name}.json").read_text())
    model = model_class(data["config"]["model_type"])(config_of(name))
    of_head = {k: v for k, v in data["tensors"].items() if re.match(r"mtp\.|model\.layers\.\d", k)}
    refs = {ref.name: ref for ref in expand(of_head, [], 1) if ".experts." not in ref.name}
    mapped = map_head(in_our_form(refs), model.config.name_rules())
    head = model.HEAD(model)
    parameters = {name: tuple(array.shape) for name, array in named_parameters(head)}
    assert {name: ref.shape for name, ref in mapped.trunk.items()} == parameters


# Files with few tensors of five families, whose mixers and names differ most.
SHORT = ("qwen3.5-35b-a3b", "qwen3-30b-a3b-4bit", "deepseek-v3-4bit", "gpt-oss-20b-mxfp4-q8")
SHORT += ("gemma-4-26b-a4b-4bit",)


@pytest.mark.parametrize(
    "name",
    [n if n in SHORT else pytest.param(n, marks=pytest.mark.slow) for n in EXPERT_BYTES],
)
def test_one_tensor_more_or_less_is_noticed(name):
    model, published, _ = opened(name)
    extra = TensorRef("x", Path("x"), 0, "BF16", (4,))
    tensors = published | {"model.layers.0.extra.weight": extra}
    mapped = map_tensors(tensors, model.config.name_rules())
    with pytest.raises(CheckpointError, match=r"does not know: model\.layers\.0\.extra\.weight"):
        match_trunk(model, mapped, directory=Path(name))
    model, tensors = type(model)(model.config), dict(published)
    parts = ("k_norm", "kv_a_layernorm", "o_proj")
    gone = next(n for p in parts for n in tensors if n.endswith(f"layers.3.self_attn.{p}.weight"))
    del tensors[gone]
    mapped = map_tensors(tensors, model.config.name_rules())
    with pytest.raises(CheckpointError, match=r"lacks the tensors: model\.layers\.3\.self_attn"):
        match_trunk(model, mapped, directory=Path(name))


@pytest.mark.parametrize("name", [n for n in EXPERT_BYTES if n.removesuffix("-4bit") in SHAPES])
def test_shapes_are_those_of_the_published_configs(name):
    assert config_of(name).published() == SHAPES[name.removesuffix("-4bit")].published()


def test_a_config_is_the_published_file():
    config = json.loads((PUBLISHED / "qwen3.6-35b-a3b.json").read_text())["config"]
    digest = hashlib.sha256(json.dumps(config, indent=4).encode()).hexdigest()
    assert digest == "93a4693fa9d8392fbfccd4b3c9873f4bfdcb14fdede978b123d07d19675efe99"


def test_releases_of_the_same_architecture():
    assert config_of("qwen3.6-35b-a3b") == config_of("qwen3.5-35b-a3b")
    longer = replace(config_of("minimax-m2"), max_position_embeddings=204_800)
    assert config_of("minimax-m2.7") == longer


def test_the_router_has_its_own_bits_or_not():
    for name, bits in (("qwen3-30b-a3b-4bit", 4), ("qwen3-235b-a22b-4bit", 8)):
        model, tensors, _ = opened(name)
        mapped = map_tensors(tensors, model.config.name_rules())
        match_trunk(model, mapped, directory=Path("x"))
        assert (model.layers[5].mlp.gate.bits, model.lm_head.bits) == (bits, 4)


def test_the_router_has_its_own_bits():
    model, tensors, quantization = opened("qwen3.5-35b-a3b-4bit")
    mapped = map_tensors(tensors, model.config.name_rules())
    match_trunk(model, mapped, directory=Path("x"))
    block = model.layers[5].mlp
    assert (block.gate.bits, block.shared_expert_gate.bits) == (8, 8)
    assert (block.shared_expert.up_proj.bits, model.lm_head.bits) == (4, 4)
    assert quantization.spec("model.layers.5.mlp.gate") == QuantSpec(8)
