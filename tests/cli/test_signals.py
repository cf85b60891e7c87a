"""Ctrl-C, SIGTERM and SIGHUP at any moment: 130, 143, 129, nothing torn, the next run works.

Oracle: what an uninterrupted run writes.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.cli import _guarded, main, signals
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.loading import BUNDLED_MODEL, load

PROMPT = "def f(x):\n    return x\n" * 12
# The interpreter's own start is not the package's.
CODE = (
    "import sys\nfrom mlx_moeflux.cli import main\nprint('go', flush=True)\n"
    "sys.exit(main(sys.argv[1:]))"
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HUNG_UP = "error: SIGHUP ended the command: its terminal or session was closed.\n"
# The process has a terminal, whose end it hears of.
LEADING = (
    "import fcntl, os, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "from mlx_moeflux.cli import main\nsys.exit(main(sys.argv[1:]))"
)
COMMANDS = {
    "load": ["generate", "--max-tokens", "1"],
    "generate": ["generate", "--expert-memory", "25%", "--max-tokens", "12", "-p", PROMPT,
                 "--prompt-cache", "prompts"],
    "cache_prompt": ["cache_prompt", "--prompt", PROMPT, "--prompt-cache-file", "state"],
    "convert": ["convert", "--model", str(BUNDLED_MODEL), "--out", "packed"],
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="50%")
    with model:
        yield model, tokenizer


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, bytes]:
    return content(convert(BUNDLED_MODEL, tmp_path_factory.mktemp("clean") / "packed"))


def content(directory: Path) -> dict[str, bytes]:
    files = (file for file in directory.rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def run(command: str, folder: Path, number: int = 0, delay: float = 0.0) -> float:
    """Run a command, send it a signal after `delay` seconds, and return the seconds that it took.

    Check the exit status, stderr, and what the next run finds.
    """
    argv = [sys.executable, "-c", CODE, *COMMANDS[command]]
    child = subprocess.Popen(
        argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout.readline() == "go\n"
        began = time.monotonic()
        if number:
            time.sleep(delay)
            child.send_signal(number)
        _, errors = child.communicate(timeout=120)
    status = 128 - child.returncode if child.returncode < 0 else child.returncode
    moment = f"{command}, {number} after {delay:.3f} s: {errors[-2000:]}"
    assert status in ({0, 128 + number} if number else {0}), f"{status}: {moment}"
    assert "terminate called" not in errors, moment
    # Later than this the command has ended; earlier it has not taken the signals over.
    if status and child.returncode > 0:
        assert "Traceback" not in errors, moment
        assert "Exception ignored" not in errors, moment
    return time.monotonic() - began


def check_next_start(folder: Path, loaded, converted) -> None:
    """What is there is whole, or the next run completes it; nothing temporary is left."""
    model, tokenizer = loaded
    left = [str(file) for file in folder.rglob("*") if file.name.endswith(".tmp")]
    assert not left
    if (folder / "state").exists():
        state, tokens = model.make_cache(), len(tokenizer.encode(PROMPT))
        state.load(folder / "state")
        assert state.position == tokens
    if (folder / "packed").exists():
        if not (folder / "packed" / "config.json").exists():
            with pytest.raises(MoefluxError):
                load(folder / "packed")
            convert(BUNDLED_MODEL, folder / "packed")
        found = content(folder / "packed")
        assert found.keys() - {".conversion.json"} == converted.keys()
        assert all(found[name] == converted[name] for name in converted)
    with warnings.catch_warnings(), PromptCache(folder / "prompts") as cache:
        warnings.simplefilter("error")
        cache.resume(model, range(20))


@pytest.mark.parametrize(
    ("command", "number", "share"),
    [
        ("convert", signal.SIGINT, 0.9),
        ("load", signal.SIGTERM, 0.5),
        ("convert", signal.SIGHUP, 0.9),
    ],
)
def test_a_signal(tmp_path, loaded, converted, command, number, share):
    run(command, tmp_path, number, share)
    check_next_start(tmp_path, loaded, converted)


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", COMMANDS)
def test_50_signals_at_random_moments(tmp_path, loaded, converted, command, number):
    """Of four commands: 200 of each signal."""
    (tmp_path / "whole").mkdir()
    seconds = run(command, tmp_path / "whole")
    choose = random.Random(f"{command} {number}")
    for i in range(50):
        folder = tmp_path / str(i)
        folder.mkdir()
        run(command, folder, number, choose.uniform(0, seconds))
        check_next_start(folder, loaded, converted)
        shutil.rmtree(folder)
        mx.clear_cache()


# ---- In this process


def wait() -> int:
    for _ in range(1000):
        time.sleep(0.01)
    return 0


@pytest.mark.parametrize("number", SIGNALS)
def test_the_status_is_that_of_the_signal_whatever_becomes_of_the_exception(number, capsys):
    def converting() -> int:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ImportError("numpy could not be imported") from None
        return 0

    before = signal.getsignal(number)
    assert _guarded(converting) == 128 + number
    assert capsys.readouterr() == ("", HUNG_UP if number == signal.SIGHUP else "")
    assert signal.getsignal(number) == before
    assert _guarded(lambda: 0) == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_the_import_of_mlx_is_not_interrupted(number):
    """An exception within ends the process by SIGABRT."""
    imported = []

    def importing() -> int:
        with signals.held():
            signal.raise_signal(number)
            imported.append("all of it")
        imported.append("and more")
        return 0

    assert _guarded(importing) == 128 + number
    assert imported == ["all of it"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_that_python_drops_comes_again(number):
    class Held:
        def __del__(self):
            signal.raise_signal(number)

    def dropping() -> int:
        held = Held()
        del held
        return wait()

    began = time.monotonic()
    assert _guarded(dropping) == 128 + number
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_handled_interrupt_is_forgotten_and_others_are_not(number):
    def answering() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as interrupt:
            signals.handled(interrupt)
        return 3

    def both() -> int:
        answering()
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as interrupt:
            signals.handled(interrupt)
        return 0

    assert _guarded(answering) == 3
    assert _guarded(both) == 128 + number


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_ignored_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert _guarded(lambda: signal.raise_signal(number) or 0) == 0
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_hangup_behind_another_signal_does_not_disturb_the_end(first):
    """A shell that ends sends one to its jobs, the system another; a session's end sends it behind
    SIGTERM."""
    ended = []

    def ending() -> int:
        try:
            signal.raise_signal(first)
        finally:
            signal.raise_signal(signal.SIGHUP)
            ended.append("whole")
        return 0

    assert _guarded(ending) == 128 + first
    assert ended == ["whole"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(["generate", "--max-tokens", "-1"], b"def binary"), (["chat"], b">>")],
)
def test_the_terminal_is_closed(tmp_path, arguments, shown):
    """Standard streams fail from then on, also for the line, which changes no status."""
    ours, theirs = os.openpty()
    argv = [sys.executable, "-c", LEADING, *arguments]
    child = subprocess.Popen(
        argv, cwd=tmp_path, start_new_session=True, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        seen, until = b"", time.monotonic() + 60
        while shown not in seen and select.select([ours], [], [], until - time.monotonic())[0]:
            seen += os.read(ours, 4096)
    finally:
        os.close(ours)
    assert child.wait(60) == signals.HUNG_UP, seen


def test_parsing_can_be_interrupted(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mlx_moeflux.cli.policies.add_arguments", interrupted)
    assert main(["policies"]) == 130
