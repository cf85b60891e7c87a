"""Decoders of ids, and streaming ones: ids one at a time to whole characters, held back before stop
strings.

A detokenizer's :meth:`add` returns the text that is complete and :meth:`finish` the rest; together
they equal ``tokenizer.decode(all ids)``. Both kinds take time linear in the number of tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Any

from mlx_moeflux.errors import UnsupportedError

REPLACEMENT = "\ufffd"
SPACE = "\u2581"  # as sentencepiece spells it
MOST_STEPS = 16
_NO_BYTE = re.compile("[\udc80-\udcff]")
_DIGITS = "0123456789abcdefABCDEF"
_BYTE_PIECES = {f"<0x{a}{b}>": int(a + b, 16) for a in _DIGITS for b in _DIGITS}


class Decoder:
    """Decoder of ids as a tokenizer.json describes it; it takes time linear in its tokens' lengths.

    steps: Components of the library's `decoder`, in their order. token_of: Id -> token as the
    vocabulary spells it, or None for an id without one.

    Raises:
        UnsupportedError: A component is not known here.
    """

    def __init__(self, steps: Sequence[dict[str, Any]], token_of: Callable[[int], str | None]):
        if len(steps) > MOST_STEPS:
            raise UnsupportedError(f"its decoder has {len(steps)} steps; {MOST_STEPS} are known")
        self.byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        self._bytes = _Table(spelled, token_of, b"")
        known = [_step(step) for step in steps] or [lambda tokens: [" ".join(tokens)]]
        # These look at one token at a time: the table keeps their result.
        alone = next((i for i, s in enumerate(steps) if s["type"] != "Replace"), len(steps))
        self._tokens = _Table(lambda token: _after(known[:alone], [token])[0], token_of, None)
        self._steps = known[alone:]

    def __call__(self, ids: Sequence[int]) -> str:
        """Return the text of ids; one without a token gives nothing."""
        if self.byte_level:
            return b"".join(map(self._bytes.__getitem__, ids)).decode("utf-8", "replace")
        tokens = [token for token in map(self._tokens.__getitem__, ids) if token is not None]
        return "".join(_after(self._steps, tokens))


class _Table(dict[int, Any]):
    """Id -> form of its token, made when first asked for; `nothing` for an id without one."""

    def __init__(
        self, form: Callable[[str], Any], token_of: Callable[[int], str | None], nothing: Any
    ):
        super().__init__()
        self._form, self._token_of, self._nothing = form, token_of, nothing

    def __missing__(self, i: int) -> Any:
        token = self._token_of(i)
        if token is None:  # not kept: there are as many as numbers
            return self._nothing
        form = self[i] = self._form(token)
        return form


_Step = Callable[[list[str]], list[str]]


def _after(steps: Sequence[_Step], tokens: list[str]) -> list[str]:
    for step in steps:
        tokens = step(tokens)
    return tokens


def _step(step: dict[str, Any]) -> _Step:
    """Return a component of a decoder as a function of the tokens that those before it left.

    Source: the decoders of the `tokenizers` library 0.23.3, and of `sentencepiece` 0.2.1.
    """
    kind = step["type"]
    if kind == "ByteLevel":
        return lambda tokens: [b"".join(map(spelled, tokens)).decode("utf-8", "replace")]
    if kind == "Fuse":
        return lambda tokens: ["".join(tokens)]
    if kind == "ByteFallback":
        return _join_bytes
    if kind == "Strip":
        return _strip(step["content"], step["start"], step["stop"])
    if kind == "Metaspace":
        return _metaspace(step["replacement"], step["prepend_scheme"] != "never")
    if kind == "Replace":
        old, new = step["pattern"].get("String", ""), step["content"]
        # A longer one could be repeated until a token fills the memory.
        if 0 < len(old) >= len(new):
            return lambda tokens: [token.replace(old, new) for token in tokens]
    if kind == "SentencePiece":
        return _sentence(step["prefixed"], step["trimmed"])
    raise UnsupportedError(f"its decoder has a {kind} that is not known here")


def _strip(edge: str, start: int, stop: int) -> _Step:
    def cut(token: str) -> str:
        head = min(start, len(token) - len(token.lstrip(edge)))
        tail = min(stop, len(token) - len(token.rstrip(edge)))
        return token[head : max(head, len(token) - tail)]

    return lambda tokens: [cut(token) for token in tokens]


def _metaspace(sign: str, prepended: bool) -> _Step:
    def decode(tokens: list[str]) -> list[str]:
        first = [token.replace(sign, "" if prepended else " ") for token in tokens[:1]]
        return [*first, *(token.replace(sign, " ") for token in tokens[1:])]

    return decode


def _sentence(prefixed: bool, trimmed: bool) -> _Step:
    """Return the decoder of `sentencepiece`.

    prefixed: The first token's space is dropped. trimmed: Every space at the text's start is.
    """

    def decode(tokens: list[str]) -> list[str]:
        shown, start = [], prefixed or trimmed
        for token in tokens:
            cut = start and token.startswith(SPACE)
            shown.append(token[cut:].replace(SPACE, " "))
            start = start and not shown[-1] and not (cut and not trimmed)
        return _join_bytes(shown, _each)

    return decode


def _whole(run: bytes) -> str:
    """Return the text of bytes, or a replacement for each if they are none."""
    text = run.decode("utf-8", "surrogateescape")
    return REPLACEMENT * len(run) if _NO_BYTE.search(text) else text


def _each(run: bytes) -> str:
    """Return the text of bytes, with a replacement for each that belongs to no character."""
    return _NO_BYTE.sub(REPLACEMENT, run.decode("utf-8", "surrogateescape"))


def _join_bytes(tokens: list[str], text_of: Callable[[bytes], str] = _whole) -> list[str]:
    """Return the tokens with each run of <0xNN> as its text."""
    joined: list[str] = []
    run = bytearray()
    for token in tokens:
        if (byte := _BYTE_PIECES.get(token)) is not None:
            run.append(byte)
            continue
        if run:
            joined.append(text_of(bytes(run)))
            run.clear()
        joined.append(token)
    if run:
        joined.append(text_of(bytes(run)))
    return joined


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
        if spelled in _BYTE_PIECES:
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
