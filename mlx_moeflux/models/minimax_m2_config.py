"""config.json of MiniMax-M2: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import only
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, NameRules
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.config import AttentionConfig


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """The keys of config.json that this architecture uses; ``intermediate_size`` is an expert's.

    Source of the defaults: transformers' `MiniMaxM2Config`.
    """

    intermediate_size: int
    num_local_experts: int

    MODEL_TYPE, ARCHITECTURE = "minimax_m2", "MiniMaxM2ForCausalLM"
    # Multi-token prediction, training, and keys that are checked below.
    INERT: ClassVar[frozenset[str]] = frozenset(
        ["attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "rotary_dim"]
    )
    COMPUTED: ClassVar[dict[str, Any]] = {
        "scoring_func": "sigmoid",
        "qk_norm_type": "per_layer",
        "use_qk_norm": True,
        "use_routing_bias": True,
    }
    NAMES: ClassVar[NameRules] = NameRules(
        renames=(
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.experts\.(\d{1,9})\.w1\.", r".experts.\1.gate_proj."),
            (r"\.experts\.(\d{1,9})\.w3\.", r".experts.\1.up_proj."),
            (r"\.experts\.(\d{1,9})\.w2\.", r".experts.\1.down_proj."),
        ),
        experts=EXPERT_NAMES,
    )
    THETA: ClassVar[float] = 5e6
    EXPERTS_KEY: ClassVar[str] = "num_local_experts"

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.from_dict`."""
        parsed = super().from_dict(config, file=file, strict=strict)
        kinds, layers = config.get("attn_type_list"), parsed.num_hidden_layers
        if kinds is None:
            return parsed
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ConfigError(
                f"{file}: 'attn_type_list' must list {layers} layers, one number each."
            )
        for kind in kinds:
            only(file, "attn_type_list", kind, 1)
        return parsed

    @classmethod
    def ropes(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.ropes`."""
        return _with_rotary_dim(super().ropes(config, file), config, file)

    @property
    def num_experts(self) -> int:
        return self.num_local_experts

    @property
    def moe_intermediate_size(self) -> int:
        return self.intermediate_size

    @property
    def rotary_dims(self) -> int:
        return round(self.head_dim * self.partial_rotary_factor)

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        keys = super().published()
        del keys["partial_rotary_factor"]
        # mlx-lm requires these keys.
        return keys | {"rotary_dim": self.rotary_dims, "shared_intermediate_size": 0}


def _with_rotary_dim(
    keys: dict[str, Any], config: dict[str, Any], file: Path | str
) -> dict[str, Any]:
    """Return `keys` with ``rotary_dim``, the published spelling, as ``partial_rotary_factor``."""
    rotary, width = config.get("rotary_dim"), config.get("head_dim")
    if rotary is None or not isinstance(width, int) or width < 1:
        return keys
    if type(rotary) is not int or not 0 < rotary <= width:
        raise ConfigError(f"{file}: 'rotary_dim' is {rotary!r}, expected 1 to {width}.")
    elsewhere = "partial_rotary_factor" in config or "partial_rotary_factor" in (
        config.get("rope_parameters") or {}
    )
    if elsewhere and round(keys["partial_rotary_factor"] * width) != rotary:
        raise ConfigError(
            f"{file}: 'rotary_dim' is {rotary} and 'partial_rotary_factor' "
            f"{keys['partial_rotary_factor']} of {width}; keep one."
        )
    return keys | {"partial_rotary_factor": rotary / width}
