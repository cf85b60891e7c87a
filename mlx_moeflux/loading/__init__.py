"""From a path or hub id to a model and its tokenizer."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moeflux.loading.options import LoadOptions

if TYPE_CHECKING:
    from mlx_moeflux.loading.steps import load, load_model

__all__ = ["BUNDLED_MODEL", "LoadOptions", "load", "load_model"]

BUNDLED_MODEL = Path(__file__).parents[1] / "data" / "tiny"


def __getattr__(name: str) -> Any:
    """Import the functions on first use: a command line reads the options and needs no MLX."""
    if name not in ("load", "load_model"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("mlx_moeflux.loading.steps"), name)
    globals()[name] = value
    return value
