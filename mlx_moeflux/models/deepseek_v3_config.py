"""config.json of DeepSeek-V3: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.checkpoint.config import positive
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.config import GroupedExpertsConfig
from mlx_moeflux.models.rope import Rope, positions_of
from mlx_moeflux.state_arrays import LATENT, EntrySpec


@dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig):
    """The keys of config.json that this architecture uses.

    Source of the defaults: transformers' `DeepseekV3Config`.
    """

    rope: Rope
    routed_scaling_factor: float = 2.5
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_group: int = 8
    topk_group: int = 4
    first_k_dense_replace: int = 3
    rope_interleave: bool = True
    attention_bias: bool = False

    MODEL_TYPE, ARCHITECTURE = "deepseek_v3", "DeepseekV3ForCausalLM"
    INERT: ClassVar[frozenset[str]] = frozenset(["num_key_value_heads", "qk_head_dim", "head_dim"])
    COMPUTED: ClassVar[dict[str, Any]] = GroupedExpertsConfig.COMPUTED | {"moe_layer_freq": 1}

    @classmethod
    def ropes(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.ropes`."""
        positions = positions_of(config)
        rope = Rope.from_config(config, file, theta=1e4, positions=positions)
        return {"rope": rope} | rope.reach(positions)

    def check(self, file: Path | str) -> None:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.check`."""
        super().check(file)
        if self.q_lora_rank is not None:
            positive(self, file, "q_lora_rank")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"{file}: 'qk_rope_head_dim' {self.qk_rope_head_dim} is odd.")

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        keys = super().published() | self.rope.published()
        del keys["rope"]
        return keys

    def state(self, layer: int, dtype: str) -> EntrySpec:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.state`."""
        return LATENT.spec(dtype, keys=(1, self.kv_lora_rank), values=(1, self.qk_rope_head_dim))
