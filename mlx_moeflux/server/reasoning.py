"""Separation of a reply's reasoning from its answer, as the text comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_moeflux.detokenizer import overlap


@dataclass(frozen=True)
class ReasoningSyntax:
    """Texts that open and close a reply's reasoning."""

    open: str
    close: str


# Name -> syntax. Others may add theirs; --reasoning-parser names one.
REASONING = {"think": ReasoningSyntax("<think>", "</think>")}


def choose_reasoning(tokenizer: Any, name: str | None = None) -> ReasoningSyntax | None:
    """Return the named syntax, or the first whose texts are tokens of the vocabulary."""
    if name is not None:
        return REASONING[name]
    for syntax in REASONING.values():
        if None not in tokenizer.convert_tokens_to_ids([syntax.open, syntax.close]):
            return syntax
    return None


class Split(NamedTuple):
    reasoning: str
    content: str


class ReasoningSplitter:
    """Splits the text of one reply. opened: The prompt ends inside the reasoning."""

    def __init__(self, syntax: ReasoningSyntax, *, opened: bool):
        self._syntax, self._held = syntax, ""
        self._state = "inside" if opened else "before"
        self._trim = opened  # line breaks that follow a tag belong to neither part

    @property
    def inside(self) -> bool:
        """Return True while the reasoning is open."""
        return self._state == "inside"

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
        if begun.startswith(self._syntax.open):
            self._held = begun[len(self._syntax.open) :]
            self._state, self._trim = "inside", True
        elif final or not self._syntax.open.startswith(begun):
            self._state = "after"

    def _reasoning(self, *, final: bool) -> str:
        text, close = self._trimmed(self._held), self._syntax.close
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
