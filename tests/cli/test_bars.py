"""Bars of progress and text on one terminal: what a user's screen shows in the end."""

from __future__ import annotations

import io
import sys

import pytest

from mlx_moeflux.cli.messages import Bar, say
from mlx_moeflux.loading import BUNDLED_MODEL
from tests.checkpoint.local_hub import local_hub
from tests.cli.terminal import in_terminal, screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
