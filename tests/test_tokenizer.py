"""Oracles: decoding all ids in one call, mlx-lm's wrapper, and jinja2's sandbox."""

from __future__ import annotations

import json
import shutil
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_moeflux.errors import CheckpointError, ConfigError, InputError
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.tokenizer import load_tokenizer

TEXT = "naïve façade — 日本語のテキスト 🙂👩‍👩‍👧 def f(x):\n\treturn x\n"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUNDLED_MODEL)


@pytest.fixture
def directory(tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken"])
def test_a_list_of_ranks_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"IQ== 0\n")
    with pytest.raises(CheckpointError, match="convert_tiktoken_to_fast") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_survives(tokenizer):
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer):
    """A server's streams go on while it reads a prompt."""
    text, done, ticks = TEXT * 1_000, threading.Event(), []

    def tick():
        while not done.wait(0.001):
            ticks.append(None)

    other = threading.Thread(target=tick)
    other.start()
    ids = tokenizer.encode(text)
    done.set()
    other.join()
    assert len(ticks) > 5
    assert ids == tokenizer._backend.backend.encode(text).ids


def test_called_as_transformers_tokenizers_are(tokenizer):
    short = "a b"
    one, both = tokenizer(TEXT), tokenizer([TEXT, short])
    rows = [tokenizer.encode(TEXT), tokenizer.encode(short)]
    assert one.input_ids == one["input_ids"] == rows[0]
    assert one.attention_mask == [1] * len(rows[0])
    assert both.input_ids == rows
    assert [len(mask) for mask in both["attention_mask"]] == [len(row) for row in rows]
    assert tokenizer.batch_decode(both.input_ids) == [TEXT, short]
    assert tokenizer.batch_decode(rows[1]) == [tokenizer.decode(i) for i in rows[1]]
    with pytest.raises(InputError, match="padding is not offered"):
        tokenizer([TEXT, short], padding=True)
    for wrong in (5, [5], None):
        with pytest.raises(InputError, match="the text to encode"):
            tokenizer(wrong)


TEMPLATES = [
    "plain", "<minimax:tool_call>", "<|tool_call> <tool_call|>", "<|tool_call>", "<arg_key>",
    "<start_function_call>", "<longcat_tool_call>", "<|tool_list_start|>", "<|tool_call_start|>",
    "<tool_call>\n<function=", "<tool_call>\\n<function=", "<|tool_calls_section_begin|>",
    '<function name="x"><param name="y">', '<function name="x">', "[TOOL_CALLS]",
    "<atem:function_calls>", "<tool_call> tool_call.name", "<tool_call>",
]  # fmt: skip
TOKENS = [
    [], ["<think>"], ["<think>", "</think>"], ["<longcat_think>", "</longcat_think>"],
    ["<|think:start|>", "<|think:end|>"], ["<|channel>", "<channel|>"],
    ["<|open|>", "<|close|>", "<|sep|>"], ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    ["<|tool_call_start|>", "<|tool_call_end|>"],
]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "tokens"), [*((t, []) for t in TEMPLATES), *((None, t) for t in TOKENS)]
)
def test_thinking_and_tool_calls_are_found_as_mlx_lm_finds_them(directory, template, tokens):
    utils = pytest.importorskip("mlx_lm.tokenizer_utils")
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    first = load_tokenizer(directory).vocab_size
    for i, token in enumerate(tokens, first):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": i, "content": token, "special": True, **flags})
    file.write_text(json.dumps(content), encoding="utf-8")
    ours = load_tokenizer(directory, chat_template=template)
    assert ours.has_thinking == (utils._infer_thinking(ours)[0] is not None)
    assert ours.has_tool_calling == (utils._infer_tool_parser(ours) is not None)


def test_the_config_may_name_the_parser_of_tool_calls(directory):
    assert load_tokenizer(directory, tool_parser_type="mistral").has_tool_calling
    assert not load_tokenizer(directory).has_tool_calling


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4200), max_size=40))
def test_pieces_are_the_whole(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add(i) for i in ids]
    assert "".join([*pieces, detokenizer.finish()]) == tokenizer.decode(ids)


@settings(max_examples=100)
@given(st.text(max_size=30))
def test_every_text_streams_without_replacement_characters(tokenizer, text):
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode(text)
    assert "".join([*(detokenizer.add(i) for i in ids), detokenizer.finish()]) == text


def test_what_mlx_lms_wrapper_asks(tokenizer):
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    wrapper = TokenizerWrapper(tokenizer)
    assert wrapper.encode(TEXT) == tokenizer.encode(TEXT)
    assert wrapper.eos_token_ids == {tokenizer.eos_token_id}
    detokenizer = wrapper.detokenizer
    detokenizer.reset()
    for i in tokenizer.encode(TEXT):
        detokenizer.add_token(i)
    detokenizer.finalize()
    assert detokenizer.text == TEXT
    ids = tokenizer.convert_tokens_to_ids(["def", "nonesuch"])
    assert ids[1] is None
    assert tokenizer.convert_tokens_to_ids("\udcff") is None
    assert tokenizer.convert_ids_to_tokens(ids[:1]) == ["def"]
    assert tokenizer.get_vocab()["def"] == ids[0]
    assert tokenizer.vocab_size == 4096


def test_every_spelling_of_the_end(directory):
    own = load_tokenizer(directory).eos_token_id
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_tokenizer(directory).eos_token_ids == {own, 7, 9}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>", "special": True}})
    )
    assert load_tokenizer(directory).eos_token == "<|endoftext|>"
    for name in ("generation_config.json", "tokenizer_config.json"):
        (directory / name).unlink()
    (directory / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="eos_token"):
        load_tokenizer(directory)


def test_templates(directory):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if thinking %}?{% endif %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(directory)
    messages = [{"role": "user", "content": "hé"}]
    text = tokenizer.apply_chat_template(messages, tools=[{"a": "é"}], tokenize=False, thinking=1)
    assert text == '<user>hé[{"a": "é"}]?<bot>'
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode("<user>hé<bot>")
    messages.append({"role": "bot", "content": "Well"})
    text = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert text == "<user>hé<bot>Well"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such role') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages | nonesuch }}",
        "{% for %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ 1 / 0 }}",
        "{{ 'a'.split('') }}",
        "{{ 'a'.index('b') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_templates_that_are_refused(tokenizer, template):
    with pytest.raises(InputError, match="chat template"):
        tokenizer.apply_chat_template([{"role": "u", "content": ""}], chat_template=template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  {{ m.role }}: {{ m.content | trim }}\n{% endfor %}\n",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m }}{% endfor %}",
        "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}"
        "{{ x is defined }}{% endfor %}",
        "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}",
        "{{ tools | tojson(separators=(',', ':'), sort_keys=True, ensure_ascii=True) }}",
        "{{ documents[0].title }}{{ thinking is defined }}{{ extra }}{{ add_generation_prompt }}",
        "{{ strftime_now('%Y') | length }}{{ namespace(a=1).a }}",
    ],
)
def test_templates_render_as_with_transformers(tokenizer, template):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": " hé <b>"}, {"role": "assistant", "content": "so"}]
    variables = {
        "tools": [{"type": "function", "function": {"name": "é", "arguments": {"b": 1, "a": []}}}],
        "documents": [{"title": "T", "text": "t"}],
        "add_generation_prompt": True,
        "extra": 7,
    }
    (expected,), _ = render_jinja_template([messages], chat_template=template, **variables)
    found = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, **variables
    )
    assert found == expected


def test_named_templates(directory):
    named = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "d"}]
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "chat_template": named})
    )
    tokenizer = load_tokenizer(directory)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "d"
    assert tokenizer.apply_chat_template(messages, tools=[{}], tokenize=False) == "with tools"


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("generation_config.json", b'{"eos_token_id": "7"}', "eos_token_id is '7'"),
        ("generation_config.json", b'{"eos_token_id": [7, -1]}', "eos_token_id"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template is neither"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "x"}]}',
            "chat_template is neither",
        ),
        ("chat_template.json", b'{"chat_template": [[]]}', "chat_template is neither"),
        ("chat_template.jinja", b"\xff", "UTF-8"),
    ],
)
def test_damaged_files_are_named(directory, file, content, match):
    (directory / file).write_bytes(content)
    with pytest.raises(ConfigError, match=match) as caught:
        load_tokenizer(directory)
    assert str(directory / file) in str(caught.value)


def test_ids_and_text_that_cannot_be(tokenizer):
    for text in ("a\udcff", b"a", None):
        with pytest.raises(InputError, match="text"):
            tokenizer.encode(text)
    for call in (tokenizer.decode, tokenizer.convert_ids_to_tokens):
        with pytest.raises(InputError, match="-1"):
            call(-1)
    assert tokenizer.decode([4095, 10**6]) == tokenizer.decode(np.int64(4095))
    assert tokenizer.decode(np.array([4095])) == tokenizer.decode(4095)
    with pytest.raises(InputError, match="'messages'"):
        tokenizer.apply_chat_template([], chat_template="x", messages=[])


def test_no_template_and_no_tokenizer(tokenizer, tmp_path):
    with pytest.raises(InputError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_sentencepiece(tmp_path):
    import sentencepiece

    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 4)) for _ in range(60)]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(" ".join(random.choice(words, 8)) for _ in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=60, minloglevel=2
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    tokenizer = load_tokenizer(tmp_path)
    text = " ".join(words[:5])
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode([*ids, 10**6]) == text
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add(i) for i in ids]
    assert "".join([*pieces, detokenizer.finish()]) == tokenizer.decode(ids)
