"""Oracle: the event loop, which stays free while a large body is read, and small requests, which
are answered meanwhile."""

from __future__ import annotations

import threading

import pytest

from mlx_moeflux.server import app
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.json_guard import check_values
from mlx_moeflux.server.protocols import (
    anthropic_messages,
    openai_chat,
    openai_completions,
    openai_responses,
)
from tests.server.conftest import MESSAGES, served, wait_until

CHAT = "/v1/chat/completions"
FILL = "x " * app.AT_ONCE

PATHS = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}


@pytest.fixture
def reading(monkeypatch):
    """The threads that read bodies."""
    threads, read = [], app.read_body

    def noted(model, body):
        threads.append(threading.current_thread())
        return read(model, body)

    monkeypatch.setattr(app, "read_body", noted)
    return threads


@pytest.mark.parametrize("path", PATHS)
def test_a_thread_reads_what_is_no_small_body(server, reading, path):
    for body in (PATHS[path], {**PATHS[path], "metadata": {"user_id": FILL}}):
        assert server.ask(path, body)[0] == 200
    small, large = reading
    assert small is not large
    assert large.name.startswith("asyncio")


def test_a_fault_of_a_large_body_is_named(server):
    status, reply = server.ask(CHAT, {**PATHS[CHAT], "user": FILL, "n": 0})
    assert (status, reply["error"]["param"]) == (400, "n")
    status, reply = server.ask(CHAT, b'{"user": "' + FILL.encode() + b'"')
    assert (status, "no JSON" in reply["error"]["message"]) == (400, True)


def test_two_large_bodies_leave_a_place_to_others(tiny, monkeypatch):
    """One is read, the other waits, and a third client is answered."""
    begun, go_on, read = [], threading.Event(), app.read_body

    def slow(model, body):
        if len(body) >= app.LARGE:
            begun.append(len(body))
            assert go_on.wait(60)
        return read(model, body)

    monkeypatch.setattr(app, "read_body", slow)
    large = {**PATHS[CHAT], "user": "x" * app.LARGE}
    with served(*tiny) as server:
        said = []
        clients = [
            threading.Thread(target=lambda: said.append(server.ask(CHAT, large)[0]))
            for _ in range(2)
        ]
        for client in clients:
            client.start()
        try:
            wait_until(lambda: begun)
            for body in (PATHS[CHAT], {**PATHS[CHAT], "user": FILL}):
                assert server.ask(CHAT, body)[0] == 200
            assert len(begun) == 1
        finally:
            go_on.set()
            for client in clients:
                client.join()
        assert (said, len(begun)) == ([200, 200], 2)


MANY = {
    "numbers": b"[" + b"1," * 300_000 + b"1]",
    "brackets": b"[" * 300_000,
    "fields": b"{" + b'"a":0,' * 300_000 + b'"b":0}',
    "messages": b'{"messages":[' + b'{"role":"user","content":"a"},' * 150_000 + b"{}]}",
}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/detokenize"])
def test_more_values_than_a_prompt_can_have_are_refused_unread(server, reading, path, name):
    status, reply = server.ask(path, MANY[name])
    assert (status, reading) == (413, [])
    assert "more than 270336 commas and opening brackets" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("body", "count"), [(b"[1,2,3]", 3), (b'{"a":[{}]}', 3), (b'{"a":"[,{"}', 4), (b"", 0)]
)
def test_values_are_counted_by_what_stands_before_them(body, count):
    check_values(body, count)
    check_values(body + b"1" * (3 << 20), count)
    with pytest.raises(RequestError, match="commas and opening brackets"):
        check_values(b"1" * (3 << 20) + body, count - 1)


def test_a_text_to_tokenize_is_bounded(server):
    status, reply = server.ask("/tokenize", {"content": "word " * 100_000})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    status, reply = server.ask("/tokenize", {"content": "word " * 9_000})
    assert (status, len(reply["tokens"]) > 9_000) == (200, True)


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [
        ("/v1/chat/completions", openai_chat, "usage"),
        ("/v1/completions", openai_completions, "usage"),
        ("/v1/responses", openai_responses.Stream, "body"),
        ("/v1/messages", anthropic_messages, "_usage"),
    ],
)
def test_a_whole_reply_is_written_beside_the_event_loop(server, monkeypatch, path, module, name):
    """Its log-probabilities may take seconds."""
    original, threads, loops = getattr(module, name), [], []
    submit = server.service.engine.submit

    def noted(*arguments):
        threads.append(threading.current_thread())
        return original(*arguments)

    def submitted(jobs):
        loops.append(threading.current_thread())
        submit(jobs)

    monkeypatch.setattr(module, name, noted)
    monkeypatch.setattr(server.service.engine, "submit", submitted)
    assert server.ask(path, PATHS[path])[0] == 200
    assert threads
    assert not {*threads} & {*loops}
