"""The two libraries behind a tokenizer: tokenizers (tokenizer.json), sentencepiece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mlx_moeflux.errors import InputError

# Kind of a tokenizer -> library that reads it.
LIBRARIES = {"json": "tokenizers", "model": "sentencepiece"}

TRIALS = (
    "", " ", "\n", "\0", "a", "def f(x):\n\treturn x + 12345\n", "naïve façade — 日本語 🙂👩‍👩‍👧",
    "".join(map(chr, range(32, 127))), "aA 1." * 400, "\r\n \t" * 100,
)  # fmt: skip


# Characters from which a text is encoded as a batch of one, which lets other threads run; a text of
# 200,000 tokens would stop them for a second. Short ones need no pool of threads.
LONG = 1 << 14


class BytePairs:
    """Backend of tokenizer.json, by the `tokenizers` library; raises what the library raises."""

    def __init__(self, content: bytes):
        from tokenizers import Tokenizer as Backend
        from tokenizers.decoders import ByteLevel

        self.backend = Backend.from_buffer(content)
        # Settings of training, which would cut and fill every prompt.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.byte_level = isinstance(self.backend.decoder, ByteLevel)

    def encode(self, text: str, special: bool) -> list[int]:
        with _faults("text"):
            if len(text) < LONG:
                return self.backend.encode(text, add_special_tokens=special).ids
            return self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        with _faults("list of ids"):
            return self.backend.decode(ids, skip_special_tokens=skip_special)

    def id_of(self, token: str) -> int | None:
        try:
            return self.backend.token_to_id(token)
        except UnicodeEncodeError:  # half of a surrogate pair is in no vocabulary
            return None

    def token_of(self, i: int) -> str | None:
        return self.backend.id_to_token(i)

    def vocabulary(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def special_ids(self) -> set[int]:
        added = self.backend.get_added_tokens_decoder()
        return {i for i, token in added.items() if token.special}


class SentencePieces:
    """Backend of tokenizer.model, by the `sentencepiece` library; raises what it raises."""

    byte_level = False

    def __init__(self, content: bytes):
        from sentencepiece import SentencePieceProcessor

        self.backend = SentencePieceProcessor(model_proto=content)

    def encode(self, text: str, special: bool) -> list[int]:
        with _faults("text"):
            return self.backend.encode(text, add_bos=special and self.backend.bos_id() >= 0)

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        control = self.special_ids() if skip_special else ()
        # A model's vocabulary may be padded beyond the tokenizer's; those ids have no text.
        size = self.backend.vocab_size()
        with _faults("list of ids"):
            return self.backend.decode([i for i in ids if i < size and i not in control])

    def id_of(self, token: str) -> int | None:
        try:
            i = self.backend.piece_to_id(token)
        except UnicodeEncodeError:
            return None
        return None if i == self.backend.unk_id() and token != self.token_of(i) else i

    def token_of(self, i: int) -> str | None:
        return self.backend.id_to_piece(i) if i < self.backend.vocab_size() else None

    def vocabulary(self) -> dict[str, int]:
        return {self.backend.id_to_piece(i): i for i in range(self.backend.vocab_size())}

    def special_ids(self) -> set[int]:
        return {i for i in range(self.backend.vocab_size()) if self.backend.is_control(i)}


@contextmanager
def _faults(what: str) -> Iterator[None]:
    """Turn what a library raises into an InputError. A panic of Rust is a BaseException."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"the tokenizer fails on this {what}: {error}.") from None


def backend_of(kind: str, content: bytes) -> BytePairs | SentencePieces:
    """Return the backend of the content of a file. kind: A key of LIBRARIES."""
    return BytePairs(content) if kind == "json" else SentencePieces(content)


def try_out(backend: BytePairs | SentencePieces) -> None:
    """Call every method of a backend with short texts; raises what the library raises."""
    for special in (True, False):
        for text in TRIALS:
            backend.decode(backend.encode(text, special), special)
    tokens = backend.vocabulary()
    for i in backend.special_ids() | {0, len(tokens)}:
        token = backend.token_of(i)
        if token is not None:
            backend.id_of(token)
