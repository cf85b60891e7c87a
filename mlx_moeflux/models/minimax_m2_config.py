"""config.json of MiniMax-M2: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.checkpoint.config import only
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, NameRules
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.config import AttentionConfig
from mlx_moeflux.models.rope import rope_keys


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """The keys of config.json that this architecture uses; ``intermediate_size`` is an expert's.

    Source of the defaults: transformers' `MiniMaxM2Config`.
    """

    intermediate_size: int
    num_local_experts: int

    MODEL_TYPE, ARCHITECTURE = "minimax_m2", "MiniMaxM2ForCausalLM"
    # Multi-token prediction, training, and choices that have one value (checked below).
    INERT: ClassVar[frozenset[str]] = frozenset(
        [
            "attn_type_list",
            "mtp_transformer_layers",
            "num_mtp_modules",
            "use_mtp",
            "qk_norm_type",
            "use_qk_norm",
            "use_routing_bias",
            "scoring_func",
            "rotary_dim",
            "rope_scaling",
            "rope_parameters",
        ]
    )
    EXPERTS_KEY: ClassVar[str] = "num_local_experts"

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Config:
        """Read config.json.

        Raises:
            ConfigError: A key is missing, wrong, contradictory or (when `strict`) unknown.
            UnsupportedError: The checkpoint uses something this architecture does not compute.
        """
        keys = {k: v for k, v in config.items() if v is not None}
        keys |= rope_keys({"rope_theta": 5e6} | keys, file, partial=1.0)
        parsed = cls.parse(_with_rotary_dim(keys, config, file), file=file, strict=strict)
        only(file, "scoring_func", config.get("scoring_func", "sigmoid"), "sigmoid")
        only(file, "qk_norm_type", config.get("qk_norm_type", "per_layer"), "per_layer")
        for name in ("use_qk_norm", "use_routing_bias"):
            only(file, name, config.get(name, True), True)
        parsed._check_layers(config.get("attn_type_list"), file)
        return parsed

    def _check_layers(self, kinds: Any, file: Path | str) -> None:
        if kinds is None:
            return
        if not isinstance(kinds, list) or len(kinds) != self.num_hidden_layers:
            raise ConfigError(
                f"{file}: 'attn_type_list' must list {self.num_hidden_layers} layers, one number "
                "each."
            )
        for kind in kinds:
            only(file, "attn_type_list", kind, 1)

    @property
    def num_experts(self) -> int:
        return self.num_local_experts

    @property
    def moe_intermediate_size(self) -> int:
        return self.intermediate_size

    @property
    def rotary_dims(self) -> int:
        return round(self.head_dim * self.partial_rotary_factor)

    def is_sparse(self, layer: int) -> bool:
        """Return True: every layer has a MoE block."""
        return True

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        keys = super().published()
        del keys["partial_rotary_factor"]
        # mlx-lm requires these keys.
        return keys | {"rotary_dim": self.rotary_dims, "shared_intermediate_size": 0}

    def name_rules(self) -> NameRules:
        """Return the rename rules of tensor names."""
        renames = (
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.experts\.(\d{1,9})\.w1\.", r".experts.\1.gate_proj."),
            (r"\.experts\.(\d{1,9})\.w3\.", r".experts.\1.up_proj."),
            (r"\.experts\.(\d{1,9})\.w2\.", r".experts.\1.down_proj."),
        )
        return NameRules(renames=renames, experts=EXPERT_NAMES)


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
