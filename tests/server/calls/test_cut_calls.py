"""Oracle: calls written by hand in each syntax. A reply that ends inside a call has no such call,
and its text is kept; marks of a syntax inside a value are part of the value."""

from __future__ import annotations

import json
import random

import pytest

from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.assemble import Assembler
from mlx_moeflux.server.calls.reader import whole_calls
from mlx_moeflux.server.calls.registry import SYNTAXES
from mlx_moeflux.server.calls.splitter import CallSearch, ToolSplitter
from mlx_moeflux.server.engine import Token
from mlx_moeflux.server.reasoning import REASONING
from mlx_moeflux.tokenizer import load_tokenizer
from tests.server.conftest import MESSAGES
from tests.server.scripted import spoken

WRITE = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
}
TOOLS = {"write": WRITE, "now": {"type": "object", "properties": {}}}
CALLS = [
    ("write", {"path": "a.py", "content": "import os\nos.remove(p)\n"}),
    ("now", {}),
    ("write", {"path": "b", "content": 'x = "1"'}),
]


def xml(name, arguments):
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name, arguments, line="\n"):
    inner = "".join(
        f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}"
        for k, v in arguments.items()
    )
    return f"<tool_call>{name}{line}{inner}</tool_call>"


def minimax(name, arguments):
    inner = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments.items())
    return f'<invoke name="{name}">\n{inner}</invoke>\n'


def dsml(name, arguments):
    typed = (
        (k, "true", v) if isinstance(v, str) else (k, "false", json.dumps(v))
        for k, v in arguments.items()
    )
    inner = "".join(
        f'<｜DSML｜parameter name="{k}" string="{kind}">{v}</｜DSML｜parameter>\n'
        for k, kind, v in typed
    )
    return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'


def hermes(name, arguments):
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def deepseek(name, arguments, before="", after=""):
    inner = f"{name}{after}" if not before else f"{before}<｜tool▁sep｜>{name}{after}"
    separator = "" if before else "<｜tool▁sep｜>"
    close = "\n```" if before else ""
    text = f"{inner}{separator}{json.dumps(arguments)}{close}"
    return f"<｜tool▁call▁begin｜>{text}<｜tool▁call▁end｜>"


def kimi(name, arguments, number=0):
    head = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
    return f"{head}{json.dumps(arguments)}<|tool_call_end|>"


def harmony(name, arguments):
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{json.dumps(arguments)}<|call|>"


def marked(value):
    """A value as Gemma-4 writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{marked(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(marked, value))}]"
    return json.dumps(value)


def gemma(name, arguments):
    return f"<|tool_call>call:{name}{marked(arguments)}<tool_call|>"


# Syntax -> (begin of all, one call, text between two calls, end of all, end of one).
WRITERS = {
    "hermes": ("", hermes, "\n", "", "</tool_call>"),
    "qwen3_xml": ("", xml, "\n", "", "</tool_call>"),
    "glm4": ("", glm, "\n", "", "</tool_call>"),
    "minimax_m2": ("<minimax:tool_call>\n", minimax, "", "</minimax:tool_call>", "</invoke>"),
    "deepseek_v3.2": (
        "<｜DSML｜function_calls>\n", dsml, "", "</｜DSML｜function_calls>", "</｜DSML｜invoke>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        lambda name, arguments: deepseek(name, arguments, "function", "\n```json\n"),
        "\n",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁end｜>",
    ),
    "deepseek_v3.1": (
        "<｜tool▁calls▁begin｜>", deepseek, "", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>", kimi, "", "<|tool_calls_section_end|>",
        "<|tool_call_end|>",
    ),
    "gemma4": ("", gemma, "", "", "<tool_call|>"),
    "harmony": ("", harmony, "", "", "<|call|>"),
}  # fmt: skip
JSON = {"hermes", "deepseek_v3", "deepseek_v3.1", "kimi_k2", "harmony"}


def reply(syntax, calls):
    """The text of a reply, and the place behind each call."""
    begin, write, between, end, mark = WRITERS[syntax]
    said = "I write.\n"
    if syntax == "harmony":
        said = f"<|channel|>commentary<|message|>{said}<|end|><|start|>assistant"
    text, ends = f"{said}{begin}", []
    for i, call in enumerate(calls):
        text += (between if i else "") + write(*call)
        ends.append(text.rindex(mark) + len(mark))
    return text + end, ends


def channels_of(tools=TOOLS):
    calls = CallSearch(SYNTAXES["harmony"], tools)
    return REASONING["harmony"].splitter(opened=False, calls=calls)


def read(syntax, parts, *, cut=False, tools=TOOLS):
    """(text, calls) of a reply that ends behind its parts; what is no whole call is no JSON."""
    channels = channels_of(tools) if syntax == "harmony" else None
    splitter = ToolSplitter(SYNTAXES[syntax], tools)
    text, calls = "", {}
    for i, part in enumerate(parts):
        final = i == len(parts) - 1
        if channels is not None:
            part = channels.add(part, final=final).content
        found = splitter.add(part, final=final, cut=cut and final)
        text += found.text
        for one in found.calls:
            check_part(calls, one)
    return text, [(call.name, json.loads(call.arguments)) for call in whole_calls(calls.values())]


def check_part(calls, part):
    """Add a part to the calls so far; only whole ones are JSON."""
    assert (part.index not in calls) == bool(part.name) == bool(part.id)
    assert part.index == len(calls) - (not part.name)
    assert not (part.index in calls and calls[part.index].whole)
    assert part.arguments
    call = calls[part.index] = calls[part.index] + part if part.index in calls else part
    if not call.whole:
        # A JSON object ends with a brace, so nothing shorter has to be tried.
        assert not is_json(call.arguments)


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def check_cuts(syntax, *, cut, single):
    """A reply cut at each place has the calls before, and the rest is text."""
    calls = CALLS[:1] if syntax == "harmony" else CALLS
    text, ends = reply(syntax, calls)
    grouped = SYNTAXES[syntax].grouped
    for place in range(1, len(text)):
        said, found = read(syntax, list(text[:place]) if single else [text[:place]], cut=cut)
        whole = sum(end <= place for end in ends)
        assert found == calls[: len(found)], place
        # The end of an `invoke` is certain once something follows.
        assert whole - (syntax in ("minimax_m2", "deepseek_v3.2")) <= len(found), place
        if cut:
            assert len(found) <= whole, place
        if not found and syntax != "harmony":
            assert said == text[:place], place
        elif len(found) == whole and cut and not grouped:
            behind = text[ends[whole - 1] : place] if whole else ""
            assert "".join(said.split()) == "Iwrite." + "".join(behind.split()) or not whole
        elif len(found) == len(calls) and grouped:
            assert said.strip() == "I write.", place  # a part of the end is no text


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("syntax", WRITERS)
def test_a_reply_cut_at_any_place_has_no_call_that_it_cuts(syntax, cut):
    check_cuts(syntax, cut=cut, single=False)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("syntax", WRITERS)
def test_so_it_is_character_by_character(syntax, cut):
    check_cuts(syntax, cut=cut, single=True)


@pytest.mark.parametrize("syntax", WRITERS)
def test_the_rest_of_a_group_is_text_and_the_calls_before_count(syntax):
    if syntax == "harmony":
        pytest.skip("its calls end the reply")
    text, ends = reply(syntax, CALLS)
    place = text.index("x = ")  # inside the third call
    said, found = read(syntax, [text[:place]], cut=True)
    assert found == CALLS[:2]
    assert said.removeprefix("I write.").strip() == text[ends[1] : place].strip()


VALUES = [
    "x = '</tool_call>'\nmore", "</tool_call>", "</parameter>", "a</parameter> <b>",
    "</function>\n</tool_call>", "</function>", "</parameter>\n</function> x", "</arg_value>",
    "</arg_value> <arg_keys>", "</invoke>\n</minimax:tool_call>", "</parameter>\n</invoke> x",
    "<|tool_call_end|><|tool_calls_section_end|>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<|call|>", "<|end|><|start|>assistant<|channel|>final<|message|>", "<|return|>",
    '"}}\n</tool_call>', "\\", '\\"', "```\n", "{", "]}", "\nx\n", "", "null", "é\u2028",
    '<tool_call>\n{"name": "now", "arguments": {}}', "<minimax:tool_call>", "<parameter=",
    "<parameter=other>\ny",
]  # fmt: skip


@pytest.mark.parametrize("syntax", WRITERS)
def test_marks_inside_a_value_are_part_of_it(syntax):
    for value in VALUES:
        calls = [("write", {"path": value, "content": f"<{value}>"}), ("now", {})]
        calls = calls[:1] if syntax == "harmony" else calls
        text, _ = reply(syntax, calls)
        for parts in ([text], list(text)):
            said, found = read(syntax, parts)
            assert found == calls, value
            assert said.strip() == "I write."
        inner = json.dumps(f"<{value}>")[1:-1] if syntax in JSON else f"<{value}>"
        place = text.rindex(inner)
        for end in range(place, place + len(inner) + 1):
            assert read(syntax, [text[:end]], cut=True)[1] == [], (value, end)


MARKS = [
    *(mark for syntax in SYNTAXES.values() for mark in (syntax.begin, syntax.end, *syntax.tokens)),
    "<function=", "</function>", "<parameter=", "</parameter>", ">", '<invoke name="', "</invoke>",
    '<parameter name="', '">', "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "```json", "```", "function", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "functions.", "<|end|>", "{}", "{", "}", '"name": "now"', '"', "\\", ", ",
    ": ", "\n", " ", "now", "path",
]  # fmt: skip


def check_parts(syntax, count, seed):
    """A damaged reply means the same in parts of any size, and without calls it stays as it is."""
    draw = random.Random(seed)
    for _ in range(count):
        text, _ = reply(syntax, CALLS[:1] if syntax == "harmony" else CALLS)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice(MARKS) + text[at + draw.choice([0, 0, 1, 5, 20]) :]
        sizes = [draw.randint(1, 9) for _ in text]
        parts = [text[sum(sizes[:i]) :][: sizes[i]] for i in range(len(text))]
        cut = draw.random() < 0.5
        found = read(syntax, [text], cut=cut)
        assert read(syntax, [part for part in parts if part], cut=cut) == found, text
        assert read(syntax, list(text), cut=cut) == found, text
        assert found[1] or found[0] == text or syntax == "harmony", text


@pytest.mark.parametrize("syntax", WRITERS)
def test_a_damaged_reply_means_the_same_in_parts_of_any_size(syntax):
    check_parts(syntax, 20, 1)


@pytest.mark.slow
@pytest.mark.parametrize("syntax", WRITERS)
def test_many_damaged_replies_mean_the_same(syntax):
    check_parts(syntax, 1000, 2)


def test_glm_without_line_breaks():
    calls = [(name, arguments) for name, arguments in CALLS]
    text = "".join(glm(*call, line="") for call in calls)
    assert read("glm4", list(text)) == ("", calls)


def test_a_call_that_the_model_ends_without_its_last_mark():
    """Only where the rest tells that nothing is missing."""
    text = glm("write", {"path": "a", "content": "b"}).removesuffix("</tool_call>")
    assert read("glm4", [text])[1] == [("write", {"path": "a", "content": "b"})]
    assert read("glm4", [text], cut=True) == (text, [])
    assert read("glm4", [glm("write", {"path": "a"}).removesuffix("</tool_call>")])[1] == []
    assert read("glm4", ["<tool_call>wri"]) == ("<tool_call>wri", [])
    assert read("glm4", ["<tool_call>now"]) == ("", [("now", {})])
    text = xml("write", {"path": "a"})
    assert read("qwen3_xml", [text.removesuffix("\n</tool_call>")])[1] == [("write", {"path": "a"})]
    assert read("qwen3_xml", [text.removesuffix("\n</function>\n</tool_call>")])[1] == []


def test_an_argument_whose_end_the_model_left_out_ends_at_the_next_one():
    text = xml("write", {"path": "a", "content": "b"}).replace("a\n</parameter>", "a")
    assert read("qwen3_xml", list(text))[1] == [("write", {"path": "a", "content": "b"})]


def test_a_broken_call_is_text_at_once_and_the_next_one_counts():
    splitter = ToolSplitter(SYNTAXES["hermes"], TOOLS)
    broken = '<tool_call>{"name": "now", "arguments": {"a": "x\n'
    assert splitter.add(broken + "y").text == broken + "y"
    found = splitter.add("</tool_call> z " + hermes("now", {}), final=True)
    assert found.text == "</tool_call> z"
    assert [call.name for call in whole_calls(found.calls)] == ["now"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUNDLED_MODEL)


def assembled(tokenizer, syntax, text, tokens, *, finish="length", stop=()):
    """The parts of a reply that ends after some tokens, as one."""
    ids = tokenizer.encode(text, add_special_tokens=False)[:tokens]
    reasoning = channels_of() if syntax == "harmony" else None
    tools = ToolSplitter(SYNTAXES[syntax], TOOLS)
    assembler = Assembler(tokenizer, stop=stop, reasoning=reasoning, tools=tools)
    last = [Token(ids[-1], "length")] if finish == "length" else [Token(ids[-1]), Token(0, "stop")]
    parts = []
    for token in [*map(Token, ids[:-1]), *last]:
        parts += assembler.add(token)
        if parts and parts[-1].finish:
            break
    calls = whole_calls(call for part in parts for call in part.calls)
    calls = [(call.name, json.loads(call.arguments)) for call in calls]
    return "".join(part.text for part in parts), calls, parts[-1].finish


@pytest.mark.parametrize("syntax", WRITERS)
def test_a_limit_at_any_token(tokenizer, syntax):
    calls = CALLS[:1] if syntax == "harmony" else CALLS[:2]
    text, ends = reply(syntax, calls)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for tokens in range(1, len(ids)):
        said, found, finish = assembled(tokenizer, syntax, text, tokens, stop=["os", "\n\n"])
        assert finish == "length", tokens
        assert found == calls[: len(found)]
        written = tokenizer.decode(ids[:tokens]).removesuffix("\ufffd")  # half a character
        assert len(found) <= sum(end <= len(written) for end in ends), tokens
        if not found and syntax != "harmony":
            assert text.startswith(said.removesuffix("\ufffd")), tokens
    said, found, finish = assembled(tokenizer, syntax, text, None, finish="stop")
    assert (said.strip(), found, finish) == ("I write.", calls, "tool_calls")


def test_a_stop_text_ends_the_answer_before_a_call_and_not_across_it(tokenizer):
    text = f"say a{hermes('now', {})}b"
    said, calls, finish = assembled(tokenizer, "hermes", text, None, finish="stop", stop=["ab"])
    assert (said, calls, finish) == ("say ab", [("now", {})], "tool_calls")
    said, calls, finish = assembled(tokenizer, "hermes", text, None, finish="stop", stop=["y"])
    assert (said, calls, finish) == ("sa", [], "stop")


TOOL = {"type": "function", "function": {"name": "write", "parameters": WRITE}}
CHAT = {"messages": MESSAGES, "tools": [TOOL]}
RESPONSES = {"input": "import os", "tools": [{**TOOL["function"], "type": "function"}]}
CLAUDE = {
    "messages": MESSAGES,
    "tools": [{"name": "write", "input_schema": WRITE}],
}


def texts_of(events, kind):
    return "".join(data["delta"] for name, data in events if name == kind)


@pytest.mark.parametrize("syntax", ["glm4", "minimax_m2", "qwen3_xml", "hermes"])
def test_protocols_say_that_a_limit_cut_a_call(tiny, syntax):
    """One call is whole, the second one is cut: the first one is handed out, the second is text."""
    text, ends = reply(syntax, [CALLS[0], CALLS[2]])
    place = text.index("x = ")
    rest = text[ends[0] : place].strip()
    _, tokenizer = tiny
    tokens = len(tokenizer.encode(text[:place], add_special_tokens=False))
    with spoken(*tiny, text, tool_parser=syntax) as server:
        (choice,) = server.chat(**CHAT, max_tokens=tokens)["choices"]
        assert choice["finish_reason"] == "length"
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == CALLS[0][1]
        assert choice["message"]["content"].startswith("I write.")
        assert rest in choice["message"]["content"]

        events = server.stream("/v1/chat/completions", {**CHAT, "max_tokens": tokens})
        choices = [data["choices"][0] for _, data in events[:-1]]
        first, second = streamed_chat(events)
        assert {**first, "function": call["function"]} == first
        assert second["id"] != first["id"]
        check_unfinished(second["function"], [first["function"]["arguments"]])
        assert choices[-1]["finish_reason"] == "length"
        assert rest in "".join(c["delta"].get("content") or "" for c in choices)

        _, body = server.ask("/v1/responses", {**RESPONSES, "max_output_tokens": tokens})
        assert body["status"] == "incomplete"
        assert [item["type"] for item in body["output"]] == ["message", "function_call"]
        assert body["output"][1]["status"] == "completed"
        assert rest in body["output"][0]["content"][0]["text"]
        events = server.stream("/v1/responses", {**RESPONSES, "max_output_tokens": tokens})
        assert events[-1][0] == "response.incomplete"
        assert rest in texts_of(events, "response.output_text.delta")
        done = [data for name, data in events if name == "response.function_call_arguments.done"]
        assert [json.loads(one["arguments"]) for one in done] == [CALLS[0][1]]
        items = events[-1][1]["response"]["output"]
        assert [(item["type"], item["status"]) for item in items] == [
            ("message", "completed"), ("function_call", "completed"),
            ("function_call", "incomplete"), ("message", "incomplete"),
        ]  # fmt: skip
        check_unfinished(items[2], [done[0]["arguments"]])
        closed = [d["output_index"] for name, d in events if name == "response.output_item.done"]
        assert closed == [0, 1, 3]
        parts = [d for name, d in events if name == "response.function_call_arguments.delta"]
        for i in (1, 2):
            own = "".join(d["delta"] for d in parts if d["output_index"] == i)
            assert own == items[i]["arguments"]

        _, body = server.ask("/v1/messages", {**CLAUDE, "max_tokens": tokens})
        assert body["stop_reason"] == "max_tokens"
        assert [block["type"] for block in body["content"]] == ["text", "tool_use"]
        assert body["content"][1]["input"] == CALLS[0][1]
        assert rest in body["content"][0]["text"]
        events = server.stream("/v1/messages", {**CLAUDE, "max_tokens": tokens})
        blocks = [d["content_block"] for name, d in events if name == "content_block_start"]
        assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use", "text"]
        assert [block["input"] for block in blocks[1:3]] == [{}, {}]
        assert events[-2][1]["delta"]["stop_reason"] == "max_tokens"
        closed = [d["index"] for name, d in events if name == "content_block_stop"]
        assert closed == [0, 1, 3]  # clients take what is not closed for no call
        parts = [d for name, d in events if name == "content_block_delta"]
        inputs = ["", ""]
        for data in parts:
            if data["index"] in (1, 2):
                inputs[data["index"] - 1] += data["delta"]["partial_json"]
        assert json.loads(inputs[0]) == CALLS[0][1]
        check_unfinished({"name": blocks[2]["name"], "arguments": inputs[1]}, inputs[:1])


def streamed_chat(events):
    """The calls of a chat's stream, each in the form of a whole reply; their deltas are checked."""
    calls = []
    for _, data in events[:-1]:
        for delta in data["choices"][0]["delta"].get("tool_calls", []):
            if "id" in delta:
                assert delta["index"] == len(calls)
                assert set(delta) == {"index", "id", "type", "function"}
                assert delta["function"]["arguments"] == ""
                calls.append({**delta, "function": dict(delta["function"])})
            else:
                assert delta["index"] == len(calls) - 1
                assert set(delta) == {"index", "function"}
                assert set(delta["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def check_unfinished(function, whole):
    """A call that was cut has its name, and arguments that no client can parse."""
    assert function["name"] == "write"
    assert function["arguments"].startswith('{"path": "b')
    assert not is_json(function["arguments"])
    assert all(is_json(arguments) for arguments in whole)


def test_a_call_that_an_error_cuts_stays_unfinished(tiny):
    text, _ = reply("glm4", CALLS[:1])
    with spoken(*tiny, text[:-20], fails=True, tool_parser="glm4") as server:
        status, _ = server.ask("/v1/chat/completions", CHAT)
        assert status == 500
        events = server.stream("/v1/chat/completions", CHAT)
        assert "error" in events[-1][1]
        (call,) = streamed_chat(events)
        assert not is_json(call["function"]["arguments"])
        events = server.stream("/v1/responses", RESPONSES)
        assert events[-1][0] == "response.failed"
        done = [d["output_index"] for name, d in events if name == "response.output_item.done"]
        assert done == [0]
        assert not any("arguments.done" in name for name, _ in events)
        (item,) = events[-1][1]["response"]["output"][1:]
        assert item["status"] == "in_progress"
        assert not is_json(item["arguments"])
        events = server.stream("/v1/messages", {**CLAUDE, "max_tokens": 500})
        assert events[-1][0] == "error"
        assert [d["index"] for name, d in events if name == "content_block_stop"] == [0]


# Calls as gpt-oss's published template writes them; the mark <|constrain|> is not in it.
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{{ ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson }}{{ '<|call|>' }}"
    "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_tools_of_gpt_oss_are_served_in_every_protocol(tiny, monkeypatch):
    monkeypatch.setattr(tiny[1], "chat_template", HARMONY)
    head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    text = head + harmony(*CALLS[0]).removesuffix("<|call|>")  # which ends the reply
    calls = [{"id": "c", "type": "function", "function": {"name": "write", "arguments": "{}"}}]
    history = [*MESSAGES, {"role": "assistant", "tool_calls": calls}]
    history.append({"role": "tool", "tool_call_id": "c", "content": "done"})
    with spoken(*tiny, text, reasoning_parser="harmony") as server:
        (choice,) = server.chat(**{**CHAT, "messages": history, "max_tokens": 400})["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "Hm."
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "write"
        assert json.loads(call["function"]["arguments"]) == CALLS[0][1]
        status, body = server.ask("/v1/responses", RESPONSES)
        assert status == 200, body
        assert [item["type"] for item in body["output"]] == ["reasoning", "function_call"]
        status, body = server.ask("/v1/messages", {**CLAUDE, "max_tokens": 400})
        assert status == 200, body
        assert body["content"][1]["input"] == CALLS[0][1]
        (choice,) = server.chat(**CHAT, max_tokens=60)["choices"]
        assert choice["finish_reason"] == "length"
        assert "tool_calls" not in choice["message"]
