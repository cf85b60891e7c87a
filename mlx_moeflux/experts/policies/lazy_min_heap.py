"""A heap of scores from which policies choose victims. Pure Python, no MLX."""

from __future__ import annotations

from collections.abc import Collection, Container
from heapq import heappop, heappush, heapreplace


class LazyMinHeap:
    """Residents by a key that never falls, so that the lowest is found in logarithmic time.

    keys: Expert -> key, also of experts that are not resident; 0 where there is none. Its owner
    writes it. A key that has grown since it was queued is noticed when its turn comes.
    """

    def __init__(self):
        self.keys: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self._queued: set[int] = set()
        self._taken: tuple[int, ...] = ()
        self._out_of_date = False

    def scale(self, factor: float) -> None:
        """Multiply all keys."""
        self.keys = {expert: key * factor for expert, key in self.keys.items()}
        self._out_of_date = True

    def replace(self, keys: dict[int, float]) -> None:
        """Take other keys, which may have fallen."""
        self.keys, self._out_of_date = keys, True

    def admit(self, expert: int) -> None:
        if expert not in self._queued:
            self._queued.add(expert)
            heappush(self._heap, (self.keys.get(expert, 0.0), expert))

    def lowest(self, count: int, resident: Collection[int], protected: Container[int]) -> list[int]:
        """The `count` residents outside `protected` with the lowest keys, ascending; they leave
        the queue, and come back if they are residents still when this is called again."""
        for expert in self._taken:
            if expert in resident:
                self.admit(expert)
        victims: list[int] = []
        passed: list[tuple[float, int]] = []
        complete = False
        heap, queued, keys = self._heap, self._queued, self.keys
        while len(victims) < count:
            if self._out_of_date or not heap:
                # Residents are missing that the policy does not know, or since an interrupt.
                if complete:
                    break
                complete = True
                self._queue(resident)
                victims, passed = [], []
            key, expert = heap[0]
            if expert not in resident:
                heappop(heap)
                queued.discard(expert)
            elif key != (now := keys.get(expert, 0.0)):
                heapreplace(heap, (now, expert))
            elif expert in protected:
                passed.append(heappop(heap))
            else:
                heappop(heap)
                queued.discard(expert)
                victims.append(expert)
        for entry in passed:
            heappush(heap, entry)
        self._taken = tuple(victims)
        return victims

    def _queue(self, resident: Collection[int]) -> None:
        """Make the queue anew."""
        self._heap.clear()
        self._queued.clear()
        for expert in resident:
            self.admit(expert)
        self._out_of_date = False


def unknown(
    known: Container[int], resident: Collection[int], protected: Container[int]
) -> list[int]:
    """Residents that a policy does not know, ascending."""
    return sorted(e for e in resident if e not in known and e not in protected)
