"""Oracle: our own generate() on the same messages, asked for over HTTP."""

from __future__ import annotations

import threading

import pytest

from mlx_moeflux import generate
from tests.server.conftest import MESSAGES

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def expected(tiny):
    """Greedy text of a number of tokens."""
    model, tokenizer = tiny

    def text(count, **options):
        return generate(model, tokenizer, MESSAGES, max_tokens=count, **options)

    return {count: text(count) for count in (8, 24)}


def test_a_whole_reply(server, expected):
    reply = server.chat()
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected[8], "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    usage = reply["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert (reply["object"], reply["model"]) == ("chat.completion", "tiny")


def test_streams_at_once_get_the_text_of_each_alone(server, expected):
    said = {}

    def stream(i):
        body = {"messages": MESSAGES, "max_tokens": 24, "stream_options": {"include_usage": True}}
        said[i] = server.stream(PATH, body)

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for events in said.values():
        *chunks, (_, last), (_, done) = events
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 24
        deltas = [chunk["choices"][0]["delta"] for _, chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == expected[24]
        assert len(deltas) > 4
        assert [c["choices"][0]["finish_reason"] for _, c in chunks][-1] == "length"
        assert all(chunk["usage"] is None for _, chunk in chunks)


def test_null_is_unset(server, expected):
    names = ("temperature", "top_p", "n", "stop", "seed", "logprobs", "top_logprobs", "logit_bias")
    names += ("tools", "tool_choice", "response_format", "stream_options", "max_completion_tokens")
    reply = server.chat(**dict.fromkeys(names), user="me", store=False)
    assert reply["choices"][0]["message"]["content"] == expected[8]


def test_developer_is_system(server):
    said = [
        server.chat(messages=[{"role": role, "content": "Be brief."}, *MESSAGES])
        for role in ("developer", "system")
    ]
    assert said[0]["choices"] == said[1]["choices"]


def test_parts_of_content_are_one_text(server, expected):
    parts = [{"type": "text", "text": "import"}, {"type": "text", "text": " os"}]
    reply = server.chat(messages=[{"role": "user", "content": parts}])
    assert reply["choices"][0]["message"]["content"] == expected[8]
