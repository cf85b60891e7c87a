"""Splits the text of a reply into answer and calls, as it comes.

Text that looks like a call but cannot be parsed stays text: nothing of a reply is lost.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mlx_moeflux.detokenizer import overlap
from mlx_moeflux.server.calls.reader import CallPart, Parser, Reader, Tools
from mlx_moeflux.server.calls.syntax import ToolSyntax


@dataclass
class Found:
    """The part of a reply that no later text can change.

    pieces: Answer and parts of calls, in order; parts of the same call are joined.
    unfinished: Behind them, the text of a call that has no end.
    """

    pieces: list[str | CallPart] = field(default_factory=list)
    unfinished: str = ""

    @property
    def text(self) -> str:
        return "".join(p for p in self.pieces if isinstance(p, str)) + self.unfinished

    @property
    def calls(self) -> list[CallPart]:
        return [piece for piece in self.pieces if isinstance(piece, CallPart)]

    def add(self, piece: str | CallPart) -> None:
        last = self.pieces[-1] if self.pieces else ""
        if isinstance(piece, CallPart):
            if isinstance(last, CallPart) and last.index == piece.index:
                self.pieces[-1] = last + piece
            else:
                self.pieces.append(piece)
        elif piece:
            self.pieces.append(piece)


class ToolSplitter:
    """Splits the text of one reply into answer and calls, as they come.

    most: Calls after which it ends. strays: Marks that are dropped behind a call, besides the
    syntax's end. count: Number of whole calls.

    A call of a function that is not in `tools` is handed out once it is whole, a call of another
    one part by part.
    """

    def __init__(
        self,
        syntax: ToolSyntax,
        tools: Tools,
        *,
        most: int | None = None,
        strays: Sequence[str] = (),
    ):
        self._syntax, self._tools, self._most = syntax, tools, most
        self._strays = (syntax.end, *strays)
        self._held, self.count = "", 0  # text that is not yet part of a call or the answer
        self._begun = 0  # calls that have handed out a part
        self._ids: set[str] = set()
        self._open: _OpenCalls | None = None
        self._broken = self._behind = False

    @property
    def full(self) -> bool:
        """Return True after `most` calls."""
        return self._most is not None and self.count >= self._most

    def add(self, text: str, *, final: bool = False, cut: bool = False) -> Found:
        """Return what is certain after `text`; with `final`, everything that was held back.

        cut: The model did not end the reply itself (a limit did). Then no call may lack its end;
        otherwise marks may be missing that tell nothing new.
        """
        self._held += text
        found, inside = Found(), self._open is not None
        while not self.full and self._step(found, ended=final and not cut):
            pass
        if self.full:
            self._held = ""
        elif self._open is not None:
            rest = self._open.rest
            # Behind a whole call, white space and a part of the end are no text.
            if final and (self._open.opening or not self._syntax.end.startswith(rest.strip())):
                found.unfinished = rest
        elif self._held:
            # The half of a character at the end of a cut call breaks it.
            if final and inside and self._broken:
                found.unfinished = self._held.rstrip() if self.count else self._held
            else:
                self._answer(found, final)
        return found

    def _step(self, found: Found, *, ended: bool) -> bool:
        """Enter or leave calls; return False once more text is needed."""
        if self._open is not None:
            return self._leave_calls(self._open, found, ended)
        if self._broken:
            return self._leave_broken(found)
        if self._behind and not self._leave_strays():
            return False
        return self._enter_calls(found)

    def _leave_strays(self) -> bool:
        """Drop marks that stand behind a call; return False if one may still follow."""
        rest = self._held.lstrip()
        while mark := next((mark for mark in self._strays if rest.startswith(mark)), ""):
            self._held = rest[len(mark) :]
            rest = self._held.lstrip()
        self._behind = any(mark.startswith(rest) for mark in self._strays)
        return not self._behind

    def _enter_calls(self, found: Found) -> bool:
        at, mark = _first(self._held, self._syntax.begins)
        if not mark:
            return False
        # White space before a call belongs to its syntax.
        text = self._held[:at].rstrip()
        found.add(text)
        bare = mark != self._syntax.begin
        behind = at if bare else at + len(mark)
        opening, reader = self._held[len(text) : behind], Reader(self._held[behind:])
        self._open = _OpenCalls(opening, reader, self._syntax.parse(reader, self._tools), bare)
        self._held = ""
        return True

    def _leave_calls(self, calls: _OpenCalls, found: Found, ended: bool) -> bool:
        calls.reader.text += self._held
        calls.reader.ended, self._held = ended, ""
        try:
            for part in calls.parser:
                if part is None:
                    return False
                self._take(calls, part, found)
                if self.full:
                    return False
            if not calls.whole:
                raise ValueError("no call")
        except (ValueError, TypeError, RecursionError):
            self._no_call(calls, found)
        else:
            calls.kept = calls.reader.at
            self._held, self._behind = calls.rest, True
        self._open = None
        return True

    def _take(self, calls: _OpenCalls, part: CallPart, found: Found) -> None:
        """Hand out a part of a call, or keep it until the call is whole."""
        if part.name and part.name not in self._tools:
            if calls.bare:
                raise ValueError("no function of the request")
            calls.waiting = part
        elif calls.waiting is not None:
            calls.waiting += part
        if calls.waiting is not None:
            if not part.whole:
                return
            part, calls.waiting = calls.waiting, None
        if part.name:
            self._begun += 1
            part = replace(part, id=self._own_id(part.id))
        found.add(replace(part, index=self._begun - 1))
        calls.sent = True
        if part.whole:
            self.count += 1
            calls.end_call()

    def _own_id(self, given: str | None) -> str:
        """Return the id that the model gives if no other call has it, else a new one."""
        if not given or given in self._ids:
            given = f"call_{uuid.uuid4().hex[:24]}"
        self._ids.add(given)
        return given

    def _no_call(self, calls: _OpenCalls, found: Found) -> None:
        """Leave what proved to be no call. A mark that the model only mentions is text; behind the
        begin of a broken call everything is, up to the end mark."""
        self._held = rest = calls.rest
        if calls.whole and not calls.reader.begun:
            return  # no further call was begun
        text = rest.lstrip()
        mark = next((mark for mark in self._syntax.begins if text.startswith(mark)), "")
        self._broken = calls.broken
        if not self._broken:
            behind = len(rest) - len(text) + len(mark)
            found.add(rest[:behind])
            self._held = rest[behind:]

    def _leave_broken(self, found: Found) -> bool:
        """Hand out the rest of a broken call as text."""
        at = self._held.find(self._syntax.end)
        if at < 0:
            return False
        at += len(self._syntax.end)
        found.add(self._held[:at])
        self._held, self._broken = self._held[at:], False
        return True

    def _answer(self, found: Found, final: bool) -> None:
        """Hand out text that cannot belong to a call."""
        if self._behind and not final:
            return
        marks = (self._syntax.end,) if self._broken else self._syntax.begins
        held = 0 if final else max(overlap(self._held, mark) for mark in marks)
        certain = len(self._held) - held
        if not final or self.count:  # white space may stand before a call, or behind the last one
            certain = len(self._held[:certain].rstrip())
        found.add(self._held[:certain])
        self._held = self._held[certain:]


@dataclass
class _OpenCalls:
    """Calls whose end was not read yet. opening: Text before the reader's, until a call is whole.
    bare: The calls have no begin. kept: Place in the reader's text behind the last whole call.
    sent: A part of the call behind it was handed out. waiting: The part so far of a call that is
    handed out once it is whole."""

    opening: str
    reader: Reader
    parser: Parser
    bare: bool
    kept: int = 0
    whole: bool = False
    sent: bool = False
    waiting: CallPart | None = None

    @property
    def rest(self) -> str:
        """Return the text that belongs to no whole call."""
        return self.opening + self.reader.text[self.kept :]

    @property
    def broken(self) -> bool:
        """Return True if the rest, which is no call, is more than a mark in a sentence."""
        next = self.reader.text[self.kept :].lstrip()[:1]
        return self.sent or (not self.bare and (self.reader.begun or next in ("<", "{")))

    def end_call(self) -> None:
        self.opening, self.kept, self.whole = "", self.reader.at, True
        self.sent = self.reader.begun = False


class CallSearch:
    """Finds where the model begins to call a function of the request, wherever that is."""

    def __init__(self, syntax: ToolSyntax, tools: Tools):
        self._syntax, self._tools = syntax, tools

    def find(self, text: str) -> tuple[int, bool]:
        """Return the place where a call begins, and True; or the place where one may still begin,
        and False. A mark that is only mentioned begins none."""
        place = 0
        while True:
            at, mark = _first(text, self._syntax.begins, place)
            if not mark:
                return len(text) - max(overlap(text, m) for m in self._syntax.begins), False
            found = self._begins(text[at + len(mark) * (mark == self._syntax.begin) :])
            if found is not False:
                return at, found is True
            place = at + len(mark)

    def takes(self, recipient: str) -> bool:
        """Return True if a message to `recipient`, as gpt-oss writes it, is a call."""
        return recipient.startswith("functions.") or recipient in self._tools

    def _begins(self, text: str) -> bool | None:
        """Return True if a call stands at the beginning, and None if it may."""
        try:
            for part in self._syntax.parse(Reader(text), self._tools):
                return None if part is None else part.name in self._tools
        except (ValueError, TypeError, RecursionError):
            pass
        return False


def _first(text: str, marks: Iterable[str], place: int = 0) -> tuple[int, str]:
    """Return the first place of one of `marks`, and the mark; (-1, "") if there is none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark, place)) >= 0]
    return min(found, default=(-1, ""))
