"""Qwen3-MoE: attention with query and key norms in every layer, a MoE block in most.

Source: transformers 5.23 `models/qwen3_moe/modeling_qwen3_moe.py`, which is authoritative; mlx-lm
0.32.2 ignores the sliding window and computes full attention.
Checkpoints: Hugging Face originals, mlx-lm and mlx-community: 30B-A3B, 235B-A22B, Coder.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.cache import KVCache, SequenceState
from mlx_moeflux.checkpoint.config import divides, only, parse_config, positive
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.experts.compute import compute_scratch_bytes
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.decoder import DecoderLayer, DecoderModel
from mlx_moeflux.models.layers import DenseMlp
from mlx_moeflux.models.moe import SparseMoeBlock
from mlx_moeflux.models.rope import Rope, rope_keys, stretched


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
        if keys.get("head_dim") is None and keys.get("num_attention_heads"):
            keys["head_dim"] = keys.get("hidden_size", 0) // keys["num_attention_heads"]
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


class Model(DecoderModel):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "qwen3_moe"

    @classmethod
    def mlx_lm_keys(cls, config: Config) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_keys`."""
        return stretched(config, asdict(config))

    def make_layer(self, layer: int) -> DecoderLayer:
        """Build a layer of attention, then MoE block or dense MLP."""
        config, kernels = self.config, self._kernels
        if config.is_sparse(layer):
            mlp = SparseMoeBlock(
                layer=layer,
                hidden_size=config.hidden_size,
                num_experts=config.num_experts,
                router=self._router,
                kernels=kernels,
            )
        else:
            mlp = DenseMlp(config.hidden_size, config.intermediate_size, kernels)
        attention = Attention(config, kernels, window=config.window)
        return DecoderLayer(config, mixer=("self_attn", attention), mlp=mlp)

    def make_cache(self) -> SequenceState:
        """Return an empty state: one entry per layer."""
        return self.new_state(KVCache() for _ in self.layers)

    def activation_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that a call on `tokens` tokens of an empty state
        allocates.

        It adds residual stream, attention or dense MLP for one chunk (with attention scores, which
        stock MLX materialises on the CPU), and the experts' scratch.
        """
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        residual = 10 * tokens * config.hidden_size
        heads = config.num_attention_heads
        attention = chunk * heads * (8 * config.head_dim + 3 * tokens)
        dense = 3 * chunk * config.intermediate_size
        return 4 * (residual + max(attention, dense)) + compute_scratch_bytes()
