"""``<invoke name="name"><parameter name="key">value</parameter></invoke>``, as MiniMax-M2 writes a
call."""

from __future__ import annotations

import json

from mlx_moeflux.server.calls.reader import Parser, Reader, Tools
from mlx_moeflux.server.calls.syntax import ToolSyntax
from mlx_moeflux.server.calls.tagged import Tags, parse_invoked
from mlx_moeflux.server.constrain import quoted

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"


def _parse(reader: Reader, tools: Tools) -> Parser:
    return parse_invoked(reader, tools, "", END, {'">': None})


SYNTAX = ToolSyntax(
    markers=(BEGIN, "<invoke name="),
    begin=BEGIN,
    end=END,
    parse=_parse,
    call=lambda name, rule: (
        f"/\\n?/ {quoted('<invoke name=', json.dumps(name), '>', chr(10))} {rule} "
        f'"</invoke>" /\\n?/'
    ),
    tags=Tags(
        lambda key: quoted("<parameter name=", json.dumps(key), ">"), "</parameter>", '"\\n"'
    ),
    grouped=True,
    bare=('<invoke name="',),
)
