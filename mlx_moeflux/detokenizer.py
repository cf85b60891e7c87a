"""Ids one at a time to text that may be shown: whole characters, and no stop string.

A detokenizer's :meth:`add` returns what may be shown now and :meth:`finish` the rest; together
they are ``tokenizer.decode(all ids)``. Both kinds take time linear in the number of tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class ByteDetokenizer:
    """For byte-level vocabularies (GPT-2's alphabet): bytes to characters as they complete.

    token_of: Id -> token as the vocabulary spells it, or None for an id without one.
    """

    def __init__(self, token_of: Callable[[int], str | None]):
        self._token_of = token_of
        # Its replacement of invalid bytes is the one that decode() shows.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._utf8.decode(_spelled(self._token_of(token) or ""))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class PieceDetokenizer:
    """For any other vocabulary: asks ``decode`` about the last few tokens.

    decode: Ids -> text. token_of: As in :class:`ByteDetokenizer`.
    """

    def __init__(self, decode: Callable[[list[int]], str], token_of: Callable[[int], str | None]):
        self._decode, self._token_of = decode, token_of
        # Shown tokens stay as context: decoders treat the first token of a text apart.
        self._context: list[int] = []
        self._shown = ""  # the context's text
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        spelled = self._token_of(token)
        if spelled is None:
            return ""
        self._pending.append(token)
        # Whether a run of byte pieces is text at all is known at its end.
        if _BYTE_PIECE.fullmatch(spelled):
            return ""
        return self._advance(final=False)

    def finish(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and not final:
            return ""
        segment = text[len(self._shown) :]
        alone = self._decode(self._pending)
        if alone:
            self._context, self._shown = self._pending, alone
        if alone or self._context:
            # What is silent alone is no context: the text after it would seem to begin anew.
            self._pending = []
        return segment


class StopText:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.found = tuple(stops), "", False

    def add(self, text: str) -> str:
        """What may be shown now; sets `found` once a stop string is complete."""
        self._held += text
        hits = [i for i in (self._held.find(stop) for stop in self._stops) if i >= 0]
        if hits:
            self.found = True
            shown, self._held = self._held[: min(hits)], ""
            return shown
        held = max((overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - held]
        self._held = self._held[len(self._held) - held :]
        return shown

    def finish(self, text: str) -> str:
        """The rest when no more comes."""
        shown = self.add(text)
        if self.found:
            return shown
        rest, self._held = self._held, ""
        return shown + rest


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte: visible Latin-1 characters stand for themselves, the rest for 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


_BYTES = _byte_alphabet()


def _spelled(token: str) -> bytes:
    """A token's bytes; one with a character outside the alphabet (an added token) is plain text."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
