"""The ASGI application: routes, and for each request body, reply or events, and one log line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from typing import Protocol as Interface

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from mlx_moeflux.server.assemble import Delta
from mlx_moeflux.server.errors import PromptTooLong, RequestError
from mlx_moeflux.server.fields import Fields, read_body
from mlx_moeflux.server.guard import CLIENT_LEFT, Guard, Limits
from mlx_moeflux.server.json_guard import check_values
from mlx_moeflux.server.protocols import (
    anthropic_messages,
    info,
    openai,
    openai_chat,
    openai_completions,
    openai_responses,
)
from mlx_moeflux.server.request import GenerationRequest
from mlx_moeflux.server.service import Generation, Service
from mlx_moeflux.server.web import page_routes

LOG = logging.getLogger("mlx_moeflux.server")
T = TypeVar("T")

# Bytes of a body that the event loop reads itself, in milliseconds. A thread reads larger ones.
AT_ONCE = 16 << 10

# Bytes from which a body waits until no other of this size is prepared, so that small requests
# find a place in `Service.rendering`.
LARGE = 1 << 20

# Values of a body besides those of a text as long as the context.
MOST_VALUES = 1 << 18

STREAM_TYPE = "text/event-stream"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Events(Interface):
    """The text of one streamed reply, as server-sent events."""

    def start(self) -> str: ...

    def add(self, i: int, delta: Delta) -> str:
        """Return the events of the next part of reply `i`."""
        ...

    def wait(self) -> str:
        """Return an event that says nothing new. Clients count events, and no comments: some give
        up on a stream without any."""
        ...

    def end(self) -> str: ...

    def fail(self, error: RequestError) -> str: ...


@dataclass(frozen=True)
class Protocol:
    """Body, reader, whole reply and streamed reply of one path, from a module of `protocols`.

    refused_stream: Makes the events of a stream whose prompt is too long; None: a status says it.
    """

    body: type[Fields]
    read: Callable[[Any, Service], GenerationRequest]
    reply: Callable[[list[Delta], Generation, Service], dict[str, Any]]
    stream: Callable[[Generation, Service], Events]
    refused_stream: Callable[[RequestError, GenerationRequest, Service], str] | None

    @classmethod
    def of(cls, module: Any) -> Protocol:
        """Return the body and the functions of a module."""
        refused = getattr(module, "refused_stream", None)
        return cls(module.Body, module.read, module.reply, module.Stream, refused)


PROTOCOLS = {
    "/v1/chat/completions": Protocol.of(openai_chat),
    "/v1/completions": Protocol.of(openai_completions),
    "/v1/responses": Protocol.of(openai_responses),
    "/v1/messages": Protocol.of(anthropic_messages),
}


def error_of(path: str) -> Callable[[RequestError], dict[str, Any]]:
    """Return the function that makes the error object of a path's protocol."""
    if path.startswith(("/v1/messages", "/v1/v1/messages")):
        return anthropic_messages.error
    return openai.error


def refusal(path: str, error: RequestError) -> JSONResponse:
    """Return the response to a request that is not served."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(error_of(path)(error), status_code=error.status, headers=headers)


def make_app(service: Service, limits: Limits) -> Guard:
    """Return the application. Its server starts and ends the engine."""

    def models(request: Request) -> Response:
        catalogue = "client_version" in request.query_params
        return JSONResponse(info.models(service, catalogue=catalogue))

    get = {
        "/health": lambda request: JSONResponse(info.health(service)),
        "/v1/models": models,
        # Else it would be a model without a name.
        "/v1/models/": models,
        "/v1/models/{name:path}": lambda request: JSONResponse(
            info.retrieve(service, request.path_params["name"])
        ),
        "/props": lambda request: JSONResponse(info.props(service)),
        "/metrics": lambda request: PlainTextResponse(info.metrics(service)),
    }
    routes: list[Route | Mount] = [
        Route(path, _answer(answer), methods=["GET"]) for path, answer in get.items()
    ]
    post = {
        "/v1/messages/count_tokens": (anthropic_messages.Body, info.count_tokens),
        "/tokenize": (info.Text, info.tokenize),
        "/detokenize": (info.Tokens, info.detokenize),
    }
    bodies = Bodies(service)
    for path, (body, compute) in post.items():
        routes.append(Route(path, _compute(bodies, body, compute), methods=["POST"]))
    for path, protocol in PROTOCOLS.items():
        routes.append(Route(path, _generate(bodies, protocol, limits), methods=["POST"]))
    for one in list(routes):
        # Clients append /v1 to a base URL that ends with it.
        if isinstance(one, Route) and one.path.startswith("/v1/"):
            routes.append(Route(f"/v1{one.path}", one.endpoint, methods=one.methods))
    routes += page_routes()
    offered = (path for path in (*PROTOCOLS, *post, *get) if re.fullmatch(r"/v1/[\w/]*\w", path))
    under_v1 = f"under /v1 there are {', '.join(offered)}"
    paths = {route.path for route in routes}
    answered = {route.path for route in routes if isinstance(route, Route)}

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path: str = request.scope["path"]
        if error.status_code == 404 and path.endswith("/") and path.rstrip("/") in answered:
            # Starlette's own redirect would name this server's inner host.
            query = request.url.query
            location = path.rstrip("/") + (f"?{query}" if query else "")
            return Response(status_code=307, headers={"Location": location})
        text = f"{request.method} {request.url.path[:100]}: {error.detail}"
        text += f"; {under_v1}." if error.status_code == 404 else "."
        response = refusal(request.url.path, RequestError(text, status=error.status_code))
        if error.status_code == 405:
            # Files are read alone and do not say so.
            allowed = (error.headers or {}).get("Allow", "GET, HEAD")
            response.headers["Allow"] = ", ".join(sorted(allowed.split(", ")))
        return response

    async def on_refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return refusal(request.url.path, error)

    async def on_failure(request: Request, error: Exception) -> Response:
        # Starlette raises the error again behind this response, and the guard logs it.
        failed = RequestError("the server failed; its log says why.", status=500)
        return refusal(request.url.path, failed)

    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: on_http,
            RequestError: on_refusal,
            Exception: on_failure,
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, service, limits, paths, refusal)


def _answer(answer: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return answer(request)

    return endpoint


class Bodies:
    """Reads the bodies of requests while streams go on."""

    def __init__(self, service: Service):
        self.service = service
        self._most = MOST_VALUES + service.model.context_left()
        self._large = asyncio.Semaphore(1)

    @contextlib.asynccontextmanager
    async def turn(self, body: bytes) -> AsyncIterator[None]:
        """Wait until a body may be prepared, which it is inside the context."""
        if len(body) < LARGE:
            yield
            return
        async with self._large:
            yield

    async def read(self, body: bytes, model: type[Fields], then: Callable[[Any, Service], T]) -> T:
        """Return what `then` makes of a body.

        Raises:
            RequestError: The body or what it asks for is refused.
        """

        def read() -> T:
            check_values(body, self._most)
            return then(read_body(model, body), self.service)

        if len(body) <= AT_ONCE:
            return read()
        async with self.service.rendering:
            return await asyncio.to_thread(read)


def _compute(
    bodies: Bodies, model: type[Fields], compute: Callable[[Any, Service], dict[str, Any]]
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of an answer that needs the tokenizer and not the model."""

    async def endpoint(request: Request) -> Response:
        body, service = await request.body(), bodies.service
        async with bodies.turn(body):
            given = await bodies.read(body, model, lambda given, _: given)
            async with service.rendering:
                return JSONResponse(await asyncio.to_thread(compute, given, service))

    return endpoint


def _generate(
    bodies: Bodies, protocol: Protocol, limits: Limits
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a protocol."""

    async def endpoint(request: Request) -> Response:
        body, service = await request.body(), bodies.service
        async with bodies.turn(body):
            asked = await bodies.read(body, protocol.body, protocol.read)
            try:
                generation = await service.start(asked)
            except PromptTooLong as error:
                if not asked.stream or protocol.refused_stream is None:
                    raise
                LOG.info("%s: refused in its stream: %s", request.url.path, error)
                text = protocol.refused_stream(error, asked, service)
                return Response(text, headers=STREAM_HEADERS, media_type=STREAM_TYPE)
        if generation.request.stream:
            return EventStream(generation, protocol, service, limits)
        try:
            deltas = await _unless_gone(request.receive, generation.whole())
            # A thread: log-probabilities of a long reply take seconds.
            return await asyncio.to_thread(
                lambda: JSONResponse(protocol.reply(deltas, generation, service))
            )
        finally:
            generation.close()
            _log(service, request.url.path, generation)

    return endpoint


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it when the client leaves.

    Raises:
        RequestError: The client left.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestError("the client left.", status=CLIENT_LEFT)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streamed reply, with events that keep clients waiting while a prompt is read.

    It ends when the reply does, or when the client leaves.
    """

    def __init__(
        self, generation: Generation, protocol: Protocol, service: Service, limits: Limits
    ):
        super().__init__(
            media_type=STREAM_TYPE,
            headers=STREAM_HEADERS,
        )
        del self.headers["content-length"]
        self._generation, self._protocol = generation, protocol
        self._service, self._limits = service, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(receive, self._send(send))
        except RequestError:
            pass  # the client left
        finally:
            self._generation.close()
            _log(self._service, scope["path"], self._generation)

    async def _send(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        last = clock()

        async def out(text: str, *, more: bool = True) -> None:
            nonlocal last
            last = clock()
            body = text.encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)

        async def keep_alive() -> None:
            while True:
                silent = clock() - last
                if silent >= self._limits.keep_alive_seconds:
                    await out(stream.wait())
                    continue
                await asyncio.sleep(self._limits.keep_alive_seconds - silent)

        stream = self._protocol.stream(self._generation, self._service)
        await out(stream.start())
        keeping = asyncio.ensure_future(keep_alive())
        try:
            while not self._generation.done:
                parts = await self._generation.parts()
                if text := "".join(stream.add(i, delta) for i, delta in parts):
                    await out(text)
            last_text = stream.end()
        except RequestError as error:
            last_text = stream.fail(error)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await out(last_text, more=False)


def _log(service: Service, path: str, generation: Generation) -> None:
    """Count a request whose prompt was read, and write its line."""
    metrics, now = service.metrics, time.monotonic()
    metrics.prompt_tokens += generation.prompt_tokens
    metrics.cached_tokens += generation.cached_tokens
    metrics.cache_hits += generation.cached_tokens > 0
    metrics.completion_tokens += generation.completion_tokens
    metrics.duration.add(now - generation.began)
    first = "-"
    if generation.first_token is not None:
        metrics.first_token.add(generation.first_token - generation.began)
        first = f"{generation.first_token - generation.began:.2f} s"
    ends = ",".join(end or "dropped" for end in generation.finished)
    LOG.info(
        "%s: prompt %d (%d cached), reply %d, %s; first token %s, all %.2f s; hit rate %.1f %%",
        path,
        generation.prompt_tokens,
        generation.cached_tokens,
        generation.completion_tokens,
        ends,
        first,
        now - generation.began,
        100 * generation.hit_rate(),
    )
