"""A benchmark's findings: plain numbers of each run, and for people lines, a table, curves."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from mlx_moeflux.checkpoint.files import read_whole, write_output
from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.experts.budget import format_bytes
from mlx_moeflux.installation import install_command
from mlx_moeflux.measure.benchmark.sides import Timing


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
    """The cost of experts while decoding: averages over steps.

    missed: Bytes read for a step; stall: seconds waited for them; sync: partly resident layers.
    prompt_read: Bytes read for the prompt.
    hit_rate, shuffled: Of the decode steps' look-ups, and what an LRU of the same size would hit if
        the same tokens came in random order.
    from_disk: Bytes that came from a disk by bytes read, None where unknown.
    state: "cold", "warm" or "unverified", as measured.
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
    """The cost of streaming: speeds divided by those of the resident model, seconds that a step
    takes longer, and seconds that its missed bytes need at the disk's measured speed."""

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
    """Everything, for the last line of JSON, the table and the curves.

    page_cache: What is known of it, if it was to be emptied and could not be.
    """

    model: str
    machine: str
    versions: dict[str, str]
    card: dict[str, Any]
    exact: list[str]
    command: str
    options: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    peak_process: float | None = None
    page_cache: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with the percent of the limit."""
        plain = asdict(self)
        for run, found in zip(plain["runs"], self.runs, strict=True):
            run["percent_of_limit"] = found.percent_of_limit
            run["best_ratios"] = found.best_ratios
        return plain


COLUMNS = (
    "experts",
    "context",
    "batch",
    "prefill tok/s",
    "first token s",
    "decode tok/s",
    "of limit",
    "of resident",
    "hit rate (shuffled)",
    "read a step",
    "pages",
    "peak GB",
)
COMPARED = ("mlx-lm prefill", "mlx-lm decode", "prefill ratio", "decode ratio", "best by best")


def run_lines(run: Run) -> list[str]:
    """Format the result of one run."""
    means = ", ".join(f"{name}={value:.3f}" for name, value in run.ours.means.items())
    lines = [f"Averages: {means}", _speeds("Medians", run.ours)]
    if run.theirs is not None:
        lines.append(_speeds("mlx-lm medians", run.theirs))
        prompt, decode = run.ratios["prompt_tps"], run.ratios["generation_tps"]
        best = run.best_ratios
        lines.append(
            f"times mlx-lm, pair by pair: prompt {prompt}, generation {decode}; best by best: "
            f"{best['prompt_tps']:.3f}, {best['generation_tps']:.3f}"
        )
    lines.append(
        f"{run.percent_of_limit:.1f} % of the limit of {run.limit_tps:.1f} tok/s; "
        f"{run.distinct:.1f} experts a step and layer"
    )
    skew = run.skew
    lines.append(
        f"routing: {skew['distinct_in_32']:.1f} experts in 32 tokens; an LRU of half hits "
        f"{100 * skew['lru_half']:.1f} % (shuffled {100 * skew['lru_half_shuffled']:.1f} %)"
    )
    if run.streaming is not None:
        s = run.streaming
        disk = "unknown" if s.from_disk is None else f"{100 * s.from_disk:.1f} %"
        lines.append(
            f"hit rate {100 * s.hit_rate:.1f} % (tokens shuffled, LRU: {100 * s.shuffled:.1f} %), "
            f"{format_bytes(s.missed)} read and {1000 * s.stall:.2f} ms stalled a step, "
            f"{s.sync} layers synchronise; {format_bytes(s.prompt_read)} read for the prompt; "
            f"{s.state}: {disk} of the bytes read came from disk"
        )
    if run.beside_resident is not None:
        b = run.beside_resident
        disk = "" if b.disk_seconds is None else f"; the disk needs {1000 * b.disk_seconds:.2f} ms"
        lines.append(
            f"{100 * b.speed:.1f} % of the resident speed (prompt {100 * b.prompt_speed:.1f} %), "
            f"{1000 * b.seconds_more:.2f} ms a step more{disk}"
        )
    return lines


def _speeds(title: str, speeds: Any) -> str:
    return (
        f"{title}: prompt_tps={speeds.prompt_tps}, generation_tps={speeds.generation_tps}, "
        f"peak_memory={speeds.peak_memory:.3f}"
    )


def markdown(report: Report) -> str:
    """A section with the machine, the card's numbers and one table row for each run."""
    compared = any(run.theirs is not None for run in report.runs)
    columns = COLUMNS + (COMPARED if compared else ())
    card, options = report.card, report.options
    disk = "" if card["disk"] is None else f", disk {card['disk'] / 1e9:.2f} GB/s"
    lines = [
        f"### {report.model}",
        "",
        f"`{report.command}`",
        "",
        f"{report.machine}; {', '.join(_version(*item) for item in report.versions.items())}. "
        f"{options['trials']} trials of "
        f"{options['generation_tokens']} tokens: medians, ranges in brackets. A token reads "
        f"{format_bytes(card['step_bytes'])} at {card['positions']} positions; measured memory "
        f"{card['memory'] / 1e9:.1f} GB/s{disk}." + f" {report.page_cache}".rstrip(),
        "",
        *(f"- {line}" for line in report.exact),
        "",
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
    ]
    lines += [f"| {' | '.join(_cells(run, compared))} |" for run in report.runs]
    return "\n".join(lines) + "\n"


def _cells(run: Run, compared: bool) -> list[str]:
    s, none = run.streaming, "-"
    kind = "resident" if run.resident else run.expert_memory
    hit = none if s is None else f"{100 * s.hit_rate:.1f} % ({100 * s.shuffled:.1f} %)"
    cells = [
        kind,
        str(run.context),
        str(run.batch),
        _short(run.ours.prompt_tps),
        _short(run.ours.first_token_seconds),
        _short(run.ours.generation_tps),
        f"{run.percent_of_limit:.1f} %",
        none if run.beside_resident is None else f"{100 * run.beside_resident.speed:.1f} %",
        hit,
        none if s is None else format_bytes(s.missed),
        none if s is None else s.state,
        f"{run.ours.peak_memory:.3f}",
    ]
    if compared and run.theirs is not None:
        cells += [_short(run.theirs.prompt_tps), _short(run.theirs.generation_tps)]
        names = ("prompt_tps", "generation_tps")
        cells += [_short(run.ratios[name]) for name in names]
        cells.append(", ".join(_three(run.best_ratios[name]) for name in names))
    return cells + [none] * (len(COLUMNS) + len(COMPARED) * compared - len(cells))


def _version(name: str, number: str) -> str:
    return number if name == "backend" else f"{name} {number}"


def _short(spread: Spread) -> str:
    return f"{_three(spread.median)} [{_three(spread.low)}, {_three(spread.high)}]"


def _three(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_markdown(report: Report, file: Path) -> None:
    """Write :func:`markdown`, or append it to a file that exists.

    Raises:
        InputError: The file cannot be read or written, or is no regular file.
    """
    before = read_whole(file, error=InputError).rstrip() + b"\n\n" if file.exists() else b""
    write_output(file, before + markdown(report).encode())


def require_matplotlib() -> Any:
    """matplotlib's Figure, without any display.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "matplotlib draws the plot and is not installed; install it with "
            f"{install_command('mlx_moeflux[plot]')}."
        ) from error
    return Figure


def plot(report: Report, file: Path) -> None:
    """Curves over budgets and over contexts as a PNG, with the range of the trials.

    Raises:
        UnsupportedError: matplotlib is not installed. InputError: The file cannot be written.
    """
    figure = require_matplotlib()(figsize=(11, 4.5), layout="constrained")
    by_context = len({run.context for run in report.runs}) > 1
    label = "context" if by_context else "expert memory (GB)"
    for axes, name, title in zip(
        figure.subplots(1, 2),
        ("prompt_tps", "generation_tps"),
        ("prefill", "decode"),
        strict=True,
    ):
        for who, points in _curves(report, name, by_context).items():
            x, spreads = [at for at, _ in points], [spread for _, spread in points]
            middle = [s.median for s in spreads]
            below = [s.median - s.low for s in spreads]
            above = [s.high - s.median for s in spreads]
            axes.errorbar(x, middle, yerr=[below, above], marker="o", capsize=3, label=who)
        axes.set(title=title, xlabel=label, ylabel="tok/s", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{report.model}, {report.machine}")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_output(file, picture.getvalue())


def _curves(report: Report, name: str, by_context: bool) -> dict[str, list[tuple[float, Spread]]]:
    """Label -> points, ascending."""
    curves: dict[str, list[tuple[float, Spread]]] = {}
    for run in report.runs:
        at = run.context if by_context else run.budget_bytes / 1e9
        memory = "resident" if run.resident else run.expert_memory
        ours = f"mlx_moeflux, {memory}" if by_context else "mlx_moeflux"
        curves.setdefault(ours, []).append((at, getattr(run.ours, name)))
        if run.theirs is not None:
            curves.setdefault("mlx-lm", []).append((at, getattr(run.theirs, name)))
    return {who: sorted(points, key=lambda p: p[0]) for who, points in curves.items()}
