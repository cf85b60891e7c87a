"""Reading back, in the background, the experts that were in memory when a state was kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.layer import missing_of
from mlx_moeflux.experts.streamed import StreamedStore

# Blocks between two moments at which others get the store.
AT_ONCE = 8
ATTEMPTS = 100
PAUSE_SECONDS = 0.01


def rewarm(store: Any, experts: Mapping[int, Iterable[int]]) -> threading.Thread | None:
    """Start a thread that reads all `experts` (MoE layer id -> ids) that are missing, a few at a
    time, in the place of others; None for stores that do not read. What cannot be read is left to
    the call that needs it."""
    if not isinstance(store, StreamedStore) or not experts:
        return None
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


def bring(
    store: StreamedStore, layer: int, experts: Iterable[int], *, protected: Collection[int]
) -> bool | None:
    """Read those that are missing, in the place of others than `protected`; False if that must
    wait, None if there is nothing to read into any more. Counted as reads, not as misses."""
    with store._lock:
        if store._closed or layer not in store.layers:
            return None
        state = store._state(layer)
        if state.read_elsewhere():
            return False
        state.land((), wait=True, events=store.tell)
        room = state.table.slots - sum(expert in state.table for expert in protected)
        absent = missing_of(state.table, (e for e in experts if 0 <= e < store.num_experts))
        if absent[:room]:
            try:
                slots = state.make_room(len(absent[:room]), protected, store.tell)
                state.start(store._threads, absent[:room], slots, store.tell)
                state.finish(store.tell)
                state.settled()
            finally:
                if state.unsettled:
                    state.settle()
        return True


def _bring_layer(store: StreamedStore, layer: int, ids: list[int]) -> bool:
    """Bring `ids`, and take from the list what is done; False if the thread must end."""
    protected = frozenset(ids)
    while ids:
        try:
            done = bring(store, layer, ids[:AT_ONCE], protected=protected)
        except ExpertFileError:
            return False
        if done is None:
            return False
        if not done:
            return True
        del ids[:AT_ONCE]
    return True
