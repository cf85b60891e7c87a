"""Kimi-K2.5 and K2.6: the text model of a vision-language wrapper, which is DeepSeek-V3's.

Source: transformers 5.23 `models/kimi_k25/modeling_kimi_k25.py`.
Checkpoints: int4 of compressed-tensors as published, mlx-community: Kimi-K2.5, K2.6.
"""

from __future__ import annotations

from typing import Any

from mlx_moeflux.models import deepseek_v3
from mlx_moeflux.models.kimi_k25_config import Config


class Model(deepseek_v3.Model):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "kimi_k25"
    MLX_LM_PREFIX = "language_model."

    @classmethod
    def mlx_lm_keys(cls, config: Config) -> dict[str, Any]:
        """See :meth:`DecoderModel.mlx_lm_keys`; mlx-lm reads ``text_config`` as it is."""
        return {}
