"""Keys that published configs have and that change nothing, and lengths of contexts."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import pytest

from mlx_moeflux.checkpoint.files import read_json_object, tagged
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import ConfigError, UnsupportedError
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models import config_class
from tests.models.twins import GOLDEN

# What transformers 4.57's PretrainedConfig().to_dict() has beside the keys of a model.
TRANSFORMERS_4 = {
    "_name_or_path": "x", "add_cross_attention": False, "bad_words_ids": None,
    "begin_suppress_tokens": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0,
    "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None, "finetuning_task": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False, "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20,
    "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_return_sequences": 1, "output_attentions": False, "output_hidden_states": False,
    "output_scores": False, "prefix": None, "problem_type": None, "pruned_heads": {},
    "remove_invalid_values": False, "repetition_penalty": 1.0, "return_dict": True,
    "return_dict_in_generate": False, "sep_token_id": None, "suppress_tokens": None,
    "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False,
    "tie_encoder_decoder": False, "tokenizer_class": None, "top_k": 50, "top_p": 1.0,
    "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
INERT = [
    TRANSFORMERS_4,
    {"unsloth_fixed": True, "unsloth_version": "2026.1.1", "unsloth_training_mode": "x"},
    {"auto_map": {"AutoConfig": "x.Y"}, "use_grouped_mm": True},
    {"load_balance_coeff": 0.001, "device_map": "auto", "_moe_implementation": "eager"},
    {"_attn_implementation_autoset": True, "_experts_implementation": "grouped_mm"},
    {"router_z_loss_coef": 0.001, "moe_aux_loss_coeff": 0.01, "router_jitter_noise": 0.1},
    {"embd_pdrop": 0.1, "hidden_dropout": 0.1, "attention_dropout_prob": 0.1, "init_std": 0.02},
    {"image_token_id": 7, "audio_token_index": 7, "unk_token_id": 7, "stop_token_ids": [7]},
    {"gradient_checkpointing": True, "use_flash_attention_2": True, "is_decoder": True},
]
HARMFUL = [
    {"attn_logit_softcapping": 30.0},
    {"pruned_heads": {"0": [1]}},
    {"add_cross_attention": True},
    {"moe_intermediate_size_list": [1, 2]},
    {"norm_after": True},
    {"alibi": True},
]
FAMILIES = ("qwen3_moe_top2", "deepseek_v3_groups", "kimi_k25_wrapped", "gpt_oss_sinks")
FAMILIES += ("gemma4_vision", "glm_moe_dsa_shared", "laguna_heads")


def config_of(case: str) -> dict:
    return json.loads((GOLDEN / case / "config.json").read_text())


def parsed(config: dict, **options):
    return config_class(config["model_type"]).from_dict(config, file="config.json", **options)


def within(config: dict, keys: dict) -> dict:
    """The config with `keys`, in its text_config if it is a wrapper."""
    if "text_config" in config:
        return config | {"text_config": config["text_config"] | keys}
    return config | keys


@pytest.mark.parametrize("keys", INERT, ids=lambda keys: next(iter(keys)))
@pytest.mark.parametrize("case", FAMILIES)
def test_keys_that_change_nothing_are_no_error(case, keys):
    config = config_of(case)
    keys = {key: value for key, value in keys.items() if key not in config}
    assert parsed(within(config, keys)) == parsed(config)


@pytest.mark.parametrize("keys", HARMFUL, ids=lambda keys: next(iter(keys)))
@pytest.mark.parametrize("case", FAMILIES)
def test_keys_that_could_are_one_line_with_the_way_out(case, keys):
    config = within(config_of(case), keys)
    with pytest.raises(ConfigError, match=rf"^config\.json: [^\n]*'{next(iter(keys))}'") as error:
        parsed(config)
    assert "--no-strict-config" in str(error.value)
    assert "strict_config=False" in str(error.value)
    assert parsed(config, strict=False) == parsed(config_of(case))


COMMANDS = (
    "generate", "chat", "serve", "cache_prompt", "convert", "tune", "compare-quality",
    "perplexity", "evaluate", "benchmark", "report",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_says_so_has_the_way_out(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--no-strict-config" in capsys.readouterr().out


def with_key(tmp_path):
    model = shutil.copytree(GOLDEN / "qwen3_moe_top2", tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config_of("qwen3_moe_top2") | {"new": 3}))
    return model


def test_convert_takes_the_way_out(tmp_path, capsys):
    model = with_key(tmp_path)
    words = ["convert", "--model", str(model), "--out", str(tmp_path / "out")]
    assert main(words) == 1
    assert "--no-strict-config" in capsys.readouterr().err
    assert main([*words, "--no-strict-config"]) == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["new"] == 3


def test_generate_takes_the_way_out(tmp_path, capsys):
    model = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"new": 3}))
    words = ["generate", "--model", str(model), "--prompt", "def", "--max-tokens", "2"]
    assert main(words) == 1
    assert "--no-strict-config" in capsys.readouterr().err
    assert main([*words, "--no-strict-config"]) == 0
    text = capsys.readouterr().out
    assert main(["generate", *words[3:]]) == 0
    assert capsys.readouterr().out == text


class Reached(Exception):
    """A replaced function was called; holds its options."""


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["compare-quality", "--experts-per-token", "1"], "mlx_moeflux.loading.load"),
        (["tune"], "mlx_moeflux.measure.tune.tune"),
        (["benchmark"], "mlx_moeflux.measure.benchmark.bench.benchmark"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_others_pass_it_on(words, where, strict, monkeypatch):
    def reached(*args, **options):
        options = options if "say" not in options else args[1].load
        raise Reached(options.get("strict_config", True))

    monkeypatch.setattr(where, reached)
    with pytest.raises(Reached) as found:
        main([*words, *([] if strict else ["--no-strict-config"])])
    assert found.value.args == (strict,)


def test_kimi_k25s_own_config(tmp_path):
    """text_config holds transformers 4's defaults and the quantisation. The values are those of
    the file without them."""
    config = config_of("kimi_k25_wrapped")
    keys = TRANSFORMERS_4 | {"auto_map": {"AutoConfig": "x"}, "aux_loss_alpha": 0.001, "ep_size": 1}
    keys |= {"quantization_config": {"quant_method": "none"}}
    assert parsed(within(config, keys)) == parsed(config)


def test_a_quantisation_in_text_config_is_read(tmp_path):
    model = shutil.copytree(GOLDEN / "kimi_k25_wrapped", tmp_path / "model")

    def nested(quantization: dict) -> None:
        config = within(config_of("kimi_k25_wrapped"), {"quantization_config": quantization})
        (model / "config.json").write_text(json.dumps(config))

    nested({"bits": 5, "group_size": 32})
    assert open_checkpoint(model).quantization.default == QuantSpec(5, 32)
    out = convert(model, tmp_path / "floats")
    written = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in {**written, **written["text_config"]}
    nested({"quant_method": "awq"})
    with pytest.raises(UnsupportedError, match="awq"):
        load_model(model)


TAGS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def test_tagged_floats(tmp_path):
    """Source: transformers 5.23 `PreTrainedConfig._encode_special_floats`."""
    file = tmp_path / "x.json"
    file.write_text(json.dumps({name: [{"__float__": name}] for name in TAGS}))
    found = read_json_object(file)
    assert repr(found) == repr({name: [value] for name, value in TAGS.items()})
    assert tagged(found) == json.loads(file.read_text())
    for text, value in {"1e-6": 1e-6, "10000": 1e4, "-0.5": -0.5}.items():
        file.write_text(json.dumps({"x": {"y": {"__float__": text}}}))
        assert read_json_object(file) == {"x": {"y": value}}
    for other in (
        {"__float__": "one"},
        {"__float__": 1},
        {"__float__": []},
        {"__float__": "NaN", "a": 1},
    ):
        file.write_text(json.dumps({"x": other}))
        assert read_json_object(file) == {"x": other}


@pytest.mark.parametrize("text", ["1e-6", "1e-06", "0.5", "-2.5E+3", "10000.0", "1e22"])
def test_tagged_floats_that_json_could_spell(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"x": {"__float__": text}, "y": [{"__float__": text}]}))
    assert read_json_object(file) == {"x": float(text), "y": [float(text)]}
    for other in (f"{text} ", f"+{text}", "1e999", "0x1.8p1", "1_0.0", ".5", "5.", "٣.٥", "nan"):
        file.write_text(json.dumps({"x": {"__float__": other}}))
        assert read_json_object(file) == {"x": {"__float__": other}}
    model = shutil.copytree(GOLDEN / "qwen3_moe_top2", tmp_path / "model")
    config = config_of("qwen3_moe_top2")
    tagged_config = config | {"rms_norm_eps": {"__float__": repr(config["rms_norm_eps"])}}
    (model / "config.json").write_text(json.dumps(tagged_config))
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(load_model(model)(tokens), load_model(GOLDEN / "qwen3_moe_top2")(tokens))


def test_a_config_with_tagged_floats_is_written_as_it_was(tmp_path):
    model = shutil.copytree(GOLDEN / "qwen3_moe_top2", tmp_path / "model")
    config = config_of("qwen3_moe_top2") | {"initializer_range": {"__float__": "Infinity"}}
    (model / "config.json").write_text(json.dumps(config))
    out = convert(model, tmp_path / "out")
    written = json.loads((out / "config.json").read_text(), parse_constant=pytest.fail)
    assert written["initializer_range"] == {"__float__": "Infinity"}
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(load_model(out)(tokens), load_model(GOLDEN / "qwen3_moe_top2")(tokens))
    config["rms_norm_eps"] = {"__float__": "NaN"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'rms_norm_eps' is nan, expected float"):
        load_model(model)


def test_a_config_whose_floats_are_all_tagged_gives_the_same_logits(tmp_path):
    model = shutil.copytree(GOLDEN / "qwen3_moe_yarn4", tmp_path / "model")

    def tag(value):
        if isinstance(value, dict):
            return {key: tag(one) for key, one in value.items()}
        return {"__float__": repr(value)} if isinstance(value, float) else value

    (model / "config.json").write_text(json.dumps(tag(config_of("qwen3_moe_yarn4"))))
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(load_model(model)(tokens), load_model(GOLDEN / "qwen3_moe_yarn4")(tokens))


def test_joyai_is_deepseek_v3(tmp_path):
    """Source: mlx-lm 0.32.2 `utils.MODEL_REMAPPING`."""
    model = shutil.copytree(GOLDEN / "deepseek_v3_groups", tmp_path / "model")
    config = config_of("deepseek_v3_groups") | {"model_type": "joyai_llm_flash"}
    (model / "config.json").write_text(json.dumps(config))
    tokens = mx.array([[1, 2, 3]])
    expected = load_model(GOLDEN / "deepseek_v3_groups")(tokens)
    assert mx.array_equal(load_model(model)(tokens), expected)


YARN = {"rope_type": "yarn", "factor": 4.0}
# Case, keys, tokens of the context.
CONTEXTS = [
    ("qwen3_moe_top2", {"rope_scaling": YARN | {"original_max_position_embeddings": 1024}}, 4096),
    ("qwen3_moe_top2", {"rope_scaling": YARN, "original_max_position_embeddings": 1024}, 4096),
    ("qwen3_moe_top2", {"rope_scaling": YARN}, 8192),
    ("qwen3_moe_top2", {"rope_scaling": YARN | {"original_max_position_embeddings": 256}}, 2048),
    ("qwen3_moe_top2", {"rope_scaling": None}, 2048),
    ("qwen3_moe_top2", {"original_max_position_embeddings": 1024}, 2048),
    (
        "deepseek_v3_groups",
        {"rope_scaling": YARN | {"original_max_position_embeddings": 1024}},
        4096,
    ),
    ("gpt_oss_sinks", {"rope_parameters": YARN | {"original_max_position_embeddings": 1024}}, 4096),
    ("glm4_moe_plain", {"rope_parameters": YARN | {"rope_theta": 1e4}}, 8192),
    ("kimi_k25_wrapped", {}, 2048),
]


@pytest.mark.parametrize(("case", "keys", "tokens"), CONTEXTS)
def test_yarn_extends_the_context(case, keys, tokens):
    """original x factor tokens, original by default max_position_embeddings, as transformers'
    `standardize_rope_params` and vLLM have it; never fewer than max_position_embeddings."""
    config = within(config_of(case), {"max_position_embeddings": 2048})
    for key in ("rope_scaling", "rope_parameters") if keys else ():
        config = within(config, {key: None})
    if keys and "rope_theta" not in config:
        keys = {"rope_theta": 1e4} | keys
    if "rope_theta" in keys.get("rope_parameters", {}):
        del keys["rope_theta"]
    assert parsed(within(config, keys)).max_position_embeddings == tokens


def test_the_extended_context_is_the_models(tmp_path):
    model = shutil.copytree(GOLDEN / "qwen3_moe_yarn4", tmp_path / "model")
    config = config_of("qwen3_moe_yarn4")
    reach = 4 * 32
    config["max_position_embeddings"] = reach // 2
    (model / "config.json").write_text(json.dumps(config))
    with load_model(model) as loaded:
        assert loaded.context_left() == reach
    with load_model(model, max_context=reach) as loaded:
        assert loaded.context_left() == reach


@pytest.mark.parametrize("factor", ["attn_factor", "extrapolation_factor"])
def test_vllms_factors_of_yarn_are_ones(factor):
    config = config_of("qwen3_moe_yarn4")
    scaling = config["rope_parameters"] if "rope_parameters" in config else config["rope_scaling"]
    same = parsed(config)
    scaling |= {factor: 1.0, "finetuned": True}
    assert parsed(config) == same
    scaling[factor] = 2.0
    with pytest.raises(UnsupportedError, match=f"'{factor} of the rope' is 2"):
        parsed(config)
