"""config.json of Qwen3-MoE: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.checkpoint.config import divides, only, parse_config, positive
from mlx_moeflux.checkpoint.files import is_positive
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, NameRules
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.rope import Rope, rope_keys, stretched
from mlx_moeflux.models.state_sizes import kv_bytes


@dataclass(frozen=True, kw_only=True)
class Config:
    """The keys of config.json that this architecture uses.

    Source of the defaults: transformers' `Qwen3MoeConfig`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    max_position_embeddings: int
    yarn: Rope | None = None
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"

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
        keys = config | rope_keys(config, file, partial=1.0)
        width, heads = keys.get("hidden_size"), keys.get("num_attention_heads")
        if keys.get("head_dim") is None and is_positive(width) and is_positive(heads):
            keys["head_dim"] = width // heads
        if keys.get("num_experts") is None:
            keys["num_experts"] = keys.get("num_local_experts")
        parsed = parse_config(cls, keys, file=file, inert=cls.INERT, strict=strict)
        only(file, "hidden_act", parsed.hidden_act, "silu")
        only(file, "use_qk_norm", keys.get("use_qk_norm", True), True)
        sizes = [n for n, kind in cls.__annotations__.items() if kind in ("int", "float")]
        positive(parsed, file, *sizes)
        divides(parsed, file, "num_key_value_heads", "num_attention_heads")
        if parsed.num_experts_per_tok > parsed.num_experts:
            raise ConfigError(
                f"{file}: 'num_experts_per_tok' {parsed.num_experts_per_tok} is more than "
                f"'num_experts' {parsed.num_experts}."
            )
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
    def rotary_dims(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        return kind | stretched(self, asdict(self)) | {"eos_token_id": self.vocab_size - 1}

    def name_rules(self) -> NameRules:
        """Return the rename rules of tensor names."""
        return NameRules(experts=EXPERT_NAMES)

    def state_bytes(self, positions: int) -> int:
        """Return the bytes of a sequence's keys and values after so many tokens, in bfloat16."""
        return self.num_hidden_layers * kv_bytes(positions, self.num_key_value_heads, self.head_dim)


_PUBLISHED = Config(
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    partial_rotary_factor=1.0,
    max_position_embeddings=40960,
    norm_topk_prob=True,
)

SHAPES = {
    "qwen3-30b-a3b": _PUBLISHED,
    "qwen3-235b-a22b": replace(
        _PUBLISHED,
        hidden_size=4096,
        num_hidden_layers=94,
        num_attention_heads=64,
        intermediate_size=12288,
        moe_intermediate_size=1536,
    ),
    "qwen3-coder-30b-a3b": replace(_PUBLISHED, rope_theta=1e7, max_position_embeddings=262144),
    "qwen3-tiny": replace(
        _PUBLISHED,
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=8192,
    ),
}
"""Published shapes by name."""
