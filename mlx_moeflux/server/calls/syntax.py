"""The record of one syntax of tool calls, and the grammar of a reply that calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_moeflux.server.calls.reader import Parser, Reader, Tools
from mlx_moeflux.server.constrain import json_rule, quoted
from mlx_moeflux.server.errors import RequestError


class ArgumentRules(Protocol):
    """Grammar of arguments that are not JSON."""

    def rules(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Return Lark rules of the arguments of a schema; the first one is `name`.

        Raises:
            RequestError: Limits of an argument cannot be enforced.
        """
        ...

    def shared(self) -> str:
        """Return the Lark rules that all arguments share."""
        ...


@dataclass(frozen=True)
class ToolSyntax:
    """Syntax of the calls of a family of models.

    markers: Texts that all occur in the chat template of such a model.
    begin, end: Around calls; text outside is the answer.
    parse: (reader behind `begin`, tools) -> parser, which raises ValueError if there is no call.
    bare: Marks that begin calls too, as the model may leave `begin` out; the parser reads them.
        Behind them only functions of the request are called.
    call: (name, rule of its arguments) -> Lark grammar of one call, without begin and end.
    tags: Rules of arguments; None for arguments in JSON.
    text_arguments: The template wants the arguments of earlier calls as JSON text.
    grouped: One begin and end stand around all calls, else around each. between: Text between calls
        that each have theirs.
    ends_reply: The end is the token that ends a reply.
    tokens: Special ones inside of calls.
    """

    markers: tuple[str, ...]
    begin: str
    end: str
    parse: Callable[[Reader, Tools], Parser]
    call: Callable[[str, str], str]
    tags: ArgumentRules | None = None
    text_arguments: bool = False
    grouped: bool = False
    between: str = "\n"
    ends_reply: bool = False
    tokens: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin, *self.bare)

    @property
    def visible(self) -> tuple[str, ...]:
        """The special tokens that a grammar of calls spells as text."""
        return (self.begin, *(() if self.ends_reply else (self.end,)), *self.tokens)


def calls_grammar(
    syntax: ToolSyntax,
    tools: Tools,
    *,
    many: bool,
    answer: Sequence[Mapping[str, Any] | None] = (),
) -> str:
    """Return the Lark grammar of a reply that calls at least one of `tools`, `many` or one.

    answer: (schema,) allows JSON of a schema instead, (None,) any object.

    Raises:
        RequestError: A schema has limits that cannot be enforced in this syntax.
    """
    rules, names = [], []
    for i, (name, schema) in enumerate(tools.items()):
        arguments = f"arguments_{i}"
        if syntax.tags is None:
            rules.append(f"{arguments}: %json {json_rule({'type': 'object', **schema})}")
        else:
            try:
                rules += syntax.tags.rules(arguments, schema)
            except RequestError as error:
                raise RequestError(
                    f"'tools' cannot be enforced: in '{name[:80]}', {error}", param="tools"
                ) from error
        rules.append(f"call_{i}: {syntax.call(name, arguments)}")
        names.append(f"call_{i}")
    begin, end = quoted(syntax.begin), "" if syntax.ends_reply else quoted(syntax.end)
    many = many and not syntax.ends_reply
    one = f"({' | '.join(names)})"
    if syntax.grouped:
        start = f"{begin} {one}{'+' if many else ''} {end}"
    else:
        start = f"{begin} {one} {end}"
        start += f" ({quoted(syntax.between)} {start})*" if many else ""
    shared = [] if syntax.tags is None else [syntax.tags.shared()]
    for schema in answer:
        whole = {"type": "object"} if schema is None else schema
        shared.append(f"answer: %json {json_rule(whole)}")
        start += " | answer"
    return "\n".join([f"start: {start}", *rules, *shared])


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Return the schemas of tools in OpenAI's form."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
