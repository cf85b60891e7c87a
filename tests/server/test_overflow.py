"""Oracle: prompts of one token more and less, and the phrases of published agents. These read the
text of a refusal, not its code, and then shorten the conversation."""

from __future__ import annotations

import re

import pytest

from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.server.engine import EngineOptions
from tests.server.conftest import LIMITS, events_of, served, with_limits

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
CATALOGUE = "/v1/models?client_version=1"

# Of pi 0.73 and 1.6, Claude Code 2.1, opencode 1.18, Cline, Zed and litellm, as published.
PHRASES = {
    "pi, by Anthropic's words": r"(?i)prompt is too long",
    "pi and opencode, by OpenRouter's": r"(?i)maximum context length is \d+ tokens",
    "pi and opencode, by Groq's": r"(?i)reduce the length of the messages",
    "Claude Code, with two numbers": r"(?i)prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    "Zed, at the beginning": r"\Aprompt is too long: \d+ tokens",
    "Cline": r"(?i)\bcontext\s*(length|window)\b",
    "litellm": r"This model's maximum context length is",
}
# By these the first three take an error for another one.
OTHERS = r"(?i)rate limit|too many requests|throttling|service unavailable|overloaded"


def asked(path, ids, tokenizer):
    """A request whose prompt has so many tokens as a completion, and about so many in a chat."""
    text = tokenizer.decode(ids)
    if path == "/v1/completions":
        return {"prompt": ids, "max_tokens": 1}
    if path == "/v1/responses":
        return {"input": text, "max_output_tokens": 1}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


def said_room(server):
    """Place -> tokens of a prompt, as each answer states them."""
    entry, props = server.ask("/v1/models")[1]["data"][0], server.ask("/props")[1]
    catalogue = server.ask(CATALOGUE)[1]
    found = {"codex": catalogue["models"][0]["context_window"]}
    for place, one in (("models", entry), ("one", server.ask("/v1/models/x")[1]), ("props", props)):
        for name in (
            "context_length", "max_model_len", "max_context_length", "context_window",
            "max_input_tokens",
        ):  # fmt: skip
            found[place, name] = one[name]
        found[place, "meta"] = one["meta"]["n_ctx"]
    return {**found, "llama.cpp": props["default_generation_settings"]["n_ctx"]}


@pytest.fixture(scope="module", params=["context", "memory"])
def small(request, tiny):
    """A server whose context, or memory, holds a prompt of some 300 tokens, and that number."""
    model, tokenizer = tiny
    room = 300
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "context":
            patch.setattr(model.states, "max_context", room)
            options = EngineOptions()
        else:
            options = EngineOptions(state_bytes=model.state_bytes(room))
            with BatchGenerator(model, state_bytes=options.state_bytes) as generator:
                room = generator.prompt_room()
        with served(model, tokenizer, engine=options) as server:
            yield request.param, server, room


def test_what_is_said_is_what_a_prompt_may_have(tiny, small):
    """The refusal of one token more has both numbers."""
    _, server, room = small
    assert set(said_room(server).values()) == {room}
    assert 256 <= room < tiny[0].config.max_position_embeddings
    for tokens, expected in ((room - 1, 200), (room, 200), (room + 1, 400)):
        status, reply = server.ask("/v1/completions", {"prompt": [5] * tokens, "max_tokens": 9})
        assert status == expected, reply
    assert reply["error"]["message"].startswith(
        f"prompt is too long: {room + 1} tokens > {room} maximum."
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_agents_recognise_the_refusal(tiny, small, path, stream):
    limit, server, room = small
    body = {**asked(path, [5, 6] * room, tiny[1]), "stream": stream}
    status, reply = server.ask(path, body)
    if stream and path == "/v1/responses":
        # Codex goes by this event alone.
        events = events_of(reply)
        assert [name for name, _ in events] == ["response.created", "response.failed"]
        assert [data["sequence_number"] for _, data in events] == [0, 1]
        response = events[-1][1]["response"]
        assert (status, response["status"], response["output"]) == (200, "failed", [])
        error = {"type": "invalid_request_error", **response["error"]}
    else:
        error = reply["error"]
        assert (status, error["type"]) == (400, "invalid_request_error")
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    assert ("code" in error) == (path != "/v1/messages")
    missed = [who for who, phrase in PHRASES.items() if not re.search(phrase, error["message"])]
    assert missed == []
    assert not re.search(OTHERS, error["message"])
    tokens, most = map(int, re.findall(r"(\d+) tokens > (\d+)", error["message"])[0])
    assert (tokens > room, most) == (True, room)
    assert ("--kv-memory" in error["message"]) == (limit == "memory")


def test_tokens_are_counted_also_of_a_prompt_that_is_too_long(tiny, small):
    """By the same count as the refusal's."""
    _, server, room = small
    for ids in ([5] * 9, [5, 6] * room):
        body = asked("/v1/messages", ids, tiny[1])
        status, counted = server.ask("/v1/messages/count_tokens", body)
        assert status == 200
        status, reply = server.ask("/v1/messages", body)
        if status == 200:
            assert counted["input_tokens"] == reply["usage"]["input_tokens"] <= room
        else:
            assert f": {counted['input_tokens']} tokens > " in reply["error"]["message"]


def test_a_text_of_many_pieces_is_estimated(tiny, small):
    _, server, room = small
    text = "some words " * 60_000
    true = len(tiny[1].encode(text, add_special_tokens=False))
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    counted = server.ask("/v1/messages/count_tokens", body)[1]["input_tokens"]
    assert abs(counted - true) < 0.02 * true
    message = server.ask("/v1/messages", body)[1]["error"]["message"]
    assert message.startswith(f"prompt is too long: {counted} tokens > {room} maximum (the first")


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_too_large_is_too_long(tiny, path):
    """By its bytes, or by its commas and brackets."""
    for text, limits in (("x" * 9000, with_limits(body_bytes=5000)), ("," * 300_000, LIMITS)):
        with served(*tiny, limits=limits) as server:
            status, reply = server.ask(path, {"messages": [{"role": "user", "content": text}]})
            assert status == 413
            kinds = ("request_too_large", "invalid_request_error")
            assert reply["error"]["type"] == kinds[path != "/v1/messages"]
            assert reply["error"].get("code", "request_too_large") == "request_too_large"
            assert "prompt is too long" in reply["error"]["message"]
            assert "reduce the length of the messages" in reply["error"]["message"]


def test_a_strict_or_a_busy_server_is_not_taken_for_a_full_one(tiny, small):
    """Other refusals have none of the phrases."""
    _, server, _ = small
    for body in ({"messages": [{"role": "user"}]}, {"a": 1}, {"messages": 5}, {"max_tokens": 0}):
        for path in PATHS:
            status, reply = server.ask(path, body)
            assert status == 400
            for who, phrase in PHRASES.items():
                assert not re.search(phrase, reply["error"]["message"]), who
