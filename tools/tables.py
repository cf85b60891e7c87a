"""Write the tables of models, Macs, budgets and speeds in README.md and docs:
``python -m tools.tables``.

A table follows a line ``<!-- tools.tables: NAME -->`` and ends before an empty line. NAME is one of
:data:`TABLES`, whose function computes it as ``plan`` and ``models`` do.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from mlx_moeflux.checkpoint.catalogue import catalogue
from mlx_moeflux.cli import main as run_command
from mlx_moeflux.experts.budget import format_bytes, round_up
from mlx_moeflux.measure.models import RESIDENT, TOO_LARGE, Candidate, known_sizes, rank_models
from mlx_moeflux.measure.plan import plan_model, span
from mlx_moeflux.measure.plan_machines import Link, plan_machines
from mlx_moeflux.measure.rates import Rates, memory_bandwidth

ROOT = Path(__file__).parents[1]
_GUIDES = ("budget", "getting-started", "many-machines")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _GUIDES))
MARK = re.compile(r"(?<=^<!-- tools\.tables: )([\w-]+)( -->\n)(.*?)(?=\n\n)", re.M | re.S)

# Models of the table of speeds, and bytes of all experts that make a model one of the larger.
SHOWN = ("gpt-oss-20b", "qwen3.6", "qwen3-next", "gpt-oss-120b", "flash-next", "qwen3.5-122b")
LARGER = 100e9
RATES = "GB/s of memory, of SSD"


class Mac(NamedTuple):
    """A Mac. cores: Of its GPU. ssd_gbps: Of its SSD, an assumption."""

    name: str
    chip: str
    cores: int
    memory: str
    ssd_gbps: float

    @property
    def memory_gbps(self) -> float:
        """GB/s of its memory."""
        found = memory_bandwidth(self.chip, self.cores)
        assert found is not None
        return found

    @property
    def title(self) -> str:
        """Name and memory."""
        return f"{self.name}, {self.memory.removesuffix('GB')} GB"

    @property
    def rates(self) -> str:
        """GB/s of its memory and SSD."""
        return f"{self.memory_gbps:.3g}, {self.ssd_gbps:g}"


MACS = (
    Mac("MacBook Air M1", "Apple M1", 8, "8GB", 2.8),
    Mac("Mac mini M4", "Apple M4", 10, "16GB", 2.9),
    Mac("MacBook Air M5", "Apple M5", 10, "24GB", 6),
    Mac("MacBook Pro M5 Pro", "Apple M5 Pro", 20, "48GB", 14),
    Mac("MacBook Pro M4 Max", "Apple M4 Max", 40, "128GB", 7),
    Mac("Mac Studio M3 Ultra", "Apple M3 Ultra", 80, "256GB", 7),
)

# The examples of `models` and `plan`: a Mac, what describes it, and a model.
EXAMPLE = MACS[1]
FLAGS = (
    f"--memory {EXAMPLE.memory} --memory-gbps {EXAMPLE.memory_gbps:g} "
    f"--ssd-gbps {EXAMPLE.ssd_gbps:g}"
)
PLANNED = "qwen3.5-35b"

# Models on two Macs of a kind, and the links of docs/many-machines.md: RDMA and TCP.
PAIRS = (
    ("qwen3.5-397b", MACS[4]),
    ("qwen3.5-397b", MACS[5]),
    ("qwen3.5-122b", MACS[3]),
    ("qwen3.6", MACS[3]),
)
LINKS = (Link(9.2e9, 18e-6), Link(2.5e9, 0.3e-3))


@cache
def candidates(mac: Mac) -> dict[str, Candidate]:
    """Return short name -> the model of the catalogue on a Mac with nothing else open."""
    rates = Rates(mac.memory_gbps, mac.chip, mac.ssd_gbps, "assumed")
    return {one.model.name: one for one in rank_models(mac.memory, rates)}


def grid(rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; its first row is the head."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def speeds() -> str:
    """Return the table of tokens per second: a model in each row, a Mac in each column."""

    def cell(one: Candidate) -> str:
        speed = span(one.plan.slow, one.plan.fast)
        return {TOO_LARGE: "-", RESIDENT: f"**{speed}**"}.get(one.kind, speed)

    return grid(
        (
            ("model", *(mac.title for mac in MACS)),
            (RATES, *(mac.rates for mac in MACS)),
            *(
                (catalogue()[name].title, *(cell(candidates(mac)[name]) for mac in MACS))
                for name in SHOWN
            ),
        )
    )


def budgets(larger: bool) -> str:
    """Return the table of sizes; models of the same sizes share a row."""
    titles: dict[tuple[str, ...], list[str]] = {}
    for model in catalogue().values():
        sizes = known_sizes(model)
        if (sizes.expert_bytes >= LARGER) == larger:
            least = candidates(MACS[0])[model.name].least_bytes
            trunk = f"{sizes.trunk_bytes / 1e9:.1f} GB"
            counts = format_bytes(sizes.expert_bytes), trunk, format_bytes(round_up(least))
            row = (sizes.block(), *counts)
            titles.setdefault(row, []).append(model.title)
    head = ("model", "an expert", "all experts", "trunk", "least budget")
    return grid((head, *((", ".join(names), *row) for row, names in titles.items())))


def on_macs(name: str) -> str:
    """Return the table of a model's budget, slots and speed, a Mac in each row."""
    rows = [("Mac", RATES, "budget of `auto`", "slots a layer", "tokens per second")]
    for mac in MACS:
        one = candidates(mac)[name]
        plan = one.plan
        if one.kind == TOO_LARGE:
            rows.append((mac.title, mac.rates, "-", "-", "-"))
            continue
        budget = "all resident" if plan.resident else format_bytes(plan.budget_bytes)
        slots = f"{plan.slots} of {plan.sizes.num_experts}"
        rows.append((mac.title, mac.rates, budget, slots, span(plan.slow, plan.fast)))
    return grid(rows)


def two_macs() -> str:
    """Return the table of tokens per second on one Mac and on two."""
    head = ("model", "each Mac", RATES, "experts with a slot", "one Mac", "two, RDMA", "two, TCP")
    rows: list[Sequence[str]] = [head]
    for name, mac in PAIRS:
        plans = [
            plan_machines(
                name,
                known_sizes(catalogue()[name]),
                memories=[mac.memory] * 2,
                link=link,
                memory_gbps=mac.memory_gbps,
                ssd_gbps=mac.ssd_gbps,
            )
            for link in LINKS
        ]
        share, alone = plans[0].machines[0].share, plans[0].alone
        rows.append(
            (
                catalogue()[name].title,
                mac.title,
                mac.rates,
                "all" if share == 1 else f"{100 * share:.0f} % of its own",
                "-" if alone is None else span(*alone),
                *(span(plan.slow, plan.fast) if plan.fits else "-" for plan in plans),
            )
        )
    return grid(rows)


def fenced(text: str) -> str:
    """Return lines of a terminal as a block."""
    return f"```text\n{text.strip()}\n```"


def models() -> str:
    """Return what the example of ``models`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_command(["models", *FLAGS.split()])
    return fenced(printed.getvalue())


def plan() -> str:
    """Return what the example of ``plan`` prints of a repository."""
    known = catalogue()[PLANNED]
    rates = Rates(EXAMPLE.memory_gbps, "given", EXAMPLE.ssd_gbps, "given")
    found = plan_model(
        known.repository,
        known_sizes(known),
        memory=EXAMPLE.memory,
        memory_gbps=rates.memory_gbps,
        ssd_gbps=rates.ssd_gbps,
    )
    return fenced(f"{found}\n{'rates':8} {rates}")


TABLES: dict[str, Callable[[], str]] = {
    "speeds": speeds,
    "budgets": partial(budgets, larger=False),
    "larger-budgets": partial(budgets, larger=True),
    "gemma-4": partial(on_macs, "gemma-4"),
    "flash-next": partial(on_macs, "flash-next"),
    "two-macs": two_macs,
    "models": models,
    "plan": plan,
}


def written(page: str) -> str:
    """Return the text of a page with its tables as they are now.

    Raises:
        KeyError: A mark has another name than those of :data:`TABLES`.
    """
    return MARK.sub(lambda mark: f"{mark[1]}{mark[2]}{TABLES[mark[1]]()}", page)


def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
