"""Checks of every request before its route: host, origin, key, bounds of the body."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_moeflux.server.errors import RequestError, body_too_large
from mlx_moeflux.server.service import Service
from mlx_moeflux.server.web import is_page

LOG = logging.getLogger("mlx_moeflux.server")
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
CLIENT_LEFT = 499

# What a page of another origin may send. Clients in browsers have dozens of headers of their own.
MOST_HEADERS = 64
PREFLIGHT_SECONDS = 7200
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")


@dataclass(frozen=True)
class Limits:
    """Bounds of connections, and the hosts, keys and web pages that may use the server.

    hosts: Names and addresses that requests may call the server by.
    api_key: Required in every request if set, but for the page's files and ``/health``.
    origins: Web pages that may use the server, such as ``http://localhost:3000``.
    body_bytes, body_seconds: Size of a body and time until it is there.
    header_seconds, header_bytes, idle_seconds: Of a request's head, and of a connection between two
        requests.
    write_seconds: Time in which a client must take some of a stream.
    keep_alive_seconds: Time between two events in a stream that has nothing new.
    connections: Most at once.
    shutdown_seconds: Time that replies have to finish when the server ends.
    """

    hosts: frozenset[str] = frozenset(LOCAL_HOSTS)
    api_key: str | None = None
    origins: frozenset[str] = frozenset()
    body_bytes: int = 32 << 20
    body_seconds: float = 60.0
    header_seconds: float = 20.0
    header_bytes: int = 64 << 10
    idle_seconds: float = 75.0
    write_seconds: float = 60.0
    keep_alive_seconds: float = 10.0
    connections: int = 1024
    shutdown_seconds: float = 30.0


class Guard:
    """ASGI middleware around the routes.

    paths: Those that are counted by their names. refuse: (path, error) -> response.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        limits: Limits,
        paths: Collection[str],
        refuse: Callable[[str, RequestError], Response],
    ):
        self._app, self.service, self.limits, self._paths = app, service, limits, paths
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, path, begun = CLIENT_LEFT, scope["path"], False
        headers = Headers(scope=scope)
        further = _cross_origin(scope, self.limits)
        preflight = scope["method"] == "OPTIONS" and bool(further)
        if "content-length" in headers and "transfer-encoding" in headers:
            # Another server on the way may have read another end of the body (RFC 9112, 6.1).
            further.append((b"connection", b"close"))

        async def noted(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                message["headers"] = [*message["headers"], *further]
            await send(message)

        try:
            self._check(scope, headers)
            if preflight:
                await Response(status_code=204)(scope, receive, noted)
                return
            body = await self._body(headers, receive)
            _check_encoding(headers, body)
            await self._app(scope, _replayed(body, receive), noted)
        except ClientDisconnect:
            pass
        except RequestError as error:
            await self._answer(error, scope, receive, noted, begun=begun)
        except Exception as error:  # a fault of ours; the server goes on
            kind, debug = type(error).__name__, LOG.isEnabledFor(logging.DEBUG)
            LOG.error("%s failed: %s: %s", path, kind, _line(error), exc_info=debug)
            failed = RequestError("the server failed; its log says why.", status=500)
            await self._answer(failed, scope, receive, noted, begun=begun)
        finally:
            known = path if path in self._paths else "other"
            self.service.metrics.requests[known, status] += 1
            if status >= 400:
                # The raw path has no line breaks.
                shown = scope["raw_path"][:100].decode("latin-1")
                LOG.info("%s %s: refused with %d", scope["method"], shown, status)

    async def _answer(
        self, error: RequestError, scope: Scope, receive: Receive, send: Send, *, begun: bool
    ) -> None:
        if not begun:
            response = self._refuse(scope["path"], error)
            if scope["path"] == "/" and "text/html" in Headers(scope=scope).get("accept", ""):
                plain = {"X-Content-Type-Options": "nosniff"}
                response = PlainTextResponse(f"{error}\n", error.status, plain)
            if error.status in (408, 413):
                # The rest of the body is not read.
                response.headers["Connection"] = "close"
            await response(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Refuse a request by its head alone."""
        path = scope["path"]
        if _head_bytes(scope) > self.limits.header_bytes:
            raise head_too_large(self.limits)
        host = _split(f"//{headers.get('host', '')}").hostname or ""
        if host not in self.limits.hosts:
            raise RequestError(
                f"this server is not called '{host[:80]}'; start it with --allowed-host and this "
                "name.",
                status=403,
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not (
            is_page(path) or _allowed(origin, headers["host"], self.limits)
        ):
            raise RequestError(
                f"pages of '{origin[:80]}' may not use this server; start it with "
                "--allowed-origins and this address, or let the proxy pass on the Host header.",
                status=403,
                code="origin_not_allowed",
            )
        key = self.limits.api_key
        if key is None or path == "/health" or is_page(path) or scope["method"] == "OPTIONS":
            return
        bearer = headers.get("authorization", "")
        given = bearer[7:] if bearer[:7].lower() == "bearer " else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
            raise RequestError(
                "the API key is missing or wrong.", status=401, code="invalid_api_key"
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body.

        Raises:
            RequestError: It is too large or too slow. ClientDisconnect: The client left.
        """
        most = self.limits.body_bytes
        too_large = body_too_large(f"the body is larger than {most} bytes")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise RequestError("the body came too slowly.", status=408) from None


def head_too_large(limits: Limits) -> RequestError:
    """Return the error of a request whose head is larger than `limits` allow."""
    return RequestError(f"the head of the request is larger than {limits.header_bytes} bytes.")


def _head_bytes(scope: Scope) -> int:
    """Return the bytes of a request's head, white space around values left out."""
    query = scope["query_string"]
    line = len(scope["method"]) + len(scope["raw_path"]) + len(b"?" + query if query else b"")
    # Two spaces, the version and the ends of line and head; ": " and the end of each header's line.
    return line + 14 + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _check_encoding(headers: Headers, body: bytes) -> None:
    """Refuse a compressed body, whose size nothing bounds."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if body and encoding not in ("", "identity"):
        raise RequestError(
            f"the body is encoded with '{encoding[:40]}'; send it uncompressed.", status=415
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a receiver that gives the body first, and then what `receive` gives."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _split(url: str) -> SplitResult:
    """Return the parts of a URL, all empty if it is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _allowed(origin: str, host: str, limits: Limits) -> bool:
    """Return True for the server's own pages and those of `limits.origins`."""
    return _split(origin).netloc == host or origin in limits.origins or "*" in limits.origins


def _cross_origin(scope: Scope, limits: Limits) -> list[tuple[bytes, bytes]]:
    """Return the headers that let a page of another origin read the response, if it may."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None or not ("*" in limits.origins or origin in limits.origins):
        return []
    found = {"access-control-allow-origin": origin, "vary": "origin"}
    if scope["method"] == "OPTIONS":
        asked = headers.get("access-control-request-headers", "").split(",")[:MOST_HEADERS]
        names = [name.strip() for name in asked if _HEADER.fullmatch(name.strip())]
        found |= {
            "access-control-allow-headers": ", ".join(names),
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-max-age": str(PREFLIGHT_SECONDS),
            "vary": "origin, access-control-request-headers",
        }
    return [(name.encode(), value.encode("latin-1")) for name, value in found.items()]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
