"""Oracle: what each field may be. A refused request is a 4xx with OpenAI's error object in one
line, and changes nothing for others."""

from __future__ import annotations

import threading

import pytest

from tests.server.conftest import MESSAGES

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

WRONG = {
    "no object": b"[]",
    "no json": b"{",
    "no utf-8": b"\xff\xfe",
    "nan": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "infinite": b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    "surrogate in a key": b'{"messages": [], "\\ud800": 1}',
    "many digits": b'{"messages": [], "seed": ' + b"9" * 5000 + b"}",
    "depth": b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "depth of objects": b'{"a":' * 150 + b"1" + b"}" * 150,
    "no messages": {},
    "messages": {"messages": "hello"},
    "empty messages": {"messages": []},
    "no role": {"messages": [{"content": "no role"}]},
    "role": {"messages": [{"role": "king", "content": "a"}]},
    "no content": {"messages": [{"role": "user"}]},
    "image": {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}]},
    "max_tokens": {"max_tokens": -2},
    "no tokens": {"max_tokens": 0},
    "2**63 tokens": {"max_tokens": 2**63},
    "text tokens": {"max_tokens": "8"},
    "true tokens": {"max_tokens": True},
    "hot": {"temperature": "hot"},
    "2**63 degrees": {"temperature": 9223372036854775808},
    "true degrees": {"temperature": True},
    "cold": {"temperature": -0.1},
    "top_p": {"top_p": 1.5},
    "top_k": {"top_k": -2},
    "penalty": {"repetition_penalty": 1e30},
    "negative penalty": {"repetition_penalty": -1},
    "tiny penalty": {"repetition_penalty": 1e-38},
    "presence": {"presence_penalty": 3},
    "frequency": {"frequency_penalty": -2.5},
    "true logprobs": {"logprobs": True, "top_logprobs": True},
    "logprobs": {"logprobs": 5},
    "many logprobs": {"logprobs": True, "top_logprobs": 21},
    "lone top_logprobs": {"top_logprobs": 2},
    "n": {"n": 0},
    "many n": {"n": 17},
    "stop": {"stop": 5},
    "many stops": {"stop": ["a"] * 17},
    "bias": {"logit_bias": {"a": 1}},
    "bias beyond": {"logit_bias": {"4096": 1}},
    "large bias": {"logit_bias": {"5": 101}},
    "tools": {"tools": "none"},
    "tool": {"tools": [5]},
    "tool kind": {"tools": [{"type": "web_search"}]},
    "nameless tool": {"tools": [{"type": "function", "function": {}}]},
    "two of a name": {"tools": [TOOL, TOOL]},
    "choice": {"tools": [TOOL], "tool_choice": "maybe"},
    "choice of none": {"tool_choice": "required"},
    "unknown choice": {"tools": [TOOL], "tool_choice": {
        "type": "function", "function": {"name": "leap"}}},
    "format": {"response_format": {"type": "xml"}},
    "no schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
    "bad schema": {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"type": "nothing"}}}},
    "schema without a first token": {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"$ref": "#"}}}},
    "template": {"chat_template_kwargs": {"messages": 3}},
    "another template": {"chat_template_kwargs": {"template": "a"}},
    "self": {"chat_template_kwargs": {"self": 1}},
    "templates": {"chat_template_kwargs": 3},
    "seed": {"seed": 2**70},
    "half a seed": {"seed": 1.5},
    "lone stream_options": {"stream_options": {"include_usage": True}},
    "unknown": {"grammar": "root ::= 'a'"},
    "functions": {"functions": [{"name": "look"}]},
    "audio": {"modalities": ["text", "audio"]},
    "long": {"messages": [{"role": "user", "content": "def f(x):" * 3000}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def running(server):
    """Another client's stream, which all refusals leave alone."""
    alone = server.chat(max_tokens=60)["choices"][0]["message"]["content"]
    said = []

    def stream():
        events = server.stream(PATH, {"messages": MESSAGES, "max_tokens": 60})
        chunks = [data for _, data in events if data != "[DONE]"]
        said.append("".join(c["choices"][0]["delta"].get("content", "") for c in chunks))

    thread = threading.Thread(target=stream)
    thread.start()
    yield
    thread.join()
    assert said == [alone]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_400_in_one_line(server, running, name):
    body = WRONG[name]
    if isinstance(body, dict) and body:
        body = {"messages": MESSAGES, "max_tokens": 2, **body}
    status, reply = server.ask(PATH, body)
    assert status == 400, reply
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    assert len(error["message"]) > 10


def test_models_and_their_names(tiny, server):
    status, models = server.ask("/v1/models")
    assert (status, [m["id"] for m in models["data"]]) == (200, ["tiny"])
    for name in ("tiny", "gpt-4o", "org/name"):
        status, model = server.ask(f"/v1/models/{name}")
        assert (status, model["id"], model["object"]) == (200, "tiny", "model")
    assert server.chat(model="gpt-4o")["model"] == "tiny"


def test_unknown_paths_and_methods(server):
    for path, method, expected in (
        ("/v1/nothing", "GET", 404), ("/v1/nothing", "POST", 404), (PATH, "GET", 405),
    ):  # fmt: skip
        status, reply = server.ask(path, b"{}" if method == "POST" else None, method=method)
        assert status == expected
        assert reply["error"]["message"]


EXTREMES = {
    "cold": {"temperature": 1e-320}, "top_p": {"temperature": 1, "top_p": 1e-300},
    "no top_p": {"temperature": 1, "top_p": 0}, "min_p": {"temperature": 2, "min_p": 1},
    "top_k": {"temperature": 2, "top_k": 2**63 - 1}, "penalty": {"repetition_penalty": 0.01},
    "xtc": {"temperature": 2, "xtc_probability": 1, "xtc_threshold": 0},
    "seed": {"temperature": 1, "seed": -(2**63)},
    "last seed": {"temperature": 1, "seed": 2**63 - 1, "n": 2},
    "bias": {"logit_bias": {str(i): -100 for i in range(4096)}},
}  # fmt: skip


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_values_are_served_and_leave_others_alone(server, running, name):
    reply = server.chat(**{"max_tokens": 3, **EXTREMES[name]})
    assert all(choice["finish_reason"] for choice in reply["choices"])
