"""The tokenizer that a GGUF file carries, as tokenizer.json and tokenizer_config.json.

Only byte pairs are made (`tokenizer.ggml.model` is `gpt2`); no model of this package has
SentencePiece's pieces.

Sources: llama.cpp for the metadata (`src/llama-vocab.cpp`, September 2026). For the cuts the
tokenizers of the models that the names mean: llama.cpp rewrites their expressions for its own
engine, which cuts some scripts elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from mlx_moeflux.checkpoint.formats.gguf_container import MOST_VALUES
from mlx_moeflux.errors import CheckpointError, UnsupportedError
from mlx_moeflux.tokenizer_patterns import CL100K, DEEPSEEK, GPT2, KIMI, O200K, QWEN2, QWEN35

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # token types


@dataclass(frozen=True)
class Cut:
    """What becomes of a text before its bytes are paired.

    patterns: Regular expressions. Each cuts what those before it left, into its matches and what
        lies between them.
    form: Unicode's normal form that the text takes first; None leaves the text.
    whole: Whether a piece that is a token becomes it, whatever its pairs would give.
    bos: Whether a text begins with the beginning token if the file does not say.
    """

    patterns: tuple[str, ...]
    form: str | None = None
    whole: bool = False
    bos: bool = False


CUTS = {
    "qwen2": Cut((QWEN2,), form="NFC"),
    "qwen35": Cut((QWEN35,), form="NFC"),
    "deepseek-v3": Cut(DEEPSEEK),
    "joyai-llm": Cut(DEEPSEEK),
    "glm4": Cut((CL100K,), whole=True),
    "chatglm-bpe": Cut((CL100K,), whole=True),
    "kimi-k2": Cut((KIMI,), whole=True),
    "gpt-4o": Cut((O200K,), whole=True),
    "minimax-m2": Cut((O200K,)),
    "llama-bpe": Cut((CL100K,), whole=True, bos=True),
    "gpt-2": Cut((GPT2,)),
}
"""By `tokenizer.ggml.pre`."""

# Tokens that end a reply although no key of the metadata gives their ids.
_ENDS = frozenset((
    "<|endoftext|>", "<|im_end|>", "<|return|>", "<|call|>", "[EOS]", "[EOT]", "[e~[",
    "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>",
))  # fmt: skip


def tokenizer_json(metadata: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json of a GGUF file's metadata.

    Raises:
        CheckpointError: There is none, or it contradicts itself.
        UnsupportedError: It is not of byte pairs, or nothing here cuts as it does.
    """
    found = _group(metadata)
    if "tokens" not in found:
        raise CheckpointError(
            f"{path} carries no tokenizer; put a tokenizer.json beside it, or use load_model()."
        )
    kind, name = found.get("model"), found.get("pre")
    cut = CUTS.get(name) if isinstance(name, str) else None
    if kind != "gpt2" or cut is None:
        raise UnsupportedError(
            f"{path}: nothing here makes a tokenizer of the kind {kind!r} with the cut {name!r}; "
            "put the model's tokenizer.json beside the file, which is then used instead."
        )
    tokens, types = _tokens(found, path)
    vocabulary = {t: i for t, i in tokens.items() if types[i] != UNUSED}
    merges = _merges(found, vocabulary, path)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": token, **plain, "special": types[i] != USER_DEFINED}
        for token, i in vocabulary.items()
        if types[i] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False
    }  # fmt: skip
    splits = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in cut.patterns
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if cut.form is None else {"type": cut.form},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": _frame(found, cut, vocabulary, path),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token")),
            **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), ""),
            **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            "ignore_merges": cut.whole,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return content, tokenizer_config(metadata, path)


def tokenizer_config(metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    """tokenizer_config.json: the templates, and the tokens that begin, end and fill.

    llama.cpp ignores ids that are not in the vocabulary.

    Raises:
        CheckpointError: A template is no text.
    """
    found, key = _group(metadata), "tokenizer.chat_template"
    # The class that takes tokenizer.json as it is; others put their own cuts in its place.
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False
    }  # fmt: skip
    for name, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = _named(found, f"{theirs}_token_id")
        if token is not None:
            config[f"{name}_token"] = token
    named = {"default": metadata[key]} if key in metadata else {}
    named |= {k.removeprefix(f"{key}."): v for k, v in metadata.items() if k.startswith(f"{key}.")}
    for name, template in named.items():
        if not isinstance(template, str):
            raise CheckpointError(
                f"{path}: the template {name!r} of '{key}' is a {type(template).__name__}; "
                "download the file again."
            )
    if named.keys() == {"default"}:
        config["chat_template"] = named["default"]
    elif named:
        config["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    return config


def end_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids that end a reply: the ends of the text, of a turn and of a message, and the
    tokens that llama.cpp knows by their text.

    llama.cpp ignores ids that are not in the vocabulary.
    """
    found = _group(metadata)
    tokens = found["tokens"] if _are(found.get("tokens"), str) else None
    ids = [found.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ids += [i for i, token in enumerate(tokens or ()) if token in _ENDS]
    size = MOST_VALUES if tokens is None else len(tokens)
    return list(dict.fromkeys(i for i in ids if type(i) is int and 0 <= i < size))


def _group(metadata: dict[str, Any]) -> dict[str, Any]:
    start = "tokenizer.ggml."
    return {k.removeprefix(start): v for k, v in metadata.items() if k.startswith(start)}


def _named(found: dict[str, Any], key: str) -> str | None:
    """Return the token whose id a key gives, None if there is none."""
    tokens, i = found.get("tokens"), found.get(key)
    if not _are(tokens, str) or type(i) is not int or not 0 <= i < len(tokens):
        return None
    return tokens[i] or None


def _tokens(found: dict[str, Any], path: Path) -> tuple[dict[str, int], list[int]]:
    """Return token -> id, without tokens that have no text, and the type of each id."""
    tokens = found["tokens"]
    if not _are(tokens, str):
        raise CheckpointError(
            f"{path}: 'tokenizer.ggml.tokens' is no list of texts; download the file again."
        )
    ids = {token: i for i, token in enumerate(tokens) if token}
    for i, token in enumerate(tokens):
        if token and ids[token] != i:
            raise CheckpointError(
                f"{path}: the tokens {i} and {ids[token]} of 'tokenizer.ggml.tokens' are both "
                f"{token!r}; download the file again."
            )
    types = found.get("token_type", [1] * len(tokens))
    if not _are(types, int) or len(types) != len(tokens):
        raise CheckpointError(
            f"{path}: 'tokenizer.ggml.token_type' is no list of a number for each of {len(tokens)} "
            "tokens; download the file again."
        )
    return ids, types


def _merges(found: dict[str, Any], vocabulary: dict[str, int], path: Path) -> list[list[str]]:
    """Return the two tokens of each merge."""
    merges = found.get("merges")
    if not _are(merges, str):
        raise CheckpointError(
            f"{path}: 'tokenizer.ggml.merges' is no list of texts; put the model's tokenizer.json "
            "beside the file."
        )
    pairs = [merge.split(" ") for merge in merges]
    for i, pair in enumerate(pairs):
        if len(pair) != 2 or not all(t in vocabulary for t in (*pair, "".join(pair))):
            raise CheckpointError(
                f"{path}: {merges[i]!r}, number {i} of 'tokenizer.ggml.merges', does not pair two "
                "tokens into a third; put the model's tokenizer.json beside the file."
            )
    return pairs


def _frame(
    found: dict[str, Any], cut: Cut, vocabulary: dict[str, int], path: Path
) -> dict[str, Any] | None:
    """Return the post-processor, which puts the tokens around a text that the file asks for."""
    around: dict[str, list[str]] = {}
    for name, default in (("bos", cut.bos), ("eos", False)):
        asked = found.get(f"add_{name}_token", default)
        token = _named(found, f"{name}_token_id")
        if not isinstance(asked, bool) or (asked and token not in vocabulary):
            raise CheckpointError(
                f"{path}: 'tokenizer.ggml.add_{name}_token' is {asked!r}, and "
                f"'tokenizer.ggml.{name}_token_id' is {found.get(f'{name}_token_id')!r}; put the "
                "model's tokenizer.json beside the file."
            )
        around[name] = [token] if asked and token is not None else []
    if not any(around.values()):
        return None

    before, after = (
        [{"SpecialToken": {"id": token, "type_id": 0}} for token in around[name]]
        for name in ("bos", "eos")
    )
    first, second = ([*before, {"Sequence": {"id": x, "type_id": 0}}, *after] for x in "AB")
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *second],
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]}
            for token in (*around["bos"], *around["eos"])
        },
    }


def _are(values: Any, kind: type) -> TypeGuard[list[Any]]:
    """Return True for a list of one kind of values."""
    return isinstance(values, list) and all(type(value) is kind for value in values)
