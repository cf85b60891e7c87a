"""Statistics of streaming: counts and seconds for each layer and in total."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class LayerStats:
    """One layer's account.

    tokens: Tokens that passed, padding included.
    lookups: Distinct experts asked for, summed over the calls that had to look. A layer that
        holds every expert does not look.
    hits, misses: The lookups that found the expert resident, and those that did not.
    reads, bytes_read: Blocks and bytes that arrived: one block for each miss, plus what was read
        unasked by `preload` or a prefetcher.
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


def total_of(layers: Iterable[LayerStats]) -> LayerStats:
    """Return the sum of all counts; tokens are those of the layer that saw most."""
    total, layers = LayerStats(), list(layers)
    for field in fields(LayerStats):
        values = [getattr(stats, field.name) for stats in layers]
        combine = max if field.name == "tokens" else sum
        setattr(total, field.name, combine(values) if values else 0)
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
    """

    def __init__(self, layers: Iterable[int]):
        self.layers: dict[int, LayerStats] = {layer: LayerStats() for layer in layers}
        self._marks: list[str] = []
        self._later_marks: Callable[[], Iterable[str]] = tuple
        self.calls: list[Any] | None = None

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

    def _copied(self) -> dict[int, LayerStats]:
        return {layer: copy.copy(stats) for layer, stats in self.layers.items()}

    def snapshot(self) -> ExpertStats:
        """A copy that no longer changes."""
        result = ExpertStats(())
        result.layers = self._copied()
        result._marks = self.lossy
        calls = self.calls  # another thread may end their recording
        result.calls = None if calls is None else list(calls)
        return result

    def since(self, earlier: ExpertStats) -> ExpertStats:
        """Return the difference to `earlier`, a snapshot since which there was no reset."""
        result = self.snapshot()
        if result.calls is not None:
            result.calls = result.calls[len(earlier.calls or ()) :]
        for layer, stats in result.layers.items():
            before = earlier.layers[layer]
            for field in fields(LayerStats):
                difference = getattr(stats, field.name) - getattr(before, field.name)
                setattr(stats, field.name, difference)
        return result

    def as_dict(self) -> dict[str, object]:
        """``{"total": {...}, "layers": {id: {...}}, "lossy": [...]}`` of plain numbers, and
        ``"calls"`` if there are any."""
        copied = self._copied()
        layers = {layer: stats.as_dict() for layer, stats in copied.items()}
        total = total_of(copied.values()).as_dict()
        data = {"total": total, "layers": layers, "lossy": self.lossy}
        calls = self.calls
        if calls is not None:
            data["calls"] = [call.as_dict() for call in list(calls)]
        return data

    def __str__(self) -> str:
        total = self.total
        parts = [
            f"{total.tokens} tokens",
            f"hit rate {100 * total.hit_rate:.1f} % of {total.lookups}",
            f"{total.bytes_read / 1e9:.3f} GB in {total.reads} reads",
            f"I/O {total.read_seconds:.2f} s",
            f"stalls {total.stall_seconds:.2f} s",
            f"compute {total.compute_seconds:.2f} s",
        ]
        if total.proposed:
            parts.append(
                f"read ahead {total.prefetches}, of which {total.prefetched_hits} used; foreseen "
                f"{100 * total.foreseen / total.proposed:.1f} % of {total.proposed}"
            )
        return ", ".join(parts + [f"lossy: {what}" for what in self.lossy])
