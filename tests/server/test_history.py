"""Oracle: the messages that the model is shown, by hand; and the types of the official clients, of
which no history may have one that is refused."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import pytest
import typing_extensions

from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import read_body
from mlx_moeflux.server.protocols import anthropic_messages, openai_chat, openai_responses
from tests.server.conftest import service_of
from tests.server.scripted import Script, saying

PNG = "iVBORw0KGgo="
IMAGE = "[image: not readable by this model]"
USER, GO_ON = {"role": "user", "content": "x"}, {"role": "user", "content": "go on"}
FILE = {
    "type": "input_file",
    "filename": "a.pdf",
    "file_data": f"data:application/pdf;base64,{PNG}",
}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
INPUT_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}
BLOCK_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG},
    "cache_control": {"type": "ephemeral"},
}
PDF = {
    "type": "document",
    "title": "Report",
    "source": {"type": "base64", "media_type": "application/pdf", "data": PNG},
}


@pytest.fixture(scope="module")
def service(tiny):
    return service_of(*tiny)


@pytest.fixture
def shown(service):
    """(protocol, messages or items) -> the messages that the template gets."""

    def read(protocol, messages):
        field = "input" if protocol is openai_responses else "messages"
        body = read_body(protocol.Body, json.dumps({field: messages}))
        return protocol.read(body, service).messages

    return read


def chat_call(arguments, **more):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [{**call, **more}]}


def test_an_image_in_a_session_reaches_the_prompt_as_a_text(tiny):
    """Through the real server: an agent read a picture, and its user goes on."""
    bodies = {
        "/v1/chat/completions": {"messages": [
            USER, chat_call("{}"), {"role": "tool", "tool_call_id": "c", "content": [CHAT_IMAGE]},
            GO_ON]},
        "/v1/messages": {"messages": [
            USER, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [BLOCK_IMAGE]},
                {"type": "text", "text": "go on"}]}]},
        "/v1/responses": {"input": [
            USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}, GO_ON]},
    }  # fmt: skip
    script = Script("Done.")
    with saying(*tiny, script) as server:
        for path, body in bodies.items():
            status, reply = server.ask(path, body)
            assert (status, "Done." in json.dumps(reply)) == (200, True), reply
    assert len(set(script.prompts)) == 1
    assert f"</tool_call># tool: {IMAGE}# user: go on" in script.prompts[0].replace("\n", "")


# What the model is shown


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (CHAT_IMAGE, IMAGE),
        ({"type": "file", "file": {"filename": "a.pdf", "file_data": PNG}},
         "[document: a.pdf, not readable by this model]"),
        ({"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
         "[audio: not readable by this model]"),
        ({"type": "video_url", "video_url": {"url": "http://127.0.0.1:1/a.mp4"}},
         "[video: not readable by this model]"),
        ({"type": "refusal", "refusal": "I will not."}, "I will not."),
        ({"type": "thinking", "thinking": "well", "signature": "s"}, "[thinking: well]"),
        ({"type": "hologram", "cube": {"x": 0, "blob_id": "7"}, "data": PNG, "item_id": "i"},
         '[hologram: {"x": 0, "blob_id": "7"}]'),
        ({"type": "hologram", "cube": {"type": ["x", "y"], "id": "7", "a": "data: 5"}},
         "[hologram: data: 5]"),
        ({"type": "hologram", "a": "b", "c": ["d"], "blob": "Ab+/" * 60},
         '[hologram: {"a": "b", "c": ["d"]}]'),
        ({"type": "hologram"}, "[hologram]"),
        ({"text": "untyped"}, "untyped"),
    ],
    ids=str,
)  # fmt: skip
def test_parts_of_a_chat_become_texts(shown, part, text):
    """In earlier questions, in replies and in results; text before and behind stays."""
    parts = [{"type": "text", "text": "a"}, part, {"type": "text", "text": "b"}]
    whole = f"a{text}b" if text in ("I will not.", "untyped") else f"a\n{text}\nb"
    messages = [
        {"role": "user", "content": parts}, {"role": "assistant", "content": parts},
        chat_call("{}"), {"role": "tool", "tool_call_id": "c", "content": [part]},
    ]  # fmt: skip
    for further in ([], [GO_ON]):
        found = shown(openai_chat, [*messages, *further])
        assert [found[i]["content"] for i in (0, 1, 3)] == [whole, whole, text]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (BLOCK_IMAGE, IMAGE),
        (PDF, "[document: Report, not readable by this model]"),
        ({**PDF, "source": {"type": "text", "media_type": "text/plain", "data": "one two"}},
         "Report\none two"),
        ({"type": "document", "source": {"type": "content", "content": [
            {"type": "text", "text": "one"}, BLOCK_IMAGE]}}, f"one\n{IMAGE}"),
        ({"type": "search_result", "source": "http://a", "title": "T", "content": [
            {"type": "text", "text": "found"}]},
         '[search result: {"source": "http://a", "title": "T", "content": ["found"]}]'),
        ({"type": "tool_reference", "tool_name": "WebFetch"}, "[tool reference: WebFetch]"),
        ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
         '[server tool use: {"name": "web_search", "input": {"query": "q"}}]'),
        ({"type": "web_search_tool_result", "tool_use_id": "s", "content": [
            {"type": "web_search_result", "title": "T", "url": "http://a", "encrypted_a": PNG}]},
         '[web search tool result: [{"title": "T", "url": "http://a"}]]'),
        ({"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": {
            "type": "bash_code_execution_result", "stdout": "1\n", "stderr": "", "return_code": 2,
            "content": []}},
         '[bash code execution tool result: {"stdout": "1\\n", "return_code": 2}]'),
        ({"type": "mcp_tool_result", "tool_use_id": "s", "content": [BLOCK_IMAGE]},
         f'[mcp tool result: ["{IMAGE}"]]'),
        ({"type": "compaction", "content": "a summary"}, "[compaction: a summary]"),
        ({"type": "container_upload", "file_id": "f"}, "[container upload]"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_blocks_of_anthropic_become_texts(shown, block, text):
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    use = {"type": "tool_use", "id": "t", "name": "Read", "input": {"file": "a.png"}}
    found = shown(
        anthropic_messages,
        [
            {"role": "user", "content": [block, {"type": "text", "text": "look"}]},
            {"role": "assistant", "content": [block, use]},
            # Beside a result stands what belongs to it.
            {"role": "user", "content": [result, block]},
        ],
    )
    assert [message["content"] for message in found] == [f"{text}\nlook", text, text, text]
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "user"]
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"file": "a.png"}


CALL = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}


def called(name, arguments):
    function = {"name": name, "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(text):
    return {"role": "tool", "content": text, "tool_call_id": "c"}


def said(text):
    return {"role": "assistant", "content": text}


ITEMS = [
    ([CALL, {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE, FILE]}],
     [called("view_image", {}),
      result(f"{IMAGE}\n[document: a.pdf, not readable by this model]")]),
    ([{"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
      {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}],
     [called("apply_patch", {"input": "*** Begin"}), result("ok")]),
    ([{"type": "local_shell_call", "id": "i", "call_id": "c", "status": "completed", "action": {
        "type": "exec", "command": ["ls"], "env": {}}},
      {"type": "local_shell_call_output", "id": "c", "output": "a.txt"}],
     [called("local_shell", {"type": "exec", "command": ["ls"], "env": {}}), result("a.txt")]),
    ([{"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
      {"type": "shell_call_output", "call_id": "c", "output": [
          {"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
          {"stdout": "", "stderr": "no", "outcome": {"type": "exit", "exit_code": 1}}]}],
     [called("shell", {"commands": ["ls"]}),
      result('{"stdout": "a.txt", "outcome": {"exit_code": 0}}\n'
             '{"stderr": "no", "outcome": {"exit_code": 1}}')]),
    ([{"type": "apply_patch_call", "call_id": "c", "operation": {
        "type": "delete_file", "path": "a"}},
      {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"}],
     [called("apply_patch", {"type": "delete_file", "path": "a"}), result("failed")]),
    ([{"type": "computer_call", "id": "i", "call_id": "c", "action": {
        "type": "screenshot"}, "pending_safety_checks": []},
      {"type": "computer_call_output", "call_id": "c", "output": {
          "type": "computer_screenshot", "image_url": f"data:image/png;base64,{PNG}"}}],
     [called("computer", {"type": "screenshot"}), result(IMAGE)]),
    ([{"type": "web_search_call", "id": "w", "status": "completed", "action": {
        "type": "search", "query": "weather"}},
      {"type": "message", "role": "assistant", "content": [
          {"type": "output_text", "text": "Rain.", "annotations": []}]}],
     [said("[web search call: weather]\nRain.")]),
    ([{"role": "assistant", "content": "Let me see."},
      {"type": "mcp_call", "id": "m", "name": "find", "server_label": "s", "arguments": "{}",
       "output": "here"}],
     [said('Let me see.\n[mcp call: {"name": "find", "server_label": "s", "arguments": "{}", '
           '"output": "here"}]\n')]),
    ([{"type": "image_generation_call", "id": "i", "result": "Ab+/" * 999, "status": "completed"}],
     [said("[image generation call]\n")]),
    ([{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
     [said("no")]),
    ([{"type": "item_reference", "id": "msg_1"}, {"id": "rs_1"}, {"type": None, "id": "fc_1"},
      {"type": "compaction", "encrypted_content": "x"}], []),
]  # fmt: skip


def kind(value: Any) -> str:
    return value[0].get("type", "message") if value else ""


@pytest.mark.parametrize(("items", "expected"), ITEMS, ids=kind)
def test_items_of_responses_become_messages(shown, items, expected):
    last = [] if expected and expected[-1]["role"] == "tool" else [GO_ON]
    assert shown(openai_responses, [USER, *items, *last]) == [USER, *expected, *last]


def test_tools_that_the_history_brings_are_offered(service):
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    found = {"type": "namespace", "name": "g", "tools": [tool, {**tool, "name": "h"}]}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [{**tool, "name": "a"}, tool]},
        {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "g"}},
        {"type": "tool_search_output", "call_id": "c", "tools": [found, {**tool, "name": "a"}]},
        USER,
    ]
    body = read_body(openai_responses.Body, json.dumps({"input": items, "tools": [tool]}))
    request = openai_responses.read(body, service)
    names = [one["function"]["name"] for one in request.tools]
    assert names == ["f", "a", "g__f", "g__h"]
    assert request.namespaces == {"g__f": ("g", "f"), "g__h": ("g", "h")}
    assert request.messages == [called("tool_search", {"query": "g"}), result("f, h, a"), USER]


# Broken calls, nulls, and echoed fields

BROKEN = {
    '{"p": "a': '{"p": "a', "[1, 2]": "[1, 2]", '"text"': '"text"', "nothing": "nothing",
    '{"p": NaN}': '{"p": NaN}', "[" * 9999: "[" * 9999, 5: "5",
}  # fmt: skip
WHOLE = [(None, {}), ("", {}), (" ", {}), ({"p": "a"}, {"p": "a"}), ('{"p": "a"}', {"p": "a"})]


@pytest.mark.parametrize("given", [*BROKEN.items(), *WHOLE], ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("syntax", ["hermes", "deepseek_v3.1"])
def test_arguments_of_earlier_calls_are_never_refused(tiny, given, syntax):
    """Templates take a mapping, in which the text of broken ones is a value, or a text."""
    service, (arguments, meant) = service_of(*tiny, tool_parser=syntax), given
    broken = isinstance(meant, str)
    if syntax == "hermes":
        expected = {"arguments": meant} if broken else meant
    else:
        expected = meant if broken else json.dumps(meant)
    use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    function_call = {"name": "f", "arguments": arguments}
    for protocol, message in (
        (openai_chat, chat_call(arguments)),
        (openai_chat, {"role": "assistant", "content": None, "function_call": function_call}),
        (anthropic_messages, {"role": "assistant", "content": [use]}),
        (openai_responses, item),
    ):
        field = "input" if protocol is openai_responses else "messages"
        body = read_body(protocol.Body, json.dumps({field: [USER, message, GO_ON]}))
        (call,) = protocol.read(body, service).messages[1]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": expected}


def test_a_template_that_walks_arguments_renders_broken_ones(tiny, monkeypatch):
    """Qwen's templates do so."""
    monkeypatch.setattr(
        tiny[1],
        "chat_template",
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}{% endfor %}"
        "{% endfor %}{% endfor %}{# <tool_call> <function= #}",
    )
    service = service_of(*tiny)
    body = read_body(openai_chat.Body, json.dumps({"messages": [chat_call('{"p": "a'), GO_ON]}))
    ids = service.render(openai_chat.read(body, service)).ids
    assert '<parameter=arguments>{"p": "a' in tiny[1].decode(ids)


def test_what_is_null_or_missing_is_empty(shown):
    roles = ("user", "system", "developer", "assistant", "tool", "function")
    messages = [{"role": role, "content": None} for role in roles]
    messages += [{"role": role} for role in roles]
    found = shown(openai_chat, [USER, *messages, GO_ON])
    assert [message["content"] for message in found] == ["x", *[""] * 12, "go on"]
    assert found[6] == {"role": "tool", "content": "", "tool_call_id": ""}
    parts = [{"type": "text", "text": None}, {"type": "tool_result", "tool_use_id": "t"}]
    messages = [{"role": role, "content": None} for role in ("user", "assistant")]
    messages += [{"role": "user", "content": parts}]
    messages += [{"role": "assistant", "content": [{"type": "thinking", "thinking": None}]}, USER]
    assert [m["content"] for m in shown(anthropic_messages, messages)] == [*[""] * 5, "x"]
    items = [{**CALL, "arguments": None}, {**CALL, "type": "function_call_output", "output": None}]
    items += [{"type": "reasoning", "content": None}, {"role": "assistant", "content": None}]
    assert [m["content"] for m in shown(openai_responses, [*items, USER])] == ["", "", "", "x"]


ECHOED = {
    "openai, parse() and append": {"parsed": {"a": 1}, "refusal": None, "annotations": [{"a": 1}]},
    "litellm": {"provider_specific_fields": {"refusal": None, "x": 1}, "audio": {"id": "1"}},
    "OpenRouter": {"reasoning_details": [{"type": "reasoning.text", "text": "x"}]},
    "Copilot": {"reasoning_opaque": "x", "reasoning_text": "y"},
    "CodeCompanion": {"id": 7, "opts": {"visible": False}, "_meta": {"cycle": 1}},
    "Aider": {"cache_control": {"type": "ephemeral"}},
    "Mistral": {"prefix": False, "index": 3, "name": "n"},
    "of another type": {"reasoning_content": {"text": "x"}, "reasoning": [1], "refusal": 5},
    "anthropic, model_dump()": {
        "id": "msg_1", "type": "message", "model": "m", "stop_reason": "end_turn",
        "stop_sequence": None, "usage": {"input_tokens": 1}, "container": {"id": "c"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ECHOED)
def test_echoed_fields_change_nothing(shown, name):
    """In every message, question and call; also in the newest one."""
    for protocol, role in (
        (openai_chat, "user"), (openai_chat, "assistant"), (openai_chat, "system"),
        (anthropic_messages, "user"), (anthropic_messages, "assistant"),
        (openai_responses, "user"), (openai_responses, "assistant"),
    ):  # fmt: skip
        extra = dict(ECHOED[name])
        if protocol is openai_responses and "type" not in extra:
            extra |= {"status": "completed", "phase": "final_answer"}
        plain = [USER, {"role": role, "content": "b"}, GO_ON]
        marked = [{**message, **extra} if message["role"] == role else message for message in plain]
        assert shown(protocol, marked) == shown(protocol, plain)
    extra = {"index": 0, "extra_content": {"google": {}}, "provider_specific_fields": {"a": 1}}
    assert shown(openai_chat, [chat_call("{}", **extra), GO_ON]) == shown(
        openai_chat, [chat_call("{}"), GO_ON]
    )
    custom = {"id": 7, "type": "custom", "custom": {"name": "f", "input": "x"}}
    messages = [{"role": "assistant", "tool_calls": [custom]}, GO_ON]
    (call,) = shown(openai_chat, messages)[0]["tool_calls"]
    assert call == {"id": "7", **called("f", {"input": "x"})["tool_calls"][0]} | {"id": "7"}


# Values of any type

VALUES = [
    (None, ""), ("a", "a"), (5, "5"), (1.5, "1.5"), (0, "0"), (True, "true"), (False, "false"),
    ([], ""), (["a", "b"], '["a", "b"]'), ([1, None, True], "[1, true]"), ({}, "{}"),
    ({"rows": [1]}, "[1]"), ({"ok": False, "n": 1}, '{"ok": false, "n": 1}'),
    ([{"type": "text", "text": "a"}, 5], '["a", 5]'), ([{"type": "text", "text": 5}], '5'),
    ([{"a": 1, "b": 2}], '{"a": 1, "b": 2}'),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), VALUES, ids=lambda value: str(value)[:20])
def test_a_result_of_any_type_is_read(shown, value, text):
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    given = {"type": "tool_result", "tool_use_id": "c", "content": value}
    for protocol, messages in (
        (openai_chat, [chat_call("{}"), {"role": "tool", "tool_call_id": "c", "content": value}]),
        (anthropic_messages, [{"role": "assistant", "content": [use]},
                              {"role": "user", "content": [given]}]),
        (openai_responses, [CALL, {**CALL, "type": "function_call_output", "output": value}]),
        (openai_responses, [{**CALL, "type": "local_shell_call"},
                            {**CALL, "type": "local_shell_call_output", "output": value}]),
    ):  # fmt: skip
        (last,) = shown(protocol, [USER, *messages])[2:]
        assert (last["role"], last["content"]) == ("tool", text)


CALLS = {
    "none": [({}, []), ([], []), ("", []), ([{}], []), ([None], []), (5, [])],
    "without a name": [
        ([{"id": "1", "function": {"arguments": "{}"}}], [("", {})]),
        ([{"id": "1", "function": {"name": None, "arguments": '{"a": 1}'}}], [("", {"a": 1})]),
        ([{"id": "1", "type": "function"}], [("", {})]),
        ([{"id": [1], "function": {"name": 7}}], [("", {})]),
    ],
    "in other forms": [
        ({"id": "1", "function": {"name": "f"}}, [("f", {})]),
        ([{"id": "1", "name": "f", "arguments": {"a": 1}}], [("f", {"a": 1})]),
        ([{"custom": {"name": "f", "input": ["x"]}}], [("f", {"input": '["x"]'})]),
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_any_form_are_read(shown, name):
    for calls, expected in CALLS[name]:
        message = {"role": "assistant", "content": "t", "tool_calls": calls}
        found = shown(openai_chat, [USER, message, GO_ON])[1]
        functions = [call["function"] for call in found.get("tool_calls", [])]
        assert [(one["name"], one["arguments"]) for one in functions] == expected


def test_calls_without_a_name_are_read_in_every_protocol(shown):
    for value in (None, 5, ["f"], {}):
        use = {"type": "tool_use", "id": "c", "name": value, "input": {"a": 1}}
        item = {"type": "function_call", "call_id": "c", "name": value, "arguments": '{"a": 1}'}
        for protocol, message in (
            (anthropic_messages, {"role": "assistant", "content": [use]}),
            (openai_responses, item),
        ):
            (call,) = shown(protocol, [USER, message, GO_ON])[1]["tool_calls"]
            assert call["function"] == {"name": "", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "why"},
        {"content": [{"type": "reasoning_text", "text": "why"}]},
        {"content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "y"}]},
        {"content": {"type": "reasoning_text", "text": "why"}},
        {"content": None, "summary": [{"type": "summary_text", "text": "why"}]},
        {"content": [], "summary": "why"},
        {"content": "why", "summary": "shorter"},
    ],
)
def test_reasoning_with_texts_is_read(shown, fields):
    items = [{"type": "reasoning", "id": "r", **fields}, {"role": "assistant", "content": "b"}]
    assert shown(openai_responses, [USER, *items, GO_ON])[1]["reasoning_content"] == "why"
    if isinstance(text := fields["content"], str | list) and text:
        block = {"type": "thinking", "thinking": text, "signature": ""}
        message = {"role": "assistant", "content": [block, {"type": "text", "text": "b"}]}
        found = shown(anthropic_messages, [USER, message, GO_ON])[1]
        assert (found["reasoning_content"], found["content"]) == ("why", "b")


JUNK = [None, True, 0, 1.5, "", "x", [], [None], [1], ["a"], [{}], {}, {"a": 1}, [{"type": "text"}]]
HISTORY = {
    openai_chat: [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, CHAT_IMAGE], "name": "n"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}], "reasoning_content": "r",
         "reasoning": "r", "thinking": "r", "refusal": "no", "tool_calls": [
             {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": [{"type": "text",
                                                                        "text": "c"}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "d"},
        GO_ON,
    ],
    anthropic_messages: [
        {"role": "user", "content": [{"type": "text", "text": "a"}, BLOCK_IMAGE, PDF]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "r", "signature": "s"},
            {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "is_error": False,
                                      "content": [{"type": "text", "text": "c"}]}]},
        GO_ON,
    ],
    openai_responses: [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "r"}],
         "content": [{"type": "reasoning_text", "text": "r"}], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "namespace": "g", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1",
         "output": [{"type": "input_text", "text": "c"}]},
        {"type": "custom_tool_call", "name": "f", "input": "x", "call_id": "2"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "y"},
        GO_ON,
    ],
}  # fmt: skip


def changed(value: Any) -> Iterator[Any]:
    """Yield a history with each value in it replaced by one of each JSON type. Roles and types
    stay."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if key in ("role", "type"):
            continue
        others = [] if isinstance(value, list) and "role" in (inner or {}) else JUNK
        deeper = changed(inner) if isinstance(inner, dict | list) else ()
        for other in (*others, *deeper):
            copied = dict(value) if isinstance(value, dict) else list(value)
            copied[key] = other
            yield copied


@pytest.mark.parametrize("protocol", HISTORY, ids=lambda module: module.__name__)
def test_no_value_in_the_history_is_refused(shown, protocol):
    *history, last = HISTORY[protocol]
    if protocol is openai_responses:
        # An item without a type is a message.
        histories = [[*history[:i], one, *history[i + 1 :]]
                     for i, item in enumerate(history) for one in changed(item)]  # fmt: skip
    else:
        histories = list(changed(history))
    assert len(histories) > 200
    for given in histories:
        assert shown(protocol, [*given, last])[-1] == last


HALVES = [
    ('"a \\ud83d"', "a \ufffd"), ('"\\ude00 a"', "\ufffd a"), ('"\\ud83d\\ud83d"', "\ufffd\ufffd"),
    ('"\\ud83d\\ude00 \\ud83d"', "\U0001f600 \ufffd"), ('"é \\udfff"', "é \ufffd"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "read"), HALVES)
def test_half_a_surrogate_is_a_replacement_character(shown, text, read):
    call = f'{{"function": {{"name": "f", "arguments": {{{text}: [{text}]}}}}}}'
    messages = (
        f'[{{"role": "user", "content": {text}}}, {{"role": "assistant", "tool_calls": [{call}]}},'
        f'{{"role": "tool", "content": [{{"type": "text", "text": {text}}}]}}]'
    )
    body = read_body(openai_chat.Body, f'{{"messages": {messages}}}')
    assert body.messages[0].content.text == body.messages[2].content.text == read
    assert body.messages[1].tool_calls[0].function.arguments == {read: [read]}
    # Within the text of a call's arguments, as a client gets it and sends it back.
    message, _ = shown(openai_chat, [chat_call(f'{{"a": {text}}}'), GO_ON])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": read}


# New requests


@pytest.mark.parametrize(
    ("protocol", "content", "place"),
    [
        (openai_chat, 5, ""),
        (openai_chat, ["a"], ".0"),
        (openai_chat, [{"type": "text", "text": 5}], ".0.text"),
        (anthropic_messages, [{"type": "text", "text": 5}], ".0.text"),
        (anthropic_messages, [{"type": "text", "text": "a"}, 5], ".1"),
        (openai_responses, [{"type": "input_text", "text": "a"}, {"type": 5}], ".1.type"),
    ],
)
def test_a_new_question_of_a_wrong_type_is_refused(shown, protocol, content, place):
    """And is history once there is a message behind it."""
    field = "input" if protocol is openai_responses else "messages"
    message = {"role": "user", "content": content}
    with pytest.raises(RequestError) as caught:
        shown(protocol, [message])
    assert (caught.value.param, caught.value.code) == (f"{field}.0.content{place}", None)
    assert str(caught.value).startswith(f"'{field}.0.content{place}' is ")
    assert shown(protocol, [message, GO_ON])[-1] == GO_ON


@pytest.mark.parametrize(
    ("protocol", "part", "place", "word"),
    [
        (openai_chat, CHAT_IMAGE, "messages.1.content.1.image_url", "image"),
        (openai_chat, {"type": "file", "file": {}}, "messages.1.content.1.file", "document"),
        (openai_chat, {"type": "input_audio"}, "messages.1.content.1.input_audio", "audio"),
        (anthropic_messages, BLOCK_IMAGE, "messages.1.content.1.image", "image"),
        (anthropic_messages, PDF, "messages.1.content.1.document", "document"),
        (anthropic_messages, {"type": "hologram"}, "messages.1.content.1.hologram", "content"),
        (openai_responses, INPUT_IMAGE, "input.1.content.1.input_image", "image"),
        (openai_responses, FILE, "input.1.content.1.input_file", "document"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_new_question_with_what_cannot_be_read_is_refused(shown, protocol, part, place, word):
    """And is history once there is a message behind it: no session ends for it."""
    first = {"role": "assistant", "content": "hello"}
    asked = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}
    for further in ([], [{"role": "system", "content": "s"}]):
        with pytest.raises(RequestError, match="this model reads text") as caught:
            shown(protocol, [first, asked, *further])
        assert (caught.value.status, caught.value.param) == (400, place)
        assert f"'{place}' is not supported" in str(caught.value)
        assert f"no {word}" in str(caught.value)
    for further in ([GO_ON], [first], [first, GO_ON]):
        found = shown(protocol, [first, asked, *further])
        assert found[1]["content"].startswith("what is it?\n[")


def test_a_new_question_of_text_by_another_name_is_read(shown):
    document = {"type": "document", "source": {"type": "text", "data": "one two"}, "title": "T"}
    (message,) = shown(anthropic_messages, [{"role": "user", "content": [document]}])
    assert message["content"] == "T\none two"


@pytest.mark.parametrize(
    ("protocol", "messages", "place"),
    [
        (openai_chat, [{"role": "user"}], "messages.0.content"),
        (openai_chat, [USER, {"role": "user", "content": None}], "messages.1.content"),
        (anthropic_messages, [{"role": "user"}], "messages.0.content"),
        (openai_responses, [USER, {"role": "user"}], "input.1.content"),
        (openai_responses, [USER, {"type": "compaction_trigger"}], "input.1"),
    ],
)
def test_a_new_question_without_a_text_is_refused(shown, protocol, messages, place):
    with pytest.raises(RequestError) as caught:
        shown(protocol, messages)
    assert (caught.value.status, caught.value.param) == (400, place)
    assert shown(protocol, [*messages, GO_ON])[-1] == GO_ON


# All types of the official clients


def members(kind: Any) -> list[Any]:
    """The classes of a union of classes."""
    if isinstance(kind, type):
        return [kind]
    return [one for inner in get_args(kind) for one in members(inner)]


def sample(kind: Any, name: str = "") -> Any:
    """A JSON value of a type, with all of its fields."""
    origin = get_origin(kind)
    if origin in (typing.Annotated, typing_extensions.Required, typing_extensions.NotRequired):
        return sample(get_args(kind)[0], name)
    if origin is Literal:
        return get_args(kind)[0]
    if origin in (typing.Union, types.UnionType):
        return sample(next(one for one in get_args(kind) if one is not type(None)), name)
    if origin in (list, Iterable, Sequence):
        return [sample(one, name) for one in get_args(kind)[:1]]
    if origin is dict or kind is dict:
        return {"key": name}
    if hasattr(kind, "model_fields"):
        fields = {k: field.annotation for k, field in kind.model_fields.items()}
        return {k: sample(inner, k) for k, inner in fields.items()}
    if typing_extensions.is_typeddict(kind):
        fields = typing_extensions.get_type_hints(kind, include_extras=True)
        return {k: sample(inner, k) for k, inner in fields.items()}
    return {bool: True, int: 1, float: 0.5, type(None): None}.get(kind, f"the {name}")


def test_all_items_of_responses_are_read(shown):
    responses = pytest.importorskip("openai.types.responses")
    kinds = {}
    for union in ("ResponseInputItem", "ResponseItem", "ResponseOutputItem"):
        kinds |= {kind: sample(kind) for kind in members(getattr(responses, union))}
    assert len({item["type"] for item in kinds.values()}) >= 31
    for item in kinds.values():
        for history in ([USER, item, GO_ON], [item, GO_ON], [USER, item, item, GO_ON]):
            found = shown(openai_responses, history)
            assert found[-1] == GO_ON
            text = json.dumps(found)
            skipped = openai_responses.SKIPPED | {"additional_tools"}
            new = len(found) > len(history) - history.count(item)
            assert new != (item["type"] in skipped), item
            assert "encrypted" not in text
            if item["type"].endswith("_output") and "result" not in item and "tools" not in item:
                assert found[-2]["role"] == "tool"


@pytest.mark.slow
def test_all_blocks_of_anthropic_are_read(shown):
    pytest.importorskip("anthropic")
    from anthropic.types import MessageParam, ToolResultBlockParam
    from anthropic.types.beta import BetaMessageParam, BetaToolResultBlockParam

    def content(kind):
        found = members(typing_extensions.get_type_hints(kind)["content"])
        return {one: None for one in found if typing_extensions.is_typeddict(one)}

    messages = [*members(MessageParam), *members(BetaMessageParam)]
    blocks = [sample(one) for one in {k: 0 for message in messages for k in content(message)}]
    results = [ToolResultBlockParam, BetaToolResultBlockParam]
    parts = [sample(one) for one in {k: 0 for result in results for k in content(result)}]
    assert len({block["type"] for block in blocks}) >= 23
    assert len({part["type"] for part in parts}) >= 6
    for block in blocks:
        for role in ("user", "assistant", "system"):
            message = {"role": role, "content": [block]}
            assert shown(anthropic_messages, [USER, message, GO_ON])[-1] == GO_ON
    for part in parts:
        result = {"type": "tool_result", "tool_use_id": "t", "content": [part]}
        (found,) = shown(anthropic_messages, [{"role": "user", "content": [result]}])
        assert found["role"] == "tool"
        assert found["content"]


def test_all_messages_of_chats_are_read(shown):
    chat = pytest.importorskip("openai.types.chat")
    kinds = members(chat.ChatCompletionMessageParam)
    kinds += [chat.ChatCompletionMessage, chat.ParsedChatCompletionMessage]
    for kind in kinds:
        assert shown(openai_chat, [USER, sample(kind), GO_ON])[-1] == GO_ON
    for kind in members(chat.ChatCompletionContentPartParam):
        found = shown(openai_chat, [{"role": "user", "content": [sample(kind)]}, GO_ON])
        assert found[0]["content"]
