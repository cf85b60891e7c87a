"""A server in this process: real sockets, real clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("pydantic")
pytest.importorskip("llguidance")

from mlx_moeflux import load
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.server import service as services
from mlx_moeflux.server.app import make_app
from mlx_moeflux.server.constrain import Grammars
from mlx_moeflux.server.engine import EngineOptions
from mlx_moeflux.server.guard import Limits
from mlx_moeflux.server.http import Server, listen
from mlx_moeflux.server.request import Defaults
from mlx_moeflux.server.service import Service, ServiceOptions

TEMPLATE = (
    "{% if tools %}# tools: {{ tools | tojson }} <tool_call>{name, arguments}</tool_call>\n"
    "{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "\n{% endfor %}"
    "{% if add_generation_prompt %}def{% endif %}"
)
MESSAGES = [{"role": "user", "content": "import os"}]
LIMITS = Limits(shutdown_seconds=5.0)


class Running:
    """The address of a server, its service, and plain requests to it."""

    def __init__(self, service: Service, port: int):
        self.service, self.port = service, port
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path, body=None, *, headers=None, method=None):
        """(status, body): body parsed where it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1800)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            method = method or ("GET" if data is None else "POST")
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            text = response.read().decode()
            self.headers = response.headers
            if response.headers.get_content_type() == "application/json":
                return response.status, json.loads(text)
            return response.status, text
        finally:
            connection.close()

    def chat(self, **body):
        """The body of a successful chat completion of greedy text."""
        body = {"messages": MESSAGES, "max_tokens": 8, **body}
        status, reply = self.ask("/v1/chat/completions", body)
        assert status == 200, reply
        return reply

    def stream(self, path, body):
        """All events of a stream: (event name or None, data)."""
        status, text = self.ask(path, {**body, "stream": True})
        assert status == 200, text
        return events_of(text)


def events_of(text):
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if fields:
            data = fields["data"]
            found.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


def wait_until(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def service_of(model, tokenizer, *, engine=None, cache=None, **options):
    return Service(
        model,
        tokenizer,
        ServiceOptions(**{"name": "tiny", "defaults": Defaults(max_tokens=64), **options}),
        engine or EngineOptions(),
        cache,
    )


@contextlib.contextmanager
def served(model, tokenizer, *, limits=LIMITS, **options):
    """A running server of a loaded model."""
    service = service_of(model, tokenizer, **options)
    with listen("127.0.0.1", 0) as bound:
        server = Server(make_app(service, limits), limits)
        port = bound.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            yield Running(service, port)
        finally:
            server.handle_exit(0, None)
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="session", autouse=True)
def vocabularies_are_read_once():
    """Services of one tokenizer share what compiles grammars, which takes 35 ms to make."""

    @functools.cache
    def made(tokenizer, size, visible, ends):
        return Grammars(tokenizer, size, visible)

    def shared(tokenizer, size, visible=()):
        return made(tokenizer, size, visible, tuple(sorted(tokenizer.eos_token_ids)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "Grammars", shared)
        yield


@pytest.fixture(scope="session")
def tiny(two_bundled_layers):
    """Two layers of the bundled model, streamed, and its tokenizer with a chat template."""
    model, tokenizer = load(two_bundled_layers, expert_memory="50%")
    tokenizer.chat_template = TEMPLATE
    with model:
        yield model, tokenizer


@pytest.fixture(scope="module")
def server(tiny):
    with PromptCache() as cache, served(*tiny, cache=cache) as running:
        yield running


def with_limits(**changes):
    return replace(LIMITS, **changes)
