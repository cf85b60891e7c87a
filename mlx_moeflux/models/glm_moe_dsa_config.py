"""config.json of GLM-5: DeepSeek-V3.2's keys with other defaults, and which layers have an indexer.
No MLX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import only
from mlx_moeflux.checkpoint.names import NameRules
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models import deepseek_v32_config
from mlx_moeflux.models.deepseek_v32_config import count_of
from mlx_moeflux.models.glm4_moe_lite_config import whole_heads

FULL, SHARED = "full", "shared"
_LETTERS = {"F": FULL, "S": SHARED}
_EVERY, _OFFSET = "index_topk_freq", "index_skip_topk_offset"


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_v32_config.Config):
    """The keys of config.json that this architecture uses.

    indexer_types: For each layer, ``full`` if it has an indexer, ``shared`` if it takes what the
    last layer with one chose; empty: all have one. Read from ``index_topk_pattern``, or from
    ``index_topk_freq`` and ``index_skip_topk_offset``, if it is not there.

    Source of the defaults: transformers' `GlmMoeDsaConfig`.
    """

    q_lora_rank: int | None = 2048
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_group: int = 1
    topk_group: int = 1
    index_n_heads: int = 32
    indexer_rope_interleave: bool = True
    indexer_types: tuple[str, ...] = ()

    MODEL_TYPE, ARCHITECTURE = "glm_moe_dsa", "GlmMoeDsaForCausalLM"
    INERT: ClassVar[frozenset[str]] = deepseek_v32_config.Config.INERT | {
        "index_topk_pattern",
        _EVERY,
        _OFFSET,
        "index_share_for_mtp_iteration",
        "moe_router_dtype",
        "partial_rotary_factor",
    }

    @classmethod
    def read_keys(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.read_keys`."""
        whole_heads(config, file)
        only(file, "moe_router_dtype", config.get("moe_router_dtype") or "float32", "float32")
        config = config | {"indexer_types": _indexer_types(config, file)}
        return super().read_keys(config, file)

    def has_indexer(self, layer: int) -> bool:
        """See :meth:`deepseek_v32_config.Config.has_indexer`."""
        return self.indexer_types[layer : layer + 1] != (SHARED,)

    @property
    def shares_indexers(self) -> bool:
        """True if a layer takes another one's choice."""
        return SHARED in self.indexer_types

    def published(self) -> dict[str, Any]:
        """See :meth:`BaseConfig.published`; ``indexer_types`` has one kind for each layer."""
        layers = map(self.has_indexer, range(self.num_hidden_layers))
        kinds = {"indexer_types": [FULL if own else SHARED for own in layers]}
        return super().published() | kinds | self.fixed()

    def fixed(self) -> dict[str, Any]:
        """Return the keys that mlx-lm's `glm_moe_dsa` must have and this architecture does not
        vary, and its spelling of the rope."""
        rope = self.rope.published()
        scaling = rope["rope_scaling"] or {"type": "default"}
        return {
            "num_key_value_heads": self.num_attention_heads,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "rope_parameters": scaling | {"rope_theta": rope["rope_theta"]},
        }

    def prediction(self) -> Self:
        """See :meth:`deepseek_v3_config.Config.prediction`; the layer has an indexer."""
        return replace(super().prediction(), indexer_types=())

    def name_rules(self) -> NameRules:
        """See :meth:`deepseek_v3_config.Config.name_rules`; an indexer of a layer that takes
        another one's choice is dropped."""
        rules = super().name_rules()
        shared = [i for i, kind in enumerate(self.indexer_types) if kind == SHARED]
        unread = rf"model\.layers\.({'|'.join(map(str, shared))})\.self_attn\.indexer\..*"
        return replace(rules, drops=(*rules.drops, unread)) if shared else rules


def _indexer_types(config: dict[str, Any], file: Path | str) -> list[str]:
    """Return the kind of every layer, or nothing if all have an indexer.

    Raises:
        ConfigError: A list has another length than there are layers or names no kind, two keys
            contradict each other, or the first layer has no indexer.
    """
    layers, given = count_of(config, file), {}
    for key in ("indexer_types", "index_topk_pattern"):
        kinds = config.get(key)
        if kinds is None or kinds == []:
            continue
        if not isinstance(kinds, (list, str)) or len(kinds) < layers:
            raise ConfigError(f"{file}: '{key}' must name a kind for each of {layers} layers.")
        kinds = [_LETTERS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        if len(kinds) > layers or any(kind not in (FULL, SHARED) for kind in kinds):
            raise ConfigError(
                f"{file}: '{key}' is {config[key]!r}; expected '{FULL}' or '{SHARED}' for each of "
                f"{layers} layers."
            )
        given[key] = kinds
    every, offset = (_number(config, key, file) for key in (_EVERY, _OFFSET))
    if every is not None and every > 1 and (not given or offset is not None):
        distances = (max(i - (2 if offset is None else offset) + 1, 0) for i in range(layers))
        given[_EVERY] = [SHARED if n % every else FULL for n in distances]
    (kinds, *others) = given.values() or [[FULL]]
    if any(other != kinds for other in others):
        raise ConfigError(f"{file}: {' and '.join(map(repr, given))} differ; keep one.")
    if kinds[0] == SHARED:
        raise ConfigError(f"{file}: {next(iter(given))!r} gives the first layer no indexer.")
    return kinds if SHARED in kinds else []


def _number(config: dict[str, Any], key: str, file: Path | str) -> int | None:
    """Return a number of layers in config.json, or None if the key is absent."""
    value = config.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise ConfigError(f"{file}: '{key}' is {value!r}, expected a number of layers.")
    return value
