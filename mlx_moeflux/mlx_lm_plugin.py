"""Run our models in mlx-lm's programs (generate, benchmark, lora, evaluate, server, chat ...).

``mlx_lm.stream_generate`` and ``mlx_lm.batch_generate`` take a model from ``mlx_moeflux.load``
directly. Programs that load a model by path, and files of ``save_prompt_cache``, need one call
first:

    from mlx_moeflux.mlx_lm_plugin import register_with_mlx_lm
    register_with_mlx_lm(expert_memory="50%")
    mlx_lm.server.main()
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from mlx_moeflux.cache import (
    ENTRIES,
    AttentionCache,
    IndexedCache,
    IndexedLatentCache,
    LatentCache,
)
from mlx_moeflux.cache.kv import KV_BITS, quantized
from mlx_moeflux.checkpoint.quantization import GROUP_SIZES
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.installation import install_command
from mlx_moeflux.kernels.linear.quantised import FLOATS

# mlx-lm's own functions by name, kept when they are first replaced.
_stock: dict[str, Callable[..., Any]] = {}


def register_with_mlx_lm(**load_options: Any) -> None:
    """Make mlx-lm in this process load our architectures through our loader.

    load_options: Passed to ``mlx_moeflux.load_model``; a second call replaces them. mlx-lm still
    loads other architectures, sharded models and the tokenizer.

    Afterwards mlx-lm's loader raises :class:`~mlx_moeflux.errors.UnsupportedError` for a
    ``model_config`` that would change config.json, and its ``save_model``, which ``fuse`` calls,
    for a model with streamed experts. Its ``dequantize_model`` raises it for every model of ours.

    Raises:
        UnsupportedError: mlx-lm is not installed.
    """
    register_cache_classes()
    from mlx_lm import utils

    from mlx_moeflux.loading import load_model as load_ours
    from mlx_moeflux.models import MODEL_TYPES
    from mlx_moeflux.models.base import StreamingModel
    from mlx_moeflux.models.packed_parameters import EXPERTS

    # load() and save() look these up in their module at every call, so replacing the names reaches
    # programs that have imported load or save already.
    stock = _stock.setdefault("load_model", utils.load_model)
    stock_save = _stock.setdefault("save_model", utils.save_model)

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
        # generate and benchmark pass quantize_activations=False, which changes nothing.
        for key, value in (model_config or {}).items():
            if value != config.get(key) and (value or config.get(key)):
                raise UnsupportedError(
                    f"{model_path}: {key}={value!r} would override config.json, which this loader "
                    "takes as it is; leave it out."
                )
        return load_ours(model_path, **load_options), config

    def save_model(save_path: Path, model: Any, **options: Any) -> None:
        if isinstance(model, StreamingModel) and any(
            EXPERTS not in block for block in model.moe_blocks().values()
        ):
            raise UnsupportedError(
                f"{save_path}: streamed experts are no parameters and would be missing; give "
                "register_with_mlx_lm() expert_memory='100%'."
            )
        stock_save(save_path, model, **options)

    utils.load_model, utils.save_model = load_model, save_model
    stock_floats = _stock.setdefault("dequantize_model", utils.dequantize_model)

    def dequantize_model(model: Any) -> Any:
        # mlx-lm knows its own classes alone: experts would stay as they are, beside a config.json
        # that says nothing of it.
        if isinstance(model, StreamingModel):
            raise UnsupportedError(
                "mlx-lm cannot dequantise a model of this loader; use 'mlx_moeflux convert -d "
                "--layout safetensors'."
            )
        return stock_floats(model)

    # Its programs import this one by name.
    for name, module in [*sys.modules.items()]:
        if name.startswith("mlx_lm.") and hasattr(module, "dequantize_model"):
            module.dequantize_model = dequantize_model  # pyright: ignore[reportAttributeAccessIssue]


def register_cache_classes() -> None:
    """Add our cache entries to the module where ``load_prompt_cache`` looks classes up.

    Raises:
        UnsupportedError: mlx-lm is not installed.
    """
    try:
        from mlx_lm.models import cache
    except ImportError as error:
        raise UnsupportedError(
            f"mlx-lm is not installed here; install it with {install_command('mlx-lm')}."
        ) from error
    packed = (
        quantized(kind, bits=bits, group_size=size, dtype=dtype)
        for kind, bits, size, dtype in product(
            (AttentionCache, LatentCache, IndexedCache, IndexedLatentCache),
            KV_BITS,
            GROUP_SIZES,
            FLOATS,
        )
    )
    for entry in (*ENTRIES.values(), *packed):
        setattr(cache, entry.__name__, entry)
