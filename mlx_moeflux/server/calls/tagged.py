"""Arguments between tags: how calls with them are read, and their grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_moeflux.server.calls.reader import (
    CLOSE,
    CallPart,
    NextTag,
    Parser,
    Parts,
    Reader,
    Tools,
    json_text,
)
from mlx_moeflux.server.constrain import json_rule, quoted
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.schemas import ANY, ANY_TEXT, TEXT, ArgumentsSchema, only_types

_NO_TEXT = {"type": sorted(ANY - TEXT)}


class TaggedCall:
    """A call whose arguments stand between tags; its schema says what they are."""

    def __init__(self, name: str, tools: Tools):
        self._name, self._known = name, name in tools
        self._schema = ArgumentsSchema(tools.get(name, {}))
        self._keys: set[str] = set()

    @property
    def has_all(self) -> bool:
        """Return True if the function is known and no argument that it requires is missing."""
        return self._known and self._schema.required() <= self._keys

    def argument(
        self,
        reader: Reader,
        key: str,
        mark: str,
        *rows: tuple[str, ...],
        next_tag: NextTag | None = None,
        text: bool | None = None,
    ) -> Parts:
        """Read the value of an argument, see :meth:`Reader.value`.

        text: The call says whether it is a text. None: the schema decides, and may turn a non-text
        into text.
        """
        schema = self._schema.argument(key)
        shown = text or self._schema.types(schema) == TEXT
        if text is False:
            schema = _NO_TEXT
        head = f"{json_text(key)}: "
        begun = CallPart(arguments=", ") if self._keys else CallPart(self._name, "{")
        self._keys.add(key)
        begun += CallPart(arguments=head + '"' * shown)
        if shown:
            yield begun
        value = yield from reader.value(mark, *rows, shown=shown, next_tag=next_tag)
        if shown:
            yield CallPart(arguments='"')
        else:
            yield begun + CallPart(arguments=json_text(self._schema.value(value, schema)))

    def end(self) -> Parts:
        """Yield the last part."""
        yield CLOSE if self._keys else CallPart(self._name, "{}", whole=True)

    def lacks(self, key: str) -> bool:
        """Return True if an argument of the schema is still missing."""
        return key not in self._keys and key in self._schema.arguments()


def parse_invoked(
    reader: Reader, tools: Tools, prefix: str, last: str, kinds: Mapping[str, bool | None]
) -> Parser:
    """Parse calls between ``invoke`` tags, as MiniMax-M2 writes them, up to the mark `last`.

    prefix: Before the name of each tag. kinds: Mark behind a key -> whether the value is a text;
    None leaves it to the schema.
    """
    invoke, argument = f'<{prefix}invoke name="', f'<{prefix}parameter name="'
    end, close = f"</{prefix}invoke>", f"</{prefix}parameter>"
    rows = (argument,), (end, invoke), (end, last)
    while (yield from reader.take(invoke, last, optional=True)) == invoke:
        call = TaggedCall((yield from reader.name('"')), tools)
        yield from reader.take('">')
        while (yield from reader.take(argument, end)) == argument:
            key = yield from reader.name('"')
            text = kinds[(yield from reader.take(*kinds))]
            yield from call.argument(reader, key, close, *rows, text=text)
        yield from call.end()


@dataclass(frozen=True)
class Tags:
    """Tags around the value of each argument, for grammars.

    begin: Key -> Lark expression of the text that opens a value. end: Text that closes it. after:
    Lark expression of the text behind it.
    """

    begin: Callable[[str], str]
    end: str
    after: str

    def rules(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Return Lark rules of the arguments in the schema's order; the first one is `name`.

        Texts go up to the closing tag, everything else is JSON.

        Raises:
            RequestError: The limits of a text cannot be enforced.
        """
        arguments, parts, rules = ArgumentsSchema(schema), [], []
        required = arguments.required()
        for i, (key, value) in enumerate(arguments.arguments().items()):
            try:
                inner = self._value(f"{name}_{i}", key, value, arguments, rules)
            except RequestError as error:
                raise RequestError(f"of the argument '{key[:80]}', {error}") from error
            part = f"{inner} {self.after}"
            parts.append(part if key in required else f"({part})?")
        body = " ".join(parts) or '""'
        return [f"{name}: {body}", *rules]

    def shared(self) -> str:
        """Return the Lark rule that all texts without limits share."""
        return self._suffixed("text_value", f"/{ANY_TEXT}/")

    def _value(
        self, name: str, key: str, schema: Any, arguments: ArgumentsSchema, rules: list[str]
    ) -> str:
        """Return the expression of a value with the tag that opens it; add to `rules`."""
        types = arguments.types(schema)
        write = self._text if "string" in types and types != ANY else self._json
        return f"{self.begin(key)} {write(name, schema, arguments, rules)}"

    def _text(self, name: str, schema: Any, arguments: ArgumentsSchema, rules: list[str]) -> str:
        pattern = arguments.text_pattern(schema, self.end)
        if pattern is None:
            return "text_value"
        text = f"TEXT_{name}".upper()
        rules += [self._suffixed(name, text), f"{text}: {pattern}"]
        return name

    def _json(self, name: str, schema: Any, arguments: ArgumentsSchema, rules: list[str]) -> str:
        return f"%json {json_rule(arguments.standalone(schema))} {quoted(self.end)}"

    def _suffixed(self, name: str, body: str) -> str:
        return f"{name}[suffix={quoted(self.end)}]: {body}"


@dataclass(frozen=True)
class TypedTags(Tags):
    """Tags that say which values are texts. begin: Of a text. begin_json: Of every other value."""

    begin_json: Callable[[str], str]

    def _value(
        self, name: str, key: str, schema: Any, arguments: ArgumentsSchema, rules: list[str]
    ) -> str:
        types, forms = arguments.types(schema), []
        if "string" in types:
            text = self._text(name, only_types(schema, TEXT), arguments, rules)
            forms.append(f"{self.begin(key)} {text}")
        if others := types - TEXT:
            value = self._json(name, only_types(schema, others), arguments, rules)
            forms.append(f"{self.begin_json(key)} {value}")
        if not forms:
            raise RequestError("it allows no value")
        return f"({' | '.join(forms)})"
