"""Oracles: the published config, mlx-lm on the same files, float64 formulas, and the router that
look-ahead predicts. Logits of transformers: test_twins.py."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import ConfigError, MoefluxError, UnsupportedError
from mlx_moeflux.kernels.cpu.blas import expert_mix_blas
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank, expert_ffn, geglu
from mlx_moeflux.kernels.moe.expert_mix import expert_mix
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.gemma4_config import FULL, WINDOWED, Config
from mlx_moeflux.models.rope import Rope
from mlx_moeflux.models.shapes import SHAPES
from tests.models.test_published import PUBLISHED
from tests.models.twins import GOLDEN, relative_error


def parsed(config: dict[str, Any]) -> Config:
    return Config.from_dict(config, file="config.json")


def tiny(**keys) -> dict[str, Any]:
    """The text model's keys; None leaves one out."""
    text = SHAPES["gemma-4-tiny"].published()["text_config"] | keys
    return {key: value for key, value in text.items() if value is not None}


def with_overrides(text: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers 5.24 writes the heads of global layers."""
    names = ("global_head_dim", "num_global_key_value_heads")
    return {k: v for k, v in text.items() if k not in names} | {"per_layer_config": overrides}


# ---- Config


def test_the_published_config():
    published = json.loads((PUBLISHED / "gemma-4-26b-a4b.json").read_text())["config"]
    found, shape = parsed(published), SHAPES["gemma-4-26b-a4b"]
    assert found.published() == shape.published()
    assert [i for i in range(30) if found.window(i) is None] == [5, 11, 17, 23, 29]
    assert found.window(0) == 1024
    globals_ = found.of_layer(5)
    assert (globals_.head_dim, globals_.num_key_value_heads) == (512, 2)
    assert (globals_.rope_theta, globals_.yarn) == (1e6, Rope(theta=1e6, share=0.25))
    assert found.of_layer(4) is found
    # Two bytes a number: 25 layers of 8 heads of 256 keys and values, 5 of 2 heads of 512.
    assert found.state_bytes(256) == 256 * 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)


@pytest.mark.parametrize("name", ["gemma-4-26b-a4b", "gemma-4-tiny"])
def test_shapes_come_back(name):
    keys = SHAPES[name].published()
    assert (keys["model_type"], keys["text_config"]["model_type"]) == ("gemma4", "gemma4_text")
    assert parsed(keys).published() == keys
    assert parsed(keys["text_config"]).published() == keys


def test_heads_of_global_layers_in_either_spelling():
    override = {"head_dim": 128, "num_key_value_heads": 1}
    assert parsed(with_overrides(tiny(), {"3": override})) == parsed(tiny())
    long = tiny(num_hidden_layers=12, layer_types=None)
    both = {"05": override, "11": override}
    assert parsed(with_overrides(long, both)) == parsed(long)
    # The gate of transformers 5: only layers whose keys are their values have heads of their own.
    assert parsed(tiny(attention_k_eq_v=False)).num_global_key_value_heads == 2
    of_values = with_overrides(tiny(attention_k_eq_v=False), {"3": override})
    assert parsed(of_values).num_global_key_value_heads == 1


def test_defaults_are_transformers():
    """Source: transformers 5.24 `Gemma4TextConfig`."""
    gone = ("rope_parameters", "layer_types", "sliding_window", "final_logit_softcapping")
    gone += ("attention_k_eq_v", "global_head_dim", "tie_word_embeddings", "hidden_activation")
    found = parsed(tiny(**dict.fromkeys(gone), num_hidden_layers=8))
    assert [found.window(i) is None for i in range(8)] == [i in (5, 7) for i in range(8)]
    assert (found.sliding_window, found.global_head_dim) == (512, 512)
    assert (found.rope_theta, found.global_rope_theta) == (1e4, 1e6)
    assert found.global_rotary_share == 0.25
    assert found.final_logit_softcapping is None
    assert found.tie_word_embeddings
    assert not found.attention_k_eq_v


def ropes(kind: str, **keys) -> dict[str, Any]:
    text = tiny()["rope_parameters"]
    return {"rope_parameters": text | {kind: text[kind] | keys}}


WRONG: list[tuple[dict[str, Any], type[MoefluxError], str]] = [
    *(
        ({key: None}, ConfigError, f"the key '{key}' is missing")
        for key in ("top_k_experts", "head_dim", "num_experts", "intermediate_size")
    ),
    ({"enable_moe_block": None}, UnsupportedError, "'enable_moe_block' is False; only True"),
    ({"hidden_size_per_layer_input": None}, UnsupportedError, "'hidden_size_per_layer_input' is 2"),
    ({"num_kv_shared_layers": 2}, UnsupportedError, "'num_kv_shared_layers' is 2; only 0"),
    ({"attention_bias": True}, UnsupportedError, "'attention_bias' is True; only False"),
    ({"hidden_activation": "silu"}, UnsupportedError, "'hidden_activation' is 'silu'; only 'gelu_"),
    ({"hidden_act": "silu"}, UnsupportedError, "'hidden_act' is 'silu'; only 'gelu_"),
    (
        {"use_bidirectional_attention": "all"},
        UnsupportedError,
        "'use_bidirectional_attention' is '",
    ),
    ({"num_experts_per_tok": 3}, ConfigError, "'top_k_experts' is 4 and 'num_experts_per_tok' 3"),
    ({"top_k_experts": 33}, ConfigError, "'num_experts_per_tok' 33 is more than 'num_experts' 32"),
    ({"top_k_experts": "x"}, ConfigError, "'top_k_experts' is 'x', expected int"),
    ({"layer_types": [WINDOWED] * 3}, ConfigError, "'layer_types' names 3 layers"),
    ({"layer_types": [WINDOWED] * 4}, ConfigError, "'layer_types' ends with 'sliding_attention'"),
    ({"layer_types": ["x", FULL, FULL, FULL]}, UnsupportedError, "'layer_types' has 'x'; no such"),
    ({"sliding_window": 0}, ConfigError, "'sliding_window' is 0, must be positive"),
    ({"num_global_key_value_heads": 3}, ConfigError, "'num_global_key_value_heads' 3 does not"),
    ({"num_global_key_value_heads": 0}, ConfigError, "'num_global_key_value_heads' is 0, must be"),
    ({"global_head_dim": 31}, ConfigError, "'global_head_dim' is 31, must be even"),
    ({"head_dim": 31}, ConfigError, "'partial_rotary_factor' turns 31 of a head's"),
    ({"final_logit_softcapping": -1.0}, ConfigError, "'final_logit_softcapping' is -1.0, must be"),
    ({"final_logit_softcapping": 0}, ConfigError, "'final_logit_softcapping' is 0.0, must be"),
    ({"rope_theta": 1e4}, ConfigError, "'rope_theta' is at the top; ropes are in"),
    ({"rope_parameters": {FULL: {}}}, ConfigError, "'rope_theta' for 'sliding_attention'"),
    ({"rope_parameters": [1]}, ConfigError, "'rope_theta' for 'sliding_attention'"),
    (ropes(FULL, rope_type="yarn"), UnsupportedError, "full_attention.rope_type' is 'yarn'; only"),
    (ropes(WINDOWED, rope_type="proportional"), UnsupportedError, "'proportional'; only 'default'"),
    (ropes(FULL, factor=8.0), UnsupportedError, "'rope_parameters.full_attention.factor' is 8.0"),
    (ropes(FULL, partial_rotary_factor=2), ConfigError, "is 2, must be more than 0 and at most 1"),
    (ropes(FULL, partial_rotary_factor="x"), ConfigError, "is 'x', must be more than 0 and at mo"),
    (ropes(WINDOWED, partial_rotary_factor=0.5), UnsupportedError, "is 0.5; only 1 is computed"),
    (
        ropes(FULL, scale=3),
        ConfigError,
        "nothing here reads 'rope_parameters.full_attention.scale'",
    ),
    (ropes(FULL, rope_theta=0.5), ConfigError, "'rope_theta' is 0.5, must be more than 1"),
    (ropes(FULL, rope_theta="x"), ConfigError, "'rope_theta' of the rope is 'x'"),
    ({"per_layer_config": {"3": {"head_dim": 64}}}, ConfigError, "'global_head_dim' is 128 and"),
    ({"per_layer_config": {"2": {"head_dim": 128}}}, ConfigError, "must have the same keys for"),
    ({"per_layer_config": {"3": {"sliding_window": 9}}}, ConfigError, "reads 'sliding_window' of"),
    ({"per_layer_config": {"x": {"head_dim": 128}}}, ConfigError, "must be numbers of layers"),
    ({"per_layer_config": [3]}, ConfigError, "'per_layer_config' must be an object of objects"),
    ({"altup_num_inputs": 4}, ConfigError, "nothing here reads 'altup_num_inputs'"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG)
def test_one_line_says_what_is_wrong(wrong, kind, message):
    with pytest.raises(kind, match=r"^config\.json: [^\n]*$") as error:
        parsed(tiny(**wrong))
    assert message in str(error.value)
    wrapped = SHAPES["gemma-4-tiny"].published() | {"text_config": tiny(**wrong)}
    with pytest.raises(kind) as of_wrapper:
        parsed(wrapped)
    assert str(of_wrapper.value) == str(error.value)


def test_another_text_model_is_refused():
    wrapped = SHAPES["gemma-4-tiny"].published() | {"text_config": tiny(model_type="gemma3_text")}
    with pytest.raises(UnsupportedError, match=r"'text_config\.model_type' is 'gemma3_text'"):
        parsed(wrapped)


# ---- Numbers


def test_pairs_that_do_not_turn_have_infinite_periods():
    """Of heads of 20 numbers 0.75 turn: seven of ten pairs, rounded down."""
    periods = Rope(theta=1e4, share=0.75).periods(20)
    assert np.allclose(periods[:7], 1e4 ** (np.arange(7) / 10), rtol=1e-6)
    assert np.isinf(periods[7:]).all()


@pytest.mark.parametrize("case", ["gemma4_shared", "gemma4_vision"])
def test_mlx_lm_gives_the_same_logits(case, tmp_path):
    """On what is converted of either spelling, text alone and in a wrapper."""
    utils = pytest.importorskip("mlx_lm.utils")
    golden = mx.load(str(GOLDEN / case / "golden.safetensors"))
    out = convert(GOLDEN / case, tmp_path / "mlx", layout="safetensors")
    theirs, _ = utils.load_model(out)
    theirs.set_dtype(mx.float32)
    assert relative_error(theirs(golden["tokens"]), golden["logits"]) <= 1e-5
    with load_model(out, dtype=mx.float32) as model:
        assert relative_error(model(golden["tokens"]), golden["logits"]) <= 1e-5


def test_mlx_lm_gives_the_same_logits_of_quantised_weights(tmp_path):
    """In groups of 32, as QAT's files have them, whose router is in floats."""
    utils = pytest.importorskip("mlx_lm.utils")
    tokens = mx.load(str(GOLDEN / "gemma4_shared" / "golden.safetensors"))["tokens"]
    options = {"quantize": True, "q_bits": 4, "q_group_size": 32, "layout": "safetensors"}
    out = convert(GOLDEN / "gemma4_shared", tmp_path / "mlx", **options)
    file, floats = (
        out / "model.safetensors",
        mx.load(str(GOLDEN / "gemma4_shared/model.safetensors")),
    )
    tensors, config = mx.load(str(file)), json.loads((out / "config.json").read_text())
    for layer in range(3):
        router = f"language_model.model.layers.{layer}.router.proj"
        for part in ("scales", "biases"):
            del tensors[f"{router}.{part}"]
        tensors[f"{router}.weight"] = floats[f"model.layers.{layer}.router.proj.weight"]
        del config["quantization"][router]
        del config["quantization_config"][router]
    mx.eval(tensors)
    mx.save_safetensors(str(file), tensors, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))
    theirs, _ = utils.load_model(out)
    theirs.set_dtype(mx.float32)
    expected = theirs(tokens)
    for memory in ("100%", "60.01%"):
        with load_model(out, dtype=mx.float32, expert_memory=memory) as model:
            assert relative_error(model(tokens), expected) <= 1e-5
            assert not hasattr(model.layers[0].mlp.gate, "bits")
            assert model.layers[0].mlp.up_proj.bits == 4


def test_mlx_lm_reads_what_is_synthesised(tmp_path):
    utils = pytest.importorskip("mlx_lm.utils")
    path = synthesize("gemma-4-tiny", tmp_path / "model", layers=2, experts=8)
    theirs, config = utils.load_model(path)
    theirs.set_dtype(mx.float32)
    tokens = mx.array(np.random.default_rng(0).integers(0, 1024, (2, 33)))
    with load_model(path, dtype=mx.float32, expert_memory="75%") as model:
        assert relative_error(model(tokens), theirs(tokens)) <= 1e-5
        assert model.layers[1].mlp.gate.bits == 8
        assert "v_proj" not in model.layers[1].self_attn
    assert config["quantization"]["language_model.model.layers.0.router.proj"]["bits"] == 8


def test_activation_is_geglu():
    """Experts in float64 loops, of values where gelu bends."""
    random = np.random.default_rng(1)
    C, F, E, P = 12, 8, 3, 7
    w = [random.standard_normal((E, *shape)) for shape in ((F, C), (F, C), (C, F))]
    x, slots = random.standard_normal((P, C)), random.integers(0, E, P)
    truth = np.zeros((P, C))
    for p, s in enumerate(slots):
        gate = w[0][s] @ x[p]
        bent = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        truth[p] = w[2][s] @ (bent * (w[1][s] @ x[p]))
    parts = [ProjectionBank(mx.array(a.astype(np.float32)), None, None, None) for a in w]
    bank = ExpertBank(*parts, activation=geglu)
    rows, ids = mx.array(x.astype(np.float32)), mx.array(slots.astype(np.uint32))
    expected = mx.array(truth.astype(np.float32))
    assert relative_error(expert_ffn(rows, ids, bank), expected) < 1e-6
    for mixed in (expert_mix, expert_mix_blas):
        assert relative_error(mixed(rows, ids[:, None], mx.ones((P, 1)), bank), expected) < 1e-6
    biased = replace(bank, down=replace(bank.down, bias=mx.zeros((E, C))))
    with pytest.raises(UnsupportedError, match="without biases"):
        expert_mix_blas(rows, ids[:, None], mx.ones((P, 1)), biased)


def test_look_ahead_asks_the_next_router():
    with load_model(GOLDEN / "gemma4_shared", dtype=mx.float32) as model:
        hidden, ids = mx.random.normal((9, 64), key=mx.random.key(0)), mx.zeros((9, 2), mx.uint32)
        model.notice_edits()
        guess = model.layers[0].mlp._lookahead(hidden, ids)
        _, chosen, _, _, _ = model.layers[1].begin_experts(hidden[None])
        assert np.array_equal(np.sort(np.array(guess)), np.array(chosen))


def test_prefetch_ahead_keeps_every_bit():
    tokens = mx.load(str(GOLDEN / "gemma4_shared" / "golden.safetensors"))["tokens"][:1]
    answers = []
    for options in ({}, {"expert_memory": "60.01%", "prefetch": "ahead"}):
        with load_model(GOLDEN / "gemma4_shared", dtype=mx.float32, **options) as model:
            cache = model.make_cache()
            parts = [model(tokens[:, :20], cache)]
            parts += [model(tokens[:, t : t + 1], cache) for t in range(20, 37)]
            answers.append(np.array(mx.concatenate(parts, axis=1)))
    assert np.isfinite(answers[0]).all()
    assert np.array_equal(*answers)
