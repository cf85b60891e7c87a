"""``mlx_moeflux serve`` in a process of its own: what it says, and how it ends."""

from __future__ import annotations

import argparse
import contextlib
import errno
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mlx_moeflux import loading
from mlx_moeflux.cli import main, serve
from mlx_moeflux.loading import BUNDLED_MODEL
from tests.server.conftest import TEMPLATE

ROOT = Path(__file__).parents[2]
BODY = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 8}


@contextlib.contextmanager
def serving(*arguments: str, program=("-m", "mlx_moeflux"), warm=("--no-warm-up",)):
    """(process, address) of a server that is ready, or warms up; `said`: The lines of the process
    so far."""
    command = [sys.executable, *program, "serve", "--port", "0", *warm, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    process.said = []
    try:
        for line in process.stderr:
            process.said.append(line)
            if found := re.search(r"(?:serving .* on|warming up, as) (http://[^\s/]+)", line):
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


def _parsed(*flags):
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(flags)


def test_server_is_the_same_command(capsys):
    with pytest.raises(SystemExit):
        main(["server", "--help"])
    assert "--allowed-host" in capsys.readouterr().out


@pytest.mark.parametrize(
    "sent",
    [
        signal.SIGHUP,
        *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_a_signal_finishes_what_runs_and_ends_the_server(talking, sent):
    with serving("--model", talking, "--max-tokens", "60") as (process, url):
        with urllib.request.urlopen(f"{url}/props", timeout=120) as reply:
            plan = json.load(reply)["memory"]
        assert plan.pop("usable") == sum(plan.values())
        with urllib.request.urlopen(f"{url}/metrics", timeout=120) as reply:
            assert f"mlx_moeflux_memory_states_bytes {plan['states']}\n" in reply.read().decode()
        with post(url, {**BODY, "stream": True, "max_tokens": None}) as reply:
            assert reply.readline().startswith(b"data: ")
            ending = ""
            process.send_signal(sent)
            if sent == signal.SIGHUP:  # a closed terminal sends several
                ending = next(line for line in process.stderr if " ending: " in line)
                process.send_signal(sent)
            assert b"[DONE]" in reply.read()
        said = ending + process.stderr.read()
        assert process.wait(60) == 0
    assert re.fullmatch(
        r"memory \S+ \SB: trunk .*, experts .*, states .*, prompt cache .*, activations 1 GB, .*\n",
        process.said[-2],
    )
    assert re.search(
        r"/v1/chat/completions: prompt \d+ \(0 cached\), reply 60, length; first token \S+ s, "
        r"all \S+ s; hit rate \S+ %",
        said,
    )
    assert re.search(r"^\S+ \S+ ending: replies that run or wait: 1; they have 30 s$", said, re.M)
    assert "Traceback" not in said


def test_it_serves_after_its_warm_up(talking):
    with serving("--model", talking, warm=()) as (process, url):
        assert process.said[-1] == (
            f"warming up, as {url}/health says; --no-warm-up leaves it out\n"
        )
        with post(url, {**BODY, "max_tokens": 2}) as reply:
            assert reply.status == 200
        assert process.stderr.readline() == f"serving {talking} on {url}\n"
        with urllib.request.urlopen(f"{url}/health", timeout=120) as reply:
            assert json.load(reply) == {"status": "ok"}


# A step of the warm-up never ends it.
SLOW = """
import time
from mlx_moeflux.cli import main
from mlx_moeflux.generation.batch import BatchGenerator

BatchGenerator.step = lambda self: time.sleep(0.01)
raise SystemExit(main())
"""


@pytest.mark.parametrize(
    "sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_a_signal_ends_the_warm_up(talking, sent):
    with serving("--model", talking, warm=(), program=("-c", SLOW)) as (process, url):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/health", timeout=120)
        assert refused.value.code == 503
        refused.value.close()
        process.send_signal(sent)
        said = process.stderr.read()
        assert process.wait(60) == 0  # as from a server that serves
    (line,) = [line for line in said.splitlines() if "refused with 503" not in line]
    assert "ending: replies that run or wait: 0" in line


@pytest.mark.slow
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


def test_nohup_leaves_the_server_running(talking):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the child inherits it
    try:
        with serving("--model", talking) as (process, url):
            process.send_signal(signal.SIGHUP)
            with post(url, BODY) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] == 8
            process.send_signal(signal.SIGTERM)
            assert "ending: replies that run or wait: 0" in process.stderr.read()
            assert process.wait(60) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


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
        (
            ["--host", "nowhere.invalid", "--api-key", "a", "--allowed-host", "a"],
            "nothing can listen on nowhere.invalid",
        ),
        (["--host", "0.0.0.0"], "give --api-key"),
        (["--host", "0.0.0.0", "--api-key", "a"], "--allowed-host"),
        (["--allowed-host", "http://mac.local"], "without scheme and port"),
        (["--allowed-host", "mac.local:8080"], "without scheme and port"),
        (["--allowed-host", "*"], "without scheme and port"),
        (["--allowed-origins", "ai.example.org"], "such as https://ai.example.org"),
        (["--allowed-origins", "https://ai.example.org/"], "such as https://ai.example.org"),
        (["--prompt-cache-bytes", "auto"], "give an amount"),
        (["--prompt-cache-bytes", "5"], "has no unit"),
        (["--prompt-cache", f"{__file__}/cache"], "cannot be written"),
        (["--max-tokens", "0"], "at least 1"),
        (["--temp", "-1"], "at least 0"),
        (["--top-p", "2"], "top_p is 2"),
        (["--min-p", "-1"], "min_p is -1"),
        (["--top-k", "-1"], "top_k is -1"),
        (["--tool-parser", "none"], "there are qwen3_xml"),
        (["--reasoning-parser", "none"], "--reasoning-parser is 'none'; there are think"),
        (["--chat-template", "/nowhere"], "cannot be read"),
        (["--chat-template", "{% for %}"], "is no template of jinja2"),
        (["--chat-template", "{{ a | nofilter }}"], "No filter named 'nofilter'"),
        (["--chat-template-args", "5"], "--chat-template-args must be a JSON object"),
        (["--chat-template-args", "{"], "--chat-template-args is not JSON"),
        (["--chat-template-args", '{"tools": 1}'], "cannot set 'tools'"),
        (["--kv-memory", "x"], "--kv-memory"),
        (["--kv-memory", "4"], "has no unit"),
        (["--prefill-step-size", "0"], "--prefill-step-size is 0"),
        (["--decode-concurrency", "0"], "--decode-concurrency is 0"),
        (["--max-pause", "nan"], "--max-pause is nan"),
        (["--timeout", "nan"], "--timeout is nan"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout is -1"),
        (["--idle-release", "0"], "--idle-release is 0"),
        (["--model-name", " "], "--model-name is ' '"),
        (["--trust-remote-code"], "does not apply"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_the_model_is_read(
    flags, said, monkeypatch, capsys
):
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("it was loaded"))
    assert main(["serve", "--port", "0", *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_a_folder_that_takes_no_files_is_found_before_the_model(tmp_path, monkeypatch, capsys):
    def full(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("it was loaded"))
    assert main(["serve", "--port", "0", "--prompt-cache", str(tmp_path)]) == 1
    assert "cannot be written (Read-only file system)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "hosts"),
    [("Mac.Local", "mac.local"), ("192.168.1.7", "192.168.1.7"), ("[FE80::1]", "fe80::1")],
)
def test_names_of_the_server_are_those_of_requests(given, hosts):
    args = _parsed("--allowed-host", given, "--allowed-origins", "app://obsidian.md", "null", "*")
    limits = serve._limits(args)
    assert hosts in limits.hosts
    assert limits.origins == {"app://obsidian.md", "null", "*"}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("models/Qwen3-Next", "Qwen3-Next"),
        ("hub/models--org--a-b/snapshots/0123", "org/a-b"),
        ("hub/models--org--a--b", "org/a--b"),
    ],
)
def test_a_models_id_is_no_path(tmp_path, monkeypatch, folder, name):
    (tmp_path / folder).mkdir(parents=True)
    args = _parsed()
    assert serve._name(args, str(tmp_path / folder)) == name
    monkeypatch.chdir(tmp_path / folder)
    assert serve._name(args, ".") == name
    assert serve._name(args, f"{tmp_path / folder}:Q4_K_M") == f"{name}:Q4_K_M"


def test_a_models_id_is_that_of_the_hub_or_the_one_given():
    for name in ("org/name", "org/name:Q4_K_M", "org/name@v2:Q4_K_M"):
        assert serve._name(_parsed(), name) == name
    assert serve._name(_parsed(), "gpt-oss-120b") == "openai/gpt-oss-120b"
    assert serve._name(_parsed(), BUNDLED_MODEL) == "tiny"
    assert serve._name(_parsed("--model-name", "my-model"), "org/name") == "my-model"


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
