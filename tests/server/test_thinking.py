"""Oracle: the variables that templates of families of models read, and what each does with them."""

from __future__ import annotations

import json

import pytest

from mlx_moeflux.sandbox.requests import TemplateNames, template_names
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import read_body
from mlx_moeflux.server.protocols import anthropic_messages, openai_chat, openai_responses
from tests.server.conftest import MESSAGES, service_of

TURNS = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
# Each ends with what it was told.
TEMPLATES = {
    # Qwen3, GLM-4.5: on unless told otherwise.
    "switch": "{% if enable_thinking is defined and enable_thinking is false %}off{% else %}on"
    "{% endif %}",
    # DeepSeek-V3.1, Kimi-K2.5: by another name; off by itself.
    "other switch": "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{{ 'on' if thinking else 'off' }}",
    # gpt-oss: prints what it is given, and cannot be turned off.
    "printed": "{% macro head() %}{% if reasoning_effort is not defined %}"
    "{% set reasoning_effort = 'medium' %}{% endif %}{{ 'R: ' + reasoning_effort }}{% endmacro %}"
    "{{ head() }}",
    # Mistral: off unless told otherwise.
    "effort": "{% set e = reasoning_effort | default('none') %}"
    "{% if e not in ['none', 'low', 'medium', 'high'] %}{{ raise_exception('no') }}{% endif %}"
    "{{ e }}",
    # Qwen3.8: a switch and its own efforts.
    "both": "{% if enable_thinking is undefined or enable_thinking %}"
    "{% set e = reasoning_effort | default('xhigh') %}"
    "{% if e not in ('xhigh', 'medium', 'low') %}{{ raise_exception('no') }}{% endif %}{{ e }}"
    "{% else %}off{% endif %}",
    "nothing": "{# enable_thinking #}{% set thinking = 1 %}-",
}
NOT, YES = {"enable_thinking": False}, {"enable_thinking": True}


@pytest.fixture
def told(tiny, monkeypatch):
    """(template, protocol, fields) -> what the template was told."""

    def ask(template, protocol=openai_chat, **fields):
        model, tokenizer = tiny
        monkeypatch.setattr(tokenizer, "chat_template", TURNS + TEMPLATES[template])
        service = service_of(model, tokenizer)
        field = "input" if protocol is openai_responses else "messages"
        body = read_body(protocol.Body, json.dumps({field: MESSAGES, **fields}))
        ids = service.render(protocol.read(body, service)).ids
        return tokenizer.decode(ids).rpartition("\n")[2]

    return ask


OFF = {
    "enable_thinking": False,
    "think": False,
    "thinking": {"type": "disabled"},
    "reasoning_effort": "none",
    "reasoning": {"enabled": False},
    "chat_template_kwargs": {"enable_thinking": False},
}
ON = {
    "enable_thinking": True,
    "think": True,
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "reasoning_effort": "medium",
    "reasoning": {"effort": "medium"},
    "chat_template_kwargs": {"thinking": True},
}


@pytest.mark.parametrize("name", OFF)
@pytest.mark.parametrize(
    ("template", "off", "on"),
    [
        ("switch", "off", "on"), ("other switch", "off", "on"), ("effort", "none", "medium"),
        ("printed", None, "R: medium"), ("nothing", None, None),
    ],
)  # fmt: skip
def test_a_client_is_understood_by_any_name(told, name, template, off, on):
    for value, expected in ((OFF[name], off), (ON[name], on)):
        if expected is not None:
            assert told(template, **{name: value}) == expected
            continue
        with pytest.raises(RequestError, match="has no switch") as refused:
            told(template, **{name: value})
        assert refused.value.status == 400
        assert (refused.value.param or "").partition(".")[0] == name
        assert f"leave '{refused.value.param}' out" in str(refused.value)


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        ("switch", {"reasoning_effort": "minimal"}, "off"),
        ("switch", {"reasoning_effort": "max"}, "on"),
        ("other switch", {"think": "low"}, "on"),
        ("other switch", {"reasoning": {"effort": "none"}}, "off"),
        ("printed", {"reasoning_effort": "minimal"}, "R: low"),
        ("printed", {"reasoning_effort": "xhigh"}, "R: high"),
        ("printed", {"reasoning": {"effort": "high"}}, "R: high"),
        ("effort", {"reasoning_effort": "max"}, "high"),
        ("effort", {"think": True, "reasoning_effort": "low"}, "low"),
        ("both", {"reasoning_effort": "high"}, "xhigh"),
        ("both", {"reasoning_effort": "minimal"}, "low"),
        ("both", {"reasoning_effort": "none"}, "off"),
        ("both", YES, "xhigh"),
        ("both", {**NOT, "reasoning_effort": "low"}, "off"),
        ("both", {"reasoning": {"enabled": False, "effort": "low"}}, "off"),
        ("switch", {**YES, "chat_template_kwargs": NOT}, "off"),
        ("other switch", {"chat_template_kwargs": {**NOT, "thinking": True}}, "on"),
        ("printed", {"chat_template_kwargs": {"reasoning_effort": "turbo"}}, "R: turbo"),
        ("nothing", {"reasoning": {}, "think": None, "chat_template_kwargs": {"a": False}}, "-"),
    ],
)
def test_efforts_and_switches_act_together(told, template, fields, expected):
    assert told(template, **fields) == expected


AGENTS = [
    (anthropic_messages, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}),
    (anthropic_messages, {"thinking": {"type": "enabled", "budget_tokens": 4000}}),
    (anthropic_messages, {"thinking": {"type": "disabled"}}),
    (anthropic_messages, {"output_config": {"effort": "new"}}),
    (openai_responses, {"reasoning": {"effort": "xhigh", "summary": "auto"}}),
    (openai_responses, {"reasoning": {"effort": "none"}}),
    (openai_responses, {"reasoning": {"enabled": False}}),
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("switch", ["on", "on", "off", "on", "on", "off", "off"]),
        ("printed", [f"R: {e}" for e in ("high", *["medium"] * 3, "high", *["medium"] * 2)]),
        ("both", ["xhigh", "xhigh", "off", "xhigh", "xhigh", "off", "off"]),
        ("nothing", ["-"] * 7),
    ],
)
def test_what_agents_send_always_acts_where_it_can(told, template, expected):
    said = [told(template, protocol, **fields) for protocol, fields in AGENTS]
    assert said == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "turbo"}, {"think": 0}, {"thinking": {"type": "perhaps"}},
        {"reasoning": {"max_tokens": 5}}, {"enable_thinking": []},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_wish_is_refused(told, fields):
    with pytest.raises(RequestError):
        told("both", **fields)


@pytest.mark.parametrize(
    "name", ["thinking_budget", "reasoning_budget", "include_reasoning", "no_think"]
)
def test_a_false_of_thinking_asks_for_something(told, name):
    for value in (False, 0):
        with pytest.raises(RequestError, match=f"'{name}' is not offered"):
            told("switch", **{name: value})
    for value in (None, "", [], {}):
        assert told("switch", **{name: value}) == "on"


@pytest.mark.parametrize("name", ["echo", "use_beam_search", "n_probs", "ignore_eos", "mirostat"])
def test_a_false_of_anything_else_asks_for_nothing(told, name):
    assert told("switch", **{name: False}) == told("switch", **{name: 0}) == "on"
    with pytest.raises(RequestError, match=f"'{name}' is not offered"):
        told("switch", **{name: True})


def test_a_cache_that_is_always_there_is_no_wish(told):
    assert told("switch", cache_prompt=True) == told("switch", cache_prompt=False) == "on"


# Earlier reasoning

CALLED = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
BACK = {
    openai_chat: {name: {"role": "assistant", "content": "b", name: "Hm."}
                  for name in ("reasoning_content", "reasoning", "thinking")},
    anthropic_messages: {"blocks": {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "b"}]}},
}  # fmt: skip


def shown_back(tiny, monkeypatch, template, messages, protocol=openai_chat):
    model, tokenizer = tiny
    monkeypatch.setattr(tokenizer, "chat_template", template)
    service = service_of(model, tokenizer)
    field = "input" if protocol is openai_responses else "messages"
    body = read_body(protocol.Body, json.dumps({field: messages}))
    return tokenizer.decode(service.render(protocol.read(body, service)).ids)


@pytest.mark.parametrize(
    "read",
    [
        "m.reasoning_content", "m['thinking']", "m.get('reasoning')",
        "m.reasoning_content or m.reasoning",
    ],
)  # fmt: skip
def test_reasoning_that_clients_give_back_reaches_the_template(tiny, monkeypatch, read):
    template = f"{{% for m in messages %}}{{{{ m.content }}}}<{{{{ {read} }}}}>{{% endfor %}}"
    said = set()
    for protocol, messages in BACK.items():
        for message in messages.values():
            history = [MESSAGES[0], message, MESSAGES[0]]
            said.add(shown_back(tiny, monkeypatch, template, history, protocol))
    items = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}]
    items = [MESSAGES[0], *items, {"role": "assistant", "content": "b"}, MESSAGES[0]]
    said.add(shown_back(tiny, monkeypatch, template, items, openai_responses))
    (text,) = said
    assert "b<Hm.>import os" in text


def test_a_template_that_takes_text_or_reasoning_gets_one(tiny, monkeypatch):
    """gpt-oss's refuses both in a message with calls."""
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('one') }}{% endif %}[{{ m.content }}|{{ m.thinking }}]{% endfor %}"
    )
    message = {"role": "assistant", "content": "b", "reasoning": "Hm.", "tool_calls": CALLED}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    for content, expected in (("b", "[|Hm.\n\nb]"), ("", "[|Hm.]")):
        history = [MESSAGES[0], {**message, "content": content}, result]
        assert expected in shown_back(tiny, monkeypatch, template, history)


def test_a_template_that_takes_no_late_system_message_keeps_text_and_reasoning(tiny, monkeypatch):
    """Qwen3.5's, to which Claude Code sends one with every turn."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('first') }}{% endif %}[{{ m.role }}|{{ m.content }}|"
        "{{ m.reasoning_content }}]{% endfor %}{{ 'x' if messages[1].thinking }}"
    )
    message = {"role": "assistant", "content": "b", "reasoning": "Hm.", "tool_calls": CALLED}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    history = [MESSAGES[0], message, result, {"role": "system", "content": "s"}]
    shown = shown_back(tiny, monkeypatch, template, history)
    assert shown == "[user|import os|][assistant|b|Hm.][tool|r|][user|s|]"
    # Both at once.
    both = template.replace("messages[1].thinking", "raise_exception('one') if messages[1].content")
    assert "[assistant||Hm.\n\nb][tool|r|][user|s|]" in shown_back(tiny, monkeypatch, both, history)


# A call without a text


@pytest.mark.parametrize(
    ("test", "shown"),
    [
        ("m['content'] is none", "call"),
        ("m.content is not none", "call"),
        ("content is none", "call"),
        ("m.content", ""),
        ("m.reasoning_content is not none", ""),
        ("m.content is string", ""),
    ],
)
def test_a_template_that_asks_whether_there_is_a_text_gets_none(tiny, monkeypatch, test, shown):
    """Others get an empty text, which they print or measure."""
    template = f"{{% for m in messages if {test} or 1 %}}{{{{ m.content or '' }}}}{{% endfor %}}"
    template += "{% if messages[1].content is sameas none %}call{% endif %}<tool_call></tool_call>"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for content in (None, ""):
        history = [MESSAGES[0], {"role": "assistant", "content": content, "tool_calls": [call]}]
        history.append({"role": "tool", "tool_call_id": "c", "content": "r"})
        said = shown_back(tiny, monkeypatch, template, history)
        assert said == f"import osr{shown}<tool_call></tool_call>"


# What a template reads


@pytest.mark.parametrize(
    ("template", "variables", "words"),
    [
        ("{{ a.b['c'] ~ 'd' }}e", {"a"}, {"b", "c", "d"}),
        ("{% set a = 1 %}{{ a }}{# b #}{% raw %}{{ c }}{% endraw %}", set(), set()),
        ("{% if 'x' in m %}{% generation %}{{ m.get('y') }}{% endgeneration %}{% endif %}",
         {"m"}, {"x", "get", "y"}),
        ("{{ raise_exception('" + "w" * 101 + "') }}{{ strftime_now('%d') }}", set(), {"%d"}),
        ("{% if", set(), set()),
    ],
    ids=["fields", "own", "methods", "functions", "broken"],
)  # fmt: skip
def test_names_of_a_template(template, variables, words):
    assert template_names(template) == TemplateNames(frozenset(variables), frozenset(words))
