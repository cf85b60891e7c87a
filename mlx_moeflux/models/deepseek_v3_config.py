"""config.json of DeepSeek-V3: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import check_groups, only, positive
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, ROTARY_BUFFERS, NameRules
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.config import BaseConfig
from mlx_moeflux.models.rope import Rope, positions_of
from mlx_moeflux.state_arrays import LATENT, EntrySpec


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """The keys of config.json that this architecture uses.

    Source of the defaults: transformers' `DeepseekV3Config`.
    """

    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    rope: Rope
    n_shared_experts: int | None = 1
    routed_scaling_factor: float = 2.5
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_group: int = 8
    topk_group: int = 4
    first_k_dense_replace: int = 3
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 1
    rope_interleave: bool = True
    attention_bias: bool = False

    MODEL_TYPE, ARCHITECTURE = "deepseek_v3", "DeepseekV3ForCausalLM"
    INERT: ClassVar[frozenset[str]] = frozenset(
        [
            "num_key_value_heads",
            "qk_head_dim",
            "head_dim",
            "moe_layer_freq",
            "scoring_func",
            "topk_method",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
        ]
    )
    DEFAULT_THETA: ClassVar[float] = 10000.0
    EXPERTS_KEY: ClassVar[str] = "n_routed_experts"
    LAYER_KEYS: ClassVar[tuple[str, ...]] = ("num_hidden_layers", "num_nextn_predict_layers")
    MAY_BE_ZERO: ClassVar[frozenset[str]] = frozenset(
        ["first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"]
    )

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Self:
        """Read config.json.

        Raises:
            ConfigError: A key is missing, wrong, contradictory or (when `strict`) unknown.
            UnsupportedError: The checkpoint uses something this architecture does not compute.
        """
        positions = positions_of(config)
        rope = Rope.from_config(config, file, theta=cls.DEFAULT_THETA, positions=positions)
        keys = config | {"rope": rope} | rope.reach(positions)
        parsed = cls.parse(keys, file=file, strict=strict)
        only(file, "moe_layer_freq", config.get("moe_layer_freq", 1), 1)
        only(file, "scoring_func", config.get("scoring_func", "sigmoid"), "sigmoid")
        only(file, "topk_method", config.get("topk_method", "noaux_tc"), "noaux_tc")
        if parsed.q_lora_rank is not None:
            positive(parsed, file, "q_lora_rank")
        check_groups(parsed, file)
        if parsed.qk_rope_head_dim % 2:
            raise ConfigError(f"{file}: 'qk_rope_head_dim' {parsed.qk_rope_head_dim} is odd.")
        return parsed

    @property
    def num_experts(self) -> int:
        return self.n_routed_experts

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the shared experts together."""
        return self.moe_intermediate_size * (self.n_shared_experts or 0)

    def is_sparse(self, layer: int) -> bool:
        """Return True if `layer` has a MoE block, False if it has a dense MLP."""
        return layer >= self.first_k_dense_replace

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        keys = super().published() | self.rope.published()
        del keys["rope"]
        return keys

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

    def state(self, layer: int, dtype: str) -> EntrySpec:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.state`."""
        return LATENT.spec(dtype, keys=(1, self.kv_lora_rank), values=(1, self.qk_rope_head_dim))
