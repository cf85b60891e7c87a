"""Reader of JSON from outside: what it returns has bounded depth, finite numbers and Unicode."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from mlx_moeflux.server.errors import RequestError, body_too_large

MOST_DEPTH = 100

# Bytes that are searched in one call, which other threads wait for.
_PIECE = 1 << 20

_STRING = re.compile(r'[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*', re.DOTALL)
_PLAIN = re.compile(r"[\w\s.,:+-]*")
_SPACE = re.compile(r"\s*")


def check_values(body: bytes, most: int) -> None:
    """Refuse a JSON text that may have more than `most` values, before it is read.

    Every value but the first follows a comma or a bracket. Those inside strings count too: they are
    text, and a text of so many is longer than the context.

    Raises:
        RequestError: It has more than `most` commas and brackets.
    """
    count = 0
    for start in range(0, len(body), _PIECE):
        piece = body[start : start + _PIECE]
        count += sum(piece.count(mark) for mark in (b",", b"[", b"{"))
        if count > most:
            raise body_too_large(f"the body has more than {most} commas and opening brackets")


def read_json(body: bytes | str, *, mend: bool = False) -> Any:
    """Return the value of a JSON text whose strings are Unicode and whose numbers are finite.

    mend: Half of a surrogate pair becomes U+FFFD: clients cut texts in the middle of a character,
    and send them again with every request.

    Raises:
        RequestError: It is no JSON, is nested deeper than MOST_DEPTH, or has NaN, an infinity or,
            without `mend`, a lone surrogate.
    """
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise RequestError(f"the body is nested deeper than {MOST_DEPTH} levels.") from None
    except ValueError as error:  # wrong UTF-8 and overlong integers too
        raise RequestError(f"the body is no JSON: {error}.") from None
    level, whole = [value], True
    for _ in range(MOST_DEPTH):
        whole = whole and all(map(_is_unicode, level))
        level = [inner for outer in level for inner in _checked(outer)]
        if not level:
            if whole:
                return value
            if mend:
                return _mended(value)
            raise RequestError("the body has a lone surrogate, which is no character.")
    raise RequestError(f"the body is nested deeper than {MOST_DEPTH} levels.")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _checked(value: Any) -> Iterator[Any]:
    """Check a value that holds no others; yield what the others hold."""
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value
    elif isinstance(value, float) and not math.isfinite(value):
        raise RequestError("the body has a number that is too large.")


def _is_unicode(value: Any) -> bool:
    """Return False for a text with half of a surrogate pair."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return False
    return True


def _mended(value: Any) -> Any:
    """Return a value with U+FFFD in the place of each half of a surrogate pair."""
    if isinstance(value, dict):
        return {_mended(name): _mended(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_mended(inner) for inner in value]
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return value


class ObjectEnd:
    """Finds the end of a JSON object in a text that grows. at: Place up to which the text is read;
    first, the place where the object, or white space before it, begins."""

    def __init__(self, at: int = 0):
        self.at, self._depth, self._in_string = at, 0, False

    def find(self, text: str) -> int | None:
        """Return the place behind the object, or None if it goes on. `text` begins as before.

        Raises:
            ValueError: It is no object, or nested deeper than MOST_DEPTH.
        """
        while self.at < len(text):
            inside = self._in_string
            between = _STRING if inside else _PLAIN if self._depth else _SPACE
            found = between.match(text, self.at)
            assert found is not None
            self.at = found.end()
            character = text[self.at : self.at + 1]
            if not character or (inside and character == "\\"):
                return None  # the text ends here
            if character == '"' and self._depth:
                self._in_string = not inside
            elif inside or character not in "{[]}" or (character != "{" and not self._depth):
                raise ValueError("no object")
            else:
                self._depth += 1 if character in "{[" else -1
            self.at += 1
            if not self._depth:
                return self.at
            if self._depth > MOST_DEPTH:
                raise ValueError("nested too deep")
        return None
