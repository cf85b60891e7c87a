"""Oracle: transformers' logits of the stored twins, written as llama.cpp's converters write them;
and, of wider models of random blocks, the same values in safetensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.formats import gguf as ours
from mlx_moeflux.checkpoint.formats.gguf_architectures import ARCHITECTURES, indexer_types
from mlx_moeflux.checkpoint.formats.gguf_header import Header
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CheckpointError, ConfigError, MoefluxError, UnsupportedError
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.plan import open_sizes
from mlx_moeflux.models import MODEL_TYPES
from mlx_moeflux.models.shapes import SHAPES

gguf = pytest.importorskip("gguf")

from tests.checkpoint import foreign  # noqa: E402
from tests.checkpoint.gguf_converted import (  # noqa: E402
    CONVERTERS,
    Converter,
    as_blocks,
    as_floats,
    read_twin,
    write_gguf,
    write_meaning,
)
from tests.checkpoint.gguf_files import carry  # noqa: E402
from tests.models.twins import GOLDEN, limit, relative_error, smallest_memory  # noqa: E402

# Twin -> family, and what the file cannot say: llama.cpp computes one value of it.
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe_top2": ("qwen3_moe", {}),
    "qwen3_moe_yarn4": ("qwen3_moe", {}),
    "qwen3_next_yarn2": ("qwen3_next", {}),
    "text_top3": ("qwen3_5_moe", {}),
    "text_tied_top1": ("qwen3_5_moe", {}),
    "text_top_all": ("qwen3_5_moe", {}),
    "vision_top2": ("qwen3_5_moe", {}),
    "vision_tied_top3": ("qwen3_5_moe", {}),
    "qwen4_exp_vision": ("qwen4_exp", {"output_gate_type": None}),
    "gpt_oss_sinks": ("gpt_oss", {"swiglu_limit": 1.5}),
    "kimi_k2_group1": ("deepseek_v3", {}),
    "kimi_k25_wrapped": ("deepseek_v3", {}),
    "glm4_moe_lite_flash": ("deepseek_v3", {}),
    "glm4_moe_norms": ("glm4_moe", {}),
    "glm4_moe_plain": ("glm4_moe", {}),
    "glm_moe_dsa_shared": ("glm_moe_dsa", {}),
    "laguna_heads": ("laguna", {}),
    "gemma4_shared": ("gemma4", {}),
}
# One of each family by default.
SLOW = {"qwen3_moe_top2", "text_top3", "text_tied_top1", "text_top_all", "vision_tied_top3"}
SLOW |= {"kimi_k25_wrapped", "glm4_moe_plain"}


def marked(names, slow):
    return [pytest.param(n, marks=[pytest.mark.slow] * (n in slow)) for n in names]


def with_fixed(monkeypatch, converter: Converter, fixed: dict[str, Any]) -> None:
    base = ARCHITECTURES[converter.architecture]
    other = replace(base, fixed={**base.fixed, **fixed})
    monkeypatch.setitem(ARCHITECTURES, converter.architecture, other)


def twin(path: Path, name: str, **options) -> Path:
    converter = CONVERTERS[TWINS[name][0]]
    config, tensors = read_twin(GOLDEN / name)
    return write_gguf(path, converter, config, as_floats(converter, config, tensors), **options)


def logits(path: Path, tokens: mx.array, **options) -> np.ndarray:
    with load_model(path, **options) as model:
        result = np.array(model(tokens))
    assert np.isfinite(result).all()
    return result


@pytest.mark.parametrize("name", marked(TWINS, SLOW))
def test_twins_are_transformers(tmp_path, monkeypatch, name):
    family, fixed = TWINS[name]
    with_fixed(monkeypatch, CONVERTERS[family], fixed)
    path = twin(tmp_path / "model.gguf", name)
    golden = mx.load(str(GOLDEN / name / "golden.safetensors"))
    resident = logits(path, golden["tokens"])
    assert relative_error(resident, golden["logits"]) <= limit(name)
    memory = smallest_memory(GOLDEN / name)
    streamed = logits(path, golden["tokens"], expert_memory=memory, expert_threads=1)
    assert np.array_equal(streamed, resident)


def test_every_architecture_has_a_twin_and_a_model():
    families = {family for family, _ in TWINS.values()} | {"deepseek_v32"}
    assert {CONVERTERS[family].architecture for family in families} == set(ARCHITECTURES)
    assert {a.model_type for a in ARCHITECTURES.values()} <= set(MODEL_TYPES)


# --- Random blocks ---

V = 320
QWEN = {
    "model_type": "qwen3_5_moe_text", "vocab_size": V, "hidden_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 256, "num_experts": 12, "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "full_attention_interval": 2,
    "rope_theta": 1e6, "partial_rotary_factor": 0.25, "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "vocab_size": V, "hidden_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 256,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "intermediate_size": 512,
    "moe_intermediate_size": 96, "n_routed_experts": 24, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "rope_theta": 1e4, "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}  # fmt: skip


def mlp(base: str, C: int, F: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (F, C), "up_proj": (F, C), "down_proj": (C, F)}
    return {f"{base}.{name}.weight": shape for name, shape in shapes.items()}


def ends(c: dict) -> dict[str, tuple[int, ...]]:
    C = c["hidden_size"]
    found = {"model.embed_tokens.weight": (V, C), "model.norm.weight": (C,)}
    for i in range(c["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{norm}.weight"] = (C,)
    return found | {"lm_head.weight": (V, C)}


def qwen_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    C, F, E = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    Hk, Hv, D = c["linear_num_key_heads"], c["linear_num_value_heads"], c["head_dim"]
    value, H, Hkv = Hv * c["linear_value_head_dim"], c["num_attention_heads"], 2
    conv = 2 * Hk * c["linear_key_head_dim"] + value
    delta = {
        "in_proj_qkv.weight": (conv, C), "in_proj_z.weight": (value, C),
        "in_proj_a.weight": (Hv, C), "in_proj_b.weight": (Hv, C), "A_log": (Hv,),
        "dt_bias": (Hv,), "conv1d.weight": (conv, 1, 4), "out_proj.weight": (C, value),
        "norm.weight": (c["linear_value_head_dim"],),
    }  # fmt: skip
    attention = {
        "q_proj.weight": (2 * H * D, C), "k_proj.weight": (Hkv * D, C),
        "v_proj.weight": (Hkv * D, C), "o_proj.weight": (C, H * D),
        "q_norm.weight": (D,), "k_norm.weight": (D,),
    }  # fmt: skip
    found = ends(c)
    for i, (name, parts) in enumerate((("linear_attn", delta), ("self_attn", attention))):
        at = f"model.layers.{i}."
        found |= {f"{at}{name}.{part}": shape for part, shape in parts.items()}
        found |= {f"{at}mlp.gate.weight": (E, C), f"{at}mlp.shared_expert_gate.weight": (1, C)}
        found |= {f"{at}mlp.experts.gate_up_proj": (E, 2 * F, C)}
        found |= {f"{at}mlp.experts.down_proj": (E, C, F)}
        found |= mlp(f"{at}mlp.shared_expert", C, c["shared_expert_intermediate_size"])
    return found


def latent_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    C, F, E, H = (
        c[key]
        for key in (
            "hidden_size", "moe_intermediate_size", "n_routed_experts", "num_attention_heads",
        )
    )  # fmt: skip
    Dn, Dr, Dv, R = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], 256
    found = ends(c)
    for i in range(2):
        at = f"model.layers.{i}."
        parts = {
            "q_a_proj": (R, C), "q_a_layernorm": (R,), "q_b_proj": (H * (Dn + Dr), R),
            "kv_a_proj_with_mqa": (R + Dr, C), "kv_a_layernorm": (R,),
            "kv_b_proj": (H * (Dn + Dv), R), "o_proj": (C, H * Dv),
        }  # fmt: skip
        found |= {f"{at}self_attn.{name}.weight": shape for name, shape in parts.items()}
    found |= mlp("model.layers.0.mlp", C, c["intermediate_size"])
    at = "model.layers.1.mlp."
    found |= {f"{at}gate.weight": (E, C), f"{at}gate.e_score_correction_bias": (E,)}
    found |= mlp(f"{at}shared_experts", C, F)
    for e in range(E):
        found |= mlp(f"{at}experts.{e}", C, F)
    return found


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    random, found = np.random.default_rng(11), {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape)
        values *= 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        centred = len(shape) == 1 and name.endswith("norm.weight")
        if name.endswith("A_log"):
            values = np.log(random.uniform(1, 16, shape))
        found[name] = (values + 1.0 * (centred and "linear_attn.norm" in name)).astype(np.float32)
    return found


def mixed(name: str) -> str:
    """As files of some bits are: several types, routers, convolutions and narrow rows in floats."""
    for part, kind in (
        ("ffn_gate_inp", "F32"), ("conv1d", "F32"), ("alpha", "Q5_0"), ("beta", "Q4_1"),
        ("_down_exps", "Q5_1"), ("_up_exps", "Q4_0"), ("_gate_exps", "Q4_K"), ("attn_v", "Q8_0"),
        ("shexp", "Q8_0"), ("k_b", "Q4_0"), ("v_b", "Q5_K"), ("ssm_out", "Q4_K"),
        ("attn_gate", "Q5_K"), ("attn_qkv", "Q8_0"), ("token_embd", "Q8_0"), ("output.", "Q5_K"),
        ("q_b", "Q5_1"),
    ):  # fmt: skip
        if part in name:
            return kind
    return "Q4_K"


TOKENS = mx.array(np.random.default_rng(0).integers(0, V, (2, 23)))
WIDE = {"qwen3_5_moe": (QWEN, qwen_shapes), "deepseek_v3": (LATENT, latent_shapes)}


@pytest.mark.parametrize("family", WIDE)
def test_blocks_are_the_same_values(tmp_path, family):
    config, shapes = WIDE[family]
    converter = CONVERTERS[family]
    stored, values = as_blocks(converter, config | {"rope": {}}, drawn(shapes(config)), mixed)
    path = write_gguf(tmp_path / "model.gguf", converter, config | {"rope": {}}, stored)
    meaning = write_meaning(tmp_path / "meaning", config, values)
    expected = logits(meaning, TOKENS)
    resident = logits(path, TOKENS)
    assert relative_error(resident, expected) <= 1e-5
    assert np.array_equal(logits(path, TOKENS, expert_memory="80%", expert_threads=1), resident)
    packed = convert(path, tmp_path / "packed", verify_written=True)
    assert np.array_equal(logits(packed, TOKENS), resident)
    # No matrix of blocks became floats.
    floats = ("mlp.gate.weight", "shared_expert_gate.weight", "conv1d.weight", "scales", "biases")
    for name, ref in open_checkpoint(path).tensors.items():
        assert len(ref.shape) < 2 or name.endswith(floats) or ref.dtype == "U32", name


def test_mxfp4_experts(tmp_path, monkeypatch):
    """Of the twin's widths; the other matrices have other types."""
    converter = CONVERTERS["gpt_oss"]
    config, tensors = read_twin(GOLDEN / "gpt_oss_sinks")
    kinds = {"bias": "F32", "exps": "MXFP4", "gate_inp": "F32", "token_embd": "Q8_0"}

    def kind_of(name: str) -> str:
        return next((kind for part, kind in kinds.items() if part in name), "Q5_1")

    stored, values = as_blocks(converter, config, tensors, kind_of)
    with_fixed(monkeypatch, converter, {"swiglu_limit": 1.5})
    path = write_gguf(tmp_path / "model.gguf", converter, config, stored)
    published = json.loads((GOLDEN / "gpt_oss_sinks" / "config.json").read_text())
    meaning = write_meaning(tmp_path / "meaning", published, values)
    tokens = TOKENS % config["vocab_size"]
    resident = logits(path, tokens)
    assert relative_error(resident, logits(meaning, tokens)) <= 1e-5
    assert np.array_equal(logits(path, tokens, expert_memory="200KB", expert_threads=1), resident)
    layer = ours.open_gguf(path).blocks[0]
    assert {ref[0].dtype for name, ref in layer.items() if name.endswith("scales")} == {"U8"}


def test_a_decay_that_grows_is_one_line(tmp_path):
    converter = CONVERTERS["qwen3_5_moe"]
    config, tensors = read_twin(GOLDEN / "vision_top2")
    stored = as_floats(converter, config, tensors)
    stored["blk.1.ssm_a"] = -stored["blk.1.ssm_a"][0], "F32"
    path = write_gguf(tmp_path / "model.gguf", converter, config, stored)
    refused(path, CheckpointError, r"'blk\.1\.ssm_a.*' has numbers that no model has there")


# --- Rows of n-grams ---


def with_one_table(name: str) -> tuple[dict, dict, dict]:
    """A twin with the first of its tables alone, the only one that a file can have: its config,
    tensors, and metadata with the table's constants, as transformers wrote them."""
    config, tensors = read_twin(GOLDEN / name)
    tensors = {n: values for n, values in tensors.items() if "layers.3.ple." not in n}
    read = foreign.read_safetensors(GOLDEN / name / "model.safetensors")
    at = "model.layers.0.ple.ple_embedding."
    constants = {n.removeprefix(at): data for n, (kind, _, data) in read.items() if kind == "I64"}
    keys = {
        "ple.layers": [0],
        "ple.ngram_size": config["ngram_size"],
        "ple.heads_per_ngram": config["heads_per_ngram"],
        "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": config["eos_token_id"][0],
        "ple.image_token_id": 3,
        "embedding_length_per_layer_input": 6,
    }
    for key, theirs in (
        ("layer_multipliers", "layer_multipliers"),
        ("head_offsets", "ngram_heads_offsets"),
        ("head_vocab_sizes", "ngram_heads_vocab_sizes"),
    ):
        keys[f"ple.{key}"] = np.frombuffer(constants[theirs], "<i8").tolist()
    return config, tensors, {f"qwen4exp.{key}": value for key, value in keys.items()}


ROWS = "qwen4_exp_rows"


def rows_twin(path: Path, kind_of=lambda name: "F32", width: int = 6) -> tuple[Path, dict]:
    """The file, and the same values as transformers has them. width: Of a row."""
    converter = CONVERTERS["qwen4_exp"]
    config, tensors, keys = with_one_table(ROWS)
    if width != 6:
        wider = {n: (len(v), width) for n, v in tensors.items() if "shard_" in n}
        wider |= {
            n: (len(v), 4 * width) for n, v in tensors.items() if ".ple." in n and "proj" in n
        }
        tensors |= drawn(wider)
        keys["qwen4exp.embedding_length_per_layer_input"] = width
    stored, values = as_blocks(converter, config, tensors, kind_of)
    return write_gguf(path, converter, config, stored, keys), values


BLOCKS = {"hc_": "F32", "down": "F32", "inp": "F32", "indexer.k": "Q8_0", "indexer.q": "Q5_0"}
BLOCKS |= {"ffn": "Q4_1", "attn_": "Q8_0", "token_embd": "Q5_0", "ple_key": "Q8_0"}
KEPT = BLOCKS | {"token_embd": "IQ4_NL", "ffn": "IQ4_NL"}


@pytest.mark.parametrize(
    ("kinds", "width"), [({}, 6), (BLOCKS, 32), (KEPT, 32)], ids=["F32", "blocks", "kept"]
)
def test_rows_of_ngrams(tmp_path, kinds, width):
    """With an indexer of two types, which becomes floats. The constants of the hashes are not those
    of the default seed."""
    path, values = rows_twin(
        tmp_path / "m.gguf",
        lambda name: next((kind for part, kind in kinds.items() if part in name), "F32"),
        width,
    )
    published = json.loads((GOLDEN / ROWS / "config.json").read_text())
    published |= {"ple_layer_ids": [1], "ple_embed_dim": 4 * width}
    meaning = write_meaning(tmp_path / "meaning", published, values)
    tokens = mx.load(str(GOLDEN / ROWS / "golden.safetensors"))["tokens"]
    expected = logits(meaning, tokens)
    assert relative_error(logits(path, tokens), expected) <= limit(ROWS)
    packed = convert(path, tmp_path / "packed")
    assert relative_error(logits(packed, tokens), expected) <= limit(ROWS)


# --- Attention to chosen positions, layers of two kinds ---


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_deepseek_v32(tmp_path, kind):
    """Its twin has two factors of YaRN, of which a file says one: both are that here. llama.cpp
    keeps the indexer's weights in floats."""
    config, tensors = read_twin(GOLDEN / "deepseek_v32_yarn40")
    published = json.loads((GOLDEN / "deepseek_v32_yarn40" / "config.json").read_text())
    published["rope_scaling"]["mscale"] = config["mscale"] = config["mscale_all_dim"]
    converter = CONVERTERS["deepseek_v32"]
    published["num_nextn_predict_layers"] = 0
    tensors = {n: v for n, v in tensors.items() if "layers.3." not in n}
    stored, values = as_blocks(
        converter,
        config,
        tensors,
        lambda name: "F32" if "indexer.proj" in name or "gate_inp" in name else kind,
    )
    path = write_gguf(tmp_path / "m.gguf", converter, config, stored)
    meaning = write_meaning(tmp_path / "meaning", published, values)
    tokens = mx.load(str(GOLDEN / "deepseek_v32_yarn40" / "golden.safetensors"))["tokens"]
    found = logits(path, tokens)
    assert relative_error(found, logits(meaning, tokens)) <= 1e-5
    assert np.array_equal(logits(path, tokens, expert_memory="60%", expert_threads=1), found)


# --- Forms of other converters ---


def test_merged_and_legacy_tensors(tmp_path):
    """Gate and up in one stack of experts, and the delta net's inputs as transformers has them."""
    name = "qwen3_next_yarn2"
    converter = CONVERTERS["qwen3_next"]
    config, tensors = read_twin(GOLDEN / name)
    stored = as_floats(converter, config, tensors)
    for i in range(config["num_hidden_layers"]):
        at, theirs = f"blk.{i}.", f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"
        both = [stored.pop(f"{at}ffn_{n}_exps.weight")[0] for n in ("gate", "up")]
        stored[f"{at}ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1), "F32"
        if theirs in tensors:
            del stored[f"{at}attn_qkv.weight"], stored[f"{at}attn_gate.weight"]
            stored[f"{at}ssm_in.weight"] = tensors[theirs], "F32"
    path = write_gguf(tmp_path / "model.gguf", converter, config, stored)
    golden = mx.load(str(GOLDEN / name / "golden.safetensors"))
    expected = logits(path, golden["tokens"])
    assert relative_error(expected, golden["logits"]) <= limit(name)
    packed = convert(path, tmp_path / "packed")
    assert np.array_equal(logits(packed, golden["tokens"]), expected)
    with pytest.raises(UnsupportedError, match=r"mlx-lm's qwen3_next has no .*in_proj_qkv"):
        convert(path, tmp_path / "stock", layout="safetensors")


def test_a_latent_that_is_not_split(tmp_path):
    name = "kimi_k2_group1"
    converter = CONVERTERS["deepseek_v3"]
    config, tensors = read_twin(GOLDEN / name)
    stored = as_floats(converter, config, tensors)
    for i in range(config["num_hidden_layers"]):
        del stored[f"blk.{i}.attn_k_b.weight"], stored[f"blk.{i}.attn_v_b.weight"]
        whole = tensors[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
        stored[f"blk.{i}.attn_kv_b.weight"] = whole, "F32"
    lengths = {"key_length": 40, "value_length": 12, "head_count_kv": 2}
    path = write_gguf(
        tmp_path / "model.gguf", converter, config, stored,
        {f"deepseek2.attention.{key}": value for key, value in lengths.items()},
        skip=("attention.key_length_mla", "attention.value_length_mla"),
    )  # fmt: skip
    golden = mx.load(str(GOLDEN / name / "golden.safetensors"))
    assert relative_error(logits(path, golden["tokens"]), golden["logits"]) <= limit(name)


def test_heads_narrower_than_a_group_become_floats(tmp_path):
    """Their columns change places, and share scales in the file."""
    converter, config = CONVERTERS["qwen3_5_moe"], QWEN | {"linear_value_head_dim": 16}
    stored, values = as_blocks(
        converter, config | {"rope": {}}, drawn(qwen_shapes(config)),
        lambda name: "Q8_0" if "ssm_out" in name else "F32",
    )  # fmt: skip
    path = write_gguf(tmp_path / "model.gguf", converter, config | {"rope": {}}, stored)
    meaning = write_meaning(tmp_path / "meaning", config, values)
    assert relative_error(logits(path, TOKENS), logits(meaning, TOKENS)) <= 1e-5


# --- What is not read ---


def refused(path: Path, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value) or str(path.parent) in str(caught.value)


T = "vision_top2"
REFUSED: list[tuple[str, str, Any, type[Exception], str]] = [
    (T, "qwen35moe.ssm.state_size", None, ConfigError, "lacks 'qwen35moe.ssm.state_size'"),
    (T, "qwen35moe.ssm.group_count", 5, CheckpointError, "does not fit the heads"),
    (T, "qwen35moe.ssm.state_size", -52, CheckpointError, "does not fit the heads"),
    (T, "qwen35moe.ssm.group_count", 0, CheckpointError, "does not fit the heads"),
    (T, "qwen35moe.ssm.group_count", "x", ConfigError, "expected a number"),
    (T, "qwen35moe.ssm.time_step_rank", 7, ConfigError, "no multiple"),
    (T, "qwen35moe.attention.temperature_scale", 0.5, UnsupportedError, "temperature_scale"),
    (T, "qwen35moe.attention.value_length", 16, UnsupportedError, "value_length"),
    (T, "qwen35moe.rope.dimension_count", 33, ConfigError, "dimension_count"),
    (T, "qwen35moe.expert_gating_func", 2, UnsupportedError, "expert_gating_func"),
    (T, "qwen35moe.nextn_predict_layers", 4, ConfigError, "nextn_predict_layers"),
    (T, "qwen35moe.full_attention_interval", 2, CheckpointError, "lacks the tensors"),
    (T, "prism.hadamard", "x" * 99, UnsupportedError, r"'prism\.hadamard'"),
    (T, "general.architecture", "qwen2moe", UnsupportedError, "qwen2moe.*qwen35moe"),
    (T, "general.architecture", [1], UnsupportedError, r"\[1\]"),
    ("qwen3_next_yarn2", "qwen3next.full_attention_interval", 1, CheckpointError, "lacks the"),
    ("kimi_k2_group1", "deepseek2.expert_gating_func", None, UnsupportedError, "is 1; only 2"),
    ("kimi_k2_group1", "deepseek2.rope.scaling.yarn_log_multiplier", 0, UnsupportedError, "yarn_l"),
    ("kimi_k2_group1", "deepseek2.attention.key_length_mla", None, ConfigError, "key_length_mla"),
    ("kimi_k2_group1", "deepseek2.expert_weights_norm", 3, ConfigError, "true or false"),
    ("gpt_oss_sinks", "gpt-oss.attention.sliding_window_pattern", 3, UnsupportedError, "pattern"),
    ("gpt_oss_sinks", "gpt-oss.rope.freq_base_swa", 5.0, UnsupportedError, "freq_base_swa"),
    ("gpt_oss_sinks", "gpt-oss.attention.sliding_window", None, ConfigError, "sliding_window"),
    ("qwen4_exp_vision", "qwen4exp.attention.compress_ratios", [5, 0, 5], UnsupportedError, "are"),
    ("qwen4_exp_vision", "qwen4exp.attention.compress_ratios", [0, 5], UnsupportedError, "only"),
    ("qwen4_exp_vision", "qwen4exp.attention.compress_ratios", 4, ConfigError, "an array"),
    (
        "glm_moe_dsa_shared",
        "glm-dsa.attention.indexer.types",
        [False] * 5,
        ConfigError,
        "first lay",
    ),
    ("glm_moe_dsa_shared", "glm-dsa.attention.indexer.top_k", None, ConfigError, "lacks.*top_k"),
    ("glm_moe_dsa_shared", "glm-dsa.expert_gating_func", 1, UnsupportedError, "is 1; only 2"),
    ("laguna_heads", "laguna.block_count", 2_000_000_000, ConfigError, "at most 10000"),
    ("laguna_heads", "laguna.attention.head_count", [4, 6], ConfigError, "one for each layer"),
    ("laguna_heads", "laguna.attention.head_count", [4, 6, 2], UnsupportedError, "is 2; only 4"),
    ("laguna_heads", "laguna.expert_shared_count", 2, UnsupportedError, "expert_shared_count"),
    ("gemma4_shared", "gemma4.attention.head_count_kv", [2, 1, 1], ConfigError, "kind of layers"),
    ("gemma4_shared", "gemma4.attention.shared_kv_layers", 1, UnsupportedError, "shared_kv"),
    ("gemma4_shared", "gemma4.rope.dimension_count", 32, UnsupportedError, "dimension_count"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Twins by name, written when they are asked for."""
    home = tmp_path_factory.mktemp("twins")

    class Files(dict):
        def __missing__(self, name: str) -> Path:
            self[name] = twin(home / f"{name}.gguf", name)
            return self[name]

    return Files()


@pytest.mark.parametrize(
    ("name", "key", "value", "kind", "words"), REFUSED, ids=[f"{r[1]}-{r[2]}" for r in REFUSED]
)
def test_metadata_that_is_not_read_is_one_line(files, monkeypatch, name, key, value, kind, words):
    changed = {k: v for k, v in ours.gguf_metadata(files[name]).items() if k != key}
    changed |= {} if value is None else {key: value}
    carry(monkeypatch, changed)
    refused(files[name], kind, words)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mytool.recipe", "I-Mini"),
        ("jang.bits", [2, 4, 8]),
        ("llama.block_count", 7),
        ("unsloth.dynamic.version", 2.0),
        ("alone", True),
    ],
)
def test_keys_of_other_programs_change_nothing(files, monkeypatch, key, value):
    expected = logits(files["qwen3_moe_top2"], TOKENS % 100)
    carry(monkeypatch, {key: value, **ours.gguf_metadata(files["qwen3_moe_top2"])})
    assert np.array_equal(logits(files["qwen3_moe_top2"], TOKENS % 100), expected)


WRONG = [2_000_000_000, "text", [1], [], None, True, -1, 0, 1, 2, 1.5, float("nan"), {"a": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("name", {family: name for name, (family, _) in TWINS.items()}.values())
def test_metadata_that_is_no_model_is_one_line(files, monkeypatch, name):
    """Each key in turn; a value that a model may have loads."""
    right = ours.gguf_metadata(files[name])
    loaded = 0
    for key in right:
        for value in WRONG:
            changed = right | {key: value}
            carry(monkeypatch, changed)
            try:
                load_model(files[name], expert_memory="100%", expert_threads=1).close()
                loaded += 1
            except MoefluxError as error:
                assert "\n" not in str(error), key  # noqa: PT017
    assert 0 < loaded < len(right) * len(WRONG)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ([1.0, 1e30] * 16, "other factors"),
        ([1.0] * 8 + [2.0] * 24, "other factors"),
        ([1e30] * 32, "other factors"),
        ([1.0] * 8 + [np.nan] * 24, "other factors"),
        (None, "no vector 'rope_freqs.weight'"),
    ],
)
def test_factors_of_frequencies_that_are_not_computed_are_one_line(tmp_path, factors, words):
    converter = CONVERTERS["gemma4"]
    config, tensors = read_twin(GOLDEN / "gemma4_shared")
    stored = as_floats(converter, config, tensors)
    del stored["rope_freqs.weight"]
    if factors is not None:
        stored["rope_freqs.weight"] = np.array(factors, np.float32), "F32"
    path = write_gguf(tmp_path / "m.gguf", converter, config, stored)
    refused(path, (UnsupportedError, CheckpointError), words)


def test_layers_with_an_indexer_in_files_that_do_not_name_them():
    """GLM-5 has all; in GLM-5.2, whose context is longer, they are its config's."""
    layers = {}
    for name in ("glm-5", "glm-5.2"):
        shape = SHAPES[name]
        keys = {"block_count": shape.num_hidden_layers}
        keys["context_length"] = shape.max_position_embeddings
        header = Header(Path("x"), "glm-dsa", {f"glm-dsa.{k}": v for k, v in keys.items()})
        layers[name] = indexer_types(header)["indexer_types"]
    assert layers["glm-5"] == ["full"] * 78
    assert tuple(layers["glm-5.2"]) == SHAPES["glm-5.2"].indexer_types


def test_tensors_that_nobody_knows_are_one_line(tmp_path):
    converter = CONVERTERS["qwen3_5_moe"]
    config, tensors = read_twin(GOLDEN / T)
    stored = as_floats(converter, config, tensors)
    norm = np.ones(56, np.float32), "F32"
    for name in ("blk.1.nextn.enorm.weight", "rope_freqs.weight", "blk.0.attn_q.scale", "x y"):
        path = write_gguf(tmp_path / "m.gguf", converter, config, stored | {name: norm})
        refused(path, CheckpointError, f"the tensor '{name}' is none of")
    # Behind the layers, where the metadata say so, they are of multi-token prediction.
    behind = stored | {"blk.4.nextn.enorm.weight": norm, "blk.4.attn_norm.weight": norm}
    more = {"qwen35moe.block_count": 5, "qwen35moe.nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "m.gguf", converter, config, behind, more)
    found = ours.open_gguf(path)
    assert len(found.tensors) == len(set(stored) - {n for n in stored if "exps" in n})
    assert found.prediction_bytes == 2 * norm[0].nbytes
    assert open_sizes(path).prediction_bytes == found.prediction_bytes


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"qwen4exp.ple.head_offsets": [0, 1, 2, 3]}, "head_offsets"),
        ({"qwen4exp.ple.layers": [0, 3]}, "2 layers"),
        ({"qwen4exp.ple.layers": [2]}, "a layer of attention"),
        ({"qwen4exp.ple.layer_multipliers": [1, 2]}, "ngram_multipliers"),
        ({"qwen4exp.ple.layers": []}, "ple.ngram_size"),
        ({"qwen4exp.embedding_length_per_layer_input": 7}, "requires"),
    ],
)
def test_tables_that_are_not_read_are_one_line(tmp_path, monkeypatch, more, words):
    path, _ = rows_twin(tmp_path / "m.gguf")
    right = ours.gguf_metadata(path)
    carry(monkeypatch, right | more)
    refused(path, (ConfigError, UnsupportedError, CheckpointError), words)
