"""Oracle: calls written by hand in each syntax, token by token. A client sees a call grow; what it
has of a call that is not whole is no JSON."""

from __future__ import annotations

import json

import pytest

from mlx_moeflux.server.assemble import Assembler
from mlx_moeflux.server.calls.reader import CallPart, whole_calls
from mlx_moeflux.server.calls.registry import SYNTAXES
from mlx_moeflux.server.calls.splitter import ToolSplitter
from mlx_moeflux.server.calls.tagged import Tags, TypedTags
from mlx_moeflux.server.engine import Token
from tests.server.calls.test_cut_calls import (
    CALLS,
    TOOLS,
    WRITERS,
    assembled,
    channels_of,
    check_part,
    hermes,
    is_json,
    kimi,
    reply,
    xml,
)
from tests.server.calls.test_cut_calls import tokenizer as tokenizer

LONG = "import os\n" + "x = '<y>' # \\ \"é\"\n" * 20


def pieces(syntax, text, *, tools=TOOLS, cut=False, **options):
    """What a splitter hands out for each character of a text, and at the end."""
    channels = channels_of(tools) if syntax == "harmony" else None
    splitter = ToolSplitter(SYNTAXES[syntax], tools, **options)
    for i, character in enumerate([*text, ""]):
        final = i == len(text)
        if channels is not None:
            character = channels.add(character, final=final).content
        yield splitter.add(character, final=final, cut=cut and final)


@pytest.mark.parametrize("syntax", WRITERS)
def test_a_long_text_comes_while_it_is_written(syntax):
    text, _ = reply(syntax, [("write", {"path": "a", "content": LONG})])
    shown, calls, most = "", {}, 0
    end = text.rindex("#")
    for i, found in enumerate(pieces(syntax, text)):
        for part in found.calls:
            check_part(calls, part)
            shown += part.arguments
        if text.index("#") < i < end:
            most = max(most, i - text.index("import") - len(shown.replace("\\\\", "\\")))
    (call,) = whole_calls(calls.values())
    assert json.loads(call.arguments) == {"path": "a", "content": LONG}
    assert most < 40  # characters that were held back, the keys besides


@pytest.mark.parametrize("syntax", WRITERS)
def test_the_name_comes_before_the_first_value(syntax):
    text, _ = reply(syntax, CALLS[:1])
    place = text.index("a.py")
    names = [
        part.name
        for i, found in enumerate(pieces(syntax, text))
        for part in found.calls
        if i < place
    ]
    assert [name for name in names if name] == ["write"]


@pytest.mark.parametrize("syntax", WRITERS)
def test_an_unknown_function_is_named_once_its_call_is_whole(syntax):
    text, _ = reply(syntax, CALLS[:1])
    text = text.replace("write", "other").replace("I other.", "I write.")
    (part,) = [part for found in pieces(syntax, text) for part in found.calls]
    assert (part.name, part.whole) == ("other", True)


BROKEN = {
    "hermes": [f"<tool_call>{object}</tool_call>" for object in (
                   '{"name": "write", "arguments": {"path": "a", "content": NaN}}',
                   '{"name": "write", "arguments": {"path": "a"},',
                   '{"name": "write", "arguments": {"path": "a\n"}}',
                   '{"name": "write", "arguments": {"path": "a"}, "name": "now"}',
                   '{"name": "now", "arguments": {}, "arguments": {"a": 1}}',
                   '{"name": "write", "arguments": {"path": "a"}} x')],
    "qwen3_xml": ["<tool_call><function=write><parameter=path>\na\n</parameter></fun></tool_call>",
                  "<tool_call><function=write><parameter=path>\na\n</parameter></function></tool_call",
                  "<tool_call><function=write><parameter=path>\na</tool_call>"],
    "glm4": ["<tool_call>write<arg_key>path</arg_key><arg_value>a</arg_value>x</tool_call>",
             "<tool_call>write<arg_key>path</arg_key><arg_value>a</arg_value><arg_key></tool_call>",
             "<tool_call>write<arg_key>path</arg_key><arg_value>a</tool_call>"],
    "minimax_m2": [f'<minimax:tool_call><invoke name="write">{inner}</minimax:tool_call>'
                   for inner in (
                       '<parameter name="path">a</parameter>x</invoke>',
                       '<parameter name="path">a',
                       '<parameter name="path">a</parameter><parameter></invoke>')],
    "deepseek_v3.2": ['<｜DSML｜function_calls><｜DSML｜invoke name="write"><｜DSML｜parameter '
                      f'name="path" string="true">a{inner}</｜DSML｜function_calls>'
                      for inner in ("", "</｜DSML｜parameter>x</｜DSML｜invoke>",
                                    "</｜DSML｜parameter><｜DSML｜parameter></｜DSML｜invoke>")],
    "deepseek_v3.1": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>"
                      f"{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
                      for arguments in ('{"path": "a" b}', '{"path": "\n"}', '{"path": 1e999}')],
    "kimi_k2": ["<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0"
                f"<|tool_call_argument_begin|>{arguments}<|tool_call_end|><|tool_calls_section_end|>"
                for arguments in ('{"path": a}', '{"path": "a"} x', '{"path": "\\ud800"}')],
}  # fmt: skip


@pytest.mark.parametrize("end", ["", " Then."])
@pytest.mark.parametrize(("syntax", "text"), [(s, t) for s, texts in BROKEN.items() for t in texts])
def test_a_call_that_breaks_stays_unfinished_and_its_text_is_kept(syntax, text, end):
    text, calls, said = f"So {text}{end}", {}, ""
    for found in pieces(syntax, text):
        for part in found.calls:
            check_part(calls, part)
        said += found.text
    assert said == text
    assert [call.name for call in calls.values()] == ["now" if '"now", "arg' in text else "write"]
    assert whole_calls(calls.values()) == []


def test_a_broken_call_and_a_whole_one_have_numbers_of_their_own(tokenizer):
    text = BROKEN["hermes"][0] + hermes("now", {})
    calls = {}
    for found in pieces("hermes", text):
        for part in found.calls:
            check_part(calls, part)
    assert [(call.index, call.name, call.whole) for call in calls.values()] == [
        (0, "write", False), (1, "now", True),
    ]  # fmt: skip
    assert assembled(tokenizer, "hermes", text, None, finish="stop")[1:] == (
        [("now", {})], "tool_calls",
    )  # fmt: skip
    said, found, finish = assembled(tokenizer, "hermes", BROKEN["hermes"][0], None, finish="stop")
    assert (said, found, finish) == (BROKEN["hermes"][0], [], "stop")


@pytest.mark.parametrize("syntax", WRITERS)
def test_the_parts_of_a_reply_are_its_whole_calls(syntax):
    """Values of every kind: a text comes in parts, the others at once."""
    properties = {
        "text": {"type": "string"}, "count": {"type": "integer"}, "any": {},
        "kind": {"enum": ["a", 1]}, "maybe": {"type": ["string", "null"]},
        "list": {"type": "array"},
    }  # fmt: skip
    tools = {"f": {"type": "object", "properties": properties}, **TOOLS}
    arguments = {"text": LONG, "count": "12", "any": '{"a": 1}', "kind": "1", "maybe": "null",
                 "list": "[1, 2]", "other": "é"}  # fmt: skip
    want = {**arguments, "count": 12, "any": {"a": 1}, "kind": 1, "maybe": None, "list": [1, 2]}
    tags = SYNTAXES[syntax].tags
    tagged = isinstance(tags, Tags) and not isinstance(tags, TypedTags)
    text, _ = reply(syntax, [("f", arguments if tagged else want)])
    parts = [part for found in pieces(syntax, text, tools=tools) for part in found.calls]
    (streamed,) = whole_calls(parts)
    channels = channels_of(tools) if syntax == "harmony" else None
    whole = text if channels is None else channels.add(text, final=True).content
    (at_once,) = ToolSplitter(SYNTAXES[syntax], tools).add(whole, final=True).calls
    assert streamed.arguments == at_once.arguments
    assert json.loads(streamed.arguments) == want
    numbers = [part.arguments for part in parts if "12" in part.arguments]
    assert not tagged or numbers == [', "count": 12']


def test_ids_that_the_model_repeats_are_replaced():
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    text = begin + kimi("now", {}) * 3 + kimi("now", {}, 1) + end
    calls = whole_calls(part for found in pieces("kimi_k2", text) for part in found.calls)
    ids = [call.id for call in calls]
    assert (ids[0], ids[3]) == ("functions.now:0", "functions.now:1")
    assert len(set(ids)) == 4


def test_text_and_calls_keep_their_order(tokenizer):
    """One token may end a call and begin a text: the text stands behind the call."""
    text = f"a {hermes('now', {})} b {xml('now', {})}"
    tools = ToolSplitter(SYNTAXES["hermes"], TOOLS)
    found = tools.add(text, final=True)
    assert [p if isinstance(p, str) else p.name for p in found.pieces][:3] == ["a", "now", " b"]
    assembler = Assembler(_OneText(text), tools=ToolSplitter(SYNTAXES["hermes"], TOOLS))
    first, second = assembler.add(Token(0, "length"))
    assert (first.text, [call.name for call in first.calls]) == ("a", ["now"])
    assert second.text.startswith(" b <tool_call>")
    assert (first.finish, second.finish) == (None, "length")


class _OneText:
    """A tokenizer whose one token is a text."""

    def __init__(self, text):
        self.text = text

    def detokenizer(self):
        return self

    def add(self, token):
        return self.text

    def finish(self):
        return ""


def test_parts_of_a_call_add_up():
    parts = [CallPart("f", "{", "1"), CallPart(arguments='"a": 1'), CallPart("", "}", whole=True)]
    assert whole_calls(parts) == [CallPart("f", '{"a": 1}', "1", True)]
    assert whole_calls(parts[:2]) == []
    assert not is_json("".join(part.arguments for part in parts[:2]))
