"""Hold the estimates of ``plan`` against published rates: ``python -m tools.published_rates``.

The rates are tests/measure/published_rates.csv, of other engines on named Macs. It prints a table,
and the errors with each Mac left out: the constants that were fitted are fitted anew to the other
Macs, and the rates of that Mac are estimated with them.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import groupby
from math import exp, log, sqrt
from pathlib import Path
from typing import NamedTuple

from mlx_moeflux.checkpoint.catalogue import catalogue
from mlx_moeflux.measure import plan as estimates
from mlx_moeflux.measure.models import known_sizes
from mlx_moeflux.measure.plan import plan_model, range_around, span, speeds

FILE = Path(__file__).parents[1] / "tests/measure/published_rates.csv"
USES = ("fitted", "seen", "later")
# The other constants are published facts.
FITTED = ("LAUNCH_SECONDS", "BANDWIDTH_SHARE", "COPY_GBPS", "ROUTER_SKEW")


class Rate(NamedTuple):
    """A row of the table. memory_gb: As sold. ssd_stated: The source gives the speed of its SSD;
    otherwise it is one that such Macs have. slots: Of each layer; ``all`` if every expert is in
    memory, ``auto`` if the bank of ``plan`` stands for the engine's own. page_cache: The engine
    reads through it. low, high: Tokens per second. use: ``fitted`` if the constants were fitted to
    it, ``seen`` if it was known when they were rounded, ``later`` if it was found afterwards.
    """

    model: str
    mac: str
    memory_gb: str
    memory_gbps: float
    ssd_gbps: float
    ssd_stated: bool
    slots: str
    page_cache: bool
    low: float
    high: float
    use: str
    source: str

    @property
    def published(self) -> float:
        """Tokens per second, the middle of what is published."""
        return sqrt(self.low * self.high)

    @property
    def known(self) -> bool:
        """True if the estimate assumes no speed of an SSD."""
        return self.ssd_stated or self.slots == "all"

    def estimate(self) -> float:
        """Return the tokens per second that ``plan`` gives, the middle of its range."""
        sizes = known_sizes(catalogue()[self.model])
        ssd, memory = self.ssd_gbps, self.memory_gbps
        if self.slots == "all" or not self.page_cache:
            resident = self.slots == "all"
            slots = sizes.num_experts if resident else int(self.slots)
            slow, fast, _ = speeds(
                sizes, slots, resident=resident, ssd_gbps=ssd, memory_gbps=memory
            )
            return sqrt(slow * fast)
        auto = self.slots == "auto"
        return plan_model(
            self.model,
            sizes,
            memory=f"{self.memory_gb}GB",
            expert_memory="auto" if auto else int(self.slots) * sum(sizes.blocks.values()),
            ssd_gbps=ssd,
            memory_gbps=memory,
        ).estimate

    def error(self) -> float:
        """Return the natural logarithm of published by estimated."""
        return log(self.published / self.estimate())


def read_rates() -> list[Rate]:
    """Return the rows of the table."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [
            Rate(
                row["model"],
                row["mac"],
                row["memory_gb"],
                float(row["memory_gbps"]),
                float(row["ssd_gbps"]),
                row["ssd_stated"] == "yes",
                row["slots"],
                row["page_cache"] == "yes",
                float(row["low"]),
                float(row["high"]),
                row["use"],
                row["source"],
            )
            for row in csv.DictReader(file)
        ]


def within(rates: Sequence[Rate], factor: float) -> float:
    """Return the share of the rates that are at most this factor from their estimates."""
    return sum(abs(rate.error()) <= log(factor) for rate in rates) / len(rates)


def typical(errors: Sequence[float]) -> float:
    """Return the mean error as a factor."""
    return exp(sum(map(abs, errors)) / len(errors))


def fit(rates: Sequence[Rate]) -> None:
    """Set the fitted constants: the least sum of errors, those of known rates counted twice. Each
    constant in turn grows or shrinks by a step that becomes smaller."""

    def loss() -> float:
        # Errors below a tenth count less than in proportion, so that no row is hit exactly.
        return sum((1 + rate.known) * (sqrt(rate.error() ** 2 + 0.01) - 0.1) for rate in rates)

    step, best = 0.2, loss()
    while step > 0.01:
        moved = False
        for name in FITTED:
            for factor in (1 + step, 1 / (1 + step)):
                before = getattr(estimates, name)
                setattr(estimates, name, before * factor)
                if (found := loss()) < best:
                    best, moved = found, True
                else:
                    setattr(estimates, name, before)
        if not moved:
            step /= 2


def main() -> None:
    rates = read_rates()
    for use in USES:
        print("| model | Mac | held | published | estimate | published / estimate | source |")
        print("| --- | --- | --- | ---: | ---: | ---: | --- |")
        for rate in rates:
            if rate.use == use:
                published = " to ".join(dict.fromkeys((f"{rate.low:g}", f"{rate.high:g}")))
                estimated = span(*range_around(1 / rate.estimate()))
                memory = f" {rate.memory_gb} GB" if rate.memory_gb else ""
                print(
                    f"| {rate.model} | {rate.mac},{memory} {rate.memory_gbps:g} GB/s | {rate.slots}"
                    f" | {published} | {estimated} | {exp(rate.error()):.2f} | {rate.source} |"
                )
        for known in (True, False):
            kind = [rate for rate in rates if (rate.use, rate.known) == (use, known)]
            if not kind:
                continue
            shares = ", ".join(f"{within(kind, n):.0%} within {n:g}" for n in (1.2, 1.3, 1.5, 2))
            print(f"\n{'known' if known else 'assumed SSD'}: {len(kind)} rates, {shares}")
        print(f"mean factor {typical([r.error() for r in rates if r.use == use]):.2f}\n")
    print("Each Mac left out:\n")
    chosen = {name: getattr(estimates, name) for name in FITTED}
    used = sorted(
        (r for r in rates if r.use == "fitted"), key=lambda rate: (rate.mac, rate.memory_gb)
    )
    errors: dict[bool, list[float]] = {True: [], False: []}
    for (mac, memory), group in groupby(used, key=lambda rate: (rate.mac, rate.memory_gb)):
        members = list(group)
        fit([rate for rate in used if rate not in members])
        for rate in members:
            errors[rate.known].append(rate.error())
        values = ", ".join(f"{getattr(estimates, name):.3g}" for name in FITTED)
        print(f"{mac}, {memory} GB: {typical([r.error() for r in members]):.2f} ({values})")
        for name, value in chosen.items():
            setattr(estimates, name, value)
    for known, kind in errors.items():
        shares = (f"{sum(abs(e) <= log(n) for e in kind)} within {n:g}" for n in (1.3, 1.5, 2))
        name = "known" if known else "assumed SSD"
        print(f"{name}: {len(kind)} rates, mean factor {typical(kind):.2f}, {', '.join(shares)}")


if __name__ == "__main__":
    main()
