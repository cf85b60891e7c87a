"""Oracle: the published shapes of calls and reasoning, cut anywhere; what is broken stays text."""

from __future__ import annotations

import json
import random

import pytest

from mlx_moeflux.detokenizer import StopText
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.calls.reader import whole_calls
from mlx_moeflux.server.calls.registry import SYNTAXES, choose_syntax
from mlx_moeflux.server.calls.splitter import CallSearch, ToolSplitter
from mlx_moeflux.server.calls.syntax import calls_grammar
from mlx_moeflux.server.constrain import Grammars
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.reasoning import REASONING, choose_reasoning
from mlx_moeflux.tokenizer import load_tokenizer

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "more": {"type": "object"},
    },
    "required": ["city"],
}
TOOLS = {"weather": CITY, "now": {"type": "object", "properties": {}}}

# Syntax -> (text of a reply, answer, calls).
PUBLISHED = {
    "hermes": (
        'Let me look.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Let me look.",
        [("weather", {"city": "Zürich"}), ("now", {})],
    ),
    "qwen3_xml": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew <York>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
        '<parameter=more>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n",
        "",
        [
            ("weather", {"city": "New <York>", "days": 3, "unit": "C", "more": {"a": [1]}}),
            ("now", {}),
        ],
    ),
    "deepseek_v3": (
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Tokyo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        [("weather", {"city": "Tokyo"}), ("now", {})],
    ),
    "deepseek_v3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Tokyo"}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        [("weather", {"city": "Tokyo"}), ("now", {})],
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "北京"}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [("weather", {"city": "北京"}), ("now", {})],
    ),
}
PUBLISHED |= {
    "glm4": (
        "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New <York></arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>more</arg_key>\n"
        '<arg_value>{"a": [1]}</arg_value>\n</tool_call>\n<tool_call>now</tool_call>',
        "I look.",
        [("weather", {"city": "New <York>", "days": 3, "more": {"a": [1]}}), ("now", {})],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="city">New <York></parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="unit">C</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [("weather", {"city": "New <York>", "days": 3, "unit": "C"}), ("now", {})],
    ),
    "deepseek_v3.2": (
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">New <York>, "NY"\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="unit" string="true">C</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="more" string="false">{"a": [1, "x"], "b": {}}'
        "</｜DSML｜parameter>\n"
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "I look.",
        [
            (
                "weather",
                {
                    "city": 'New <York>, "NY"\n',
                    "days": 3,
                    "unit": "C",
                    "more": {"a": [1, "x"], "b": {}},
                },
            ),
            ("now", {}),
        ],
    ),
    "gemma4": (
        'I look.<|tool_call>call:weather{city:<|"|>New {York}, "NY"<|"|>,days:3,unit:<|"|>C<|"|>,'
        'more:{a:[1,true,<|"|>x<|"|>],b:{}}}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "I look.",
        [
            (
                "weather",
                {
                    "city": 'New {York}, "NY"',
                    "days": 3,
                    "unit": "C",
                    "more": {"a": [1, True, "x"], "b": {}},
                },
            ),
            ("now", {}),
        ],
    ),
    "harmony": (
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Tokyo"}<|call|>',
        "",
        [("weather", {"city": "Tokyo"})],
    ),
}
BROKEN = {
    "glm4": ["<tool_call><arg_key>a</arg_key></tool_call>",
             "<tool_call>f<arg_key>a</arg_key>b</tool_call>"],
    "minimax_m2": ["<minimax:tool_call><invoke name=f></invoke></minimax:tool_call>",
                   "<minimax:tool_call></minimax:tool_call>"],
    "deepseek_v3.2": [f"<｜DSML｜function_calls>{text}</｜DSML｜function_calls>" for text in (
                          "", "<｜DSML｜invoke name=f></｜DSML｜invoke>",
                          '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1'
                          "</｜DSML｜parameter></｜DSML｜invoke>",
                          '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1'
                          "</｜DSML｜invoke>")],
    "gemma4": ["<|tool_call>weather{}<tool_call|>", "<|tool_call>call:f{a}<tool_call|>",
               "<|tool_call>call:f{a:1,a:2}<tool_call|>", "<|tool_call>call:f{a:}<tool_call|>",
               "<|tool_call>call:f{a:" + "[" * 5000 + "<tool_call|>",
               "<|tool_call>call:f{a:1<tool_call|>"],
    "harmony": ["<|channel|>commentary to=browser.open<|message|>{}<|call|>",
                "<|channel|>commentary to=functions.f<|message|>{<|call|>"],
    "hermes": ["<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>", "a <tool_call> b",
               '<tool_call>{"name": 5}</tool_call>', "<tool_call>" + "[" * 5000 + "</tool_call>",
               '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
               '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
               '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
               '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'],
    "qwen3_xml": ["<tool_call>x</tool_call>", "<tool_call><function=f>x</function></tool_call>"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>"],
    "deepseek_v3.1": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"
                      "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                      "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"],
    "kimi_k2": ["<|tool_calls_section_begin|><|tool_call_begin|>x<|tool_calls_section_end|>"],
}  # fmt: skip


def cut(text, seed):
    """A text in random parts; the seeds 0 and 1 give one part and single characters."""
    draw = random.Random(seed)
    at = 0
    while at < len(text):
        size = {0: len(text), 1: 1}.get(seed, draw.randint(1, 9))
        yield text[at : at + size]
        at += size


def split(name, text, seed, **options):
    splitter = ToolSplitter(SYNTAXES[name], TOOLS, **options)
    found = [splitter.add(part) for part in cut(text, seed)]
    found.append(splitter.add("", final=True))
    calls = whole_calls(call for one in found for call in one.calls)
    return "".join(one.text for one in found), calls


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_calls_are_found_wherever_they_are_cut(name, seed):
    text, answer, calls = PUBLISHED[name]
    said, found = split(name, text, seed)
    assert said.strip() == answer
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    _, first = split(name, text, seed, most=1)
    assert [call.name for call in first] == ["weather"]
    if name == "kimi_k2":
        assert [call.id for call in found] == ["functions.weather:0", "functions.now:1"]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in BROKEN.items() for t in texts])
def test_broken_calls_stay_text(name, text, seed):
    assert split(name, f"so {text} there", seed) == (f"so {text} there", [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_call_whose_end_the_model_left_out_counts(name):
    text, _, calls = PUBLISHED[name]
    end = SYNTAXES[name].end
    _, found = split(name, text[: text.rindex(end)], 1)
    assert [call.name for call in found] == [name for name, _ in calls]


def test_text_without_calls_is_not_held_back():
    splitter = ToolSplitter(SYNTAXES["hermes"], TOOLS)
    assert [splitter.add(part).text for part in ("a <to", "ol", "x", " \n", "b")] == [
        "a", "", " <toolx", "", " \nb",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=p>\n</tool_call>", "qwen3_xml"),
        ("<｜tool▁calls▁begin｜>...\n```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3.1"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>\n</tool_call>", "glm4"),
        ('<minimax:tool_call>\n<invoke name="tool">', "minimax_m2"),
        # As the published templates spell it.
        ("""{{- "<|start|>assistant to=" }}{{- "functions." + tool_call.name }}"""
         """{{- "<|channel|>commentary " }}{{- "json" + "<|message|>" }}{{- "<|call|>" }}""",
         "harmony"),
        ("""{{- '<tool_call>' + tc.name -}}{% for k, v in _args.items() %}"""
         """<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>""",
         "glm4"),
        ("""{%- set toolcall_begin_token = '<minimax:tool_call>' -%}"""
         """{{- '<invoke name="' + tool_call.name + '">\n' }}""", "minimax_m2"),
        ("""'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']"""
         """ + '\\n' + '```json' + '\\n' {{'<｜tool▁calls▁begin｜>'}}""", "deepseek_v3"),
        ("""{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + """
         """'<｜tool▁sep｜>' + tool['function']['arguments']}}""", "deepseek_v3.1"),
        ("<|channel|>commentary to= <|constrain|>json<|message|>", "harmony"),
        # Qwen3-Coder, Qwen3.5 and 3.6, and as GLM-4.7 and Kimi-K2-Thinking spell it.
        ("""{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}"""
         """{{- '<parameter=' + args_name + '>\n' }}""", "qwen3_xml"),
        ("""{{- '<tool_call>' + tc.name }}{%- for k, v in tc.arguments.items() -%}"""
         """<arg_key>{{ k }}</arg_key>""", "glm4"),
        ("""<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}"""
         """<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>""", "kimi_k2"),
        # DeepSeek-V3.2's, as llama.cpp spells it.
        ("""{%- set dsml_token = "｜DSML｜" -%}<{{ dsml_token }}function_calls>"""
         """<{{ dsml_token }}invoke name="f">""", "deepseek_v3.2"),
        # Laguna's, its eighth form.
        ("""{{- '<tool_call>' + function_data.name -}}{{- "<arg_key>" ~ k ~ "</arg_key>" -}}"""
         """{{- "<arg_value>" -}}{{- v -}}{{- "</arg_value>" -}}""", "glm4"),
        # Families that no model of this package has.
        ("""{%- set dsml_token = '｜DSML｜' -%}<{{ dsml_token }}tool_calls>""", None),
        ("""<seed:tool_call>\n<function=f>\n<parameter=a>""", None),
        ("""{{- '<|tool_call>call:' + name + '{' }}{{- '<|"|>' + argument + '<|"|>' -}}"""
         """{{- '}<tool_call|>' -}}""", "gemma4"),
        ("""<|tool_call_start|>[f(a=1)]<|tool_call_end|>""", None),
        ("{{ messages }}", None),
    ],
)  # fmt: skip
def test_the_template_tells_the_syntax(template, name):
    assert choose_syntax([None, template]) is (SYNTAXES[name] if name else None)
    assert choose_syntax([template], "kimi_k2") is SYNTAXES["kimi_k2"]


@pytest.mark.parametrize(
    ("template", "name", "text"),
    [
        ("'<｜tool▁calls▁begin｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>'",
         "deepseek_v3.1", True),
        ("'<｜tool▁calls▁begin｜>' + tool['function']['arguments']|tojson + '<｜tool▁call▁end｜>'",
         "deepseek_v3.1", False),
        ("'<｜tool▁calls▁begin｜>' ~ '```json' ~ tool.function.arguments | tojson",
         "deepseek_v3", False),
        ("<|tool_calls_section_begin|>{{ tool_call['function']['arguments'] | tojson }}",
         "kimi_k2", False),
        ("<|tool_calls_section_begin|>{% if call.arguments is string %}{{ call.arguments }}"
         "{% else %}{{ call.arguments | tojson }}{% endif %}", "kimi_k2", False),
        ("<|tool_calls_section_begin|>{{ tools | tojson }}{{ tool_call['arguments'] }}",
         "kimi_k2", True),
    ],
)  # fmt: skip
def test_the_template_tells_how_it_wants_earlier_arguments(template, name, text):
    for chosen in (choose_syntax([template]), choose_syntax([None, template], name)):
        assert chosen is not None
        assert chosen.parse is SYNTAXES[name].parse
        assert chosen.text_arguments == text


@pytest.fixture(scope="module")
def grammars():
    return Grammars(load_tokenizer(BUNDLED_MODEL), 4096)


@pytest.mark.parametrize("name", PUBLISHED)
def test_grammars_of_calls_allow_what_is_published_and_nothing_else(grammars, name):
    text = PUBLISHED[name][0]
    text = text[text.index(SYNTAXES[name].begin) :].strip()
    # The grammar is of the plain form: no white space between calls of one group.
    text = text.replace("<｜tool▁call▁end｜>\n", "<｜tool▁call▁end｜>")
    two = len(PUBLISHED[name][2]) > 1
    if SYNTAXES[name].ends_reply:
        text = text.removesuffix(SYNTAXES[name].end)  # a token of its own
    ids = load_tokenizer(BUNDLED_MODEL).encode(text, add_special_tokens=False)
    for many, wrong in ((True, False), (False, two)):
        grammar = grammars.lark(calls_grammar(SYNTAXES[name], TOOLS, many=many))
        grammars.check(grammar, "tools")
        matcher = grammars._matcher(grammar).deep_copy()
        taken = matcher.try_consume_tokens(ids)
        assert (taken < len(ids)) == wrong
        assert matcher.is_accepting() or wrong
    grammar = grammars.lark(calls_grammar(SYNTAXES[name], {"now": TOOLS["now"]}, many=True))
    assert grammars._matcher(grammar).deep_copy().try_consume_tokens(ids) < len(ids)


def test_a_grammar_is_compiled_once(grammars):
    grammar = grammars.json_schema({"type": "object", "properties": {"once": {"const": 1}}})
    before = grammars._matcher.cache_info()
    grammars.check(grammar, "response_format")
    for _ in range(3):
        grammars.check(grammar, "response_format")
        grammars.constraint(grammar, 5)
    after = grammars._matcher.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 6)


def test_what_cannot_be_compiled_names_its_field(grammars):
    with pytest.raises(RequestError, match="'response_format' cannot be enforced") as caught:
        grammars.check(grammars.json_schema({"type": "nothing"}), "response_format")
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm.\n\nYes.\n</think>\n\nAnswer <b>", "Hm.\n\nYes.", "Answer <b>"),
        (True, "\nHm.\n</think>\n\nAnswer", "Hm.", "Answer"),
        (True, "Hm. </thin", "Hm. </thin", ""),
        (False, "\n Answer </think> <think>", "", "\n Answer </think> <think>"),
        (False, "<thinking> is no tag", "", "<thinking> is no tag"),
        (False, "<think></think>Answer", "", "Answer"),
        (False, "  ", "", "  "),
    ],
)
def test_reasoning_is_apart_wherever_it_is_cut(opened, text, reasoning, content, seed):
    splitter = REASONING["think"].splitter(opened=opened)
    parts = [splitter.add(part) for part in cut(text, seed)]
    parts.append(splitter.add("", final=True))
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.content for part in parts) == content


HARMONY = {
    "reasoning, answer": (
        "<|channel|>analysis<|message|>Hm. <b>\n<|end|><|start|>assistant<|channel|>final"
        "<|message|>Answer <|x",
        "Hm. <b>\n", "Answer <|x"),
    "answer alone": ("<|channel|>final<|message|>Answer<|return|>", "", "Answer"),
    "call, and words before": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json"
        "<|message|>{}<|call|>",
        "Hm.", "I look.<|channel|>commentary to=functions.now<|message|>{}<|call|>"),
    "recipient before the channel, no end": (
        " to=functions.now<|channel|>commentary json<|message|>{}",
        "", "<|channel|>commentary to=functions.now<|message|>{}"),
    "reasoning twice": (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b",
        "ab", ""),
    "no headers": ('{"a": 1}', "", '{"a": 1}'),
    "nothing but a header": ("<|channel|>fin", "", ""),
}  # fmt: skip


def channels():
    calls = CallSearch(SYNTAXES["harmony"], TOOLS)
    return REASONING["harmony"].splitter(opened=False, calls=calls)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("case", HARMONY)
def test_channels_are_apart_wherever_they_are_cut(case, seed):
    text, reasoning, content = HARMONY[case]
    splitter = channels()
    parts = [splitter.add(part) for part in cut(text, seed)]
    parts.append(splitter.add("", final=True))
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.content for part in parts) == content


def test_a_call_in_a_channel_is_a_call():
    text = HARMONY["call, and words before"][0]
    messages = channels()
    calls = ToolSplitter(SYNTAXES["harmony"], TOOLS)
    found = [
        calls.add(messages.add(part).content) for part in cut(text.removesuffix("<|call|>"), 3)
    ]
    found.append(calls.add(messages.add("", final=True).content, final=True))
    assert "".join(one.text for one in found) == "I look."
    assert [c.name for c in whole_calls(c for one in found for c in one.calls)] == ["now"]


@pytest.mark.parametrize("end", ["<|call|>", ""])
@pytest.mark.parametrize(
    ("head", "arguments", "calls"),
    [
        ("functions.now", "{}", [("now", "{}")]),
        ("functions.now code", "{}", [("now", "{}")]),
        ("functions.now<|constrain|>json", " {} ", [("now", "{}")]),
        ("now <|constrain|>json", "{}", [("now", "{}")]),
        ("functions.now <|constrain|>json", "", [("now", "{}")]),
        ("functions.other", '{"a": "<|call|>"}', [("other", '{"a": "<|call|>"}')]),
        ("other", "{}", []),
        ("browser.open", "{}", []),
    ],
)
def test_the_heads_of_calls_that_gpt_oss_writes(head, arguments, calls, end):
    text = f"<|channel|>commentary to={head}<|message|>{arguments}{end}"
    for parts in ([text], list(text)):
        messages = channels()
        splitter = ToolSplitter(SYNTAXES["harmony"], TOOLS)
        found = [splitter.add(messages.add(part).content) for part in parts]
        found.append(splitter.add(messages.add("", final=True).content, final=True))
        whole = whole_calls(c for one in found for c in one.calls)
        assert [(c.name, c.arguments) for c in whole] == calls
        assert bool("".join(one.text for one in found)) == (not calls)


def test_the_vocabulary_tells_the_syntax_of_reasoning():
    class Vocabulary:
        def __init__(self, *tokens):
            self.tokens = tokens

        def convert_tokens_to_ids(self, names):
            return [self.tokens.index(n) if n in self.tokens else None for n in names]

    assert choose_reasoning(Vocabulary("<think>", "</think>")) is REASONING["think"]
    harmony = Vocabulary("<|channel|>", "<|message|>", "<|call|>", "<think>")
    assert choose_reasoning(harmony) is REASONING["harmony"]
    assert choose_reasoning(Vocabulary("<think>")) is None


def test_a_stop_text_is_named():
    stop = StopText(["cd", "b"])
    assert (stop.add("a"), stop.add("bcd"), stop.stop) == ("a", "", "b")
