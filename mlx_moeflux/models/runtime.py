"""What a loaded model has besides its mathematics: store, lock, ranks, memory, and those who watch
its calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_moeflux.backend import use_mlx
from mlx_moeflux.cache import BaseCache
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import Plan, format_bytes, parse_budget, slots_for_budget
from mlx_moeflux.experts.compute import compute_scratch_bytes
from mlx_moeflux.experts.io.row_table import RowStats, RowTable, sum_of
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.telemetry.attribution import Attribution
from mlx_moeflux.experts.telemetry.events import EventHook, joined, parted
from mlx_moeflux.experts.telemetry.trace import Rows, TraceInfo, TraceWriter
from mlx_moeflux.models.hooks import Hook
from mlx_moeflux.models.layers import Pause
from mlx_moeflux.models.moe import Router
from mlx_moeflux.models.record import record


class Runtime:
    """Store, ranks and memory of a model, and the lock of its steps; its ``runtime``.

    Any thread may call it. A generator holds :attr:`lock` for each step.

    router: Of all MoE layers. forget_steps: Drops the decode traces, which keep banks in memory.
    store: Computes the experts of every MoE block; None until the model's ``set_store``.
    observers: Those who watch the model's calls.
    plan: Memory of the experts; None for a store that the user gave.
    wired_memory: As :func:`~mlx_moeflux.experts.budget.parse_wired_memory` returns it.
    decoding_bytes: Of experts that stock MLX decodes in every call.
    tables: Layer -> table of rows that stay on disk.
    """

    store: ExpertStore = cast("Any", None)

    def __init__(self, router: Router, forget_steps: Callable[[], None]):
        self.router, self._forget_steps = router, forget_steps
        self._lock = threading.RLock()
        self.observers = Observers(self)
        self.plan: Plan | None = None
        self.wired_memory: str | int | None = None
        self.decoding_bytes = 0
        self.tables: Mapping[int, RowTable] = MappingProxyType({})

    @property
    def lock(self) -> threading.RLock:
        """Lock that a generator holds for each step. A thread of the parent may hold it for ever
        in a forked process, so that the property raises what ``use_mlx`` does."""
        use_mlx()
        return self._lock

    def start_eval(self) -> None:
        """Make this thread's pending evaluation visible to other threads; see the store."""
        if (streaming := self.store.streaming) is not None:
            streaming.start_eval()

    @property
    def experts_stay_on_device(self) -> bool:
        """True if no call of a layer needs the host, and a trace may stand for a whole step."""
        return self.store.direct is not None and self.store.direct.stays_on_device

    @property
    def leads(self) -> bool:
        """True unless this is a rank other than 0 of several."""
        return self.store.ranks is None or self.store.ranks.leads

    def lead(self, tokens: mx.array) -> mx.array:
        """Return the sampled tokens, those of rank 0 if the experts are on several ranks."""
        return tokens if self.store.ranks is None else self.store.ranks.lead(tokens)

    def ahead(self) -> AbstractContextManager[None]:
        """Let a step go on after the block: other calls wait for what several ranks exchange."""
        ranks = self.store.ranks
        return nullcontext() if ranks is None else ranks.ahead()

    def wait_for_ranks(self, most: int = 0) -> None:
        """Wait until at most so many exchanges of several ranks are under way. Before the host
        waits for outputs: the ranks know then who waits for whom."""
        if self.store.ranks is not None:
            self.store.ranks.wait(most)

    def marks(self, h: mx.array) -> tuple[mx.array, ...]:
        """Return what several ranks have to compare after a call whose last layer returned h; see
        :meth:`~mlx_moeflux.experts.store.Spread.marks`."""
        return () if self.store.ranks is None else self.store.ranks.marks(h)

    def noted(self, logits: mx.array, h: mx.array, *marks: mx.array) -> mx.array:
        """Return the logits of a call, whose last layer returned h and which has these
        :meth:`marks`, after others have seen h and the ranks the marks."""
        if self.store.ranks is not None:
            self.store.ranks.check(*marks)
        if self.observers.hidden is not None:
            self.observers.hidden.append(h)
        return logits

    def set_expert_memory(self, budget: str | float) -> None:
        """Resize the banks of streamed experts; see
        :meth:`~mlx_moeflux.models.base.StreamingModel.set_expert_memory`."""
        store, streaming = self.store, self.store.streaming
        if streaming is None or store.block_bytes is None:
            raise InputError("these experts are not streamed; load with a smaller expert_memory.")
        with self.lock:
            most = streaming.most_slots
            nbytes = parse_budget(budget, sum(store.block_bytes.values()) * most)
            if nbytes is None:
                raise InputError("expert memory at run time must be a number, such as 2GB or 50%.")
            slots = slots_for_budget(
                nbytes,
                store.block_bytes,
                num_experts=most,
                experts_per_token=min(self.router.num_experts_per_tok, most),
                staging_bytes=streaming.nbytes - streaming.bank_bytes,
            )
            self.resize_banks(slots)
            if self.plan is not None:
                why = f"{budget if isinstance(budget, str) else format_bytes(budget)} was set"
                self.plan = replace(self.plan, slots=slots, budget_bytes=nbytes, why=why)

    def resize_banks(self, slots: Mapping[int, int]) -> None:
        """Give each layer of streamed experts its number of slots, which is not planned to last.
        Results keep their bits. slots: MoE layer id -> slots."""
        streaming = self.store.streaming
        assert streaming is not None, "the experts are not streamed"
        with self.lock:
            # A trace would keep the old banks in memory.
            self._forget_steps()
            streaming.resize_all(slots)

    def expert_scratch_bytes(self) -> int:
        """Return a bound of the bytes that computing experts allocates besides results."""
        return compute_scratch_bytes() + self.decoding_bytes

    @property
    def row_bytes(self) -> int:
        """Return the bytes of memory for rows of tables on disk."""
        return sum(table.memory_bytes for table in self.tables.values())

    def row_stats(self) -> RowStats | None:
        """Return the account of all tables on disk, or None if there are none."""
        return sum_of(table.stats() for table in self.tables.values())

    def release(self) -> None:
        """Free the memory of the experts until the next call, which reads them again."""
        self._forget_steps()
        if self.store.rest is not None:
            self.store.rest.release()

    def close(self) -> None:
        """Free the experts, the traces and the tables, their files and threads."""
        if self.store is not None:
            self.store.close()
        self._forget_steps()
        for table in self.tables.values():
            table.close()


class Observers:
    """Hooks, recordings and listeners of a model's calls. While there is one, decode steps run
    operation by operation.

    Any thread may add and remove them between two calls of the model.

    count: Recordings and hooks. hidden: Gets the output of the last layer of each call, if anyone
    collects it. writers: The trace files that are written; a walk through the layers tells them
    what it reads.
    """

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        # Taken before the lock of the store.
        self._lock = threading.RLock()
        self.count = 0
        self.hidden: list[mx.array] | None = None
        self.writers: tuple[TraceWriter, ...] = ()
        self._known = threading.local()  # what traces know of the step of a thread

    @property
    def active(self) -> bool:
        """True while events, recordings or hooks see what each token computes."""
        return bool(self.count) or self._runtime.store.events is not None

    @contextmanager
    def record(
        self,
        layers: Sequence[Any | None],
        *,
        chosen: Iterable[int] | None,
        names: Iterable[str] | None,
    ) -> Iterator[dict[int, dict[str, mx.array]]]:
        """Record intermediate arrays of `layers`; see :func:`~mlx_moeflux.models.record.record`."""
        self.count += 1
        try:
            with record(layers, chosen=chosen, names=names) as kept:
                yield kept
        finally:
            self.count -= 1

    def hook(self, module: Any, layer: int, point: str, function: Callable[..., Any]) -> Hook:
        """Call `function` with arrays of every call of `module`, a part of layer number `layer`."""
        self.count += 1
        return Hook(module, layer, point, function, self._unhooked)

    def _unhooked(self) -> None:
        self.count -= 1

    @contextmanager
    def collect_hidden(self) -> Iterator[list[mx.array]]:
        """Collect the output of the last layer; see
        :meth:`~mlx_moeflux.models.base.StreamingModel.collect_hidden`."""
        self.hidden = found = []
        try:
            yield found
        finally:
            self.hidden = None

    @contextmanager
    def trace(self, path: str | os.PathLike[str], *, model: str) -> Iterator[TraceWriter]:
        """Write the experts of every token to a file. model: Identity of the model.

        Raises:
            InputError: The file cannot be written, or the store has no events.
        """
        store = self._runtime.store
        with ExitStack() as stack:
            # It describes the store as the first event finds it.
            alone = nullcontext() if store.streaming is None else store.streaming.exclusive()
            with self._lock, alone:
                K = self._runtime.router.num_experts_per_tok
                info = TraceInfo.of(store, experts_per_token=K, model=model)
                writer = stack.enter_context(TraceWriter(path, info))
                stack.enter_context(self._listening(writer))
                self.writers = (*self.writers, writer)
            try:
                yield writer
            finally:
                with self._lock:
                    self.writers = tuple(one for one in self.writers if one is not writer)

    @contextmanager
    def attribute(self) -> Iterator[None]:
        """Fill ``store.stats().calls`` with the cost of each layer call.

        Raises:
            InputError: The store has no events.
        """
        stats = self._runtime.store.stats()
        listener = Attribution(stats)
        stats.calls = []
        try:
            with self._listening(listener):
                yield
        finally:
            listener.end_of_call()
            stats.calls = None

    @contextmanager
    def _listening(self, listener: EventHook) -> Iterator[None]:
        """Add a listener to the store, whichever others come and go meanwhile. It gets the events
        of whole calls of layers."""
        store = self._runtime.store
        with self._lock:
            store.events = joined(store.events, listener)
        try:
            yield
        finally:
            with self._lock:
                store.events = parted(store.events, listener)

    def rows_of(self, tokens: Sequence[mx.array], states: Sequence[Sequence[Any]]) -> list[Rows]:
        """Return what trace files say of the ``[B, T]`` of `tokens`; each has its state, or a
        stand-in inside :meth:`rows_known`."""
        if (known := getattr(self._known, "rows", None)) is not None:
            return known
        found = []
        for ids, state in zip(tokens, states, strict=True):
            B, T = ids.shape
            prompt = T > 1 or state[0].empty()
            numbers = np.repeat(state[0].numbered(B), T)
            found.append(Rows(numbers, np.array(ids).reshape(-1), np.full(B * T, prompt)))
        return found

    @contextmanager
    def rows_known(
        self, tokens: Sequence[mx.array], states: Sequence[Sequence[BaseCache]]
    ) -> Iterator[None]:
        """Let trace files know what the block reads, in which `states` have stand-ins."""
        if self.writers:
            self._known.rows = self.rows_of(tokens, states)
        try:
            yield
        finally:
            self._known.rows = None

    def told(
        self, walk: Generator[Pause, None, list[mx.array]], rows: Rows
    ) -> Generator[Pause, None, list[mx.array]]:
        """Take a walk through a layer while trace files know which rows it reads. In a pause
        another call may read others."""
        with closing(walk):
            while True:
                self.tell(rows)
                try:
                    pause = next(walk)
                except StopIteration as end:
                    return end.value
                finally:
                    self.tell(None)
                yield pause

    def tell(self, rows: Rows | None) -> None:
        """Tell trace files which rows are read from now on; None: none."""
        for writer in self.writers:
            writer.rows = rows
