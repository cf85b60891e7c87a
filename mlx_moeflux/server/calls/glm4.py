"""``name<arg_key>key</arg_key><arg_value>value</arg_value>``, as GLM-4.5 to 4.7 write a call."""

from __future__ import annotations

from mlx_moeflux.server.calls.reader import Parser, Reader, Tools
from mlx_moeflux.server.calls.syntax import ToolSyntax
from mlx_moeflux.server.calls.tagged import TaggedCall, Tags
from mlx_moeflux.server.constrain import quoted

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _parse(reader: Reader, tools: Tools) -> Parser:
    """Parse a call with line breaks or without. Only its end and the schema tell that it is
    whole."""
    call = TaggedCall((yield from reader.name("<")), tools)
    while (yield from reader.take(KEY, END, optional=call.has_all)) == KEY:
        key = yield from reader.name(KEY_END)
        yield from reader.take(KEY_END)
        yield from reader.take(VALUE)
        yield from call.argument(reader, key, VALUE_END, (KEY,), (END,))
    yield from call.end()


SYNTAX = ToolSyntax(
    markers=(BEGIN, KEY),
    begin=BEGIN,
    end=END,
    parse=_parse,
    call=lambda name, rule: f"{quoted(name)} /\\n?/ {rule}",
    tags=Tags(
        lambda key: f"{quoted(KEY, key, KEY_END)} /\\n?/ {quoted(VALUE)}", VALUE_END, "/\\n?/"
    ),
    tokens=(KEY, KEY_END, VALUE, VALUE_END),
)
