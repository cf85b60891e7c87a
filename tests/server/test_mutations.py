"""Requests with random values in random places are served, or refused with a 4xx in JSON."""

from __future__ import annotations

import copy
import json
import logging
import random
from pathlib import Path

import pytest

JUNK = [
    None, True, False, 0, -1, 1.5, 2**63, 1e300, 1e-300, "", "x", "ééé", "<tool_call>", "{", [],
    [None], [1], ["a"], {}, {"a": 1}, {"type": "text"}, {"name": "f"}, "required", "assistant",
    {"type": "json_schema"}, {"$ref": "#"}, {"role": "user"}, "a" * 3000,
]  # fmt: skip
RECORDED = Path(__file__).parent / "recorded"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
TOOL = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x", "y"]}}}
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "import os"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "two"},
        {"role": "user", "content": "go on"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL}}],
    "tool_choice": "auto", "parallel_tool_calls": True, "temperature": 0.5, "top_p": 0.9, "n": 2,
    "stop": ["zz"], "seed": 1, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": TOOL}},
    "chat_template_kwargs": {"a": 1}, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "max_tokens": 2,
}  # fmt: skip


def recorded(name, **options):
    return {**json.loads((RECORDED / f"{name}.json").read_text("utf-8")), **options}


BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "import", "logprobs": 1, "n": 1, "stop": "q", "max_tokens": 2},
    "/v1/responses": recorded("codex", max_output_tokens=2),
    "/v1/messages": recorded("claude_code", max_tokens=2),
    "/v1/messages/count_tokens": recorded("claude_code", stream=None),
    "/tokenize": {"content": "a", "add_special": True},
    "/detokenize": {"tokens": [1, 2]},
}


def places(value, at=()):
    """The keys that lead to each value inside of `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*at, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*at, key))


def mutated(body, draw):
    body = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 2])):
        if found := list(places(body)):
            *path, last = draw.choice(found)
            inner = body
            for key in path:
                inner = inner[key]
            inner[last] = copy.deepcopy(draw.choice(JUNK))
    return {**body, "stream": draw.random() < 0.5} if "stream" in body else body


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", BODIES)
def test_mutated_requests_are_served_or_refused(server, path, count, caplog):
    caplog.set_level(logging.ERROR, "mlx_moeflux.server")
    draw = random.Random(count)
    assert server.ask(path, BODIES[path])[0] == 200
    for _ in range(count):
        body = mutated(BODIES[path], draw)
        status, reply = server.ask(path, body)
        assert 200 <= status < 500, (body, reply)
        assert status == 200 or isinstance(reply["error"], dict)
    # The end of another test's request may still be noted here.
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
