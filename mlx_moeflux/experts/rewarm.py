"""Reading back, in the background, the experts that were in memory when a state was kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from mlx_moeflux.errors import ExpertFileError

# Blocks between two moments at which others get the store.
AT_ONCE = 8
ATTEMPTS = 100
PAUSE_SECONDS = 0.01


class Bringing(Protocol):
    """A store that can read experts nobody asked for."""

    def bring(
        self, layer: int, experts: Iterable[int], *, protected: Collection[int]
    ) -> bool | None:
        """Read those that are missing, in the place of others than `protected`; False if that must
        wait, None if there is nothing to read into any more."""
        ...


def rewarm(store: Bringing, experts: Mapping[int, Iterable[int]]) -> threading.Thread:
    """Start a thread that brings all `experts` (MoE layer id -> ids), a few at a time, each layer's
    in the order given. What cannot be read is left to the call that needs it."""
    wanted = {layer: list(ids) for layer, ids in experts.items()}

    def work() -> None:
        for _ in range(ATTEMPTS):
            for layer in list(wanted):
                if not _bring_layer(store, layer, wanted[layer]):
                    return
                if not wanted[layer]:
                    del wanted[layer]
            if not wanted:
                return
            time.sleep(PAUSE_SECONDS)

    thread = threading.Thread(target=work, name="rewarm")
    thread.start()
    return thread


def _bring_layer(store: Bringing, layer: int, ids: list[int]) -> bool:
    """Bring `ids`, and take from the list what is done; False if the thread must end."""
    protected = frozenset(ids)
    while ids:
        try:
            done = store.bring(layer, ids[:AT_ONCE], protected=protected)
        except ExpertFileError:
            return False
        if done is None:
            return False
        if not done:
            return True
        del ids[:AT_ONCE]
    return True
