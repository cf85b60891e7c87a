"""Gemma-4's calls and reasoning. Oracle: texts worked by hand, of schemas' limits and of values
that models write without marks."""

from __future__ import annotations

import json

import pytest

from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.calls.registry import SYNTAXES
from mlx_moeflux.server.calls.splitter import ToolSplitter
from mlx_moeflux.server.calls.syntax import calls_grammar
from mlx_moeflux.server.constrain import Grammars
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.reasoning import REASONING, choose_reasoning
from mlx_moeflux.tokenizer import load_tokenizer
from tests.server.calls.test_parsers import cut

SYNTAX = SYNTAXES["gemma4"]
Q = '<|"|>'
PATH, NUMBER = {"type": "string"}, {"type": "integer"}


def called(inner: str) -> str:
    return f"<|tool_call>call:f{{{inner}}}<tool_call|>"


@pytest.mark.parametrize(
    ("schema", "inner", "want"),
    [
        ({}, "a:1,b:true,c:null,d:1.5,e:x y", {"a": 1, "b": True, "c": None, "d": 1.5, "e": "x y"}),
        ({}, "a:None,b:False", {"a": None, "b": False}),
        ({"properties": {"a": PATH}}, "a:007", {"a": "007"}),
        ({"properties": {"a": {"type": "integer"}}}, f"a:{Q}3{Q}", {"a": "3"}),
        ({}, f" a : [ 1 , {Q}x,]{Q} , {{}} ] , b : {{ }} ", {"a": [1, "x,]", {}], "b": {}}),
        ({}, f"a:{Q}{Q},b:[[],[[]]]", {"a": "", "b": [[], [[]]]}),
        ({}, f'a:{Q}\\ "é"\n{{}}{Q}', {"a": '\\ "é"\n{}'}),
        # A mark inside of a text ends it where the syntax goes on.
        ({}, f"a:{Q}x {Q} y{Q}", {"a": f"x {Q} y"}),
        ({}, "", {}),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_values_with_marks_and_without(schema, inner, want, seed):
    splitter, arguments = ToolSplitter(SYNTAX, {"f": schema}), ""
    for part in [*cut(called(inner), seed), ""]:
        for one in splitter.add(part, final=not part).calls:
            arguments += one.arguments
    assert json.loads(arguments) == want


@pytest.mark.parametrize(
    "inner", ["a:[1", "a:{b:1", "a:1,,b:2", ":1", "a:[,]", "a:" + "[" * 200 + "]" * 200]
)
def test_what_is_no_call_stays_text(inner):
    found = ToolSplitter(SYNTAX, {"f": {}}).add(called(inner), final=True)
    assert (found.text, [call for call in found.calls if call.whole]) == (called(inner), [])


@pytest.fixture(scope="module")
def allows():
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    grammars = Grammars(tokenizer, 4096)

    def whole(schema, inner):
        """True if the grammar of one call of `f` allows these arguments."""
        grammar = grammars.lark(calls_grammar(SYNTAX, {"f": schema}, many=False))
        grammars.check(grammar, "tools")
        ids = tokenizer.encode(called(inner), add_special_tokens=False)
        matcher = grammars._matcher(grammar).deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whole


def of(required: str = "", **properties) -> dict:
    return {"type": "object", "properties": properties, "required": required.split()}


ITEMS = {"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 3}
INNER = of("x", x=NUMBER, y=PATH)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (of("b", a=NUMBER, b=NUMBER, c=NUMBER),
         ["b:1", "a:1,b:2", "b:1,c:2", "a:1,b:2,c:3"],
         ["", "a:1", "b:1,a:2", "a:1b:2", ",b:1", "b:1,", f"b:{Q}1{Q}", "b:1.5", "d:1,b:1"]),
        (of(a=PATH), ["", f"a:{Q}{Q}", f"a:{Q}1, }}{Q}"], ["a:x", "a:1", f"a:{Q}x"]),
        (of("a", a={"type": "string", "maxLength": 2}), [f"a:{Q}xy{Q}"], [f"a:{Q}xyz{Q}"]),
        (of("a", a={"enum": ["x", 2]}), [f"a:{Q}x{Q}", "a:2"], [f"a:{Q}2{Q}", "a:x", "a:3"]),
        (of("a", a={"type": ["string", "null"]}), [f"a:{Q}x{Q}", "a:null"], ["a:1", "a:x"]),
        (of("a", a={"type": "integer", "minimum": 3}), ["a:3"], ["a:2"]),
        (of("a", a={"type": "boolean"}), ["a:true"], ["a:True", "a:1"]),
        (of("a", a=ITEMS), ["a:[1]", "a:[1,2,3]"], ["a:[]", "a:[1,2,3,4]", f"a:[{Q}x{Q}]", "a:1"]),
        (of("a", a={"type": "array"}), ["a:[]", f"a:[1,{Q}x{Q},[{{b:2}}]]"], ["a:{}", "a:[x]"]),
        (of("a", a={**ITEMS, "maxItems": 0, "minItems": 0}), ["a:[]"], ["a:[1]"]),
        (of("a", a=INNER), [f"a:{{x:1,y:{Q}z{Q}}}", "a:{x:1}"], ["a:{}", "a:{y:1}", "a:{x:1,z:2}"]),
        (of("a", a={"type": "object", "additionalProperties": NUMBER}),
         ["a:{}", "a:{b:1,c-d:2}"], [f"a:{{b:{Q}x{Q}}}"]),
        (of("a", a={"type": "object"}), ["a:{}", f"a:{{b:{Q}x{Q}}}"], ["a:[]", "a:{b}"]),
        (of("a", a={}), [f"a:{{b:[1,{Q}x{Q}]}}", "a:1.5"], ["a:x", "a:"]),
        ({"properties": {"a": {"$ref": "#/$defs/In"}}, "$defs": {"In": INNER}, "required": ["a"]},
         ["a:{x:1}"], ["a:{}", "a:1"]),
    ],
)  # fmt: skip
def test_forced_arguments_keep_to_their_schema(allows, schema, good, bad):
    assert [inner for inner in good if not allows(schema, inner)] == []
    assert [inner for inner in bad if allows(schema, inner)] == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' of an array"),
        ({"type": "object", "patternProperties": {"a": {}}}, "'patternProperties' of an array"),
        ({"type": "object", "minProperties": 1}, "'minProperties'"),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "'anyOf' of an array"),
        ({"type": "array", "enum": [[1]]}, "'enum' of an array"),
        ({"type": "object", "required": ["x"]}, "members that no property names"),
        ({"enum": []}, "it allows no value"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "'uniqueItems'"),
    ],
)
def test_what_no_grammar_enforces_is_refused(value, why):
    with pytest.raises(RequestError, match=r"in 'f', of the argument 'a', [^\n]*") as error:
        calls_grammar(SYNTAX, {"f": of("a", a=value)}, many=True)
    assert why in str(error.value)


def test_a_schema_that_refers_to_itself_is_refused():
    loop = {"properties": {"a": {"$ref": "#"}}, "type": "object", "required": ["a"]}
    with pytest.raises(RequestError, match="nested too deep, or refers to itself"):
        calls_grammar(SYNTAX, {"f": loop}, many=True)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\nHm.\n\nYes.<channel|>Answer", "Hm.\n\nYes.", "Answer"),
        ("<|channel>thought\n<channel|>Answer", "", "Answer"),
        ("Answer <channel|>", "", "Answer <channel|>"),
        ("<|channel>thought\nHm. <chan", "Hm. <chan", ""),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_thoughts_are_apart(text, reasoning, content, seed):
    splitter = REASONING["gemma4"].splitter(opened=False)
    parts = [splitter.add(part) for part in cut(text, seed)]
    parts.append(splitter.add("", final=True))
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.content for part in parts) == content


def test_the_vocabulary_tells():
    class Vocabulary:
        def convert_tokens_to_ids(self, names):
            return [7 if name in ("<|channel>", "<channel|>") else None for name in names]

    assert choose_reasoning(Vocabulary()) is REASONING["gemma4"]
