"""From the tokens of one reply to its text, reasoning and calls, as they come."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_moeflux.detokenizer import StopText
from mlx_moeflux.server.engine import Token, TokenLogprobs
from mlx_moeflux.server.reasoning import Splitter
from mlx_moeflux.server.tools import ToolCall, ToolSplitter

LENGTH, STOP, CALLS = "length", "stop", "tool_calls"


@dataclass
class Delta:
    """A part of a reply. finish: "stop", "length" or "tool_calls" on the last, else None.

    stop: The stop text that ended the reply. logprobs: Of the tokens since the last part. calls:
    Whole calls, each with an id.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.finish)


class Assembler:
    """Assembles one reply. Its tokens go through, in order: detokenizer, reasoning, calls, stops.

    Stop texts end the answer, not the reasoning or a call. reasoning, tools: Splitters of this
    reply, or None. tokens: Number of tokens so far, the one that ended the reply included.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: Sequence[str] = (),
        reasoning: Splitter | None = None,
        tools: ToolSplitter | None = None,
    ):
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopText(stop)
        self._reasoning, self._tools = reasoning, tools
        self._logprobs: list[TokenLogprobs] = []
        self.tokens = self.reasoning_tokens = 0

    def add(self, token: Token) -> Delta:
        """Return what is new; its `finish` is set once the reply has ended, perhaps earlier than
        the engine's."""
        self.tokens += 1
        if self._reasoning is not None and self._reasoning.inside:
            self.reasoning_tokens += 1
        if token.logprobs is not None and token.finish != STOP:
            self._logprobs.append(token.logprobs)
        text = "" if token.finish == STOP else self._detokenizer.add(token.id)
        final = token.finish is not None
        text += self._detokenizer.finish() if final else ""
        delta = self._split(text, final=final, cut=final and token.finish != STOP)
        if self._stop.found:
            delta.finish, delta.stop = STOP, self._stop.stop
        elif self._tools is not None and self._tools.full:
            delta.finish = CALLS
        elif final:
            called = self._tools is not None and self._tools.count and token.finish == STOP
            delta.finish = CALLS if called else token.finish
        if delta:
            delta.logprobs, self._logprobs = self._logprobs, []
        return delta

    def _split(self, text: str, *, final: bool, cut: bool) -> Delta:
        delta = Delta()
        if self._reasoning is not None:
            delta.reasoning, text = self._reasoning.add(text, final=final)
        if self._tools is not None:
            found = self._tools.add(text, final=final, cut=cut)
            text = found.text
            delta.calls = [_with_id(call) for call in found.calls]
            if found.unfinished:
                delta.text = self._stop.finish("") + text
                return delta
        # A stop text does not reach across a call.
        whole = final or bool(delta.calls)
        delta.text = self._stop.finish(text) if whole else self._stop.add(text)
        return delta


def _with_id(call: ToolCall) -> ToolCall:
    return call if call.id else ToolCall(call.name, call.arguments, f"call_{uuid.uuid4().hex[:24]}")
