"""MiniMax-M2's tags with ``｜DSML｜`` before the name of each, and ``string="true"`` or ``"false"``
behind each key, as DeepSeek-V3.2 writes a call: the value is a text, or JSON.

Source: the `encoding_dsv32.py` beside DeepSeek-V3.2, as mlx-lm 0.32.2 has it.
"""

from __future__ import annotations

from mlx_moeflux.server.calls.reader import Parser, Reader, Tools
from mlx_moeflux.server.calls.syntax import ToolSyntax
from mlx_moeflux.server.calls.tagged import TypedTags, parse_invoked
from mlx_moeflux.server.constrain import quoted

DSML = "｜DSML｜"
BEGIN, END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
INVOKE, INVOKE_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
_KINDS = {'" string="true">': True, '" string="false">': False}


def _parse(reader: Reader, tools: Tools) -> Parser:
    return parse_invoked(reader, tools, DSML, END, _KINDS)


SYNTAX = ToolSyntax(
    markers=(DSML, "function_calls>"),
    begin=BEGIN,
    end=END,
    parse=_parse,
    call=lambda name, rule: (
        f"/\\n?/ {quoted(INVOKE, name, chr(34), '>', chr(10))} {rule} {quoted(INVOKE_END)} /\\n?/"
    ),
    tags=TypedTags(
        lambda key: quoted(f'<{DSML}parameter name="{key}" string="true">'),
        f"</{DSML}parameter>",
        '"\\n"',
        begin_json=lambda key: quoted(f'<{DSML}parameter name="{key}" string="false">'),
    ),
    grouped=True,
    tokens=(DSML,),
    bare=(INVOKE,),
)
