"""Which tokenizers run in this process: of components whose output and time a text bounds.

All others run in a child process (:mod:`sandbox`).

Source: the `tokenizers` library 0.23.3 for what a component does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers

from mlx_moeflux.tokenizer_patterns import PATTERNS

MOST_COMPONENTS = 16
MOST_AFFIX = 8  # characters
MOST_FRAME = 64  # tokens around a text


def _always(component: dict[str, Any]) -> bool:
    return True


def _replaces(component: dict[str, Any]) -> bool:
    """It puts no more characters than it takes: any number of them in a row is bounded."""
    return 0 < len(component["pattern"].get("String", "")) >= len(component["content"])


def _splits(component: dict[str, Any]) -> bool:
    pattern = component["pattern"]
    return bool(pattern.get("String")) or pattern.get("Regex") in PATTERNS


def _frames(component: dict[str, Any]) -> bool:
    """The text once, and few tokens."""
    pieces, tokens = component["single"], component["special_tokens"]
    used = [tokens[piece["SpecialToken"]["id"]] for piece in pieces if "SpecialToken" in piece]
    few = sum(len(token["ids"]) for token in used) <= MOST_FRAME
    return few and len(pieces) - len(used) <= 1


BOUNDED: dict[str, Callable[[dict[str, Any]], bool]] = {
    # Of one character at most four; NFKC and NFKD make 18 of U+FDFA.
    **dict.fromkeys(("NFC", "NFD", "Lowercase", "Strip"), _always),
    "Replace": _replaces,
    "Prepend": lambda component: len(component["prepend"]) <= MOST_AFFIX,
    **dict.fromkeys(("ByteLevel", "Metaspace", "Digits"), _always),
    "Split": _splits,
    "TemplateProcessing": _frames,
    **dict.fromkeys(("BertProcessing", "RobertaProcessing"), _always),
}
"""Kind of a normalizer, pre-tokenizer or post-processor -> check of its parameters."""

# All others write more characters than they read: twice in a row, they multiply.
_REPEATABLE = ("Replace", "Split")


def runs_here(backend: Tokenizer) -> bool:
    """Return True if no text takes a tokenizer more than a bounded time and size per character."""
    text = [*parts(backend.normalizer), *parts(backend.pre_tokenizer)]
    return (
        _is_bounded(text)
        and _is_bounded([*parts(backend.post_processor)])
        and _has_bounded_model(backend.model)
        and not any(
            _looks_far(token, backend.normalizer)
            for token in backend.get_added_tokens_decoder().values()
        )
    )


def _looks_far(token: AddedToken, normalizer: normalizers.Normalizer | None) -> bool:
    """Return True if a text can have many of an added token, and the library reads much of the text
    for each."""
    # It looks for the space, or the word, before each of them from the text's start.
    if token.lstrip or token.single_word:
        return True
    # It reads the space behind each of them. A token of spaces comes often in it.
    text = token.content
    if token.normalized and normalizer is not None:
        text = normalizer.normalize_str(text)
    return token.rstrip and any(map(str.isspace, text))


def _is_bounded(components: list[dict[str, Any]]) -> bool:
    if len(components) > MOST_COMPONENTS:
        return False
    once = Counter(c["type"] for c in components if c["type"] not in _REPEATABLE)
    return max(once.values(), default=1) == 1 and all(
        c["type"] in BOUNDED and BOUNDED[c["type"]](c) for c in components
    )


def _has_bounded_model(model: models.Model) -> bool:
    """Byte pairs, in a time of n log n, or whole words. Unigram and WordPiece try every token, or
    every length, at every character."""
    if not isinstance(model, models.BPE):
        return isinstance(model, models.WordLevel)
    affixes = (model.continuing_subword_prefix, model.end_of_word_suffix)
    return not model.dropout and all(len(affix or "") <= MOST_AFFIX for affix in affixes)


def parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the components of a sequence of the library's, as its JSON; nothing of None.

    It is the library's own reading of the file: a second reader might see another.
    """
    if component is not None:
        yield from flat(json.loads(component.__getstate__()))


def flat(component: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the components of nested sequences."""
    if component["type"] != "Sequence":
        yield component
        return
    (inner,) = (value for value in component.values() if isinstance(value, list))
    for one in inner:
        yield from flat(one)
