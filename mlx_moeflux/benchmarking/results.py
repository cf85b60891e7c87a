"""What a benchmark found, as plain numbers: medians, ranges, and how each run was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from mlx_moeflux.benchmarking.sides import Timing


@dataclass(frozen=True)
class Spread:
    """Median and range of one quantity over the trials."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Speeds:
    """One program's trials. means: Of speeds and peak memory, as mlx-lm reports them."""

    prompt_tps: Spread
    generation_tps: Spread
    first_token_seconds: Spread
    peak_memory: float
    means: dict[str, float]

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> Speeds:
        return cls(
            Spread.of([t.prompt_tps for t in timings]),
            Spread.of([t.generation_tps for t in timings]),
            Spread.of([t.prompt_seconds for t in timings]),
            max(t.peak_bytes for t in timings) / 1e9,
            {
                "prompt_tps": mean(t.prompt_tps for t in timings),
                "generation_tps": mean(t.generation_tps for t in timings),
                "peak_memory": mean(t.peak_bytes for t in timings) / 1e9,
            },
        )


@dataclass
class Streaming:
    """What the experts cost while decoding, a step on average.

    missed: Bytes read for a step; stall: seconds waited for them; sync: partly resident layers.
    prompt_read: Bytes read for the prompt.
    hit_rate, shuffled: Of the decode steps' look-ups, and what an LRU of the same size would hit
    if the same tokens came in random order. from_disk: Bytes that came from a disk by bytes read,
    None where nobody counts. state: "cold", "warm" or "unverified", as found, not as asked.
    """

    hit_rate: float
    shuffled: float
    missed: float
    stall: float
    prompt_read: float
    sync: int
    from_disk: float | None
    state: str


@dataclass(frozen=True)
class BesideResident:
    """What streaming costs: speeds by those of the resident model, seconds that a step takes
    more, and the seconds that its missed bytes need at the disk's measured speed."""

    speed: float
    seconds_more: float
    disk_seconds: float | None
    prompt_speed: float


@dataclass
class Run:
    """One budget at one context: `ours`, and the other program's trials interleaved with ours."""

    expert_memory: str
    budget_bytes: int
    resident: bool
    context: int
    generation: int
    batch: int
    limit_tps: float
    ours: Speeds
    theirs: Speeds | None = None
    ratios: dict[str, Spread] = field(default_factory=dict)
    streaming: Streaming | None = None
    beside_resident: BesideResident | None = None
    distinct: float = 0.0
    skew: dict[str, float] = field(default_factory=dict)
    profile: dict[str, Any] | None = None

    @property
    def best_ratios(self) -> dict[str, float]:
        """Our best trial by the other program's: what other work on the machine disturbs least."""
        return {
            name: getattr(self.ours, name).high / getattr(self.theirs, name).high
            for name in self.ratios
        }

    @property
    def percent_of_limit(self) -> float:
        return 100 * self.ours.generation_tps.median / self.limit_tps


@dataclass
class Report:
    """Everything, for the last line of JSON, the table and the curves."""

    model: str
    machine: str
    versions: dict[str, str]
    card: dict[str, Any]
    exact: list[str]
    command: str
    options: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    peak_process: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with the percent of the limit."""
        plain = asdict(self)
        for run, found in zip(plain["runs"], self.runs, strict=True):
            run["percent_of_limit"] = found.percent_of_limit
            run["best_ratios"] = found.best_ratios
        return plain
