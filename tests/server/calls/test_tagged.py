"""Oracle: JSON schema's types, worked out by hand. What an argument is follows from its schema;
what a grammar forces is what the schema allows."""

from __future__ import annotations

import json

import pytest

from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.calls.registry import SYNTAXES
from mlx_moeflux.server.calls.splitter import ToolSplitter
from mlx_moeflux.server.calls.syntax import calls_grammar
from mlx_moeflux.server.constrain import Grammars
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.schemas import ArgumentsSchema
from mlx_moeflux.tokenizer import load_tokenizer

STRING, NULL = {"type": "string"}, {"type": "null"}
DEFS = {
    "Text": STRING,
    "Kind": {"type": "string", "enum": ["1", "2"]},
    "Size": {"type": "integer", "minimum": 3},
    "Maybe": {"anyOf": [{"$ref": "#/$defs/Text"}, NULL]},
    "Tree": {
        "type": "object",
        "properties": {"key": STRING, "next": {"$ref": "#/$defs/Tree"}},
        "required": ["key"],
        "additionalProperties": False,
    },
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, STRING]},
    "Self": {"$ref": "#/$defs/Self"},
    "a/b~c": STRING,
}


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


OBJECT = '{"name": 1}'
VALUES = [
    # A text stays a text.
    *[(STRING, text, text) for text in
      ("007", OBJECT, "true", "null", "None", "[1]", '"a"', " 1 ", "", "1e5", "NaN")],
    ({"type": "STRING"}, "1", "1"),
    (ref("Text"), "007", "007"), (ref("Kind"), "1", "1"), (ref("a~1b~0c"), "1", "1"),
    ({"allOf": [ref("Text")], "description": "d"}, "7", "7"),
    ({"allOf": [{"type": ["string", "integer"]}, STRING]}, "7", "7"),
    ({"enum": ["1", "2"]}, "1", "1"), ({"const": "true"}, "true", "true"),
    ({"oneOf": [{"const": "1"}, {"const": "2"}]}, "2", "2"),
    (ref("Loop"), "1", "1"),
    # A text or null.
    *[(schema, text, want)
      for schema in ({"type": ["string", "null"]}, {"type": "string", "nullable": True},
                     {"anyOf": [STRING, NULL]}, ref("Maybe"), {**ref("Text"), "nullable": True},
                     {"allOf": [ref("Text")], "nullable": True},
                     {"oneOf": [ref("Kind"), STRING, NULL]})
      for text, want in (("007", "007"), (OBJECT, OBJECT), ("true", "true"), ("null", None),
                         ("None", None), ("'a'", "'a'"), ("['a']", "['a']"), ("", ""),
                         ('"a"', '"a"'))],
    # Lists of mixed types.
    *[({"enum": ["auto", 1, 2.5, None, True, "3", {"a": 1}]}, text, want)
      for text, want in (("auto", "auto"), ("1", 1), ("2.5", 2.5), ("null", None), ("None", None),
                         ("true", True), ("True", True), ("3", "3"), ('{"a":1}', {"a": 1}))],
    ({"anyOf": [{"enum": ["a", "null"]}, NULL]}, "null", "null"),
    # Numbers, booleans and null.
    ({"type": "integer"}, "3", 3), ({"type": "integer"}, "3.0", 3), (ref("Size"), " 3\n", 3),
    ({"type": "number"}, "3", 3), ({"type": "number"}, "1e2", 100.0),
    ({"type": "boolean"}, "True", True), ({"type": "boolean"}, "false", False),
    ({"type": ["integer", "null"]}, "None", None), ({"type": ["integer", "null"]}, "4", 4),
    ({"type": "integer"}, "many", "many"), ({"type": "integer"}, "null", None),
    ({"anyOf": [{"type": "integer"}, STRING]}, "5", 5),
    ({"anyOf": [{"type": "integer"}, STRING]}, "007", "007"),
    ({"anyOf": [{"type": "number"}, STRING]}, "1.10", "1.10"),
    ({"anyOf": [{"type": "integer"}, STRING]}, "2.5", "2.5"),
    ({"type": ["boolean", "string"]}, "yes", "yes"),
    # Arrays and objects, as JSON or as Python prints them.
    ({"type": "array"}, '["a", 1]', ["a", 1]), ({"type": "array"}, "['a', None]", ["a", None]),
    ({"type": "array", "items": STRING}, "[\"it's\", 'true']", ["it's", "true"]),
    ({"type": "object"}, "{'a': True, 'b': ['x\\n']}", {"a": True, "b": ["x\n"]}),
    (ref("Tree"), '{"key": "1"}', {"key": "1"}),
    ({"type": ["string", "array"]}, "['a']", ["a"]),
    ({"type": ["string", "array"]}, OBJECT, OBJECT),
    ({"type": "array"}, "[1, 'a", "[1, 'a"), ({"type": "array"}, "['\\x']", "['\\x']"),
    # No type: JSON of any type, else a text.
    *[(schema, text, want)
      for schema in ({}, True, ref("Self"), ref("Nowhere"), {"$ref": "http://x/y"},
                     {"type": "any"}, {"description": "d"}, None)
      for text, want in (("3", 3), ('"a"', "a"), (OBJECT, {"name": 1}), ("True", True),
                         ("007", "007"), ("1.10", "1.10"), ("a b", "a b"), ("'a'", "'a'"),
                         ("NaN", "NaN"), ("[" * 200, "[" * 200))],
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "want"), VALUES)
def test_the_schema_says_what_a_text_between_tags_is(schema, text, want):
    found = ArgumentsSchema({"$defs": DEFS}).value(text, schema)
    assert json.dumps(found) == json.dumps(want)  # tells 1, 1.0 and true apart


@pytest.mark.parametrize(
    "root",
    [
        {"properties": {"a": STRING}},
        {"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": {"a": STRING}}}},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": STRING}}]},
        {"anyOf": [{"properties": {"a": STRING}}, {"properties": {"b": {}}}]},
        {"properties": {}, "additionalProperties": STRING},
    ],
)
def test_the_schema_of_an_argument_is_found_wherever_it_stands(root):
    schema = ArgumentsSchema(root)
    assert schema.value("1", schema.argument("a")) == "1"
    assert ArgumentsSchema({}).argument("a") == {}


def test_schemas_that_grow_without_end_are_bounded():
    """Each of 60 definitions names the next one twice: 2^60 ways."""
    defs = {f"D{i}": {"anyOf": [ref(f"D{i + 1}")] * 2} for i in range(60)}
    schema = ArgumentsSchema({"$defs": {**defs, "D60": STRING}})
    assert schema.value("1", ref("D0")) == "1"
    chain = {f"D{i}": {"anyOf": [ref(f"D{i + 1}"), NULL]} for i in range(5000)}
    assert ArgumentsSchema({"$defs": chain}).value("x", ref("D0")) == "x"


TAGGED = ("qwen3_xml", "glm4", "minimax_m2")


def called(syntax, arguments):
    """The text of a call of `f`, as these models write it."""
    if syntax == "qwen3_xml":
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    if syntax == "glm4":
        inner = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items()
        )
        return f"<tool_call>f\n{inner}</tool_call>"
    inner = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments.items())
    inner = f'<invoke name="f">\n{inner}</invoke>'
    return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"


@pytest.mark.parametrize("syntax", TAGGED)
def test_calls_have_the_types_of_their_schema(syntax):
    properties = {
        "content": {"anyOf": [STRING, NULL]}, "id": {"type": ["string", "null"]},
        "kind": ref("Kind"), "all": {"type": "boolean"}, "limit": {"type": ["integer", "null"]},
        "names": {"type": "array"},
    }  # fmt: skip
    texts = {"content": OBJECT, "id": "007", "kind": "1", "all": "True", "limit": "None",
             "names": "['a', 'b']", "other": "3"}  # fmt: skip
    want = {**texts, "all": True, "limit": None, "names": ["a", "b"], "other": 3}
    tools = {"f": {"properties": properties, "$defs": DEFS}}
    (call,) = ToolSplitter(SYNTAXES[syntax], tools).add(called(syntax, texts), final=True).calls
    assert json.loads(call.arguments) == want
    (call,) = ToolSplitter(SYNTAXES[syntax], {}).add(called(syntax, texts), final=True).calls
    assert json.loads(call.arguments)["kind"] == 1  # no schema


@pytest.fixture(scope="module")
def forced():
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    grammars = Grammars(tokenizer, 4096)

    def allows(syntax, schema, text):
        """True if the grammar of calls with one argument `a` allows a text between its tags."""
        root = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": DEFS}
        grammar = grammars.lark(calls_grammar(SYNTAXES[syntax], {"f": root}, many=False))
        grammars.check(grammar, "tools")
        ids = tokenizer.encode(called(syntax, {"a": text}), add_special_tokens=False)
        matcher = grammars._matcher(grammar).deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return allows


FORCED = [
    (ref("Tree"), ['{"key": "a"}', '{"key": "a", "next": {"key": "b"}}'],
     ['{"next": {"key": "a"}}', '{"key": 1}', "a"]),
    ({"type": "array", "items": ref("Size")}, ["[3]", "[]"], ["[2]", '["a"]']),
    (ref("Size"), ["3"], ["2", "a"]),
    ({"$ref": "#/properties/a/properties/b", "properties": {"b": {"type": "integer"}}}, ["3"],
     ["a"]),
    (ref("Text"), ["a", "", "[1]"], []),
    (ref("Kind"), ["1", "2"], ["3", "", '"1"']),
    ({"anyOf": [ref("Kind"), NULL]}, ["1", "null"], ["", "3", "nul"]),
    ({"enum": ["a+b", 1, None, True, "é/\\"]}, ["a+b", "1", "null", "true", "é/\\"], ["aab", "2"]),
    ({"type": ["string", "null"]}, ["a", "null"], []),
    ({"type": "string", "maxLength": 3}, ["", "abc", "ééé"], ["abcd"]),
    ({"type": "string", "minLength": 2}, ["ab", "a\nb"], ["a", ""]),
    ({"type": "string", "minLength": 2, "maxLength": 2}, ["ab"], ["a", "abc"]),
    ({"allOf": [{**STRING, "minLength": 2}, {"maxLength": 3}]}, ["ab", "abc"], ["a", "abcd"]),
    ({"allOf": [{**STRING, "maxLength": 3}, {"minLength": 2}]}, ["ab", "abc"], ["a", "abcd"]),
    ({"anyOf": [{**STRING, "maxLength": 2}, {"type": "integer"}, NULL]},
     ["ab", "12345", "null", "-7"], ["abc", "01234"]),
    ({"anyOf": [{**STRING, "pattern": "^x"}, {**STRING, "maxLength": 1}]}, ["xyz", "a", ""],
     ["ab"]),
    ({"type": "string", "pattern": "^[a-z]+$"}, ["ab"], ["aB", "", "a b"]),
    ({"type": "string", "pattern": "b/c"}, ["ab/cd", "b/c"], ["bc"]),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xa", "bx"]),
    ({"type": "string", "pattern": "^(?:a|b)[|$]\\$$"}, ["a|$", "b$$"], ["a|", "c|$"]),
    ({"type": "string", "pattern": "^\\d{4}-\\d\\d$", "maxLength": 7}, ["2024-05"], ["2024-5"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), FORCED)
@pytest.mark.parametrize("syntax", TAGGED)
def test_forced_calls_follow_their_schema(forced, syntax, schema, good, bad):
    assert [text for text in good if not forced(syntax, schema, text)] == []
    assert [text for text in bad if forced(syntax, schema, text)] == []


def test_a_text_with_limits_cannot_hold_its_closing_tag(forced):
    schema = {"type": "string", "minLength": 30}
    assert not forced("glm4", schema, "</arg_value>" + "x" * 30)
    assert not forced("qwen3_xml", schema, "\n</parameter>" + "x" * 30)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "a(?=b)"}, "invalid regex"),
        ({"type": "string", "pattern": "("}, "invalid regex"),
        ({"anyOf": [{**STRING, "maxLength": 3}, {"type": "array"}]},
         "in 'f', of the argument 'a', texts with limits cannot stand beside arrays and objects"),
        ({"enum": ["a"], "const": "b"}, "in 'f', of the argument 'a', it allows no value"),
    ],
)  # fmt: skip
def test_limits_that_cannot_be_enforced_are_refused_in_one_line(forced, schema, words):
    for syntax in TAGGED:
        with pytest.raises(RequestError, match=r"^'tools' cannot be enforced: ") as caught:
            forced(syntax, schema, "a")
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert (caught.value.status, caught.value.param) == (400, "tools")


@pytest.mark.parametrize("syntax", TAGGED)
def test_arguments_of_a_schema_that_refers_to_them_are_forced_too(syntax):
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    grammars = Grammars(tokenizer, 4096)
    both = [{"properties": {"a": STRING}, "required": ["a"]}, {"properties": {"b": ref("Size")}}]
    root = {"$ref": "#/$defs/Args", "$defs": {**DEFS, "Args": {"allOf": both}}}
    grammar = grammars.lark(calls_grammar(SYNTAXES[syntax], {"f": root}, many=False))
    for arguments, good in (({"a": "x", "b": 3}, True), ({"a": "x"}, True), ({"b": 3}, False)):
        ids = tokenizer.encode(called(syntax, arguments), add_special_tokens=False)
        matcher = grammars._matcher(grammar).deep_copy()
        assert (matcher.try_consume_tokens(ids) == len(ids)) == good


def typed(*arguments):
    """The text of a call of `f` in DSML, of (key, whether it is said to be a text, text)."""
    inner = "".join(
        f'<｜DSML｜parameter name="{k}" string="{str(is_text).lower()}">{v}</｜DSML｜parameter>\n'
        for k, is_text, v in arguments
    )
    inner = f'\n<｜DSML｜invoke name="f">\n{inner}</｜DSML｜invoke>\n'
    return f"<｜DSML｜function_calls>{inner}</｜DSML｜function_calls>"


def test_dsml_says_which_arguments_are_texts():
    properties = {
        "text": STRING,
        "count": {"type": "integer"},
        "maybe": {"type": ["string", "null"]},
    }
    text = typed(
        ("text", False, "3"), ("count", True, "3"), ("maybe", False, "null"),
        ("other", True, "[1]"), ("word", False, "[1"), ("quoted", False, '"1"'),
        ("list", False, '["a\\"b", {"c": "d\\n"}]'), ("number", False, "1.50"),
        ("python", False, "True"), ("maybe2", True, "null"),
    )  # fmt: skip
    (call,) = (
        ToolSplitter(SYNTAXES["deepseek_v3.2"], {"f": {"properties": properties}})
        .add(text, final=True)
        .calls
    )
    assert json.loads(call.arguments) == {
        "text": "3", "count": "3", "maybe": None, "other": "[1]", "word": "[1",
        "list": ['a"b', {"c": "d\n"}], "quoted": "1", "number": 1.5, "python": True,
        "maybe2": "null",
    }  # fmt: skip


DSML_FORCED = [
    (STRING, [(True, "a<b\n"), (True, "")], [(False, "a"), (False, '"a"')]),
    (ref("Size"), [(False, "3")], [(False, "2"), (True, "3")]),
    (ref("Kind"), [(True, "1"), (True, "2")], [(True, "3"), (False, "1")]),
    ({"type": ["string", "null"]}, [(True, "a"), (True, "null"), (False, "null")], [(False, "1")]),
    ({"enum": ["a", 1, None]}, [(True, "a"), (False, "1"), (False, "null")],
     [(True, "1"), (False, '"a"'), (True, "b")]),
    ({}, [(True, "a"), (False, "[1]"), (False, "null")], [(False, "a"), (False, '"a"')]),
    ({"anyOf": [{**STRING, "maxLength": 2}, {"type": "array"}]}, [(True, "ab"), (False, "[]")],
     [(True, "abc"), (False, "3")]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), DSML_FORCED)
def test_forced_calls_in_dsml_say_which_arguments_are_texts(schema, good, bad):
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    grammars = Grammars(tokenizer, 4096)
    root = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": DEFS}
    syntax = SYNTAXES["deepseek_v3.2"]
    grammar = grammars.lark(calls_grammar(syntax, {"f": root}, many=False))
    grammars.check(grammar, "tools")

    def allows(is_text, text):
        ids = tokenizer.encode(typed(("a", is_text, text)), add_special_tokens=False)
        matcher = grammars._matcher(grammar).deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert [one for one in good if not allows(*one)] == []
    assert [one for one in bad if allows(*one)] == []


def test_an_argument_in_dsml_without_a_value_is_refused_in_one_line():
    root = {"properties": {"a": {"enum": ["a"], "const": 1}}}
    with pytest.raises(RequestError, match=r"in 'f', of the argument 'a', it allows no value"):
        calls_grammar(SYNTAXES["deepseek_v3.2"], {"f": root}, many=False)
