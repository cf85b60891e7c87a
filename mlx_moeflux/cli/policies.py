"""``mlx_moeflux policies``: the policies that have a name."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from textwrap import fill
from typing import Any

from mlx_moeflux.experts.policies.eviction import DEFAULT_EVICTION, EVICTIONS
from mlx_moeflux.experts.policies.named import NONE
from mlx_moeflux.experts.policies.prefetch import PREFETCHES

POLICIES: dict[str, Mapping[str, Callable[[], Any]]] = {
    "--eviction": EVICTIONS,
    "--prefetch": PREFETCHES,
}
NOTHING = {"--prefetch": "Read experts only when a layer requires them."}
NEEDS_MLX = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    for option, policies in POLICIES.items():
        print(option)
        lines = {
            name: (inspect.getdoc(kind) or "").split("\n\n")[0] for name, kind in policies.items()
        }
        default = DEFAULT_EVICTION
        if option in NOTHING:
            default, lines = NONE, {NONE: NOTHING[option]} | lines
        for name, line in lines.items():
            line += " The default." if name == default else ""
            print(fill(f"  {name:8} {line}", width=100, subsequent_indent=" " * 11))
    return 0
