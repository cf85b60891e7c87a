"""config.json of Qwen3-Next: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from mlx_moeflux.models import qwen3_5_moe_config
from mlx_moeflux.models.config import FULL, AttentionConfig, SteppedExpertsConfig
from mlx_moeflux.models.qwen3_5_moe_config import LINEAR


@dataclass(frozen=True, kw_only=True)
class Config(SteppedExpertsConfig, qwen3_5_moe_config.Config):
    """The keys of config.json that this architecture uses, without a wrapper.

    Source of the defaults: transformers' `Qwen3NextConfig`.
    """

    MODEL_TYPE, ARCHITECTURE = "qwen3_next", "Qwen3NextForCausalLM"

    intermediate_size: int = 5632

    @classmethod
    def read_keys(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.read_keys`; layers may be
        dense."""
        return config

    def prediction(self) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.prediction`; the layer has experts."""
        return replace(super().prediction(), mlp_only_layers=(), decoder_sparse_step=1)

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        kinds = [LINEAR if self.is_linear(i) else FULL for i in range(self.num_hidden_layers)]
        return AttentionConfig.published(self) | {"layer_types": kinds}
