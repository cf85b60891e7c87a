"""Oracle: with tools and a schema a reply is a call in the model's syntax, or JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.calls.registry import SYNTAXES
from mlx_moeflux.server.calls.syntax import calls_grammar
from mlx_moeflux.server.constrain import Grammars
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import read_body
from mlx_moeflux.server.protocols import anthropic_messages, openai_chat, openai_responses
from mlx_moeflux.tokenizer import load_tokenizer
from tests.server.calls.test_cut_calls import WRITERS
from tests.server.conftest import MESSAGES, service_of
from tests.server.scripted import Script, saying

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"$ref": "#/$defs/Colour"}},
    "required": ["colour"],
    "additionalProperties": False,
    "$defs": {"Colour": {"enum": ["red"]}},
}
READ = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "depth": {"$ref": "#/$defs/Depth"}},
    "required": ["path"],
    "$defs": {"Depth": {"enum": [1, 2]}},
}
ARGUMENTS = {"path": "a.txt"}


def written(syntax, *names):
    """Calls as a model writes them."""
    begin, one, between, end, _ = WRITERS[syntax]
    between = "" if SYNTAXES[syntax].grouped else between
    return begin + between.join(one(name, ARGUMENTS) for name in names) + end


@pytest.fixture(scope="module")
def grammars():
    return Grammars(load_tokenizer(BUNDLED_MODEL), 4096)


@pytest.fixture
def allows(grammars):
    """(grammar, text) -> True if it is a whole reply."""
    tokenizer = load_tokenizer(BUNDLED_MODEL)

    def whole(grammar, text):
        grammars.check(grammar, "tools")
        ids = tokenizer.encode(text, add_special_tokens=False)
        matcher = grammars._matcher(grammar).deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whole


@pytest.mark.parametrize("syntax", WRITERS)
@pytest.mark.parametrize("many", [True, False])
def test_a_call_or_the_schema_in_every_syntax(grammars, allows, syntax, many):
    known = SYNTAXES[syntax]
    tools = {"read": READ, "list": READ}
    grammar = grammars.lark(calls_grammar(known, tools, many=many, answer=(SCHEMA,)))
    one, two = written(syntax, "read"), written(syntax, "read", "list")
    if known.ends_reply:  # its end is a token of its own
        one, two = one.removesuffix(known.end), two.removesuffix(known.end)
    assert allows(grammar, one)
    assert allows(grammar, two) == (many and not known.ends_reply)
    assert allows(grammar, '{"colour": "red"}')
    assert allows(grammar, '{\n  "colour": "red"\n}')
    answer = '{"colour": "red"}'
    for wrong in ("red", '{"colour": "blue"}', "{}", written(syntax, "write"), answer + one,
                  one + answer, f"I look.{one}"):  # fmt: skip
        assert not allows(grammar, wrong)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (None, ["{}", '{"a": [1]}'], ["[]", "1", ""]),
        ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]"], ["{}", '["a"]']),
        ({"enum": ["yes", "no"]}, ['"yes"'], ["yes", '"maybe"']),
        ({}, ["1", '"a"', "{}"], ["a", ""]),
    ],
)
def test_any_schema_stands_beside_calls(grammars, allows, schema, good, bad):
    for syntax in ("hermes", "glm4", "kimi_k2"):
        known = SYNTAXES[syntax]
        grammar = grammars.lark(calls_grammar(known, {"read": READ}, many=True, answer=(schema,)))
        assert [text for text in good if not allows(grammar, text)] == []
        assert [text for text in bad if allows(grammar, text)] == []
        assert allows(grammar, written(syntax, "read"))


FORMATS = {
    openai_chat: {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": SCHEMA}}},
    openai_responses: {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    anthropic_messages: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}  # fmt: skip
FUNCTION = {"name": "read", "parameters": READ}
TOOLS = {
    openai_chat: {"type": "function", "function": FUNCTION},
    openai_responses: {"type": "function", **FUNCTION},
    anthropic_messages: {"name": "read", "input_schema": READ},
}
CHOICES = {
    openai_chat: ("auto", "none", "required"),
    openai_responses: ("auto", "none", "required"),
    anthropic_messages: ({"type": "auto"}, {"type": "none"}, {"type": "any"}),
}


@pytest.mark.parametrize("protocol", FORMATS)
def test_the_choice_says_what_is_allowed(tiny, allows, protocol: Any):
    """auto: either; none: the schema; required: a call."""
    service = service_of(*tiny)
    field = "input" if protocol is openai_responses else "messages"
    call = written("hermes", "read")
    for choice, expected in zip(
        CHOICES[protocol], ((True, True), (False, True), (True, False)), strict=True
    ):
        body = {field: MESSAGES, "tools": [TOOLS[protocol]], "tool_choice": choice}
        body |= FORMATS[protocol]
        request = protocol.read(read_body(protocol.Body, json.dumps(body)), service)
        grammar = service._grammar(request)
        assert (allows(grammar, call), allows(grammar, '{"colour": "red"}')) == expected


def test_what_cannot_be_enforced_names_its_field(tiny):
    service = service_of(*tiny)
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "nothing"}}}}}  # fmt: skip
    for body, param in (
        ({"response_format": bad, "tools": [TOOLS[openai_chat]]}, "response_format"),
        ({**FORMATS[openai_chat], "tools": [tool]}, "tools"),
    ):
        body = read_body(openai_chat.Body, json.dumps({"messages": MESSAGES, **body}))
        with pytest.raises(RequestError, match=f"^'{param}' cannot be enforced") as refused:
            service._grammar(openai_chat.read(body, service))
        assert refused.value.param == param


@pytest.mark.slow
def test_an_agent_calls_and_then_answers(tiny):
    """Through the server: the model would say either, and both are masked as they should be."""
    call = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
    answer = '{"colour": "red"}'
    tool = {"type": "function", "function": {"name": "ls"}}
    body = {"messages": MESSAGES, "tools": [tool], **FORMATS[openai_chat]}
    with saying(*tiny, Script(call, answer)) as server:
        first, second = (server.chat(**body, max_tokens=100)["choices"][0] for _ in range(2))
    assert first["finish_reason"] == "tool_calls"
    assert [one["function"]["name"] for one in first["message"]["tool_calls"]] == ["ls"]
    assert (second["finish_reason"], second["message"]["content"]) == ("stop", answer)
