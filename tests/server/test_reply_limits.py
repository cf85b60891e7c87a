"""Oracle: the tokens that context and memory leave, counted by hand."""

from __future__ import annotations

import json

import pytest

from mlx_moeflux.experts.budget import format_bytes
from mlx_moeflux.server.app import PROTOCOLS
from mlx_moeflux.server.engine import EngineOptions
from mlx_moeflux.server.fields import read_body
from mlx_moeflux.server.request import UNLIMITED, Defaults
from tests.server.conftest import served, service_of

TEXT = "x " * 12
WORDS = " ".join(f"word{i}" for i in range(200))
PATHS = {
    "/v1/chat/completions": (("max_tokens", "max_completion_tokens"), "messages"),
    "/v1/completions": (("max_tokens",), "prompt"),
    "/v1/messages": (("max_tokens",), "messages"),
    "/v1/responses": (("max_output_tokens",), "input"),
}
REASONS = {"length", "max_tokens", "max_output_tokens"}


def asked(path, limit=None, text=TEXT):
    names, field = PATHS[path]
    body = {field: [{"role": "user", "content": text}] if field == "messages" else text}
    return [body] if limit == {} else [{**body, name: limit} for name in names]


def counted(path, reply):
    """(tokens of the prompt, tokens of the reply, why it ended)."""
    usage = reply["usage"]
    if "choices" in reply:
        reason = reply["choices"][0]["finish_reason"]
        return usage["prompt_tokens"], usage["completion_tokens"], reason
    if path == "/v1/messages":
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        return prompt, usage["output_tokens"], reply["stop_reason"]
    reason = (reply["incomplete_details"] or {}).get("reason")
    return usage["input_tokens"], usage["output_tokens"], reason


@pytest.fixture
def deaf(tiny, monkeypatch):
    """The model, whose replies no token of theirs ends."""
    monkeypatch.setattr(tiny[1], "eos_token_ids", {tiny[0].config.vocab_size - 1})
    return tiny


@pytest.mark.parametrize("default", [UNLIMITED, 3])
@pytest.mark.parametrize("path", PATHS)
def test_a_limit_is_the_requests_own_or_the_servers(tiny, path, default):
    service, protocol = service_of(*tiny, defaults=Defaults(max_tokens=default)), PROTOCOLS[path]
    for limit, expected in (({}, default), (None, default), (-1, -1), (2, 2), (10**9, 10**9)):
        for body in asked(path, limit):
            request = protocol.read(read_body(protocol.body, json.dumps(body)), service)
            assert service.limit(request) == expected
    assert Defaults().max_tokens == UNLIMITED


@pytest.mark.parametrize(("path", "limit"), list(zip(PATHS, [{}, -1, 10**9, -1], strict=True)))
def test_a_reply_may_take_what_the_context_leaves(deaf, monkeypatch, path, limit):
    context = len(deaf[1].encode(TEXT)) + 11
    monkeypatch.setattr(deaf[0].states, "max_context", context)
    with served(*deaf, defaults=Defaults()) as server:
        (body, *_) = asked(path, limit)
        status, reply = server.ask(path, body)
    assert status == 200, reply
    prompt, said, reason = counted(path, reply)
    # The last token needs no place.
    assert prompt + said == context + 1
    assert reason in REASONS
    assert reply.get("max_output_tokens") is None


@pytest.mark.parametrize(
    "path", [pytest.param("/v1/completions", marks=pytest.mark.slow), "/v1/messages"]
)
def test_memory_shortens_a_reply_and_is_named_where_it_holds_none(deaf, path):
    model, tokenizer = deaf
    assert model.state_bytes(256) < model.state_bytes(257)
    options = EngineOptions(state_bytes=model.state_bytes(256))
    long = tokenizer.decode(tokenizer.encode(WORDS)[:243])
    with served(*deaf, defaults=Defaults(), engine=options) as server:
        for limit in (-1, 32_000):
            (body, *_) = asked(path, limit, long)
            status, reply = server.ask(path, body)
            assert status == 200, reply
            prompt, said, reason = counted(path, reply)
            assert (prompt + said, prompt > 240) == (256, True)
            assert reason in REASONS
        (body, *_) = asked(path, 1, WORDS)
        for stream in (False, True):
            status, reply = server.ask(path, {**body, "stream": stream})
            assert status == 400
            message = reply["error"]["message"]
            assert f"in the {format_bytes(model.state_bytes(256))} for states" in message
            assert "raise --kv-memory" in message


@pytest.mark.parametrize("value", [0, -2, 1.5, True, "8", 2**63])
@pytest.mark.parametrize("path", PATHS)
def test_other_limits_are_refused(server, path, value):
    for body in asked(path, value):
        assert server.ask(path, body)[0] == 400
