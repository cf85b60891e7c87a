"""The record of a family's GGUF files: names of tensors, what llama.cpp's converter does to their
values, and metadata.

:mod:`mlx_moeflux.checkpoint.formats.gguf_architectures` has one for each family.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_moeflux.checkpoint.formats.gguf_header import Header
from mlx_moeflux.checkpoint.formats.gguf_metadata import COMMON_KEYS, INERT, ONLY, Config, Keys
from mlx_moeflux.checkpoint.names import PROJECTIONS
from mlx_moeflux.checkpoint.tensors import TensorRef

Ranges = list[tuple[int, int]]
"""Start and stop of runs of a file's rows or columns, in the order of the model."""
Order = Callable[[Config, int], Ranges]
"""The text model's config and the number of rows or columns in the file -> ranges."""
Table = Callable[[Config, int], tuple[int, Config] | None]
"""The text model's config and the rows of a table in the file -> the layer that reads it, and keys
of config.json; None: no layer does."""


@dataclass(frozen=True)
class Target:
    """Names the parameter that a tensor of the file becomes.

    name: As in Hugging Face's checkpoints, or as the model takes the file's form, without the
        layer's prefix and without what the file's name ends with, such as ``.weight``.
    rows, columns: Which of the file's, in which order; None: all as they are.
    values: Function of each number, in float64.
    place: Among the tensors that make one on axis 0.
    row: A vector is the one row of a matrix.
    table: Its rows are read when they are needed; ``{layer}`` stands for the layer in `name`.
    """

    name: str
    rows: Order | None = None
    columns: Order | None = None
    values: Callable[[np.ndarray], np.ndarray] | None = None
    place: int = 0
    row: bool = False
    table: Table | None = None


@dataclass(frozen=True)
class Held:
    """What a file holds, for keys of config.json that tensors say.

    config: What the metadata say. tensors: Of the trunk, by our names. sparse: Layers with experts.
    """

    path: Path
    config: Config
    tensors: dict[str, TensorRef]
    sparse: Collection[int]

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    def count(self, name: str) -> int:
        """Return how many layers have a tensor of this name."""
        return sum(tensor.endswith(f".{name}") for tensor in self.tensors)


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    name: GGUF's ``general.architecture``.
    model_type, published: config.json's ``model_type`` and first of ``architectures``.
    names: GGUF's name of a tensor, without ``blk.N.``, with or without its suffix -> targets; a
        string is one's name. Experts have the same names in all, see :data:`EXPERTS`.
    keys: config.json's key -> GGUF's behind the architecture, which must be a number, or a function
        of the header.
    groups: Functions that return several keys.
    fixed: Keys of config.json that llama.cpp computes in one way.
    only: GGUF's keys that have one value here, besides :data:`ONLY`.
    inert: GGUF's keys that change nothing, or repeat others.
    stored: config.json's key -> function of what the file holds.
    wrapped: The keys are of ``text_config``.
    """

    name: str
    model_type: str
    published: str
    names: Mapping[str, str | Target | tuple[Target, ...]]
    keys: Keys
    groups: tuple[Callable[[Header], Config], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    stored: Mapping[str, Callable[[Held], Any]] = field(default_factory=dict)
    wrapped: bool = False

    def targets(self, name: str) -> list[Target]:
        """Return where a tensor goes, with complete names; none if no name fits."""
        stem, _, suffix = name.rpartition(".")
        found, end = self.names.get(name), ""
        if found is None and suffix in ("weight", "bias"):
            found, end = self.names.get(stem), f".{suffix}"
        if found is None:
            return []
        every = found if isinstance(found, tuple) else (found,)
        targets = [Target(t) if isinstance(t, str) else t for t in every]
        return [replace(target, name=target.name + end) for target in targets]

    def config(self, header: Header, *, strict: bool = True) -> Config:
        """Return the keys of config.json that the metadata have, those of the text model alone.
        strict: A key that nothing here reads is an error.

        Raises:
            ConfigError: A key is missing or of another type.
            UnsupportedError: The file asks for something that is not computed, or a key is unknown.
        """
        config: Config = dict(self.fixed)
        for key, theirs in {**COMMON_KEYS, **self.keys}.items():
            config[key] = header.number(theirs) if isinstance(theirs, str) else theirs(header)
        for group in self.groups:
            config |= group(header)
        header.read |= INERT | self.inert
        for key, value in {**ONLY, **self.only}.items():
            if key not in header.read:
                header.only(key, value)
        if strict:
            header.check_known()
        return config


EXPERTS = {f"ffn_{p.removesuffix('_proj')}_exps": (p,) for p in PROJECTIONS}
EXPERTS |= {"ffn_gate_up_exps": ("gate_proj", "up_proj")}
"""GGUF's name of a stack of experts -> the projections that share its rows in equal parts."""
