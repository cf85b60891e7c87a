"""The metadata of a GGUF file under its architecture, each key read once and then known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from mlx_moeflux.checkpoint.config import WAY_OUT, says_nothing
from mlx_moeflux.checks import shown
from mlx_moeflux.errors import ConfigError, UnsupportedError

REQUIRED = object()
"""Default of a key that must be there."""
# First parts of keys that a fork of llama.cpp reads: PrismML's turns activations.
FORKS = ("prism",)


class Header:
    """Keys behind the architecture's name, such as ``block_count`` of ``qwen3moe.block_count``.

    read: Those that somebody asked for.
    """

    def __init__(self, file: Path, architecture: str, metadata: dict[str, Any]) -> None:
        self.file, self.architecture, self._metadata = file, architecture, metadata
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of any type, or `default`.

        Raises:
            ConfigError: The key must be there and is not.
        """
        self.read.add(key)
        value = self._metadata.get(f"{self.architecture}.{key}")
        if value is None and default is REQUIRED:
            raise ConfigError(f"{self.file}: the metadata lacks {self.name(key)}.")
        return default if value is None else value

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """Return a number; of a float32 the shortest decimal that means it.

        Raises:
            ConfigError: It is none, or must be there and is not.
        """
        value = self.get(key, default)
        if value is default:
            return value
        if type(value) not in (int, float):
            raise self.wrong(key, value, "a number")
        return shortest(value) if type(value) is float else value

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value.

        Raises:
            ConfigError: It is none.
        """
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value, "true or false")
        return value

    def integers(self, key: str, default: Any = REQUIRED) -> list[int]:
        """Return an array of integers or truth values, as integers.

        Raises:
            ConfigError: It is none, or must be there and is not.
        """
        value = self.get(key, default)
        if not isinstance(value, list) or not all(type(n) in (int, bool) for n in value):
            raise self.wrong(key, value, "an array of integers")
        return [int(n) for n in value]

    def only(self, key: str, value: Any, default: Any = None) -> None:
        """See that a key has the one value that is computed.

        Raises:
            UnsupportedError: It has another.
        """
        default = value if default is None else default
        if (found := self.get(key, default)) != value:
            raise UnsupportedError(
                f"{self.file}: {self.name(key)} is {shown(found)}; only {value!r} is computed."
            )

    def group(self, prefix: str) -> dict[str, Any]:
        """Return the keys that begin with `prefix`, without it."""
        whole = f"{self.architecture}.{prefix}"
        found = {k.removeprefix(whole): v for k, v in self._metadata.items() if k.startswith(whole)}
        self.read |= {f"{prefix}{key}" for key in found}
        return found

    def check_known(self) -> None:
        """Raise UnsupportedError for keys of the architecture, or of a fork, that nothing read,
        unless their values say nothing. Keys of other groups change nothing: llama.cpp computes by
        none."""
        unknown = []
        for name, value in self._metadata.items():
            group, _, key = name.partition(".")
            known = key in self.read if group == self.architecture else group not in FORKS
            if not known and not says_nothing(value):
                unknown.append(f"'{name}' ({shown(value)})")
        if unknown:
            raise UnsupportedError(
                f"{self.file}: nothing here reads {', '.join(unknown)} of the metadata; "
                f"{WAY_OUT}, or use the model's safetensors."
            )

    def name(self, key: str) -> str:
        """Return a key as messages show it."""
        return f"'{self.architecture}.{key}'"

    def wrong(self, key: str, value: Any, expected: str) -> ConfigError:
        """Return the error of a value of another type."""
        return ConfigError(f"{self.file}: {self.name(key)} is {shown(value)}; expected {expected}.")


def shortest(value: float) -> float:
    """Return the shortest decimal whose float32 is `value`, or `value` if that is no float32."""
    if not math.isfinite(value) or abs(value) > np.finfo(np.float32).max:
        return value
    single = np.float32(value)
    return float(str(single)) if float(single) == value else value
