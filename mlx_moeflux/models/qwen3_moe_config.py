"""config.json of Qwen3-MoE: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.config import AttentionConfig, SteppedExpertsConfig, with_head_dim


@dataclass(frozen=True, kw_only=True)
class Config(SteppedExpertsConfig, AttentionConfig):
    """The keys of config.json that this architecture uses.

    Source of the defaults: transformers' `Qwen3MoeConfig`.
    """

    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    norm_topk_prob: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    attention_bias: bool = False

    MODEL_TYPE, ARCHITECTURE = "qwen3_moe", "Qwen3MoeForCausalLM"
    # No implementation reads max_window_layers: all layers have the window or none has.
    INERT: ClassVar[frozenset[str]] = frozenset(["max_window_layers", "num_local_experts"])
    COMPUTED: ClassVar[dict[str, Any]] = {"use_qk_norm": True}

    @classmethod
    def read_keys(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.read_keys`."""
        keys = with_head_dim(config)
        if keys.get("num_experts") is None:
            return keys | {"num_experts": keys.get("num_local_experts")}
        return keys

    def check(self, file: Path | str) -> None:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.check`."""
        super().check(file)
        if self.window is not None and self.window < 1:
            raise ConfigError(f"{file}: 'sliding_window' is {self.window}, must be positive.")

    @property
    def window(self) -> int | None:
        """Sliding window in tokens, the current one included; None for full attention."""
        return self.sliding_window if self.use_sliding_window else None

    @property
    def windowed(self) -> bool:
        """See :attr:`BaseConfig.windowed`."""
        return self.window is not None
