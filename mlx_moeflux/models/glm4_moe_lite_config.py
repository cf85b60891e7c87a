"""config.json of GLM-4.7-Flash: DeepSeek-V3's keys with other defaults. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.checkpoint.config import only
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models import deepseek_v3_config
from mlx_moeflux.models.rope import rope_parameters

DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_v3_config.Config):
    """The keys of config.json that this architecture uses.

    Source of the defaults: transformers' `Glm4MoeLiteConfig`.
    """

    routed_scaling_factor: float = 1.8
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1

    MODEL_TYPE, ARCHITECTURE = "glm4_moe_lite", "Glm4MoeLiteForCausalLM"
    INERT: ClassVar[frozenset[str]] = deepseek_v3_config.Config.INERT | {
        "mlp_layer_types",
        "partial_rotary_factor",
    }

    @classmethod
    def read_keys(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.read_keys`; ``mlp_layer_types``
        and ``first_k_dense_replace`` say the same."""
        whole_heads(config, file)
        kinds = config.get("mlp_layer_types")
        if kinds is None:
            return config
        return config | {"first_k_dense_replace": dense_layers(kinds, config, file)}


def whole_heads(config: dict[str, Any], file: Path | str) -> None:
    """Raise :class:`UnsupportedError` if the rope turns a part of a head."""
    found = rope_parameters(config, file, ("partial_rotary_factor",))
    only(file, "partial_rotary_factor", found.get("partial_rotary_factor", 1.0), 1.0)


def dense_layers(kinds: Any, config: dict[str, Any], file: Path | str) -> int:
    """Return the number of dense layers, which come first in the list `kinds`."""
    if not isinstance(kinds, list) or len(kinds) != config.get("num_hidden_layers"):
        raise ConfigError(f"{file}: 'mlp_layer_types' must list 'num_hidden_layers' layers.")
    dense = kinds.count(DENSE)
    if kinds != [DENSE] * dense + [SPARSE] * (len(kinds) - dense):
        only(file, "mlp_layer_types", kinds, "dense layers, then sparse ones")
    if config.get("first_k_dense_replace", dense) != dense:
        raise ConfigError(
            f"{file}: 'first_k_dense_replace' is {config['first_k_dense_replace']}, "
            f"'mlp_layer_types' has {dense} dense layers; keep one."
        )
    return dense
