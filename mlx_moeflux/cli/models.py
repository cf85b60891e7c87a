"""``mlx_moeflux models``: the known models that run on a machine, and how well."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from mlx_moeflux.cli.common import add_machine_arguments, machine_memory, machine_rates
from mlx_moeflux.experts.budget import Memory, format_bytes, round_up
from mlx_moeflux.measure.models import TOO_LARGE, Candidate, rank_models
from mlx_moeflux.measure.plan import span
from mlx_moeflux.measure.rates import Rates

NEEDS_MLX = False

HEAD = ("model", "budget in GB", "expected tok/s", "download", "licence")
UNKNOWN = "?"
WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_machine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="numbers instead of a table")


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux.checkpoint.hub import download_folder

    memory = machine_memory(args)
    rates = machine_rates(args, download_folder())
    found = rank_models(memory, rates)
    if args.json:
        plan = found[0].plan
        machine = {"memory_bytes": plan.memory_bytes, "described": plan.described}
        machine |= rates._asdict()
        json.dump(
            {"machine": machine, "models": [one.as_dict() for one in found]}, sys.stdout, indent=2
        )
        print()
    else:
        print("\n".join(table(found, memory, rates)))
    return 0


def table(found: Sequence[Candidate], memory: Memory, rates: Rates) -> Iterator[str]:
    """Yield the lines of the table: of each model the least budget that works and that of ``auto``,
    and the speeds."""
    yield f"memory {format_bytes(memory.usable_bytes)} usable ({memory.what})"
    yield str(rates)
    running = [one for one in found if one.kind != TOO_LARGE]
    rows = [HEAD, *(_row(one) for one in running)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]

    def line(row: Sequence[str]) -> str:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join(cells).rstrip()

    if running:
        yield line(HEAD)
    for kind, members in groupby(running, key=lambda one: one.kind):
        yield f"{kind}:"
        yield from (line(_row(one)) for one in members)
    if large := [one for one in found if one.kind == TOO_LARGE]:
        names = ", ".join(one.model.name for one in large)
        yield from textwrap.wrap(f"too large: {names}", WIDTH, break_on_hyphens=False)
    if running:
        yield "budget: the least --expert-memory that works, and that of auto, the default,"
        described = found[0].plan.described
        yield f"with {'nothing else open' if described else 'what is available now'}."
    yield "'mlx_moeflux plan MODEL' shows the arithmetic; --model MODEL downloads and runs."
    yield "'hf cache ls' lists what was downloaded, 'hf cache rm model/ORG/NAME' removes."


def _row(one: Candidate) -> tuple[str, ...]:
    model, plan = one.model, one.plan
    # The smallest budget that works is rounded up, so that what is shown works; auto may give it.
    least = round_up(one.least_bytes)
    budgets = dict.fromkeys(f"{n / 1e9:.3g}" for n in (least, max(least, plan.budget_bytes)))
    return (
        model.name,
        "all" if plan.resident else " to ".join(budgets),
        span(plan.slow, plan.fast),
        UNKNOWN if model.download_bytes is None else format_bytes(model.download_bytes),
        model.license or UNKNOWN,
    )
