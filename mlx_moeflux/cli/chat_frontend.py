"""Read lines and show replies: the protocol of a front end, and the plain one."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from mlx_moeflux.cli.common import read_standard_input
from mlx_moeflux.server.reasoning import Splitter


class Reply(Protocol):
    """Shows one reply; entered around it."""

    def __enter__(self) -> Reply: ...

    def __exit__(self, *exception: object) -> None: ...

    def progress(self, done: int, total: int) -> None:
        """Show that `done` of `total` tokens are read; see
        :func:`~mlx_moeflux.generation.loop.generate_step`."""
        ...

    def add(self, text: str) -> None:
        """Show more of the reply."""
        ...

    def interrupted(self) -> None:
        """Show that Ctrl-C ended it."""
        ...

    def end(self, last: Any) -> None:
        """Show text that was held back, and numbers of the last response, if there was one."""
        ...


class Frontend(Protocol):
    """Reads lines and shows replies. keys: What keys do, in one line."""

    keys: str

    def line(self) -> str:
        """Return the next line; EOFError at the end."""
        ...

    def note(self, text: str) -> None:
        """Show a text that is no reply."""
        ...

    def reply(self, splitter: Splitter, *, markdown: bool) -> Reply:
        """Begin a reply. markdown: It is Markdown, not text that goes on as it is."""
        ...


class PlainFrontend:
    """Reads standard input; replies go to stdout as they are. hidden: Leave thinking out. quiet:
    Show no notes."""

    keys = "Ctrl-C ends a reply."

    def __init__(self, *, hidden: bool, quiet: bool = False):
        self._hidden, self._quiet = hidden, quiet

    def line(self) -> str:
        return read_standard_input(lambda: input(">> " if sys.stdin.isatty() else ""))

    def note(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr)

    def reply(self, splitter: Splitter, *, markdown: bool) -> Reply:
        return PlainReply(splitter if self._hidden else None)


class PlainReply:
    """Prints a reply as it comes. splitter: Its reasoning is left out; None prints everything."""

    def __init__(self, splitter: Splitter | None):
        self._splitter, self._begun = splitter, False

    def __enter__(self) -> PlainReply:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._begun:
            print(flush=True)

    def progress(self, done: int, total: int) -> None:
        pass

    def add(self, text: str, *, final: bool = False) -> None:
        if self._splitter is not None:
            text = self._splitter.add(text, final=final).content
        self._begun = True
        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)

    def interrupted(self) -> None:
        self.add("", final=True)
        print(" ...", end="")

    def end(self, last: Any) -> None:
        self.add("", final=True)


def printable(text: str) -> str:
    """Return `text` without control characters, which could rewrite the screen or the title."""
    return "".join(c for c in text if c in "\n\t" or not (c < " " or "\x7f" <= c <= "\x9f"))
