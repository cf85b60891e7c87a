"""Compute the sizes in the catalogue of models: ``python -m tools.catalogue [NAME=DIRECTORY ...]``.

People write an entry's names, repositories, licence and ``layout``: a file of tests/published, and
the bits and group size of a conversion, as an MLX repository has them. This script reads the config
and the names, dtypes and shapes of that file and writes ``sizes``.

``NAME=DIRECTORY`` takes a checkpoint instead, such as a repository's folder in the cache of the
hub, ``models--org--name``: its headers, and the bytes of its files as ``download_bytes``.

``download_source`` says where an entry's ``download_bytes`` are from. An entry without a source has
the bytes of the weights that its layout has, which is all of a repository of text alone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from mlx_moeflux.checkpoint.catalogue import FILE
from mlx_moeflux.checkpoint.hub import needed_files, resolve
from mlx_moeflux.checkpoint.quantization import Quantization
from mlx_moeflux.checkpoint.source import Checkpoint
from mlx_moeflux.measure.plan import Sizes, measure_sizes, open_sizes
from tests.models.test_published import PUBLISHED, opened

HEADERS = "headers and files of the repository"


def sizes_of_layout(file: str, **options: Any) -> Sizes:
    """Return the sizes of a file of tests/published. options: Of ``measure_sizes``."""
    config = json.loads((PUBLISHED / f"{file}.json").read_text(encoding="utf-8"))["config"]
    _, tensors, _ = opened(file)
    quantization = Quantization.from_config(config)
    checkpoint = Checkpoint(PUBLISHED, "safetensors", config, dict(tensors), quantization)
    return measure_sizes(checkpoint, **options)


def as_entry(sizes: Sizes) -> dict[str, Any]:
    """Return sizes as the catalogue has them.

    Raises:
        ValueError: Layers have experts of several sizes.
    """
    fields = asdict(sizes)
    layers = fields.pop("blocks")
    (block,) = set(layers.values())
    return {**fields, "layers": len(layers), "block_bytes": block}


def filled(entry: dict[str, Any], directory: str | None = None) -> dict[str, Any]:
    """Return an entry with the sizes of its layout, or of a checkpoint's directory."""
    if directory is not None:
        folder = resolve(directory)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        total = sum((folder / name).stat().st_size for name in needed_files(names))
        facts = {"layout": None, "download_bytes": total, "download_source": HEADERS}
        return entry | facts | {"sizes": as_entry(open_sizes(directory))}
    if entry["layout"] is None:
        return entry
    sizes = sizes_of_layout(**entry["layout"])
    entry = entry | {"sizes": as_entry(sizes)}
    if entry["download_source"] is None:
        total = sizes.trunk_bytes + sizes.expert_bytes + sizes.table_bytes
        entry["download_bytes"] = total
    return entry


def main(arguments: list[str]) -> None:
    directories = dict(argument.split("=", 1) for argument in arguments)
    content = json.loads(FILE.read_text(encoding="utf-8"))
    content["models"] = [
        filled(entry, directories.pop(entry["name"], None)) for entry in content["models"]
    ]
    if directories:
        raise SystemExit(f"there is no {', '.join(directories)} in {FILE}; add an entry first")
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
