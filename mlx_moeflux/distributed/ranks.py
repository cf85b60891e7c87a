"""The ranks of one run: their collectives, and what they agree on at the start."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.backend import set_device_variables
from mlx_moeflux.distributed.heartbeat import ADVICE, MOST_TEXT, Heartbeat
from mlx_moeflux.errors import DistributedError, MoefluxError
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.verify import trials

# Up to this size a GPU computes a rank's part of a sum in no time that would count as waiting.
BRIEF_BYTES = 8 << 20
# How many sums may be under way when the next is queued: a step's and that of its token.
MOST_AHEAD = 2
# How MLX begins what it says of collectives.
BACK_ENDS = ("[ring]", "[jaccl]", "[mpi]", "[nccl]")
# Of the hash of all layers' ids, modulo 2**32.
HASH_FACTOR = 0x01000193


class Ranks:
    """This process and the others of an ``mx.distributed`` group.

    Every rank makes the same calls in the same order, in one thread at a time. Sums are queued, so
    that a GPU computes meanwhile; each begins with the result of the one before, which gives all
    ranks one order. They are awaited in order, where the heartbeat knows who waits for others. In a
    trace they are part of its graph, and awaited with what the trace returns.

    After each call a hash of the experts that the ranks chose in it is exchanged and compared.

    group: None: what ``mlx.launch`` has set up.

    Raises:
        DistributedError: There is no such group, or rank 0 does not answer.
    """

    def __init__(self, group: Any = None):
        try:
            self.group = start_group() if group in (None, True) else group
            self.rank, self.size = self.group.rank(), self.group.size()
        except (RuntimeError, ValueError, AttributeError) as error:
            raise DistributedError(
                f"no group of ranks ({error}); start each rank with mlx.launch, or give a group of "
                "mx.distributed.init(strict=True)."
            ) from error
        self.leads = self.rank == 0
        self._own = mx.array(np.arange(self.size)[:, None] == self.rank).astype(mx.uint32)
        # An array that the host makes may cost CUDA's allocator a copy.
        self._is_first = mx.array(self.leads, mx.uint32)
        mx.eval(self._own, self._is_first)
        self._under_way: deque[tuple[mx.array, Sequence[mx.array], bool]] = deque()
        self._runs_ahead = False
        self._hash: mx.array | np.ndarray | None = None
        self.heartbeat: Heartbeat | None = None
        if self.size > 1:
            self.heartbeat = self._heartbeat()
            # A process that forgets to close its model has not failed.
            atexit.register(self.heartbeat.end)

    def sum(self, x: mx.array) -> mx.array:
        """Return the sum of `x` over the ranks, queued; `x` has one shape and dtype on all.

        Raises:
            DistributedError: A collective failed.
        """
        total = self._sum(x)
        if not trials.tracing():
            brief = x.nbytes <= BRIEF_BYTES and device.kind() != "cpu"
            self._queue(total, [] if brief else [x])
        return total

    def _sum(self, x: mx.array) -> mx.array:
        return x if trials.rehearsing() else mx.distributed.all_sum(x, group=self.group)

    def hash_choice(self, ids: mx.array | np.ndarray, *, begins: bool) -> None:
        """Add a layer's ids ``[N, K]`` uint32 to the hash of this call, which `begins` with it."""
        before = None if begins else self._hash
        self._hash = ids if before is None else before * HASH_FACTOR + ids

    def marks(self, after: mx.array) -> tuple[mx.array, ...]:
        """See :meth:`~mlx_moeflux.experts.store.Spread.marks`."""
        if self._hash is None:
            return ()
        found, self._hash = mx.array(self._hash), None
        if len(found) > 1:
            odd = mx.arange(1, 2 * len(found), 2, dtype=mx.uint32)[:, None]
            found = (found * odd).sum(0, keepdims=True)
        own = self._own * mx.concatenate([found >> 16, found & 0xFFFF], axis=1)
        # All ranks must add the marks after the sums of all layers. mx.depends orders the host
        # alone: what shares no buffer runs side by side in a CUDA graph.
        nothing = after.reshape(-1)[:1].view(mx.uint8)[:1] & 0
        return (self._sum(own + nothing),)

    def check(self, *marks: mx.array) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Spread.check`."""
        for each in marks:
            self._queue(each, are_marks=True)
        self.wait(MOST_AHEAD if self._runs_ahead else 0)

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """See :meth:`~mlx_moeflux.experts.store.Spread.ahead`."""
        self._runs_ahead = device.kind() != "cpu"
        try:
            yield
        finally:
            self._runs_ahead = False

    def wait(self, most: int = 0) -> None:
        """See :meth:`~mlx_moeflux.experts.store.Spread.wait`."""
        while len(self._under_way) > most:
            result, before, are_marks = self._under_way.popleft()
            with self.reporting():
                mx.eval(before)
                with nullcontext() if self.heartbeat is None else self.heartbeat.collective():
                    mx.eval(result)
            marks = np.array(result) if are_marks else np.empty(0)
            for rank, theirs in enumerate(marks):
                if not np.array_equal(theirs, marks[0]):
                    raise DistributedError(
                        f"rank {rank} chose other experts than rank 0; the ranks differ in "
                        "hardware, software or prompts: start all with the same."
                    )

    def read(self, *arrays: mx.array, brief: bool) -> None:
        """Evaluate `arrays` and, before them, the sums that are under way. brief: All that they
        need, sums of a trace included, takes no time that counts as waiting."""
        device.settle()
        mx.async_eval(arrays)
        if brief:
            self._under_way.append((arrays[0], (), False))
        self.wait()
        mx.eval(arrays)

    def _queue(
        self, result: mx.array, before: Sequence[mx.array] = (), *, are_marks: bool = False
    ) -> None:
        """Begin to evaluate a sum. before: What this rank computes for it, which is no waiting;
        empty if that is brief. are_marks: It is that of :meth:`marks`."""
        device.settle()
        on_cpu = device.kind() == "cpu"
        with self.reporting():
            # On the CPU what comes before would end with the sum; a GPU takes long to begin.
            mx.async_eval(before if on_cpu else [])
            mx.async_eval(result)
        self._under_way.append((result, before, are_marks))
        self.wait(0 if on_cpu else MOST_AHEAD)

    def from_first(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return rank 0's `arrays`, whose dtypes have 4 bytes, in one collective."""
        flat = mx.concatenate([array.reshape(-1).view(mx.uint32) for array in arrays])
        # The same graph on all ranks, so that all have one order.
        flat = self.sum(flat * self._is_first)
        parts = mx.split(flat, np.cumsum([array.size for array in arrays])[:-1].tolist())
        return tuple(
            part.view(array.dtype).reshape(array.shape)
            for part, array in zip(parts, arrays, strict=True)
        )

    def gather(self, text: str) -> list[str]:
        """Return the text of every rank."""
        data = np.frombuffer(text.encode(), np.uint8)
        sizes = self._rows(np.array([len(data)]))[:, 0].tolist()
        rows = self._rows(np.pad(data, (0, max(sizes) - len(data)))).astype(np.uint8)
        return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def _rows(self, own: np.ndarray) -> np.ndarray:
        """Return the numbers ``[N]`` of every rank, ``[size, N]`` uint32, awaited."""
        total = self.sum(self._own * mx.array(own.astype(np.uint32)))
        self.wait()
        return np.array(total)

    def lead(self, values: mx.array) -> mx.array:
        """See :meth:`~mlx_moeflux.experts.store.Spread.lead`."""
        (found,) = self.from_first(values)
        self.check()
        return found

    def same(self, facts: Any) -> bool:
        """See :meth:`~mlx_moeflux.experts.store.Spread.same`."""
        return len(set(self.gather(json.dumps(facts)))) == 1

    def send(self, text: str) -> None:
        """Send `text`, a line of ASCII, to :meth:`receive` of all others; a short one waits for no
        sum under way. On rank 0."""
        if self.heartbeat is None:
            return
        short = 0 < len(text) <= MOST_TEXT
        self.heartbeat.call(text if short else "")
        if not short:
            self.gather(text)

    def receive(self) -> str | None:
        """Wait, without keeping a core busy, for the next text of rank 0; None: it has ended."""
        text = None if self.heartbeat is None else self.heartbeat.called()
        return self.gather("")[0] if text == "" else text

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compare `facts`, name -> a JSON value, with those of the other ranks.

        Raises:
            DistributedError: One differs; all ranks raise the same.
        """
        every = [json.loads(text) for text in self.gather(json.dumps(facts))]
        for rank, theirs in enumerate(every):
            for name, value in every[0].items():
                if theirs.get(name) != value:
                    raise DistributedError(
                        f"rank {rank} has another {name} than rank 0: {_short(theirs.get(name))}, "
                        f"not {_short(value)}; start all ranks with the same."
                    )

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Notify the other ranks if the block raises, so that none waits for this one. MLX raises
        the error of a collective at its next evaluation. It becomes a DistributedError, unless the
        heartbeat ends this process first, because it knows which rank is lost."""
        try:
            yield
        except DistributedError:
            raise  # the others know
        except BaseException as error:
            if not isinstance(error, RuntimeError) or not str(error).startswith(BACK_ENDS):
                self.fail(error)
                raise
            if self.heartbeat is not None:
                self.heartbeat.name_the_lost()
            failure = DistributedError(f"a collective failed: {error}; {ADVICE}.")
            self.fail(failure)
            raise failure from error

    def fail(self, error: BaseException) -> None:
        """Notify the other ranks that this one cannot go on."""
        if self.heartbeat is not None:
            text = str(error) if isinstance(error, MoefluxError) else repr(error)
            self.heartbeat.fail(f"rank {self.rank} failed: {text}"[:1000])

    def close(self) -> None:
        """End the heartbeat; this rank takes part in no more collectives."""
        if self.heartbeat is not None:
            self.heartbeat.end()

    def _heartbeat(self) -> Heartbeat:
        if self.leads:
            watch = Heartbeat.listening(self.size)
            self.gather(json.dumps([addresses(), watch.port, watch.token]))
            watch.expect()
            return watch
        hosts, port, token = json.loads(self.gather("")[0])
        return Heartbeat.connected(self.rank, self.size, hosts=hosts, port=port, token=token)


def start_group() -> Any:
    """Return the group that ``mlx.launch`` has set up. Raises what ``mx.distributed.init`` does."""
    set_device_variables(ranks=True)
    return mx.distributed.init(strict=True)


@contextlib.contextmanager
def reporting(group: Any) -> Iterator[Ranks | None]:
    """Yield the ranks of `group`, which are notified of an error in the block; None for none."""
    if group is None or group is False:
        yield None
        return
    ranks = group if isinstance(group, Ranks) else Ranks(group)
    with ranks.reporting():
        yield ranks


def addresses() -> list[str]:
    """Return the addresses at which the other ranks may reach this one, rank 0, the likeliest
    first: those that the launcher gave the ring, JACCL or NCCL, then the host's own."""
    found = []
    if file := os.environ.get("MLX_HOSTFILE"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            found += [entry.rpartition(":")[0] for entry in json.loads(Path(file).read_text())[0]]
    for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        found.append(re.sub(r":\d+$", "", os.environ.get(name, "")))
    found.append(socket.gethostname())
    return list(dict.fromkeys(filter(None, [*found, "127.0.0.1"])))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"
