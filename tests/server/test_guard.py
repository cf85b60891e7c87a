"""Oracle: who may use the server, and how long and large a request may be."""

from __future__ import annotations

import json
import socket

import pytest

from mlx_moeflux.server.http import listen
from tests.server.conftest import MESSAGES, served, wait_until, with_limits

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


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "a[b]"]
)
def test_other_hosts_are_refused(server, host):
    """A page whose name points here (DNS rebinding) is no client."""
    status, reply = server.ask("/v1/models", headers={"Host": host})
    assert (status, reply["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:123", "127.0.0.1:8080", "[::1]:80"])
def test_own_hosts_are_served(server, host):
    assert server.ask("/v1/models", headers={"Host": host})[0] == 200


def test_pages_of_other_origins_are_refused(tiny, server):
    for origin in ("http://evil.example", "null", "http://["):
        for path, body in (("/v1/models", None), (PATH, BODY)):
            status, reply = server.ask(path, body, headers={"Origin": origin})
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
    limits = with_limits(header_seconds=0.2, idle_seconds=0.4, header_bytes=2000)
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


def test_a_head_has_its_limit_however_it_arrives(tiny):
    host = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close"
    with served(*tiny, limits=with_limits(header_bytes=2000)) as server:
        wait_until(lambda: server.ask("/health")[0] == 200)
        for begin, end in ((b"GET /health", b"\r\nX: %s"), (b"GET /health?%s", b"")):
            parts = (begin, host, end, b"\r\n\r\n")
            room = 2000 - len(b"".join(parts).replace(b"%s", b""))
            for size, expected in ((room, b" 200 "), (room + 1, b" 400 "), (9000, b" 400 ")):
                said = raw(server, b"".join(parts).replace(b"%s", b"x" * size))
                assert expected in said.split(b"\r\n")[0], said
                told = b"the head of the request is larger than 2000 bytes" in said
                assert told == (expected == b" 400 ")
        said = raw(server, b"GET /health" + host + b"\r\nX: " + b"x" * 2000)
        assert b"the head of the request is larger than 2000 bytes" in said


def test_two_lengths_of_a_body_end_the_connection(server):
    """The chunks count, and nothing behind them is read as a request (RFC 9112, 6.1)."""
    chunked = b'f\r\n{"content":"a"}\r\n0\r\n\r\n'
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    following = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for length in (b"0", b"5", b"999"):
        said = raw(server, head + b"Content-Length: " + length + b"\r\n\r\n" + chunked + following)
        assert said.count(b"HTTP/1.1 ") == 1
        assert (b"HTTP/1.1 200 " in said, b"connection: close" in said.lower()) == (True, True)
    said = raw(server, head + b"\r\n" + chunked + following)
    assert said.count(b"HTTP/1.1 200 ") == 2


def test_a_stream_that_nobody_reads_ends(tiny, monkeypatch):
    """All buffers on the way are full."""

    def small(host, port):
        bound = listen(host, port)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bound

    monkeypatch.setattr("tests.server.conftest.listen", small)
    with served(*tiny, limits=with_limits(write_seconds=0.2)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        body = {**BODY, "stream": True, "max_tokens": 8000, "n": 8, "logprobs": True}
        data = json.dumps({**body, "top_logprobs": 20}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        wait_until(lambda: server.service.engine.live == 8)
        wait_until(lambda: server.service.engine.live == 0)
        assert server.service.metrics.completion_tokens < 8 * 8000


def test_health_tells_whether_the_engine_runs(server, monkeypatch):
    wait_until(lambda: server.ask("/health") == (200, {"status": "ok"}))
    monkeypatch.setattr(server.service, "draining", True)
    assert server.ask("/health")[0] == 503
    assert server.ask(PATH, BODY)[0] == 503
    monkeypatch.undo()
    monkeypatch.setattr(server.service.engine, "_warm", False)
    assert server.ask("/health")[0] == 503


def test_nothing_listens_before_the_model_is_there():
    """A client is refused at once, and does not wait for the model."""
    with listen("127.0.0.1", 0) as bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname(), timeout=60)


def test_many_clients_connect_at_once(server):
    clients = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(100)]
    for client in clients:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for client in clients:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.close()


def test_connections_are_bounded(tiny):
    with served(*tiny, limits=with_limits(connections=2)) as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        said = raw(server, b"")
        assert b" 503 " in said.split(b"\r\n")[0]
        assert "2 connections" in json.loads(said.split(b"\r\n\r\n")[1])["error"]["message"]
        for one in held:
            one.close()
        wait_until(lambda: server.ask("/health")[0] == 200)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
    ],
)
def test_what_is_no_http_gets_json(server, data):
    head, body = raw(server, data).split(b"\r\n\r\n")
    assert b" 400 " in head.split(b"\r\n")[0]
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_nothing_in_a_request_is_fetched(server):
    with socket.create_server(("127.0.0.1", 0)) as watched:
        watched.settimeout(0.5)
        url = f"http://127.0.0.1:{watched.getsockname()[1]}/a.png"
        image = {"type": "image_url", "image_url": {"url": url}}
        chat = [{"role": "user", "content": [image]}]
        source = {"type": "image", "source": {"type": "url", "url": url}}
        file = {"type": "input_image", "image_url": url}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": url}}}
        tool = {"name": "f", "parameters": {"properties": {"a": {"$ref": url}}}}
        tools = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
        for path, body in (
            (PATH, {**BODY, "messages": chat}),
            (PATH, {**BODY, "response_format": form}),
            (PATH, {**BODY, **tools}),
            ("/v1/responses", {"input": [{"role": "user", "content": [file]}]}),
            (
                "/v1/messages",
                {"max_tokens": 1, "messages": [{"role": "user", "content": [source]}]},
            ),
        ):
            assert server.ask(path, body)[0] == 400
        with pytest.raises(TimeoutError):
            watched.accept()


def test_names_of_clients_are_no_labels(server):
    """/metrics does not grow with what clients ask for."""
    for path in ('/v1/models/a"b', "/v1/models/%0Aforged", "/nowhere"):
        server.ask(path)
        server.ask(path, headers={"Host": "evil"})
    _, text = server.ask("/metrics")
    assert "forged" not in text
    assert "nowhere" not in text
    assert 'a"b' not in text


def test_a_strict_server_refuses_other_models(tiny):
    with served(*tiny, strict_model=True) as server:
        for path, body in (
            (PATH, {**BODY, "model": "gpt-4o"}),
            ("/v1/completions", {"prompt": "a", "model": "gpt-4o"}),
            ("/v1/responses", {"input": "a", "model": "gpt-4o"}),
            ("/v1/messages", {**BODY, "model": "gpt-4o"}),
            ("/v1/models/gpt-4o", None),
        ):
            status, reply = server.ask(path, body)
            assert (status, "'gpt-4o' is not served" in reply["error"]["message"]) == (404, True)
        assert server.chat(model="tiny", max_tokens=1)
        assert server.service.metrics.completion_tokens == 1
