"""Oracle: the same request without the field, and other servers' documents."""

from __future__ import annotations

import json

import pytest

from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import read_body
from mlx_moeflux.server.protocols import (
    anthropic_messages,
    openai_chat,
    openai_completions,
    openai_responses,
)
from mlx_moeflux.server.request import Defaults
from tests.server.conftest import MESSAGES, service_of

BODIES = {
    openai_chat: {"messages": MESSAGES, "max_tokens": 1},
    openai_completions: {"prompt": "a", "max_tokens": 1},
    openai_responses: {"input": "a", "max_output_tokens": 1},
    anthropic_messages: {"messages": MESSAGES, "max_tokens": 1},
}
OPENAI = (openai_chat, openai_completions, openai_responses)

# Field -> values that change nothing, and values that would.
NEUTRAL = {
    "repeat_penalty": ([1, 1.0, None, 0], [1.1, 0.9, "1"]),
    "typical_p": ([1, 1.0], [0.5]),
    "tfs_z": ([1.0], [0.9]),
    "length_penalty": ([1.0], [2.0]),
    "top_n_sigma": ([-1, 0], [1.5]),
    "dynatemp_range": ([0.0], [0.5]),
    "dynatemp_exponent": ([1.0], [2.0]),
    "mirostat": ([0], [2]),
    "dry_multiplier": ([0.0], [0.8]),
    "dry_base": ([1.75], []),
    "num_beams": ([1], [4]),
    "guidance_scale": ([1.0], [1.5]),
    "n_predict": ([-1], [5]),
    "id_slot": ([-1], [3]),
    "ignore_eos": ([False], [True]),
    "min_tokens": ([0], [4]),
    "use_beam_search": ([False], [True]),
    "skip_special_tokens": ([True, None], ["x", False]),
    "spaces_between_special_tokens": ([True, False], []),
    "detokenize": ([True], [False]),
    "do_sample": ([True], [False]),
    "parse_tool_calls": ([True], [False]),
    "add_bos_token": ([True], [False]),
    "typ_p": ([1.0], [0.9]),
    "min_temp": ([1], [0.5]),
    "t_max_predict_ms": ([-1, 0], [500]),
    "route": (["fallback"], ["other"]),
    "result_format": (["message"], ["text"]),
    "mode": (["instruct"], ["chat"]),
    "separate_reasoning": ([True], [False]),
    "include_reasoning": ([True], [False]),
    "reasoning_format": (["auto", "deepseek"], ["none"]),
    "reasoning_budget": ([-1], [0, 100]),
    "repeat_last_n": ([64, -1, 0], []),
    "repetition_context_size": ([20], []),
    "num_ctx": ([4096], []),
    "guided_decoding_backend": (["xgrammar"], []),
    "provider": ([{"order": ["a"]}], []),
    "usage": ([{"include": True}], []),
    "keep_alive": (["5m", -1, 0, 3.5], []),
    "ttl": ([300, 0], []),
    "timings_per_token": ([True, False], []),
    "return_progress": ([True], []),
    "function_call": (["auto", "none"], [{"name": "f"}]),
    "truncation": (["auto", "disabled"], ["middle"]),
    "grammar": (["", None], ["root ::= 'a'"]),
}


@pytest.fixture(scope="module")
def service(tiny):
    return service_of(*tiny)


@pytest.fixture(scope="module")
def read(service):
    def read(protocol, **fields):
        body = read_body(protocol.Body, json.dumps({**BODIES[protocol], **fields}))
        return protocol.read(body, service)

    return read


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize("protocol", BODIES, ids=lambda module: module.__name__[-18:])
def test_a_value_that_changes_nothing_is_accepted_and_no_other(read, protocol, name):
    accepted, refused = NEUTRAL[name]
    for value in accepted:
        assert read(protocol, **{name: value}) == read(protocol)
    for value in refused:
        with pytest.raises(RequestError, match=f"'{name}' is not offered") as caught:
            read(protocol, **{name: value})
        assert (caught.value.status, caught.value.param) == (400, name)


WINDOWS = {
    "repetition_context_size": {"repetition_penalty": 1.2},
    "presence_context_size": {"presence_penalty": 0.5},
    "frequency_context_size": {"frequency_penalty": -0.5},
    "repeat_last_n": {"presence_penalty": 0.5},
    "penalty_range": {"repetition_penalty": 0.9},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_of_a_penalty_acts_only_beside_it(read, name):
    """Here all tokens count, which -1 says."""
    on = WINDOWS[name]
    off = dict.fromkeys(on, 1 if "repetition_penalty" in on else 0)
    for fields in ({}, off, dict.fromkeys(on)):
        assert read(openai_chat, **{name: 64}, **fields) == read(openai_chat, **fields)
    assert read(openai_chat, **{name: -1}, **on) == read(openai_chat, **on)
    with pytest.raises(RequestError, match=f"'{name}' is not offered"):
        read(openai_chat, **{name: 64}, **on)


@pytest.mark.parametrize("word", ["auto", "default"])
def test_an_effort_that_is_left_to_the_model_asks_nothing(read, word):
    assert read(openai_chat, reasoning_effort=word) == read(openai_chat)


@pytest.mark.parametrize("protocol", BODIES, ids=lambda module: module.__name__[-18:])
def test_top_k_of_minus_1_is_off_whatever_the_server_says(tiny, read, protocol):
    service = service_of(*tiny, defaults=Defaults(options={"top_k": 7}))
    for fields, expected in (({}, 7), ({"top_k": -1}, 0), ({"top_k": 0}, 0), ({"top_k": 3}, 3)):
        body = read_body(protocol.Body, json.dumps({**BODIES[protocol], **fields}))
        assert protocol.read(body, service).sampling["top_k"] == expected
    with pytest.raises(RequestError, match="top_k"):
        read(protocol, top_k=-2)


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        (openai_chat, {"best_of": 1}),
        (openai_responses, {"best_of": 1}),
        (openai_completions, {"best_of": 1}),
        (openai_chat, {"top_logprobs": -1}),
        (openai_responses, {"top_logprobs": -1}),
        (openai_chat, {"verbosity": "medium"}),
        (openai_chat, {"verbosity": "low"}),
        (openai_responses, {"text": {"verbosity": "high"}}),
        (openai_chat, {"stop": [""]}),
        (openai_completions, {"stop": ""}),
        (openai_chat, {"stop": [None, ""]}),
        (anthropic_messages, {"stop_sequences": [""]}),
    ],
)
def test_own_fields_have_values_that_change_nothing(read, protocol, fields):
    assert read(protocol, **fields) == read(protocol)


def test_empty_stops_beside_others_are_left_out(read):
    assert read(openai_chat, stop=["", "a", None]).stop == ["a"]
    for wrong in (5, [5], [True], {}):
        with pytest.raises(RequestError, match="'stop' is "):
            read(openai_chat, stop=wrong)
    with pytest.raises(RequestError, match="best_of"):
        read(openai_completions, best_of=2)


BETA = {
    "block_binding": {"type": "strict"}, "task_budget": {"type": "tokens", "total": 64000},
    "speed": "fast", "allowed_callers": ["direct"], "diagnostics": {"previous_message_id": None},
}  # fmt: skip


@pytest.mark.parametrize("name", BETA)
def test_hints_of_beta_versions_are_accepted_where_they_stand(read, name):
    hint = {name: BETA[name]}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    plain = {"tools": [tool], "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"},
             "tool_choice": {"type": "auto"}}  # fmt: skip
    places = [hint, {"tools": [{**tool, **hint}]}]
    places += [{key: {**plain[key], **hint}} for key in ("thinking", "output_config",
                                                         "tool_choice")]  # fmt: skip
    for fields in places:
        assert read(anthropic_messages, **{**plain, **fields}) == read(anthropic_messages, **plain)
    with pytest.raises(RequestError, match="'other_budget' is not offered"):
        read(anthropic_messages, other_budget=5)


FUNCTION = {"name": "f", "description": "D.", "parameters": {"type": "object", "properties": {}}}
OWN = {
    openai_chat: {"type": "function", "function": FUNCTION},
    openai_responses: {"type": "function", **FUNCTION},
    anthropic_messages: {"name": "f", "description": "D.", "input_schema": FUNCTION["parameters"]},
}
PROVIDED = [
    {"type": "web_search"}, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "custom_x", "name": "f"},
    {"type": "mcp", "server_label": "a", "server_url": "http://127.0.0.1:1"},
    {"type": "bash_20250124", "name": "bash"}, {"type": "file_search", "vector_store_ids": ["v"]},
]  # fmt: skip


def test_a_tool_without_a_type_is_a_function_or_named_by_its_field(read):
    untyped = {"function": FUNCTION}
    assert read(openai_chat, tools=[untyped]) == read(openai_chat, tools=[OWN[openai_chat]])
    for tool in ({"googleSearch": {}}, {"type": None, "url_context": {}}):
        assert read(openai_chat, tools=[untyped, tool]) == read(openai_chat, tools=[untyped])
        with pytest.raises(RequestError, match=r"'tools.0' .*'(googleSearch|url_context)'"):
            read(openai_chat, tools=[tool])
    with pytest.raises(RequestError, match=r"'tools.1.function' is missing"):
        read(openai_chat, tools=[untyped, FUNCTION])


@pytest.mark.parametrize("protocol", OWN, ids=lambda module: module.__name__[-18:])
def test_tools_of_a_provider_beside_others_are_left_out(read, protocol):
    own = OWN[protocol]
    alone = read(protocol, tools=[own])
    for tool in PROVIDED:
        assert read(protocol, tools=[tool, own]) == alone
        assert read(protocol, tools=[own, tool, tool]) == alone
        if protocol is not openai_responses:
            with pytest.raises(RequestError, match=rf"'tools.0' .*'{tool['type']}'") as caught:
                read(protocol, tools=[tool])
            assert caught.value.code == "unsupported_parameter"
        # A choice of one is a wish that cannot be done.
        choice = {"type": "tool", "name": "bash"}
        if protocol is openai_chat:
            choice = {"type": "function", "function": {"name": "bash"}}
        if protocol is openai_responses:
            choice = {"type": "function", "name": "bash"}
        with pytest.raises(RequestError, match="'tool_choice' names 'bash'"):
            read(protocol, tools=[own, tool], tool_choice=choice)


NULLS = {
    "properties": ({"type": "object", "properties": None}, {"type": "object", "properties": {}}),
    "required": (
        {"type": "object", "properties": {}, "required": None},
        {"type": "object", "properties": {}},
    ),
    "type": ({"type": None, "properties": {}}, {"properties": {}, "type": "object"}),
    "inner keywords": (
        {"type": "object", "properties": {
            "a": {"type": "array", "items": None, "description": None, "default": None},
            "b": {"anyOf": [{"type": "string", "pattern": None}, None], "minLength": None},
            "properties": {"type": "object", "properties": None, "required": None}},
         "$defs": None, "additionalProperties": None},
        {"type": "object", "properties": {
            "a": {"type": "array", "default": None},
            "b": {"anyOf": [{"type": "string"}]},
            "properties": {"type": "object"}}},
    ),
    "values": (
        {"type": "object", "properties": {
            "a": {"enum": [None, "x", {"k": None}], "default": {"k": None}},
            "b": {"const": None}, "c": {"examples": [None, [None]]},
            "default": {"type": "string", "title": None}, "d": None, "e": False}},
        {"type": "object", "properties": {
            "a": {"enum": [None, "x", {"k": None}], "default": {"k": None}},
            "b": {"const": None}, "c": {"examples": [None, [None]]},
            "default": {"type": "string"}, "d": {}, "e": False}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NULLS)
def test_a_keyword_that_is_null_is_missing(read, name):
    """And null where it is a value stays one."""
    given, meant = NULLS[name]
    for protocol, own in OWN.items():
        tool = json.loads(json.dumps(own))
        holder = tool["function"] if protocol is openai_chat else tool
        key = "input_schema" if protocol is anthropic_messages else "parameters"
        holder[key] = given
        (found,) = read(protocol, tools=[tool]).tools
        assert json.dumps(found["function"]["parameters"]) == json.dumps(meant)
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": given}}
    schemas = [
        read(openai_chat, response_format=form).schema,
        read(openai_responses, text={"format": {"type": "json_schema", "schema": given}}).schema,
        read(anthropic_messages, output_format={"type": "json_schema", "schema": given}).schema,
    ]
    for (schema,) in schemas:
        assert meant | schema == meant
