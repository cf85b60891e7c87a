"""Requests that agents sent, recorded from Codex 0.169 and Claude Code 2.1.197 with their texts
cut. Oracle: the events that each of them reads, and the text of generate()."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_moeflux import generate
from tests.server.conftest import served

RECORDED = Path(__file__).parent / "recorded"
# As Qwen3.5's: a system message stands at the beginning or nowhere.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}def{% endif %}{# <tool_call></tool_call> #}"
)


def recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text("utf-8"))


@pytest.fixture
def strict(tiny, monkeypatch):
    monkeypatch.setattr(tiny[1], "chat_template", STRICT)
    with served(*tiny) as server:
        yield server


def test_codex_event_by_event(strict, tiny):
    body = {**recorded("codex"), "max_output_tokens": 12}
    events = strict.stream("/v1/responses", body)
    kinds = [name for name, _ in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    deltas = [data["delta"] for _, data in events if data["type"] == "response.output_text.delta"]
    assert kinds[4:] == [
        *["response.output_text.delta"] * len(deltas), "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    system = "\n\n".join(["A long text.", "A long text.A long text."])
    messages = [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": text} for text in ("A long text.", "import os")]
    assert "".join(deltas) == generate(*tiny, messages, max_tokens=12)
    (item,) = events[-1][1]["response"]["output"]
    assert item == events[-2][1]["item"]
    assert item["content"][0]["text"] == "".join(deltas)


def test_claude_code_event_by_event(strict, tiny):
    body = {**recorded("claude_code"), "max_tokens": 12}
    events = strict.stream("/v1/messages?beta=true", body)
    kinds = [name for name, _ in events]
    deltas = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * len(deltas),
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    # The line that changes is gone, and the system message at the end is a user's.
    messages = [
        {"role": "system", "content": "A long text.\n\nA long text."},
        {"role": "user", "content": "A long text.\nimport os"},
        {"role": "user", "content": "A long text."},
    ]
    assert "".join(deltas) == generate(*tiny, messages, max_tokens=12)
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 12
    counted = {name: value for name, value in body.items() if name not in ("max_tokens", "stream")}
    status, count = strict.ask("/v1/messages/count_tokens?beta=true", counted)
    usage = events[0][1]["message"]["usage"]
    assert (status, count["input_tokens"]) == (200, usage["input_tokens"])
