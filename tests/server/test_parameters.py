"""Oracle: generate() with the same option, or what the option says of the reply itself."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux import generate
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.generation.prompt import prompt_ids
from mlx_moeflux.generation.sampling_fields import REQUEST_FIELDS
from mlx_moeflux.server.protocols.openai import Function, OpenAIBody
from mlx_moeflux.server.web import index_text
from tests.server.conftest import MESSAGES

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "server.md"
PATH = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LOOK = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
LOOK["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": LOOK}} for name in ("look", "go")
]


def content(reply, i=0):
    return reply["choices"][i]["message"]["content"]


@pytest.fixture(scope="module")
def greedy(tiny):
    return generate(*tiny, MESSAGES, max_tokens=24)


def test_n_replies_are_apart_and_a_seed_repeats_them(server):
    body = {"n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 6}
    replies = [server.chat(**body), server.chat(**body), server.chat(**{**body, "seed": 8})]
    texts = [[c["message"]["content"] for c in r["choices"]] for r in replies]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 1
    assert [c["index"] for c in replies[0]["choices"]] == [0, 1, 2]
    assert replies[0]["usage"]["completion_tokens"] == 18
    events = server.stream(PATH, {"messages": MESSAGES, **body})
    said = ["", "", ""]
    for _, data in events[:-1]:
        for choice in data["choices"]:
            said[choice["index"]] += choice["delta"].get("content", "")
    assert said == texts[0]


def test_a_seed_draws_the_same_beside_others(server):
    body = {"temperature": 1.5, "seed": 7, "max_tokens": 8}
    alone = content(server.chat(**body))
    others = [{"temperature": 2, "max_tokens": 12}, {"max_tokens": 12}, {**body, "seed": 8}]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda one: server.chat(**one), [*others, body]))
    assert content(replies[-1]) == alone
    assert content(replies[-2]) != alone


def test_stop_texts_span_tokens(server, tiny, greedy):
    """Each is found across the border of two tokens, and nothing of it is shown."""
    tokenizer = tiny[1]
    ids = tokenizer.encode(greedy, add_special_tokens=False)
    border = len(tokenizer.decode(ids[:6]))
    stop = greedy[border - 2 : border + 2]
    events = server.stream(PATH, {"messages": MESSAGES, "max_tokens": 24, "stop": stop})
    deltas = [data["choices"][0]["delta"] for _, data in events[:-1]]
    assert "".join(one.get("content", "") for one in deltas) == greedy[: greedy.index(stop)]


def test_stop_ends_the_text_before_it(server, greedy):
    stop = greedy[20:23]
    reply = server.chat(max_tokens=24, stop=["never", stop])
    assert content(reply) == greedy[: greedy.index(stop)]
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert content(server.chat(max_tokens=24, stop=stop)) == content(reply)


def test_logprobs_are_those_of_the_right_token(server, tiny):
    model, tokenizer = tiny
    ids = prompt_ids(model, tokenizer, MESSAGES)
    steps = generate_step(mx.array(ids), model, max_tokens=5)
    expected = [(token, logprobs.tolist()) for token, logprobs in steps]
    reply = server.chat(max_tokens=5, logprobs=True, top_logprobs=4)
    found = reply["choices"][0]["logprobs"]["content"]
    assert len(found) == 5
    for one, (token, logprobs) in zip(found, expected, strict=True):
        assert one["token"] == tokenizer.decode([token])
        assert bytes(one["bytes"]).decode() == one["token"]
        assert math.isclose(one["logprob"], logprobs[token], abs_tol=1e-4)
        top = [(other["token"], other["logprob"]) for other in one["top_logprobs"]]
        best = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[:4]
        assert [text for text, _ in top] == [tokenizer.decode([i]) for i in best]
        assert top[0] == (one["token"], one["logprob"])
        for (_, value), i in zip(top, best, strict=True):
            assert math.isclose(value, logprobs[i], abs_tol=1e-4)
    chunks = server.stream(
        PATH, {"messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 4}
    )
    streamed = []
    for _, data in chunks[:-1]:
        logprobs = data["choices"][0]["logprobs"]
        streamed += logprobs["content"] if logprobs else []
    assert streamed == found


def test_a_bias_moves_one_reply_alone(server, tiny, greedy):
    tokenizer = tiny[1]
    (banned, *_) = tokenizer.encode(greedy, add_special_tokens=False)
    biased = server.chat(logit_bias={str(banned): -100, "17": -1.5})
    expected = generate(*tiny, MESSAGES, max_tokens=8, logit_bias={banned: -100.0, 17: -1.5})
    assert content(biased) == expected != greedy
    assert content(server.chat(logit_bias={str(banned): 100}, max_tokens=4)) == (
        tokenizer.decode([banned] * 4)
    )


@pytest.mark.slow
def test_penalties_count_the_reply(server, greedy):
    """What was said once is never said again."""
    body = {"max_tokens": 24, "presence_penalty": 2, "frequency_penalty": 2, "logprobs": True}
    plain = server.chat(max_tokens=24, logprobs=True)["choices"][0]["logprobs"]["content"]
    other = server.chat(**body)["choices"][0]["logprobs"]["content"]
    repeats = [len(found) - len({one["token"] for one in found}) for found in (plain, other)]
    assert repeats[1] < repeats[0]
    # The first token knows no reply yet, and the prompt does not count.
    assert plain[0] == other[0]
    repeated = server.chat(max_tokens=24, repetition_penalty=1.5)
    assert content(repeated) != greedy
    assert content(server.chat(max_tokens=24, repetition_penalty=1.0)) == greedy


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_schema_holds(server, stream):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    body = {"messages": MESSAGES, "response_format": form, "max_tokens": 200}
    if stream:
        events = server.stream(PATH, body)
        deltas = [data["choices"][0]["delta"] for _, data in events[:-1]]
        text = "".join(delta.get("content", "") for delta in deltas)
    else:
        reply = server.chat(**body)
        assert reply["choices"][0]["finish_reason"] == "stop"
        text = content(reply)
    value = json.loads(text)
    assert set(value) == {"a", "b"}
    assert isinstance(value["a"], int)
    assert value["b"] in ("x", "y")


def test_any_object_is_an_object(server):
    reply = server.chat(response_format={"type": "json_object"}, max_tokens=300, temperature=0.3)
    if reply["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(content(reply)), dict)
    assert content(reply).lstrip().startswith("{")
    assert content(server.chat(response_format={"type": "text"})) == content(server.chat())


@pytest.mark.parametrize(
    ("stream", "choice", "names"),
    [
        (True, "required", {"look", "go"}),
        pytest.param(
            False, {"type": "function", "function": {"name": "go"}}, {"go"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_required_call_comes_with_valid_arguments(server, stream, choice, names):
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 400}
    body["parallel_tool_calls"] = False
    if stream:
        chunks = [data["choices"][0] for _, data in server.stream(PATH, body)[:-1]]
        parts = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
        assert {part["index"] for part in parts} == {0}
        arguments = "".join(part["function"]["arguments"] for part in parts)
        calls = [{**parts[0], "function": {**parts[0]["function"], "arguments": arguments}}]
        finish = chunks[-1]["finish_reason"]
    else:
        choice = server.chat(**body)["choices"][0]
        calls, finish = choice["message"]["tool_calls"], choice["finish_reason"]
        assert choice["message"]["content"] is None
    assert finish == "tool_calls"
    (call,) = calls
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] in names
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)


def test_tools_are_shown_unless_none_is_chosen(server, tiny):
    none = server.chat(tools=TOOLS, tool_choice="none")
    assert content(none) == content(server.chat())
    shown = server.chat(tools=TOOLS)
    assert shown["usage"]["prompt_tokens"] > none["usage"]["prompt_tokens"]
    ids = prompt_ids(*tiny, MESSAGES, tools=shown_tools(TOOLS))
    assert shown["usage"]["prompt_tokens"] == len(ids)


def shown_tools(tools):
    whole = {"type": "object", "properties": {}}
    return [
        {
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "parameters": {**whole, **tool["function"]["parameters"]},
            },
        }
        for tool in tools
    ]


def test_a_turn_with_calls_reads_on(server):
    """The state at the end of a turn is kept, and the next one begins there."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
    turn = [{"role": "user", "content": "look at" + " the long list" * 30}]
    first = server.chat(messages=turn, tools=TOOLS)
    turn += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "two", "tool_call_id": "1"},
    ]
    second = server.chat(messages=turn, tools=TOOLS)
    cached = [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in (first, second)]
    # All but what opens the reply.
    assert cached[1] >= first["usage"]["prompt_tokens"] - 3
    assert content(server.chat(messages=turn, tools=TOOLS)) == content(second)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ('{"required": ["b"], "type": "object", "properties": {"b": {}, "a": {}}}', ""),
        ("{}", '{"type": "object", "properties": {}}'),
        ('{"properties": {"a": {}}}', '{"properties": {"a": {}}, "type": "object"}'),
        ('{"type": "object", "$defs": {}}', '{"type": "object", "$defs": {}, "properties": {}}'),
    ],
)
def test_a_tool_is_shown_in_the_clients_order(given, shown):
    """Templates print it, and models were trained on this order."""
    tool = Function(parameters=json.loads(given), description="D.", name="read").tool()
    function = {"name": "read", "description": "D.", "parameters": json.loads(shown or given)}
    assert json.dumps(tool) == json.dumps({"type": "function", "function": function})


@pytest.mark.parametrize("name", REQUEST_FIELDS)
def test_a_field_of_sampling_is_in_the_body_the_page_and_the_documentation(name):
    assert name in OpenAIBody.model_fields
    assert f'<input name="{name}" type="number"' in index_text()
    openai = {"temperature", "top_p", "presence_penalty", "frequency_penalty"}
    assert name in openai or f"`{name}`" in DOCUMENTATION.read_text("utf-8")
