"""config.json of Qwen3.5-MoE: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import divides, only
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, NameRules
from mlx_moeflux.models.config import (
    FULL,
    WRAPPER_PREFIXES,
    AttentionConfig,
    check_layer_types,
    unwrapped,
)
from mlx_moeflux.state_arrays import RECURRENT, EntrySpec

LINEAR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """The keys of config.json that this architecture uses.

    Source of the defaults: transformers' `Qwen3_5MoeTextConfig`.
    """

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    layer_types: tuple[str, ...] = ()
    full_attention_interval: int = 4
    norm_topk_prob: bool = True
    attention_bias: bool = False
    attn_output_gate: bool = True

    MODEL_TYPE, ARCHITECTURE = "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"
    # Unused at inference: multi-token prediction, training, images, and position sections, which
    # coincide for text.
    INERT: ClassVar[frozenset[str]] = frozenset(
        [
            "vision_config",
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            "vision_end_token_id",
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
            "mamba_ssm_dtype",
            "mlp_only_layers",
            "decoder_sparse_step",
            "intermediate_size",
            "language_model_only",
        ]
    )
    ROTARY_FACTOR: ClassVar[float] = 0.25
    NAMES: ClassVar[NameRules] = NameRules(
        prefixes=WRAPPER_PREFIXES,
        drops=(r"(model\.)?(visual|vision_tower)\..*",),
        experts=EXPERT_NAMES,
        prediction_module=True,
    )

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.from_dict`; plain or wrapped in
        ``text_config``."""
        return super().from_dict(unwrapped(config), file=file, strict=strict)

    @classmethod
    def read_keys(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.read_keys`; every layer has experts."""
        only(file, "mlp_only_layers", config.get("mlp_only_layers") or [], [])
        only(file, "decoder_sparse_step", config.get("decoder_sparse_step", 1), 1)
        return config

    def check(self, file: Path | str) -> None:
        """See :meth:`BaseConfig.check`."""
        super().check(file)
        only(file, "attention_bias", self.attention_bias, False)
        only(file, "attn_output_gate", self.attn_output_gate, True)
        divides(self, file, "linear_num_key_heads", "linear_num_value_heads")
        check_layer_types(self, file, LINEAR, FULL)

    def is_linear(self, layer: int) -> bool:
        """Return True if `layer` is a gated delta net, False if it is gated attention."""
        if self.layer_types:
            return self.layer_types[layer] == LINEAR
        return (layer + 1) % self.full_attention_interval != 0

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    def prediction(self) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.prediction`; the layer is of full
        attention."""
        return replace(self, num_hidden_layers=1, layer_types=(FULL,))

    def state(self, layer: int, dtype: str) -> EntrySpec:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.state`."""
        if not self.is_linear(layer):
            return super().state(layer, dtype)
        return RECURRENT.spec(dtype, **self.delta_arrays())

    def delta_arrays(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a delta net's state, of one sequence."""
        heads = self.linear_num_value_heads, self.linear_value_head_dim, self.linear_key_head_dim
        return {"conv": (self.linear_conv_kernel_dim - 1, self.conv_dim), "delta": heads}

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json in the vision-language wrapper's form."""
        text = asdict(self)
        del text["yarn"]
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": text.pop("rope_theta"),
            "partial_rotary_factor": text.pop("partial_rotary_factor"),
        }
        if self.yarn is not None:
            scaling = self.yarn.published()["rope_scaling"]
            text["rope_parameters"] |= {k: v for k, v in scaling.items() if k != "type"}
            text["rope_parameters"]["rope_type"] = "yarn"
        text["layer_types"] = [
            LINEAR if self.is_linear(i) else FULL for i in range(self.num_hidden_layers)
        ]
        text["model_type"] = "qwen3_5_moe_text"
        return {
            "architectures": [self.ARCHITECTURE],
            "model_type": self.MODEL_TYPE,
            "eos_token_id": self.vocab_size - 1,
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": text,
        }
