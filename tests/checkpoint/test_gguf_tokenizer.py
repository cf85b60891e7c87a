"""Oracles: the published definitions of the models' own tokenizers, run by the `tokenizers` library
over the same vocabulary, and the `regex` package, which is another engine for the same cuts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from mlx_moeflux.checkpoint.formats.gguf import gguf_metadata
from mlx_moeflux.checkpoint.formats.gguf_tokenizer import CUTS, tokenizer_json
from mlx_moeflux.errors import CheckpointError, MoefluxError, UnsupportedError
from mlx_moeflux.generation.prompt import prompt_ids
from mlx_moeflux.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
# Normal form, expressions, ignore_merges; of the files named above each.
ORIGINALS: dict[str, tuple[str | None, list[str], bool]] = {
    # Qwen/Qwen3-30B-A3B, tokenizer.json
    "qwen2": ("NFC", [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"], False),  # noqa: E501
    # transformers 5.24, tokenization_qwen3_5.py; Qwen/Qwen3.8-Flash-Next-FP8 has the same
    "qwen35": ("NFC", [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"], False),  # noqa: E501
    # deepseek-ai/DeepSeek-V3, tokenizer.json, which has these line ends as characters
    "deepseek-v3": (None, ["\\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"], False),  # noqa: E501
    # zai-org's tokenizer.json
    "glm4": (None, [CL100K], True),
    # moonshotai/Kimi-K2-Instruct, tokenization_kimi.py; tiktoken looks a whole piece up first
    "kimi-k2": (None, ["|".join([r"[\p{Han}]+", r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])], True),  # noqa: E501
    # openai/gpt-oss-20b, tokenizer.json
    "gpt-4o": (None, [O200K], True),
    # llama.cpp counts MiniMax-M2 among those with gpt-4o's expression
    "minimax-m2": (None, [O200K], False),
    # meta-llama/Llama-3.1-8B, tokenizer.json
    "llama-bpe": (None, [CL100K], True),
    # openai/tiktoken, openai_public.py
    "gpt-2": (None, [r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"], False),  # noqa: E501
}  # fmt: skip
ORIGINALS |= {"joyai-llm": ORIGINALS["deepseek-v3"], "chatglm-bpe": ORIGINALS["glm4"]}

UNPAIRED = "qwzx"  # a token that no pairs make
TEXTS = [
    "", " ", "\n", "\r\n", " \r\n \n\t x", "a  b   c\n\n\n  d  ",
    "\t\tif x:\r\n\t\t\treturn y\r\n\r\n", "I'VE don't WE'LL he'S it'D 'tis ''s 'ſ x'ſt",
    "camelCase HTTPServer snake_case x2y ǅungla ªº", "1 12 123 1234 12345678901234567890 1.5e-10",
    "１２３４ ٣٤٥٦ ½ Ⅷ ⁿ 〇〇〇〇", "$1,000.50/50 //// ://a }\n/// b", "naïve Å\u030a \u0301 ŉ ﬀ",
    "café cafe\u0301 a\u0301\u0302b e\u0301'\u0301s", "हिन्दी नमस्ते ที่ עִבְרִית العَرَبِيَّة",
    "世界 世界世世——我想在apple工作1314天～王", "々〆 㐀 𠀀 日本語のテキスト、カタカナー。 ひら",
    "한국어 텍스트 ㄱㄴ ᄀ Cửa Việt 世鿋", "ДокументПродажиТоваровУслуг Ελληνικά ΣΊΣΥΦΟΣ",
    "👩‍👩‍👧 🏳️‍🌈 👍🏽 🇩🇪 😶‍🌫️",
    "\u200b\u200c\u200d\ufeff \u00ad \u2028\u2029\u0085\u00a0\u3000\u180e x",
    "\ue000\uf8ff\U000f0000 \ufffd\ufffe \x00\x01\x0b\x0c\x7f",
    "!!!??? ...``` “quoted” ‘single’ (a) [b] {c}", f"{UNPAIRED} {UNPAIRED}1 {UNPAIRED.upper()}",
    "lone\udcff and \ud83d".encode("utf-8", "replace").decode(),
]  # fmt: skip


@cache
def vocabulary() -> tuple[list[str], list[str]]:
    """All bytes, pairs that reach over every cut, and a token that no pairs make."""
    trained = Library(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=6,
        show_progress=False,
    )
    trained.train_from_iterator([text for text in TEXTS if UNPAIRED not in text] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return [*tokens, UNPAIRED, f"Ġ{UNPAIRED}"], merges


def write(path: Path, cut: str = "qwen2", more: dict[str, int] | None = None, **keys: Any) -> Path:
    """A GGUF file without tensors. more: Token -> type. keys: Of the group tokenizer.ggml."""
    tokens, merges = vocabulary()
    more = {"<bos>": 3, "<eos>": 3} if more is None else more
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([*tokens, *more])
    writer.add_token_types([1] * len(tokens) + list(more.values()))
    writer.add_token_merges(merges)
    for i, name in enumerate(("bos", "eos")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", len(tokens) + i)
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](f"tokenizer.ggml.{key}", value)
    return closed(writer, path)


def closed(writer, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Name of a cut -> the tokenizer of a file, and the model's own over the same tokens."""
    path = write(tmp_path_factory.mktemp("cut") / "model.gguf")
    read = gguf_metadata(path)

    @cache
    def made(name: str) -> tuple[Library, Library]:
        content, _ = tokenizer_json(read | {"tokenizer.ggml.pre": name}, path)
        form, patterns, ignore_merges = ORIGINALS[name]
        tokens, merges = vocabulary()
        own = Library(
            models.BPE(
                {token: i for i, token in enumerate(tokens)},
                [tuple(merge.split()) for merge in merges],
                ignore_merges=ignore_merges,
            )
        )
        own.normalizer = {None: None, "NFC": normalizers.NFC()}[form]
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        own.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        own.decoder = decoders.ByteLevel()
        return Library.from_str(json.dumps(content)), own

    return made


def check(ours: Library, own: Library, text: str) -> None:
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == own.encode(text).ids
    kept = text if own.normalizer is None else own.normalizer.normalize_str(text)
    assert ours.decode(ids) == own.decode(ids) == kept


def test_the_originals_are_all_cuts():
    assert ORIGINALS.keys() == CUTS.keys()


@pytest.mark.parametrize("name", sorted(ORIGINALS))
def test_text_is_cut_as_by_the_models_own_tokenizer(both, name):
    ours, own = both(name)
    for text in TEXTS:
        cut = ours.pre_tokenizer.pre_tokenize_str(text)
        assert cut == own.pre_tokenizer.pre_tokenize_str(text)
        check(ours, own, text)


def test_every_cut_differs_from_every_other(both):
    """The texts and pairs tell them apart; only names of one cut give the same ids."""
    ids = {name: [both(name)[0].encode(t).ids for t in TEXTS] for name in sorted(ORIGINALS)}
    same = [(a, b) for a in ids for b in ids if a < b and ids[a] == ids[b]]
    assert same == [("chatglm-bpe", "glm4"), ("deepseek-v3", "joyai-llm")]


@pytest.mark.parametrize("name", sorted(ORIGINALS))
@settings(max_examples=15)
@given(text=st.text(max_size=40) | st.lists(st.sampled_from(TEXTS), max_size=3).map("".join))
def test_any_text_is_cut_as_by_the_models_own_tokenizer(both, name, text):
    check(*both(name), text)


@pytest.mark.parametrize("name", sorted(ORIGINALS))
def test_another_engine_cuts_at_the_same_places(both, name):
    regex = pytest.importorskip("regex", reason="comes with transformers")
    alphabet = dict(zip(byte_letters(), range(256), strict=True))
    for text in TEXTS:
        pieces = [text] if text else []
        for pattern in ORIGINALS[name][1]:
            pieces = [p for piece in pieces for p in isolated(regex, pattern, piece)]
        cut = both(name)[0].pre_tokenizer.pre_tokenize_str(text)
        assert [bytes(alphabet[c] for c in piece).decode() for piece, _ in cut] == pieces


def isolated(regex, pattern: str, text: str) -> list[str]:
    """Matches, and what lies between them."""
    found, at = [], 0
    for match in regex.finditer(pattern, text, flags=regex.V1):
        found += [text[at : match.start()], match[0]]
        at = match.end()
    return [piece for piece in (*found, text[at:]) if piece]


def byte_letters() -> list[str]:
    """GPT-2's letter of each byte: its own if it is printed, else the next from U+0100."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printed else next(others)) for b in range(256)]


@pytest.mark.parametrize(
    ("cut", "keys", "before", "after"),
    [
        ("qwen2", {}, [], []),
        ("qwen2", {"add_bos_token": True}, ["<bos>"], []),
        ("deepseek-v3", {"add_bos_token": True, "add_eos_token": False}, ["<bos>"], []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<bos>"], ["<eos>"]),
        ("gpt-2", {"add_eos_token": True}, [], ["<eos>"]),
        ("llama-bpe", {}, ["<bos>"], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
    ],
)
def test_what_surrounds_a_text(tmp_path, cut, keys, before, after):
    path = write(tmp_path / "model.gguf", cut, **keys)
    content, config = tokenizer_json(gguf_metadata(path), path)
    library = Library.from_str(json.dumps(content))
    plain = library.encode("a b", add_special_tokens=False).tokens
    assert library.encode("a b").tokens == [*before, *plain, *after]
    assert library.encode("a b", "c").tokens == [
        *before, *plain, *after, *before, "c", *after
    ]  # fmt: skip
    assert (config["bos_token"], config["eos_token"]) == ("<bos>", "<eos>")


class Model:
    class config:
        vocab_size = 10_000

    def context_left(self):
        return 1_000


def test_a_prompt_begins_once(tmp_path):
    path = write(tmp_path / "model.gguf", "deepseek-v3", add_bos_token=True)
    tokenizer = load_tokenizer(path)
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    messages = [{"role": "user", "content": "a b"}]
    ids = tokenizer.encode("a b")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.apply_chat_template(messages, chat_template=template) == ids
    assert prompt_ids(Model(), tokenizer, "a b") == ids
    assert prompt_ids(Model(), tokenizer, "<bos>a b") == ids


def test_types_of_tokens(tmp_path):
    kinds = {
        "<bos>": 3, "<eos>": 3, "<unk>": 2, "<think>": 4, "two words": 4, "[PAD7]": 5, "<0x0A>": 6,
        "<｜end▁of▁sentence｜>": 3,
    }  # fmt: skip
    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", "gpt-4o", kinds))
    first = len(vocabulary()[0])
    ids = {token: first + i for i, token in enumerate(kinds)}
    text = "a<think>b two wordsc<unk><｜end▁of▁sentence｜>[PAD7]"
    found = tokenizer.encode(text)
    for token in ("<think>", "two words", "<unk>", "<｜end▁of▁sentence｜>"):
        assert found.count(ids[token]) == 1
    assert ids["[PAD7]"] not in found
    assert tokenizer.decode(found) == text
    assert tokenizer.decode(found, skip_special_tokens=True) == "a<think>b two wordsc[PAD7]"
    special = {"<bos>", "<eos>", "<unk>", "<｜end▁of▁sentence｜>"}
    assert set(tokenizer.all_special_tokens) == special
    # As in the original, where a row of the embedding that no token has is no token.
    assert tokenizer.decode([ids["[PAD7]"]]) == ""
    assert tokenizer.convert_ids_to_tokens(ids["[PAD7]"]) is None
    assert tokenizer.vocab_size == first + len(kinds) - 1
    assert tokenizer.convert_ids_to_tokens(ids["<0x0A>"]) == "<0x0A>"


def test_tokens_that_end_a_reply_by_name(tmp_path):
    """gpt-oss ends a call of a tool, and Kimi-K2 a turn, with tokens that no key names."""
    kinds = {"<bos>": 3, "<eos>": 3, "<|call|>": 3, "<|im_end|>": 4, "<|end|>": 3}
    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", "gpt-4o", kinds))
    first = len(vocabulary()[0])
    assert tokenizer.eos_token_ids == {first + 1, first + 2, first + 3}
    assert tokenizer.eos_token_id == first + 1


@pytest.mark.parametrize(
    ("named", "plain", "with_tools"),
    [
        ([("rag", "r"), ("default", "d"), ("tool_use", "t")], "d", "t"),
        ([("tool_use", "t")], "t", "t"),
    ],
)
def test_templates(tmp_path, named, plain, with_tools):
    path = write(tmp_path / "plain.gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "qwen3moe")
    for name, field in gguf.GGUFReader(path).fields.items():
        if name.startswith("tokenizer."):
            kinds = [*field.types, None][:2]
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=kinds[1])
    writer.add_chat_template([{"name": n, "template": t} for n, t in named])
    tokenizer = load_tokenizer(closed(writer, tmp_path / "model.gguf"))
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == plain
    assert tokenizer.apply_chat_template(messages, tools=[{}], tokenize=False) == with_tools


def metadata(**keys: Any) -> dict[str, Any]:
    """Five tokens and two merges. keys: Of the group tokenizer.ggml; None leaves one out."""
    found = {
        "model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab", "<s>", "abb"],
        "token_type": [1, 1, 1, 3, 1], "merges": ["a b", "ab b"], "bos_token_id": 3,
    } | keys  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("gpt2", "default"), ("gpt2", "nonesuch"), ("gpt2", None), ("gpt2", ["qwen2"]), ("gpt2", 5),
        ("llama", "qwen2"), ("llama", None), (None, "qwen2"), (["gpt2"], "qwen2"),
    ],
)  # fmt: skip
def test_an_unknown_cut_is_one_line(kind, cut):
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json beside the file") as caught:
        tokenizer_json(metadata(model=kind, pre=cut), Path("/x/model.gguf"))
    words = str(caught.value)
    assert "/x/model.gguf" in words
    assert repr(kind) in words
    assert repr(cut) in words
    assert "\n" not in words


def test_a_tokenizer_beside_a_file_with_an_unknown_cut_is_used(tmp_path):
    path = write(tmp_path / "known.gguf")
    content, _ = tokenizer_json(gguf_metadata(path), path)
    path.unlink()
    path = write(tmp_path / "model.gguf", "nonesuch")
    with pytest.raises(UnsupportedError, match="nonesuch"):
        load_tokenizer(path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("a b") == Library.from_str(json.dumps(content)).encode("a b").ids
    # What the metadata names besides stays.
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "a"}')
    assert load_tokenizer(path).bos_token == "a"


WRONG = {
    "tokens": ["x", [1, 2, 3, 4, 5], ["a", "b", "ab", "<s>", 5], ["a", "b", "ab", "<s>", "a"]],
    "token_type": [[1], ["1"] * 5, [1.0] * 5, [True] * 5, "x", 1, [1] * 6],
    "merges": [
        None, "a b", [1], ["ab"], ["a b b"], ["a b", "a zz"], ["b a"], [""], [" a"], ["a "],
        ["a  b"],
    ],
    "add_bos_token": [1, "true", [True]],
    "add_eos_token": [True, 0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [pytest.param(k, v, id=f"{k}-{i}") for k, vs in WRONG.items() for i, v in enumerate(vs)],
)
def test_malformed_metadata_is_one_line(key, value):
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{key}") as caught:
        tokenizer_json(metadata(**{key: value}), Path("/x/model.gguf"))
    assert "/x/model.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("i", [5, -1, 2**32 - 1, "3", None, True, [3]])
def test_an_id_that_is_no_tokens_is_none_unless_a_text_needs_it(i):
    content, config = tokenizer_json(metadata(bos_token_id=i, padding_token_id=i), Path("x.gguf"))
    assert content["post_processor"] is None
    assert config.keys() == {"tokenizer_class", "clean_up_tokenization_spaces"}
    with pytest.raises(CheckpointError, match="bos_token_id"):
        tokenizer_json(metadata(bos_token_id=i, add_bos_token=True), Path("x.gguf"))


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
@pytest.mark.parametrize("value", [5, ["x"], None])
def test_a_template_that_is_no_text_is_one_line(key, value):
    with pytest.raises(CheckpointError, match=r"x\.gguf.*tokenizer\.chat_template"):
        tokenizer_json(metadata() | {key: value}, Path("x.gguf"))


def test_no_tokenizer_is_one_line():
    with pytest.raises(CheckpointError, match=r"x\.gguf carries no tokenizer"):
        tokenizer_json({"general.architecture": "qwen3moe"}, Path("x.gguf"))


some = st.sampled_from
texts = st.text(max_size=3) | some(["a", "b", "ab", " ", "", "<s>", "Ġ", "#version", "\0"])
junk = st.none() | st.booleans() | st.integers(-2, 2**33) | texts | st.lists(texts, max_size=3)


@settings(max_examples=100)
@given(
    st.fixed_dictionaries(
        {
            "tokens": st.lists(texts, max_size=6, unique=True) | junk,
            "token_type": st.lists(st.integers(0, 7), min_size=4, max_size=6) | st.none() | junk,
            "merges": st.lists(some(["a b", "b a", "a a", "#version a"]), max_size=2) | junk,
            "bos_token_id": st.integers(0, 6) | junk,
            "eos_token_id": st.integers(0, 6) | junk,
            "add_bos_token": st.none() | st.booleans(),
            "add_eos_token": st.none() | st.booleans(),
            "pre": some(sorted(CUTS)),
        }
    )
)
def test_hostile_metadata_is_one_line_or_a_tokenizer(keys):
    try:
        content, _ = tokenizer_json(metadata(**keys), Path("x.gguf"))
    except MoefluxError:
        return
    library = Library.from_str(json.dumps(content))
    tokens = keys["tokens"] or []
    assert all(library.token_to_id(t) in (i, None) for i, t in enumerate(tokens))
    library.decode(library.encode("ab a<s> b").ids)


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("name", sorted(ORIGINALS))
def test_transformers_reads_what_is_written(tmp_path, both, name):
    transformers = pytest.importorskip("transformers")
    path = write(tmp_path / "model.gguf", name, add_bos_token=True)
    content, config = tokenizer_json(gguf_metadata(path), path)
    out = tmp_path / "written"
    out.mkdir()
    for file, values in (("tokenizer", content), ("tokenizer_config", config)):
        (out / f"{file}.json").write_text(json.dumps(values), encoding="utf-8")
    (out / "config.json").write_text('{"model_type": "qwen3_moe"}')
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ids == Library.from_str(json.dumps(content)).encode(text).ids
        assert theirs.decode(ids[1:]) == both(name)[1].decode(ids[1:])
