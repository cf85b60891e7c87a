"""``mlx_moeflux policies``: what can be chosen by name."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from textwrap import fill
from typing import Any

from mlx_moeflux.experts.balance import BALANCES
from mlx_moeflux.experts.evictions import EVICTIONS
from mlx_moeflux.experts.prefetch import PREFETCHES

POLICIES: dict[str, Mapping[str, Callable[[], Any]]] = {
    "--eviction": EVICTIONS,
    "--prefetch": PREFETCHES,
    "--balance": BALANCES,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    for option, policies in POLICIES.items():
        print(option)
        for name, kind in policies.items():
            paragraph = inspect.getdoc(kind).split("\n\n")[0]
            print(fill(f"  {name:8} {paragraph}", width=100, subsequent_indent=" " * 11))
    return 0
