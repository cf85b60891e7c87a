"""Oracles: decoding all ids in one call, and by the libraries; no piece may depend on later ids."""

from __future__ import annotations

import json
import time
from itertools import product

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from mlx_moeflux.detokenizer import Decoder, PieceDetokenizer, StopText
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.tokenizer import load_tokenizer
from mlx_moeflux.tokenizer_backends import SentencePieces
from mlx_moeflux.tokenizer_kinds import parts

TEXT = "é 日本語 🙂"


def byte_level(directory):
    return load_tokenizer(BUNDLED_MODEL)


def byte_fallback(directory):
    """The decoder of Llama 2: pieces with a space sign, bytes as <0xNN>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁a", "▁b", "ab", "c", "▁"]
    backend = Backend(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return load_tokenizer(directory)


def pieces(directory):
    """sentencepiece, with bytes and silent control tokens."""
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 4)) for _ in range(60)]
    corpus = directory / "corpus.txt"
    corpus.write_text("\n".join(" ".join(random.choice(words, 8)) for _ in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=330,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return load_tokenizer(directory)


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, pieces])
def tokenizer(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("tokenizer"))


def draw(tokenizer, random) -> list[int]:
    """Random ids among which bytes, whole characters, spaces and special tokens are frequent."""
    count = int(random.integers(1, 12))
    chosen = random.integers(0, len(tokenizer) + 3, count).tolist()
    frequent = [*tokenizer.all_special_ids, *tokenizer.encode(TEXT, add_special_tokens=False)]
    space = tokenizer.convert_tokens_to_ids("▁")
    frequent += [] if space is None else [space]
    return [int(random.choice(frequent)) if random.random() < 0.6 else i for i in chosen]


def test_pieces_are_the_whole_whatever_follows(tokenizer):
    partial = 0
    for seed in range(400):
        ids = draw(tokenizer, np.random.default_rng(seed))
        detokenizer, whole = tokenizer.detokenizer(), tokenizer.decode(ids)
        shown = ""
        for i in ids:
            shown += detokenizer.add(i)
            assert whole.startswith(shown), ids
            partial += shown != whole
        assert shown + detokenizer.finish() == whole, tokenizer.convert_ids_to_tokens(ids)
        assert detokenizer.finish() == ""
    assert partial > 1500


def test_whole_characters_only(tokenizer):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    shown = [detokenizer.add(i) for i in ids]
    assert not any("\ufffd" in piece for piece in shown)
    assert "".join([*shown, detokenizer.finish()]) == tokenizer.decode(ids) == TEXT


def test_time_is_linear_even_for_bytes_that_are_no_text(tokenizer):
    broken = tokenizer.encode("日", add_special_tokens=False)[-1]

    def seconds(count: int) -> float:
        detokenizer, start = tokenizer.detokenizer(), time.thread_time()
        for _ in range(count):
            detokenizer.add(broken)
        detokenizer.finish()
        return time.thread_time() - start

    seconds(100)
    # A quadratic one takes 64 times as long for 8 times as many. What else runs here costs no time
    # of this thread but its caches, now and then.
    few, many = (min(seconds(count) for _ in range(3)) for count in (2000, 16000))
    assert many <= 24 * max(few, 1e-3)


def test_text_is_shown_with_its_token():
    tokenizer = byte_level(None)
    ids = tokenizer.encode("def f(x):\n    return [x]\n")
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.add(i) for i in ids] == [tokenizer.decode([i]) for i in ids]


def test_a_tokenizer_of_transformers():
    backend = PreTrainedTokenizerFast(tokenizer_file=str(BUNDLED_MODEL / "tokenizer.json"))
    ids = backend.encode(TEXT + " def f(x):\n    return x\n")
    detokenizer = PieceDetokenizer(backend.decode, backend.convert_ids_to_tokens)
    shown = [detokenizer.add(i) for i in ids]
    assert not any("\ufffd" in piece for piece in shown)
    assert "".join([*shown, detokenizer.finish()]) == backend.decode(ids)


@pytest.mark.parametrize("seed", range(20))
def test_stop_texts_in_pieces(seed):
    random = np.random.default_rng(seed)
    text = "".join(random.choice(list("ab"), 40))
    stops = ["".join(random.choice(list("ab"), n)) for n in (3, 6)]
    stop, shown, i = StopText(stops), "", 0
    while i < len(text) and not stop.found:
        n = int(random.integers(1, 4))
        shown += stop.add(text[i : i + n])
        i += n
    if not stop.found:
        shown += stop.finish("")
    first = min((text.find(s) for s in stops if s in text), default=len(text))
    assert shown == text[:first]


STEPS = [
    decoders.Replace("▁", " "), decoders.Replace("ab", "é"), decoders.Replace("a", ""),
    decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.Strip("a", 3, 0),
    decoders.Metaspace(), decoders.Metaspace("a", "never"), decoders.Metaspace("▁", "first"),
    decoders.ByteLevel(),
]  # fmt: skip
SPELLED = ["a", "▁a", "▁", " ", "ab▁", "", "Ġb", "Ã", "<s>", "日", "<0x41>", "<0xE6>", "<0x97>",
           "<0xA5>", "<0xff>", "<0xG1>", "aaab"]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=4), st.lists(st.sampled_from(SPELLED), max_size=9))
def test_decoders_decode_as_the_library_does(steps, tokens):
    whole = decoders.Sequence(steps)
    decoder = Decoder([*parts(whole)], dict(enumerate(tokens)).get)
    expected = whole.decode(tokens) if steps else " ".join(tokens)
    assert decoder([*range(len(tokens)), 10**6]) == expected
    assert decoder([*range(len(tokens))]) == expected


def test_a_decoder_that_strips_more_than_there_is():
    """The library ends with a panic here."""
    step = json.loads(decoders.Strip(" ", 2, 5).__getstate__())
    assert Decoder([step], {0: "   ", 1: "   a  b ", 2: ""}.get)([0, 1, 2]) == " a  b"


@pytest.mark.parametrize(
    "step",
    [decoders.CTC(), decoders.WordPiece(), decoders.BPEDecoder(), decoders.Replace("a", "aa")],
)
def test_decoders_that_are_not_known(step):
    with pytest.raises(UnsupportedError, match="is not known here"):
        Decoder([*parts(step)], {}.get)


@pytest.mark.parametrize(("prefixed", "trimmed"), [*product((False, True), repeat=2)])
def test_pieces_decode_as_the_library_does(tmp_path, prefixed, trimmed):
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 4)) for _ in range(60)]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join("  ".join(random.choice(words, 8)) for _ in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=330,
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, add_dummy_prefix=prefixed,
        remove_extra_whitespaces=trimmed, user_defined_symbols=["▁"],
    )  # fmt: skip
    ours = SentencePieces((tmp_path / "tokenizer.model").read_bytes())
    size = len(ours.vocabulary())
    frequent = [
        *range(4),
        ours.id_of("▁"),
        *(ours.id_of(f"<0x{b:02X}>") for b in (65, 230, 151, 165)),
    ]
    for seed in range(300):
        draw = np.random.default_rng(seed)
        ids = draw.integers(0, size, int(draw.integers(1, 9))).tolist()
        ids = [int(draw.choice(frequent)) if draw.random() < 0.7 else i for i in ids]
        assert ours.decode(ids, False) == ours.decoded_by_library(ids), ids
