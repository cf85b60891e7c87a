"""Oracle: the registry of architectures."""

from __future__ import annotations

from mlx_moeflux.models import MODEL_TYPES, config_class
from mlx_moeflux.models.shapes import SHAPES


def test_every_architecture_has_a_tiny_shape():
    tiny = {type(config) for name, config in SHAPES.items() if name.endswith("-tiny")}
    assert tiny == {config_class(model_type) for model_type in MODEL_TYPES}
