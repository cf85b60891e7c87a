"""Oracle: texts by hand, in the form of Kimi-K2.5's own tool_declaration_ts.py."""

from __future__ import annotations

import json

import pytest

from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.tokenizer import load_tokenizer
from mlx_moeflux.tool_declarations import as_declared, declarations

MESSAGES = [{"role": "user", "content": "a"}]
K2 = "tool_declare{{ tools | tojson(separators=(',', ':')) }}{{ messages[0].content }}"
K25 = (
    "{% if tools_ts_str %}tool_declare{{ tools_ts_str }}{% else %}{{ tools | tojson }}{% endif %}"
    "{{ messages[0].content }}"
)


def tool(parameters, name="f", **more):
    function = {"name": name, "parameters": parameters, **more}
    return {"type": "function", "function": function}


def declared(*tools):
    """What stands between the braces of the namespace."""
    text = declarations(tools)
    begin, end = "# Tools\n\n## functions\nnamespace functions {\n", "}\n"
    assert text.startswith(begin)
    assert text.endswith(end)
    return text.removeprefix(begin).removesuffix(end)


def argument(schema):
    """The type of an argument."""
    text = declared(tool({"type": "object", "properties": {"a": schema}, "required": ["a"]}))
    return text.removeprefix("type f = (_: {\n").removesuffix("\n}) => any;\n")


def test_a_whole_declaration():
    weather = tool(
        {
            "type": "object",
            "properties": {
                "unit": {"enum": ["C", "F"], "default": "C"},
                "days": {"type": "integer", "minimum": 1, "maximum": 7, "description": "How many"},
                "place": {"type": "string", "description": "City,\ncountry", "minLength": 2},
            },
            "required": ["place"],
            "additionalProperties": False,
        },
        "weather",
        description="Ask for the weather.\n\nOf a place.",
    )
    assert declarations([weather, tool({}, "now")]) == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "// Ask for the weather.\n\n// Of a place.\n"
        "type weather = (_: {\n"
        "  // City,\n  // country\n  // minLength: 2\n  place: string,\n"
        "  // How many\n  // maximum: 7, minimum: 1\n  days?: number,\n"
        '  // Default: "C"\n  unit?: "C" | "F",\n'
        "  [k: string]: never\n"
        "}) => any;\n"
        "type now = (_: {}) => any;\n}\n"
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "boolean", "default": True}, "  // Default: True\n  a: boolean"),
        ({"type": ["string", "null", "array"]}, "  a: string | null | Array<any>"),
        ({"type": "array", "items": {"type": "integer"}}, "  a: Array<number>"),
        ({"type": "array", "maxItems": 2}, "  // maxItems: 2\n  a: Array<any>"),
        ({"type": "array", "items": {"type": "string", "description": "One"}},
         "  a: Array<\n    // One\n    string\n  >"),
        ({"anyOf": [{"type": "string"}, {"type": "object", "properties": {"b": True}}]},
         "  a: string | {\n    b?: any\n  }"),
        ({"type": "object", "additionalProperties": {"type": "number"}},
         "  a: {\n    [k: string]: number\n  }"),
        ({"enum": [1, None, "x"], "type": ["string", "null"]}, None),
        ({"type": "string", "enum": ["x", None]}, '  a: "x" | None'),
        ({}, "  a: any"), (False, "  a: null"), ({"oneOf": []}, None), ({"type": ["any"]}, None),
        ({"$ref": "#/definitions/B"}, None), ({"$ref": "#/$defs/B"}, None),
    ],
    ids=str,
)  # fmt: skip
def test_types(schema, text):
    if text is not None:
        assert argument(schema) == text
        return
    with pytest.raises((ValueError, KeyError)):
        argument(schema)
    parameters = {"type": "object", "properties": {"a": schema}}
    assert as_declared(K25, [tool(parameters)])[1] == {}


def test_definitions_become_interfaces():
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/N"}},
        "description": "A node",
    }
    parameters = {
        "type": "object",
        "$defs": {"N": node},
        "properties": {"n": {"$ref": "#/$defs/N"}},
    }
    assert declared(tool(parameters, description="F")) == (
        "// A node\ninterface N {\n  next?: N\n}\n// F\ntype f = (_: {\n  n?: N\n}) => any;\n"
    )
    tree = {"type": "object", "properties": {"z": {"type": "string"}, "left": {"$ref": "#"}}}
    assert declared(tool(tree)) == (
        "interface parameters {\n  z?: string,\n  left?: parameters\n}\n"
        "type f = (_: parameters) => any;\n"
    )


def test_templates_get_tools_as_kimi_passes_them():
    """Through the tokenizer: sorted for K2, declared for K2.5, as they are for others."""
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    given = [tool({"type": "object", "properties": {"b": {"type": "string"}}}, description="d")]

    def shown(template, tools=given, **more):
        return tokenizer.apply_chat_template(
            MESSAGES, tools=tools, chat_template=template, tokenize=False, **more
        )

    whole = json.dumps(given, sort_keys=True, separators=(",", ":"))
    assert shown(K2) == f"tool_declare{whole}a"
    assert shown(K25) == f"tool_declare{declarations(given)}a"
    assert shown(K25, None) == "nulla"
    assert shown(K25, tools_ts_str="own") == "tool_declareowna"
    broken = [tool({"type": "object", "properties": {"b": {"oneOf": []}}})]
    assert shown(K25, broken) == json.dumps(broken, sort_keys=True) + "a"
    assert shown("{{ tools | tojson }}") == json.dumps(given)
    assert list(given[0]) == ["type", "function"]
