"""Oracle: what each protocol's fields may be, and the dotted place of the one at fault."""

from __future__ import annotations

import copy
import json

import pytest

from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import read_body
from mlx_moeflux.server.protocols import (
    anthropic_messages,
    info,
    openai_chat,
    openai_completions,
    openai_responses,
)
from mlx_moeflux.server.protocols.openai import OpenAIBody

USER = {"role": "user", "content": "a"}
CALL = {"function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
TOOL = {"name": "f", "input_schema": {}}


def chat(**fields):
    return openai_chat.Body, {"messages": [USER], **fields}


def talk(*messages):
    return openai_chat.Body, {"messages": list(messages)}


def respond(**fields):
    return openai_responses.Body, {"input": "a", **fields}


def anthropic(**fields):
    return anthropic_messages.Body, {"messages": [USER], "max_tokens": 1, **fields}


def blocks(role, *content):
    return anthropic(messages=[{"role": role, "content": list(content)}])


def read(model, value):
    return read_body(model, json.dumps(value))


WRONG = [
    (chat(n=0), "n"),
    (chat(n=True), "n"),
    (chat(seed=1.5), "seed"),
    (chat(temperature=10**400), "temperature"),
    (chat(stop=["a", 5]), "stop"),
    (chat(stop=["a"] * 17), "stop"),
    (chat(stream_options={}), "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (chat(top_logprobs=1), "top_logprobs"),
    (chat(tools=[{"function": {"name": " f"}}]), "tools.0.function.name"),
    (chat(tools=[{"function": {"name": "f", "parameters": {"required": 1}}}]),
     "tools.0.function.parameters"),
    (chat(tool_choice="maybe"), "tool_choice"),
    (chat(tool_choice={"type": "function"}), "tool_choice.name"),
    (chat(tool_choice={"function": {}}), "tool_choice.function.name"),
    (chat(response_format={"type": "json_schema", "json_schema": {}}),
     "response_format.json_schema.schema"),
    (chat(chat_template_kwargs={"self": 1}), "chat_template_kwargs"),
    (talk(), "messages"),
    (talk(USER, None), "messages.1"),
    (talk(USER, {"content": "a"}), "messages.1.role"),
    (talk(USER, {"role": ["user"]}), "messages.1.role"),
    (respond(input=5), "input"),
    (respond(input=[{"type": 5}]), "input.0.type"),
    (respond(tools=[{}]), "tools.0.type"),
    (respond(tools=[{"type": "namespace", "name": "g", "tools": [{"type": "function"}]}]),
     "tools.0.tools.0.name"),
    (respond(text={"format": {"type": "json_schema"}}), "text.format.schema"),
    (anthropic(max_tokens=0), "max_tokens"),
    (anthropic(tools=[{"name": "f"}]), "tools.0.input_schema"),
    (anthropic(tool_choice={"type": "tool"}), "tool_choice.name"),
    ((openai_completions.Body, {"prompt": [True]}), "prompt"),
    ((info.Tokens, {"tokens": 5}), "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "place"), WRONG, ids=lambda value: str(value)[-60:])
def test_the_first_fault_is_named_by_its_place(given, place):
    with pytest.raises(RequestError) as caught:
        read(*given)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, place, None)
    assert str(caught.value).startswith(f"'{place}' is ")


UNKNOWN = [
    (chat(a=1), "a"),
    (chat(stream=True, stream_options={"a": 1}), "stream_options.a"),
    (respond(stream_options={"include_usage": True}), "stream_options.include_usage"),
    (respond(text={"a": 1}), "text.a"),
    (respond(max_tokens=1), "max_tokens"),
    (anthropic(n=2), "n"),
    (anthropic(tools=[{**TOOL, "a": 1}]), "tools.0.a"),
    (anthropic(tool_choice={"type": "auto", "name": "f"}), "tool_choice.name"),
    ((info.Text, {"content": "a", "a": 1}), "a"),
]


@pytest.mark.parametrize(("given", "place"), UNKNOWN, ids=lambda value: str(value)[-60:])
def test_unknown_fields_are_refused_unless_they_ask_for_nothing(given, place):
    model, body = given
    with pytest.raises(RequestError, match="is not offered") as caught:
        read(model, body)
    assert (caught.value.param, caught.value.code) == (place, "unsupported_parameter")
    *way, name = place.split(".")
    for nothing in (None, False, 0, "", [], {}):
        changed = copy.deepcopy(body)
        inner = changed
        for key in way:
            inner = inner[int(key) if key.isdecimal() else key]
        inner[name] = nothing
        read(model, changed)


def test_known_fields_that_change_nothing_are_accepted():
    group = {"type": "namespace", "name": "g", "tools": [{"a": 1}, {"type": "custom", "a": 1}]}
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "a": 1}
    for model, body in (
        chat(user="u", metadata={"a": 1}, tools=[{**FUNCTION, "strict": True}], n=None),
        talk({**USER, "name": "n"}, {"role": "assistant", "audio": {"id": "1"}}),
        respond(tools=[group, {"type": "web_search", "a": 1}], client_metadata={"a": 1}),
        anthropic(metadata={"user_id": "u"}, tools=[{**TOOL, "cache_control": {"a": 1}}]),
        blocks("user", marked),
        blocks("assistant", marked, {"type": "redacted_thinking", "data": "d"}),
    ):
        read(model, body)


def test_numbers_are_what_they_are_worth():
    _, body = chat(n=2.0, seed=-(2.0**63), temperature=1, top_k=2**63 - 1)
    found = read(openai_chat.Body, body)
    assert (found.n, found.seed, found.temperature) == (2, -(2**63), 1.0)
    assert [type(value) for value in (found.n, found.seed, found.temperature)] == [int, int, float]


@pytest.mark.parametrize(
    "given",
    [
        chat(**{"a" * 1000: 1}), chat(tool_choice="\n" * 1000), chat(n=10**1000),
        chat(response_format={"type": "é\n" * 1000}), (openai_chat.Body, [1] * 1000),
    ],
    ids=lambda given: str(given)[-60:],
)  # fmt: skip
def test_messages_are_one_short_line(given):
    with pytest.raises(RequestError) as caught:
        read(*given)
    assert len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)


def test_a_repetition_penalty_of_0_is_none():
    assert read_body(OpenAIBody, b'{"repetition_penalty": 0}').repetition_penalty == 1
    assert read_body(OpenAIBody, b'{"repetition_penalty": 0.5}').repetition_penalty == 0.5
    for wrong in (b"1e-38", b"-1", b"11", b"true"):
        with pytest.raises(RequestError, match="repetition_penalty"):
            read_body(OpenAIBody, b'{"repetition_penalty": %s}' % wrong)
