"""The tokenizer that a GGUF file carries, as the content of tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

from mlx_moeflux.errors import CheckpointError, UnsupportedError

CONTROL, USER_DEFINED = 3, 4  # token types

# How text is cut before bytes are paired, by GGUF's name of it. Source: the tokenizer.json of
# the models that the names mean.
_CUTS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
}


def tokenizer_json(metadata: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json of a GGUF file's metadata.

    Raises:
        CheckpointError: There is none.
        UnsupportedError: It is of another kind than byte pairs cut as Qwen's.
    """
    found = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    tokens, merges = found.get("tokens"), found.get("merges")
    if not _are(tokens, str) or not _are(merges, str):
        raise CheckpointError(
            f"{path} carries no tokenizer; put a tokenizer.json beside it, or use load_model()."
        )
    kind, cut = found.get("model"), found.get("pre")
    if kind != "gpt2" or not isinstance(cut, str) or cut not in _CUTS:
        raise UnsupportedError(
            f"{path}: the tokenizer is {kind!r} with the cut {cut!r}; of GGUF only 'gpt2' with "
            f"{', '.join(map(repr, _CUTS))} is read, so put a tokenizer.json beside the file."
        )
    types = found.get("token_type") or [1] * len(tokens)
    if not _are(types, int) or len(types) != len(tokens):
        raise CheckpointError(
            f"{path}: 'tokenizer.ggml.token_type' is no list of a number for each of {len(tokens)} "
            "tokens; download the file again."
        )
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": token, **plain, "special": type_ == CONTROL}
        for i, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (CONTROL, USER_DEFINED)
    ]
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    bytes_level["use_regex"] = False
    split = {"type": "Split", "pattern": {"Regex": _CUTS[cut]}, "behavior": "Isolated"}
    split["invert"] = False
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_level]},
        "post_processor": None,
        "decoder": bytes_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token")),
            **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), ""),
            **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    config: dict[str, Any] = {"tokenizer_class": "Qwen2Tokenizer"}
    for name in ("bos", "eos", "padding"):
        i = found.get(f"{name}_token_id")
        if isinstance(i, int) and 0 <= i < len(tokens):
            config["pad_token" if name == "padding" else f"{name}_token"] = tokens[i]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return content, config


def _are(values: Any, kind: type) -> TypeGuard[list[Any]]:
    """Return True for a list of one kind of values."""
    return isinstance(values, list) and all(type(value) is kind for value in values)
