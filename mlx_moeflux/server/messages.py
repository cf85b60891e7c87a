"""Messages in the forms that chat templates take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TESTS_FOR_NONE = re.compile(r"""(?<!\w)content['"]?\]?\s+is\s+(?:not\s+)?none""")


def without_empty_texts(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return messages of calls alone without a text, as OpenAI has them, if the template tests for
    that: DeepSeek-R1's takes an empty one for an answer and leaves the calls out."""
    if not _TESTS_FOR_NONE.search(template):
        return messages
    return [
        {**message, "content": None}
        if "tool_calls" in message and not message["content"]
        else message
        for message in messages
    ]


def with_reasoning(messages: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Return messages whose reasoning stands in the field that the template reads."""
    return [
        {field if name == "reasoning_content" else name: value for name, value in message.items()}
        for message in messages
    ]


def other_forms(messages: list[dict[str, Any]], field: str) -> Iterator[list[dict[str, Any]]]:
    """Yield messages as templates may take them that refuse them as they are, the least changed
    first. field: That of their reasoning."""
    first = _system_first(messages)
    found = [messages]
    for changed in (first, _one_text(messages, field), _one_text(first, field)):
        if changed not in found:
            found.append(changed)
            yield changed


def _one_text(messages: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Return messages with calls that have a text or reasoning and not both: gpt-oss's template
    takes one of them, and shows it as reasoning."""
    found = []
    for message in messages:
        if "tool_calls" in message and message["content"] and field in message:
            text = f"{message[field]}\n\n{message['content']}"
            message = {**message, "content": "", field: text}
        found.append(message)
    return found


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose system messages behind the first one are a user's: some templates
    refuse them, and agents send them."""
    return [
        {**message, "role": "user"} if i and message["role"] == "system" else message
        for i, message in enumerate(messages)
    ]
