"""Ends every rank when one of them is lost. No MLX.

MLX's ring waits for ever for a rank that has stopped or died. So each rank keeps a plain TCP
connection to rank 0, and a thread that needs neither MLX nor the other threads sends a line a
second. Rank 0 watches all others; they watch rank 0. A rank is lost when its connection closes
without ``end``, or when it is silent for LIMIT_SECONDS. When all ranks have been inside collectives
for so long, a connection of the ring is cut. Each other rank then writes one line and exits with
status 1; nothing is retried.

Lines: ``hello TOKEN RANK`` (to rank 0, once), ``beat N`` (N is odd inside a collective, and grows),
``end`` (the rank needs no collective any more), ``lost REASON``, ``call TEXT`` (rank 0 begins what
others wait for outside collectives, in which MLX would keep a core busy).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from queue import SimpleQueue
from time import monotonic
from typing import Any, NoReturn

from mlx_moeflux.errors import DistributedError

BEAT_SECONDS, LIMIT_SECONDS = 1.0, 5.0
# A longer line is no line of ours.
MOST_BYTES = 4096
# Of :meth:`Heartbeat.call`: many fit in the buffers of a connection.
MOST_TEXT = 1024
ADVICE = "end all ranks and start them again"


def leave(message: str) -> NoReturn:
    """Write one line to stderr and end the process with status 1, without cleaning up."""
    # Another thread may be inside a write to stdout and never leave it.
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(1.0)
    with contextlib.suppress(OSError):
        os.write(2, f"error: {message}\n".encode())
    os._exit(1)


@dataclass(eq=False)
class _Peer:
    """Another rank, as the watching thread sees it. rank: -1 before its ``hello``."""

    connection: socket.socket
    rank: int = -1
    last_seen: float = field(default_factory=monotonic)
    count: int = 0
    changed: float = field(default_factory=monotonic)
    unread: bytes = b""

    def waits_since(self, time: float) -> bool:
        """Return True if it has been inside one collective since `time`."""
        return bool(self.count % 2) and self.changed < time

    def send(self, line: str) -> None:
        # A peer that reads nothing is found by its silence.
        with contextlib.suppress(OSError):
            self.connection.send(line.encode() + b"\n")


class Heartbeat:
    """The watching thread of one rank.

    It begins with :meth:`listening` on rank 0 and :meth:`connected` on others, and ends with
    :meth:`end` or the process. :meth:`collective`, :meth:`end` and :meth:`fail` are for the thread
    that computes. on_loss: Called with the reason, in the watching thread. beat: Seconds between
    two lines. limit: Seconds of silence, or of waiting, after which ranks are lost.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        on_loss: Callable[[str], object] = leave,
        *,
        beat: float = BEAT_SECONDS,
        limit: float = LIMIT_SECONDS,
    ):
        self.rank, self.size, self._on_loss = rank, size, on_loss
        self._beat, self._limit = beat, limit
        self.token = ""
        self.port = 0
        self._count = 0
        self._entered = 0.0
        self._expected_at = inf
        self._last_line = ""
        self._outgoing: deque[str] = deque()
        self._calls: SimpleQueue[str | None] = SimpleQueue()
        self._closing = False
        self._ended: set[int] = set()
        self._listener: socket.socket | None = None
        self._peers: list[_Peer] = []
        self._selector = selectors.DefaultSelector()
        # Wakes the thread when there is something to send.
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @classmethod
    def listening(cls, size: int, **options: Any) -> Heartbeat:
        """Return rank 0's, which waits on :attr:`port` for others that know :attr:`token`."""
        self = cls(0, size, **options)
        self.token = secrets.token_hex(16)
        self._listener = socket.create_server(("", 0), backlog=size)
        self.port = self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return self

    @classmethod
    def connected(
        cls,
        rank: int,
        size: int,
        *,
        hosts: Sequence[str],
        port: int,
        token: str,
        limit: float = LIMIT_SECONDS,
        **options: Any,
    ) -> Heartbeat:
        """Return the one of another rank, connected to rank 0 at the first of `hosts` that answers.

        Raises:
            DistributedError: None does.
        """
        for host in hosts:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, port), limit / len(hosts))
                break
        else:
            raise DistributedError(
                f"rank {rank} cannot connect to rank 0 at port {port} of {', '.join(hosts)}; let "
                "the machines reach each other over TCP."
            )
        self = cls(rank, size, limit=limit, **options)
        self._add(connection, 0).send(f"hello {token} {rank}")
        self._thread.start()
        return self

    def expect(self) -> None:
        """Note that the other ranks know where to connect. On rank 0."""
        self._expected_at = monotonic()

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Note that this rank waits for the others inside the block."""
        self._entered = monotonic()
        self._count += 1
        try:
            yield
        finally:
            self._count += 1

    def call(self, text: str) -> None:
        """Let :meth:`called` return `text`, of one line and at most MOST_TEXT bytes, on the others.
        On rank 0."""
        self._outgoing.append(f"call {text}")
        with contextlib.suppress(OSError):
            self._wake.send(b"\n")

    def called(self) -> str | None:
        """Wait for rank 0's next :meth:`call` and return its text; None if it has ended."""
        return self._calls.get()

    def name_the_lost(self) -> None:
        """Give the thread time to name the lost rank and end, after a collective failed."""
        self._thread.join(2 * self._beat)

    def fail(self, reason: str) -> None:
        """End the other ranks, because this one cannot go on."""
        self._close(f"lost {' '.join(reason.split())}")

    def end(self) -> None:
        """Note that this rank takes part in no more collectives. A second call does nothing."""
        self._close("end")

    def _close(self, line: str) -> None:
        if not self._closing:
            self._last_line, self._closing = line, True
            with contextlib.suppress(OSError):  # the thread may have ended already
                self._wake.send(b"\n")
        # A thread that has found a loss ends the process, with the only line.
        self._thread.join(self._limit)

    def _run(self) -> None:
        following = monotonic()
        while not self._closing:
            for key, _ in self._selector.select(max(0.0, following - monotonic())):
                if not self._closing:
                    self._receive(key.fileobj)
            while self._outgoing:
                self._send(self._outgoing.popleft())
            now = monotonic()
            if now >= following:
                following = now + self._beat
                self._send(f"beat {self._count}")
                self._watch(now)
        if self._last_line:
            self._send(self._last_line)
        for each in [peer.connection for peer in self._peers] + [self._wake, self._woken]:
            each.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _receive(self, source: object) -> None:
        if source is self._woken:
            self._woken.recv(64)
            return
        if self._listener is not None and source is self._listener:
            with contextlib.suppress(OSError):
                self._add(self._listener.accept()[0], -1)
            return
        peer = next(peer for peer in self._peers if peer.connection is source)
        try:
            data = peer.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            if peer.rank >= 0:
                self._lose(f"rank {peer.rank} is lost: its connection closed; {ADVICE}.")
            return
        peer.last_seen = monotonic()
        *lines, rest = (peer.unread + data).split(b"\n")
        peer.unread = rest[-MOST_BYTES:]
        for line in lines:
            if peer in self._peers:
                self._read(peer, line.decode(errors="replace"))

    def _read(self, peer: _Peer, line: str) -> None:
        word, _, rest = line.partition(" ")
        if peer.rank < 0:
            token, _, rank = rest.partition(" ")
            known = secrets.compare_digest(token.encode(), self.token.encode())
            if word == "hello" and known and rank.isdigit():
                peer.rank = int(rank)
            else:
                self._drop(peer)
        elif word == "beat" and rest.isdigit():
            if int(rest) != peer.count:
                peer.count, peer.changed = int(rest), monotonic()
        elif word == "call":
            self._calls.put(rest)
        elif word == "end":
            self._ended.add(peer.rank)
            self._calls.put(None)
            self._drop(peer)
        elif word == "lost":
            self._lose(rest, notified=peer)

    def _watch(self, now: float) -> None:
        """Look for ranks that are silent, or that all wait."""
        peers = [peer for peer in self._peers if peer.rank >= 0]
        for peer in peers:
            if now - peer.last_seen > self._limit:
                self._lose(f"rank {peer.rank} is lost: silent for {self._limit:g} s; {ADVICE}.")
                return
        there = self._ended.union(peer.rank for peer in peers)
        missing = set(range(1, self.size)) - there if self.rank == 0 else set()
        if missing and now - self._expected_at > self._limit:
            self._lose(f"rank {min(missing)} is lost: it does not answer; {ADVICE}.")
            return
        # Rank 0 knows where all are. No rank may wait after it has ended.
        knows = self.rank == 0 or 0 in self._ended
        waits = self._count % 2 and now - self._entered > self._limit
        if knows and waits and all(p.waits_since(now - self._limit) for p in peers):
            self._lose(f"the ranks wait for each other: one ended or a link is cut; {ADVICE}.")

    def _lose(self, reason: str, notified: _Peer | None = None) -> None:
        """Pass the reason on, and end."""
        self._closing = True
        for peer in self._peers:
            if peer is not notified:
                peer.send(f"lost {reason}")
        self._on_loss(reason)

    def _send(self, line: str) -> None:
        for peer in self._peers:
            peer.send(line)

    def _add(self, connection: socket.socket, rank: int) -> _Peer:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ)
        self._peers.append(peer := _Peer(connection, rank))
        return peer

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.remove(peer)
