"""From the tokens of one reply to its text, reasoning and calls, as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_moeflux.detokenizer import StopText
from mlx_moeflux.server.calls.reader import CallPart
from mlx_moeflux.server.calls.splitter import ToolSplitter
from mlx_moeflux.server.engine import Token, TokenLogprobs
from mlx_moeflux.server.reasoning import Splitter

LENGTH, STOP, CALLS = "length", "stop", "tool_calls"


@dataclass
class Delta:
    """A part of a reply: reasoning, behind it text, behind it parts of calls. finish: "stop",
    "length" or "tool_calls" on the last, else None.

    stop: The stop text that ended the reply. logprobs: Of the tokens since the last part. calls:
    Parts of calls, each call with an id and a number of its own.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.finish)


class Assembler:
    """Assembles one reply. Its tokens go through, in order: detokenizer, reasoning, calls, stops.

    Stop texts end the answer, not the reasoning or a call. reasoning, tools: Splitters of this
    reply, or None. special: Id -> text of the vocabulary's special tokens, of which no text is
    shown. tokens: Number of tokens so far, the one that ended the reply included.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: Sequence[str] = (),
        reasoning: Splitter | None = None,
        tools: ToolSplitter | None = None,
        special: Mapping[int, str] | None = None,
    ):
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopText(stop)
        self._reasoning, self._tools = reasoning, tools
        self._special = special or {}
        self._hidden: set[str] = set()  # the special tokens that came
        self._logprobs: list[TokenLogprobs] = []
        self.tokens = self.reasoning_tokens = 0

    def add(self, token: Token) -> list[Delta]:
        """Return what is new, in order; the last one's `finish` is set once the reply has ended,
        perhaps earlier than the engine's."""
        self.tokens += 1
        if self._reasoning is not None and self._reasoning.inside:
            self.reasoning_tokens += 1
        if token.logprobs is not None and token.finish != STOP:
            self._logprobs.append(token.logprobs)
        text = "" if token.finish == STOP else self._detokenizer.add(token.id)
        if token.id in self._special:
            self._hidden.add(self._special[token.id])
        final = token.finish is not None
        text += self._detokenizer.finish() if final else ""
        deltas = self._split(text, final=final, cut=final and token.finish != STOP)
        last = deltas[-1]
        if self._stop.found:
            last.finish, last.stop = STOP, self._stop.stop
        elif self._tools is not None and self._tools.full:
            last.finish = CALLS
        elif final:
            called = self._tools is not None and self._tools.count and token.finish == STOP
            last.finish = CALLS if called else token.finish
        if not last:
            return []
        deltas[0].logprobs, self._logprobs = self._logprobs, []
        return deltas

    def _split(self, text: str, *, final: bool, cut: bool) -> list[Delta]:
        """Return at least one part."""
        deltas = [Delta()]
        if self._reasoning is not None:
            reasoning, text = self._reasoning.add(text, final=final)
            deltas[0].reasoning = self._shown(reasoning)
        if self._tools is None:
            deltas[0].text = self._answer(text, final=final)
            return deltas
        found = self._tools.add(text, final=final, cut=cut)
        for piece in found.pieces:
            if isinstance(piece, CallPart):
                # A stop text does not reach across a call.
                deltas[-1].text += self._answer("", final=True)
                deltas[-1].calls.append(piece)
            else:
                if deltas[-1].calls:
                    deltas.append(Delta())
                deltas[-1].text += self._answer(piece, final=False)
            if self._stop.found:
                return deltas
        if final:
            if deltas[-1].calls and found.unfinished:
                deltas.append(Delta())
            deltas[-1].text += self._answer("", final=True) + self._shown(found.unfinished)
        return deltas

    def _answer(self, text: str, *, final: bool) -> str:
        """Return what is certain of the answer, after `text` or the last one before a call."""
        text = self._shown(text)
        return self._stop.finish(text) if final else self._stop.add(text)

    def _shown(self, text: str) -> str:
        """Return a text without the special tokens that are left in it."""
        for mark in self._hidden:
            text = text.replace(mark, "")
        return text
