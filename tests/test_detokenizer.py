"""Oracle: decoding all ids in one call; no piece may depend on later ids."""

from __future__ import annotations

import time

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from mlx_moeflux.detokenizer import PieceDetokenizer, StopText
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.tokenizer import load_tokenizer

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
