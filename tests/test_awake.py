"""A Mac that is kept awake, with a script in place of macOS's program."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path

import pytest

from mlx_moeflux import awake, cli, loading
from mlx_moeflux.awake import Awake
from mlx_moeflux.cli import main

# Writes its arguments to a file of its own, and ends with the process of -w.
PROGRAM = """#!/bin/sh
echo "$@" > {folder}/$$
while kill -0 $3 2>/dev/null; do sleep 0.05; done
rm {folder}/$$
"""
REST = 0.3


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """A Mac as far as this is about: how often its program was started, and how many run."""
    started = tmp_path / "started"
    started.mkdir()
    program = tmp_path / "caffeinate"
    program.write_text(PROGRAM.format(folder=started))
    program.chmod(0o700)
    monkeypatch.setattr(awake, "CAFFEINATE", str(program))
    monkeypatch.setattr(awake, "REST_SECONDS", REST)
    monkeypatch.setattr(awake, "sys", _Darwin)
    return Mac(program, started)


class _Darwin:
    platform = "darwin"


class Mac:
    def __init__(self, program: Path, started: Path):
        self.program, self._started = program, started

    @property
    def code(self) -> str:
        """The beginning of another program on this Mac."""
        return (
            "from mlx_moeflux import awake\nclass Mac: platform = 'darwin'\n"
            f"awake.sys, awake.CAFFEINATE = Mac, {str(self.program)!r}\n"
            f"awake.REST_SECONDS = {REST}\n"
        )

    @property
    def arguments(self) -> list[str]:
        return [file.read_text() for file in self._started.iterdir()]

    def running(self) -> list[int]:
        return [int(file.name) for file in self._started.iterdir() if _runs(int(file.name))]

    def reaches(self, count: int) -> bool:
        """Return True once so many run; a process takes time to start."""
        return _within(lambda: len(self.running()) == count)


def _runs(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def _within(condition, seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_it_is_held_while_there_is_work_and_some_time_after(mac):
    with Awake(allow_sleep=False) as held:
        assert mac.reaches(1)
        assert mac.arguments == [f"-i -w {os.getpid()}\n"]
        # Ctrl-C in a terminal does not end it.
        assert os.getpgid(mac.running()[0]) != os.getpgrp()
        for _ in range(5):
            held.rest()
            held.work()
        time.sleep(3 * REST)
        assert len(mac.running()) == 1
        rested = time.monotonic()
        held.rest()
        assert mac.reaches(0)
        assert time.monotonic() - rested >= REST
        held.work()
        assert mac.reaches(1)
        assert len(mac.arguments) == 2
    assert not mac.running()


def test_allowed_sleep_and_other_systems_hold_nothing(mac, monkeypatch):
    with Awake(allow_sleep=True):
        pass
    monkeypatch.setattr(awake, "sys", sys)
    if sys.platform != "darwin":
        with Awake(allow_sleep=False):
            pass
    assert not mac.arguments


def test_a_program_that_is_missing_is_one_warning(mac):
    mac.program.unlink()
    held = Awake(allow_sleep=False)
    with pytest.warns(UserWarning, match="caffeinate cannot be started"):
        held.work()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held.rest()
        held.work()
        held.close()


def test_a_program_that_fails_is_one_warning(mac):
    mac.program.write_text(f"#!/bin/sh\necho x >> {mac.program}.runs\nexit 1\n")
    held, runs = Awake(allow_sleep=False), Path(f"{mac.program}.runs")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        held.work()
        assert _within(lambda: bool(said))
        for _ in range(3):
            held.rest()
            held.work()
        time.sleep(2 * REST)
        held.close()
    assert ["ended by itself" in str(each.message) for each in said] == [True]
    assert runs.read_text() == "x\n"


def test_it_ends_with_its_process(mac):
    code = "import time\nawake.Awake(allow_sleep=False).work()\nprint('go', flush=True)\n"
    code = mac.code + code + "time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert mac.reaches(1)
        child.send_signal(signal.SIGKILL)
    assert mac.reaches(0)


# ---- Commands


@pytest.fixture
def loads(mac, monkeypatch):
    """What runs when a command loads its model; by default it ends with an error."""

    def load(*_, **__):
        assert mac.reaches(1)
        raise load.error

    load.error = loading_error()
    monkeypatch.setattr(loading, "load", load)
    return load


def loading_error() -> Exception:
    from mlx_moeflux.errors import CheckpointError

    return CheckpointError("seen.")


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["serve", "--port", "0"]])
@pytest.mark.parametrize(("error", "status"), [(None, 1), (KeyboardInterrupt(), 130)])
def test_commands_hold_it_until_they_end(mac, loads, capsys, command, error, status):
    loads.error = error or loads.error
    assert main(command) == status
    assert len(mac.arguments) == 1
    assert not mac.running()
    assert "caffeinate" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["serve", "--port", "0"]])
def test_commands_let_it_sleep_if_asked(mac, monkeypatch, command):
    def load(*_, **__):
        raise loading_error()

    monkeypatch.setattr(loading, "load", load)
    assert main([*command, "--allow-sleep"]) == 1
    assert not mac.arguments


def test_every_command_that_computes_has_the_option():
    for name in cli.COMMANDS:
        actions = cli.make_parser(name).shown_actions()
        options = [flag for action in actions for flag in action.option_strings]
        computes = getattr(cli.command_module(name), "NEEDS_MLX", True)
        assert ("--allow-sleep" in options) == computes, name


def test_chat_rests_while_it_waits_for_a_line(mac, monkeypatch, capsys):
    from mlx_moeflux.cli import chat

    counts = []

    class Frontend:
        keys = ""

        def line(self) -> str:
            assert mac.reaches(0)
            if counts:
                raise EOFError
            return "/stats"

        def note(self, text: str) -> None:
            if text.startswith("the last reply"):
                counts.append(mac.reaches(1))

    monkeypatch.setattr(chat, "make_frontend", lambda *_, **__: Frontend())
    assert main(["chat"]) == 0
    assert counts == [True]
    assert not mac.running()
    assert len(mac.arguments) == 2


@pytest.mark.slow
def test_the_server_rests_while_it_is_idle(mac):
    code = "from mlx_moeflux.cli import main\nraise SystemExit(main(['serve', '--port', '0']))"
    command = [sys.executable, "-c", mac.code + code]
    body = {"prompt": "import os", "max_tokens": 2000, "stream": True}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = next(line for line in server.stderr if line.startswith("serving "))
            assert mac.reaches(0)
            assert mac.arguments == [f"-i -w {server.pid}\n"]  # while it loaded
            url = re.sub(r".* on (\S+)\n", r"\1/v1/completions", line)
            request = urllib.request.Request(url, json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=120) as reply:
                assert reply.readline().startswith(b"data: ")
                assert mac.reaches(1)
                time.sleep(3 * REST)
                assert len(mac.running()) == 1
            assert mac.reaches(0)  # the client has left
            assert len(mac.arguments) == 2
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_children_of_commands_may_sleep_with_them(monkeypatch, tmp_path):
    from mlx_moeflux.cli import check
    from mlx_moeflux.measure import machine_report

    commands = []

    def run_steps(steps, *_, **__):
        commands.extend(step.arguments for step in steps)
        raise loading_error()

    def in_processes(_, program):
        commands.append(program)
        return 1

    monkeypatch.setattr(machine_report, "run_steps", run_steps)
    monkeypatch.setattr(check, "_in_processes", in_processes)
    for asked in ([], ["--allow-sleep"]):
        commands.clear()
        assert main(["report", "--out", str(tmp_path / "report"), *asked]) == 1
        assert main(["check", *asked]) == 1
        assert len(commands) > 3
        assert {"--allow-sleep" in command for command in commands} == {bool(asked)}
