"""Oracle: the order of events. Who leaves frees its place, who is too many is told so, and a
failure ends what runs and nothing else."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.server.engine import EngineOptions
from tests.server.conftest import MESSAGES, events_of, served, wait_until, with_limits

PATH = "/v1/chat/completions"
LONG = {"messages": MESSAGES, "max_tokens": 8000, "stream": True}


def opened(server, body=LONG):
    """A connection and its response, whose stream has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", PATH, json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return connection, response


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(server, stream):
    connection = socket.create_connection(("127.0.0.1", server.port))
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    wait_until(lambda: server.service.engine.live == 1)
    connection.close()
    wait_until(lambda: server.service.engine.live == 0)
    wait_until(lambda: not len(server.service.engine._generator))


def test_who_is_too_many_is_told_when_to_come_again(tiny):
    options = EngineOptions(concurrency=1, waiting=1)
    with served(*tiny, engine=options) as server:
        first, response = opened(server)
        second = threading.Thread(
            target=server.ask, args=(PATH, {"messages": MESSAGES, "max_tokens": 1})
        )
        second.start()
        wait_until(lambda: server.service.engine.live == 2)
        status, reply = server.ask(PATH, {"messages": MESSAGES})
        assert (status, reply["error"]["type"]) == (429, "rate_limit_error")
        assert int(server.headers["Retry-After"]) >= 1
        response.close()
        first.close()
        second.join()
        assert server.chat(max_tokens=1)


def test_a_failure_of_a_step_is_an_error_and_the_next_is_answered(server, monkeypatch):
    store = type(server.service.model.store)
    original, failing = store.experts, threading.Event()

    def experts(self, *arguments, **options):
        if failing.is_set():
            failing.clear()
            raise ExpertFileError("pulled\nout")
        return original(self, *arguments, **options)

    monkeypatch.setattr(store, "experts", experts)
    right = server.chat()["choices"]
    failing.set()
    status, reply = server.ask(PATH, {"messages": MESSAGES, "max_tokens": 8})
    assert (status, reply["error"]["type"]) == (500, "server_error")
    assert server.chat()["choices"] == right
    connection, response = opened(server)
    failing.set()
    said = response.read()
    connection.close()
    assert b'"server_error"' in said
    assert b"[DONE]" not in said
    assert server.chat()["choices"] == right


def test_the_engine_ends_with_its_thread(tiny, monkeypatch):
    """Nobody waits for a thread that has ended."""

    def close(self):
        raise RuntimeError("no room")

    with served(*tiny) as server:
        monkeypatch.setattr(type(server.service.engine), "_carry_out", close)
        status, reply = server.ask(PATH, {"messages": MESSAGES, "max_tokens": 8000})
        assert reply["error"]["type"] == "server_error"
        assert status in (500, 503)  # it came before or after the thread's end
        wait_until(lambda: not server.service.engine.alive)
        assert server.ask(PATH, {"messages": MESSAGES})[0] == 503
        assert server.ask("/health")[0] == 503


def test_memory_for_states_admits(tiny):
    """One state fits, so replies come one after another."""
    model = tiny[0]
    with served(*tiny, engine=EngineOptions(state_bytes=model.state_bytes(200))) as server:
        together = []
        step = server.service.engine._step

        def counting():
            step()
            together.append(len(server.service.engine._generator._batch))

        server.service.engine._step = counting
        with ThreadPoolExecutor(3) as pool:
            texts = list(pool.map(lambda i: server.chat(max_tokens=8)["choices"], range(3)))
        assert texts[0] == texts[1] == texts[2]
        assert max(together) == 1


def test_a_request_has_a_time(tiny):
    with served(*tiny, seconds=0.3) as server:
        status, reply = server.ask(PATH, {"messages": MESSAGES, "max_tokens": 8000})
        assert (status, "took longer than 0.3 s" in reply["error"]["message"]) == (504, True)
        wait_until(lambda: server.service.engine.live == 0)


def test_an_end_finishes_what_runs_and_refuses_the_rest(tiny):
    said = []
    body = {"messages": MESSAGES, "max_tokens": 40}
    with served(*tiny, limits=with_limits(shutdown_seconds=60)) as server:
        thread = threading.Thread(target=lambda: said.append(server.ask(PATH, body)))
        thread.start()
        wait_until(lambda: server.service.engine.live == 1)
    thread.join()
    ((status, reply),) = said
    assert status == 200
    assert reply["usage"]["completion_tokens"] == 40


def test_an_end_drops_what_takes_longer_than_the_bound(tiny):
    with served(*tiny, limits=with_limits(shutdown_seconds=0.2)) as server:
        connection, response = opened(server)
    assert b"shutting down" in response.read()
    connection.close()
    assert not server.service.engine.alive


def test_metrics_follow_a_prompt_by_layers(tiny, monkeypatch):
    with served(*tiny, engine=EngineOptions(max_pause=0.0)) as server:
        generator, engine = server.service.engine._generator, server.service.engine
        original, turn = type(generator).step, threading.Semaphore(0)

        def step(self):
            turn.acquire(timeout=30)
            return original(self)

        monkeypatch.setattr(type(generator), "step", step)
        body = {"messages": [{"role": "user", "content": "x " * 50}], "max_tokens": 1}
        thread = threading.Thread(target=server.ask, args=(PATH, body))
        thread.start()
        layers = len(server.service.model.layers)
        for passed in range(1, layers + 1):
            turn.release()
            wait_until(lambda done=passed: engine.workload.layers == done)
            _, text = server.ask("/metrics")
            assert "mlx_moeflux_prompts_reading 1\n" in text
            assert f"mlx_moeflux_prompt_layers {passed}\n" in text
            assert f"mlx_moeflux_prompt_share {passed / layers}\n" in text
        turn.release(9)
        thread.join()


def test_what_comes_during_the_warm_up_waits_for_it(tiny, monkeypatch):
    original, turn = BatchGenerator.warm_up, threading.Event()

    def warm_up(self, **options):
        assert turn.wait(60)
        return original(self, **options)

    monkeypatch.setattr(BatchGenerator, "warm_up", warm_up)
    options, limits = EngineOptions(warm_up=True), with_limits(keep_alive_seconds=0.02)
    with served(*tiny, engine=options, limits=limits) as server:
        status, reply = server.ask("/health")
        assert (status, "warms up" in reply["error"]["message"]) == (503, True)
        assert int(server.headers["Retry-After"]) >= 1
        assert server.ask("/v1/models")[0] == 200
        connection, response = opened(server, {**LONG, "max_tokens": 2})
        assert json.loads(next_data(response))["choices"][0]["delta"] == {}  # it is kept waiting
        turn.set()
        wait_until(lambda: server.ask("/health") == (200, {"status": "ok"}))
        assert events_of(response.read().decode())[-1] == (None, "[DONE]")
        connection.close()
        assert server.service.engine._generator.nbytes == 0


def test_a_warm_up_that_fails_is_said_and_the_server_serves(tiny, monkeypatch, caplog):
    def warm_up(self, **options):
        raise ExpertFileError("pulled\nout")

    monkeypatch.setattr(BatchGenerator, "warm_up", warm_up)
    with served(*tiny, engine=EngineOptions(warm_up=True)) as server:
        assert server.chat(max_tokens=1)
        assert server.ask("/health")[0] == 200
    assert "the warm-up failed: ExpertFileError: pulled out" in caplog.text


def test_an_end_does_not_wait_for_the_warm_up(tiny, monkeypatch):
    begun = threading.Event()

    def step(self):
        begun.set()
        threading.Event().wait(0.01)  # and never finishes

    monkeypatch.setattr(BatchGenerator, "step", step)
    with served(*tiny, engine=EngineOptions(warm_up=True)) as server:
        assert begun.wait(60)
        assert server.ask("/health")[0] == 503
    assert not server.service.engine.alive


CHUNK = {"index": 0, "finish_reason": None, "logprobs": None}
SILENT = {
    PATH: ({"messages": MESSAGES}, {"choices": [{**CHUNK, "delta": {}}]}),
    "/v1/completions": ({"prompt": "import os, sys, re"}, {"choices": [{**CHUNK, "text": ""}]}),
    "/v1/responses": ({"input": "import os"}, {"type": "response.in_progress"}),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 2},
        {"type": "message_delta", "delta": {"stop_reason": None, "stop_sequence": None}},
    ),
}


@pytest.mark.parametrize("path", SILENT)
def test_a_stream_without_news_has_events(tiny, path, monkeypatch):
    """Clients count events: a comment would not keep them waiting."""
    body, expected = SILENT[path]
    with served(*tiny, limits=with_limits(keep_alive_seconds=0.02)) as server:
        engine = server.service.engine
        original, turn = type(engine._generator).step, threading.Semaphore(0)
        most = "max_output_tokens" if path.endswith("responses") else "max_tokens"

        def step(self):
            assert turn.acquire(timeout=60)
            return original(self)

        monkeypatch.setattr(type(engine._generator), "step", step)
        monkeypatch.setattr(engine._generator, "max_pause", 0.0)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", path, json.dumps({**body, "stream": True, most: 2}))
        response = connection.getresponse()

        def following(condition):
            while not condition(event := json.loads(next_data(response))):
                pass
            return event

        def silent(event):
            return all(event.get(name) == value for name, value in expected.items())

        reported = path != "/v1/messages"
        event = following(lambda e: silent(e) and ("prompt_progress" in e) == reported)
        turn.release()
        if reported:
            assert event["prompt_progress"]["processed"] == 0
            event = following(lambda e: silent(e) and e["prompt_progress"]["processed"])
            progress = event["prompt_progress"]
            assert silent(event)
            assert 0 < progress["processed"] < progress["total"]
            assert progress["cache"] == 0
            assert progress["time_ms"] >= 0
        turn.release(50)
        found = events_of(response.read().decode())
        connection.close()
    kinds = {"/v1/responses": "response.incomplete", "/v1/messages": "message_stop"}
    assert found[-1] == (None, "[DONE]") or found[-1][0] == kinds[path]


@pytest.mark.parametrize("path", SILENT)
def test_a_retry_goes_on_where_its_prompt_was_left(tiny, path, monkeypatch):
    most = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = {**SILENT[path][0], most: 2}
    with PromptCache() as cache, served(*tiny, cache=cache) as server:
        engine, metrics = server.service.engine, server.service.metrics
        original, turn = type(engine._generator).step, threading.Semaphore(0)
        layers, begun = len(server.service.model.layers), []

        def step(self):
            begun.append(self.workload().layers)
            assert turn.acquire(timeout=60)
            return original(self)

        monkeypatch.setattr(type(engine._generator), "step", step)
        monkeypatch.setattr(engine._generator, "max_pause", 0.0)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        for steps in range(1, 100):
            wait_until(lambda steps=steps: len(begun) == steps)
            if begun[-1] == layers - 1:
                break
            turn.release()
        connection.close()
        wait_until(lambda: engine.live == 0)
        turn.release(100)
        assert server.ask(path, body)[0] == 200
        assert (metrics.cache_hits, metrics.prompt_tokens) == (1, 2 * metrics.cached_tokens)


def next_data(response):
    while not (line := response.readline()).startswith(b"data: "):
        assert line
    return line[6:]
