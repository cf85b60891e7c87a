"""Oracle: the text of a model whose experts were never released."""

from __future__ import annotations

import argparse
import builtins
import gc
import os
import random
import signal
import subprocess
import sys
import time

import mlx.core as mx
import pytest

from mlx_moeflux import generate, load, stream_generate
from mlx_moeflux.cli import main
from mlx_moeflux.cli.common import memory_pressure
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts import system_memory
from mlx_moeflux.generation import elastic
from mlx_moeflux.generation.idle import check_idle_release, released_when_idle
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.models.base import StreamingModel
from tests.experts.simulated_mac import show

PROMPT = "def add(a, b):"


@pytest.mark.parametrize(
    ("fuse", "memory"),
    [
        (True, "100%"),
        (False, "25%"),
        pytest.param(False, "100%", marks=pytest.mark.slow),
        pytest.param(True, "25%", marks=pytest.mark.slow),
    ],
)
def test_text_and_memory_after_a_release(two_bundled_layers, fuse, memory):
    gc.collect()  # what other tests left is not freed in between
    model, tokenizer = load(two_bundled_layers, expert_memory=memory, fuse=fuse)
    with model:
        expected = generate(model, tokenizer, PROMPT, max_tokens=4)
        before = mx.get_active_memory()
        model.release()
        freed = before - mx.get_active_memory()
        assert freed >= 0.99 * model.plan.budget_bytes
        assert generate(model, tokenizer, PROMPT, max_tokens=4) == expected
        mx.clear_cache()
        assert abs(mx.get_active_memory() - before) <= 0.01 * freed


@pytest.mark.slow
def test_a_trace_does_not_keep_what_was_released():
    model, tokenizer = load(BUNDLED_MODEL)
    model.compile_steps = True
    with model:
        expected = generate(model, tokenizer, PROMPT, max_tokens=4)
        before = mx.get_active_memory()
        model.release()
        assert before - mx.get_active_memory() >= 0.99 * model.plan.budget_bytes
        assert generate(model, tokenizer, PROMPT, max_tokens=4) == expected


def test_a_release_within_a_reply(two_bundled_layers):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    with model:
        expected = generate(model, tokenizer, PROMPT, max_tokens=4)

        def release(*_):
            model.release()

        told = generate(model, tokenizer, PROMPT, max_tokens=4, prompt_progress_callback=release)
        assert told == expected


def wait_for(released: list[float]) -> None:
    until = time.monotonic() + 60
    while not released:
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture
def released(monkeypatch):
    """Times at which a model was released."""
    times, release = [], StreamingModel.release

    def noted(model):
        release(model)
        times.append(time.monotonic())

    monkeypatch.setattr(StreamingModel, "release", noted)
    return times


def test_only_a_long_wait_releases(two_bundled_layers, released):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    with model:
        for seconds in None, 60:
            with released_when_idle(model, seconds):
                assert not released
        assert not released
        start = time.monotonic()
        with released_when_idle(model, 0.05):
            wait_for(released)
        assert released[0] - start >= 0.05
        assert generate(model, tokenizer, PROMPT, max_tokens=4)


@pytest.mark.slow
def test_chat_releases_while_it_waits(released, monkeypatch, capsys):
    lines = iter(("import os", "import sys"))

    def typed(prompt=""):
        if released_before := len(released):
            del released[:]
        wait_for(released)
        assert released_before in (0, 1)
        for line in lines:
            return line
        raise EOFError

    arguments = ["chat", "--max-tokens", "3"]
    monkeypatch.setattr(builtins, "input", typed)
    assert main([*arguments, "--idle-release", "0.01"]) == 0
    text = capsys.readouterr().out
    lines = iter(("import os", "import sys"))
    monkeypatch.setattr(builtins, "input", lambda prompt="": next(lines, "q"))
    assert main(arguments) == 0
    assert capsys.readouterr().out == text


@pytest.mark.slow
def test_chat_shrinks_at_the_prompt_and_tells_before_the_reply(
    two_bundled_layers, monkeypatch, capsys
):
    class Scarce:
        asked = 0

        def scarce(self):
            self.asked += 1
            return self.asked <= 2

    pressure = Scarce()
    monkeypatch.setattr(system_memory, "open_pressure", lambda: pressure)

    def typed(prompt=""):
        until = time.monotonic() + 60
        while lines and pressure.asked < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        return lines.pop() if lines else "q"

    arguments = ["chat", "--max-tokens", "3", "--expert-memory", "50%"]
    arguments += ["--model", str(two_bundled_layers)]
    monkeypatch.setattr(elastic, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(builtins, "input", typed)
    lines = ["import os"]
    assert main(arguments) == 0
    text, said = capsys.readouterr()
    assert said.count("the system lacks memory: experts shrink from ") == 2
    pressure.asked, lines = 3, ["import os"]
    assert main([*arguments, "--fixed-memory"]) == 0
    assert pressure.asked == 3
    again, said = capsys.readouterr()
    assert again == text
    assert "lacks memory" not in said


def test_what_a_mac_does_not_tell_is_one_line(monkeypatch, capsys):
    show(monkeypatch, None, None)
    assert memory_pressure(argparse.Namespace(fixed_memory=True)) is None
    assert capsys.readouterr().err == ""
    assert memory_pressure(argparse.Namespace(fixed_memory=False)) is None
    assert capsys.readouterr().err == (
        "note: neither vm_stat nor sysctl kern.memorystatus_vm_pressure_level answers: experts "
        "keep their memory\n"
    )


# ---- A laptop that sleeps, or needs its memory for something else


@pytest.mark.slow
def test_a_process_that_sleeps_and_wakes_says_the_same():
    arguments = ("generate", "--prompt", PROMPT, "--max-tokens", "150", "--temp", "0")
    command = [sys.executable, "-m", "mlx_moeflux", *arguments, "--expert-memory", "25%"]
    expected = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    asleep, rng = 0, random.Random(0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            time.sleep(rng.uniform(0.05, 0.2))
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.05, 1))
            process.send_signal(signal.SIGCONT)
            asleep += 1
        assert process.stdout.read() == expected
    assert process.returncode == 0
    assert asleep >= 5


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be emptied")
@pytest.mark.parametrize("reader", ["pread", "mmap"])
def test_a_page_cache_that_is_taken_away_changes_no_text(reader):
    def replies(between):
        model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%", expert_reader=reader)
        with model:
            for step in stream_generate(model, tokenizer, PROMPT, max_tokens=12):
                between()
                yield step.text

    def take_away():
        mx.clear_cache()
        with open(BUNDLED_MODEL / "model.safetensors", "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    assert list(replies(take_away)) == list(replies(lambda: None))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_seconds_that_no_timer_takes(seconds):
    with pytest.raises(InputError, match="--idle-release is"):
        check_idle_release(seconds)
