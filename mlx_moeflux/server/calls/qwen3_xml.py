"""``<function=name><parameter=key>value</parameter></function>``, as Qwen3.5 and Qwen3-Coder write
a call."""

from __future__ import annotations

import re
from functools import partial

from mlx_moeflux.server.calls.reader import Parser, Reader, Tools
from mlx_moeflux.server.calls.syntax import ToolSyntax
from mlx_moeflux.server.calls.tagged import TaggedCall, Tags
from mlx_moeflux.server.constrain import quoted

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
ARGUMENT, ARGUMENT_END = "<parameter=", "</parameter>"
_TAG = re.compile(rf"\n{ARGUMENT}([^>\n]+)>(?=\n)")
_BEGUN_TAG = re.compile(rf"\n{ARGUMENT}[^>\n]+>?")


def _parse(reader: Reader, tools: Tools) -> Parser:
    """Parse calls; the model may leave out the marks between two."""
    rows = (ARGUMENT,), (FUNCTION_END, END), (FUNCTION_END, FUNCTION)
    mark = FUNCTION
    while mark == FUNCTION:
        yield from reader.take(FUNCTION)
        call = TaggedCall((yield from reader.name(">")), tools)
        yield from reader.take(">")
        while (yield from reader.take(ARGUMENT, FUNCTION_END)) == ARGUMENT:
            key = yield from reader.name(">")
            yield from reader.take(">")
            next_tag = partial(_next_tag, call)
            yield from call.argument(reader, key, ARGUMENT_END, *rows, next_tag=next_tag)
        mark = yield from reader.take(FUNCTION, END, optional=True)
        if mark == FUNCTION:
            reader.at -= len(FUNCTION)
        yield from call.end()


def _next_tag(call: TaggedCall, text: str, begin: int, end: int) -> tuple[int, bool]:
    """Return the place of the tag, on a line of its own, of an argument that the call still lacks,
    and True; the place where one may still begin, and False."""
    for found in _TAG.finditer(text, begin, end):
        if call.lacks(found[1]):
            return found.start(), True
    last = text.rfind("\n", begin, end)
    rest = text[last:end] if last >= 0 else "-"
    may_be = f"\n{ARGUMENT}".startswith(rest) or _BEGUN_TAG.fullmatch(rest)
    return (last if may_be else end), False


SYNTAX = ToolSyntax(
    markers=(BEGIN, FUNCTION, ARGUMENT),
    begin=BEGIN,
    end=END,
    parse=_parse,
    call=lambda name, rule: (
        f"{quoted(chr(10), FUNCTION, name, '>', chr(10))} {rule} {quoted(FUNCTION_END, chr(10))}"
    ),
    tags=Tags(lambda key: quoted(f"{ARGUMENT}{key}>\n"), f"\n{ARGUMENT_END}", '"\\n"'),
    bare=(FUNCTION,),
)
