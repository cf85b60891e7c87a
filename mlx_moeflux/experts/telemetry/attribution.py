"""The cost of every layer call: requests, hits, reads and waiting time. No MLX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_moeflux.experts.telemetry.events import Chosen, Event, Hit, Miss, PrefetchEnd, ReadEnd
from mlx_moeflux.experts.telemetry.stats import ExpertStats


@dataclass
class CallCost:
    """One call of a layer.

    token: Tokens that the layer had seen before.
    ids: What they chose, ``[N, K]``; E is padding.
    hits, prefetched, missed: The experts that were resident, that were read ahead for their first
        use here, and that had to be read.
    bytes_demanded, bytes_hidden: Read because of them, and read ahead of this call, needed or not.
    stall_seconds: Waited for reads.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {**self.__dict__, "ids": self.ids.tolist()}


class Attribution:
    """A listener that appends to ``stats.calls`` what each call cost."""

    def __init__(self, stats: ExpertStats):
        self._stats, self._stalled = stats, 0.0

    def __call__(self, event: Event) -> None:
        """Take one event of a store."""
        calls = self._stats.calls
        if calls is None:
            return
        if isinstance(event, Chosen):
            self.end_of_call()
            self._stalled = self._stats.layers[event.layer].stall_seconds
            calls.append(CallCost(event.layer, event.token, event.ids))
        elif not calls or calls[-1].layer != event.layer:
            return
        elif isinstance(event, Hit):
            (calls[-1].prefetched if event.prefetched else calls[-1].hits).append(event.expert)
        elif isinstance(event, Miss):
            calls[-1].missed.append(event.expert)
        elif isinstance(event, ReadEnd):
            calls[-1].bytes_demanded += event.nbytes
        elif isinstance(event, PrefetchEnd):
            calls[-1].bytes_hidden += event.nbytes

    def end_of_call(self) -> None:
        """The last call is over."""
        calls = self._stats.calls
        if calls:
            last = calls[-1]
            stalled = self._stats.layers[last.layer].stall_seconds
            last.stall_seconds = max(stalled - self._stalled, 0.0) or last.stall_seconds
