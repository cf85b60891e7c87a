"""Registry of architectures: `model_type` of config.json -> module."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mlx_moeflux.errors import UnsupportedError

if TYPE_CHECKING:
    from mlx_moeflux.checkpoint.names import MappedTensors
    from mlx_moeflux.checkpoint.source import Checkpoint

# model_type -> module in this package. Adding an architecture is one file and one line here.
MODEL_TYPES = {
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
}


def model_class(model_type: Any, *, file: Any = "config.json") -> type:
    """Return the ``Model`` class of a `model_type`.

    Raises:
        UnsupportedError: The architecture is not supported.
    """
    if model_type not in MODEL_TYPES:
        raise UnsupportedError(
            f"{file}: model_type {model_type!r} is not one of {', '.join(MODEL_TYPES)}."
        )
    return importlib.import_module(f"{__name__}.{MODEL_TYPES[model_type]}").Model


def map_checkpoint(checkpoint: Checkpoint) -> MappedTensors:
    """Return a checkpoint's tensors under the parameter names of its model.

    Raises:
        MoefluxError: The config or the tensor names belong to no supported model.
    """
    kind = model_class(checkpoint.config.get("model_type"), file=checkpoint.config_file)
    config = kind.Config.from_dict(checkpoint.config, file=checkpoint.config_file)
    return checkpoint.mapped(kind.name_rules(config))
