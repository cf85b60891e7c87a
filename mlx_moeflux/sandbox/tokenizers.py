"""Tokenizers, tried in the second child process; one that this process cannot bound stays there."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_moeflux import user_cache
from mlx_moeflux._version import __version__
from mlx_moeflux.detokenizer import Decoder
from mlx_moeflux.errors import CheckpointError, InputError, UnsupportedError
from mlx_moeflux.sandbox.process import Broken, Refused, tokenizer_child
from mlx_moeflux.tokenizer_backends import LIBRARIES, BytePairs, decoded

MEGABYTE = 1_000_000
# Processor time of a call, of each megabyte of a tokenizer's file, and of each of a text.
SECONDS = 0.5
FILE_SECONDS = 0.5
TEXT_SECONDS = 4.0
# Memory of a call, the interpreter and the library included; of each byte of a file, for the hash
# tables of its vocabulary; and of each byte of a text.
MEMORY_BYTES = 128 << 20
FILE_BYTES = 16
TEXT_BYTES = 200
# Of the ids of a text, and of each of its bytes: four are an id's.
REPLY_BYTES = 4 << 20
REPLY_TEXT_BYTES = 16


class Apart:
    """Backend of a tokenizer in the child process: one call for each text. Decoding is done here.

    key: Name of the content in the child. facts: Of
    :func:`~mlx_moeflux.tokenizer_backends.facts_of`.
    """

    def __init__(self, kind: str, key: str, content: bytes, facts: dict[str, Any]):
        self._kind, self._key, self._content = kind, key, content
        self._ids: dict[str, int] = facts["tokens"]
        self._tokens = {i: token for token, i in self._ids.items()}
        self._special = frozenset(facts["special"])
        texts = self._tokens | dict(facts["texts"])
        self._decoder = Decoder(facts["steps"], texts.get)

    @property
    def byte_level(self) -> bool:
        return self._decoder.byte_level

    def encode(self, text: str, special: bool) -> list[int]:
        written = text.encode()
        encode = partial(
            tokenizer_child.call,
            "encode",
            {"key": self._key, "special": special},
            written,
            seconds=SECONDS + TEXT_SECONDS * len(written) / MEGABYTE,
            memory_bytes=_memory(self._content) + TEXT_BYTES * len(written),
            reply_bytes=REPLY_BYTES + REPLY_TEXT_BYTES * len(written),
        )
        try:
            while (ids := encode()) is None:
                # Its process ended, or took another.
                _build(self._kind, self._key, self._content)
        except Refused as error:
            raise InputError(str(error)) from None
        except Broken as error:
            raise InputError(
                f"the tokenizer was stopped at this text: {error}; give another text, or another "
                "tokenizer.json."
            ) from None
        return array("I", ids).tolist()

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return decoded(self._decoder, ids, self._special if skip_special else ())

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def token_of(self, i: int) -> str | None:
        return self._tokens.get(i)

    def vocabulary(self) -> dict[str, int]:
        return dict(self._ids)

    def special_ids(self) -> frozenset[int]:
        return self._special


def tokenizer_of(kind: str, content: bytes, file: Path) -> BytePairs | Apart:
    """Return the backend of a tokenizer's file: here if every text bounds it, else in the child.

    It is built and tried in the child first, unless one with this content ran here before. A
    failure is not kept: on a busy machine it may be one of time. kind: A key of
    :data:`~mlx_moeflux.tokenizer_backends.LIBRARIES`.

    Raises:
        CheckpointError: It cannot be built, or fails at a short text.
        UnsupportedError: Its decoder is not known.
    """
    version = f"{importlib.import_module(LIBRARIES[kind]).__version__} {__version__}"
    digest = hashlib.blake2b(f"{kind} {version} ".encode(), digest_size=20)
    digest.update(content)
    key = digest.hexdigest()
    folder = user_cache.private("tokenizers")
    if folder is not None and (folder / key).exists():
        return BytePairs(content)
    try:
        facts = _build(kind, key, content)
    except (Refused, Broken) as error:
        reason = str(error).rstrip(".")
        raise CheckpointError(f"{file} is not a tokenizer ({reason}); fetch it again.") from None
    if "unsupported" in facts:
        raise UnsupportedError(
            f"{file}: {facts['unsupported']}; give a tokenizer.json with another decoder."
        )
    if not facts["here"]:
        return Apart(kind, key, content, facts)
    tokenizer_child.close()  # a trial of a large vocabulary leaves its memory behind
    if folder is not None:
        with contextlib.suppress(OSError):
            user_cache.write(folder / key, b"")
    return BytePairs(content)


def _build(kind: str, key: str, content: bytes) -> dict[str, Any]:
    """Build a tokenizer in the child, and return what it says."""
    return tokenizer_child.call(
        "tokenizer",
        {"kind": kind, "key": key},
        content,
        seconds=SECONDS + FILE_SECONDS * len(content) / MEGABYTE,
        memory_bytes=_memory(content),
    )


def _memory(content: bytes) -> int:
    return MEMORY_BYTES + FILE_BYTES * len(content)
