"""JSON schemas of a function's arguments: types, values of texts, and rules for grammars."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.json_guard import read_json

ANY = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
TEXT = frozenset({"string"})

# A schema whose references lead deeper than this says nothing.
MOST_STEPS = 64
MOST_TEXT_FORMS = 64

_UNIONS = ("anyOf", "oneOf")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DATA = ("enum", "const", "default", "examples")
_ROOT = "__root"

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(
    r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*"|['"].*|\b(?:True|False|None)\b""",
    re.DOTALL,
)

# JSON texts of the scalars that have no finite list, as Lark regexes.
_INTEGER = "-?(?:0|[1-9][0-9]*)"
_SCALARS = {
    "null": "null",
    "boolean": "(?:true|false)",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
ANY_TEXT = "(?s:.*)"


class ArgumentsSchema:
    """The JSON schema of a function's arguments, with the references inside it.

    Only references into the schema itself are followed; others say nothing. A schema that is no
    object says nothing either.
    """

    def __init__(self, schema: Mapping[str, Any]):
        self._root = schema
        # By the id of a schema; _known keeps these schemas, so that no other gets their ids.
        self._types: dict[int, frozenset[str]] = {}
        self._choices: dict[int, dict[str, Any] | None] = {}
        self._known: list[Any] = []

    def arguments(self) -> dict[str, Any]:
        """Return name -> schema of the arguments that the schema lists for every call."""
        found: dict[str, list[Any]] = {}
        for part in self.parts(self._root):
            for name, schema in _mapping(part.get("properties")).items():
                found.setdefault(name, []).append(schema)
        return {name: _together("allOf", schemas) for name, schemas in found.items()}

    def required(self) -> set[str]:
        """Return the names of the arguments that every call has."""
        lists = [_list(part.get("required")) for part in self.parts(self._root)]
        return {name for names in lists for name in names if isinstance(name, str)}

    def argument(self, name: str) -> Any:
        """Return the schema of one argument, {} if there is none."""
        found = self._argument(self._root, name, 0)
        if found is None:
            extra = [part.get("additionalProperties") for part in self.parts(self._root)]
            found = next((schema for schema in extra if isinstance(schema, dict)), {})
        return found

    def types(self, schema: Any) -> frozenset[str]:
        """Return the JSON types that a schema allows; a float that is whole is a number."""
        return self._types_of(schema, 0)

    def choices(self, schema: Any) -> list[Any] | None:
        """Return the values that a schema lists (enum, const, null), or None if it lists none."""
        found = self._choices_of(schema, 0)
        return None if found is None else list(found.values())

    def value(self, text: str, schema: Any) -> Any:
        """Return the value that `text` stands for, where texts have no quotation marks.

        A schema that allows texts alone gets `text`. Otherwise it is a listed value, or JSON, or
        Python's spelling of JSON, of a type that is allowed; else `text` if texts are allowed. A
        schema without types takes JSON of any type. A number stays a text where texts are allowed
        and the number would not be written in the same way.
        """
        types = self.types(schema)
        choices = self._choices_of(schema, 0)
        if types == TEXT or (choices is not None and _key(text) in choices):
            return text
        try:
            value = _read(text)
        except ValueError:
            return text
        if choices is not None and _key(value) in choices:
            return value
        kind = _type(value)
        if "string" not in types:
            whole = kind == "number" and "integer" in types and "number" not in types
            return int(value) if whole and value.is_integer() else value
        if kind == "string":
            return value if types == ANY else text
        if kind in ("integer", "number") and json.dumps(value) != text.strip():
            return text
        return value if kind in types else text

    def standalone(self, schema: Any) -> Any:
        """Return a schema with the same meaning outside of this one: references go along."""
        moved = _moved(schema)
        if moved == schema:
            return schema
        return {**moved, "$defs": {**_mapping(moved.get("$defs")), _ROOT: _moved(self._root)}}

    def text_pattern(self, schema: Any, end: str) -> str | None:
        """Return the Lark terminal of the texts before `end` that a schema with texts allows.

        None allows every text. Other scalars that the schema allows are written as JSON.

        Raises:
            RequestError: Its limits cannot be enforced between tags.
        """
        choices = self.choices(schema)
        if choices == []:
            raise RequestError("it allows no value")
        if choices is not None:
            return " | ".join(f"/{_literal(text_of(choice))}/" for choice in choices)
        rows = self._text_rows(schema, 0)
        if () in rows:
            return None
        others = self.types(schema) - TEXT
        if others - _SCALARS.keys():
            raise RequestError("texts with limits cannot stand beside arrays and objects")
        forms = [" & ".join(f"/{regex}/" for regex in row) for row in rows]
        forms += [f"/{_SCALARS[name]}/" for name in sorted(others)]
        inside = f"/{ANY_TEXT}{_literal(end)}{ANY_TEXT}/"
        return f"({' | '.join(f'({form})' for form in forms)}) & ~{inside}"

    def parts(self, schema: Any) -> list[Mapping[str, Any]]:
        """Return the schemas that hold together: one, what it refers to, and their allOf."""
        waiting, found, seen = [schema], [], set()
        for one in waiting:
            if not isinstance(one, Mapping) or id(one) in seen:
                continue
            seen.add(id(one))
            found.append(one)
            if isinstance(one.get("$ref"), str):
                waiting.append(self._target(one["$ref"]))
            waiting += _list(one.get("allOf"))
        return found

    def _target(self, reference: str) -> Any:
        """Return the schema that a reference names, or None."""
        if not (reference == "#" or reference.startswith("#/")):
            return None
        node: Any = self._root
        for name in unquote(reference).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and len(name) < 6:
                node = node[int(name)] if int(name) < len(node) else None
            else:
                node = node.get(name) if isinstance(node, Mapping) else None
        return node

    def _argument(self, schema: Any, name: str, steps: int) -> Any:
        found = []
        for part in self.parts(schema) if steps < MOST_STEPS else ():
            properties = _mapping(part.get("properties"))
            if name in properties:
                found.append(properties[name])
            for union in _UNIONS:
                inner = [self._argument(one, name, steps + 1) for one in _list(part.get(union))]
                if given := [one for one in inner if one is not None]:
                    found.append(_together("anyOf", given))
        return _together("allOf", found) if found else None

    def _types_of(self, schema: Any, steps: int) -> frozenset[str]:
        if id(schema) in self._types:
            return self._types[id(schema)]
        parts = self.parts(schema)
        if not parts or steps > MOST_STEPS:
            return ANY
        self._known.append(schema)
        self._types[id(schema)] = frozenset()  # a union with itself adds nothing
        types = ANY
        for part in parts:
            types &= _own_types(part)
            for union in _UNIONS:
                if options := _list(part.get(union)):
                    types &= frozenset().union(*(self._types_of(o, steps + 1) for o in options))
        if any(part.get("nullable") is True for part in parts):
            types |= {"null"}
        self._types[id(schema)] = types
        return types

    def _choices_of(self, schema: Any, steps: int) -> dict[str, Any] | None:
        """Return JSON -> value of the listed values."""
        if id(schema) in self._choices:
            return self._choices[id(schema)]
        if steps > MOST_STEPS:
            return None
        self._known.append(schema)
        self._choices[id(schema)] = {}
        found: dict[str, Any] | None = None
        parts = self.parts(schema)
        for own in (own for part in parts for own in self._own_choices(part, steps)):
            found = own if found is None else {k: v for k, v in found.items() if k in own}
        if found is not None:
            types = self.types(schema)
            found = {key: value for key, value in found.items() if _type(value) in types}
            if any(part.get("nullable") is True for part in parts):
                found["null"] = None
        self._choices[id(schema)] = found
        return found

    def _own_choices(self, part: Mapping[str, Any], steps: int) -> Iterator[dict[str, Any]]:
        if isinstance(part.get("enum"), list):
            yield {_key(value): value for value in part["enum"]}
        if "const" in part:
            yield {_key(part["const"]): part["const"]}
        if _own_types(part) == {"null"}:
            yield {"null": None}
        for union in _UNIONS:
            options = [self._choices_of(one, steps + 1) for one in _list(part.get(union))]
            if options and None not in options:
                yield {key: value for one in options if one for key, value in one.items()}

    def _text_rows(self, schema: Any, steps: int) -> list[tuple[str, ...]]:
        """Return the forms of a schema's texts, each as regexes that all hold."""
        if steps > MOST_STEPS:
            raise RequestError("it refers to itself")
        least, most = 0, None
        rows: list[tuple[str, ...]] = [()]
        for part in self.parts(schema):
            least = max(least, _count(part, "minLength") or 0)
            if (limit := _count(part, "maxLength")) is not None:
                most = limit if most is None else min(most, limit)
            if isinstance(part.get("pattern"), str):
                rows = [(*row, _searched(part["pattern"])) for row in rows]
            for own in _own_lists(part):
                texts = [_literal(value) for value in own if isinstance(value, str)]
                rows = [(*row, f"(?:{'|'.join(texts)})") for row in rows]
            for union in _UNIONS:
                if options := _list(part.get(union)):
                    given = [o for o in options if "string" in self.types(o)]
                    forms = [row for o in given for row in self._text_rows(o, steps + 1)]
                    rows = [row + form for row in rows for form in forms]
            if len(rows) > MOST_TEXT_FORMS:
                raise RequestError(f"its texts have more than {MOST_TEXT_FORMS} forms")
        if least or most is not None:
            size = f"(?s:.{{{least},{'' if most is None else most}}})"
            rows = [(*row, size) for row in rows]
        return rows


def _own_lists(part: Mapping[str, Any]) -> Iterator[list[Any]]:
    if isinstance(part.get("enum"), list):
        yield part["enum"]
    if "const" in part:
        yield [part["const"]]


def _together(how: str, schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {how: schemas}


def only_types(schema: Any, types: Iterable[str]) -> dict[str, Any]:
    """Return a schema of the values of `types` that `schema` allows."""
    return {"allOf": [schema, {"type": sorted(types)}]}


def text_of(value: Any) -> str:
    """Return a value as it stands between tags: a text as it is, everything else as JSON."""
    return value if isinstance(value, str) else _key(value)


def _key(value: Any) -> str:
    """Return the JSON of a value, which tells 1, 1.0, true and "1" apart."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(part: Mapping[str, Any], name: str) -> int | None:
    value = part.get(name)
    return value if type(value) is int and value >= 0 else None


def _own_types(part: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows, without what it refers to."""
    types, given = ANY, part.get("type")
    names = {str(name).lower() for name in (given if isinstance(given, list) else [given])}
    if names <= ANY:
        types = frozenset(names | {"integer"} if "number" in names else names)
    for values in _own_lists(part):
        own = {_type(value) for value in values}
        types &= own | {"integer"} if "number" in own else own
    return types


def _read(text: str) -> Any:
    """Return the value of JSON, or of what Python prints for a JSON value other than a text."""
    try:
        return read_json(text)
    except ValueError:
        try:
            value = read_json(_PYTHON.sub(_python_as_json, text))
        except SyntaxError:
            raise ValueError("neither JSON nor Python") from None
        if isinstance(value, str):
            raise
        return value


def _python_as_json(match: re.Match[str]) -> str:
    word = match[0]
    if word[0] in "'\"" and (len(word) == 1 or word[-1] != word[0]):
        raise ValueError("a text has no end")
    return _PYTHON_WORDS.get(word) or json.dumps(ast.literal_eval(word))


def _moved(value: Any, *, names: bool = False) -> Any:
    """Return a schema whose references into its document lead to _ROOT. names: `value` has
    schemas under names of a user's choice."""
    if isinstance(value, list):
        return [_moved(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    moved = {}
    for key, inner in value.items():
        if names:
            moved[key] = _moved(inner)
        elif key == "$ref" and isinstance(inner, str) and inner.startswith("#"):
            moved[key] = f"#/$defs/{_ROOT}{inner[1:]}"
        else:
            moved[key] = inner if key in _DATA else _moved(inner, names=key in _NAMED)
    return moved


def without_nulls(value: Any, *, names: bool = False) -> Any:
    """Return a schema without keywords whose value is null, which servers in Go and C++ write for
    missing ones. Null stays where it is a value: in enum, const, default and examples. names: See
    :func:`_moved`."""
    if isinstance(value, list):
        return [without_nulls(one) for one in value if one is not None]
    if not isinstance(value, Mapping):
        return value
    if names:
        return {name: {} if one is None else without_nulls(one) for name, one in value.items()}
    return {
        key: inner if key in _DATA else without_nulls(inner, names=key in _NAMED)
        for key, inner in value.items()
        if inner is not None or key in _DATA
    }


def _literal(text: str) -> str:
    """Return a Lark regex of a text."""
    return "".join(f"\\{c}" if c in r"\.+*?()|[]{}^$#&-~/" else _spelled(c) for c in text)


def _spelled(character: str) -> str:
    return character if character.isprintable() else f"\\u{{{ord(character):x}}}"


def _searched(pattern: str) -> str:
    """Return a Lark regex of the texts in which a JSON schema's pattern is found."""
    found = []
    for one in _alternatives(pattern):
        tail = one.endswith("$") and (len(one) - len(one[:-1].rstrip("\\"))) % 2 == 1
        body = one[one.startswith("^") : len(one) - tail]
        before, after = ("" if one.startswith("^") else ANY_TEXT), ("" if tail else ANY_TEXT)
        found.append(f"{before}(?:{body}){after}")
    return "|".join(f"(?:{one})" for one in found)


def _alternatives(pattern: str) -> list[str]:
    """Return the parts of a regex between its outermost bars, with slashes and line breaks
    escaped for Lark."""
    found, depth, in_class = [""], 0, False
    for token in re.findall(r"\\.|.", pattern, re.DOTALL):
        if token == "|" and not depth and not in_class:
            found.append("")
            continue
        if not in_class:
            depth += {"(": 1, ")": -1}.get(token, 0)
        in_class = token == "[" or (in_class and token != "]")
        found[-1] += {"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(token, token)
    return found
