"""``call:name{key:value}``, as Gemma-4 writes a call: keys are bare, texts stand between marks, and
arrays and objects hold the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_moeflux.server.calls.reader import (
    CLOSE,
    CallPart,
    Parser,
    Parts,
    Reader,
    Tools,
    json_text,
)
from mlx_moeflux.server.calls.syntax import ToolSyntax
from mlx_moeflux.server.constrain import json_rule, quoted
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.json_guard import MOST_DEPTH
from mlx_moeflux.server.schemas import ANY, ANY_TEXT, TEXT, ArgumentsSchema, only_types

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_ANY = ArgumentsSchema({})
_VALUE_END = re.compile(r"[,}\]]")
_MARKS = re.compile(r'[,{}\[\]<>"]')
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
# Keywords of arrays and objects that no rule below enforces.
_ARRAYS = ("prefixItems", "contains", "uniqueItems", "unevaluatedItems")
_OBJECTS = ("patternProperties", "propertyNames", "minProperties", "maxProperties")
_UNIONS = ("anyOf", "oneOf", "not", "if")
MOST_GRAMMAR_DEPTH = 8


def _parse(reader: Reader, tools: Tools) -> Parser:
    yield from reader.take("call:")
    name = yield from reader.name("{")
    yield from reader.take("{")
    yield CallPart(name, "{")
    yield from _read_members(reader, ArgumentsSchema(tools.get(name, {})), 0)
    yield from reader.take(END, optional=True)
    yield CLOSE


def _read_members(reader: Reader, schema: ArgumentsSchema, depth: int) -> Parts:
    """Read the members of an object up to its end; yield them as JSON."""
    keys: set[str] = set()
    mark = "," if (yield from reader.next()) != "}" else (yield from reader.take("}"))
    while mark == ",":
        key = (yield from reader.name(":")).removeprefix(QUOTE).removesuffix(QUOTE)
        if key in keys or _MARKS.search(key):
            raise ValueError("a key twice, or none")
        yield from reader.take(":")
        yield CallPart(arguments=f"{', ' if keys else ''}{json_text(key)}: ")
        keys.add(key)
        yield from _read_value(reader, schema, schema.argument(key), depth)
        mark = yield from reader.take(",", "}")


def _read_value(reader: Reader, schema: ArgumentsSchema, of: Any, depth: int) -> Parts:
    """Read a value; yield it as JSON. of: Its own schema, which says what a value without marks
    is; inside arrays and objects it is JSON, or else a text."""
    if depth > MOST_DEPTH:
        raise ValueError("nested too deep")
    yield from reader.next()
    while (rest := reader.text[reader.at : reader.at + len(QUOTE)]) != QUOTE:
        if not QUOTE.startswith(rest) or reader.ended:
            break
        yield None
    if rest == QUOTE:
        reader.at += len(QUOTE)
        yield CallPart(arguments='"')
        yield from reader.value(QUOTE, (",",), ("}",), ("]",), shown=True)
        yield CallPart(arguments='"')
    elif rest.startswith("{"):
        reader.at += 1
        yield CallPart(arguments="{")
        yield from _read_members(reader, _ANY, depth + 1)
        yield CallPart(arguments="}")
    elif rest.startswith("["):
        reader.at += 1
        yield CallPart(arguments="[")
        mark = "," if (yield from reader.next()) != "]" else (yield from reader.take("]"))
        count = 0
        while mark == ",":
            yield CallPart(arguments=", " * bool(count))
            yield from _read_value(reader, _ANY, {}, depth + 1)
            mark, count = (yield from reader.take(",", "]")), count + 1
        yield CallPart(arguments="]")
    else:
        place = reader.at
        while (end := _VALUE_END.search(reader.text, place)) is None:
            if reader.ended:
                raise ValueError("no end of a value")
            place = len(reader.text)
            yield None
        text, reader.at = reader.text[reader.at : end.start()].strip(), end.start()
        if not text:
            raise ValueError("no value")
        yield CallPart(arguments=json_text(schema.value(text, of)))


class MarkedArguments:
    """Does what :class:`~mlx_moeflux.server.calls.tagged.Tags` does, for arguments with marks."""

    def rules(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Return Lark rules of the arguments in the schema's order; the first one is `name`.

        Raises:
            RequestError: Limits of an argument cannot be enforced.
        """
        rules: list[str] = []
        body = _members(name, ArgumentsSchema(schema), rules, 0)
        return [f"{name}: {body}", *rules]

    def shared(self) -> str:
        """Return the Lark rules that all arguments without limits share."""
        comma, one_of = quoted(","), json_rule({"type": ["number", "boolean", "null"]})
        forms = (
            f"%json {one_of}",
            f"{quoted(QUOTE)} text_value",
            f"{quoted('[')} (any_value ({comma} any_value)*)? {quoted(']')}",
            f"{quoted('{')} (any_member ({comma} any_member)*)? {quoted('}')}",
        )
        return "\n".join(
            [
                f"text_value[suffix={quoted(QUOTE)}]: /{ANY_TEXT}/",
                "KEY: /[A-Za-z0-9_.$-]+/",
                f"any_member: KEY {quoted(':')} any_value",
                f"any_value: {' | '.join(forms)}",
            ]
        )


def _members(name: str, arguments: ArgumentsSchema, rules: list[str], depth: int) -> str:
    """Return the expression of an object's members, without its braces; add to `rules`."""
    # The members from one on, before and behind the first that is there.
    first = then = '""'
    required = arguments.required()
    for i, (key, schema) in reversed(list(enumerate(arguments.arguments().items()))):
        own = f"{name}_{i}"
        try:
            inner = _value(own, arguments, schema, rules, depth)
        except RequestError as error:
            raise RequestError(f"of the argument '{key[:80]}', {error}") from error
        one = f"{quoted(key, ':')} {inner}"
        without = ("", "") if key in required else (f" | {first}", f" | {then}")
        rules.append(f"{own}_first: {one} {then}{without[0]}")
        rules.append(f"{own}_then: {quoted(',')} {one} {then}{without[1]}")
        first, then = f"{own}_first", f"{own}_then"
    return first


def _value(name: str, arguments: ArgumentsSchema, schema: Any, rules: list[str], depth: int) -> str:
    """Return the expression of a value; add to `rules`."""
    types, choices = arguments.types(schema), arguments.choices(schema)
    if choices is None and types == ANY and not _says_more(arguments, schema):
        return "any_value"
    if depth > MOST_GRAMMAR_DEPTH:
        raise RequestError("it is nested too deep, or refers to itself")
    forms = []
    if scalars := types & _SCALARS:
        forms.append(f"%json {json_rule(arguments.standalone(only_types(schema, scalars)))}")
    if "string" in types:
        inner, pattern = "text_value", arguments.text_pattern(only_types(schema, TEXT), QUOTE)
        if pattern is not None:
            inner, text = f"{name}_text", f"TEXT_{name}".upper()
            rules.append(f"{inner}[suffix={quoted(QUOTE)}]: {text}")
            rules.append(f"{text}: {pattern}")
        forms.append(f"{quoted(QUOTE)} {inner}")
    if "array" in types:
        forms.append(_array(name, arguments, schema, rules, depth))
    if "object" in types:
        forms.append(_object(name, arguments, schema, rules, depth))
    if not forms:
        raise RequestError("it allows no value")
    return f"({' | '.join(forms)})"


def _array(name: str, arguments: ArgumentsSchema, schema: Any, rules: list[str], depth: int) -> str:
    parts = _enforced(arguments, schema, _ARRAYS)
    items = [part["items"] for part in parts if "items" in part]
    one = _value(f"{name}_item", arguments, {"allOf": items}, rules, depth + 1)
    rules.append(f"{name}_item: {one}")
    least = max(part.get("minItems", 0) for part in parts)
    most = min((part["maxItems"] for part in parts if "maxItems" in part), default=None)
    if most is not None and most < max(least, 1):
        return quoted("[]")
    more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    body = f"{name}_item ({quoted(',')} {name}_item){more}"
    return f"{quoted('[')} {body if least else f'({body})?'} {quoted(']')}"


def _object(
    name: str, arguments: ArgumentsSchema, schema: Any, rules: list[str], depth: int
) -> str:
    parts = _enforced(arguments, schema, _OBJECTS)
    inside = ArgumentsSchema(arguments.standalone(schema))
    if inside.arguments():
        return f"{quoted('{')} {_members(name, inside, rules, depth + 1)} {quoted('}')}"
    others = [part["additionalProperties"] for part in parts if "additionalProperties" in part]
    if inside.required() or False in others:
        raise RequestError("members that no property names cannot be enforced")
    given = [other for other in others if isinstance(other, Mapping)]
    one = _value(f"{name}_other", arguments, {"allOf": given}, rules, depth + 1)
    rules.append(f"{name}_other: KEY {quoted(':')} {one}")
    body = f"{name}_other ({quoted(',')} {name}_other)*"
    return f"{quoted('{')} ({body})? {quoted('}')}"


def _enforced(
    arguments: ArgumentsSchema, schema: Any, refused: Iterable[str]
) -> list[Mapping[str, Any]]:
    """Return the schemas that hold together.

    Raises:
        RequestError: One has a keyword of `refused`, a union or a list of values.
    """
    parts = arguments.parts(schema)
    for word in (*refused, *_UNIONS, "enum", "const"):
        if any(part.get(word) for part in parts):
            raise RequestError(f"'{word}' of an array or object cannot be enforced")
    return parts or [{}]


def _says_more(arguments: ArgumentsSchema, schema: Any) -> bool:
    """Return True if a schema has more than words about it."""
    words = {"allOf", "title", "description", "default", "examples"}
    return any(part.keys() - words for part in arguments.parts(schema))


SYNTAX = ToolSyntax(
    markers=(BEGIN, END, QUOTE),
    begin=BEGIN,
    end=END,
    parse=_parse,
    call=lambda name, rule: f'{quoted("call:", name, "{")} {rule} "}}"',
    tags=MarkedArguments(),
    between="",
    tokens=(QUOTE,),
)
