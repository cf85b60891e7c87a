"""``function<sep>name`` and a fenced block of JSON, as DeepSeek-V3 and R1 write a call.

The parser reads V3.1's calls too, see :mod:`mlx_moeflux.server.calls.deepseek_v31`.
"""

from __future__ import annotations

from mlx_moeflux.server.calls.reader import CLOSE, Parser, Reader, Tools
from mlx_moeflux.server.calls.syntax import ToolSyntax
from mlx_moeflux.server.constrain import quoted

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _parse(reader: Reader, tools: Tools) -> Parser:
    while (yield from reader.take(CALL, END, optional=True)) == CALL:
        name = yield from reader.name(SEPARATOR)
        yield from reader.take(SEPARATOR)
        fenced = name == "function" and (yield from reader.next()) != "{"
        if fenced:
            name = yield from reader.name("```")
            yield from reader.take("```json", "```")
        yield from reader.arguments(name)
        if fenced:
            yield from reader.take("```")
        yield from reader.take(CALL_END, optional=True)
        yield CLOSE


SYNTAX = ToolSyntax(
    markers=(BEGIN, "```json"),
    begin=BEGIN,
    end=END,
    parse=_parse,
    call=lambda name, rule: (
        f"{quoted(CALL, 'function', SEPARATOR, name)} "
        f'"\\n```json\\n" {rule} {quoted(chr(10), "```", CALL_END)}'
    ),
    text_arguments=True,
    grouped=True,
    bare=(CALL,),
)
