"""Streaming decoders: ids one at a time to whole characters, held back before stop strings.

A detokenizer's :meth:`add` returns the text that is complete and :meth:`finish` the rest; together
they equal ``tokenizer.decode(all ids)``. Both kinds take time linear in the number of tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class ByteDetokenizer:
    """Detokenizer of byte-level vocabularies (GPT-2's alphabet).

    token_of: Id -> token as the vocabulary spells it, or None for an id without one.
    """

    def __init__(self, token_of: Callable[[int], str | None]):
        self._token_of = token_of
        # Replaces invalid bytes as decode() does.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._utf8.decode(spelled(self._token_of(token) or ""))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class PieceDetokenizer:
    """Detokenizer of any other vocabulary, which decodes the last few tokens again.

    decode: Ids -> text. token_of: See :class:`ByteDetokenizer`.
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
        # A run of byte pieces can be decoded only at its end.
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
            # Tokens that decode to "" cannot serve as context: the decoder would treat the next
            # one as the first of a text.
            self._pending = []
        return segment


class StopText:
    """Filter that holds text back while it may be the beginning of a stop string.

    found: True once a stop string is complete; stop: That string.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.found = tuple(stops), "", False
        self.stop: str | None = None

    def add(self, text: str) -> str:
        """Return the text that cannot belong to a stop string; set `found` once one is complete."""
        self._held += text
        hits = [(i, stop) for stop in self._stops if (i := self._held.find(stop)) >= 0]
        if hits:
            self.found, (first, self.stop) = True, min(hits)
            shown, self._held = self._held[:first], ""
            return shown
        held = max((overlap(self._held, stop) for stop in self._stops), default=0)
        end = len(self._held) - held
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def finish(self, text: str) -> str:
        """Return the rest, after the last `text`."""
        shown = self.add(text)
        if self.found:
            return shown
        rest, self._held = self._held, ""
        return shown + rest


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that ends `text`."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte: visible Latin-1 is itself, other bytes are characters from 256."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


_BYTES = _byte_alphabet()


def spelled(token: str) -> bytes:
    """Return a token's bytes; an added token, with characters outside the alphabet, is UTF-8."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
