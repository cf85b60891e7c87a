"""``mlx_moeflux serve`` in a process of its own: what it says, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from mlx_moeflux.cli import main
from mlx_moeflux.loading import BUNDLED_MODEL
from tests.server.conftest import TEMPLATE

ROOT = Path(__file__).parents[2]
BODY = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 8}


@contextlib.contextmanager
def serving(*arguments: str):
    """(process, address) of a server that is ready."""
    command = [sys.executable, "-m", "mlx_moeflux", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if found := re.search(r"serving .* on (http://\S+)", line):
                break
        else:
            raise AssertionError(f"it ended with {process.wait()}")
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def post(url, body):
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    return urllib.request.urlopen(request, timeout=120)


def read_all(reply):
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        reply.read()


@pytest.fixture(scope="module")
def talking(tmp_path_factory) -> str:
    """The bundled model with a chat template."""
    directory = tmp_path_factory.mktemp("talking") / "model"
    shutil.copytree(BUNDLED_MODEL, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return str(directory)


def test_server_is_the_same_command(capsys):
    with pytest.raises(SystemExit):
        main(["server", "--help"])
    assert "--allowed-host" in capsys.readouterr().out


@pytest.mark.parametrize(
    "sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_finishes_what_runs_and_ends_the_server(talking, sent):
    with serving("--model", talking, "--max-tokens", "60") as (process, url):
        with post(url, {**BODY, "stream": True, "max_tokens": None}) as reply:
            assert reply.readline().startswith(b"data: ")
            process.send_signal(sent)
            assert b"[DONE]" in reply.read()
        said = process.stderr.read()
        assert process.wait(60) == 0
    assert re.search(
        r"/v1/chat/completions: prompt \d+ \(0 cached\), reply 60, length; first token \S+ s, "
        r"all \S+ s; hit rate \S+ %",
        said,
    )
    assert "Traceback" not in said


def test_two_signals_end_it_at_once(talking):
    with serving("--model", talking, "--shutdown-timeout", "600") as (process, url):
        with post(url, {**BODY, "stream": True, "max_tokens": 8000}) as reply:
            assert reply.readline().startswith(b"data: ")
            # The stream ends with an error event or is cut off, whichever comes first.
            reader = threading.Thread(target=read_all, args=(reply,))
            reader.start()
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            reader.join(60)
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_another_process_reads_the_new_tokens_alone(talking, tmp_path):
    counts = []
    messages = [{"role": "user", "content": "read" + " the long file" * 300}]
    for _ in range(2):
        with serving("--model", talking, "--prompt-cache", str(tmp_path)) as (process, url):
            with post(url, {"messages": messages, "max_tokens": 4}) as reply:
                usage = json.load(reply)["usage"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts.append((usage["prompt_tokens"], cached))
        messages += [
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": "go on"},
        ]
    (first, none), (second, cached) = counts
    assert none == 0
    assert first - 3 <= cached < second < cached + 30


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "99999999"], "port is 99999999; give 1 to 65535"),
        (["--host", "0.0.0.0"], "give --api-key"),
        (["--host", "0.0.0.0", "--api-key", "a"], "--allowed-host"),
        (["--prompt-cache-bytes", "auto"], "give an amount"),
        (["--max-tokens", "0"], "at least 1"),
        (["--temp", "-1"], "at least 0"),
        (["--tool-parser", "none"], "there are qwen3_xml"),
        (["--chat-template", "/nowhere"], "cannot be read"),
        (["--chat-template-args", "5"], "--chat-template-args must be a JSON object"),
        (["--kv-memory", "x"], "x"),
        (["--trust-remote-code"], "does not apply"),
    ],
)
def test_what_cannot_be_served_is_one_line(flags, said, capsys):
    assert main(["serve", "--port", "0", *flags]) == 1
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert lines[-1] == errors[0]


def test_a_port_that_is_taken_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert re.fullmatch(
        r"error: nothing can listen on [^\n]*in use[^\n]*\n", capsys.readouterr().err
    )


def test_an_endless_template_is_refused(monkeypatch, capsys):
    from mlx_moeflux.sandbox.process import child

    monkeypatch.setitem(child.call.__kwdefaults__, "seconds", 0.2)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert main(["serve", "--port", "0", "--chat-template", endless]) == 1
    error = capsys.readouterr().err
    assert "error: the chat template was stopped at three short messages: it did not end" in error


@pytest.mark.parametrize("module", ["starlette", "uvicorn", "llguidance"])
def test_without_the_extra_one_line_names_it(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["serve"]) == 1
    assert re.fullmatch(r"error: [^\n]*extra 'server'[^\n]*\n", capsys.readouterr().err)
