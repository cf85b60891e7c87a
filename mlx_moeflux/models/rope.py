"""Rotary embeddings as config.json describes them, in either spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_moeflux.errors import ConfigError, UnsupportedError


def rope_keys(config: dict[str, Any], file: Path | str, *, partial: float) -> dict[str, float]:
    """``rope_theta`` and ``partial_rotary_factor`` (absent: `partial`) of a plain rope.

    transformers 5 writes ``rope_parameters``; older files ``rope_theta``, ``rope_scaling`` and
    a ``partial_rotary_factor`` beside them.

    Raises:
        ConfigError: Two places contradict each other.
        UnsupportedError: The rope is not the plain one.
    """
    keys = ("rope_theta", "partial_rotary_factor")
    found = rope_parameters(config, file, keys)
    if found["rope_type"] != "default":
        raise UnsupportedError(
            f"{file}: rope type {found['rope_type']!r} is not computed; only 'default'."
        )
    return {"partial_rotary_factor": partial} | {k: found[k] for k in keys if k in found}


def rope_parameters(
    config: dict[str, Any], file: Path | str, flat: tuple[str, ...]
) -> dict[str, Any]:
    """All that ``rope_scaling``, ``rope_parameters`` and the keys `flat` at the top say.

    ``rope_type`` is always there. Raises ConfigError where two of them disagree.
    """
    found: dict[str, Any] = {"rope_type": "default"}
    for key in ("rope_scaling", "rope_parameters"):
        source = config.get(key)
        if source is None:
            continue
        if not isinstance(source, dict):
            raise ConfigError(f"{file}: '{key}' is {source!r}, expected an object or null.")
        found |= {k: v for k, v in source.items() if v is not None and k != "type"}
        found["rope_type"] = source.get("rope_type", source.get("type", "default"))
    for key in flat:
        top = config.get(key)
        if top is not None and found.setdefault(key, top) != top:
            raise ConfigError(
                f"{file}: '{key}' is {top} at the top and {found[key]} in the rope parameters; "
                "keep one."
            )
    return found
