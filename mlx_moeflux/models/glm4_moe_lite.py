"""GLM-4.7-Flash: DeepSeek-V3's layers with other widths.

Source: transformers 5.23 `models/glm4_moe_lite/modeling_glm4_moe_lite.py`.
Checkpoints: Hugging Face originals, mlx-lm and mlx-community: GLM-4.7-Flash.
"""

from __future__ import annotations

from mlx_moeflux.models import deepseek_v3
from mlx_moeflux.models.glm4_moe_lite_config import Config


class Model(deepseek_v3.Model):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "glm4_moe_lite"
