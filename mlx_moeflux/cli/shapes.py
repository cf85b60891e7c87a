"""``mlx_moeflux shapes``: the published shapes that ``synthesize`` and ``benchmark`` write."""

from __future__ import annotations

import argparse

NEEDS_MLX = False

HEAD = ["shape", "type", "layers", "experts", "a token", "width"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux.models.shapes import SHAPES

    rows = [HEAD]
    for name, config in SHAPES.items():
        sizes = (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
        kind = config.published()["model_type"]
        rows.append([name, kind, *map(str, (*sizes, config.hidden_size))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    return 0
