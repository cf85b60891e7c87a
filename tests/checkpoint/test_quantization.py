"""Quantisation blocks of config.json; the oracles are mlx-lm's written form and mx.quantize."""

import json

import mlx.core as mx
import pytest

from mlx_moeflux.checkpoint.quantization import BITS, GROUP_SIZES, Quantization, QuantSpec
from mlx_moeflux.errors import ConfigError, ShapeError, UnsupportedError

ROUTER = "language_model.model.layers.0.mlp.gate"
MIXED = {
    "group_size": 64,
    "bits": 4,
    "mode": "affine",
    ROUTER: {"group_size": 64, "bits": 8},
    "language_model.model.layers.3.linear_attn.out_proj": {"group_size": 32, "bits": 5},
    "vision_tower": False,
    "language_model.lm_head": True,
}


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_default_and_exceptions_are_read_from_either_key(key):
    quantization = Quantization.from_config({"hidden_size": 3, key: json.loads(json.dumps(MIXED))})
    assert quantization.default == QuantSpec(4, 64, "affine")
    assert quantization.spec("model.anything") == QuantSpec(bits=4)
    assert quantization.spec(ROUTER) == QuantSpec(bits=8, group_size=64)
    assert quantization.spec("language_model.model.layers.3.linear_attn.out_proj") == QuantSpec(
        5, 32
    )
    assert quantization.spec("vision_tower") is None
    assert quantization.spec("language_model.lm_head") == QuantSpec(4)
    assert quantization.spec("model.layers.0.mlp.gate") == QuantSpec(4), "paths are exact"


@pytest.mark.parametrize("config", [
    {}, {"quantization": None}, {"quantization_config": {}}, {"quantization_config": None},
    {"quantization_config": {"quant_method": "none"}}, {"quantization": {"quant_method": None}},
])  # fmt: skip
def test_a_checkpoint_that_says_nothing_is_not_quantised(config):
    quantization = Quantization.from_config(config)
    assert quantization == Quantization()
    assert quantization.spec("model.embed_tokens") is None


def test_only_some_modules_may_be_quantised():
    quantization = Quantization.from_config({"quantization": {"lm_head": {"bits": 6}}})
    assert quantization.spec("lm_head") == QuantSpec(6, 64)
    assert quantization.spec("model.embed_tokens") is None


def test_both_keys_may_say_the_same():
    same = {"bits": 4, "group_size": 64, "a": {"bits": 8, "group_size": 64, "mode": "affine"}}
    also = {"mode": "affine", "a": {"bits": 8, "group_size": 64}, "bits": 4, "group_size": 64,
            "b": True}  # fmt: skip
    assert Quantization.from_config({"quantization": same, "quantization_config": also}).spec(
        "a"
    ) == QuantSpec(8)


def test_of_two_keys_mlx_lms_counts():
    """Stored shapes decide, so a contradiction between two hints is no error."""
    other = {"bits": 8, "group_size": 32, "lm_head": False}
    config = {"quantization": {"bits": 4, "group_size": 64}, "quantization_config": other}
    assert Quantization.from_config(config) == Quantization(QuantSpec(4, 64))


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes"])
@pytest.mark.parametrize("with_ours", [False, True])
def test_another_librarys_method_is_named(method, with_ours):
    config = {"quantization_config": {"quant_method": method, "weight_block_size": [128, 128]}}
    if with_ours:
        config["quantization"] = {"bits": 4, "group_size": 64}
    with pytest.raises(UnsupportedError, match=f"quant_method '{method}'"):
        Quantization.from_config(config)


@pytest.mark.parametrize(("block", "error", "words"), [
    ({"bits": 7, "group_size": 64}, UnsupportedError, "quantization of config.json: bits 7"),
    ({"bits": 1, "group_size": 64}, UnsupportedError, "bits 1"),
    ({"bits": True, "group_size": 64}, UnsupportedError, "bits True"),
    ({"bits": "4", "group_size": 64}, UnsupportedError, "bits '4'"),
    ({"bits": 4, "group_size": 16}, UnsupportedError, "group_size 16"),
    ({"bits": 4, "group_size": None}, UnsupportedError, "group_size None"),
    ({"bits": 8, "group_size": 32, "mode": "mxfp4"}, UnsupportedError, "mode 'mxfp4' has 4 bits"),
    ({"mode": "mxint8"}, UnsupportedError, "mode 'mxint8'"),
    ({"bits": 4, "a.b": {"bits": 9}}, UnsupportedError, "quantization['a.b'] of config.json"),
    ({"bits": 4, "a.b": {"bits": 4, "mode": "mxfp8"}}, UnsupportedError, "['a.b']"),
    ({"bits": 4, "a.b": {"group_size": 64}}, ConfigError, "quantization['a.b'] of config.json has"),
    ({"bits": 4, "a.b": {"bits": 4, "width": 3}}, ConfigError, "unknown key 'width'"),
    ({"bits": 4, "a.b": 8}, ConfigError, "quantization['a.b'] of config.json is 8"),
    ({"bits": 4, "linear_class": "x"}, ConfigError, "['linear_class'] of config.json is 'x'"),
    ({"a.b": True}, ConfigError, "['a.b'] of config.json is True"),
    ({"group_size": 64}, ConfigError, "quantization of config.json has no bits"),
    ([4], ConfigError, "quantization of config.json is [4]"),
    (4, ConfigError, "quantization of config.json is 4"),
])  # fmt: skip
def test_what_cannot_be_read_is_one_sentence_naming_module_and_value(block, error, words):
    with pytest.raises(error) as caught:
        Quantization.from_config({"quantization": block})
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.endswith(".")


def test_renaming_maps_and_drops_paths():
    quantization = Quantization.from_config({"quantization": MIXED})
    renamed = quantization.renamed(
        lambda path: path.removeprefix("language_model.") if path != "vision_tower" else None
    )
    assert renamed.spec("model.layers.0.mlp.gate") == QuantSpec(8)
    assert set(renamed.overrides) == {
        "model.layers.0.mlp.gate", "model.layers.3.linear_attn.out_proj", "lm_head",
    }  # fmt: skip
    assert renamed.default == quantization.default
    assert ROUTER in quantization.overrides, "the original is not touched"


def test_of_two_entries_for_one_module_the_first_counts():
    block = {"bits": 4, "a.gate": {"bits": 8}, "c.gate": {"bits": 6}}
    renamed = Quantization.from_config({"quantization": block}).renamed(lambda path: path[2:])
    assert renamed.spec("gate") == QuantSpec(8)


@pytest.mark.parametrize("block", [{}, MIXED, {"lm_head": {"bits": 6}}])
def test_what_is_written_reads_back(block):
    quantization = Quantization.from_config({"quantization": block})
    written = json.loads(json.dumps({"quantization": quantization.to_config()}))
    assert Quantization.from_config(written) == quantization


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_words_and_groups_are_the_shapes_that_mlx_packs(bits, group_size):
    width = 384
    weight, scales, biases = mx.quantize(mx.zeros((3, width)), group_size=group_size, bits=bits)
    spec = QuantSpec(bits, group_size)
    assert weight.shape == (3, spec.words(width))
    assert scales.shape == biases.shape == (3, spec.groups(width))


@pytest.mark.parametrize("width", [0, -64, 96, 100])
def test_a_width_that_the_group_does_not_divide_is_refused(width):
    with pytest.raises(ShapeError, match=f"row of {width} elements"):
        QuantSpec(4, 64).words(width)


@pytest.mark.parametrize("arguments", [(7,), (4, 16), (4, 64, "mxfp4"), (4.0,)])
def test_a_spec_that_mlx_cannot_compute_is_refused(arguments):
    with pytest.raises(UnsupportedError, match="Quantisation with"):
        QuantSpec(*arguments)
