"""Text to ids and back: tokenizer.json or tokenizer.model, and the chat template.

No code from a checkpoint runs: templates are rendered in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from mlx_moeflux.checkpoint.files import read_json_object
from mlx_moeflux.errors import CheckpointError, ConfigError, InputError

REPLACEMENT = "\ufffd"


class BytePairs:
    """tokenizer.json through the `tokenizers` library."""

    def __init__(self, file: Path):
        from tokenizers import Tokenizer as Backend

        try:
            self.backend = Backend.from_file(str(file))
        # The library raises nothing more special.
        except Exception as error:  # noqa: BLE001
            raise CheckpointError(f"{file} is not a tokenizer ({error}); fetch it again.") from None

    def encode(self, text: str, special: bool) -> list[int]:
        return self.backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def id_of(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def token_of(self, i: int) -> str | None:
        return self.backend.id_to_token(i)

    def vocabulary(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def special_ids(self) -> set[int]:
        added = self.backend.get_added_tokens_decoder()
        return {i for i, token in added.items() if token.special}


class SentencePieces:
    """tokenizer.model through the `sentencepiece` library."""

    def __init__(self, file: Path):
        from sentencepiece import SentencePieceProcessor

        try:
            self.backend = SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{file} is not a tokenizer ({error}); fetch it again.") from None

    def encode(self, text: str, special: bool) -> list[int]:
        return self.backend.encode(text, add_bos=special and self.backend.bos_id() >= 0)

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        control = self.special_ids() if skip_special else ()
        return self.backend.decode([int(i) for i in ids if i not in control])

    def id_of(self, token: str) -> int | None:
        i = self.backend.piece_to_id(token)
        return None if i == self.backend.unk_id() and token != self.token_of(i) else i

    def token_of(self, i: int) -> str | None:
        return self.backend.id_to_piece(i) if 0 <= i < self.backend.vocab_size() else None

    def vocabulary(self) -> dict[str, int]:
        return {self.backend.id_to_piece(i): i for i in range(self.backend.vocab_size())}

    def special_ids(self) -> set[int]:
        return {i for i in range(self.backend.vocab_size()) if self.backend.is_control(i)}


class Tokenizer:
    """What generation, the command line and mlx-lm's ``TokenizerWrapper`` ask of a tokenizer.

    eos_token_ids: Every id that ends a reply. Attributes and methods have transformers' names.
    """

    def __init__(
        self,
        backend: BytePairs | SentencePieces,
        *,
        config: dict[str, Any],
        eos_token_ids: set[int],
        chat_template: str | None,
        name_or_path: str = "",
    ):
        self._backend, self._config = backend, config
        self.chat_template, self.name_or_path = chat_template, name_or_path
        self.clean_up_tokenization_spaces = False
        self.bos_token = _text(config.get("bos_token"))
        self.eos_token = _text(config.get("eos_token"))
        self.pad_token = _text(config.get("pad_token")) or self.eos_token
        own = None if self.eos_token is None else backend.id_of(self.eos_token)
        self.eos_token_ids = eos_token_ids | ({own} - {None})
        if not self.eos_token_ids:
            raise ConfigError(
                f"{name_or_path or 'the tokenizer'} names no end token; set eos_token in "
                "tokenizer_config.json or eos_token_id in config.json."
            )
        self.eos_token_id = own if own is not None else min(self.eos_token_ids)
        self.bos_token_id = None if self.bos_token is None else backend.id_of(self.bos_token)
        self.all_special_ids = sorted(backend.special_ids())
        self.all_special_tokens = [backend.token_of(i) for i in self.all_special_ids]

    @property
    def vocab_size(self) -> int:
        return len(self.get_vocab())

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self._backend.vocabulary()

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """The ids of `text`, framed as the tokenizer's post-processor says."""
        return self._backend.encode(text, add_special_tokens)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of ids; incomplete UTF-8 shows as U+FFFD."""
        ids = [ids] if isinstance(ids, int) else [int(i) for i in ids]
        return self._backend.decode(ids, skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        if isinstance(ids, int):
            return self._backend.token_of(ids)
        return [self._backend.token_of(int(i)) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._backend.id_of(tokens)
        return [self._backend.id_of(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        documents: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Messages to a prompt, as ids or (``tokenize=False``) text.

        continue_final_message: The reply goes on from the last message instead of beginning.

        Raises:
            InputError: There is no template, or it refuses the messages.
        """
        template = chat_template or self.chat_template
        if template is None:
            raise InputError(
                "this tokenizer has no chat template; pass the prompt as text or ids instead of "
                "messages."
            )
        text = _render(
            template,
            messages=list(conversation),
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
            pad_token=self.pad_token or "",
            **variables,
        )
        if continue_final_message:
            last = str(conversation[-1]["content"]).strip()
            if last not in text:
                raise InputError("the chat template drops the message that is to be continued.")
            text = text[: text.rindex(last) + len(last)]
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def detokenizer(self) -> Detokenizer:
        """A fresh streaming decoder."""
        return Detokenizer(self)


class Detokenizer:
    """Ids one at a time to text: complete characters only, in linear time.

    :meth:`add` returns what may be shown now; :meth:`finish` the rest. Together they are
    ``tokenizer.decode(all ids)``.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        # Shown tokens stay as context: some decoders treat the first token of a text apart.
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        self._pending.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and not final:
            return ""
        self._context, self._pending = self._pending, []
        return text[len(before) :]


def load_tokenizer(directory: str | Path, **overrides: Any) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    overrides: Keys that win over those of tokenizer_config.json.

    Raises:
        CheckpointError: There is no tokenizer, or it is damaged.
        ConfigError: Nothing names the end token.
    """
    directory = Path(directory)
    if (directory / "tokenizer.json").exists():
        backend = BytePairs(directory / "tokenizer.json")
    elif (directory / "tokenizer.model").exists():
        backend = SentencePieces(directory / "tokenizer.model")
    else:
        raise CheckpointError(
            f"{directory} has neither tokenizer.json nor tokenizer.model; fetch one, or use "
            "load_model() and token ids."
        )
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).exists():
            config |= read_json_object(directory / name, error=ConfigError)
    config |= overrides
    eos: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (directory / name).exists():
            raw = read_json_object(directory / name, error=ConfigError)
            text = raw.get("text_config")
            for source in (raw, text if isinstance(text, dict) else {}):
                found = source.get("eos_token_id")
                eos |= set(found) if isinstance(found, list) else {found} - {None}
    return Tokenizer(
        backend,
        config=config,
        eos_token_ids=eos,
        chat_template=_chat_template(directory, config),
        name_or_path=str(directory),
    )


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    if (directory / "chat_template.jinja").exists():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None and (directory / "chat_template.json").exists():
        template = read_json_object(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default", next(iter(named.values()), None))
    return template


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _render(template: str, **variables: Any) -> str:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**variables)
    except (TemplateError, TypeError) as error:
        raise InputError(f"the chat template refuses these messages: {error}.") from error
