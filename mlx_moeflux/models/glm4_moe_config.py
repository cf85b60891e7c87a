"""config.json of GLM-4.5, 4.6 and 4.7: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.checkpoint.config import (
    check_groups,
    divides,
    not_negative,
    only,
    parse_config,
    positive,
)
from mlx_moeflux.checkpoint.files import is_positive
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, ROTARY_BUFFERS, NameRules, prediction_layers
from mlx_moeflux.models.rope import Rope, rope_keys, stretched
from mlx_moeflux.models.state_sizes import kv_bytes


@dataclass(frozen=True, kw_only=True)
class Config:
    """The keys of config.json that this architecture uses.

    Source of the defaults: transformers' `Glm4MoeConfig`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    max_position_embeddings: int
    yarn: Rope | None = None
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 1
    use_qk_norm: bool = False
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"

    INERT: ClassVar[frozenset[str]] = frozenset(
        ["rope_scaling", "rope_parameters", "scoring_func", "topk_method"]
    )
    EXPERTS_KEY: ClassVar[str] = "n_routed_experts"

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Config:
        """Read config.json.

        Raises:
            ConfigError: A key is missing, wrong, contradictory or (when `strict`) unknown.
            UnsupportedError: The checkpoint uses something this architecture does not compute.
        """
        keys = config | rope_keys(config, file, partial=0.5)
        width, heads = keys.get("hidden_size"), keys.get("num_attention_heads")
        if keys.get("head_dim") is None and is_positive(width) and is_positive(heads):
            keys["head_dim"] = width // heads
        parsed = parse_config(cls, keys, file=file, inert=cls.INERT, strict=strict)
        only(file, "hidden_act", parsed.hidden_act, "silu")
        only(file, "scoring_func", config.get("scoring_func", "sigmoid"), "sigmoid")
        only(file, "topk_method", config.get("topk_method", "noaux_tc"), "noaux_tc")
        maybe_zero = ("first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts")
        sizes = [n for n, kind in cls.__annotations__.items() if kind in ("int", "float")]
        positive(parsed, file, *(n for n in sizes if n not in maybe_zero))
        not_negative(parsed, file, *maybe_zero)
        divides(parsed, file, "num_key_value_heads", "num_attention_heads")
        check_groups(parsed, file)
        return parsed

    @property
    def num_experts(self) -> int:
        return self.n_routed_experts

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the shared experts together."""
        return self.moe_intermediate_size * self.n_shared_experts

    @property
    def rotary_dims(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def is_sparse(self, layer: int) -> bool:
        """Return True if `layer` has a MoE block, False if it has a dense MLP."""
        return layer >= self.first_k_dense_replace

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        kind = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
        return kind | stretched(self, asdict(self)) | {"eos_token_id": self.vocab_size - 1}

    def name_rules(self) -> NameRules:
        """Return the rename rules of tensor names; the layers of multi-token prediction are
        dropped."""
        drops = prediction_layers(self.num_hidden_layers, self.num_nextn_predict_layers)
        return NameRules(drops=(ROTARY_BUFFERS, *drops), experts=EXPERT_NAMES)

    def state_bytes(self, positions: int) -> int:
        """Return the bytes of a sequence's keys and values after so many tokens, in bfloat16."""
        return self.num_hidden_layers * kv_bytes(positions, self.num_key_value_heads, self.head_dim)


_PUBLISHED = Config(
    vocab_size=151552,
    hidden_size=5120,
    num_hidden_layers=92,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    num_experts_per_tok=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    partial_rotary_factor=0.5,
    max_position_embeddings=202752,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    use_qk_norm=True,
    attention_bias=True,
)

SHAPES = {
    "glm-4.6": _PUBLISHED,
    "glm-4.5-air": replace(
        _PUBLISHED,
        hidden_size=4096,
        num_hidden_layers=46,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        max_position_embeddings=131072,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        use_qk_norm=False,
    ),
    "glm-tiny": replace(
        _PUBLISHED,
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=32,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        max_position_embeddings=8192,
    ),
}
"""Published shapes by name."""
