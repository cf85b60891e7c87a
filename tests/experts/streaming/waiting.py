"""A kernel of the handshake, played by Python: the same words in the same memory, on the CPU."""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.io.desk import PIECE_WORDS, PIECES

TURN, ABORT, ANSWER, TAG = 0, 1, 32, 16
TO, FROM, NBYTES, READY = range(4)
LARGEST_BOX = 1 << 17


class Control(NamedTuple):
    common: np.ndarray
    box: np.ndarray
    limit: int


def words(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address))


class PlayedPull:
    """Stands for :class:`~mlx_moeflux.kernels.runtime.cuda.handshake.Pull`. Calls are evaluated at
    once. before: Called with the number of the call before its ids are posted. late: Nothing is
    posted, and nothing waited for."""

    copies = True

    def __init__(self, k):
        self.k, self.calls, self.before, self.late = k, 0, lambda call: None, False

    def locked(self, nbytes):
        return memoryview(mmap.mmap(-1, nbytes))

    def control(self, common, box, limit):
        return Control(words(common, 2), words(box, 64), limit)

    def slots(self, ids, control):
        turn, box = int(control.common[TURN]), control.box
        self.before(self.calls)
        self.calls += 1
        for k, expert in enumerate(np.array(ids)[0].tolist()):
            if not self.late:
                box[k] = turn << TAG | expert
        answer = [self._awaited(box, ANSWER + k, turn, control) for k in range(self.k + 1)]
        slots = [word & 0xFFFF for word in answer]
        start, count = box.ctypes.data + 8 * PIECES, slots.pop()
        pieces = words(start, PIECE_WORDS * count) if count else ()
        for i in range(0, PIECE_WORDS * count, PIECE_WORDS):
            if self._awaited(pieces, i + READY, turn, control):
                to, source, nbytes = pieces[i : i + 3].tolist()
                ctypes.memmove(to, source, nbytes)
        return mx.array([slots], mx.uint32)

    def finish(self):
        pass

    def _awaited(self, at, index, turn, control):
        limit = -1.0 if self.late else 1e-9 * control.limit
        begun = time.monotonic()
        while True:
            word = int(at[index])
            if word >> TAG == turn:
                return word
            if control.common[ABORT]:
                return 0
            if time.monotonic() - begun > limit:
                control.common[ABORT] = 1
                return 0
            time.sleep(0)


class PlayedPullWithoutCopies(PlayedPull):
    """Stands for :class:`~mlx_moeflux.kernels.runtime.metal.handshake.Pull`: threads write
    slots."""

    copies = False
