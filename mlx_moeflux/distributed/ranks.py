"""The ranks of one run: their collectives, and what they agree on at the start."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.distributed.heartbeat import ADVICE, Heartbeat
from mlx_moeflux.errors import DistributedError, MoefluxError


class Ranks:
    """This process and the others of an ``mx.distributed`` group.

    Every rank makes the same calls in the same order, in one thread at a time. Each collective is
    evaluated at once, so that its order is that of the calls, and the heartbeat knows who waits.

    group: None: what ``mlx.launch`` has set up.

    Raises:
        DistributedError: There is no such group, or rank 0 does not answer.
    """

    def __init__(self, group: Any = None):
        try:
            self.group = mx.distributed.init(strict=True) if group in (None, True) else group
            self.rank, self.size = self.group.rank(), self.group.size()
        except (RuntimeError, ValueError, AttributeError) as error:
            raise DistributedError(
                f"no group of ranks ({error}); start each rank with mlx.launch, or give a group of "
                "mx.distributed.init(strict=True)."
            ) from error
        self.heartbeat: Heartbeat | None = None
        if self.size > 1:
            self.heartbeat = self._heartbeat()
            # A process that forgets to close its model has not failed.
            atexit.register(self.heartbeat.end)

    @property
    def leads(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def sum(self, x: mx.array) -> mx.array:
        """Return the sum of `x` over the ranks, evaluated; `x` has one shape and dtype on all.

        Raises:
            DistributedError: The collective failed.
        """
        # The others may be behind; what this rank has to compute first is no waiting.
        mx.eval(x)
        watched = (
            contextlib.nullcontext() if self.heartbeat is None else self.heartbeat.collective()
        )
        try:
            with watched:
                total = mx.distributed.all_sum(x, group=self.group)
                mx.eval(total)
        except RuntimeError as error:
            if self.heartbeat is not None:
                self.heartbeat.name_the_lost()
            failure = DistributedError(f"a collective failed: {error}; {ADVICE}.")
            self.fail(failure)
            raise failure from error
        return total

    def from_first(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return rank 0's `arrays`, whose dtypes have 4 bytes, in one collective."""
        words = [array.reshape(-1).view(mx.uint32) for array in arrays]
        flat = mx.concatenate(words)
        flat = self.sum(flat if self.leads else mx.zeros_like(flat))
        found, start = [], 0
        for array in arrays:
            part = flat[start : start + array.size]
            found.append(part.view(array.dtype).reshape(array.shape))
            start += array.size
        return tuple(found)

    def gather(self, text: str) -> list[str]:
        """Return the text of every rank."""
        data = text.encode()
        sizes = np.zeros(self.size, np.int32)
        sizes[self.rank] = len(data)
        sizes = np.array(self.sum(mx.array(sizes)))
        starts = np.concatenate([[0], np.cumsum(sizes)])
        joined = np.zeros(starts[-1], np.uint32)
        joined[starts[self.rank] : starts[self.rank + 1]] = np.frombuffer(data, np.uint8)
        whole = np.array(self.sum(mx.array(joined))).astype(np.uint8).tobytes()
        return [whole[starts[i] : starts[i + 1]].decode() for i in range(self.size)]

    def lead(self, values: mx.array) -> mx.array:
        """See :meth:`~mlx_moeflux.experts.store.Spread.lead`."""
        with self.reporting():
            return self.from_first(values)[0]

    def same(self, facts: Any) -> bool:
        """See :meth:`~mlx_moeflux.experts.store.Spread.same`."""
        with self.reporting():
            return len(set(self.gather(json.dumps(facts)))) == 1

    def send(self, text: str) -> None:
        """Send `text` to :meth:`receive` of all others. On rank 0."""
        if self.heartbeat is not None:
            self.heartbeat.call()
            self.gather(text)

    def receive(self) -> str | None:
        """Wait, without keeping a core busy, for the next text of rank 0; None: it has ended."""
        if self.heartbeat is None or not self.heartbeat.called():
            return None
        return self.gather("")[0]

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
        """Notify the other ranks if the block raises, so that none waits for this one."""
        try:
            yield
        except DistributedError:
            raise  # the others know
        except BaseException as error:
            self.fail(error)
            raise

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
