"""Constrained decoding: grammars of llguidance as logits processors.

A grammar is compiled once and kept; each reply has its own matcher. The mask of allowed tokens is
computed on the host while the model runs, and applied on the device.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import llguidance
import mlx.core as mx
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from mlx_moeflux.detokenizer import spelled
from mlx_moeflux.server.errors import RequestError

MOST_GRAMMARS = 64

# Between the parts of JSON: enough for an indented text, and not so much that a model which has
# begun to write spaces never ends.
WHITE_SPACE = r"[ \n]{0,16}"


def json_rule(schema: Any) -> str:
    """Return a schema for a ``%json`` rule of a Lark grammar."""
    if not isinstance(schema, dict):
        return json.dumps(schema)
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})


def quoted(*parts: str) -> str:
    """Return a Lark text of texts."""
    return json.dumps("".join(parts), ensure_ascii=False)


class _Vocabulary:
    """The tokenizer as llguidance reads it: bytes of every token, and an encoder of bytes."""

    def __init__(self, tokenizer: Any, size: int, visible: tuple[str, ...]):
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [token_bytes(tokenizer, i) for i in range(size)]
        shown = {i for text in visible if (i := tokenizer.convert_tokens_to_ids(text)) is not None}
        nameless = {i for i, token in enumerate(self.tokens) if not token}
        ends = set(tokenizer.eos_token_ids)
        self.special_token_ids = sorted(
            i for i in ends | nameless | set(tokenizer.all_special_ids) - shown if i < size
        )
        for i in self.special_token_ids:
            # llguidance wants a name for each.
            self.tokens[i] = self.tokens[i] or f"<unused {i}>".encode()
        self._encode = functools.partial(tokenizer.encode, add_special_tokens=False)

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "ignore"))


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes that a token stands for; b"" for an id without a token."""
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None:
        return b""
    if tokenizer.byte_level:
        return spelled(name)
    if len(name) == 6 and name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()


class Grammars:
    """Compiler of grammars for one vocabulary; any thread may call it.

    size: Width of the logits. visible: Special tokens that grammars may spell as text.
    """

    def __init__(self, tokenizer: Any, size: int, visible: tuple[str, ...] = ()):
        vocabulary = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, size, visible))
        ends = sorted(i for i in tokenizer.eos_token_ids if i < size)
        self._tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=ends)
        self._size = size
        self._matcher = functools.lru_cache(MOST_GRAMMARS)(self._compiled)

    def json_schema(self, schema: Mapping[str, Any] | None) -> str:
        """Return the grammar of JSON values that a schema allows, of any object for None."""
        whole = {"type": "object"} if schema is None else schema
        return llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(whole), overrides={"whitespace_pattern": WHITE_SPACE}
        )

    def lark(self, text: str) -> str:
        """Return a grammar in Lark's language."""
        return llguidance.LLMatcher.grammar_from_lark(text)

    def check(self, grammar: str, param: str) -> None:
        """Compile a grammar and compute its first mask. param: The field that holds it.

        Raises:
            RequestError: It has something that is not supported, or too much.
        """
        matcher = self._matcher(grammar).deep_copy()
        if not matcher.is_error():
            matcher.compute_bitmask()
        if error := matcher.get_error():
            raise RequestError(
                f"'{param}' cannot be enforced: {error.splitlines()[0][:200]}", param=param
            )

    def constraint(self, grammar: str, prompt_tokens: int, after: int | None = None) -> Constraint:
        """Return the processor of one reply. after: The grammar begins behind this token."""
        return Constraint(self._matcher(grammar).deep_copy(), self._size, prompt_tokens, after)

    def _compiled(self, grammar: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)


class Constraint:
    """Logits processor that allows what a grammar allows; belongs to one reply.

    error: Why the matcher gave up, else "". A reply whose matcher gave up can only end.
    """

    def __init__(self, matcher: llguidance.LLMatcher, size: int, seen: int, after: int | None):
        self._matcher, self._size = matcher, size
        self._seen, self._after = seen, after
        self._words = allocate_token_bitmask(1, size)
        # Evaluated: the engine's thread uses it.
        self._bits = mx.array(np.arange(32, dtype=np.uint32))

    @property
    def error(self) -> str:
        return self._matcher.get_error()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the logits ``[1, V]`` with -inf for tokens that the grammar does not allow.

        Evaluates: tokens.
        """
        new: Any = tokens[self._seen :].tolist()
        self._seen += len(new)
        if self._after is not None:
            if self._after not in new:
                return logits
            new, self._after = new[new.index(self._after) + 1 :], None
        if new:
            self._matcher.consume_tokens(new)
        fill_next_token_bitmask(self._matcher, self._words)
        words = mx.array(self._words.view(np.uint32))
        allowed = (words[..., None] >> self._bits) & 1
        allowed = allowed.reshape(1, -1)[:, : self._size].astype(mx.bool_)
        return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))
