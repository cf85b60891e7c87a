"""Separation of a reply's reasoning from its answer, as the text comes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_moeflux.detokenizer import overlap
from mlx_moeflux.server.json_guard import ObjectEnd


class Split(NamedTuple):
    reasoning: str
    content: str


class ReasoningSplitter:
    """Splits the text of one reply. open, close: Texts around the reasoning. opened: The prompt
    ends inside it."""

    def __init__(self, open: str, close: str, *, opened: bool):
        self._open, self._close, self._held = open, close, ""
        self._state = "inside" if opened else "before"
        self._trim = opened  # line breaks that follow a tag belong to neither part

    @property
    def inside(self) -> bool:
        """Return True while the reasoning is open."""
        return self._state == "inside"

    def leave(self) -> None:
        """Take what comes as the answer: the prompt ends inside it."""
        self._state = "after"

    def add(self, text: str, *, final: bool = False) -> Split:
        """Return what is certain after `text`; with `final`, everything that was held back."""
        self._held += text
        reasoning = ""
        if self._state == "before":
            self._leave_beginning(final=final)
        if self._state == "inside":
            reasoning = self._reasoning(final=final)
        if self._state != "after":
            return Split(reasoning, "")
        content, self._held = self._trimmed(self._held), ""
        return Split(reasoning, content)

    def _leave_beginning(self, *, final: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._open):
            self._held = begun[len(self._open) :]
            self._state, self._trim = "inside", True
        elif final or not self._open.startswith(begun):
            self._state = "after"

    def _reasoning(self, *, final: bool) -> str:
        text, close = self._trimmed(self._held), self._close
        at = text.find(close)
        if at >= 0:
            self._held = text[at + len(close) :]
            self._state, self._trim = "after", True
            return text[:at].rstrip()
        certain = len(text) if final else len(text) - overlap(text, close)
        if not final:
            certain = len(text[:certain].rstrip())
        self._held = text[certain:]
        return text[:certain]

    def _trimmed(self, text: str) -> str:
        if not self._trim:
            return text
        text = text.lstrip("\n")
        self._trim = not text
        return text


_CHANNEL, _MESSAGE, _CALL = "<|channel|>", "<|message|>", "<|call|>"
_ENDS = ("<|end|>", "<|return|>", _CALL)
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<|$)")


class HarmonySplitter:
    """Splits the text of one reply in gpt-oss's format, a row of messages in channels:

        <|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>

    What the channel "analysis" says is reasoning. A message to a function stays as it is, for
    ``harmony`` of :mod:`mlx_moeflux.server.tools`; the headers of others are left out. A reply
    without headers, which a grammar may ask for, is an answer.
    """

    def __init__(self, *, opened: bool):
        self._held, self._parts = "", {"reasoning": "", "content": ""}
        self._state = "reasoning" if opened else "header"
        self._calls = False
        self._arguments: ObjectEnd | None = None  # of an open call, until their end is known

    @property
    def inside(self) -> bool:
        """Return True while the reasoning is open."""
        return self._state == "reasoning"

    def leave(self) -> None:
        """Take what comes as the answer: the prompt ends inside it."""
        self._state = "content"

    def add(self, text: str, *, final: bool = False) -> Split:
        """Return what is certain after `text`; with `final`, everything that was held back."""
        self._held += text
        while self._leave_header(final) if self._state == "header" else self._leave_message(final):
            pass
        split = Split(**self._parts)
        self._parts = {"reasoning": "", "content": ""}
        return split

    def _leave_header(self, final: bool) -> bool:
        head, found, rest = self._held.partition(_MESSAGE)
        begun = self._held.lstrip()
        marks = ("<|start|>", _CHANNEL, "to=")
        if not begun.startswith(marks) and not any(mark.startswith(begun) for mark in marks):
            self._state = "content"
            return True
        if not found:
            if final:
                self._held = ""
            return False
        channel = head.partition(_CHANNEL)[2].split(maxsplit=1)
        recipient = _RECIPIENT.search(head)
        self._state, self._held = "content", rest
        self._calls = recipient is not None
        if recipient is not None:
            self._arguments = ObjectEnd()
            self._parts["content"] += f"{_CHANNEL}commentary to={recipient[1]}{_MESSAGE}"
        elif channel and channel[0].startswith("analysis"):
            self._state = "reasoning"
        return True

    def _leave_message(self, final: bool) -> bool:
        begin = self._behind_arguments()
        if begin is None and not final:
            return False
        ends = []
        if begin is not None:
            ends = [(at, end) for end in _ENDS if (at := self._held.find(end, begin)) >= 0]
        if not ends:
            certain = len(self._held)
            if not final:
                certain -= max(overlap(self._held, end) for end in _ENDS)
            self._parts[self._state] += self._held[:certain]
            self._held = self._held[certain:]
            return False
        at, end = min(ends)
        self._parts[self._state] += self._held[:at] + (_CALL if self._calls else "")
        self._held, self._state, self._calls = self._held[at + len(end) :], "header", False
        self._arguments = None
        return bool(self._held)

    def _behind_arguments(self) -> int | None:
        """Return the place from which marks count, None inside the arguments of a call."""
        if self._arguments is None:
            return 0
        try:
            behind = self._arguments.find(self._held)
        except ValueError:  # no JSON
            behind = 0
        if behind is not None:
            self._arguments = None
        return behind


Splitter = ReasoningSplitter | HarmonySplitter


@dataclass(frozen=True)
class ReasoningSyntax:
    """How a family of models writes a reply's reasoning.

    open, close: Texts around it. tokens: A vocabulary with all of them has this syntax. make:
    ``(syntax, opened)`` -> splitter of one reply.
    """

    open: str
    close: str
    tokens: tuple[str, ...]
    make: Callable[[ReasoningSyntax, bool], Splitter]

    def splitter(self, *, opened: bool) -> Splitter:
        """Return the splitter of one reply. opened: The prompt ends inside the reasoning."""
        return self.make(self, opened)


# Name -> syntax. Others may add theirs; --reasoning-parser names one.
REASONING = {
    "think": ReasoningSyntax(
        "<think>",
        "</think>",
        ("<think>", "</think>"),
        lambda syntax, opened: ReasoningSplitter(syntax.open, syntax.close, opened=opened),
    ),
    "harmony": ReasoningSyntax(
        f"{_CHANNEL}analysis{_MESSAGE}",
        "<|end|>",
        (_CHANNEL, _MESSAGE, _CALL),
        lambda syntax, opened: HarmonySplitter(opened=opened),
    ),
}


def choose_reasoning(tokenizer: Any, name: str | None = None) -> ReasoningSyntax | None:
    """Return the named syntax, or the first whose tokens are all in the vocabulary."""
    if name is not None:
        return REASONING[name]
    for syntax in REASONING.values():
        if None not in tokenizer.convert_tokens_to_ids(list(syntax.tokens)):
            return syntax
    return None
