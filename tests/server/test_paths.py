"""Oracle: what clients ask of a base URL that ends with /v1, and what Codex asks before a turn."""

from __future__ import annotations

import pytest

from tests.server.conftest import MESSAGES

# Fields that Codex 0.145 and 0.169 do not read a catalogue without.
REQUIRED = {
    "slug": str, "display_name": str, "supported_reasoning_levels": list, "shell_type": str,
    "visibility": str, "supported_in_api": bool, "priority": int, "base_instructions": str,
    "supports_reasoning_summaries": bool, "support_verbosity": bool, "truncation_policy": dict,
    "supports_parallel_tool_calls": bool, "context_window": int,
    "experimental_supported_tools": list,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", None), ("/v1/models/any", None),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"temperature": 9}), ("/v1/messages", {"temperature": 9}),
        ("/v1/responses", {"temperature": 9}),
    ],
)  # fmt: skip
def test_v1_twice_is_v1(server, path, body):
    """The same answer or refusal, in the protocol's own form, apart from ids and times."""
    once, twice = (server.ask(each, body) for each in (path, f"/v1{path}"))
    for _, reply in (once, twice):
        for name in ("id", "created", "usage"):
            reply.pop(name, None)
    assert once == twice
    assert once[0] == (400 if body and "temperature" in body else 200)


def test_nothing_else_is_served_twice(server):
    for path in ("/v1/health", "/v1/v1/v1/models", "/v1/v1/props"):
        assert server.ask(path)[0] == 404


def test_codex_gets_its_catalogue(server):
    status, reply = server.ask("/v1/models?client_version=0.169.0")
    assert status == 200
    (entry,) = reply.pop("models")
    assert reply == server.ask("/v1/models")[1]
    assert {name: type(entry[name]) for name in REQUIRED} == REQUIRED
    assert entry["slug"] == reply["data"][0]["id"]
    assert entry["context_window"] == reply["data"][0]["context_length"]
    assert len(entry["base_instructions"]) > 100


@pytest.mark.parametrize("nothing", ["", []])
def test_codex_asks_nothing_for_one_token(server, nothing):
    body = {"model": "m", "input": nothing, "max_output_tokens": 1}
    status, reply = server.ask("/v1/responses", body)
    assert (status, reply["object"]) == (200, "response")
    assert reply["usage"]["output_tokens"] == 1
