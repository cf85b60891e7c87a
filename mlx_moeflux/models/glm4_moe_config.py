"""config.json of GLM-4.5, 4.6 and 4.7: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.models.config import AttentionConfig, GroupedExpertsConfig, with_head_dim


@dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig, AttentionConfig):
    """The keys of config.json that this architecture uses.

    Source of the defaults: transformers' `Glm4MoeConfig`.
    """

    n_shared_experts: int = 1
    use_qk_norm: bool = False
    attention_bias: bool = False

    MODEL_TYPE, ARCHITECTURE = "glm4_moe", "Glm4MoeForCausalLM"
    ROTARY_FACTOR: ClassVar[float] = 0.5

    @classmethod
    def read_keys(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.read_keys`."""
        return with_head_dim(config)
