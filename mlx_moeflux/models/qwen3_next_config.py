"""config.json of Qwen3-Next: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from mlx_moeflux.models import qwen3_5_moe_config
from mlx_moeflux.models.config import AttentionConfig
from mlx_moeflux.models.qwen3_5_moe_config import FULL, LINEAR


@dataclass(frozen=True, kw_only=True)
class Config(qwen3_5_moe_config.Config):
    """The keys of config.json that this architecture uses, without a wrapper.

    Source of the defaults: transformers' `Qwen3NextConfig`.
    """

    MODEL_TYPE, ARCHITECTURE = "qwen3_next", "Qwen3NextForCausalLM"

    intermediate_size: int = 5632
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1

    def _check_sparse(self, file: Path | str, raw: dict[str, Any]) -> None:
        """Accept any."""

    def is_sparse(self, layer: int) -> bool:
        """Return True if `layer` has a MoE block, False if it has a dense MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def prediction(self) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.prediction`; the layer has experts."""
        return replace(super().prediction(), mlp_only_layers=(), decoder_sparse_step=1)

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        kinds = [LINEAR if self.is_linear(i) else FULL for i in range(self.num_hidden_layers)]
        return AttentionConfig.published(self) | {"layer_types": kinds}
