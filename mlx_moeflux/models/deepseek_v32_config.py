"""config.json of DeepSeek-V3.2: DeepSeek-V3's keys and those of the indexer. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.checkpoint.config import only
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models import deepseek_v3_config
from mlx_moeflux.models.glm4_moe_lite_config import dense_layers
from mlx_moeflux.state_arrays import INDEXED_LATENT, EntrySpec

ATTENTION = "indexed_attention"


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_v3_config.Config):
    """The keys of config.json that this architecture uses.

    index_topk: Positions that a token sees at most. index_n_heads, index_head_dim: Of the indexer.
    indexer_rope_interleave: Neighbours of its heads turn together, as in mlx-lm; else dimensions
    half of the rotated width apart.

    Source of the defaults: transformers' `DeepseekV32Config`.
    """

    index_topk: int = 2048
    index_n_heads: int = 64
    index_head_dim: int = 128
    indexer_rope_interleave: bool = False

    MODEL_TYPE, ARCHITECTURE = "deepseek_v32", "DeepseekV32ForCausalLM"
    INERT: ClassVar[frozenset[str]] = deepseek_v3_config.Config.INERT | {
        "mlp_layer_types",
        "layer_types",
    }

    @classmethod
    def read_keys(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.read_keys`; ``mlp_layer_types``
        and ``first_k_dense_replace`` say the same."""
        layers = config.get("layer_types")
        if layers is not None:
            only(file, "layer_types", layers, [ATTENTION] * count_of(config, file))
        kinds = config.get("mlp_layer_types")
        if kinds is None:
            return config
        return config | {"first_k_dense_replace": dense_layers(kinds, config, file)}

    def check(self, file: Path | str) -> None:
        """See :meth:`BaseConfig.check`."""
        super().check(file)
        if self.q_lora_rank is None:
            raise ConfigError(f"{file}: 'q_lora_rank' is null; the indexer needs its rank.")
        only(file, "rope_interleave", self.rope_interleave, True)
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ConfigError(
                f"{file}: 'index_head_dim' {self.index_head_dim} is less than 'qk_rope_head_dim' "
                f"{self.qk_rope_head_dim}, of which it rotates as many."
            )

    def has_indexer(self, layer: int) -> bool:
        """Return True if `layer` chooses the positions that its tokens see."""
        return True

    def state(self, layer: int, dtype: str) -> EntrySpec:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.state`."""
        if not self.has_indexer(layer):
            return super().state(layer, dtype)
        latent, rotary = (1, self.kv_lora_rank), (1, self.qk_rope_head_dim)
        index = 1, self.index_head_dim
        return INDEXED_LATENT.spec(dtype, keys=latent, values=rotary, index_keys=index)


def count_of(config: dict[str, Any], file: Path | str) -> int:
    """Return ``num_hidden_layers``.

    Raises:
        ConfigError: It is no number of layers.
    """
    count = config.get("num_hidden_layers")
    if type(count) is not int or not 0 < count < MOST_LAYERS:
        raise ConfigError(f"{file}: 'num_hidden_layers' is {count!r}, expected a number of layers.")
    return count


MOST_LAYERS = 10_000
"""More than any model has."""
