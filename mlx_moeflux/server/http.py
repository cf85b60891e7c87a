"""uvicorn with bounded connections, and an end that signals can ask for twice."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_moeflux.errors import InputError
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.guard import Guard, Limits, head_too_large
from mlx_moeflux.server.protocols.openai import error

LOG = logging.getLogger("mlx_moeflux.server")
LAST_WORDS_SECONDS = 1.0
NO_REQUEST = RequestError("this is no valid HTTP request.")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; port 0 is any that is free.

    Raises:
        InputError: Nothing can listen there.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would take the lowest 16 bits
        raise InputError(f"port is {port}; give 1 to 65535, or 0 for any that is free.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"nothing can listen on {host}, port {port} ({why}); choose another --host or --port."
        ) from error
    return bound


class Server(uvicorn.Server):
    """A server that starts the engine, on the first signal finishes the replies under way within a
    bound, and on the second ends at once.

    on_listening: Called when clients can connect. on_ready: Called when the engine is warm besides;
    requests before that wait for it.
    """

    def __init__(
        self,
        app: Guard,
        limits: Limits,
        on_ready: Callable[[], object] = lambda: None,
        on_listening: Callable[[], object] = lambda: None,
    ):
        self._app, self._limits = app, limits
        self._on_ready, self._on_listening = on_ready, on_listening
        self._announcing: asyncio.Future[None] | None = None
        protocol = type("Bounded", (BoundedProtocol,), {"limits": limits})
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(limits.idle_seconds),
                backlog=2048,
                h11_max_incomplete_event_size=limits.header_bytes,
                # The engine ends the replies after shutdown_seconds; this is for what hangs.
                timeout_graceful_shutdown=int(limits.shutdown_seconds) + 5,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        warm = asyncio.Event()
        self._app.service.engine.start(warm.set)
        await super().startup(sockets)
        self._on_listening()
        self._announcing = asyncio.ensure_future(self._announce(warm))

    async def _announce(self, warm: asyncio.Event) -> None:
        await warm.wait()
        if not self.should_exit:
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals; unlike uvicorn's, do not raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
            handled.append(signal.SIGHUP)
        before = {one: signal.signal(one, self.handle_exit) for one in handled}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The shell and the system both send SIGHUP when a terminal is closed.
        if self.should_exit and sig != signal.SIGHUP:
            self.force_exit = True
        self.should_exit = True
        self._app.service.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what runs, and drop it after the bound or a second signal."""
        self._app.service.draining = True
        if self._announcing is not None:
            self._announcing.cancel()
        live, seconds = self._app.service.engine.live, self._limits.shutdown_seconds
        LOG.info("ending: replies that run or wait: %d; they have %g s", live, seconds)
        dropping = asyncio.ensure_future(self._drop_later())
        try:
            await super().shutdown(sockets)
        finally:
            dropping.cancel()
            await self._app.service.engine.close()
            if tasks := self.server_state.tasks:
                # What was dropped says so, if its client listens.
                await asyncio.wait(tasks, timeout=LAST_WORDS_SECONDS)

    async def _drop_later(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.shutdown_seconds
        while loop.time() < until and not self.force_exit:
            await asyncio.sleep(0.05)
        await self._app.service.engine.close()


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with the `limits` of connections: their number, the time for a head, and the time in
    which a client must take what is sent."""

    limits = Limits()
    _deadline: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as H11Protocol's
        super().connection_made(transport)
        most = self.limits.connections
        if len(self.connections) > most:
            text = f"{most} connections are open, which is the most."
            self._refuse(RequestError(text, status=503))
            return
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and not self._answering():
            self._wait_for_head()
        super().data_received(data)
        if self._answering():
            self._forget_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taking = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def send_400_response(self, msg: str) -> None:
        unread, _ = self.conn.trailing_data
        large = len(unread) > self.limits.header_bytes
        self._refuse(head_too_large(self.limits) if large else NO_REQUEST)

    def timeout_keep_alive_handler(self) -> None:
        # close() would wait for a client that never takes the last reply.
        self.transport.abort()

    def _refuse(self, found: RequestError) -> None:
        """Answer instead of the application, and close."""
        body = json.dumps(error(found)).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        headers |= {"Connection": "close"}
        response = h11.Response(status_code=found.status, headers=list(headers.items()))
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._deadline = self.loop.call_later(self.limits.header_seconds, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
