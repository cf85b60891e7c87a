"""Run our models in mlx-lm's programs (server, evaluate, generate, chat ...).

``mlx_lm.stream_generate`` and ``mlx_lm.batch_generate`` take a model from ``mlx_moeflux.load``
directly. Programs that load a model by path, and files of ``save_prompt_cache``, need one call
first:

    from mlx_moeflux.mlx_lm_plugin import register_with_mlx_lm
    register_with_mlx_lm(expert_memory="50%")
    mlx_lm.server.main()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_moeflux.cache import AttentionCache, LatentCache, RecurrentCache
from mlx_moeflux.errors import UnsupportedError


def register_with_mlx_lm(**load_options: Any) -> None:
    """Make mlx-lm in this process load our architectures through our loader.

    load_options: Passed to ``mlx_moeflux.load_model``; a second call replaces them. mlx-lm still
    loads other architectures, sharded models and the tokenizer.

    Raises:
        UnsupportedError: mlx-lm is not installed.
    """
    register_cache_classes()
    from mlx_lm import utils

    from mlx_moeflux.loading import load_model as load_ours
    from mlx_moeflux.models import MODEL_TYPES

    # load() looks load_model up in its module at every call, so replacing that name reaches
    # programs that have imported load already.
    stock = getattr(utils.load_model, "stock", utils.load_model)

    def load_model(
        model_path: Path,
        lazy: bool = False,
        strict: bool = True,
        model_config: dict[str, Any] | None = None,
        **options: Any,
    ):
        config = utils.load_config(model_path)
        if config.get("model_type") not in MODEL_TYPES or not strict:
            return stock(model_path, lazy, strict, model_config, **options)
        if model_config:
            raise UnsupportedError(
                f"{model_path}: {', '.join(model_config)} cannot be overridden here; edit "
                "config.json instead."
            )
        return load_ours(model_path, **load_options), config

    load_model.stock = stock
    utils.load_model = load_model


def register_cache_classes() -> None:
    """Add our cache entries to the module where ``load_prompt_cache`` looks classes up.

    Raises:
        UnsupportedError: mlx-lm is not installed.
    """
    try:
        from mlx_lm.models import cache
    except ImportError as error:
        raise UnsupportedError("mlx-lm is not installed here; pip install mlx-lm.") from error
    for entry in (AttentionCache, LatentCache, RecurrentCache):
        setattr(cache, entry.__name__, entry)
