"""Tokenizers that no trial finds: each call ends in ids or in one line, soon and in little memory.

Oracles: the `tokenizers` library in this process, for those that are harmless; time, the sizes of
the processes, and standard error, for the others.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from itertools import product

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from mlx_moeflux.errors import MOST_CHARACTERS, InputError, MoefluxError, UnsupportedError
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.sandbox import tokenizers
from mlx_moeflux.sandbox.process import tokenizer_child
from mlx_moeflux.sandbox.tokenizers import Apart
from mlx_moeflux.tokenizer import load_tokenizer
from mlx_moeflux.tokenizer_backends import BytePairs
from mlx_moeflux.tokenizer_kinds import runs_here
from mlx_moeflux.tokenizer_patterns import CL100K, DEEPSEEK, KIMI, O200K, PATTERNS, QWEN2, QWEN35

LETTER = "й"  # no text of the trial has it
# Of a call on a busy machine. Alone, each takes less than 2.
SECONDS = 20
MOST_BYTES = 200_000_000
OWN = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "cache"))


def put(tmp_path, **components):
    """Return a directory with the bundled tokenizer, but for some components."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder / name)
    content = {**OWN, **components}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def replace(old, new, kind="String"):
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(*normalizers):
    return {"type": "Sequence", "normalizers": [*normalizers]}


def split(pattern, kind="Regex", behavior="Isolated"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": False}


def cuts(*pretokenizers, byte_level=True):
    """Return a pre-tokenizer of these, and of bytes as the bundled one's last."""
    last = OWN["pre_tokenizer"]["pretokenizers"][-1:] if byte_level else []
    return {"type": "Sequence", "pretokenizers": [*pretokenizers, *last]}


def template(*single, tokens=1):
    special = {"id": "x", "ids": [0] * tokens, "tokens": ["x"] * tokens}
    return {
        "type": "TemplateProcessing", "single": [*single], "pair": [*single],
        "special_tokens": {"x": special},
    }  # fmt: skip


def added(**flags):
    """Return the bundled added tokens, and the letter as another."""
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return [*OWN["added_tokens"], {"id": 4096, "content": LETTER, **usual, **flags}]


def word_piece(most, vocab=None):
    return {
        "type": "WordPiece", "unk_token": "<|endoftext|>", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": most, "vocab": vocab or {"<|endoftext|>": 0, "a": 1, "##a": 2},
    }  # fmt: skip


def unigram(length):
    pieces = [["<|endoftext|>", 0.0], *([LETTER * n, -float(n)] for n in range(1, length))]
    return {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}


def byte_pairs(**changes):
    return {**OWN["model"], **changes}


TEXT_A = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"SpecialToken": {"id": "x", "type_id": 0}}
SPACES = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
PUT = {"type": "Prepend", "prepend": LETTER * 1000}
BACKTRACKING = [
    rf"({LETTER}+)+!", rf"({LETTER}|{LETTER})*!", rf"({LETTER}*)*!", rf"({LETTER}+{LETTER}+)+!",
    rf"(?=({LETTER}+)+!){LETTER}", rf"({LETTER}?){{60}}{LETTER}{{60}}!", rf"({LETTER}+)\1+!",
    rf"^(({LETTER}{LETTER}?)+)+!", rf"({LETTER}{{1,50}}){{1,50}}!", r"(\w+\s?)+!", r"(.*)*!",
    r"(\p{L}+)*\d!",
]  # fmt: skip

# Never run here; most are harmless at each text of the trial.
HOSTILE = {
    **{
        f"replace by {n}, {times} times": {
            "normalizer": sequence(*[replace(LETTER, LETTER * n)] * times)
        }
        for n, times in product((2, 3, 10, 100, 1000, 10_000), (4, 8, 12, 16, 40))
    },
    **{
        f"replace {letter!r}": {"normalizer": sequence(*[replace(letter, letter * 1000)] * 4)}
        for letter in "жüﷺ한\u0301ßİ𝕏\ufeff\u2028字їçñøαאあ€~"
    },
    **{
        f"replace {old!r} after {form}": {
            "normalizer": sequence({"type": form}, *[replace(old, old * 500)] * 4)
        }
        for form, old in product(
            ("NFD", "NFKD", "NFC", "NFKC", "Lowercase", "Strip"), ("и", "й", "ا", "字")
        )
    },
    **{
        f"replace by expression {i}": {"normalizer": replace(p, "", "Regex")}
        for i, p in enumerate(BACKTRACKING)
    },
    **{
        f"replace each by {n}": {
            "normalizer": sequence(*[replace(f"[{LETTER}]", LETTER * n, "Regex")] * 5)
        }
        for n in (10, 100, 1000)
    },
    **{
        f"ping-pong {n}": {
            "normalizer": sequence(*[replace(LETTER, "цц"), replace("ц", LETTER * 2)] * n)
        }
        for n in (5, 10, 20, 100)
    },
    **{
        f"prepend {times} times": {"normalizer": sequence(*[PUT] * times)}
        for times in (1, 10, 50, 100)
    },
    **{
        f"prepend, then replace by {n}": {
            "normalizer": sequence(
                {"type": "Prepend", "prepend": "x"}, *[replace(LETTER, LETTER * n)] * 4
            )
        }
        for n in (50, 200, 1000)
    },
    **{
        f"bytes of bytes {times}": {"normalizer": sequence(*[{"type": "ByteLevel"}] * times)}
        for times in (2, 10, 25)
    },
    **{
        f"characters in spaces {times}": {
            "normalizer": sequence(
                *[
                    {
                        "type": "BertNormalizer",
                        "clean_text": False,
                        "handle_chinese_chars": True,
                        "strip_accents": False,
                        "lowercase": False,
                    },
                    replace(" ", "字"),
                ]
                * times
            )
        }
        for times in (4, 10, 15)
    },
    **{
        f"cut by expression {i}, {b}": {"pre_tokenizer": cuts(split(p, behavior=b))}
        for (i, p), b in product(enumerate(BACKTRACKING), ("Isolated", "Removed", "MergedWithNext"))
    },
    **{
        f"cut at what expression {i} leaves": {"pre_tokenizer": cuts({**split(p), "invert": True})}
        for i, p in enumerate(BACKTRACKING)
    },
    **{
        f"bytes by GPT-2's cut and expression {i}": {
            "pre_tokenizer": cuts(BYTES, split(p), byte_level=False)
        }
        for i, p in enumerate(BACKTRACKING)
    },
    **{
        f"a known cut with {extra!r}": {"pre_tokenizer": cuts(split(QWEN2 + extra))}
        for extra in (rf"|({LETTER}+)+!", rf"|(?:{LETTER}*)*!", " ", "|")
    },
    **{
        f"cut by one expression and {i}": {"pre_tokenizer": cuts(split(QWEN2), split(p))}
        for i, p in enumerate(BACKTRACKING)
    },
    **{
        f"spaces of spaces {times}": {
            "pre_tokenizer": cuts(
                *[
                    split("", "Regex"),
                    {**SPACES, "replacement": "▁"},
                    {**SPACES, "replacement": "_"},
                ]
                * times
            )
        }
        for times in (2, 6, 12)
    },
    **{
        f"bytes cut {times}": {"pre_tokenizer": cuts(*[BYTES] * times)}
        for times in (1, 5, 10, 14, 20)
    },
    **{
        f"a template of {n} texts": {"post_processor": template(*[TEXT_A] * n)}
        for n in (2, 10, 1000, 20_000)
    },
    **{
        f"a template of {n} tokens": {"post_processor": template(TEXT_A, *[SPECIAL] * n)}
        for n in (100, 20_000)
    },
    **{
        f"a special token of {n}": {"post_processor": template(SPECIAL, TEXT_A, tokens=n)}
        for n in (100, 10_000, 300_000)
    },
    **{
        f"templates of templates {n}": {
            "post_processor": {"type": "Sequence", "processors": [template(TEXT_A, TEXT_A)] * n}
        }
        for n in (2, 10, 20, 30)
    },
    **{
        f"word pieces up to {most}, {size} tokens": {
            "model": word_piece(
                most, {"<|endoftext|>": 0, **{f"{LETTER * n}": n for n in range(1, size)}}
            ),
            "pre_tokenizer": None,
        }
        for most, size in product((1000, 10**6, 2**31), (2, 300))
    },
    **{
        f"word pieces of {t!r}": {
            "model": word_piece(10**7, {"<|endoftext|>": 0, t: 1}),
            "pre_tokenizer": None,
        }
        for t in ("a", LETTER, "##" + LETTER)
    },
    **{
        f"unigram up to {n}": {"model": unigram(n), "pre_tokenizer": cut}
        for n, cut in product((2, 100, 500), (None, SPACES))
    },
    **{
        f"dropout {p}": {"model": byte_pairs(dropout=p), "pre_tokenizer": cuts()}
        for p in (0.1, 0.9, 1.0)
    },
    **{
        f"{name} of {n}": {"model": byte_pairs(**{name: LETTER * n})}
        for name, n in product(("end_of_word_suffix",), (9, 1000, 100_000))
    },
    **{
        f"added with {flag}": {"added_tokens": added(**{flag: True}), "normalizer": n}
        for flag, n in product(("lstrip", "single_word"), (None, {"type": "NFKD"}))
    },
    **{
        f"added {text!r} with the space behind it": {
            "added_tokens": [{**added(rstrip=True)[-1], "content": text}]
        }
        for text in (" ", "\n", "  ", "\u3000")
    },
    **{
        f"added, normalised by {n}": {
            "added_tokens": added(normalized=True),
            "normalizer": sequence(*[replace(LETTER, LETTER * n)] * 4),
        }
        for n in (10, 100, 1000)
    },
    "an added token, replaced by nothing": {
        "added_tokens": added(normalized=True),
        "normalizer": replace(f"[{LETTER}]", "", "Regex"),
    },
    **{
        f"{name} twice": {"normalizer": sequence({"type": name}, {"type": name})}
        for name in ("NFKD", "Lowercase", "Strip")
    },
    "replace nothing by nothing": {"normalizer": replace("", "")},
    "an expression of text": {"pre_tokenizer": cuts(split("a{1"))},
    "an expression that no text meets": {"pre_tokenizer": cuts(split(r"(.+)+!!\b\B"))},
}

# Not harmless at all: their trial fails, or their decoder is not known.
REFUSED = {
    **{f"prepend {n}": {"normalizer": {"type": "Prepend", "prepend": "x" * n}} for n in (10**6,)},
    **{f"replace nothing by {n}": {"normalizer": replace("", "x" * n)} for n in (1, 1000)},
    **{
        f"trial letter by {n}, {times} times": {
            "normalizer": sequence(*[replace("a", "a" * n)] * times)
        }
        for n, times in product((10, 100, 1000), (5, 20))
    },
    **{
        f"expression {i}": {"pre_tokenizer": cuts(split(p))}
        for i, p in enumerate(("(", "[", "(?<n>", "*", "(?P<a>b)(?P=c"))
    },
    **{
        f"trial backtracks {i}": {"pre_tokenizer": cuts(split(p))}
        for i, p in enumerate((r"((a|A| |1|\.)+)+\z\b\B", r"(\s+)+\z\b\B\w"))
    },
    **{
        f"decoder {d['type']} {i}": {"decoder": d}
        for i, d in enumerate(
            (
                {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True},
                {"type": "WordPiece", "prefix": "##", "cleanup": True},
                {"type": "BPEDecoder", "suffix": "</w>"},
                replace("a", "a" * 1000),
                replace("a", "aa"),
                replace("(a+)+!", "", "Regex"),
                replace("", "x"),
                {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 17},
                {"type": "Sequence", "decoders": [replace("a", "aa")] * 16},
            )
        )
    },
    **{
        f"a token of {n}": {"model": byte_pairs(vocab={**OWN["model"]["vocab"], LETTER * n: 4096})}
        for n in (5000, 10**6)
    },
    **{
        f"an added token of {n}": {"added_tokens": [{**added()[-1], "content": LETTER * n}]}
        for n in (5000, 10**6)
    },
    **{
        f"prefix of {n}": {"model": byte_pairs(continuing_subword_prefix="#" * n)}
        for n in (3, 10, 1000)
    },
    "no such kind": {"normalizer": {"type": "Nonesuch"}},
    "no unknown token": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
    "an unknown piece that is none": {"model": {**unigram(5), "unk_id": 10**6}},
    "a template of nothing": {
        "post_processor": template({"SpecialToken": {"id": "y", "type_id": 0}})
    },
    "deep": {"normalizer": json.loads('{"type":"Sequence","normalizers":[' * 300 + "]}" * 300)},
    "no object": {"model": []},
    "no vocabulary": {"model": {"type": "BPE"}},
    "two ends": {"model": byte_pairs(merges=[["a", "nonesuch"]])},
}

VOCAB = OWN["model"]["vocab"]
# They may run here, run in the child, or be refused.
ODD = {
    **{
        f"{n} added tokens": {
            "added_tokens": [
                {**added()[-1], "id": 4096 + i, "content": f"{LETTER}{i}"} for i in range(n)
            ]
        }
        for n in (1000, 10_000)
    },
    **{
        f"an added token {text!r}, {normalizer['type']}": {
            "added_tokens": [
                *OWN["added_tokens"],
                {**added()[-1], "content": text, "normalized": normalized},
            ],
            "normalizer": normalizer,
        }
        for (text, normalized), normalizer in product(
            (("", False), (" ", True), (LETTER, True), ("a", False)),
            (
                {"type": "Strip", "strip_left": True, "strip_right": True},
                replace(LETTER, ""),
                {"type": "NFKD"},
            ),
        )
    },
    **{
        f"an added token's id {i}": {"added_tokens": [{**added()[-1], "id": i}]}
        for i in (0, 5, 2**31, 2**32 - 1, 2**32, -1, 1.5)
    },
    **{
        f"an id {i}": {"model": byte_pairs(vocab={**VOCAB, LETTER: i})}
        for i in (5, 10**6, 2**32 - 1, 2**32, -1)
    },
    **{
        f"byte pairs with {name} {value!r}": {"model": byte_pairs(**{name: value})}
        for name, value in (
            ("byte_fallback", True),
            ("fuse_unk", True),
            ("ignore_merges", True),
            ("unk_token", "[UNK]"),
            ("unk_token", "a"),
            ("dropout", 0.0),
            ("dropout", 2.0),
            ("continuing_subword_prefix", "##"),
            ("end_of_word_suffix", "</w>"),
            ("merges", []),
            ("vocab", {}),
            ("vocab", {"": 0}),
        )
    },
    "an empty token": {"model": byte_pairs(vocab={**VOCAB, "": 4096})},
    "uncut": {"pre_tokenizer": None},
    "uncut bytes": {"pre_tokenizer": cuts()},
    "no decoder": {"decoder": None},
    **{
        f"cut at {text!r}, {b}": {"pre_tokenizer": cuts(split(text, "String", b))}
        for text, b in product((LETTER, ""), ("Isolated", "Contiguous", "MergedWithNext"))
    },
    **{
        f"cut into {n}": {"pre_tokenizer": cuts({"type": "FixedLength", "length": n})}
        for n in (0, 1)
    },
}

# One text with the letter, two for what backtracks, and what grows in a normal form.
TEXTS = (LETTER, "a" + LETTER * 40 + " ?", LETTER * 3000, "字 " * 300, "ﷺ" * 300 + LETTER)


def calls_of(folder):
    """Return the errors of loading, and of every text; each is one line. None: it gave ids."""
    found, slowest = [], 0.0

    def call(action):
        nonlocal slowest
        start, result = time.monotonic(), None
        try:
            result = action()
            found.append(None)
        except MoefluxError as error:
            line = str(error)
            assert "\n" not in line
            assert len(line) <= MOST_CHARACTERS
            found.append(error)
        slowest = max(slowest, time.monotonic() - start)
        return result

    tokenizer = call(lambda: load_tokenizer(folder))
    if tokenizer is not None:
        for text in TEXTS:
            ids = call(lambda text=text: tokenizer.encode(text))
            call(lambda ids=ids: tokenizer.decode((ids or [5, 6])[:5000]))
    assert slowest < SECONDS
    return tokenizer, found


def check_hostile(tmp_path, capfd, components):
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokenizer, _ = calls_of(put(tmp_path, **components))
    assert tokenizer is None or isinstance(tokenizer._backend, Apart)
    check_quiet(capfd, own)


def check_quiet(capfd, own):
    """Raise unless nothing was printed, and no process was large. own: This one's peak before."""
    tokenizer_child.close()
    assert capfd.readouterr() == ("", "")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own) * UNIT < MOST_BYTES


def check_refused(tmp_path, capfd, components):
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokenizer, found = calls_of(put(tmp_path, **components))
    assert tokenizer is None
    assert "tokenizer.json" in str(found[0])
    check_quiet(capfd, own)


EXAMPLES = (
    "replace by 1000, 4 times", "cut by expression 0, Isolated", "replace by expression 1",
    "a template of 20000 texts",
)  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_hostile(tmp_path, capfd, name):
    check_hostile(tmp_path, capfd, HOSTILE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in EXAMPLES])
def test_every_hostile(tmp_path, capfd, name):
    check_hostile(tmp_path, capfd, HOSTILE[name])


NO_TOKENIZER = (
    "prepend 1000000", "replace nothing by 1", "expression 0", "decoder CTC 0",
    "decoder Replace 4", "a token of 5000", "prefix of 10", "no unknown token",
)  # fmt: skip


@pytest.mark.parametrize("name", NO_TOKENIZER)
def test_refused(tmp_path, capfd, name):
    check_refused(tmp_path, capfd, REFUSED[name])


def check_odd(tmp_path, capfd, components):
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls_of(put(tmp_path, **components))
    check_quiet(capfd, own)


@pytest.mark.parametrize("name", ["10000 added tokens", "an id 4294967295", "uncut bytes"])
def test_odd(tmp_path, capfd, name):
    check_odd(tmp_path, capfd, ODD[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_every_odd(tmp_path, capfd, name):
    check_odd(tmp_path, capfd, ODD[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REFUSED if name not in NO_TOKENIZER])
def test_every_refused(tmp_path, capfd, name):
    check_refused(tmp_path, capfd, REFUSED[name])


def test_one_text_ends_the_child_and_the_next_has_its_ids(tmp_path):
    """The bomb of a letter that the trial lacks: the others are as in this process."""
    bomb = sequence(*[replace(LETTER, LETTER * 1000)] * 4)
    tokenizer, own = load_tokenizer(put(tmp_path, normalizer=bomb)), load_tokenizer(BUNDLED_MODEL)
    for text in ("def f(x):", "naïve 日本語 🙂" * 3000, ""):
        with pytest.raises(InputError, match="the tokenizer was stopped at this text"):
            tokenizer.encode(LETTER)
        ids = own.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab() == own.get_vocab()
    assert tokenizer.all_special_tokens == own.all_special_tokens
    assert tokenizer.byte_level
    assert tokenizer.convert_ids_to_tokens([5, 10**6]) == own.convert_ids_to_tokens([5, 10**6])
    assert tokenizer.convert_tokens_to_ids(["def", "nonesuch"])[1] is None


PEAKS = """
import resource, sys
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.sandbox.process import tokenizer_child
from mlx_moeflux.tokenizer import load_tokenizer
text, *folders = sys.argv[1:]
for folder in folders:
    try:
        load_tokenizer(folder).encode(text)
    except MoefluxError as error:
        print(error)
tokenizer_child.close()
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_neither_process_grows_large(tmp_path):
    folders = []
    for name in ("replace by 1000, 4 times", "prepend, then replace by 200", "ping-pong 20"):
        (tmp_path / name).mkdir()
        folders.append(put(tmp_path / name, **HOSTILE[name]))
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, LETTER * 2000, *folders],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *said, peak = done.stdout.splitlines()
    assert len(said) == 3
    assert int(peak) * UNIT < MOST_BYTES
    assert done.stderr == ""


def test_more_ids_than_a_text_can_have(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(put(tmp_path, post_processor=template(TEXT_A, *[SPECIAL] * 3000)))
    assert len(tokenizer.encode("def")) == 3001
    monkeypatch.setattr(tokenizers, "REPLY_BYTES", 2000)
    with pytest.raises(InputError, match="its output has more than"):
        tokenizer.encode("def")
    assert len(tokenizer.encode("def" * 1000)) > 3000


def test_two_that_stay_in_the_child_take_turns(tmp_path):
    grows = (sequence(*[replace(LETTER, LETTER * n)] * 4) for n in (10, 20))
    both = []
    for i, normalizer in enumerate(grows):
        (tmp_path / str(i)).mkdir()
        both.append(load_tokenizer(put(tmp_path / str(i), normalizer=normalizer)))
    expected = load_tokenizer(BUNDLED_MODEL).encode("def")
    assert [one.encode("def") for one in both * 2] == [expected] * 4


def test_one_call_for_a_text_and_none_for_its_tokens(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(put(tmp_path, normalizer=replace("[щ]", "", "Regex")))
    calls, call = [], tokenizer_child.call

    def count(job, *args, **named):
        calls.append(job)
        return call(job, *args, **named)

    monkeypatch.setattr(tokenizer_child, "call", count)
    ids = tokenizer.encode("def f(x): return x" * 10)
    detokenizer = tokenizer.detokenizer()
    text = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
    assert text == tokenizer.decode(ids) == "def f(x): return x" * 10
    assert calls == ["encode"]


def test_a_long_text_of_another_expression_is_not_too_much(tmp_path):
    """A pattern that equals none of the list is slower, and no fault."""
    tokenizer = load_tokenizer(put(tmp_path, pre_tokenizer=cuts(split(QWEN2 + "|x"))))
    assert isinstance(tokenizer._backend, Apart)
    text = "def f(x):\n    return [é for _ in x]\n" * 10_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["CTC", "WordPiece", "BPEDecoder"])
def test_a_decoder_that_is_not_known_is_named(tmp_path, kind):
    decoder = next(c["decoder"] for n, c in REFUSED.items() if n.startswith(f"decoder {kind}"))
    with pytest.raises(UnsupportedError, match=rf"tokenizer\.json: its decoder has a {kind}"):
        load_tokenizer(put(tmp_path, decoder=decoder))


# ---- What runs here

LIMITS = {
    "as many characters": {"normalizer": sequence(*[replace(" ", "▁")] * 9)},
    "fewer": {"normalizer": replace("  ", "▁")},
    "every form once": {
        "normalizer": sequence(*[{"type": name} for name in ("NFC", "NFD", "Lowercase")])
    },
    "prepend": {"normalizer": {"type": "Prepend", "prepend": "▁" * 8}},
    "text": {"pre_tokenizer": cuts(split(" ", "String", "MergedWithPrevious"))},
    "DeepSeek": {"pre_tokenizer": cuts(*map(split, DEEPSEEK)), "normalizer": sequence()},
    "template": {"post_processor": template(*[SPECIAL] * 10, TEXT_A, *[SPECIAL] * 54)},
    "words": {
        "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "<|endoftext|>": 1}}
    },
    "suffix": {"model": byte_pairs(end_of_word_suffix="</w>")},
    "added": {"added_tokens": added(rstrip=True, normalized=True)},
    "added space": {"added_tokens": [{**added()[-1], "content": " "}]},
}
BEYOND = {
    "one character more": {"normalizer": replace(" ", "▁▁")},
    "a form twice": {"normalizer": sequence({"type": "NFD"}, {"type": "NFD"})},
    "eighteen characters for one": {"normalizer": {"type": "NFKC"}},
    "bytes of bytes": {"normalizer": {"type": "ByteLevel"}},
    "prepend": {"normalizer": {"type": "Prepend", "prepend": "▁" * 9}},
    "seventeen": {"normalizer": sequence(*[replace(" ", "▁")] * 17)},
    "a space more": {"pre_tokenizer": cuts(split(QWEN2 + " "))},
    "template": {"post_processor": template(TEXT_A, *[SPECIAL] * 65)},
    "dropout": {"model": byte_pairs(dropout=0.1)},
    "added": {"added_tokens": added(lstrip=True)},
    "added space": {"added_tokens": [{**added(rstrip=True)[-1], "content": " "}]},
    "added letter, a space in the text": {
        "added_tokens": added(rstrip=True, normalized=True), "normalizer": replace(LETTER, " "),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_what_a_text_bounds_runs_here(tmp_path, case):
    folder = put(tmp_path, **LIMITS[case])
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer._backend, BytePairs)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)


# How the published tokenizer of each type of the catalogue cuts a text, and what else it has.
NFC, ENDS = {"type": "NFC"}, template(SPECIAL, TEXT_A)
TRIMMED = {"type": "Sequence", "processors": [{**BYTES, "trim_offsets": False}, ENDS]}
NEW_LINES = split(r"(?:\r?\n)+(?!\r?\n)", behavior="MergedWithNext")
PIECES = [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
BYTE_PIECES = {f"<0x{b:02X}>": 2 + b for b in range(256)}
QWEN3, QWEN3_5, GLM, O200 = (
    {"normalizer": NFC, "pre_tokenizer": cuts(split(QWEN2))},
    {"normalizer": NFC, "pre_tokenizer": cuts(split(QWEN35))},
    {"pre_tokenizer": cuts(split(CL100K)), "model": byte_pairs(ignore_merges=True)},
    {"pre_tokenizer": cuts(split(O200K)), "model": byte_pairs(ignore_merges=True)},
)
SHAPES = {
    "qwen3_5_moe": QWEN3_5, "qwen4_exp": QWEN3_5, "qwen3_next": QWEN3, "qwen3_moe": QWEN3,
    "gpt_oss": O200, "minimax_m2": O200, "glm4_moe": GLM, "glm4_moe_lite": GLM,
    "glm_moe_dsa": GLM,
    "deepseek_v32": {
        "normalizer": sequence(),
        "pre_tokenizer": cuts(*map(split, (*DEEPSEEK[:2], DEEPSEEK[2].replace(r"\r\n", "\r\n")))),
        "post_processor": TRIMMED,
    },
    "kimi_k25": {"pre_tokenizer": cuts(split(KIMI))},
    "laguna": {"pre_tokenizer": cuts(NEW_LINES, split(QWEN2)), "post_processor": ENDS},
    "gemma4": {
        "normalizer": replace(" ", "▁"),
        "pre_tokenizer": split(" ", "String", "MergedWithPrevious"),
        "post_processor": ENDS,
        "decoder": {"type": "Sequence", "decoders": PIECES},
        "model": byte_pairs(
            byte_fallback=True, fuse_unk=True, unk_token="<unk>", ignore_merges=False,
            vocab={"<|endoftext|>": 0, "<unk>": 1, **BYTE_PIECES, "▁": 258, "a": 259, "▁a": 260},
            merges=[["▁", "a"]],
        ),
    },
}  # fmt: skip


def test_each_type_of_the_catalogue_has_a_shape():
    models = json.loads((BUNDLED_MODEL.parent / "catalogue.json").read_text())["models"]
    assert {model["sizes"]["model_type"] for model in models} == SHAPES.keys()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(n, marks=[pytest.mark.slow] * (i >= 6)) for i, n in enumerate(SHAPES)],
)
def test_tokenizers_of_the_catalogue_run_here(tmp_path, kind):
    folder = put(tmp_path, **SHAPES[kind])
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer._backend, BytePairs)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (*TEXTS, "a def f(x):\r\n\treturn 'naïve' + 12345\n\n  日本語 🙂"):
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == library.decode(ids)


@pytest.mark.parametrize("case", BEYOND)
def test_a_step_beyond_does_not(tmp_path, case):
    folder = put(tmp_path, **BEYOND[case])
    assert not runs_here(Tokenizer.from_file(str(folder / "tokenizer.json")))


CHARACTERS = "aA1 \n\r'!日é\u0301ª\t/ǅ\u3000😀"
UNITS = [*CHARACTERS, "aA", "Aa", "\r\n", " \n", "'s", "a ", "日a"]


def check_linear(pattern, units):
    """Raise if sixteen times a text takes much more than sixteen times as long."""
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")

    def seconds(text):
        start = time.thread_time()
        cut.pre_tokenize_str(text)
        return time.thread_time() - start

    for unit in units:
        few, many = ((unit * n)[:n] + "\0a" for n in (500, 8000))
        least = min(seconds(few) for _ in range(2))
        # A quadratic one takes 256 times as long.
        assert min(seconds(many) for _ in range(2)) < 64 * max(least, 5e-4), (pattern, unit)


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_each_expression_is_linear(pattern):
    check_linear(pattern, UNITS)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_each_expression_is_linear_for_every_pair(pattern):
    check_linear(pattern, map("".join, product(CHARACTERS, CHARACTERS)))


def test_an_expression_that_is_not_is_found():
    with pytest.raises(AssertionError):
        check_linear(r"a*b|a", ["a"])
