"""``{"name": ..., "arguments": {...}}`` between tags, as Hermes and Qwen3 write a call."""

from __future__ import annotations

import json
import re

from mlx_moeflux.server.calls.reader import CLOSE, CallPart, Parser, Reader, Tools, json_text
from mlx_moeflux.server.calls.syntax import ToolSyntax
from mlx_moeflux.server.constrain import quoted
from mlx_moeflux.server.json_guard import ObjectEnd, read_json

BEGIN, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def _parse(reader: Reader, tools: Tools) -> Parser:
    begin, end, whole = reader.at, None, ObjectEnd(reader.at)
    while (head := _HEAD.match(reader.text, begin)) is None:
        if (end := whole.find(reader.text)) is not None:
            break
        yield None
    reader.begun, name, text = True, None, None
    if head is not None:
        name, reader.at = read_json(head[1]), head.end()
        text = yield from reader.arguments(name)
        while end is None and (end := whole.find(reader.text)) is None:
            yield None
    call, reader.at = read_json(reader.text[begin:end]), end or begin
    given = call.get("arguments", call.get("parameters", {}))
    if not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError("no name")
    if text is None:
        text = given if isinstance(given, str) else json_text(given)
        if not isinstance(read_json(text), dict):
            raise ValueError("arguments are no object")
        first = CallPart(call["name"], text.strip()[:-1])
    elif (call["name"], given) != (name, read_json(text)):
        raise ValueError("two names, or arguments twice")
    else:
        first = None
    yield from reader.take(END, optional=True)
    if first is not None:
        yield first
    yield CLOSE


SYNTAX = ToolSyntax(
    markers=(BEGIN, END),
    begin=BEGIN,
    end=END,
    parse=_parse,
    call=lambda name, rule: (
        f'"\\n{{\\"name\\": " {quoted(json.dumps(name))} ", \\"arguments\\": " {rule} "}}\\n"'
    ),
)
