"""Conversion of prompts (text, ids, messages) to ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.models.protocol import LoadedModel

# Characters of a text that are encoded without counting first.
PIECE = 1 << 18

Prompt = str | Sequence[int] | mx.array | Sequence[Mapping[str, Any]]


def prompt_ids(
    model: LoadedModel,
    tokenizer: Any,
    prompt: Prompt,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids of a prompt, checked against the vocabulary.

    Raises:
        InputError: The prompt is empty, of another type, or has an id out of range.
        CacheError: A text is much longer than the context.
    """
    given: Any = prompt
    options = {} if options is None else options
    check_template_options(options)
    most = model.context_left()
    if isinstance(prompt, str):
        framed = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        ids = encode_bounded(tokenizer, prompt, most, add_special_tokens=framed)
    elif hasattr(prompt, "shape"):
        ids = given.tolist()
        if len(given.shape) != 1 or any(not isinstance(i, int) for i in ids):
            raise InputError(f"the prompt is {given.dtype} {list(given.shape)}; expected ids [T].")
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt):
        ids = _template_ids(tokenizer, given, tools, options, most)
    else:
        ids = list(given) if isinstance(prompt, Iterable) else given
        plain = isinstance(ids, list) and all(isinstance(i, Integral) for i in ids)
        if isinstance(prompt, bytes) or not plain:
            what = type(prompt).__name__
            raise InputError(f"the prompt is a {what}; expected text, ids, or messages.")
        ids = [int(i) for i in ids]
    if not ids:
        raise InputError("the prompt is empty; give at least one token.")
    vocabulary = model.config.vocab_size
    for i in ids:
        if not 0 <= i < vocabulary:
            raise InputError(f"token id {i} is out of range; the vocabulary has {vocabulary}.")
    return ids


def turn_end(
    tokenizer: Any,
    prompt: Prompt,
    ids: Sequence[int],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> int | None:
    """Return the number of `ids` before the opening of the reply, if messages rendered them.

    The next turn begins with the same ids even if the template changes the reply. None for other
    prompts.
    """
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return None
    messages: Any = prompt
    if not isinstance(prompt[0], Mapping) or messages[-1].get("role") == "assistant":
        return None
    options = {**(options or {}), "add_generation_prompt": False}
    try:
        closed = _template_ids(tokenizer, messages, tools, options, len(ids))
    except (InputError, CacheError):
        return None
    return len(closed) if list(ids[: len(closed)]) == closed else None


def _template_ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    options: Mapping[str, Any],
    most: int,
) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    return encode_bounded(tokenizer, text, most, add_special_tokens=False)


def check_template_options(options: Any) -> None:
    """Raise InputError unless `options` is a mapping without parameters of the call itself."""
    if not isinstance(options, Mapping):
        raise InputError(f"template_options is {options!r}; give a dict of names and values.")
    for name in {"conversation", "tools", "tokenize", "return_dict"} & options.keys():
        raise InputError(f"template_options cannot set '{name}'; remove it.")


def encode_bounded(
    tokenizer: Any, text: str, most: int, *, add_special_tokens: bool, piece: int = PIECE
) -> list[int]:
    """Return the ids of a text.

    A tokenizer takes some 150 bytes for each of the text. So a long one is cut into pieces of
    `piece` characters, whose tokens are counted before it is encoded whole: a cut adds few, so that
    a text of more than twice `most` has more than `most`.

    Raises:
        CacheError: It has more than twice `most` tokens; the error has an estimate of them.
    """
    count = 0
    for start in range(0, len(text) if len(text) > piece else 0, piece):
        part = text[start : start + piece]
        count += len(tokenizer.encode(part, add_special_tokens=False))
        if count > 2 * most:
            raise CacheError(
                f"the prompt of {len(text)} characters has more tokens than the context of {most}; "
                "shorten it or raise max_context.",
                tokens=count * len(text) // min(start + piece, len(text)),
            )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
