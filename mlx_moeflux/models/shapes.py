"""Configs of published models by name, for `synthesize` and benchmarks. No MLX.

``data/shapes.json`` has the fields of each model's ``Config`` that differ from the defaults, after
those of the shape that it is ``like``. ``rope`` and ``yarn`` are written as ``rope_parameters`` of
config.json. Shapes called tiny are a few megabytes of the same structure, for tests and examples;
``qwen3.5-small`` has 120 MB, more than the caches of a CPU, for benchmarks on CPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_moeflux.models import config_class
from mlx_moeflux.models.rope import Rope

FILE = Path(__file__).parents[1] / "data" / "shapes.json"


def _configs(written: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the config of every entry of the file."""
    whole: dict[str, dict[str, Any]] = {}
    for name, keys in written.items():
        whole[name] = whole.get(keys.pop("like", ""), {}) | keys
    return {name: _config(**keys) for name, keys in whole.items()}


def _config(model_type: str, **keys: Any) -> Any:
    positions = keys["max_position_embeddings"]
    for key, value in keys.items():
        if isinstance(value, dict):
            theta = keys.get("rope_theta", 0.0)
            keys[key] = Rope.of(value, FILE, theta=theta, positions=positions)
        elif isinstance(value, list):
            keys[key] = tuple(value)
    return config_class(model_type)(**keys)


SHAPES = _configs(json.loads(FILE.read_text(encoding="utf-8")))
