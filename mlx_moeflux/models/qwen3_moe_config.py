"""config.json of Qwen3-MoE: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.checkpoint.config import only
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.config import AttentionConfig, with_head_dim
from mlx_moeflux.models.rope import rope_keys


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """The keys of config.json that this architecture uses.

    Source of the defaults: transformers' `Qwen3MoeConfig`.
    """

    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    attention_bias: bool = False

    MODEL_TYPE, ARCHITECTURE = "qwen3_moe", "Qwen3MoeForCausalLM"
    # No implementation reads max_window_layers: all layers have the window or none has.
    INERT: ClassVar[frozenset[str]] = frozenset(
        ["max_window_layers", "rope_scaling", "rope_parameters", "use_qk_norm", "num_local_experts"]
    )

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Config:
        """Read config.json.

        Raises:
            ConfigError: A key is missing, wrong, contradictory or (when `strict`) unknown.
            UnsupportedError: The checkpoint uses something this architecture does not compute.
        """
        keys = with_head_dim(config | rope_keys(config, file, partial=1.0))
        if keys.get("num_experts") is None:
            keys["num_experts"] = keys.get("num_local_experts")
        parsed = cls.parse(keys, file=file, strict=strict)
        only(file, "use_qk_norm", keys.get("use_qk_norm", True), True)
        if parsed.window is not None and parsed.window < 1:
            raise ConfigError(f"{file}: 'sliding_window' is {parsed.window}, must be positive.")
        return parsed

    def is_sparse(self, layer: int) -> bool:
        """Return True if `layer` has a MoE block, False if it has a dense MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def window(self) -> int | None:
        """Sliding window in tokens, the current one included; None for full attention."""
        return self.sliding_window if self.use_sliding_window else None

    @property
    def windowed(self) -> bool:
        """See :attr:`BaseConfig.windowed`."""
        return self.window is not None
