"""config.json of Kimi-K2.5 and K2.6: DeepSeek-V3's text model in a wrapper. No MLX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import only
from mlx_moeflux.checkpoint.names import NameRules
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models import deepseek_v3_config
from mlx_moeflux.models.config import WRAPPER_PREFIXES, unwrapped

TEXT_TYPES = ("deepseek_v3", "kimi_k2")


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_v3_config.Config):
    """The keys of ``text_config`` that this architecture uses.

    Source: transformers' `Kimi_K25Config`, whose text model is DeepSeek-V3's.
    """

    # Of the wrapper: images and videos.
    INERT: ClassVar[frozenset[str]] = deepseek_v3_config.Config.INERT | {
        "vision_config",
        "media_placeholder_token_id",
        "use_unified_vision_chunk",
        "video_placeholder",
        "ignore_index",
        "projection_hidden_size",
        "projection_layer_norm_eps",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    }

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.from_dict`; reads ``text_config``."""
        inner = config.get("text_config")
        if not isinstance(inner, dict):
            raise ConfigError(f"{file}: 'text_config' is {inner!r}, expected an object.")
        kind = inner.get("model_type", TEXT_TYPES[0])
        if kind not in TEXT_TYPES:
            only(file, "text_config.model_type", kind, TEXT_TYPES[0])
        return super().from_dict(unwrapped(config), file=file, strict=strict)

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json in the wrapper's form."""
        return {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "eos_token_id": self.vocab_size - 1,
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": super().published(),
        }

    def name_rules(self) -> NameRules:
        """See :meth:`deepseek_v3_config.Config.name_rules`; tensors of images are dropped."""
        rules = super().name_rules()
        images = r"(model\.)?(vision_tower|mm_projector)\..*"
        return replace(rules, prefixes=WRAPPER_PREFIXES, drops=(images, *rules.drops))
