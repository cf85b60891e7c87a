"""Read back, in the background, the experts that were in memory when a state was saved."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.store import ExpertStore, Streaming

# Blocks that are read before other threads may use the store.
AT_ONCE = 8
ATTEMPTS = 100
PAUSE_SECONDS = 0.01


def warm_up(store: ExpertStore, experts: Mapping[int, Iterable[int]]) -> threading.Thread | None:
    """Start a thread that reads the missing ones of `experts` (MoE layer id -> ids), a few at a
    time, in place of others. Return None for stores that do not read. An expert that cannot be read
    is left to the call that needs it."""
    streaming = store.streaming
    if streaming is None or not experts:
        return None
    wanted = {layer: list(ids) for layer, ids in experts.items()}

    def work() -> None:
        for _ in range(ATTEMPTS):
            for layer in list(wanted):
                if not _read_layer(streaming, layer, wanted[layer]):
                    return
                if not wanted[layer]:
                    del wanted[layer]
            if not wanted:
                return
            time.sleep(PAUSE_SECONDS)

    thread = threading.Thread(target=work, name="warm_up")
    thread.start()
    return thread


def _read_layer(streaming: Streaming, layer: int, ids: list[int]) -> bool:
    """Read `ids` and remove from the list those that are done; return False to end the thread."""
    protected = frozenset(ids)
    while ids:
        try:
            done = streaming.read_missing(layer, ids[:AT_ONCE], protected=protected)
        except ExpertFileError:
            return False
        if done is None:
            return False
        if not done:
            return True
        del ids[:AT_ONCE]
    return True
