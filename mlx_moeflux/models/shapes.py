"""Configs of published models by name, for `synthesize` and benchmarks.

Each architecture lists its own in NAME_config, from the models' config.json. Those called tiny are
a few megabytes of the same structure, for tests and examples.
"""

from __future__ import annotations

from typing import Any

from mlx_moeflux.models import published_shapes

SHAPES: dict[str, Any] = published_shapes()
