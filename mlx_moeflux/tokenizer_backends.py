"""The two libraries behind a tokenizer: tokenizers (tokenizer.json), sentencepiece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mlx_moeflux.detokenizer import SPACE, Decoder
from mlx_moeflux.errors import InputError

# Kind of a tokenizer -> library that reads it.
LIBRARIES = {"json": "tokenizers", "model": "sentencepiece"}

TRIALS = (
    "", " ", "\n", "\0", "a", "def f(x):\n\treturn x + 12345\n", "naïve façade — 日本語 🙂👩‍👩‍👧",
    "".join(map(chr, range(32, 127))), "aA 1." * 400, "\r\n \t" * 100,
)  # fmt: skip

# Characters of a token. It is written as often as its id comes.
MOST_TOKEN = 1024


class Backend(Protocol):
    """The library's part of a :class:`~mlx_moeflux.tokenizer.Tokenizer`."""

    @property
    def byte_level(self) -> bool:
        """True if tokens are spelled in GPT-2's alphabet of bytes."""
        ...

    def encode(self, text: str, special: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...

    def id_of(self, token: str) -> int | None: ...

    def token_of(self, i: int) -> str | None: ...

    def vocabulary(self) -> dict[str, int]: ...

    def special_ids(self) -> frozenset[int]: ...


class BytePairs:
    """Backend of tokenizer.json, by the `tokenizers` library; raises what the library raises."""

    def __init__(self, content: bytes):
        from tokenizers import Tokenizer as Library

        from mlx_moeflux.tokenizer_kinds import parts

        self.backend = Library.from_buffer(content)
        # Settings of training, which would cut and fill every prompt.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.steps = [*parts(self.backend.decoder)]
        self._decoder = Decoder(self.steps, self.token_of)
        added = self.backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)

    @property
    def byte_level(self) -> bool:
        return self._decoder.byte_level

    def encode(self, text: str, special: bool) -> list[int]:
        try:
            # Of a batch the library lets other threads run: a text of 200,000 tokens would stop
            # them for a second.
            return self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except BaseException as error:  # noqa: BLE001
            raise _translated(error) from None

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return decoded(self._decoder, ids, self.special_ids() if skip_special else ())

    def decoded_by_library(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        try:
            return self.backend.token_to_id(token)
        except UnicodeEncodeError:  # half of a surrogate pair is in no vocabulary
            return None

    def token_of(self, i: int) -> str | None:
        return self.backend.id_to_token(i)

    text_of = token_of

    def vocabulary(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def special_ids(self) -> frozenset[int]:
        return self._special


class SentencePieces:
    """Backend of tokenizer.model, by the `sentencepiece` library; raises what it raises."""

    byte_level = False

    def __init__(self, content: bytes):
        from sentencepiece import SentencePieceProcessor

        self.backend = SentencePieceProcessor(model_proto=content)
        self.steps = [{"type": "SentencePiece", **self._spaces()}]
        self._decoder = Decoder(self.steps, self.text_of)

    def _spaces(self) -> dict[str, bool]:
        """Return which spaces at a text's start are dropped: the file's own words need a reader of
        protocol buffers."""
        spaced = ((i, t) for t, i in self.vocabulary().items() if t.startswith(SPACE))
        first, token = next(spaced, (None, ""))
        if first is None:
            return {"prefixed": False, "trimmed": False}
        prefixed = self.backend.decode([first]) != token.replace(SPACE, " ")
        space = self.id_of(SPACE)
        twice = None if space is None else self.backend.decode([space, space])
        return {"prefixed": prefixed, "trimmed": prefixed and twice == ""}

    def encode(self, text: str, special: bool) -> list[int]:
        try:
            return self.backend.encode(text, add_bos=special and self.backend.bos_id() >= 0)
        except BaseException as error:  # noqa: BLE001
            raise _translated(error) from None

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return decoded(self._decoder, ids, self.special_ids() if skip_special else ())

    def decoded_by_library(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids)

    def id_of(self, token: str) -> int | None:
        i = self.backend.piece_to_id(token)
        return None if i == self.backend.unk_id() and token != self.token_of(i) else i

    def token_of(self, i: int) -> str | None:
        # A model's vocabulary may be padded beyond the tokenizer's; those ids have no text.
        return self.backend.id_to_piece(i) if i < self.backend.vocab_size() else None

    def text_of(self, i: int) -> str | None:
        """Return what an id is decoded from: of a control token no text, which ends a run of
        bytes."""
        if i < self.backend.vocab_size() and self.backend.is_control(i):
            return ""
        return self.backend.decode([i]) if i == self.backend.unk_id() else self.token_of(i)

    def vocabulary(self) -> dict[str, int]:
        return {self.backend.id_to_piece(i): i for i in range(self.backend.vocab_size())}

    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i in range(self.backend.vocab_size()) if self.backend.is_control(i))


def decoded(decoder: Decoder, ids: Sequence[int], skipped: frozenset[int] | tuple[()]) -> str:
    """Return the text of ids without those to skip.

    Raises:
        InputError: An id is none that a vocabulary could have.
    """
    if skipped:
        ids = [i for i in ids if i not in skipped]
    try:
        return decoder(ids)
    except OverflowError as error:
        raise InputError(f"the tokenizer fails on this list of ids: {error}.") from None


def _translated(error: BaseException) -> BaseException:
    """Return what a library raises at a text as an InputError, and an interrupt as it is. A panic
    of Rust is a BaseException."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    return InputError(f"the tokenizer fails on this text: {error}.")


def backend_of(kind: str, content: bytes) -> BytePairs | SentencePieces:
    """Return the backend of the content of a file. kind: A key of LIBRARIES.

    Raises:
        UnsupportedError: Its decoder is not known.
    """
    return BytePairs(content) if kind == "json" else SentencePieces(content)


def facts_of(backend: BytePairs | SentencePieces) -> dict[str, Any]:
    """Return a backend's tokens and decoder as plain values; another process decodes with them."""
    tokens = backend.vocabulary()
    texts = {i: text for t, i in tokens.items() if (text := backend.text_of(i)) != t}
    return {
        "tokens": tokens,
        "texts": [*texts.items()],
        "special": [*backend.special_ids()],
        "steps": backend.steps,
    }


def try_out(backend: BytePairs | SentencePieces) -> None:
    """Call every method of a backend with short texts; raises what the library raises.

    Raises:
        ValueError: A token is too long, or the library decodes otherwise than is done here.
    """
    tokens = backend.vocabulary()
    if (longest := max(map(len, tokens), default=0)) > MOST_TOKEN:
        raise ValueError(f"a token has {longest} characters; {MOST_TOKEN} are the most")
    sequences = [backend.encode(text, special) for special in (True, False) for text in TRIALS]
    for ids in (*sequences, [*range(min(len(tokens), 1000))]):
        if backend.decode(ids, False) != backend.decoded_by_library(ids):
            raise ValueError("its library decodes it otherwise than is known here")
        backend.decode(ids, True)
    for i in backend.special_ids() | {0, len(tokens)}:
        token = backend.token_of(i)
        if token is not None:
            backend.id_of(token)
