"""Lends the slots of a streamed store to threads outside Python, for decode steps of one sequence.

A kernel of each layer posts the chosen experts and waits; threads answer with slots and read what
is missing. So a whole step is one trace, and nothing of it returns to Python.
``docs/handshake.md`` has the states and the protocol.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx

from mlx_moeflux.experts.io.desk import Desk, Memory, Shelf
from mlx_moeflux.experts.io.native_pool import NativePool
from mlx_moeflux.experts.io.read_pool import complete
from mlx_moeflux.experts.policies.eviction import LFU, LRU, Scores
from mlx_moeflux.experts.streaming.layer import StreamedLayer
from mlx_moeflux.experts.streaming.slots import EMPTY
from mlx_moeflux.kernels.runtime import device

# A kernel waits at most this long for the host. Then the other path repeats its step.
WAIT_SECONDS = 1.5


class StepFailed(RuntimeError):
    """A step did not get its experts; its results mean nothing."""


class Handshake:
    """Lends the layers of a store, which owns it. Every method but :meth:`report` is called by a
    thread that holds `lock`, the store's.

    states: MoE layer id -> layer. pull: The kernel. ready: Whether the store may lend. restore:
    Gives the layers their banks. changed: Called when traces of earlier steps hold no more.

    A slot's memory is written by kernels alone while it is lent, or by the threads alone where the
    kernels do not copy. The tables and the scores that the threads change go back in
    :meth:`take_back`, before anything else uses them. steps: That were made. stepping: True inside
    :meth:`step`. off: Why no further step is tried; None: one may be.
    """

    def __init__(
        self,
        pool: NativePool,
        states: Mapping[int, StreamedLayer],
        eviction: LFU | LRU,
        pull: device.Pull,
        *,
        lock: threading.RLock,
        ready: Callable[[], bool],
        restore: Callable[[], None],
        changed: Callable[[], None],
    ):
        self.k, self.steps = pull.k, 0
        self.off: str | None = None
        self._pool, self._states, self._eviction, self._pull = pool, states, eviction, pull
        self._lock, self._ready, self._restore, self._changed = lock, ready, restore, changed
        self._memory = memory = Memory(pool.reader, pull)
        limit = int(1e9 * WAIT_SECONDS)
        self._controls = {
            layer: pull.control(memory.common, box, limit) for layer, box in memory.boxes.items()
        }
        self._desk: Desk | None = None
        self.stepping = False
        # What traces of steps hold: which layers were lent, and which memory they had.
        self._traced: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that kernels and threads share."""
        return self._memory.view.nbytes

    def serves(self, layer: int) -> bool:
        """Return True if a call of this layer belongs to a step that is under way."""
        return self.stepping and self.lends(layer)

    def lends(self, layer: int) -> bool:
        """Return True if the slots of this layer are lent."""
        return self._desk is not None and layer in self._desk.shelves

    def slots(self, layer: int, ids: mx.array) -> mx.array:
        """Return the slots ``[1, K]`` uint32 of the experts `ids`, with their blocks once it is
        evaluated; for a step that is under way."""
        return self._pull.slots(ids, self._controls[layer])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the store while one token passes all layers; what the step computes is evaluated
        inside. Afterwards all reads have ended, and the statistics have them.

        Raises:
            StepFailed: Something came too late, or could not be read.
        """
        with self._lock:
            if not self._ready():
                raise StepFailed("another thread uses the store")
            try:
                self._lend().begin()
                self.stepping = True
                yield
                self._end()
            except BaseException as error:
                if isinstance(error, Exception):
                    self.off = " ".join(str(error).split())
                complete(self._give_up)
                raise
            finally:
                self.stepping = False

    def begin_again(self) -> None:
        """See :meth:`mlx_moeflux.experts.store.Handshake.begin_again`."""
        complete(self._give_up)
        self._lend().begin()

    def take_back(self) -> None:
        """Give the layers and the policy back what they lent. A step that is under way fails."""
        if self.stepping:
            complete(self._give_up)
        elif self._desk is not None:
            complete(self._return)

    def report(self) -> str:
        """Return which way decode steps took, as a phrase."""
        text = f"handshake: {self.steps} steps"
        return text if self.off is None else f"{text}, then off: {self.off}"

    def _lend(self) -> Desk:
        if self._desk is not None:
            return self._desk
        self._restore()
        shelves: dict[int, Shelf] = {}
        for layer, state in self._states.items():
            if state.change.open:
                state.recover()
            state.settle()
            state.fence()
            if state.table.complete:
                continue
            scores = self._eviction.scores(layer)
            shelves[layer] = Shelf(
                self._pool.place(layer, state.bank.current),
                state.table.expert_of,
                scores.of,
                num_experts=state.table.num_experts,
                base=scores.base,
                time=state.tokens,
            )
        traced = [(layer, self._states[layer].bank.allocations) for layer in shelves]
        if traced != self._traced:
            self._traced = traced
            self._changed()
        rate = self._eviction.rate
        self._desk = Desk(self._pool, self._memory, shelves, rate=rate)
        return self._desk

    def _end(self) -> None:
        desk = self._desk
        if desk is None:
            raise StepFailed("something else used the experts meanwhile")
        desk.wait()
        if (failure := desk.failure()) is not None:
            raise StepFailed(failure)
        self.steps += 1
        for layer, counts in desk.counts().items():
            lookups, misses = counts["lookups"], counts["misses"]
            waited, decided = 1e-9 * counts["waited"], 1e-9 * counts["decided"]
            self._states[layer].count(
                lookups=lookups,
                misses=misses,
                hits=lookups - misses,
                reads=misses,
                evictions=counts["evictions"],
                bytes_read=counts["bytes_read"],
                read_seconds=1e-9 * counts["read"],
                stall_seconds=waited,
                compute_seconds=decided,
            )
        for state in self._states.values():
            state.stats.tokens += 1
            state.tokens += 1

    def _give_up(self) -> None:
        """End a step that failed: no kernel and no thread writes any more, and slots that it filled
        are empty, because their blocks may be incomplete."""
        desk = self._desk
        if desk is not None and desk.open:
            desk.abort()
            self._pull.finish()
            desk.wait()
            for shelf in desk.shelves.values():
                shelf.expert_of[shelf.since == desk.turn] = EMPTY
        self._return()

    def _return(self) -> None:
        desk = self._desk
        if desk is None:
            return
        desk.close()
        for layer, shelf in desk.shelves.items():
            state = self._states[layer]
            state.take_table(shelf.expert_of.tolist())
            scores = {e: score for e, score in enumerate(shelf.scores.tolist()) if score}
            self._eviction.set_scores(layer, Scores(scores, shelf.base))
        self._desk = None
