"""Tables of n-grams in a checkpoint's names: three layouts of one table, and what is no table."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_moeflux.checkpoint.names import NameRules, map_tensors
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import CheckpointError
from mlx_moeflux.models.shapes import SHAPES

RULES = SHAPES["qwen4-exp-tiny"].name_rules()
AT = "layers.1.ple.ple_embedding."
EMBEDDING = f"{AT}ngram_embedding"
PREFIXES = ("model.", "model.language_model.", "language_model.model.")
WORDS = {"weight": ("U32", 4), "scales": ("BF16", 1), "biases": ("BF16", 1)}

Refs = dict[str, TensorRef]


def ref(name: str, *shape: int, dtype: str = "BF16") -> Refs:
    return {name: TensorRef(name, Path("model.safetensors"), 0, dtype, shape)}


def transformers(prefix: str = "model.", shards: int = 12) -> Refs:
    """In the order of names, in which shard 10 follows shard 1."""
    names = sorted(f"{prefix}{EMBEDDING}.shard_{n}.weight" for n in range(shards))
    return {k: v for name in names for k, v in ref(name, 160, 32).items()}


def quantised(stem: str, rows: int) -> Refs:
    return {
        k: v
        for part, (dtype, width) in WORDS.items()
        for k, v in ref(f"{stem}.{part}", rows, width, dtype=dtype).items()
    }


def mlx(shards: int = 3) -> Refs:
    stems = [f"language_model.model.{EMBEDDING}.shards.{n}" for n in range(shards)]
    return {k: v for n, stem in enumerate(stems) for k, v in quantised(stem, 160 + n).items()}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_transformers_shards(prefix):
    mapped = map_tensors(transformers(prefix), RULES)
    (layer,), (shards,) = mapped.tables, mapped.tables.values()
    assert layer == 1
    assert [shard["weight"].name for shard in shards] == [
        f"{prefix}{EMBEDDING}.shard_{n}.weight" for n in range(12)
    ]
    assert not mapped.trunk
    assert not mapped.experts


def test_mlx_shards():
    """The last shards may have other numbers of rows."""
    (shards,) = map_tensors(mlx(), RULES).tables.values()
    assert [set(shard) for shard in shards] == [set(WORDS)] * 3
    assert [shard["scales"].shape for shard in shards] == [(160, 1), (161, 1), (162, 1)]


@pytest.mark.parametrize("parts", [ref(f"model.{EMBEDDING}.weight", 640, 32),
                                   quantised(f"model.{EMBEDDING}", 640)])  # fmt: skip
def test_a_whole_table_is_one_shard(parts):
    ((shard,),) = map_tensors(parts, RULES).tables.values()
    assert list(shard.values()) == list(parts.values())


def test_each_layer_has_its_own():
    other = {
        name.replace("layers.1.", "layers.0."): each
        for name, each in transformers(shards=2).items()
    }
    tables = map_tensors(transformers(shards=3) | other, RULES).tables
    assert {layer: len(shards) for layer, shards in tables.items()} == {0: 2, 1: 3}
    assert list(tables) == [0, 1]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "name", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"]
)
def test_constants_of_the_hashes_are_dropped(prefix, name):
    mapped = map_tensors(ref(f"{prefix}{AT}{name}", 3, dtype="I64"), RULES)
    assert not mapped.trunk
    assert not mapped.tables


def test_the_rest_of_the_layer_is_trunk():
    names = ["key_proj.weight", "norm_key.weight", "conv1d.weight"]
    tensors = {k: v for name in names for k, v in ref(f"model.layers.1.ple.{name}", 4).items()}
    dropped = ref("mtp.layers.0.mlp.gate.weight", 4, 4) | ref("model.visual.x.weight", 4, 4)
    assert set(map_tensors(tensors | dropped, RULES).trunk) == set(tensors)


def test_other_families_have_no_tables():
    for rules in (NameRules(), SHAPES["qwen3.5-tiny"].name_rules()):
        mapped = map_tensors(transformers(), rules)
        assert not mapped.tables
        assert len(mapped.trunk) == 12


def without(tensors: Refs, name: str) -> Refs:
    assert name in tensors
    return {k: v for k, v in tensors.items() if k != name}


STEM, SHARD = f"language_model.model.{EMBEDDING}.shards.1", f"model.{EMBEDDING}.shard_"
WRONG = {
    "a shard is missing": (
        without(transformers(), f"{SHARD}3.weight"),
        f"shard 3 of the table of layer 1 is missing although '{SHARD}11.weight' is there",
    ),
    "the first is missing": (
        without(transformers(), f"{SHARD}0.weight"),
        "shard 0 of the table of layer 1 is missing",
    ),
    "another width": (
        transformers() | ref(f"{SHARD}5.weight", 160, 16),
        f"'{SHARD}5.weight' has rows of 16 x BF16, '{SHARD}0.weight' of 32 x BF16",
    ),
    "another dtype": (
        transformers() | ref(f"{SHARD}5.weight", 160, 32, dtype="F32"),
        f"'{SHARD}5.weight' has rows of 32 x F32, '{SHARD}0.weight' of 32 x BF16",
    ),
    "another dtype of scales": (
        mlx() | ref(f"{STEM}.scales", 161, 1, dtype="F32"),
        f"'{STEM}.scales' has rows of 1 x F32",
    ),
    "a part is missing": (
        without(mlx(), f"{STEM}.biases"),
        f"the table of layer 1 has '{STEM}.weight' without its 'biases'",
    ),
    "a part more": (
        transformers() | ref(f"{SHARD}2.scales", 160, 1),
        f"'{SHARD}2.scales' is there, but '{SHARD}0.weight' has no 'scales'",
    ),
    "no weight": (
        {k: v for k, v in mlx().items() if not k.endswith(".weight")},
        "without its 'weight'",
    ),
    "other rows of a part": (
        mlx() | ref(f"{STEM}.biases", 160, 1),
        f"'{STEM}.biases' has 160 rows, '{STEM}.weight' has 161",
    ),
    "whole and in shards": (
        transformers() | ref(f"model.{EMBEDDING}.weight", 640, 32),
        f"layer 1 has its table whole ('model.{EMBEDDING}.weight') and in shards (",
    ),
    "both spellings": (
        transformers() | ref(f"model.{EMBEDDING}.shards.4.weight", 160, 32),
        "are the same part of a table; remove one",
    ),
    "no matrix": (
        transformers() | ref(f"{SHARD}2.weight", 160, 32, 1),
        f"'{SHARD}2.weight' has shape [160, 32, 1]; expected rows on axis 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_line_says_what_is_wrong(case):
    tensors, message = WRONG[case]
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: [^\n]*$") as error:
        map_tensors(tensors, RULES)
    assert message in str(error.value)
