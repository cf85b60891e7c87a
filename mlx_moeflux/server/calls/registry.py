"""The syntaxes of tool calls by name, and the choice of one by the chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from mlx_moeflux.server.calls import (
    deepseek_v3,
    deepseek_v31,
    deepseek_v32,
    gemma4,
    glm4,
    harmony,
    hermes,
    kimi_k2,
    minimax_m2,
    qwen3_xml,
)
from mlx_moeflux.server.calls.syntax import ToolSyntax

# The more particular ones first; --tool-parser names one. Others may add theirs.
SYNTAXES: dict[str, ToolSyntax] = {
    "qwen3_xml": qwen3_xml.SYNTAX,
    "glm4": glm4.SYNTAX,
    "minimax_m2": minimax_m2.SYNTAX,
    "deepseek_v3.2": deepseek_v32.SYNTAX,
    "harmony": harmony.SYNTAX,
    "gemma4": gemma4.SYNTAX,
    "hermes": hermes.SYNTAX,
    "deepseek_v3": deepseek_v3.SYNTAX,
    "deepseek_v3.1": deepseek_v31.SYNTAX,
    "kimi_k2": kimi_k2.SYNTAX,
}

_ENCODED_ARGUMENTS = re.compile(r"""arguments['"]?\]?\s*\|\s*tojson""")


def choose_syntax(templates: Iterable[str | None], name: str | None = None) -> ToolSyntax | None:
    """Return the named syntax, or the first whose markers are all in one of the templates.

    A template that writes the arguments of earlier calls as JSON itself gets them as objects.
    """
    known = [template for template in templates if template]
    found = [SYNTAXES[name]] if name is not None else SYNTAXES.values()
    for syntax in found:
        marked = (all(mark in template for mark in syntax.markers) for template in known)
        if name is not None or any(marked):
            encoded = any(_ENCODED_ARGUMENTS.search(template) for template in known)
            objects = syntax.text_arguments and encoded
            return replace(syntax, text_arguments=False) if objects else syntax
    return None
