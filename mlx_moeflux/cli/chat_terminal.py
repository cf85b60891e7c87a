"""The front end of ``mlx_moeflux chat`` on a terminal: edit lines, show Markdown as it comes.

Needs the extra ``chat``: prompt_toolkit and rich.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from mlx_moeflux import user_cache
from mlx_moeflux.cli import signals
from mlx_moeflux.cli.chat_frontend import printable
from mlx_moeflux.server.reasoning import Splitter

THINKING = "dim italic"
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


class TerminalFrontend:
    """Reads lines with history, completion of commands and pastes of several lines; shows replies
    as Markdown.

    commands: Name -> its argument and what it does. hidden: Leave thinking out. options: Of the
    prompt, such as input and output. console: Where replies go.
    """

    keys = "Ctrl-C ends a reply. Alt-Enter begins a new line. Tab completes a command."

    def __init__(
        self,
        commands: Mapping[str, tuple[str, str]],
        *,
        hidden: bool,
        console: Console | None = None,
        **options: Any,
    ):
        self._hidden, self._console = hidden, console or Console(highlight=False)
        self._prompt: PromptSession[str] = PromptSession(
            history=_history(),
            completer=CommandCompleter(commands),
            key_bindings=_keys(),
            **options,
        )

    def line(self) -> str:
        while True:
            try:
                return self._prompt.prompt(">> ")
            except KeyboardInterrupt as interrupt:
                signals.handled(interrupt)
                continue  # as in a shell: a new line

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def reply(self, splitter: Splitter, *, markdown: bool) -> TerminalReply:
        return TerminalReply(self._console, splitter, hidden=self._hidden, markdown=markdown)


class CommandCompleter(Completer):
    """Completes the name of a command at the beginning of a line."""

    def __init__(self, commands: Mapping[str, tuple[str, str]]):
        self._commands = commands

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        begun = document.text_before_cursor
        if begun.startswith("/"):
            for name, (_, what) in self._commands.items():
                if name.startswith(begun):
                    yield Completion(name, start_position=-len(begun), display_meta=what)


class TerminalReply:
    """Shows one reply. Finished blocks are printed once; the block that still grows is redrawn, its
    last lines if the screen is too small.

    hidden: Leave thinking out. markdown: The answer is Markdown, not text to show as it is.
    pictures: How often a second the part that still grows is drawn, at most.
    """

    def __init__(
        self,
        console: Console,
        splitter: Splitter,
        *,
        hidden: bool,
        markdown: bool,
        pictures: float = 8,
    ):
        self._console, self._splitter, self._hidden = console, splitter, hidden
        self._markdown, self._pictures = markdown, pictures
        # Only this thread draws. If a second one drew, both would move the cursor up before they
        # write, and the terminal would lose lines.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="crop"
        )
        self._drawn, self._spinner = -math.inf, Spinner("dots")
        self._thoughts = self._answer = ""

    def __enter__(self) -> TerminalReply:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def progress(self, done: int, total: int) -> None:
        share = 100 * done // max(total, 1)
        self._draw(self._waiting(f"reading the prompt, {share} %"))

    def add(self, text: str, *, final: bool = False) -> None:
        split = self._splitter.add(text, final=final)
        self._thoughts += printable(split.reasoning)
        self._answer += printable(split.content)
        thoughts = ""
        if self._answer.strip() or final:
            thoughts, self._thoughts = self._thoughts.strip(), ""
        finished, self._answer = whole_blocks(self._answer)
        if final:
            finished, self._answer = finished + self._answer, ""
        # Before printing, which redraws the growing part below what it prints.
        self._draw(self._growing(), now=final or bool(thoughts or finished))
        if thoughts and not self._hidden:
            self._live.console.print(Text(f"{thoughts}\n", style=THINKING))
        if finished.strip():
            # Text keeps its line breaks; Markdown has its own at the end.
            self._live.console.print(self._rendered(finished), end="")

    def interrupted(self) -> None:
        self.add("", final=True)
        self._live.console.print(Text("...", style="dim"))

    def end(self, last: Any) -> None:
        self.add("", final=True)
        if last is not None:
            self._live.console.print(Text(_numbers(last), style="dim"))

    def _draw(self, part: RenderableType, *, now: bool = False) -> None:
        """Draw the part that still grows, if it is time, or `now`."""
        time = monotonic()
        now = now or time - self._drawn >= 1 / self._pictures
        if now:
            self._drawn = time
        self._live.update(part, refresh=now)

    def _waiting(self, text: str) -> RenderableType:
        self._spinner.update(text=Text(text, style="dim"))
        return self._spinner

    def _rendered(self, answer: str) -> RenderableType:
        if self._markdown:
            return Markdown(answer)
        return Text(answer if answer.endswith("\n") else f"{answer}\n")

    def _growing(self) -> RenderableType:
        if self._thoughts and self._hidden:
            return self._waiting("thinking")
        parts: list[RenderableType] = []
        if self._thoughts:
            parts.append(Text(self._thoughts, style=THINKING))
        if self._answer.strip():
            parts.append(self._rendered(self._answer))
        return LastLines(Group(*parts))


class LastLines:
    """The last lines of something that may be higher than the screen."""

    def __init__(self, inner: RenderableType):
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._inner, options.update(height=None), pad=False)
        for line in lines[-max(console.height - 1, 1) :]:
            yield from line
            yield Segment.line()


def whole_blocks(text: str) -> tuple[str, str]:
    """Split Markdown into blocks that no later text changes, and the rest.

    A block ends at a blank line outside of fenced code, if the next line is not indented.
    """
    end, at, fence, blank = 0, 0, None, False
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if fence is None:
            if blank and line.strip() and not line[0].isspace():
                end = at
            if found:
                fence = found[1]
        elif found and found[1].startswith(fence) and not found[2].strip():
            fence = None
        blank = not line.strip()
        at += len(line)
    return text[:end], text[end:]


def _numbers(last: Any) -> str:
    return (
        f"{last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s; "
        f"prompt {last.prompt_tokens} ({last.cached_tokens} known)"
    )


def _history() -> History:
    folder = user_cache.private()
    if folder is None:
        return InMemoryHistory()
    file = folder / "chat_history"
    file.touch(mode=0o600)  # others may read the folder
    return FileHistory(file)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
