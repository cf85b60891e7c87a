"""From the text of a reply behind the begin of calls to parts of calls, while it comes: what all
syntaxes share.

A text between tags is handed out as it comes, and so is JSON. Every other value between tags waits
until it is whole, as its type follows from all of it. The last brace of the arguments waits until
the call is whole: what was handed out before is no JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_moeflux.detokenizer import overlap
from mlx_moeflux.server.json_guard import ObjectEnd, read_json

Tools = Mapping[str, Mapping[str, Any]]
"""Name of a function -> JSON schema of its arguments."""


@dataclass(frozen=True)
class CallPart:
    """A part of a call of a function; the parts of a call come in order, not mixed with others'.

    name, id: On the first part. Parsers give the model's id, or None.
    arguments: Further JSON text of an object; the first part has its first brace at least.
    whole: True on the last part. Parts that end without it are not a call.
    index: Number of the call in the reply, from 0; parsers leave it at 0.
    """

    name: str = ""
    arguments: str = ""
    id: str | None = None
    whole: bool = False
    index: int = 0

    def __add__(self, other: CallPart) -> CallPart:
        """Return this part and the next one of the same call as one."""
        arguments = self.arguments + other.arguments
        return replace(self, arguments=arguments, whole=other.whole)


def whole_calls(parts: Iterable[CallPart]) -> list[CallPart]:
    """Return the calls of a reply, each as one part; what is no whole call is left out."""
    calls: dict[int, CallPart] = {}
    for part in parts:
        calls[part.index] = calls[part.index] + part if part.index in calls else part
    return [call for call in calls.values() if call.whole]


Parser = Iterator["CallPart | None"]
"""Yields parts of calls, and None to wait for more text; ends behind the last call."""
Parts = Generator["CallPart | None", None, None]
Waiting = Generator[None, None, str]
NextTag = Callable[[str, int, int], tuple[int, bool]]
"""Looks from one place of a text to another for the tag of the next argument; returns its place and
True, or the place where one may still begin and False."""

CLOSE = CallPart(arguments="}", whole=True)
MOST_NAME = 300


class Reader:
    """The text of a reply behind the begin of calls, as a parser reads it.

    Its methods wait (yield) while the text is too short, and raise ValueError once nothing that
    may follow can be what they look for. text: All that there is; it grows. at: Index of the next
    character to read. begun: A mark or a brace of a call was read. ended: The model ended the reply
    itself, so no more text comes.
    """

    def __init__(self, text: str):
        self.text, self.at, self.begun, self.ended = text, 0, False, False

    def take(self, *marks: str, optional: bool = False) -> Waiting:
        """Read white space and one of `marks`, the first that stands there; return it.

        optional: The last one may be missing at the end of a reply that the model ended itself.
        """
        while True:
            self.at = self._behind_space(self.at)
            rest = self.text[self.at : self.at + max(map(len, marks))]
            for mark in marks:
                if rest.startswith(mark):
                    self.at, self.begun = self.at + len(mark), True
                    return mark
                if mark.startswith(rest):
                    break  # it may still come
            else:
                raise ValueError(f"no {marks}")
            if optional and self.ended and not rest:
                return marks[-1]
            yield

    def name(self, mark: str) -> Waiting:
        """Read a name of one line that stands before `mark`, which stays; return it."""
        place = self.at
        while True:
            end = self.text.find(mark, place)
            if end < 0 and self.ended:
                end = len(self.text)
            place = end if end >= 0 else max(place, len(self.text) - len(mark) + 1)
            name = self.text[self.at : place].strip()
            if "\n" in name or len(name) > MOST_NAME or (end >= 0 and not name):
                raise ValueError("no name")
            if end >= 0:
                self.at = end
                return name
            yield

    def next(self) -> Waiting:
        """Read white space; return the character behind it, "" at the end of the reply."""
        while True:
            self.at = self._behind_space(self.at)
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            yield

    def arguments(self, name: str, id: str | None = None) -> Generator[CallPart | None, None, str]:
        """Read white space and a JSON object, the arguments of a call; return its text.

        Yields all of it but the last brace as parts of a call of `name`.
        """
        yield from self.take("{")
        begin, sent = self.at - 1, self.at
        scanner = ObjectEnd(begin)
        yield CallPart(name, "{", id)
        while True:
            end = scanner.find(self.text)
            certain = len(self.text) if end is None else end - 1
            if certain > sent:
                yield CallPart(arguments=self.text[sent:certain])
                sent = certain
            if end is not None:
                break
            yield None
        text, self.at = self.text[begin:end], end
        read_json(text)
        return text

    def value(
        self, mark: str, *rows: tuple[str, ...], shown: bool, next_tag: NextTag | None = None
    ) -> Generator[CallPart | None, None, str]:
        """Read up to `mark` with the marks of one of `rows` behind it; return the text before.

        shown: Yield what is certain of the text as parts of a JSON string. next_tag: A line break
        belongs to the tags on both sides, and the text may also end before the tag of another
        argument.
        """
        start = certain = place = sent = self.at
        while True:
            place, ends = self._end(place, mark, rows)
            behind, stripped = place + len(mark), next_tag is not None
            certain, found = next_tag(self.text, certain, place) if next_tag else (place, False)
            if found:
                ends, behind, stripped = True, certain + 1, False
            elif ends:
                certain = place
            begin = start + (next_tag is not None and self.text.startswith("\n", start, certain))
            stripped = stripped and ends and self.text.endswith("\n", begin, certain)
            sent, end = max(sent, begin), certain - stripped
            if shown and end > sent:
                yield CallPart(arguments=_inner(self.text[sent:end]))
                sent = end
            if ends:
                self.at = behind
                return self.text[begin:end]
            yield None

    def _end(self, place: int, mark: str, rows: tuple[tuple[str, ...], ...]) -> tuple[int, bool]:
        """Return the next place where a value may end, and whether it certainly does."""
        while (end := self.text.find(mark, place)) >= 0:
            found = [self._stand(end + len(mark), row) for row in rows]
            if True in found or None in found:
                return end, True in found
            place = end + len(mark)
        return max(place, len(self.text) - overlap(self.text, mark)), False

    def _behind_space(self, at: int) -> int:
        space = _SPACE.match(self.text, at)
        assert space is not None
        return space.end()

    def _stand(self, at: int, row: tuple[str, ...]) -> bool | None:
        """Return True if marks stand at a place, in this order, and None if they still may."""
        for mark in row:
            at = self._behind_space(at)
            if self.text.startswith(mark, at):
                at += len(mark)
            elif not mark.startswith(self.text[at : at + len(mark)]):
                return False
            else:
                return True if self.ended and at == len(self.text) else None
        return True


_SPACE = re.compile(r"\s*")


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _inner(text: str) -> str:
    """Return a text as it stands inside a JSON string."""
    return json_text(text)[1:-1]
