"""``to=functions.name<|message|>JSON``, gpt-oss's messages to functions."""

from __future__ import annotations

import re

from mlx_moeflux.server.calls.reader import CLOSE, CallPart, Parser, Reader, Tools
from mlx_moeflux.server.calls.syntax import ToolSyntax
from mlx_moeflux.server.constrain import quoted
from mlx_moeflux.server.schemas import ArgumentsSchema

CHANNEL, CONSTRAIN, MESSAGE, END = "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"
_HEAD = re.compile(r"(functions\.)?(\S+?)(?:\s+\w+|\s*<\|constrain\|>\s*\w*)?")


def _parse(reader: Reader, tools: Tools) -> Parser:
    """Parse the rest of a message. The model may leave out `functions.` before a name that it was
    given, and empty arguments."""
    head = _HEAD.fullmatch((yield from reader.name(MESSAGE)))
    if head is None or not (head[1] or head[2] in tools):
        raise ValueError("no function")
    yield from reader.take(MESSAGE)
    if (yield from reader.next()) in ("", END[0]):
        needed = bool(ArgumentsSchema(tools.get(head[2], {})).required())
        yield from reader.take(END, optional=not needed)
        yield CallPart(head[2], "{}", whole=True)
        return
    yield from reader.arguments(head[2])
    yield from reader.take(END, optional=True)
    yield CLOSE


SYNTAX = ToolSyntax(
    markers=(CHANNEL, MESSAGE),
    begin=f"{CHANNEL}commentary to=",
    end=END,
    parse=_parse,
    call=lambda name, rule: f"{quoted('functions.', name, ' ', CONSTRAIN, 'json', MESSAGE)} {rule}",
    ends_reply=True,
    tokens=(CHANNEL, CONSTRAIN, MESSAGE),
)
