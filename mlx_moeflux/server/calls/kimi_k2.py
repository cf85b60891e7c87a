"""An id, ``functions.name:number``, and JSON between marks, as Kimi-K2 writes a call."""

from __future__ import annotations

import re

from mlx_moeflux.server.calls.reader import CLOSE, Parser, Reader, Tools
from mlx_moeflux.server.calls.syntax import ToolSyntax
from mlx_moeflux.server.constrain import quoted

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
# The model may write the marks of the section in the singular.
SECTION, SECTION_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(:\d+)?")


def _parse(reader: Reader, tools: Tools) -> Parser:
    """Parse calls; the model may leave out parts of an id."""
    marks = CALL, SECTION, SECTION_END, END
    while (mark := (yield from reader.take(*marks, optional=True))) in marks[:2]:
        if mark == SECTION:
            continue
        given = yield from reader.name(ARGUMENTS)
        yield from reader.take(ARGUMENTS)
        name = _ID.fullmatch(given)
        assert name is not None  # a name is not empty
        yield from reader.arguments(name[1], given if name[2] else None)
        yield from reader.take(CALL_END, optional=True)
        yield CLOSE


SYNTAX = ToolSyntax(
    markers=(BEGIN,),
    begin=BEGIN,
    end=END,
    parse=_parse,
    call=lambda name, rule: (
        f"{quoted(CALL, 'functions.', name, ':')} /[0-9]{{1,3}}/ "
        f"{quoted(ARGUMENTS)} {rule} {quoted(CALL_END)}"
    ),
    text_arguments=True,
    grouped=True,
    bare=(SECTION, CALL),
)
