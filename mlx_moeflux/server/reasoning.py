"""Separation of a reply's reasoning from its answer, as the text comes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_moeflux.detokenizer import overlap
from mlx_moeflux.server.json_guard import ObjectEnd

if TYPE_CHECKING:  # the chat of the terminal needs no grammars
    from mlx_moeflux.server.calls.splitter import CallSearch


class Split(NamedTuple):
    reasoning: str
    content: str


class ReasoningSplitter:
    """Splits the text of one reply. open, close: Texts around the reasoning. opened: The prompt
    ends inside it. calls: Finds calls, which end the reasoning too."""

    def __init__(self, open: str, close: str, *, opened: bool, calls: CallSearch | None = None):
        self._open, self._close, self._calls, self._held = open, close, calls, ""
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
        if self._state == "closed":
            self._leave_closed(final=final)
        if self._state != "after":
            return Split(reasoning, "")
        content, self._held = self._held, ""
        return Split(reasoning, content)

    def _leave_beginning(self, *, final: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._open):
            self._held = begun[len(self._open) :]
            self._state, self._trim = "inside", True
        elif final or not self._open.startswith(begun):
            self._state = "closed"

    def _reasoning(self, *, final: bool) -> str:
        text, close = self._trimmed(self._held), self._close
        at = text.find(close)
        certain = at if at >= 0 else len(text) - overlap(text, close)
        if self._calls is not None:
            place, begun = self._calls.find(text)
            if begun and place < certain:
                self._held, self._state = text[place:], "after"
                return text[:place].rstrip()
            if place < certain and not final:
                at, certain = -1, place  # a call may begin before the end
        if at >= 0:
            self._held = text[at + len(close) :]
            self._state, self._trim = "closed", True
            return text[:at].rstrip()
        certain = len(text) if final else len(text[:certain].rstrip())
        self._held = text[certain:]
        return text[:certain]

    def _leave_closed(self, *, final: bool) -> None:
        """Drop line breaks behind the end of the reasoning, and a second end."""
        text = self._trimmed(self._held)
        while (rest := text.lstrip()).startswith(self._close):
            self._trim = True
            text = self._trimmed(rest[len(self._close) :])
        self._held = text
        if final or not self._close.startswith(rest):
            self._state = "after"

    def _trimmed(self, text: str) -> str:
        if not self._trim:
            return text
        text = text.lstrip("\n")
        self._trim = not text
        return text


_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_ENDS = ("<|end|>", "<|return|>", _CALL)
_NEXT = (_START, _CHANNEL)
"""Marks of the next message, which end the reasoning where the model leaves its end out."""
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<|$)")


class HarmonySplitter:
    """Splits the text of one reply in gpt-oss's format, a row of messages in channels:

        <|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>

    What the channel "analysis" says is reasoning. A message to a function stays as it is, for
    ``harmony`` of :mod:`mlx_moeflux.server.calls`; the headers of others are left out. A reply
    without headers, which a grammar may ask for, is an answer. calls: Says which messages are
    calls; without it none is.
    """

    def __init__(self, *, opened: bool, calls: CallSearch | None = None):
        self._search, self._held, self._parts = calls, "", {"reasoning": "", "content": ""}
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
        marks = (_START, _CHANNEL, "to=")
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
        self._calls = (
            recipient is not None and self._search is not None and self._search.takes(recipient[1])
        )
        if recipient is not None and self._calls:
            self._arguments = ObjectEnd()
            self._parts["content"] += f"{_CHANNEL}commentary to={recipient[1]}{_MESSAGE}"
        elif channel and channel[0].startswith("analysis"):
            self._state = "reasoning"
        return True

    def _leave_message(self, final: bool) -> bool:
        begin = self._behind_arguments()
        marks = (*_ENDS, *_NEXT) if self._state == "reasoning" else _ENDS
        ends = []
        if begin is not None:
            ends = [(at, end) for end in marks if (at := self._held.find(end, begin)) >= 0]
        if not ends:
            certain = len(self._held)
            if self._arguments is not None and not final:
                certain, self._arguments.at = self._arguments.at, 0
            elif not final:
                certain -= max(overlap(self._held[begin:], end) for end in marks)
            self._parts[self._state] += self._held[:certain]
            self._held = self._held[certain:]
            return False
        at, end = min(ends)
        self._parts[self._state] += self._held[:at] + (_CALL if self._calls else "")
        behind = at if end in _NEXT else at + len(end)
        self._held, self._state, self._calls = self._held[behind:], "header", False
        self._arguments = None
        return bool(self._held)

    def _behind_arguments(self) -> int | None:
        """Return the place from which marks count, None inside the arguments of a call."""
        if self._arguments is None:
            return 0
        try:
            behind = self._arguments.find(self._held)
        except ValueError:  # no JSON
            behind = self._arguments.at
        if behind is not None:
            self._arguments = None
        return behind


Splitter = ReasoningSplitter | HarmonySplitter


@dataclass(frozen=True)
class ReasoningSyntax:
    """How a family of models writes a reply's reasoning.

    open, close: Texts around it. tokens: A vocabulary with all of them has this syntax. make:
    ``(syntax, opened, calls)`` -> splitter of one reply. strays: Marks that models repeat behind
    a call.
    """

    open: str
    close: str
    tokens: tuple[str, ...]
    make: Callable[[ReasoningSyntax, bool, CallSearch | None], Splitter]
    strays: tuple[str, ...] = ()

    def splitter(self, *, opened: bool, calls: CallSearch | None = None) -> Splitter:
        """Return the splitter of one reply. opened: The prompt ends inside the reasoning. calls:
        Finds the calls of a request with functions."""
        return self.make(self, opened, calls)


# Name -> syntax. Others may add theirs; --reasoning-parser names one.
REASONING = {
    "think": ReasoningSyntax(
        "<think>",
        "</think>",
        ("<think>", "</think>"),
        lambda syntax, opened, calls: ReasoningSplitter(
            syntax.open, syntax.close, opened=opened, calls=calls
        ),
        strays=("</think>",),
    ),
    "gemma4": ReasoningSyntax(
        "<|channel>thought",
        "<channel|>",
        ("<|channel>", "<channel|>"),
        lambda syntax, opened, calls: ReasoningSplitter(
            syntax.open, syntax.close, opened=opened, calls=calls
        ),
        strays=("<channel|>",),
    ),
    "harmony": ReasoningSyntax(
        f"{_CHANNEL}analysis{_MESSAGE}",
        "<|end|>",
        (_CHANNEL, _MESSAGE, _CALL),
        lambda syntax, opened, calls: HarmonySplitter(opened=opened, calls=calls),
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
