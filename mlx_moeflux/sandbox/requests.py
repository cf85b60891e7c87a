"""Requests to the child process that renders chat templates."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.sandbox.process import Broken, Refused, child

PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TOOL = {"name": "look", "description": "Look something up.", "parameters": PARAMETERS}
TRIAL = {
    "messages": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go on."},
    ],
    "documents": None,
    "add_generation_prompt": True,
    **dict.fromkeys(("bos_token", "eos_token", "pad_token"), ""),
}


def render(template: str, /, **variables: Any) -> str:
    """Return the text of a chat template.

    variables: Texts, numbers, lists and mappings.

    Raises:
        InputError: The template refuses the variables, or takes too much time or memory.
    """
    try:
        return child.call("render", {"template": template, "variables": _plain(variables)})
    except Refused as error:
        reason = str(error).rstrip(".")
        raise InputError(f"the chat template refuses these messages: {reason}.") from None
    except Broken as error:
        raise InputError(
            f"the chat template was stopped: {error}; give another template or shorter messages."
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"the messages or a template variable are no plain values ({error}); give texts, "
            "numbers, lists and dicts."
        ) from None


@dataclass(frozen=True)
class TemplateNames:
    """What a chat template reads. variables: Names that are to be passed to it. words: Its texts
    that are not printed as they stand, and the names of fields."""

    variables: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()


def template_names(template: str) -> TemplateNames:
    """Return what a chat template reads; nothing of one that is broken, which rendering refuses."""
    try:
        return _names(template)
    except (Refused, Broken):
        return TemplateNames()


@functools.lru_cache(maxsize=8)
def _names(template: str) -> TemplateNames:
    found = child.call("names", {"template": template})
    return TemplateNames(**{name: frozenset(values) for name, values in found.items()})


def check_syntax(template: str) -> None:
    """Compile a chat template.

    Raises:
        InputError: It is no template of jinja2. UnsupportedError: It takes too much time or memory.
    """
    try:
        child.call("compile", {"template": template})
    except Refused as error:
        reason = str(error).rstrip(".")
        raise InputError(f"the chat template is no template of jinja2 ({reason}).") from None
    except Broken as error:
        raise UnsupportedError(
            f"the chat template was stopped: {error}; give another with --chat-template."
        ) from None


def check_template(template: str) -> None:
    """Render a chat template with three messages, with tools and without.

    A template that refuses them passes: it ended.

    Raises:
        UnsupportedError: It takes too much time or memory.
    """
    for tools in (None, [{"type": "function", "function": TOOL}]):
        variables = {**TRIAL, "tools": tools}
        with contextlib.suppress(Refused):
            try:
                child.call("render", {"template": template, "variables": variables})
            except Broken as error:
                raise UnsupportedError(
                    f"the chat template was stopped at three short messages: {error}; give another "
                    "with --chat-template."
                ) from None


def _plain(value: Any) -> Any:
    """Return a value with mappings, numbers and texts of other classes as Python's own.

    Raises:
        TypeError: It is of another kind.
    """
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral):
        return float(value)
    if not isinstance(value, str | bool | None):
        raise TypeError(f"{type(value).__name__} is none")
    # Of a subclass: the text alone.
    return str(value) if isinstance(value, str) else value
