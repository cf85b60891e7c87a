"""A session of 40 requests as an agent sends them. Oracle: what llama.cpp's server would read of
the same prompts, by its rule for a slot.

The system prompt has a line that changes with each request, the template leaves out the reasoning
of earlier questions, and the tools come in another order once.
"""

from __future__ import annotations

import json
import random

import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from tests.server.scripted import Script, saying

REQUESTS = 40
# llama.cpp at b10262: --ctx-checkpoints, and the least distance of two.
MOST_CHECKPOINTS, LEAST_DISTANCE = 32, 64
TEMPLATE = (
    "{% set last = namespace(at=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% if tools %}# tools: {{ tools | tojson }} <tool_call>{name, arguments}</tool_call>\n"
    "{% endif %}"
    "{% for m in messages %}# {{ m.role }}:\n"
    "{% if m.reasoning_content and loop.index0 > last.at %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}# assistant:\n{% endif %}"
)
WORDS = ["read", "the", "file", "and", "look", "for", "what", "calls", "it", "then", "mend"]


def session(server, script):
    """Send the requests; return the tokens that the server read of each prompt."""
    draw = random.Random(1)
    tools = [
        {"name": name, "description": "A tool.", "input_schema": {
            "type": "object", "properties": {"path": {"type": "string"}}}}
        for name in ("read", "edit", "run")
    ]  # fmt: skip
    messages, read = [], []

    def text(count):
        return " ".join(draw.choices(WORDS, k=count))

    for i in range(REQUESTS):
        if i % 5 == 0:
            messages.append({"role": "user", "content": text(30)})
        if i == REQUESTS // 2:
            tools.reverse()
        call = "" if i % 5 == 4 else json.dumps({"name": "read", "arguments": {"path": text(3)}})
        call = call and f"<tool_call>\n{call}\n</tool_call>"
        script.texts = [f"<think>{text(20)}</think>{text(8)}{call}"]
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: {draw.random()}"},
            {"type": "text", "text": "You are an agent. " + " ".join(WORDS * 6)},
        ]
        body = {"system": system, "tools": tools, "messages": messages, "max_tokens": 400}
        status, reply = server.ask("/v1/messages", body)
        assert status == 200, reply
        read.append(reply["usage"]["input_tokens"])
        messages.append({"role": "assistant", "content": reply["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": text(40)}
            for block in reply["content"]
            if block["type"] == "tool_use"
        ]
        assert len(results) == bool(call)
        if results:
            messages.append({"role": "user", "content": results})
    return read


def shared(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))  # fmt: skip


def by_rule(turns, *, recurrent):
    """Return the tokens that one slot of llama.cpp reads of each prompt: all behind what it shares
    with the sequence that the slot holds. A recurrent state goes back to a checkpoint alone."""
    held, checkpoints, read = [], [], []
    for prompt, reply in turns:
        start = min(shared(prompt, held), len(prompt) - 1)
        if recurrent and start < len(held):
            start = max((at for at in checkpoints if at <= start), default=0)
        checkpoints = [at for at in checkpoints if at <= start]
        if len(prompt) - max(checkpoints, default=-LEAST_DISTANCE) >= LEAST_DISTANCE:
            checkpoints.append(len(prompt) - 1)
        checkpoints = checkpoints[-MOST_CHECKPOINTS:]
        read.append(len(prompt) - start)
        held = prompt + reply
    return read


@pytest.mark.slow
def test_an_agents_session_is_read_once(tiny, monkeypatch, record_property):
    model, tokenizer = tiny
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    script = Script("")
    with (
        PromptCache(replies=True) as cache,
        saying(model, tokenizer, script, cache=cache) as server,
    ):
        replies = []
        take = script.take

        def noted(tokenizer, job):
            take(tokenizer, job)
            replies.append(list(job.processors[-1]._ids[:-1]))

        monkeypatch.setattr(script, "take", noted)
        read = session(server, script)
    turns = list(zip([list(job.prompt) for job in script.jobs], replies, strict=True))
    assert len(turns) == REQUESTS
    attention, recurrent = (by_rule(turns, recurrent=r) for r in (False, True))
    counts = {"ours": read, "attention": attention, "recurrent": recurrent}
    for name, tokens in counts.items():
        record_property(name, sum(tokens))
    assert sum(read) <= sum(recurrent)
    # A request between two questions reads what is new: the result of a tool.
    assert all(ours - theirs < 3 for ours, theirs in zip(read, recurrent, strict=True))
