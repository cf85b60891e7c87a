"""Statistics of streaming: counts and seconds for each layer and in total, and the table of them
that text, JSON and a server's metrics read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple


@dataclass
class LayerStats:
    """One layer's account.

    tokens: Tokens that passed, padding included.
    lookups: Distinct experts asked for, summed over the calls that had to look. A layer that
        holds every expert does not look.
    hits, misses: The lookups that found the expert resident, and those that did not.
    reads, bytes_read: Blocks and bytes that arrived: one block for each miss, plus what was read
        unasked by `preload`, a prefetcher, or a prompt that has not reached the layer yet.
    read_seconds: Time inside reads, summed over the threads.
    stall_seconds: Time the caller waited for reads.
    compute_seconds: Time inside the store without stalls. Evaluation is lazy: it includes
        waiting for the ids, hence for everything that leads to them, and not what is evaluated
        after the call.
    evictions: Experts that lost their slot.
    prefetches: Blocks that were read before anyone asked for them, contained in `reads`.
    prefetched_hits: Hits that found such a block for the first time.
    proposed, foreseen: Experts that the prefetcher named, resident or not, and those of them that
        the next call asked for.
    """

    tokens: int = 0
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    reads: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0
    stall_seconds: float = 0.0
    compute_seconds: float = 0.0
    evictions: int = 0
    prefetches: int = 0
    prefetched_hits: int = 0
    proposed: int = 0
    foreseen: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits by lookups; 1 when nothing had to be looked up."""
        return self.hits / self.lookups if self.lookups else 1.0

    def as_dict(self) -> dict[str, int | float]:
        """All fields and the hit rate."""
        return {**asdict(self), "hit_rate": self.hit_rate}

    def since(self, earlier: LayerStats) -> LayerStats:
        """Return the difference to `earlier`, of the same counts."""
        names = [field.name for field in fields(LayerStats)]
        return LayerStats(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


@dataclass
class PlaceStats:
    """Counts the reads from one of several copies of the experts.

    busy_seconds: Time in which at least one read was under way.
    """

    bytes_read: int = 0
    busy_seconds: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes in a second of reading; 0 before the first read."""
        return 1e-9 * self.bytes_read / self.busy_seconds if self.busy_seconds else 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a batch; another thread copies all of it or nothing."""
        nbytes, seconds = self.bytes_read + nbytes, self.busy_seconds + seconds
        vars(self).update(bytes_read=nbytes, busy_seconds=seconds)

    def since(self, earlier: PlaceStats) -> PlaceStats:
        """Return the difference to `earlier`."""
        return PlaceStats(
            self.bytes_read - earlier.bytes_read, self.busy_seconds - earlier.busy_seconds
        )

    def as_dict(self) -> dict[str, int | float]:
        """All fields and the speed."""
        return {**asdict(self), "gb_per_s": self.gb_per_s}


@dataclass
class DraftStats:
    """Counts the steps that read drafts, see :mod:`mlx_moeflux.generation.drafting`.

    rounds: Steps that read at least one.
    proposed, accepted: Drafts that they read, and those that equalled what was drawn.
    rejected_reads: Misses of these steps, in proportion to the rejected of their tokens.
    seconds: Time of these steps.
    saved_seconds: How much longer their tokens would have taken one by one, by the time of the
        steps without drafts around them.
    """

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    rejected_reads: float = 0.0
    seconds: float = 0.0
    saved_seconds: float = 0.0

    def add(
        self, proposed: int, accepted: int, *, misses: int, seconds: float, saved: float
    ) -> None:
        """Count a step that read `proposed` drafts."""
        self.rounds += 1
        self.proposed += proposed
        self.accepted += accepted
        self.rejected_reads += misses * (proposed - accepted) / (proposed + 1)
        self.seconds += seconds
        self.saved_seconds += saved

    @property
    def gain(self) -> float:
        """Speed of these steps by that of steps without drafts; 1 before the first."""
        return 1 + self.saved_seconds / self.seconds if self.seconds else 1.0

    def since(self, earlier: DraftStats) -> DraftStats:
        """Return the difference to `earlier`, of the same counts."""
        names = [field.name for field in fields(DraftStats)]
        return DraftStats(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    def as_dict(self) -> dict[str, int | float]:
        """All fields and the gain."""
        return {**asdict(self), "gain": self.gain}

    def __str__(self) -> str:
        return (
            f"drafts: {self.accepted} of {self.proposed} accepted in {self.rounds} steps, "
            f"{self.rejected_reads:.0f} experts read for rejected ones, "
            f"{self.gain:.2f} times as fast as without"
        )


class Shown(NamedTuple):
    """How a number of an account is shown.

    title, width, text: Of its column in the brief table; no title: it has none. metric, meaning: In
    a server's metrics; no metric: it is not there.
    """

    title: str = ""
    width: int = 0
    text: Callable[[Any], str] = str
    metric: str = ""
    meaning: str = ""


# Attribute of LayerStats and key in JSON -> how it is shown, in the order of the full table.
SHOWN = {
    "tokens": Shown(),
    "lookups": Shown(metric="expert_lookups_total", meaning="Experts looked up."),
    "hits": Shown(metric="expert_hits_total", meaning="Experts found in memory."),
    "misses": Shown("misses", 8, "{:,}".format),
    "hit_rate": Shown(
        "hits",
        7,
        lambda rate: f"{100 * rate:.1f}%",
        metric="expert_hit_rate",
        meaning="Hits by lookups since the start; 1 before the first.",
    ),
    "bytes_read": Shown(
        "read MB",
        10,
        lambda count: f"{count / 1e6:,.1f}",
        metric="expert_bytes_read_total",
        meaning="Bytes of experts read.",
    ),
    "evictions": Shown(),
    "read_seconds": Shown(),
    "stall_seconds": Shown(
        "wait s",
        9,
        "{:.2f}".format,
        metric="expert_stall_seconds_total",
        meaning="Seconds of waiting for reads of experts.",
    ),
    "compute_seconds": Shown(),
}
BRIEF = ("hit_rate", "misses", "bytes_read", "stall_seconds")


@dataclass(frozen=True)
class StatsTable:
    """An account of one moment. lossy, places, drafts: See :class:`ExpertStats`."""

    layers: Mapping[int, LayerStats]
    total: LayerStats
    lossy: tuple[str, ...]
    places: Mapping[str, PlaceStats] = field(default_factory=dict)
    drafts: DraftStats = field(default_factory=DraftStats)

    def brief(self) -> str:
        """Return a line for each layer that had to look, and the total."""
        columns = [(name, SHOWN[name]) for name in BRIEF]
        lines = [" ".join(["layer", *(f"{shown.title:>{shown.width}}" for _, shown in columns)])]
        for row, stats in self._rows():
            if stats.lookups or row == "total":
                cells = (f"{shown.text(getattr(stats, n)):>{shown.width}}" for n, shown in columns)
                lines.append(" ".join([f"{row:5}", *cells]))
        return "\n".join(lines)

    def full(self) -> str:
        """Return a line for each layer, and the total, with all numbers of :data:`SHOWN`."""
        lines = [" ".join(["layer", *(f"{name:>15}" for name in SHOWN)])]
        for row, stats in self._rows():
            cells = (getattr(stats, name) for name in SHOWN)
            texts = (f"{c:15.3f}" if isinstance(c, float) else f"{c:15,}" for c in cells)
            lines.append(" ".join([f"{row:5}", *texts]))
        return "\n".join(lines)

    def read_ahead(self) -> str | None:
        """Return what was read ahead, and what a prefetcher foresaw, as a phrase; None: nothing."""
        total, parts = self.total, []
        if total.prefetches:
            parts.append(f"read ahead {total.prefetches}, of which {total.prefetched_hits} used")
        if total.proposed:
            share = 100 * total.foreseen / total.proposed
            parts.append(f"foreseen {share:.1f} % of {total.proposed}")
        return "; ".join(parts) or None

    def by_place(self) -> list[str]:
        """Return for each of several copies of the experts what was read there, as a phrase."""
        return [
            f"{place}: {stats.bytes_read / 1e9:.3f} GB at {stats.gb_per_s:.2f} GB/s"
            for place, stats in self.places.items()
        ]

    def line(self) -> str:
        """Return the total as one line."""
        total, ahead = self.total, self.read_ahead()
        parts = [
            f"{total.tokens} tokens",
            f"hit rate {100 * total.hit_rate:.1f} % of {total.lookups}",
            f"{total.bytes_read / 1e9:.3f} GB in {total.reads} reads",
            f"I/O {total.read_seconds:.2f} s",
            f"stalls {total.stall_seconds:.2f} s",
            f"compute {total.compute_seconds:.2f} s",
            *([ahead] if ahead else []),
            *self.by_place(),
            *([str(self.drafts)] if self.drafts.rounds else []),
        ]
        return ", ".join(parts + [f"lossy: {what}" for what in self.lossy])

    def as_dict(self) -> dict[str, object]:
        """``{"total": {...}, "layers": {id: {...}}, "lossy": [...]}`` of plain numbers; and
        ``"places": {path: {...}}`` where several copies are read, ``"drafts": {...}`` where some
        were."""
        layers = {layer: stats.as_dict() for layer, stats in self.layers.items()}
        data = {"total": self.total.as_dict(), "layers": layers, "lossy": list(self.lossy)}
        if self.places:
            data["places"] = {place: stats.as_dict() for place, stats in self.places.items()}
        if self.drafts.rounds:
            data["drafts"] = self.drafts.as_dict()
        return data

    def metrics(self) -> dict[str, tuple[str, str, int | float]]:
        """Name -> kind, meaning and value of the total, for Prometheus."""
        return {
            shown.metric: (
                "counter" if shown.metric.endswith("_total") else "gauge",
                shown.meaning,
                getattr(self.total, name),
            )
            for name, shown in SHOWN.items()
            if shown.metric
        }

    def _rows(self) -> list[tuple[str, LayerStats]]:
        return [
            *((str(layer), stats) for layer, stats in self.layers.items()),
            ("total", self.total),
        ]


def total_of(layers: Iterable[LayerStats]) -> LayerStats:
    """Return the sum of all counts; tokens are those of the layer that saw most."""
    total, layers = LayerStats(), list(layers)
    for name in vars(total):
        values = [getattr(stats, name) for stats in layers]
        combine = max if name == "tokens" else sum
        setattr(total, name, combine(values) if values else 0)
    return total


class ExpertStats:
    """The account of a store: `layers` by MoE layer id, and the marks of lossy choices.

    Any thread may use it. `layers` changes while the store is called. What the methods return has
    each layer as it was in one moment, in which hits and misses added up to the lookups.

    calls: What each call cost, a :class:`~mlx_moeflux.experts.telemetry.attribution.CallCost` each,
    while
        ``model.attribute()`` lasts; else None.
    lossy: What makes results differ from the full model's, such as ``experts_per_token 4 of 8``,
        or lets their last bits depend on the memory for experts. It describes the set-up and
        survives :meth:`reset`.
    places: What was read from each of several copies of the experts, by path; else empty.
    drafts: Of the steps that read drafts.
    """

    def __init__(self, layers: Iterable[int]):
        self.layers: dict[int, LayerStats] = {layer: LayerStats() for layer in layers}
        self._marks: list[str] = []
        self._later_marks: Callable[[], Iterable[str]] = tuple
        self.calls: list[Any] | None = None
        self.places: dict[str, PlaceStats] = {}
        self.drafts = DraftStats()

    @property
    def total(self) -> LayerStats:
        """The sum over the layers; tokens are those of the layer that saw most."""
        return total_of(self._copied().values())

    @property
    def lossy(self) -> list[str]:
        """The marks, as they are now."""
        return [*self._marks, *self._later_marks()]

    def mark_lossy(self, what: str) -> None:
        """Note once that results differ from the full model's."""
        if what not in self._marks:
            self._marks.append(what)

    def mark_lossy_later(self, marks: Callable[[], Iterable[str]]) -> None:
        """Note that `marks` returns what is lossy besides. It is called each time the marks are
        read, because a kernel may fail at any time."""
        self._later_marks = marks

    def reset(self) -> None:
        """Set every count to zero, in place."""
        if self.calls is not None:
            self.calls = []
        for stats in self.layers.values():
            vars(stats).update(vars(LayerStats()))
        for stats in self.places.values():
            vars(stats).update(vars(PlaceStats()))
        vars(self.drafts).update(vars(DraftStats()))

    def _copied(self) -> dict[int, LayerStats]:
        return {layer: copy.copy(stats) for layer, stats in self.layers.items()}

    def _copied_places(self) -> dict[str, PlaceStats]:
        return {place: copy.copy(stats) for place, stats in self.places.items()}

    def snapshot(self) -> ExpertStats:
        """A copy that no longer changes."""
        result = ExpertStats(())
        result.layers = self._copied()
        result.places = self._copied_places()
        result.drafts = copy.copy(self.drafts)
        result._marks = self.lossy
        calls = self.calls  # another thread may end their recording
        result.calls = None if calls is None else list(calls)
        return result

    def since(self, earlier: ExpertStats) -> ExpertStats:
        """Return the difference to `earlier`, a snapshot since which there was no reset."""
        result = self.snapshot()
        if result.calls is not None:
            result.calls = result.calls[len(earlier.calls or ()) :]
        result.layers = {
            layer: stats.since(earlier.layers[layer]) for layer, stats in result.layers.items()
        }
        result.places = {
            place: stats.since(earlier.places[place]) for place, stats in result.places.items()
        }
        result.drafts = result.drafts.since(earlier.drafts)
        return result

    def table(self) -> StatsTable:
        """Return the account as it is now."""
        layers = self._copied()
        lossy, places = tuple(self.lossy), self._copied_places()
        drafts = copy.copy(self.drafts)
        return StatsTable(layers, total_of(layers.values()), lossy, places, drafts)

    def as_dict(self) -> dict[str, object]:
        """See :meth:`StatsTable.as_dict`; and ``"calls"`` if there are any."""
        data, calls = self.table().as_dict(), self.calls
        if calls is not None:
            data["calls"] = [call.as_dict() for call in list(calls)]
        return data

    def __str__(self) -> str:
        return self.table().line()
