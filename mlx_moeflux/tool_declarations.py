"""Tools as Kimi's own tokenizers pass them to the chat template.

Kimi-K2 and later sort the keys of tools. Kimi-K2.5's template shows `tools_ts_str`, declarations in
the manner of TypeScript, and JSON only where there are none::

    namespace functions {
    // Look something up.
    type look = (_: {
      // The key.
      key: string,
      [k: string]: never
    }) => any;
    }

Source: `tokenization_kimi.py` and `tool_declaration_ts.py` of moonshotai/Kimi-K2.5.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_STEP = "  "
_NAMES = {
    "integer": "number", "object": "{}", "array": "Array<any>", "string": "string",
    "number": "number", "boolean": "boolean", "null": "null",
}  # fmt: skip
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_CLASSES: dict[str, Any] = {"string": str, "number": (int, float), "integer": int, "boolean": bool}


def as_declared(
    template: str, tools: Sequence[dict[str, Any]] | None
) -> tuple[Sequence[dict[str, Any]] | None, dict[str, Any]]:
    """Return tools as Kimi's templates expect them, and further variables; those of other templates
    as they are."""
    if not tools or "tool_declare" not in template:
        return tools, {}
    tools = _sorted(tools)
    assert tools is not None
    if "tools_ts_str" not in template:
        return tools, {}
    try:
        return tools, {"tools_ts_str": declarations(tools)}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return tools, {}  # a schema that has no such form: JSON, as the source falls back to


def declarations(tools: Sequence[dict[str, Any]]) -> str:
    """Return the declarations of tools in OpenAI's form.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: A schema cannot be written so.
    """
    functions = [_Function(tool["function"]).text() for tool in tools]
    return "\n".join(["# Tools\n\n## functions\nnamespace functions {", *functions, "}\n"])


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(inner) for inner in value] if isinstance(value, list | tuple) else value


def _comment(text: str, indent: str = "") -> list[str]:
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")] if text else []


class _Function:
    """One function: its schema as types, with an interface for each definition."""

    def __init__(self, function: dict[str, Any]):
        self._function = function
        self._definitions: dict[str, Any] = {}
        self._recursive = False

    def text(self) -> str:
        schema = self._function.get("parameters") or {}
        parameters, lines = self._object(schema, ""), []
        if self._recursive:
            properties = self._properties(schema, _STEP, list(schema["properties"]))
            lines.append(f"interface parameters {_braces(properties, '')}")
            parameters = "parameters"
        for name, definition in list(self._definitions.items()):
            body = self._type(definition, "")
            lines += [*_comment(definition.get("description", "")), f"interface {name} {body}"]
        lines += _comment(self._function.get("description") or "")
        name = self._function.get("name", "function")
        return "\n".join([*lines, f"type {name} = (_: {parameters}) => any;"])

    def _type(self, schema: Any, indent: str) -> str:
        """Return the type of the values that a schema allows."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(one, indent) for one in schema["anyOf"])
        if "enum" in schema:
            return _choices(schema)
        if not schema:
            return "any"
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_NAMES[one] for one in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema.get("items"), indent)
        if not isinstance(kind, str):
            raise ValueError(f"no type in {schema}")
        return _NAMES.get(kind, kind)

    def _reference(self, place: str) -> str:
        if place == "#":
            self._recursive = True
            return "parameters"
        name = place.removeprefix("#/$defs/")
        if name == place or name not in self._definitions:
            raise ValueError(f"no definition at {place}")
        return name

    def _array(self, items: Any, indent: str) -> str:
        items = items or {}
        comment = _described(items, indent + _STEP)
        if not comment:
            return f"Array<{self._type(items, indent)}>"
        inner = f"{indent}{_STEP}{self._type(items, indent + _STEP)}"
        return "\n".join(["Array<", *comment, inner, f"{indent}>"])

    def _object(self, schema: dict[str, Any], indent: str) -> str:
        self._definitions |= schema.get("$defs") or {}
        required, inner = schema.get("required", []), indent + _STEP
        names = sorted(schema.get("properties", {}), key=lambda name: (name not in required, name))
        properties = self._properties(schema, inner, names)
        others = schema.get("additionalProperties")
        if others is not None:
            kind = "never" if others is False else self._type(others, inner)
            properties.append(f"{inner}[k: string]: {kind}")
        return _braces(properties, indent)

    def _properties(self, schema: dict[str, Any], indent: str, names: list[str]) -> list[str]:
        required, found = schema.get("required", []), []
        for name in names:
            value = schema["properties"][name]
            lines = _described(value, indent)
            default = value.get("default") if isinstance(value, dict) else None
            if default is not None:
                plain = isinstance(default, int | float)
                shown = repr(default) if plain else json.dumps(default, ensure_ascii=False)
                lines.append(f"{indent}// Default: {shown}")
            mark = "" if name in required else "?"
            lines.append(f"{indent}{name}{mark}: {self._type(value, indent)}")
            found.append("\n".join(lines))
        return found


def _braces(properties: list[str], indent: str) -> str:
    return "\n".join(["{", ",\n".join(properties), f"{indent}}}"]) if properties else "{}"


def _described(schema: Any, indent: str) -> list[str]:
    """Return the comments on a value: its description and its limits."""
    if not isinstance(schema, dict):
        return []
    lines = _comment(schema.get("description", ""), indent)
    special = "$ref" in schema or "anyOf" in schema or "enum" in schema
    kind = schema.get("type")
    known = _CONSTRAINTS.get(kind, ()) if isinstance(kind, str) and not special else ()
    if limits := [f"{name}: {schema[name]}" for name in known if name in schema]:
        lines.append(f"{indent}// {', '.join(limits)}")
    return lines


def _choices(schema: dict[str, Any]) -> str:
    """Return the values of an `enum`, which must be of its type."""
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [one for one in kind if one != "null"] or kind
        if len(kind) > 2 or len(kinds) > 1:
            raise ValueError(f"an enum of several types, {kind}")
        (kind,) = kinds[:1]
    expected = _CLASSES.get(kind, object) if kind else object
    if any(value is not None and not isinstance(value, expected) for value in schema["enum"]):
        raise ValueError(f"an enum with values that are no {kind}")
    return " | ".join(
        f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"]
    )
