"""config.json of Qwen4-Exp (Qwen3.8-Flash-Next): keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import divides
from mlx_moeflux.checkpoint.names import PARTS, NameRules
from mlx_moeflux.errors import ConfigError, UnsupportedError
from mlx_moeflux.models import qwen3_5_moe_config
from mlx_moeflux.models.qwen3_5_moe_config import FULL
from mlx_moeflux.state_arrays import INDEXED as INDEXED_STATE
from mlx_moeflux.state_arrays import NGRAMS, EntrySpec

INDEXED = "indexed_attention"
"""transformers' name of the attention layers, which published configs call full."""
GATES = ("silu", "sigmoid")
# Beyond them the hashes' constants take minutes, and row numbers do not fit 63 bits.
MOST_HEADS, MOST_ROWS = 1 << 10, 1 << 40


@dataclass(frozen=True, kw_only=True)
class Config(qwen3_5_moe_config.Config):
    """The keys of config.json that this architecture uses.

    ``ple_layer_ids`` are the layers with a table of n-grams, counted from one. ``eos_token_id`` is
    the text model's: its first id ends the context of an n-gram. ``ngram_head_rows`` and
    ``ngram_multipliers`` are the constants of the hashes of one table, as GGUF files store them, in
    place of those that follow from ``ngram_vocab_size_base`` and ``seed``.

    Source of the defaults: transformers' `Qwen4ExpTextConfig`.
    """

    indexer_n_heads: int
    indexer_kv_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    ple_embed_dim: int
    hc_count: int = 4
    hc_lowrank: int = 320
    ple_layer_ids: tuple[int, ...] = ()
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    seed: int = 1234
    split_ngram_parts: int = 512
    output_gate_type: str | None = None
    ngram_head_rows: tuple[int, ...] = ()
    ngram_multipliers: tuple[int, ...] = ()
    eos_token_id: int | tuple[int, ...] | None = None

    MODEL_TYPE, ARCHITECTURE = "qwen4_exp", "Qwen4ExpForConditionalGeneration"
    # transformers counts a layer's states from the other keys and writes the number.
    INERT: ClassVar[frozenset[str]] = qwen3_5_moe_config.Config.INERT | {
        "mtp",
        "number_of_conv_states",
    }
    MAY_BE_ZERO: ClassVar[frozenset[str]] = frozenset(["seed"])
    ROTARY_FACTOR: ClassVar[float] = 1.0

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.from_dict`; plain or wrapped in
        ``text_config``."""
        inner = config.get("text_config")
        if isinstance(inner, dict):
            # The wrapper's own lists what ends a reply, and may begin with another id.
            outer = {k: v for k, v in config.items() if k != "eos_token_id"}
            config = outer | {"text_config": _with_defaults(inner)}
        else:
            config = _with_defaults(config)
        return super().from_dict(config, file=file, strict=strict)

    def check(self, file: Path | str) -> None:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.check`."""
        super().check(file)
        if self.output_gate not in GATES:
            raise UnsupportedError(
                f"{file}: 'output_gate_type' is {self.output_gate!r}; only {GATES[0]!r} and "
                f"{GATES[1]!r} are computed."
            )
        if self.hc_count == 1:
            raise ConfigError(f"{file}: 'hc_count' is 1, must be at least 2.")
        if self.indexer_kv_heads != 1:
            raise ConfigError(f"{file}: 'indexer_kv_heads' is {self.indexer_kv_heads}, must be 1.")
        divides(self, file, "indexer_compress_ratio", "indexer_budget")
        if self.rotary_dims > self.indexer_head_dim:
            raise ConfigError(
                f"{file}: 'partial_rotary_factor' turns {self.rotary_dims} of a head's dimensions, "
                f"more than 'indexer_head_dim' {self.indexer_head_dim}."
            )
        if self.ple_layer_ids:
            self._check_ngrams(file)

    def _check_ngrams(self, file: Path | str) -> None:
        for number in self.ple_layer_ids:
            if not 1 <= number <= self.num_hidden_layers:
                raise ConfigError(
                    f"{file}: 'ple_layer_ids' has {number}; expected 1 to "
                    f"{self.num_hidden_layers}, the first layer is 1."
                )
            if not self.is_linear(number - 1):
                raise ConfigError(
                    f"{file}: 'ple_layer_ids' has {number}, a layer of attention; n-grams belong "
                    "to layers of linear attention."
                )
        if not 0 < self.ngram_heads <= MOST_HEADS:
            raise ConfigError(
                f"{file}: 'ngram_size' {self.ngram_size} and 'heads_per_ngram' "
                f"{self.heads_per_ngram} make {self.ngram_heads} heads; expected 1 to "
                f"{MOST_HEADS}."
            )
        if self.ple_embed_dim % self.ngram_heads:
            raise ConfigError(
                f"{file}: the {self.ngram_heads} heads of n-grams do not divide 'ple_embed_dim' "
                f"{self.ple_embed_dim}."
            )
        for name, count in (
            ("ngram_head_rows", self.ngram_heads),
            ("ngram_multipliers", self.ngram_size),
        ):
            values = getattr(self, name)
            if values and (
                len(self.ple_layer_ids) > 1
                or len(values) != count
                or not 0 < min(values) <= max(values) < 1 << 63
            ):
                raise ConfigError(
                    f"{file}: '{name}' must be {count} positive integers, of the only table of "
                    "n-grams."
                )
        if max(self.ngram_head_rows, default=0) > MOST_ROWS:
            raise ConfigError(f"{file}: 'ngram_head_rows' must be at most {MOST_ROWS} each.")
        if self.ngram_vocab_size_base > MOST_ROWS:
            raise ConfigError(
                f"{file}: 'ngram_vocab_size_base' is {self.ngram_vocab_size_base}, must be at most "
                f"{MOST_ROWS}."
            )
        stop = self.stop_token
        if stop is None:
            raise ConfigError(
                f"{file}: the key 'eos_token_id' of the text model is missing; add it, it ends the "
                "context of n-grams."
            )
        if not 0 <= stop < self.vocab_size:
            raise ConfigError(
                f"{file}: 'eos_token_id' is {stop}, expected 0 to {self.vocab_size - 1}."
            )

    def ngram_index(self, layer: int) -> int | None:
        """Return the place of `layer` among those with a table of n-grams, or None."""
        layers = sorted({number - 1 for number in self.ple_layer_ids})
        return layers.index(layer) if layer in layers else None

    @property
    def ngram_heads(self) -> int:
        """Rows of the table that a token reads."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_width(self) -> int:
        """Numbers of a row."""
        return self.ple_embed_dim // self.ngram_heads

    def table_path(self, layer: int) -> str:
        """Return the path of a layer's table of n-grams."""
        return f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"

    @property
    def stop_token(self) -> int | None:
        """Id of the token that ends the context of an n-gram; None if config.json has none."""
        ids = self.eos_token_id
        if isinstance(ids, tuple):
            return ids[0] if ids else None
        return ids

    @property
    def output_gate(self) -> str:
        """Activation of the gate on the output of linear attention: ``silu`` or ``sigmoid``."""
        return self.output_gate_type or self.hidden_act

    @property
    def block_topk(self) -> int:
        """Blocks of keys that the indexer selects for a query."""
        return self.indexer_budget // self.indexer_compress_ratio

    def name_rules(self) -> NameRules:
        """Return the rename rules of tensor names; constants of the hashes are dropped."""
        rules = super().name_rules()
        at = r"((model\.)?language_model\.)?(model\.)?layers\.\d+\.ple\.ple_embedding\."
        constants = at + r"(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)"
        # transformers' shards, MLX's, or the whole.
        table = (
            r"model\.layers\.(?P<layer>\d{1,9})\.ple\.ple_embedding\.ngram_embedding"
            rf"(\.(shard_|shards\.)(?P<shard>\d{{1,9}}))?\.(?P<part>{'|'.join(PARTS)})"
        )
        return replace(rules, drops=(*rules.drops, constants), tables=(table,))

    def prediction(self) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.prediction`; the layer has no
        n-grams."""
        return replace(super().prediction(), ple_layer_ids=())

    def state(self, layer: int, dtype: str) -> EntrySpec:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.state`."""
        if not self.is_linear(layer):
            rows = self.num_key_value_heads, self.head_dim
            index = 1, self.indexer_head_dim
            return INDEXED_STATE.spec(dtype, keys=rows, values=rows, index_keys=index)
        if self.ngram_index(layer) is None:
            return super().state(layer, dtype)
        window = (self.ple_conv_kernel_size - 1) * self.ngram_size
        return NGRAMS.spec(
            dtype,
            **self.delta_arrays(),
            ngram_conv=(window, self.hc_count * self.hidden_size),
            tokens=(self.ngram_size - 1,),
        )

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json in the vision-language wrapper's form."""
        keys = super().published()
        keys["text_config"]["model_type"] = "qwen4_exp_text"
        for name in ("ngram_head_rows", "ngram_multipliers"):
            if not keys["text_config"][name]:
                del keys["text_config"][name]
        return keys if self.eos_token_id is None else keys | {"eos_token_id": self.eos_token_id}


def _with_defaults(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's `keys` with ``ple_embed_dim``, by default the hidden size, and the
    published name of attention layers."""
    kinds = keys.get("layer_types")
    if isinstance(kinds, list):
        keys = keys | {"layer_types": [FULL if kind == INDEXED else kind for kind in kinds]}
    if keys.get("ple_embed_dim") is None:
        keys = keys | {"ple_embed_dim": keys.get("hidden_size")}
    return keys
