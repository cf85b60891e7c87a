"""config.json of GLM-4.5, 4.6 and 4.7: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import (
    check_groups,
    only,
)
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, ROTARY_BUFFERS, NameRules
from mlx_moeflux.models.config import AttentionConfig, with_head_dim
from mlx_moeflux.models.rope import rope_keys


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """The keys of config.json that this architecture uses.

    Source of the defaults: transformers' `Glm4MoeConfig`.
    """

    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 1
    use_qk_norm: bool = False
    attention_bias: bool = False

    MODEL_TYPE, ARCHITECTURE = "glm4_moe", "Glm4MoeForCausalLM"
    INERT: ClassVar[frozenset[str]] = frozenset(
        ["rope_scaling", "rope_parameters", "scoring_func", "topk_method"]
    )
    EXPERTS_KEY: ClassVar[str] = "n_routed_experts"
    LAYER_KEYS: ClassVar[tuple[str, ...]] = ("num_hidden_layers", "num_nextn_predict_layers")
    MAY_BE_ZERO: ClassVar[frozenset[str]] = frozenset(
        ["first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"]
    )

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Config:
        """Read config.json.

        Raises:
            ConfigError: A key is missing, wrong, contradictory or (when `strict`) unknown.
            UnsupportedError: The checkpoint uses something this architecture does not compute.
        """
        keys = with_head_dim(config | rope_keys(config, file, partial=0.5))
        parsed = cls.parse(keys, file=file, strict=strict)
        only(file, "scoring_func", config.get("scoring_func", "sigmoid"), "sigmoid")
        only(file, "topk_method", config.get("topk_method", "noaux_tc"), "noaux_tc")
        check_groups(parsed, file)
        return parsed

    @property
    def num_experts(self) -> int:
        return self.n_routed_experts

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the shared experts together."""
        return self.moe_intermediate_size * self.n_shared_experts

    def is_sparse(self, layer: int) -> bool:
        """Return True if `layer` has a MoE block, False if it has a dense MLP."""
        return layer >= self.first_k_dense_replace

    def prediction(self) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.prediction`; the layer has experts."""
        return replace(
            self, num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0
        )

    def name_rules(self) -> NameRules:
        """Return the rename rules of tensor names; layers of multi-token prediction are none of
        the model's."""
        return NameRules(
            drops=(ROTARY_BUFFERS,),
            experts=EXPERT_NAMES,
            layers=self.num_hidden_layers,
            predictions=self.num_nextn_predict_layers,
        )
