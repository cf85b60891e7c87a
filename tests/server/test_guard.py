"""Oracle: who may use the server, and how long and large a request may be."""

from __future__ import annotations

import asyncio
import socket

import pytest

from mlx_moeflux.server.app import PROTOCOLS, EventStream
from mlx_moeflux.server.fields import Fields
from tests.server.conftest import MESSAGES, served, service_of, wait_until, with_limits

PATH = "/v1/chat/completions"
BODY = {"messages": MESSAGES, "max_tokens": 1}


def raw(server, data, *, until=b""):
    """What the server answers to bytes, until it closes or `until` came."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        said = b""
        while not until or until not in said:
            part = connection.recv(65536)
            if not part:
                break
            said += part
    return said


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_other_hosts_are_refused(server, host):
    """A page whose name points here (DNS rebinding) is no client."""
    status, reply = server.ask("/v1/models", headers={"Host": host})
    assert (status, reply["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:123", "127.0.0.1:8080", "[::1]:80"])
def test_own_hosts_are_served(server, host):
    assert server.ask("/v1/models", headers={"Host": host})[0] == 200


def test_pages_of_other_origins_are_refused(tiny, server):
    headers = {"Origin": "http://evil.example"}
    for path, body in (("/v1/models", None), (PATH, BODY)):
        status, reply = server.ask(path, body, headers=headers)
        assert (status, reply["error"]["code"]) == (403, "origin_not_allowed")
        assert server.headers["Access-Control-Allow-Origin"] is None
    own = {"Origin": server.url, "Host": f"127.0.0.1:{server.port}"}
    assert server.ask("/v1/models", headers=own)[0] == 200
    with served(*tiny, limits=with_limits(origins=frozenset({"http://a.example"}))) as other:
        for origin, expected in (("http://a.example", 200), ("http://b.example", 403)):
            status, _ = other.ask("/v1/models", headers={"Origin": origin})
            assert status == expected
        preflight = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        assert other.ask(PATH, headers=preflight, method="OPTIONS")[0] == 204
        assert other.headers["Access-Control-Allow-Origin"] == "http://a.example"


def test_a_key_is_required_where_there_is_one(tiny):
    with served(*tiny, limits=with_limits(api_key="secrét")) as server:
        wait_until(lambda: server.ask("/health")[0] == 200)
        for headers in ({}, {"Authorization": "Bearer secret"}, {"x-api-key": ""}):
            status, reply = server.ask("/v1/models", headers=headers)
            assert (status, reply["error"]["type"]) == (401, "authentication_error")
        key = "secrét".encode()
        for name, value in (("Authorization", b"Bearer " + key), ("x-api-key", key)):
            assert server.ask("/v1/models", headers={name: value})[0] == 200


def test_bodies_are_bounded(tiny):
    with served(*tiny, limits=with_limits(body_bytes=1000, body_seconds=0.3)) as server:
        status, reply = server.ask(PATH, {**BODY, "user": "x" * 2000})
        assert (status, "larger than 1000 bytes" in reply["error"]["message"]) == (413, True)
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n".encode()
        chunks = b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b" " * 1024 + b"\r\n"
        assert b" 413 " in raw(server, head + chunks).split(b"\r\n")[0]
        slow = raw(server, head + b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in slow.split(b"\r\n")[0]


def test_heads_and_idle_connections_are_bounded(tiny):
    limits = with_limits(header_seconds=0.3, idle_seconds=1, header_bytes=2000)
    with served(*tiny, limits=limits) as server:
        for data in (b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"):
            assert raw(server, data) == b""
        get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        said = raw(server, get + b"\r\n")
        assert b" 200 " in said
        # The second request's head is bounded too.
        said = raw(server, get + b"\r\n" + b"GET /health")
        assert said.count(b" 200 ") == 1
        assert b" 400 " in raw(server, get + b"X: " + b"x" * 4000)


def test_a_stream_that_nobody_reads_ends(tiny):
    """The transport's buffers are full: what is sent waits."""

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def ask(service):
        service.engine.start()
        read = Fields({**BODY, "stream": True, "max_tokens": 8000})
        protocol = PROTOCOLS[PATH]
        generation = await service.start(protocol.read(read, service))
        assert service.engine.live == 1
        stream = EventStream(generation, protocol, service, with_limits(write_seconds=0.1))
        await stream({"path": PATH}, receive, send)
        assert service.engine.live == 0
        await service.engine.close()

    asyncio.run(ask(service_of(*tiny)))


def test_health_tells_whether_the_engine_runs(server, monkeypatch):
    wait_until(lambda: server.ask("/health") == (200, {"status": "ok"}))
    monkeypatch.setattr(server.service, "draining", True)
    assert server.ask("/health")[0] == 503
    assert server.ask(PATH, BODY)[0] == 503
