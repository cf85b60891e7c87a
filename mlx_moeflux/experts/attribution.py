"""What every call of a layer cost: who was asked for, who was there, what it waited for. No MLX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_moeflux.experts.events import (
    Chosen,
    Event,
    Hit,
    LookedUp,
    Miss,
    PrefetchEnd,
    ReadEnd,
    Steps,
)
from mlx_moeflux.experts.stats import ExpertStats


@dataclass
class CallCost:
    """One call of a layer.

    token: Tokens that the layer had seen before. ids: What they chose, ``[N, K]``; E is padding.
    hits, prefetched, missed: The experts that were resident, that were read ahead for their first
    use here, and that had to be read. bytes_demanded, bytes_hidden: Read because of them, and read
    ahead of this call, needed or not. stall_seconds: Waited for reads.
    """

    layer: int
    token: int
    ids: np.ndarray
    hits: list[int] = field(default_factory=list)
    prefetched: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    bytes_demanded: int = 0
    bytes_hidden: int = 0
    stall_seconds: float = 0.0

    def tokens_per_expert(self, num_experts: int) -> np.ndarray:
        """How many tokens of the call chose each expert, ``[E]``: moeflux's HTPE histogram."""
        return np.bincount(self.ids.reshape(-1), minlength=num_experts + 1)[:num_experts]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {**self.__dict__, "ids": self.ids.tolist()}


class Attribution:
    """A listener that appends to ``stats.calls`` what each call cost. late: It may hear of calls
    late, because none of them waits for reads."""

    def __init__(self, stats: ExpertStats, *, late: bool = False):
        self._stats, self.late, self.catch_up = stats, late, lambda: None
        self._stalled = 0.0

    def __call__(self, event: Event | LookedUp | Steps) -> None:
        """See :class:`~mlx_moeflux.experts.events.Recorder`."""
        kind, calls = type(event), self._stats.calls
        if kind is Steps or kind is LookedUp:
            for each in event.events():
                self(each)
        elif kind is Chosen:
            self.end_of_call()
            self._stalled = self._stats.layers[event.layer].stall_seconds
            calls.append(CallCost(event.layer, event.token, event.ids))
        elif not calls or calls[-1].layer != event.layer:
            return
        elif kind is Hit:
            (calls[-1].prefetched if event.prefetched else calls[-1].hits).append(event.expert)
        elif kind is Miss:
            calls[-1].missed.append(event.expert)
        elif kind is ReadEnd:
            calls[-1].bytes_demanded += event.nbytes
        elif kind is PrefetchEnd:
            calls[-1].bytes_hidden += event.nbytes

    def end_of_call(self) -> None:
        """The last call is over."""
        if self._stats.calls:
            last = self._stats.calls[-1]
            stalled = self._stats.layers[last.layer].stall_seconds
            last.stall_seconds = max(stalled - self._stalled, 0.0) or last.stall_seconds


def by_token(calls: Iterable[CallCost]) -> Mapping[int, list[CallCost]]:
    """Calls by the token that they began with, in order: the layers of one step together."""
    steps: dict[int, list[CallCost]] = {}
    for call in calls:
        steps.setdefault(call.token, []).append(call)
    return steps
