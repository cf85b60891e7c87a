"""The catalogue of models: short names, repositories, licences, sizes. No MLX.

``data/catalogue.json`` has one entry for each model. People write its names, repositories, licence
and layout; ``python -m tools.catalogue`` computes its sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "catalogue.json"


@dataclass(frozen=True)
class KnownModel:
    """A model of the catalogue.

    name: The short name. license: None: unknown. original, mlx, gguf: Repositories on the hub;
    None: there is none, or it is unknown. download_bytes: Of `repository`; None: unknown. sizes:
    The fields of :class:`~mlx_moeflux.measure.plan.Sizes`, with ``layers`` and ``block_bytes`` in
    place of ``blocks``.
    """

    name: str
    title: str
    license: str | None
    original: str
    mlx: str | None
    gguf: str | None
    download_bytes: int | None
    sizes: Mapping[str, Any]

    @property
    def repository(self) -> str:
        """The repository that the short name stands for."""
        return self.mlx or self.original


@cache
def catalogue() -> Mapping[str, KnownModel]:
    """Return all models by short name, in the order of the file."""
    entries = json.loads(FILE.read_text(encoding="utf-8"))["models"]
    return {
        entry["name"]: KnownModel(
            name=entry["name"],
            title=entry["title"],
            license=entry["license"],
            download_bytes=entry["download_bytes"],
            sizes=entry["sizes"],
            **entry["repositories"],
        )
        for entry in entries
    }
