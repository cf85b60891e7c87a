"""The terminal's front end. Oracle: the text that was fed."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest

pytest.importorskip("prompt_toolkit")
pytest.importorskip("rich")

from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import DummyInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from mlx_moeflux.cli.chat import COMMANDS, make_frontend
from mlx_moeflux.cli.chat_frontend import PlainFrontend
from mlx_moeflux.cli.chat_terminal import (
    CommandCompleter,
    TerminalFrontend,
    TerminalReply,
    whole_blocks,
)
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.reasoning import REASONING

TEXT = """# A title

Some *text* with `code`, and an escape \x1b[31m.

1. one

   more of it

2. two

```python
def f():

    return 1
```

The end."""


@pytest.fixture(autouse=True)
def history(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))
    return tmp_path / "chat_history"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks_are_split_alike_however_they_come(size):
    finished, rest = [], ""
    for i in range(0, len(TEXT), size):
        done, rest = whole_blocks(rest + TEXT[i : i + size])
        finished.append(done)
    assert "".join(finished) + rest == TEXT
    assert rest == "The end."
    for block in finished:
        assert block.count("```") in (0, 2)


def shown(text, *, size=5, opened=False, hidden=False, height=24, markdown=True, **more) -> str:
    """What is left on a terminal after a reply."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=60, height=height, color_system=None, highlight=False
    )
    splitter = REASONING["think"].splitter(opened=opened)
    with TerminalReply(console, splitter, hidden=hidden, markdown=markdown, **more) as reply:
        reply.progress(1, 2)
        for i in range(0, len(text), size):
            reply.add(text[i : i + size])
        reply.end(None)
    return screen(file.getvalue())


def screen(written: str) -> str:
    """Return the lines on a screen that was never scrolled: moves up, and lines that are erased,
    as :class:`rich.live.Live` writes them."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", written):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.endswith("A"):
            row -= int(token[2:-1] or 1)
        elif token.endswith("K"):
            lines[row] = ""
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token
            column += len(token)
    return "\n".join(line.rstrip() for line in lines)


def assert_is_whole(text: str) -> None:
    for part in ("A title", "Some text with code", "1 one", "more of it", "2 two", "The end."):
        assert text.count(part) == 1, text
    assert "def f():" in text
    assert "\x1b" not in text
    assert "reading" not in text


@pytest.mark.parametrize("size", [1, 13, 1000])
@pytest.mark.parametrize("height", [3, 24])
def test_a_reply_is_shown_once_and_whole(size, height):
    assert_is_whole(shown(TEXT, size=size, height=height))


@pytest.mark.slow
def test_no_line_is_lost_however_often_the_growing_part_is_drawn():
    """A second thread that drew lost lines of half of such replies."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(20):
            assert_is_whole(shown(TEXT, size=1, height=3, pictures=2000))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("size", [1, 13, 1000])
@pytest.mark.parametrize("end", ["", "\n"])
def test_text_of_a_model_without_a_template_is_shown_as_it_is(size, end):
    code = "def f(a):\n    *b, c = a\n\n\n    return [c]\n\nclass A:\n    pass" + end
    assert shown(code, size=size, markdown=False).rstrip() == code.rstrip()


@pytest.mark.parametrize("hidden", [False, True])
def test_thinking_is_apart_or_hidden(hidden):
    text = shown("so it is\n</think>\n\n**yes**", opened=True, hidden=hidden)
    assert ("so it is" in text) != hidden
    assert "yes" in text
    assert "think" not in text


def test_what_was_held_back_is_shown_after_ctrl_c():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60)
    splitter = REASONING["think"].splitter(opened=False)
    with TerminalReply(console, splitter, hidden=False, markdown=True) as reply:
        reply.add("one two <th")
        reply.interrupted()
        reply.end(None)
    text = screen(file.getvalue())
    assert "one two <th" in text
    assert "..." in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_front_end_follows_the_terminal_and_the_extra(monkeypatch):
    arguments = argparse.Namespace(hide_thinking=False)
    monkeypatch.setattr(sys, "stdin", Terminal())
    for stdout, expected in ((io.StringIO(), PlainFrontend), (Terminal(), TerminalFrontend)):
        monkeypatch.setattr(sys, "stdout", stdout)
        with create_app_session(input=DummyInput(), output=DummyOutput()):
            assert type(make_frontend(arguments)) is expected
    for extra in ("prompt_toolkit", "rich.console"):
        with monkeypatch.context() as without:
            without.delitem(sys.modules, "mlx_moeflux.cli.chat_terminal")
            without.setitem(sys.modules, extra, None)
            assert type(make_frontend(arguments)) is PlainFrontend


def completions(text: str) -> list[str]:
    found = CommandCompleter(COMMANDS).get_completions(Document(text), CompleteEvent())
    return [completion.text for completion in found]


def test_commands_are_completed_at_the_beginning_of_a_line():
    assert completions("/s") == ["/system", "/save", "/stats"]
    assert completions("say /s") == completions("s") == []


def test_lines_of_several_lines_are_kept_and_remembered(history):
    with create_pipe_input() as keys:
        frontend = TerminalFrontend(COMMANDS, hidden=False, input=keys, output=DummyOutput())
        keys.send_text("\x1b[200~one\ntwo\x1b[201~\r")
        assert frontend.line() == "one\ntwo"
        keys.send_text("lost\x03one\x1b\rtwo\r")
        assert frontend.line() == "one\ntwo"
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            frontend.line()
    assert "+two" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_conversation_on_a_terminal(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mlx_moeflux", "chat", "--model", str(model), "-m", "6"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    ) as process:
        os.close(theirs)
        answer(ours, ">>", b"import os\r")
        answer(ours, "tokens/s", b"/undo\r")
        answer(ours, "forgotten\r\n>>", b"\x04")
        with contextlib.suppress(OSError):  # Linux: the other end is closed
            while os.read(ours, 65536):
                pass
        assert process.wait(timeout=60) == 0
    os.close(ours)


def answer(terminal: int, expected: str, keys: bytes) -> None:
    """Send keys once the terminal shows a text; answer its question for the cursor's place."""
    seen, until = "", time.monotonic() + 120
    while expected not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen):
        assert time.monotonic() < until, seen
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65536).decode("utf-8", "replace")
            if "\x1b[6n" in seen:
                os.write(terminal, b"\x1b[1;1R")
                seen = seen.replace("\x1b[6n", "")
    os.write(terminal, keys)
