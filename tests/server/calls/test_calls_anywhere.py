"""Oracle: calls as models were seen to write them: in the thinking, without the begin, with other
marks around them. What only mentions a mark stays what it was."""

from __future__ import annotations

import json
import random
import re

import pytest

from mlx_moeflux.server.assemble import Assembler
from mlx_moeflux.server.calls.reader import whole_calls
from mlx_moeflux.server.calls.registry import SYNTAXES
from mlx_moeflux.server.calls.splitter import CallSearch, ToolSplitter
from mlx_moeflux.server.engine import Token
from mlx_moeflux.server.reasoning import REASONING
from tests.server.calls.test_cut_calls import (
    CALLS,
    CHAT,
    CLAUDE,
    MARKS,
    RESPONSES,
    TOOLS,
    WRITERS,
    channels_of,
    dsml,
    glm,
    harmony,
    hermes,
    kimi,
    minimax,
    reply,
    xml,
)
from tests.server.conftest import MESSAGES
from tests.server.scripted import spoken

WRITE = CALLS[0]
ANALYSIS = "<|channel|>analysis<|message|>Hm."
THINKING = [syntax for syntax in WRITERS if syntax != "harmony"]


class Characters:
    """A tokenizer whose tokens are parts of a text."""

    def __init__(self, parts):
        self.parts = parts

    def detokenizer(self):
        return self

    def add(self, token):
        return self.parts[token]

    def finish(self):
        return ""


def read(syntax, text, *, opened=True, size=1, tools=TOOLS, reasoning="think", special=()):
    """(reasoning, text, calls) of a reply that the model ends, in tokens of some characters."""
    parts = []
    pattern = f"({'|'.join(map(re.escape, special))})" if special else "()"
    for piece in re.split(pattern, text):
        whole = len(piece) if piece in special else size
        parts += [piece[i : i + whole] for i in range(0, len(piece), whole)] if piece else []
    search = CallSearch(SYNTAXES[syntax], tools)
    assembler = Assembler(
        Characters(parts),
        reasoning=REASONING[reasoning].splitter(opened=opened, calls=search),
        tools=ToolSplitter(SYNTAXES[syntax], tools, strays=REASONING[reasoning].strays),
        special={i: part for i, part in enumerate(parts) if part in special},
    )
    tokens = [*map(Token, range(len(parts))), Token(0, "stop")]
    deltas = [delta for token in tokens for delta in assembler.add(token)]
    calls = whole_calls(part for delta in deltas for part in delta.calls)
    found = [(call.name, json.loads(call.arguments)) for call in calls]
    thought = "".join(delta.reasoning for delta in deltas)
    return thought, "".join(delta.text for delta in deltas), found


def written(syntax, calls):
    """The text of calls alone."""
    text, _ = reply(syntax, calls)
    return text.removeprefix("I write.\n")


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("end", ["", "</think>", "\n</think>\n\n"])
@pytest.mark.parametrize("syntax", THINKING)
def test_a_call_ends_the_thinking(syntax, end, size):
    text = f"I read it.\n{written(syntax, CALLS)}{end}"
    assert read(syntax, text, size=size) == ("I read it.", "", CALLS)
    assert read(syntax, f"<think>{text}", size=size, opened=False) == ("I read it.", "", CALLS)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("syntax", THINKING)
def test_a_value_in_the_thinking_may_hold_its_end(syntax, size):
    calls = [("write", {"path": "a", "content": "</think> x"})]
    assert read(syntax, f"Hm.{written(syntax, calls)}", size=size) == ("Hm.", "", calls)


MENTIONS = {
    "hermes": ["the tag <tool_call> begins", "`<tool_call>`", '<tool_call>{"name": "other",'],
    "qwen3_xml": ["write <function=NAME> first", "`<tool_call>` and `<function=write>` are tags",
                  "<tool_call>\n<function=other>\n<parameter=a>\nb\n</parameter>"],
    "glm4": ["<tool_call> opens it", "<tool_call>write is next", "<tool_call>other<arg_key>"],
    "minimax_m2": ["`<minimax:tool_call>`", '<invoke name="other">', '<invoke name="write"> opens'],
    "deepseek_v3.2": ["<｜DSML｜function_calls> opens", '<｜DSML｜invoke name="other">',
                      '`<｜DSML｜invoke name="write">`'],
    "deepseek_v3": ["<｜tool▁calls▁begin｜> opens", "<｜tool▁call▁begin｜>x",
                    "<｜tool▁call▁begin｜>"],
    "deepseek_v3.1": ["<｜tool▁calls▁begin｜> opens", "<｜tool▁call▁begin｜>x",
                      "<｜tool▁call▁begin｜>other<｜tool▁sep｜>{}"],
    "kimi_k2": ["<|tool_calls_section_begin|> opens", "<|tool_call_begin|> too",
                "<|tool_call_begin|>other:0<|tool_call_argument_begin|>{}<|tool_call_end|>"],
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(("syntax", "text"), [(s, t) for s, ts in MENTIONS.items() for t in ts])
def test_what_is_mentioned_in_the_thinking_stays_there(syntax, text, size):
    thought, said, calls = read(syntax, f"So {text}</think>Done.", size=size)
    assert (thought, said, calls) == (f"So {text}", "Done.", [])
    # A call behind it still counts, there and in the answer.
    both = f"So {text}\n{written(syntax, [WRITE])}"
    if not text.endswith(("<arg_key>", "</parameter>", "</arg_key>", "｜>", "x", '">')):
        assert read(syntax, both, size=size)[2] == [WRITE]
    assert read(syntax, f"</think>So {text}", size=size) == ("", f"So {text}", [])


@pytest.mark.parametrize(
    "count", [pytest.param(5, id="few"), pytest.param(200, id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("syntax", WRITERS)
def test_damaged_thinking_means_the_same_in_parts_of_any_size(syntax, count):
    draw = random.Random(count)
    reasoning = "harmony" if syntax == "harmony" else "think"
    head = ANALYSIS + "<|end|><|start|>assistant" if syntax == "harmony" else "I read it.\n"
    for _ in range(count):
        text = head + written(syntax, CALLS[:1] if syntax == "harmony" else CALLS)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(text))
            mark = draw.choice([*MARKS, "</think>", "</think>", "<think>", "<|start|>"])
            text = text[:at] + mark + text[at + draw.choice([0, 0, 1, 5, 20]) :]
        opened = draw.random() < 0.7 and syntax != "harmony"
        found = [
            read(syntax, text, opened=opened, size=size, reasoning=reasoning)
            for size in (1, 4, len(text))
        ]
        assert found[0] == found[1] == found[2], text


def test_a_call_counts_behind_a_mention_in_the_answer():
    for syntax, mention in (
        ("hermes", "`<tool_call>` opens"), ("qwen3_xml", "`<tool_call>` opens"),
        ("glm4", "<tool_call> opens"), ("kimi_k2", "<|tool_call_begin|> opens"),
    ):  # fmt: skip
        text = f"The tag {mention}.\n{written(syntax, CALLS)}"
        assert read(syntax, text, opened=False) == ("", f"The tag {mention}.", CALLS)


def test_without_functions_the_thinking_has_no_calls():
    text = f"Hm. {written('hermes', [WRITE])}</think>Done."
    splitter = REASONING["think"].splitter(opened=True)
    found = splitter.add(text, final=True)
    assert (found.reasoning, found.content) == (f"Hm. {written('hermes', [WRITE])}", "Done.")


BARE = {
    "qwen3_xml": [xml(*WRITE).removeprefix("<tool_call>\n"),
                  xml(*WRITE).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"),
                  xml("write", {"path": "a"}).removeprefix("<tool_call>\n") + "\n" + xml("now", {}),
                  "".join(xml(*call).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
                          for call in CALLS)],
    "minimax_m2": [minimax(*WRITE), minimax(*WRITE) + "</minimax:tool_call>",
                   minimax(*WRITE) + minimax("now", {})],
    "deepseek_v3.2": [dsml(*WRITE), dsml(*WRITE) + "</｜DSML｜function_calls>",
                      dsml(*WRITE) + dsml("now", {})],
    "deepseek_v3.1": [written("deepseek_v3.1", [WRITE]).removeprefix("<｜tool▁calls▁begin｜>"),
                      written("deepseek_v3", [WRITE]).removeprefix("<｜tool▁calls▁begin｜>"),
                      written("deepseek_v3.1", CALLS).removeprefix("<｜tool▁calls▁begin｜>")],
    "kimi_k2": [kimi(*WRITE), kimi(*WRITE) + kimi("now", {}, 1), kimi(*WRITE) + KIMI_END
                if (KIMI_END := "<|tool_calls_section_end|>") else "",
                f"<|tool_call_section_begin|>{kimi(*WRITE)}<|tool_call_section_end|>",
                f"<|tool_calls_section_begin|>{kimi(*WRITE)}<|tool_call_section_end|>",
                *(kimi(*WRITE).replace("functions.write:0", name)
                  for name in ("write:0", "write", "functions.write"))],
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(("syntax", "text"), [(s, t) for s, texts in BARE.items() for t in texts])
def test_a_call_without_its_begin_is_a_call(syntax, text, size):
    _, said, calls = read(syntax, f"I look.\n{text}", opened=False, size=size)
    assert (said.strip(), calls[0][0]) == ("I look.", "write")
    assert [name for name, _ in calls] == ["write", "now", "write"][: len(calls)]
    assert len(calls) == max(1, text.count("now") + text.count("path"))
    assert read(syntax, f"I look.\n{text}", size=size)[::2] == ("I look.", calls)
    # Another name is none of the request's: the text stays.
    other = f"I look.\n{text}".replace("write", "other").replace("now", "later")
    if "<|tool_calls_section_begin|>" not in other and "<tool_call>" not in other:
        assert read(syntax, other, opened=False, size=size)[1:] == (other, [])


@pytest.mark.parametrize(
    "tail", ["</tool_call>", "\n</tool_call>\n", "</think>", "\n</think>\n</tool_call>"]
)
@pytest.mark.parametrize("text", [hermes(*WRITE), xml(*WRITE), glm(*WRITE)])
def test_stray_marks_behind_a_call_reach_nobody(text, tail):
    syntax = {"{": "hermes", "<": "qwen3_xml", "w": "glm4"}[text[len("<tool_call>") :].strip()[0]]
    assert read(syntax, f"I write.\n{text}{tail}", opened=False) == ("", "I write.", [WRITE])
    both = f"I write.\n{text}{tail}\n{text}{tail}"
    assert read(syntax, both, opened=False) == ("", "I write.", [WRITE, WRITE])
    # Text behind them is kept.
    said = read(syntax, f"I write.\n{text}{tail} Done `</tool_call>`.", opened=False)[1]
    assert said.split() == ["I", "write.", "Done", "`</tool_call>`."]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("opened", "text", "want"),
    [
        (True, "Hm.</think>\n\n</think>\n\nDone.", ("Hm.", "Done.")),
        (True, "Hm.</think></think>Done.", ("Hm.", "Done.")),
        (False, "</think>\n\nDone.", ("", "Done.")),
        (True, "Hm.</think>The tag `</think>` ends it.", ("Hm.", "The tag `</think>` ends it.")),
        (True, "Hm.</think> </thin", ("Hm.", " </thin")),
    ],
)
def test_a_second_end_of_the_thinking_is_dropped(opened, text, want, size):
    assert read("hermes", text, opened=opened, size=size)[:2] == want


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "want"),
    [
        (f"{ANALYSIS}<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
         "<|message|>{}<|call|>", ("Hm.", "", [("now", {})])),
        (f"{ANALYSIS}<|end|><|start|>assistant<|channel|>commentary to=functions.now "
         "<|constrain|>json<|message|>{}", ("Hm.", "", [("now", {})])),
        ("<|channel|>analysis to=functions.now <|constrain|>json<|message|>{}<|call|>",
         ("", "", [("now", {})])),
        ("<|channel|>final to=functions.now<|message|>{}<|call|>", ("", "", [("now", {})])),
        ("<|channel|>commentary to=now<|message|>{}<|call|>", ("", "", [("now", {})])),
        (" to=now<|channel|>commentary<|message|>{}<|call|>", ("", "", [("now", {})])),
        # The end of the reasoning is missing.
        (f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.now<|message|>{{}}",
         ("Hm.", "", [("now", {})])),
        (f"{ANALYSIS}<|channel|>commentary to=functions.now<|message|>{{}}<|call|>",
         ("Hm.", "", [("now", {})])),
        # Messages to others are text, or reasoning.
        ("<|channel|>commentary to=assistant<|message|>I look.<|end|>", ("", "I look.", [])),
        ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
        ("<|channel|>final to=user<|message|>Done.<|return|>", ("", "Done.", [])),
    ],
)  # fmt: skip
def test_the_recipients_of_gpt_oss(text, want, size):
    assert read("harmony", text, opened=False, size=size, reasoning="harmony") == want


def test_arguments_of_gpt_oss_come_while_they_are_written():
    text = harmony("write", {"path": "a", "content": "x" * 50})
    splitter, shown = channels_of(), ""
    for i, character in enumerate(text):
        shown += splitter.add(character).content
        if "xx" in text[:i] and i < text.rindex("xx"):
            assert len(shown) > i - 40  # the head is shorter than what the model wrote
    assert shown.endswith("<|call|>")


SPECIAL = ("<|im_end|>", "<|im_start|>", "<|channel|>", "<|call|>")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("I am<|im_end|> done.", "I am done."),
        ("<|im_start|>assistant\nDone.<|im_end|>", "assistant\nDone."),
        ("a <|channel|> b <|call|>", "a  b "),
        ("Say `<tool_call>` and `</think>`.", "Say `<tool_call>` and `</think>`."),
        ("Text <|im_x|> stays.", "Text <|im_x|> stays."),
    ],
)
def test_special_tokens_are_no_text(text, said):
    assert read("qwen3_xml", text, opened=False, special=SPECIAL)[1] == said
    # The same characters, if they are no special token, are text.
    if said != text:
        assert read("qwen3_xml", text, opened=False)[1] == text


def test_special_tokens_are_no_reasoning_and_mark_calls():
    special = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>")
    text = f"<think>Hm.<|im_end|></think>I write.{hermes(*WRITE)}<|im_end|>"
    for size in (1, 7):
        found = read("hermes", text, opened=False, size=size, special=special)
        assert found == ("Hm.", "I write.", [WRITE])
    broken = "So <tool_call>{x}</tool_call> there<|im_end|>"
    assert read("hermes", broken, opened=False, special=special) == ("", "So {x} there", [])


def test_a_call_in_the_thinking_is_served_in_every_protocol(tiny):
    text = f"<think>I read it.\n{xml(*WRITE)}"
    options = {"tool_parser": "qwen3_xml", "reasoning_parser": "think"}
    with spoken(*tiny, text, **options) as server:
        (choice,) = server.chat(**CHAT, max_tokens=400)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "I read it."
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == WRITE[1]
        _, body = server.ask("/v1/responses", RESPONSES)
        assert [item["type"] for item in body["output"]] == ["reasoning", "function_call"]
        _, body = server.ask("/v1/messages", {**CLAUDE, "max_tokens": 400})
        assert [block["type"] for block in body["content"]] == ["thinking", "tool_use"]
        assert body["content"][1]["input"] == WRITE[1]
        (choice,) = server.chat(messages=MESSAGES, max_tokens=400)["choices"]
        assert "tool_calls" not in choice["message"]
        assert xml(*WRITE) in choice["message"]["reasoning_content"]


def test_special_tokens_reach_no_client(tiny, monkeypatch):
    _, tokenizer = tiny
    token = tokenizer.encode("import", add_special_tokens=False)[0]
    name = tokenizer.convert_ids_to_tokens(token)
    monkeypatch.setattr(tokenizer, "all_special_ids", [token])
    monkeypatch.setattr(tokenizer, "all_special_tokens", [name])
    with spoken(*tiny, "import os") as server:
        (choice,) = server.chat(max_tokens=10)["choices"]
        assert choice["message"]["content"].strip() == "os"
        status, body = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 10})
        assert (status, body["choices"][0]["text"]) == (200, "import os")
