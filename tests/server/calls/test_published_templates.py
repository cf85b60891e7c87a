"""Published chat templates, in a folder that MOEFLUX_TEMPLATES names: one ``*.jinja`` file each, as
llama.cpp keeps them in ``models/templates``. Oracle: what transformers makes of the same turns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest
from jinja2.sandbox import SecurityError

from mlx_moeflux import generation
from mlx_moeflux.server.calls.reader import whole_calls
from mlx_moeflux.server.calls.registry import SYNTAXES
from mlx_moeflux.server.calls.splitter import ToolSplitter
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import read_body
from mlx_moeflux.server.protocols import openai_chat
from tests.server.conftest import service_of

pytestmark = pytest.mark.slow
ENCODER = "encode_bounded"
FOLDER = os.environ.get("MOEFLUX_TEMPLATES")


class Family(NamedTuple):
    """How a family's own code gives messages: the field of reasoning, whether arguments of calls
    are text, and the content of a message of calls alone."""

    reasoning: str = "reasoning_content"
    text: bool = False
    empty: str | None = ""


# Of families that the package loads: part of a file's name -> family.
FAMILIES = {
    "Qwen-Qwen3-0.6B": Family(),
    "Qwen3-Coder": Family(),
    "Qwen3.5-4B": Family(empty=None),
    "DeepSeek-V3.1": Family(),
    "DeepSeek-R1-Distill-Llama": Family(text=True, empty=None),
    "DeepSeek-R1-Distill-Qwen": Family(empty=None),
    "GLM-4.6": Family(),
    "GLM-4.7-Flash": Family(),
    "Kimi-K2-Instruct": Family(text=True, empty=None),
    "Kimi-K2-Thinking": Family(text=True, empty=None),
    "MiniMax-M2": Family(),
    "gpt-oss-120b": Family("thinking"),
    "Hermes-3": Family(),
    "gemma-4": Family(),
    "laguna_v2": Family(),
    "laguna_v8": Family(),
}
TOOLS = [
    {"type": "function", "function": {
        "name": "read", "description": "Read a file.",
        "parameters": {"type": "object", "required": ["path"], "properties": {
            "path": {"type": "string", "description": "Its path."},
            "lines": {"type": "integer"},
            "kind": {"type": "string", "enum": ["text", "bytes"]},
        }}}},
    {"type": "function", "function": {
        "name": "stop", "description": "Stop.",
        "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip


def call(name, number, **arguments):
    return {"id": f"functions.{name}:{number}", "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)}}  # fmt: skip


def result(name, number, text):
    return {"role": "tool", "tool_call_id": f"functions.{name}:{number}", "name": name,
            "content": text}  # fmt: skip


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is in a?"}]
CALLED = {"role": "assistant", "content": "", "reasoning_content": "I look at it.",
          "tool_calls": [call("read", 0, path="a", lines=3)]}  # fmt: skip
READ = [*ASKED, CALLED, result("read", 0, "A line.\n")]
TURNS = {
    "question": ASKED,
    "result": READ,
    "question after an answer": [
        *ASKED, {"role": "assistant", "content": "A.", "reasoning_content": "Why?"},
        {"role": "user", "content": "And b?"},
    ],
    "question after a call": [
        *READ, {"role": "assistant", "content": "It is a line.", "reasoning_content": "So."},
        {"role": "user", "content": "And <b> & 'ü'?"},
    ],
    "two calls": [
        *ASKED,
        {"role": "assistant", "content": "", "reasoning_content": "Two.",
         "tool_calls": [call("read", 0, path="a"), call("read", 1, path="b \"x\"")]},
        result("read", 0, "1"), result("read", 1, "2"),
    ],
    "no system message": ASKED[1:],
}  # fmt: skip


def expected(template, messages, tools, family, **variables):
    """What transformers renders, of messages as the family's own code gives them."""
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    turns = json.loads(json.dumps(messages))
    for message in turns:
        if "reasoning_content" in message:
            message[family.reasoning] = message.pop("reasoning_content")
        if "tool_calls" in message:
            message["content"] = family.empty
        for one in message.get("tool_calls", ()):
            if not family.text:
                one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    (text,), _ = utilities.render_jinja_template(
        [turns], tools=tools, chat_template=template, add_generation_prompt=True, **variables
    )
    return text


def families():
    files = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else ()
    for part in FAMILIES:
        found = [file for file in files if part in file.name]
        skip = pytest.mark.skipif(not found, reason="MOEFLUX_TEMPLATES has no such file")
        yield pytest.param(part, found[:1], id=part, marks=skip)


@pytest.mark.parametrize(("part", "files"), [*families()])
@pytest.mark.parametrize(
    ("turns", "tools"),
    [
        (turns, tools)
        for turns, messages in TURNS.items()
        for tools in (True, False)
        if tools or (CALLED not in messages and len(messages) < 5)
    ],
)
def test_prompts_are_those_of_transformers(tiny, monkeypatch, part, files, tools, turns):
    model, tokenizer = tiny
    template, messages = files[0].read_text("utf-8"), TURNS[turns]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    monkeypatch.setattr(tokenizer, "tool_template", None)
    given = TOOLS if tools else None
    service = service_of(model, tokenizer)
    body = {"messages": messages, **({"tools": given} if given else {})}
    texts = []

    def noted(tokenizer, text, most, **_):
        texts.append(text)
        return tokenizer.encode(text[:100], add_special_tokens=False)

    monkeypatch.setattr(generation.prompt, ENCODER, noted)
    request = openai_chat.read(read_body(openai_chat.Body, json.dumps(body)), service)
    names = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token}
    if "Kimi" in part and given:  # as its own tokenizer does
        given = json.loads(json.dumps(given, sort_keys=True))
    try:
        right = expected(template, messages, given, FAMILIES[part], **names)
    except (TypeError, SecurityError):
        # A template that needs tools, and one that changes a list.
        with pytest.raises(RequestError, match="the chat template refuses these messages"):
            service.render(request)
        return
    service.render(request)
    assert texts[0] == right


def test_calls_that_deepseek_v32s_own_encoder_writes_are_read_back():
    """Its checkpoint has no template but code; mlx-lm has that code."""
    encoder = pytest.importorskip("mlx_lm.chat_templates.deepseek_v32")
    arguments = {"path": 'a "b"\n\'c\'', "lines": 3, "deep": {"a": [1, None, {"b": "\n</x>"}]},
                 "text": '{"a": 1}', "empty": "", "no": False, "é": "ü\\"}  # fmt: skip
    calls = [call("read", 0, **arguments), call("stop", 1)]
    turns = [*ASKED, {**CALLED, "content": "Two.", "tool_calls": calls}]
    text = encoder.encode_messages(turns, tools=TOOLS).rpartition("</think>")[2]
    text = text.removesuffix(encoder.eos_token)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for cut in (1, len(text)):
        splitter = ToolSplitter(SYNTAXES["deepseek_v3.2"], schemas)
        found = [splitter.add(text[i : i + cut]) for i in range(0, len(text), cut)]
        found.append(splitter.add("", final=True))
        assert "".join(one.text for one in found) == "Two."
        read = whole_calls(part for one in found for part in one.calls)
        assert [(c.name, json.loads(c.arguments)) for c in read] == [
            ("read", arguments),
            ("stop", {}),
        ]
