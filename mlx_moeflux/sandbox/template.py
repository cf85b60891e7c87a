"""Chat templates, rendered in jinja2's sandbox. Runs in the child process."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """``{% generation %}`` blocks, which mark the reply for training; renders their content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    layout = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return jinja2's sandbox with the filters and functions that transformers offers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@lru_cache(maxsize=4)
def compiled(template: str) -> Template:
    """Return a template that can be rendered.

    Raises:
        jinja2.TemplateError: Its syntax is wrong.
    """
    return _environment().from_string(template)


def rendered(template: str, variables: dict[str, Any], *, most: int) -> str:
    """Return the text of a template; raises what its expressions raise.

    Raises:
        OverflowError: It has more than `most` characters. What a template prints without end is
            never held whole.
    """
    parts, size = [], 0
    for part in compiled(template).generate(variables):
        parts.append(part)
        size += len(part)
        if size > most:
            raise OverflowError
    return "".join(parts)


def names(template: str, *, most: int) -> dict[str, list[str]]:
    """Return the variables that a template reads, and its words: texts and names of fields of up to
    `most` characters."""
    tree = _environment().parse(template)
    words = {text.value for text in tree.find_all(nodes.Const) if isinstance(text.value, str)}
    words |= {field.attr for field in tree.find_all(nodes.Getattr)}
    return {
        "variables": sorted(meta.find_undeclared_variables(tree)),
        "words": sorted(word for word in words if len(word) <= most),
    }
