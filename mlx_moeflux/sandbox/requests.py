"""Requests to the child process: rendering a chat template, and the trial of a tokenizer."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from mlx_moeflux import user_cache
from mlx_moeflux.errors import CheckpointError, InputError, UnsupportedError
from mlx_moeflux.sandbox.process import MEMORY_BYTES, SECONDS, Broken, Refused, child
from mlx_moeflux.tokenizer_backends import LIBRARIES

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
MEGABYTE = 1_000_000
# The vocabulary of a tokenizer as hash tables, by the bytes of its file.
MEMORY_PER_BYTE = 32


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


def check_tokenizer(kind: str, content: bytes, file: Path) -> None:
    """Build a tokenizer and try it once in the child, unless one with this content passed before.

    kind: See :func:`~mlx_moeflux.tokenizer_backends.backend_of`. A failure is not kept: on a busy
    machine it may be one of time.

    Raises:
        CheckpointError: It cannot be built, or fails at a short text.
    """
    version = importlib.import_module(LIBRARIES[kind]).__version__
    known = hashlib.blake2b(f"{kind} {version} ".encode() + content, digest_size=20).hexdigest()
    folder = user_cache.private("tokenizers")
    if folder is not None and (folder / known).exists():
        return
    try:
        child.call(
            "tokenizer",
            {"kind": kind},
            content,
            seconds=SECONDS + len(content) / MEGABYTE,
            memory_bytes=MEMORY_BYTES + MEMORY_PER_BYTE * len(content),
        )
    except (Refused, Broken) as error:
        reason = str(error).rstrip(".")
        raise CheckpointError(f"{file} is not a tokenizer ({reason}); fetch it again.") from None
    if folder is not None:
        with contextlib.suppress(OSError):
            user_cache.write(folder / known, b"")


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
