"""Bars of progress and text on one terminal: what a user's screen shows in the end."""

from __future__ import annotations

import io
import sys

import pytest

from mlx_moeflux.cli import messages
from mlx_moeflux.cli.messages import Bar, Trying, say
from mlx_moeflux.kernels.verify import trials, verdicts
from mlx_moeflux.loading import BUNDLED_MODEL
from tests.checkpoint.local_hub import local_hub
from tests.cli.terminal import in_terminal, screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_bars_of_a_download_and_of_commands_leave_lines_of_text(tmp_path):
    """A download for convert, then a model that lies in the cache."""
    with local_hub(BUNDLED_MODEL) as hub:
        environment = hub.environment(tmp_path / "home")
        out = str(tmp_path / "out")
        status, written = in_terminal(
            ["convert", "--model", "org/tiny", "--out", out], env=environment
        )
        assert status == 0, written
        lines = [line for line in screen(written) if line]
        assert [line.split(",")[0] for line in lines] == [
            "org/tiny: 4 of 4 files to download", f"wrote {out}",
        ]  # fmt: skip
        assert "download:   0%|" in written
        assert "convert: " in written
        arguments = ["generate", "--model", "org/tiny", "--prompt", "word " * 120]
        status, written = in_terminal([*arguments, "--max-tokens", "4"], env=environment)
        assert status == 0, written
    assert "download" not in written
    assert ".json" not in written
    assert "prompt: " in written
    lines = [line for line in screen(written) if line]
    assert lines[0].startswith("experts resident")
    assert lines[-1].startswith("prompt 121 tokens")
    assert not any("|" in line for line in lines)
    assert 2 < len(lines) <= 6


def as_terminal(monkeypatch) -> Terminal:
    """Make stderr a terminal; in the test itself, because pytest sets it before."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_warning_while_a_bar_is_shown_has_its_own_line(monkeypatch):
    terminal = as_terminal(monkeypatch)
    with Bar("prompt", "tok") as bar:
        bar.update(1, 4)
        say("warning", "a kernel is left out")
        shown = screen(terminal.getvalue())
        assert shown[0] == "warning: a kernel is left out"
        assert shown[1].startswith("prompt:  25%|")
        bar.update(4, 4)
        terminal.write("text")
    assert screen(terminal.getvalue())[1] == "text"


def test_an_error_removes_the_bar(monkeypatch):
    terminal = as_terminal(monkeypatch)

    def fails():
        with Bar("convert", "B") as bar:
            bar.update(1000, 4000)
            assert "0.00/4.00k" in terminal.getvalue()
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fails()
    say("error", "x")
    assert screen(terminal.getvalue()) == ["error: x", ""]


def test_nothing_is_drawn_before_the_first_report_or_without_a_terminal(monkeypatch):
    terminal = as_terminal(monkeypatch)
    with Bar("convert", "B"):
        say("warning", "first")
    assert terminal.getvalue() == "warning: first\n"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Bar("convert", "B") as bar:
        bar.update(1, 2)
    assert sys.stderr.getvalue() == ""


# ---- Trials of kernels


@pytest.fixture
def no_verdicts(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "_known", verdicts._Known())


def tried(*keys):
    for key in keys:
        with trials._counted(key):
            verdicts.put(key, verdicts.Verdict(True))


@pytest.mark.usefixtures("no_verdicts")
def test_a_bar_of_trials_leaves_one_line(monkeypatch):
    terminal = as_terminal(monkeypatch)
    with Trying() as trying:
        assert not terminal.getvalue()
        tried("a", "b")
        (shown,) = filter(None, screen(terminal.getvalue()))
        assert shown.startswith("trying kernels on this GPU, once: 100%|")
        assert " 2/2 " in shown
        trying.end()
        lines = screen(terminal.getvalue())
        assert lines[0].startswith("tried 2 kernels on this GPU in 0.")
        terminal.write("text")
        before = terminal.getvalue()
        tried("c")  # nothing is drawn into the text
        assert terminal.getvalue() == before
        terminal.write("\n")
    lines = screen(terminal.getvalue().replace("\n", "\r\n"))
    assert lines[1:3] == ["text", "tried 1 kernel on this GPU in 0.0 s, once"]


@pytest.mark.usefixtures("no_verdicts")
def test_without_a_terminal_a_line_comes_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(trials._state, "pending", frozenset("abc"))
    with Trying():
        tried("a", "b")
        monkeypatch.setattr(messages, "LINE_SECONDS", 0.0)
        tried("c")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "trying 3 kernels on this GPU, once"
    assert lines[1:3] == [f"trying kernels on this GPU, once: {n} so far" for n in (2, 3)]
    assert lines[3].startswith("tried 3 kernels on this GPU in 0.0 s")
    assert len(lines) == 4


@pytest.mark.usefixtures("no_verdicts")
def test_where_nothing_is_tried_nothing_is_said(monkeypatch, capsys):
    with Trying() as trying:
        trying.end()
    tried("a")
    assert capsys.readouterr().err == ""
    notes = []

    def interrupted():
        with Trying(notes.append):
            tried("b")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert notes[0] == "trying kernels on this GPU, once"
    assert notes[1].startswith("tried 1 kernel ")
