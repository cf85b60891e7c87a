"""Mixture-of-Experts language models larger than memory, on MLX: experts stream from SSD."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mlx_moeflux._version import __version__
from mlx_moeflux.backend import require_mlx  # notes forks from here on

if TYPE_CHECKING:
    from mlx_moeflux.cache.prompt.cache import PromptCache
    from mlx_moeflux.conversion.convert import convert
    from mlx_moeflux.generation.batch import BatchGenerator
    from mlx_moeflux.generation.batch_text import batch_generate
    from mlx_moeflux.generation.text import GenerationResponse, generate, stream_generate
    from mlx_moeflux.loading import load, load_model

# Public name -> module; imported on first use, so that importing the package loads no MLX.
_PUBLIC = {
    "BatchGenerator": "generation.batch",
    "GenerationResponse": "generation.text",
    "PromptCache": "cache.prompt.cache",
    "batch_generate": "generation.batch_text",
    "convert": "conversion.convert",
    "generate": "generation.text",
    "load": "loading",
    "load_model": "loading",
    "stream_generate": "generation.text",
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
        return _module(__name__, name)
    require_mlx()
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    # The submodule `convert` would otherwise hide the function of the same name.
    globals()[name] = value
    return value


def _module(package: str, name: str) -> ModuleType:
    """Import a module of a package, whose own modules are then found in the same way: a plain
    ``import mlx_moeflux`` is enough for the name of anything."""
    path = f"{package}.{name}"
    if name.startswith("__") or importlib.util.find_spec(path) is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module = importlib.import_module(path)
    if hasattr(module, "__path__"):
        vars(module).setdefault("__getattr__", partial(_module, path))
    return module


def __dir__() -> list[str]:
    return sorted(__all__)
