"""Mixture-of-Experts language models larger than memory, on MLX: experts stream from SSD."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from mlx_moeflux._version import __version__

if TYPE_CHECKING:
    from mlx_moeflux.batch_text import batch_generate
    from mlx_moeflux.batching import BatchGenerator
    from mlx_moeflux.cache.prompt import PromptCache
    from mlx_moeflux.convert import convert
    from mlx_moeflux.generation import GenerationResponse, generate, stream_generate
    from mlx_moeflux.loading import load, load_model

if sys.platform == "darwin":
    # Read when Metal's device is made: long command buffers are not given up for the screen's sake.
    os.environ.setdefault("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "1")

if sys.platform == "linux":
    # Read when MLX first launches on NVIDIA's GPU. It begins a new graph when the inputs of its
    # launches have many million numbers, and counts whole arrays: by default at each launch that
    # reads a large layer's experts, some 15 us of the host. No limit at all is worse for prompts.
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "3000")
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "40")

# Public name -> module; imported when first used, so that importing the package loads no MLX.
_PUBLIC = {
    "BatchGenerator": "batching",
    "GenerationResponse": "generation",
    "PromptCache": "cache.prompt",
    "batch_generate": "batch_text",
    "convert": "convert",
    "generate": "generation",
    "load": "loading",
    "load_model": "loading",
    "stream_generate": "generation",
}

__all__ = [
    "BatchGenerator",
    "GenerationResponse",
    "PromptCache",
    "__version__",
    "batch_generate",
    "convert",
    "generate",
    "load",
    "load_model",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlx_moeflux.backend import require_mlx

    require_mlx()
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    # The submodule `convert` would otherwise hide the function of the same name.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
