"""Oracle: sizes that others published (moeflux's tables of blocks, layer files and totals), the
models' own account of their state, and arithmetic by hand."""

from __future__ import annotations

import json
from math import prod
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from mlx_moeflux.checkpoint.refs import ITEMSIZE
from mlx_moeflux.cli import main
from mlx_moeflux.convert import convert
from mlx_moeflux.errors import CheckpointError, ConfigError, InputError, UnsupportedError
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.planning import plan_model, typical_hit_rate
from mlx_moeflux.sizes import Header, measure_sizes, open_sizes
from tests.models.test_published import opened

MEMORIES = ["16GB", "32GB", "64GB", "128GB"]


def affine(name, *shape, bits=4):
    """The three tensors of a weight in groups of 64."""
    *lead, width = shape
    yield f"{name}.weight", Header("U32", (*lead, width * bits // 32))
    yield f"{name}.scales", Header("BF16", (*lead, width // 64))
    yield f"{name}.biases", Header("BF16", (*lead, width // 64))


def mlp(name, C, F, *lead):
    for projection, rows, width in (("gate", F, C), ("up", F, C), ("down", C, F)):
        yield from affine(f"{name}.{projection}_proj", *lead, rows, width)


def qwen3_30b():
    """mlx-community/Qwen3-30B-A3B-4bit, from its published config."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "vocab_size": 151936, "tie_word_embeddings": False,
    }  # fmt: skip
    tensors = dict(affine("model.embed_tokens", 151936, 2048))
    tensors |= affine("lm_head", 151936, 2048)
    for layer in range(48):
        base = f"model.layers.{layer}"
        for name, rows, width in (
            ("q", 4096, 2048), ("k", 512, 2048), ("v", 512, 2048), ("o", 2048, 4096),
        ):  # fmt: skip
            tensors |= affine(f"{base}.self_attn.{name}_proj", rows, width)
        tensors |= affine(f"{base}.mlp.gate", 128, 2048, bits=8)
        tensors |= mlp(f"{base}.mlp.switch_mlp", 2048, 768, 128)
        tensors[f"{base}.input_layernorm.weight"] = Header("BF16", (2048,))
    return config, tensors


def deepseek_v3():
    """mlx-community's 4-bit DeepSeek-V3, from its published config; one MTP layer besides."""
    C = 7168
    config = {
        "model_type": "deepseek_v3", "hidden_size": C, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "intermediate_size": 18432,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "vocab_size": 129280,
        "first_k_dense_replace": 3,
    }  # fmt: skip
    tensors = dict(affine("model.embed_tokens", 129280, C)) | dict(affine("lm_head", 129280, C))
    for layer in range(62):
        base = f"model.layers.{layer}"
        for name, rows, width in (
            ("q_a_proj", 1536, C), ("q_b_proj", 24576, 1536), ("kv_a_proj_with_mqa", 576, C),
            ("kv_b_proj", 32768, 512), ("o_proj", C, 16384),
        ):  # fmt: skip
            tensors |= affine(f"{base}.self_attn.{name}", rows, width)
        if layer < 3:
            tensors |= mlp(f"{base}.mlp", C, 18432)
            continue
        tensors[f"{base}.mlp.gate.weight"] = Header("BF16", (256, C))
        tensors |= mlp(f"{base}.mlp.switch_mlp", C, 2048, 256)
        tensors |= mlp(f"{base}.mlp.shared_experts", C, 2048)
    return config, tensors


def published(name):
    _, tensors, _ = opened(name)
    from tests.models.test_published import PUBLISHED

    config = json.loads((PUBLISHED / f"{name}.json").read_text())["config"]
    return config, {n: Header(ref.dtype, ref.shape) for n, ref in tensors.items()}


# Block, all routed experts, MoE layers; trunk and state are checked to a few per cent.
SHAPES = {
    "35B-A3B": (lambda: published("qwen3.5-35b-a3b-4bit"), 1_769_472, 18_119_393_280, 40, 1.4e9),
    "397B-A17B": (
        lambda: published("qwen3.5-397b-a17b-4bit"), 7_077_888, 217_432_719_360, 60, 5.5e9,
    ),
    "30B-A3B": (qwen3_30b, 2_654_208, 16_307_453_952, 48, 0.87e9),
    "DeepSeek-V3": (deepseek_v3, 24_772_608, 342.6 * 2**30, 58, 10e9),
}  # fmt: skip


@pytest.fixture(scope="module")
def shapes():
    return {name: row[0]() for name, row in SHAPES.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_the_published_ones(shapes, name):
    _, block, experts, layers, trunk = SHAPES[name]
    sizes = measure_sizes(*shapes[name])
    assert set(sizes.blocks.values()) == {block}
    assert len(sizes.blocks) == layers
    assert abs(sizes.expert_bytes / experts - 1) < 0.01
    assert sizes.bytes_per_token == layers * sizes.experts_per_token * block
    assert abs(sizes.trunk_bytes / trunk - 1) < 0.05
    assert sizes.embedding_bytes < sizes.trunk_bytes / 4


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", SHAPES)
def test_plans_for_real_machines(shapes, name, memory):
    sizes = measure_sizes(*shapes[name])
    plan = plan_model(name, sizes, memory=memory)
    usable = 0.65 * float(memory[:-2]) * 1e9
    needs_all = sizes.trunk_bytes + sizes.state_bytes + sizes.expert_bytes + 1e9
    assert plan.resident == (needs_all <= usable)
    assert plan.fits == (sizes.trunk_bytes + sizes.state_bytes + plan.budget_bytes <= usable)
    assert 0 < plan.slow < plan.fast
    if not plan.resident:
        assert plan.slots * sum(sizes.blocks.values()) <= plan.budget_bytes
        # No faster than the disk allows, whatever the router.
        missing = (1 - typical_hit_rate(plan.slots / sizes.num_experts)) * sizes.bytes_per_token
        assert plan.fast <= 3e9 / missing
        share = plan.slots / sizes.num_experts
        assert plan.slow <= 3e9 / ((1 - share) * sizes.bytes_per_token)
    assert json.loads(json.dumps(plan.as_dict()))["sizes"]["expert_bytes"] == sizes.expert_bytes
    assert all(word in str(plan) for word in ("trunk", "experts", "state", "budget", "speed"))


def test_which_machines_hold_what(shapes):
    verdicts = {
        name: [plan_model(name, measure_sizes(*shapes[name]), memory=m) for m in MEMORIES]
        for name in SHAPES
    }
    # 1.4 + 18.1 + 0.2 + 1 GB just fit in 0.65 of 32.
    assert [p.resident for p in verdicts["35B-A3B"]] == [False, True, True, True]
    assert [p.resident for p in verdicts["30B-A3B"]] == [False, True, True, True]
    assert [p.fits for p in verdicts["397B-A17B"]] == [True] * 4
    assert [p.fits for p in verdicts["DeepSeek-V3"]] == [False, False, True, True]
    assert "does not fit" in str(verdicts["DeepSeek-V3"][0])
    assert not any(p.resident for p in verdicts["DeepSeek-V3"])


def test_state_is_the_models_own(shapes):
    for name in ("qwen3.5-35b-a3b-4bit", "qwen3.5-397b-a17b-4bit"):
        model, _, _ = opened(name)
        import mlx.core as mx

        model.model.norm.weight = model.model.norm.weight.astype(mx.bfloat16)
        for context in (1, 8192, 100_000):
            assert measure_sizes(*published(name), context=context).state_bytes == (
                model.state_bytes(context)
            )
    # 512 + 64 latents of two bytes for each of 61 layers.
    assert measure_sizes(*shapes["DeepSeek-V3"], context=1024).state_bytes == 2 * 576 * 61 * 1024
    assert measure_sizes(*shapes["30B-A3B"], context=1024).state_bytes == 4 * 512 * 48 * 1024


def test_bits_are_what_a_conversion_would_give():
    floats = measure_sizes(*published("qwen3.5-35b-a3b"), bits=4)
    packed = measure_sizes(*published("qwen3.5-35b-a3b-4bit"))
    assert floats.blocks == packed.blocks
    assert abs(floats.trunk_bytes / packed.trunk_bytes - 1) < 0.01
    assert measure_sizes(*published("qwen3.5-35b-a3b")).blocks[0] == 3 * 512 * 2048 * 2
    with pytest.raises(InputError, match="quantised already"):
        measure_sizes(*published("qwen3.5-35b-a3b-4bit"), bits=4)
    with pytest.raises(InputError, match="cannot have 7 bits"):
        measure_sizes(*published("qwen3.5-35b-a3b"), bits=7)


def test_fp8_is_held_decoded_and_its_scales_vanish_when_converted():
    config = {
        "num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1, "hidden_size": 128,
        "num_attention_heads": 2,
    }  # fmt: skip
    tensors = {
        "model.layers.0.mlp.experts.0.up_proj.weight": Header("F8_E4M3", (128, 128)),
        "model.layers.0.mlp.experts.1.up_proj.weight": Header("F8_E4M3", (128, 128)),
        "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv": Header("F32", (1, 1)),
        "model.layers.0.self_attn.o_proj.weight": Header("F8_E4M3", (128, 128)),
    }
    assert measure_sizes(config, tensors).trunk_bytes == 2 * 128 * 128
    assert measure_sizes(config, tensors, bits=4).blocks == {0: 128 * 128 * 9 // 16}


def test_a_plan_is_what_loading_decides():
    for budget in ("auto", "25%", "2MB"):
        plan = plan_model("x", open_sizes(BUNDLED_MODEL), memory="16GB", expert_memory=budget)
        with load_model(BUNDLED_MODEL, expert_memory=budget) as model:
            assert plan.resident == model.plan.resident
            assert plan.budget_bytes == model.plan.budget_bytes
            assert plan.slots == min(model.plan.slots.values())
            assert plan.sizes.expert_bytes == model.plan.expert_bytes


def test_every_layout_has_the_same_experts(tmp_path):
    packed = convert(BUNDLED_MODEL, tmp_path / "packed")
    assert open_sizes(packed).blocks == open_sizes(BUNDLED_MODEL).blocks


def test_headers_of_a_file_larger_than_this_disk(tmp_path, shapes):
    """A sparse file with the headers of 376 GB: nothing but headers can have been read."""
    config, tensors = shapes["DeepSeek-V3"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        try:
            file.truncate(8 + len(text) + offset)
        except OSError:
            pytest.skip("this file system has no files of 376 GB")
    assert open_sizes(tmp_path) == measure_sizes(config, tensors)


def test_the_hub_is_asked_for_headers_only(tmp_path, monkeypatch, capsys):
    config, tensors = published("qwen3.5-35b-a3b-4bit")
    (tmp_path / "config.json").write_text(json.dumps(config))
    parts = {"model.safetensors": SimpleNamespace(tensors={
        name: SimpleNamespace(dtype=dtype, shape=list(shape))
        for name, (dtype, shape) in tensors.items()
    })}  # fmt: skip
    asked, failure = [], []

    class Api:
        def get_safetensors_metadata(self, repo_id, *, revision=None):
            asked.append((repo_id, revision))
            if failure:
                raise failure[0]
            return SimpleNamespace(files_metadata=parts)

    def download(repo_id, filename, *, revision=None):
        assert filename == "config.json"
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert open_sizes("org/name", revision="x") == measure_sizes(config, tensors)
    assert asked == [("org/name", "x")]
    assert main(["plan", "org/name", "--memory", "32GB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["sizes"]["expert_bytes"] == 18_119_393_280
    assert data["slow"] < data["fast"]
    failure.append(errors.NotASafetensorsRepoError("none"))
    with pytest.raises(UnsupportedError, match=r"no \.safetensors"):
        open_sizes("org/name")
    failure[0] = OSError("no route")
    with pytest.raises(UnsupportedError, match="no route"):
        open_sizes("org/name")
    with pytest.raises(CheckpointError, match="neither a directory nor a hub id"):
        open_sizes("just a name")


def test_the_arithmetic_by_hand():
    sizes = measure_sizes(*published("qwen3.5-35b-a3b-4bit"))
    plan = plan_model("x", sizes, memory="16GB", expert_memory="50%", ssd_gbps=2, memory_gbps=50)
    active = sizes.trunk_bytes - sizes.embedding_bytes + sizes.bytes_per_token
    slow = active / 50e9 + 40 * 0.35e-3 + 0.5 * sizes.bytes_per_token / 2e9
    assert plan.slow == pytest.approx(1 / slow)
    hits = 0.62 + (0.5 - 0.36) / (0.54 - 0.36) * 0.1
    assert typical_hit_rate(0.5) == pytest.approx(hits)
    fast = active / 50e9 + 40 * 0.2e-3 + (1 - hits) * sizes.bytes_per_token / 2e9
    assert plan.fast == pytest.approx(1 / fast)
    assert typical_hit_rate(1) == 1
    assert typical_hit_rate(0) == 0


def test_what_cannot_be_planned():
    config, tensors = qwen3_30b()
    with pytest.raises(ConfigError, match="'num_experts' is missing"):
        measure_sizes({k: v for k, v in config.items() if k != "num_experts"}, tensors)
    with pytest.raises(CheckpointError, match="no routed experts"):
        measure_sizes(config, {"model.norm.weight": Header("BF16", (2048,))})
    sizes = measure_sizes(config, tensors)
    with pytest.raises(InputError, match="must be a number"):
        plan_model("x", sizes, memory="auto")
    with pytest.raises(InputError, match="ssd_gbps is 0"):
        plan_model("x", sizes, memory="16GB", ssd_gbps=0)
