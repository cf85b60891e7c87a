"""Oracle: our own generate() on the same messages, asked over HTTP from another process."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mlx_moeflux import generate, load
from mlx_moeflux.cli import main
from mlx_moeflux.cli.server import lasting
from mlx_moeflux.loading import BUNDLED_MODEL

pytest.importorskip("mlx_lm")
ROOT = Path(__file__).parents[2]

TEMPLATE = (
    "{% if tools %}# tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}def{% endif %}"
)
MESSAGES = [{"role": "user", "content": "import os"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "up", "parameters": {}}}


@pytest.fixture(scope="module")
def talking(tmp_path_factory) -> Path:
    """The bundled model with a chat template."""
    directory = tmp_path_factory.mktemp("talking") / "model"
    shutil.copytree(BUNDLED_MODEL, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@contextlib.contextmanager
def running(model: Path, *arguments: str):
    """The address of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "mlx_moeflux", "server", "--model", str(model), "--port",
            str(port), "--expert-memory", "50%", "--log-level", "WARNING", *arguments,
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < until
                time.sleep(0.1)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def url(talking):
    with running(talking) as address:
        yield address


def ask(url, path, body=None):
    """(status, body)"""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def expected(talking):
    model, tokenizer = load(talking)
    with model:
        # mlx-lm's detokenizer drops the space that a reply begins with.
        yield {
            given: generate(
                model, tokenizer, MESSAGES, max_tokens=8, tools=[TOOL] if given else None
            ).lstrip()
            for given in (False, True)
        }


def test_it_answers_and_reuses_what_it_read(url, expected):
    counts = []
    for _ in range(2):
        body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        status, text = ask(url, "/v1/chat/completions", body)
        assert status == 200
        reply = json.loads(text)
        assert reply["choices"][0]["message"]["content"] == expected[False]
        counts.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert counts[0] < counts[1]


def test_what_was_read_outlives_the_server(talking, tmp_path, expected):
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    cached = []
    for _ in range(2):
        with running(talking, "--prompt-cache", str(tmp_path / "prompts")) as url:
            status, text = ask(url, "/v1/chat/completions", body)
            assert status == 200
        reply = json.loads(text)
        assert reply["choices"][0]["message"]["content"] == expected[False]
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 < cached[1]


def test_two_at_once_stream_with_tools(url, expected):
    said = [[], []]

    def stream(i):
        body = {"messages": MESSAGES, "max_tokens": 8, "stream": True, "tools": [TOOL]}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    said[i].append(delta.get("content") or "")

    threads = [threading.Thread(target=stream, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["".join(parts) for parts in said] == [expected[True]] * 2
    assert all(len(parts) > 1 for parts in said)


def test_the_openai_client_streams_with_tools_twice_at_once(url, expected):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    said = ["", ""]

    def stream(i):
        chunks = client.chat.completions.create(
            model="default_model", messages=MESSAGES, max_tokens=8, stream=True, tools=[TOOL]
        )
        for chunk in chunks:
            said[i] += chunk.choices[0].delta.content or ""

    threads = [threading.Thread(target=stream, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    assert said == [expected[True]] * 2


def test_metrics_tell_what_the_experts_cost(url, talking):
    ask(url, "/v1/completions", {"prompt": "import", "max_tokens": 2})
    status, text = ask(url, "/metrics")
    assert status == 200
    found = json.loads(text)
    assert found["model"] == str(talking)
    assert found["experts"]["total"]["bytes_read"] > 0
    assert set(found["experts"]["layers"]) == {str(i) for i in range(6)}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        {"messages": "hello"},
        {"messages": [{"content": "no role"}]},
        {},
        {"messages": MESSAGES, "max_tokens": -1},
        {"messages": MESSAGES, "temperature": "hot"},
        {"messages": MESSAGES, "stop": 5},
        {"messages": MESSAGES, "stop": ["a", ""]},
        {"messages": MESSAGES, "logit_bias": {"a": 1}},
        {"messages": MESSAGES, "logit_bias": {"4096": 1}},
        {"messages": MESSAGES, "tools": "none"},
        {"messages": MESSAGES, "chat_template_kwargs": 3},
        {"messages": MESSAGES, "chat_template_kwargs": {"messages": 3}},
        {"messages": MESSAGES, "tools": [5]},
        {"messages": MESSAGES, "seed": -5},
        {"messages": MESSAGES, "seed": 2**70},
        {"messages": MESSAGES, "model": "/nowhere"},
        {"messages": []},
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        {"messages": [{"role": "user", "content": "def f(x):" * 3000}]},
    ],
    ids=lambda body: str(body)[:60],
)
def test_malformed_requests_get_4xx_with_one_line(url, body):
    status, text = ask(url, "/v1/chat/completions", body)
    assert 400 <= status < 500, text
    error = json.loads(text)["error"]
    assert isinstance(error, str)
    assert re.fullmatch(r"[^\n]+", error)
    assert "Traceback" not in error
    assert ask(url, "/health")[0] == 200


def test_an_empty_prompt_is_refused_and_the_next_is_answered(url):
    """It once ended the thread that generates."""
    status, text = ask(url, "/v1/completions", {"prompt": "", "max_tokens": 2})
    assert (status, "empty" in text) == (400, True)
    assert ask(url, "/v1/completions", {"prompt": "import", "max_tokens": 2})[0] == 200


def test_a_reply_ends_with_the_context(talking):
    body = {"prompt": "import", "max_tokens": 1000}
    with running(talking, "--max-context", "20") as url:
        status, text = ask(url, "/v1/completions", body)
    assert status == 200
    usage = json.loads(text)["usage"]
    # The last token need not go in.
    assert usage["prompt_tokens"] + usage["completion_tokens"] <= 21


def test_after_a_failure_others_are_answered():
    """Whoever waits when the generating thread fails hears of it; the thread goes on."""

    class Stub:
        def __init__(self, requests):
            self.requests, self.answered = requests, []
            self._run_generate()

        def _next_request(self, timeout=None):
            return self.requests.pop(0)

        def _generate(self):
            while self.requests:
                waiting, text = self._next_request()
                if text == "bad":
                    raise ValueError("pulled\nout")
                waiting.put(text)

    queues = [queue.Queue() for _ in range(3)]
    lasting(Stub)(list(zip(queues, ("good", "bad", "good"), strict=True)))
    assert [q.get_nowait() for q in queues[::2]] == ["good", "good"]
    assert str(queues[1].get_nowait()) == "the reply failed: pulled out"


def test_models_are_the_one_that_is_served(url, talking):
    status, text = ask(url, "/v1/models")
    assert (status, [m["id"] for m in json.loads(text)["data"]]) == (200, [str(talking)])


def test_unknown_paths_are_404(url):
    assert ask(url, "/v1/nothing")[0] == ask(url, "/v1/nothing", {})[0] == 404


def test_without_mlx_lm_one_line_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    monkeypatch.setitem(sys.modules, "mlx_lm.models", None)
    assert main(["server"]) == 1
    assert re.fullmatch(r"error: [^\n]*mlx-lm[^\n]*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "99999999"], "port is 99999999; give 1 to 65535"),
        (["--model", "/nowhere"], "cannot be loaded: .*'/nowhere'"),
        pytest.param(
            ["--host", "300.1.1.1"], "nothing can listen on 300.1.1.1", marks=pytest.mark.slow
        ),
        pytest.param(
            ["--expert-memory", "1%"], "the smallest budget that works", marks=pytest.mark.slow
        ),
    ],
)
def test_what_cannot_be_served_ends_it_with_one_line(flags, said):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "mlx_moeflux", "server", "--port", port, *flags]
    command += ["--log-level", "WARNING"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(said, done.stderr)
    assert "Traceback" not in done.stderr
    assert len(re.findall("^error: ", done.stderr, re.MULTILINE)) == 1


def test_a_port_that_is_taken_is_said_in_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["server", "--port", str(taken.getsockname()[1])]) == 1
    assert re.fullmatch(
        r"error: nothing can listen on [^\n]*in use[^\n]*\n", capsys.readouterr().err
    )
