"""``name<sep>JSON`` between DeepSeek-V3's marks, as DeepSeek-V3.1 writes a call."""

from __future__ import annotations

from dataclasses import replace

from mlx_moeflux.server.calls.deepseek_v3 import BEGIN, CALL, CALL_END, SEPARATOR
from mlx_moeflux.server.calls.deepseek_v3 import SYNTAX as V3
from mlx_moeflux.server.constrain import quoted

SYNTAX = replace(
    V3,
    markers=(BEGIN,),
    call=lambda name, rule: f"{quoted(CALL, name, SEPARATOR)} {rule} {quoted(CALL_END)}",
)
