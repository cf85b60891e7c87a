"""Many clients at once, good and bad: no text is wrong, and nothing is left behind."""

from __future__ import annotations

import http.client
import json
import logging
import multiprocessing
import os
import random
import resource
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mlx_moeflux import generate, load, load_model
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.conversion import synthesize
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.engine import EngineOptions
from mlx_moeflux.tokenizer import load_tokenizer
from tests.server.conftest import MESSAGES, TEMPLATE, Running, events_of, served, wait_until
from tests.server.scripted import Forced
from tests.server.test_refusals import PATH, WRONG

LOG = logging.getLogger(__name__)
QUESTIONS = ["import os", "def f(x):", "class Stack:", "for i in range", "return self", "x = {"]


def messages(i):
    return [{"role": "user", "content": f"{QUESTIONS[i % len(QUESTIONS)]} {i}"}]


def text_of(events):
    deltas = [d["choices"][0]["delta"] for _, d in events if d != "[DONE]"]
    return "".join(delta.get("content", "") for delta in deltas)


@pytest.mark.parametrize("streams", [6, pytest.param(64, marks=pytest.mark.slow)])
def test_streams_at_once_have_the_text_of_a_single_client(tiny, streams):
    alone = [generate(*tiny, messages(i), max_tokens=8) for i in range(streams)]
    with served(*tiny) as server:
        start = threading.Barrier(streams)

        def ask(i):
            start.wait()
            body = {"messages": messages(i), "max_tokens": 8}
            return text_of(server.stream(PATH, body))

        with ThreadPoolExecutor(streams) as pool:
            said = list(pool.map(ask, range(streams)))
    assert said == alone


def asked(port, bodies):
    """(status, body) of each request, all at once."""
    server, start = Running(None, port), threading.Barrier(len(bodies))

    def ask(body):
        start.wait()
        return server.ask(PATH, body)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


@pytest.mark.slow
@pytest.mark.parametrize("streams", [64])
def test_cut_calls_and_huge_bodies_beside_streams_change_nothing(tiny, streams, record_property):
    """64 streams, of which 6 end inside a call, beside 6 bodies of 30 MiB; and the longest pause of
    the streams: the time between two steps of the engine without what their tokens take. Clients
    are another process, so that none holds the engine's interpreter."""
    model, tokenizer = tiny
    call = '<tool_call>{"name": "write", "arguments": {"text": "one two three four"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "write", "parameters": {}}}]
    alone = [generate(model, tokenizer, messages(i), max_tokens=12) for i in range(streams)]
    cut = {i for i in range(streams) if i % 10 == 5}
    bodies = []
    for i in range(streams):
        more = {"tools": tools} if i in cut else {}
        bodies.append({"messages": messages(i), "max_tokens": 12, "stream": True, **more})
    huge = {
        "text": {"messages": [{"role": "user", "content": "a b " * (30 << 18)}]},
        "numbers": {"messages": MESSAGES, "logit_bias": {str(i): 0 for i in range(2_000_000)}},
        "messages": {"messages": MESSAGES * 600_000},
    }
    bodies += [json.dumps(body).encode() for body in huge.values()] * 2
    with (
        served(model, tokenizer) as server,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as clients,
    ):
        engine = server.service.engine
        submit, step, ended = engine.submit, engine._step, []
        runner, decoding = engine._generator._runner, [0.0]
        advance = runner._advance
        ids = tokenizer.encode(call, add_special_tokens=False)

        def scripted(jobs):
            for job in jobs:
                if "write" in tokenizer.decode(job.prompt):
                    job.processors = [*job.processors, Forced(len(job.prompt), ids)]
            submit(jobs)

        def decoded():
            begun = time.monotonic()
            found = advance()
            decoding[0] += time.monotonic() - begun
            return found

        def timed():
            if not len(engine._generator):
                ended.append(None)
            step()
            ended.append(time.monotonic() - decoding[0])

        engine.submit, engine._step = scripted, timed
        runner._advance = decoded
        said = clients.submit(asked, server.port, bodies).result()
    pauses = [b - a for a, b in pairwise(ended) if a is not None and b is not None]
    record_property("longest pause", max(pauses))
    LOG.info("longest pause %.3f s of %d steps", max(pauses), len(pauses))
    # A busy machine may stop the engine in between.
    assert max(pauses) < 10 * engine.options.max_pause
    for status, reply in said[streams:]:
        assert status in (400, 413), reply["error"]["message"]
    for i, (status, text) in enumerate(said[:streams]):
        assert status == 200, text
        events = events_of(text)
        if i not in cut:
            assert text_of(events) == alone[i]
            continue
        chunks = [data["choices"][0] for _, data in events if data != "[DONE]"]
        parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
        arguments = "".join(part["function"]["arguments"] for part in parts)
        assert chunks[-1]["finish_reason"] == "length"
        with pytest.raises(ValueError, match=r"."):
            json.loads(arguments)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def memory():
    """Resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts in /proc")
def test_storms_leave_nothing_behind(tiny, caplog):
    """2,000 requests, of which some clients leave, 200 malformed ones, 50 slow ones."""
    right = {i: generate(*tiny, messages(i), max_tokens=4) for i in range(12)}
    malformed = list(WRONG.values())
    draw = random.Random(0)
    caplog.set_level(logging.WARNING, "mlx_moeflux.server")
    with served(*tiny, engine=EngineOptions(waiting=4000)) as server:

        def good(i):
            reply = server.chat(messages=messages(i % 12), max_tokens=4)
            assert reply["choices"][0]["message"]["content"] == right[i % 12]

        def leave(i):
            with socket.create_connection(("127.0.0.1", server.port), timeout=120) as one:
                body = json.dumps(
                    {"messages": MESSAGES, "max_tokens": 4000, "stream": i % 2 == 0}
                ).encode()
                head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
                data = head.replace("Host: a", "Host: localhost").encode() + body
                one.sendall(data[: draw.choice([20, len(data) - 5, len(data), len(data)])])
                time.sleep(draw.random() * 0.05)

        def wrong(i):
            body = malformed[i % len(malformed)]
            if isinstance(body, dict) and body:
                body = {"messages": MESSAGES, **body}
            status, reply = server.ask(PATH, body)
            assert 400 <= status < 500
            assert reply["error"]["message"]

        def storm():
            jobs = [(good, i) for i in range(600)] + [(leave, i) for i in range(400)]
            jobs += [(wrong, i) for i in range(100)]
            draw.shuffle(jobs)
            slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
            for one in slow:
                one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
            with ThreadPoolExecutor(24) as pool:
                for done in [pool.submit(job, i) for job, i in jobs]:
                    done.result()
            for one in slow:
                one.close()
            wait_until(lambda: server.service.engine.live == 0)
            time.sleep(0.5)

        storm()
        files, used = open_files(), memory()
        storm()
        assert open_files() <= files + 2
        assert memory() < used + 60e6
        good(0)
    assert not [record for record in caplog.records if record.exc_info]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2_000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_a_long_prompt_reads_each_expert_once_while_a_stream_goes_on(tmp_path, tokens, monkeypatch):
    shape = replace(synthesize.SHAPES["qwen3.5-tiny"], max_position_embeddings=40_000)
    monkeypatch.setitem(synthesize.SHAPES, "long", shape)
    directory = synthesize.synthesize("long", tmp_path / "model")
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    draw = random.Random(0)
    prompt = [draw.randrange(1, 1024) for _ in range(tokens)]
    options = EngineOptions(max_pause=0.02)
    with load_model(directory, expert_memory="50%") as model:
        store, layers = model.store, len(model.layers)
        whole = sum(store.block_bytes.values()) * store.num_experts
        with served(model, tokenizer, engine=options) as server:
            before = store.stats().total.bytes_read
            status, alone = server.ask("/v1/completions", {"prompt": prompt, "max_tokens": 1})
            assert (status, alone["usage"]["prompt_tokens"]) == (200, tokens)
            assert store.stats().total.bytes_read - before <= whole
            body = {"prompt": [5, 6, 7], "max_tokens": 5000, "stream": True}
            body["stream_options"] = {"include_usage": True}
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
            connection.request("POST", "/v1/completions", json.dumps(body))
            stream = connection.getresponse()
            stream.readline()
            engine, steps, slices = server.service.engine, [0], []
            original = engine._deliver

            def tell(told):
                steps[0] += 1
                slices.append(time.monotonic())
                original(told)

            monkeypatch.setattr(engine, "_deliver", tell)
            # The stream's calls have one row; the prompt's read an expert once a call.
            calls, experts = Counter(), type(store).experts

            def counted(self, layer, x, ids, *arguments, **options):
                rows = ids.size // ids.shape[-1]
                if rows > 1:
                    calls[layer, rows] += 1
                return experts(self, layer, x, ids, *arguments, **options)

            monkeypatch.setattr(type(store), "experts", counted)
            wait_until(lambda: steps[0] > 3)
            slices.clear()
            status, beside = server.ask("/v1/completions", {"prompt": prompt, "max_tokens": 1})
            pauses = [b - a for a, b in pairwise(slices)]
            connection.close()
            assert beside["choices"][0]["text"] == alone["choices"][0]["text"]
    LOG.info("%d tokens: pauses of the stream up to %.3f s", tokens, max(pauses))
    assert calls == {(layer, tokens): 1 for layer in store.layers}
    # A layer is one slice if it takes longer than the pause.
    assert len(slices) >= layers


@pytest.mark.parametrize("tokens", [150, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("client", [pytest.param("chat", marks=pytest.mark.slow), "claude"])
def test_the_next_turn_after_a_restart_reads_its_new_tokens_alone(tmp_path, client, tokens):
    """With the states on disk; Claude Code's line changes with every turn."""
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="50%")
    tokenizer.chat_template = TEMPLATE
    words = " the long file"
    repeats = tokens // len(tokenizer.encode(words, add_special_tokens=False)) + 1
    text = "read" + words * repeats

    def ask(turn, *said):
        roles = ("user", "assistant")
        history = [{"role": roles[i % 2], "content": one} for i, one in enumerate(said)]
        with (
            PromptCache(tmp_path / "states") as cache,
            served(model, tokenizer, cache=cache) as server,
        ):
            if client == "chat":
                usage = server.chat(messages=history)["usage"]
                return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
            line = f"x-anthropic-billing-header: cc_version=2; cch={turn:05x};"
            system = [{"type": "text", "text": line}, {"type": "text", "text": "You are Code."}]
            body = {"system": system, "messages": history, "max_tokens": 4}
            status, reply = server.ask("/v1/messages", body)
            assert status == 200
            cached = reply["usage"]["cache_read_input_tokens"]
            return reply["usage"]["input_tokens"] + cached, cached

    with model:
        first, cached = ask(1, text)
        assert cached == 0
        assert first > tokens
        second, cached = ask(2, text, "done", "go on")
        assert cached >= first - 3
        assert second - cached < 30
        LOG.info(
            "%s: %d tokens, then %d, of which %d were read", client, first, second, second - cached
        )
