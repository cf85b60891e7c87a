"""Oracle: the prompt ends with the assistant's last message, the reply is what comes behind it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_moeflux.errors import InputError
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import read_body
from mlx_moeflux.server.protocols import anthropic_messages, info, openai_chat
from mlx_moeflux.tokenizer import load_tokenizer
from tests.server.conftest import service_of
from tests.server.scripted import spoken

# As Qwen3's, but for words: thinking stands before the last answer, and each turn has an end.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>\n{% endif %}{{ m.content }}<|end of a turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    "{# <tool_call></tool_call> #}"
)
USER = {"role": "user", "content": "Give JSON"}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
def prompt_of(tiny, monkeypatch):
    """(protocol, messages, fields) -> text of the prompt, and whether it ends in the thinking."""
    model, tokenizer = tiny
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    service = service_of(model, tokenizer, reasoning_parser="think")

    def render(protocol: Any, messages, **fields):
        body = read_body(protocol.Body, json.dumps({"messages": messages, **fields}))
        prompt = service.render(protocol.read(body, service))
        return tokenizer.decode(prompt.ids), prompt.opened

    return render


BEGIN = "<|user|>Give JSON<|end of a turn|>\n"
DONE = f"{BEGIN}<|assistant|><think></think>\n"


# A part of what the template writes behind it, too.
@pytest.mark.parametrize("text", ["{", "e", "n>", "<|end", "# Title\n\nOne", "a b", "turn|>"])
def test_a_last_message_is_the_end_of_the_prompt(prompt_of, text):
    for protocol in (anthropic_messages, openai_chat):
        assert prompt_of(protocol, [USER, said(text)]) == (DONE + text, False)
    blocks = [{"type": "text", "text": text}]
    assert prompt_of(anthropic_messages, [USER, said(blocks)]) == (DONE + text, False)
    for fields in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        assert prompt_of(openai_chat, [USER, said(text)], **fields)[0] == DONE + text


def test_a_chat_says_that_a_new_turn_begins(prompt_of):
    new = f"{DONE}{{<|end of a turn|>\n<|assistant|><think>\n"
    for fields in (
        {"continue_final_message": False}, {"add_generation_prompt": True},
        {"continue_final_message": False, "add_generation_prompt": True},
    ):  # fmt: skip
        assert prompt_of(openai_chat, [USER, said("{")], **fields) == (new, True)


@pytest.mark.parametrize(
    ("last", "fields"),
    [
        (USER, {}),
        (said(None, tool_calls=[CALL]), {}),
        (said("a", reasoning="Hm."), {}),
        (said("a"), {"response_format": {"type": "json_object"}}),
        (said("a"), {"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f"}}]}),
    ],
    ids=str,
)  # fmt: skip
def test_a_chat_that_ends_otherwise_begins_a_turn(prompt_of, last, fields):
    text, opened = prompt_of(openai_chat, [USER, last], **fields)
    assert text.endswith("<|end of a turn|>\n<|assistant|><think>\n")
    assert opened
    with pytest.raises(RequestError, match="the last message cannot be continued") as refused:
        prompt_of(openai_chat, [USER, last], continue_final_message=True, **fields)
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "tool_use", "id": "c", "name": "f", "input": {}}], "a tool call"),
        ([{"type": "thinking", "thinking": "Hm.", "signature": ""}], "reasoning"),
        ([{"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "f"}],
         "a tool call"),
        ("a ", "white space"), ("a\n", "white space"),
        ([{"type": "text", "text": "a\t"}], "white space"),
    ],
    ids=str,
)  # fmt: skip
def test_a_prefill_that_cannot_be_is_refused(prompt_of, tiny, content, words):
    with pytest.raises(RequestError, match=words) as refused:
        prompt_of(anthropic_messages, [USER, said(content)])
    assert (refused.value.status, "\n" in str(refused.value)) == (400, False)
    # Its tokens can be counted, as those of any history.
    service = service_of(*tiny)
    body = read_body(anthropic_messages.Body, json.dumps({"messages": [USER, said(content)]}))
    assert info.count_tokens(body, service)["input_tokens"] > 0


def test_a_prefill_and_a_schema_are_refused(prompt_of):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    with pytest.raises(RequestError, match="how the reply begins"):
        prompt_of(anthropic_messages, [USER, said("{")], output_config={"format": form})


@pytest.mark.parametrize("both", [True, False])
def test_two_wishes_that_contradict_are_refused(prompt_of, both):
    with pytest.raises(RequestError, match="must be the opposite") as refused:
        prompt_of(openai_chat, [USER, said("{")], continue_final_message=both,
                  add_generation_prompt=both)  # fmt: skip
    assert refused.value.param == "add_generation_prompt"


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        ("<think>\nWell", True), ("<think>\nWell</think>\nSo", False), ("So", False),
        ("<think>", True), ("a <think>b</think> c <think>d", True),
    ],
)  # fmt: skip
def test_a_message_may_end_inside_its_thinking(prompt_of, text, opened):
    assert prompt_of(openai_chat, [USER, said(text)])[1] == opened


@pytest.mark.parametrize(
    ("begun", "reply", "reasoning", "content"),
    [
        ("{", '"a": 1}', "", '"a": 1}'),
        ("So", "\n\n<think> is a tag.", "", "\n\n<think> is a tag."),
        ("<think>\nWell", ", yes.</think>\nSo", ", yes.", "So"),
    ],
)
def test_the_reply_is_what_comes_behind(tiny, monkeypatch, begun, reply, reasoning, content):
    """Through the server: the reply does not repeat the beginning, and is no thinking."""
    model, tokenizer = tiny
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    body = {"max_tokens": 99, "messages": [USER, said(begun)]}
    with spoken(model, tokenizer, reply, reasoning_parser="think") as server:
        message = server.chat(**body)["choices"][0]["message"]
        blocks = server.ask("/v1/messages", body)[1]["content"]
    assert (message["content"], message.get("reasoning_content", "")) == (content, reasoning)
    assert [b["text"] for b in blocks if b["type"] == "text"] == [content]
    assert [b["thinking"] for b in blocks if b["type"] == "thinking"] == [reasoning] * bool(
        reasoning
    )


def test_a_continued_answer_of_gpt_oss(tiny, monkeypatch):
    """It ends inside a message of the channel `final`; what follows has headers again."""
    model, tokenizer = tiny
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    reply = "to=them.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    with spoken(model, tokenizer, reply, reasoning_parser="harmony") as server:
        message = server.chat(messages=[USER, said("Write ")], max_tokens=99)["choices"][0][
            "message"
        ]
    assert (message["content"], message["reasoning_content"]) == ("to=them.", "Hm.")


def test_nothing_is_no_beginning(prompt_of):
    """An empty message: a chat begins a turn, a prefill of nothing opens one."""
    assert prompt_of(openai_chat, [USER, said("")])[0].endswith("<|assistant|><think>\n")
    assert prompt_of(anthropic_messages, [USER, said("")]) == (DONE, False)


# The tokenizer's part


@pytest.mark.parametrize(
    ("shown", "text", "end"),
    [
        ("m.content", "a \n", "[a \n"), ("m.content | trim", " a b ", "[a b"),
        ("m.content.split('</think>')[-1].strip()", "x</think>\n y\n", "[y"),
        ("m.content ~ '+' ~ m.content", "a", "[a+a"),
        ("m.content", None, "["),
    ],
)  # fmt: skip
def test_white_space_stays_unless_the_template_trims(continued, shown, text, end):
    messages = [USER, said(text)]
    assert continued(shown, messages).endswith(end)
    assert messages == [USER, said(text)]


def test_a_template_that_drops_the_message_is_one_line(continued):
    with pytest.raises(InputError, match="drops the message"):
        continued("'a'", [USER, said("a")])


@pytest.fixture
def continued():
    """(expression of a content, messages) -> text of the prompt."""
    tokenizer = load_tokenizer(BUNDLED_MODEL)

    def render(shown, messages):
        template = f"{{% for m in messages %}}[{{{{ {shown} }}}}]{{% endfor %}}"
        options: Any = {"chat_template": template, "continue_final_message": True}
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    return render
