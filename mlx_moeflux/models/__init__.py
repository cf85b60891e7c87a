"""Registry of architectures: `model_type` of config.json -> module. Configs need no MLX."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moeflux.checkpoint.files import read_json_object
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.head import is_tied
from mlx_moeflux.models.other_models import refuse_draft_head, refuse_unknown

if TYPE_CHECKING:
    from mlx_moeflux.checkpoint.names import MappedTensors
    from mlx_moeflux.checkpoint.source import Checkpoint

# model_type -> module in this package; the config is in NAME_config. Adding an architecture is two
# files, one line here and its shapes in data/shapes.json.
MODEL_TYPES = {
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "joyai_llm_flash": "deepseek_v3",
    "glm4_moe": "glm4_moe",
    "minimax_m2": "minimax_m2",
    "kimi_k25": "kimi_k25",
    "glm4_moe_lite": "glm4_moe_lite",
    "gpt_oss": "gpt_oss",
    "qwen4_exp": "qwen4_exp",
    "qwen4_exp_text": "qwen4_exp",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "laguna": "laguna",
    "deepseek_v32": "deepseek_v32",
    "glm_moe_dsa": "glm_moe_dsa",
}


def model_class(model_type: Any, *, file: Any = "config.json") -> type:
    """Return the ``Model`` class of a `model_type`.

    Raises:
        UnsupportedError: The architecture is not supported.
    """
    return _module(model_type, file).Model


def config_class(model_type: Any, *, file: Any = "config.json") -> type:
    """Return the ``Config`` class of a `model_type`, without MLX.

    Raises:
        UnsupportedError: The architecture is not supported.
    """
    return _module(model_type, file, "_config").Config


def check_kind(directory: Path) -> None:
    """Look at config.json of a directory, if it has one, before anything else of it is read.

    Raises:
        UnsupportedError: It is none of a model that is computed here.
    """
    file = directory / "config.json"
    if file.is_file():
        check_config(read_json_object(file, error=ConfigError), file=file)


def check_config(config: Mapping[str, Any], *, file: Any) -> None:
    """Raise :class:`UnsupportedError`, which says what it is and who runs it, if `config` is none
    of a model that is computed here."""
    refuse_draft_head(config, file)
    refuse_unknown(config, MODEL_TYPES, file)


def _module(model_type: Any, file: Any, suffix: str = "") -> Any:
    refuse_unknown({"model_type": model_type}, MODEL_TYPES, file)
    return importlib.import_module(f"{__name__}.{MODEL_TYPES[model_type]}{suffix}")


def map_checkpoint(checkpoint: Checkpoint) -> MappedTensors:
    """Return a checkpoint's tensors under the parameter names of its model. An unknown key of
    config.json is no error: it changes no name.

    Raises:
        MoefluxError: The config or the tensor names belong to no supported model.
    """
    return checkpoint.mapped(read_config(checkpoint, strict=False).name_rules())


def read_config(checkpoint: Checkpoint, *, strict: bool = True) -> Any:
    """Return a checkpoint's config, in which ``tie_word_embeddings`` says what the weights say.

    Warns if config.json says something else. strict: An unknown key is an error.

    Raises:
        ConfigError, UnsupportedError: See :func:`parsed_config`.
        CheckpointError: The embedding and the head cannot be read.
    """
    config = parsed_config(checkpoint, strict=strict)
    tied = is_tied(checkpoint, config)
    if tied == config.tie_word_embeddings:
        return config
    stored = "no other head is" if tied else "a head with other values is"
    warnings.warn(
        f"{checkpoint.config_file}: 'tie_word_embeddings' is {not tied}, but {stored} stored; the "
        f"{'embedding' if tied else 'stored head'} is used.",
        stacklevel=2,
    )
    return dataclasses.replace(config, tie_word_embeddings=tied)


def parsed_config(checkpoint: Checkpoint, *, strict: bool = True) -> Any:
    """Return a checkpoint's config as config.json has it. strict: An unknown key is an error.

    Raises:
        ConfigError: A key is missing, wrong or unknown, or there are more layers than tensors.
        UnsupportedError: The architecture is not supported.
    """
    file = checkpoint.config_file
    check_config(checkpoint.config, file=file)
    kind = config_class(checkpoint.config["model_type"], file=file)
    config = kind.from_dict(checkpoint.config, file=file, strict=strict)
    tensors = len(checkpoint.tensors)
    for name in config.LAYER_KEYS:
        if (layers := getattr(config, name)) > tensors:
            raise ConfigError(
                f"{file}: '{name}' is {layers}, but the files have {tensors} tensors; config.json "
                "and the weights are of different models."
            )
    return config
