"""The bytes of the rows of a table that were used last, in a fixed amount of memory."""

from __future__ import annotations

import numpy as np

ROW_MEMORY = 64 * 10**6
"""Bytes that a table keeps of recent rows by default."""

# A dict takes up to 120 bytes for an entry, its two integers 64, the arrays 24.
INDEX_BYTES = 208
# Entries of the queue that are looked at together.
_LOOK = 256


def kept_rows(rows: int, row_bytes: int, memory_bytes: int = ROW_MEMORY) -> int:
    """Return how many of a table's `rows` of `row_bytes` fit in `memory_bytes` with their index."""
    return min(rows, memory_bytes // (row_bytes + INDEX_BYTES))


def row_memory_bytes(rows: int, row_bytes: int, memory_bytes: int = ROW_MEMORY) -> int:
    """Return the bytes of memory that a table comes to hold: at most `memory_bytes`, and no more
    than all its rows need."""
    return kept_rows(rows, row_bytes, memory_bytes) * (row_bytes + INDEX_BYTES)


class RowCache:
    """At most `capacity` rows of `row_bytes`; the least recently used row makes way.

    Not thread-safe. Within a call, later ids count as used later.
    """

    def __init__(self, capacity: int, row_bytes: int):
        self.capacity = capacity
        self._bytes = np.empty((capacity, row_bytes), np.uint8)
        self._slots: dict[int, int] = {}
        self._filled = 0
        self._ids = np.empty(capacity, np.int64)
        # When each slot was used; the clock ticks with every row.
        self._used = np.zeros(capacity, np.int64)
        self._clock = 1
        # Slots by their use at one moment; those used since are no victims.
        self._queue = np.empty(0, np.int64)
        self._queued_at = 0

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, ids: np.ndarray, into: np.ndarray) -> np.ndarray:
        """Copy the rows that are here into theirs of `into` and return which are, bool ``[N]``.

        ids: Distinct, int64 ``[N]``. into: uint8 ``[N, row_bytes]``.
        """
        slots = self._find(ids)
        here = slots >= 0
        if here.all():
            np.take(self._bytes, slots, axis=0, out=into, mode="clip")
            self._touch(slots)
        elif here.any():
            slots = slots[here]
            into[here] = self._bytes[slots]
            self._touch(slots)
        return here

    def put(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Keep the rows, or the last `capacity` of them.

        ids: Distinct, int64 ``[N]``. rows: uint8 ``[N, row_bytes]``.
        """
        if not self.capacity or not len(ids):
            return
        ids, rows = ids[-self.capacity :], rows[-self.capacity :]
        slots = self._find(ids)
        # Those that another thread put here meanwhile are used now, and stay.
        self._touch(slots[slots >= 0])
        new = slots < 0
        slots[new] = free = self._free(int(new.sum()))
        self._ids[free], self._bytes[free] = ids[new], rows[new]
        self._slots.update(zip(ids[new].tolist(), free.tolist(), strict=True))
        self._touch(slots)

    def _find(self, ids: np.ndarray) -> np.ndarray:
        """Return the slot of each id, -1 for those that are not here."""
        find = self._slots.get
        return np.array([find(i, -1) for i in ids.tolist()], np.int64)

    def _touch(self, slots: np.ndarray) -> None:
        self._used[slots] = np.arange(self._clock, self._clock + len(slots))
        self._clock += len(slots)

    def _free(self, count: int) -> np.ndarray:
        """Return `count` slots to fill, of rows that are forgotten if no slot is empty."""
        empty = np.arange(self._filled, min(self._filled + count, self.capacity))
        self._filled += len(empty)
        found = [empty]
        self._touch(empty)  # or the order below would have them
        count -= len(empty)
        while count:
            if not len(self._queue):
                # Sorting all slots once for as many uses is less than any order kept up to date.
                self._queue, self._queued_at = np.argsort(self._used), self._clock
            ahead = self._queue[: max(count, _LOOK)]
            old = np.flatnonzero(self._used[ahead] < self._queued_at)[:count]
            self._queue = self._queue[old[-1] + 1 if len(old) == count else len(ahead) :]
            victims = ahead[old]
            self._touch(victims)
            for i in self._ids[victims].tolist():
                # It may be gone if memory ran out during an earlier call.
                self._slots.pop(i, None)
            found.append(victims)
            count -= len(victims)
        return np.concatenate(found)
