"""Tokenizers of tokenizer.json, tokenizer.model and GGUF files, and chat templates.

No code from a checkpoint runs. Templates are rendered in a child process (:mod:`sandbox`), and
tokenizers are tried in another, which also runs those that no text bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from mlx_moeflux.checkpoint.files import read_json_object, read_whole
from mlx_moeflux.checkpoint.formats.gguf import gguf_metadata
from mlx_moeflux.checkpoint.formats.gguf_files import find_gguf
from mlx_moeflux.checkpoint.formats.gguf_tokenizer import (
    end_ids,
    tokenizer_config,
    tokenizer_json,
)
from mlx_moeflux.checks import is_natural
from mlx_moeflux.detokenizer import ByteDetokenizer, PieceDetokenizer
from mlx_moeflux.errors import CheckpointError, ConfigError, InputError
from mlx_moeflux.sandbox.requests import render
from mlx_moeflux.sandbox.tokenizers import tokenizer_of
from mlx_moeflux.tokenizer_backends import Backend
from mlx_moeflux.tool_declarations import as_declared

# Tokens and parts of templates from which mlx-lm 0.32.2 (tokenizer_utils.py) infers thinking and
# tool calls. A group counts if all its members are there.
_XTML_TOKENS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_THINKING_TOKENS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
    _XTML_TOKENS,
)
_TOOL_TOKENS = (_XTML_TOKENS, ("<|tool_call_start|>", "<|tool_call_end|>"))
_TOOL_MARKERS = (
    ("<minimax:tool_call>",), ("<|tool_call>", "<tool_call|>"), ("<start_function_call>",),
    ("<longcat_tool_call>",), ("<arg_key>",), ("<|tool_list_start|>",), ("<|tool_call_start|>",),
    ("<tool_call>\\n<function=",), ("<tool_call>\n<function=",), ("<|tool_calls_section_begin|>",),
    ('<function name="', '<param name="'), ("[TOOL_CALLS]",), ("<atem:function_calls>",),
    ("<tool_call>", "tool_call.name"),
)  # fmt: skip

# Ends a message that is to be continued while the template renders it: the message's own text could
# also be a part of what the template writes behind it. A template that trims takes the space.
_CUT = "\uf8ffcontinued\uf8ff "


class Encoding(dict[str, Any]):
    """``input_ids`` and ``attention_mask`` of :class:`Tokenizer`, as items and as attributes.

    Both are lists for one text, and lists of lists, not padded, for a list of texts.
    """

    @property
    def input_ids(self) -> list[Any]:
        return self["input_ids"]

    @property
    def attention_mask(self) -> list[Any]:
        return self["attention_mask"]


class Tokenizer:
    """Tokenizer with transformers' names, which mlx-lm's ``TokenizerWrapper`` also accepts.

    eos_token_ids: All ids that end a reply. Any thread may call its methods.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        config: dict[str, Any],
        eos_token_ids: set[int],
        chat_template: str | None,
        tool_template: str | None = None,
        name_or_path: str = "",
    ):
        self._backend, self._config = backend, config
        self.chat_template, self.name_or_path = chat_template, name_or_path
        self.tool_template = tool_template
        self.clean_up_tokenization_spaces = False
        self.bos_token = _token(config, "bos_token", name_or_path)
        self.eos_token = _token(config, "eos_token", name_or_path)
        self.pad_token = _token(config, "pad_token", name_or_path) or self.eos_token
        own = None if self.eos_token is None else backend.id_of(self.eos_token)
        self.eos_token_ids = eos_token_ids | (set() if own is None else {own})
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
    def byte_level(self) -> bool:
        """Return True if tokens are spelled in GPT-2's alphabet of bytes."""
        return self._backend.byte_level

    @property
    def vocab_size(self) -> int:
        return len(self.get_vocab())

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id, added tokens included."""
        return self._backend.vocabulary()

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Return the ids of `text`, with the special tokens of the post-processor around them.

        Raises:
            InputError: `text` is no string, or has a lone surrogate, which UTF-8 cannot encode.
        """
        if not isinstance(text, str):
            raise InputError(f"the text to encode is a {type(text).__name__}; give a string.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid UTF-8 at character {error.start}; remove or re-encode it."
            ) from None
        return self._backend.encode(text, add_special_tokens)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids; incomplete UTF-8 gives U+FFFD, an id without a token nothing."""
        ids = [int(ids)] if isinstance(ids, int | Integral) else [*map(int, ids)]
        _id(min(ids, default=0))
        return self._backend.decode(ids, skip_special_tokens)

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any
    ) -> Encoding:
        """Return the ids of a text, or of each text of a list, as transformers' tokenizers do.

        Raises:
            InputError: A text cannot be encoded (see :meth:`encode`), or an option such as
                ``padding=True`` asks for tensors or a common length.
        """
        for name in (name for name, value in options.items() if value):
            raise InputError(f"{name} is not offered; pad, cut and convert the lists of ids.")
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        if not isinstance(text, Sequence):
            raise InputError(f"the text to encode is a {type(text).__name__}; give str or strs.")
        rows = [self.encode(one, add_special_tokens) for one in text]
        return Encoding(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    def batch_decode(
        self, sequences: Iterable[int | Sequence[int]], skip_special_tokens: bool = False, **_: Any
    ) -> list[str]:
        """Return the text of each sequence of ids, see :meth:`decode`."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    @property
    def has_thinking(self) -> bool:
        """Return True if the vocabulary has tokens that open and close a thought."""
        return self._knows(_THINKING_TOKENS)

    @property
    def has_tool_calling(self) -> bool:
        """Return True if the chat template or the vocabulary has a known syntax of tool calls."""
        templates = [t for t in (self.chat_template, self.tool_template) if isinstance(t, str)]
        return (
            self._config.get("tool_parser_type") is not None
            or self._knows(_TOOL_TOKENS)
            or any(all(m in t for m in markers) for t in templates for markers in _TOOL_MARKERS)
        )

    def _knows(self, groups: Sequence[Sequence[str]]) -> bool:
        """Return True if all tokens of one group are in the vocabulary."""
        return any(all(self._backend.id_of(t) is not None for t in group) for group in groups)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        if isinstance(ids, int | Integral):
            return self._backend.token_of(_id(ids))
        return [self._backend.token_of(_id(i)) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._backend.id_of(tokens)
        return [self._backend.id_of(token) for token in tokens]

    def apply_chat_template(
        self,
        /,
        conversation: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        documents: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        return_dict: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Render messages to a prompt, as ids or (``tokenize=False``) text.

        chat_template: Replaces the checkpoint's. continue_final_message: The prompt ends inside the
        last message, which the reply continues; white space at its end stays unless the template
        removes it. return_dict: Must be False. variables: Passed to
        the template.

        Raises:
            InputError: There is no template, or it refuses the messages, or takes too much time or
                memory.
        """
        if return_dict:
            raise InputError("return_dict is not offered; the result is ids or text.")
        if not isinstance(chat_template, str | None):
            raise InputError(f"chat_template is a {type(chat_template).__name__}; give a text.")
        template = chat_template or (self.tool_template if tools else None) or self.chat_template
        if template is None:
            raise InputError(
                "this tokenizer has no chat template; pass the prompt as text or ids instead of "
                "messages."
            )
        tools, declared = as_declared(template, tools)
        variables = {**declared, **variables}
        given = {
            "messages": list(conversation),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "bos_token": self.bos_token or "",
            "eos_token": self.eos_token or "",
            "pad_token": self.pad_token or "",
        }
        for name in given.keys() & variables.keys():
            raise InputError(f"'{name}' is set by the tokenizer; rename the template variable.")
        if continue_final_message:
            last = given["messages"][-1]
            given["messages"][-1] = {**last, "content": f"{last['content'] or ''}{_CUT}"}
        text = render(template, **given, **variables)
        if continue_final_message:
            text, found, behind = text.rpartition(_CUT.rstrip())
            if not found:
                raise InputError("the chat template drops the message that is to be continued.")
            text = text.replace(_CUT, "") if behind.startswith(" ") else text.rstrip()
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def detokenizer(self) -> ByteDetokenizer | PieceDetokenizer:
        """Return a new streaming decoder."""
        if self._backend.byte_level:
            return ByteDetokenizer(self._backend.token_of)
        return PieceDetokenizer(self.decode, self._backend.token_of)


# Files of byte pairs by rank, which Kimi-K2 and the first Qwen have.
_RANKS = ("tiktoken.model", "*.tiktoken")


def load_tokenizer(directory: str | Path, **overrides: Any) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory.

    overrides: Keys that replace those of tokenizer_config.json.

    Raises:
        CheckpointError: The directory has no tokenizer, or a damaged one.
        UnsupportedError: Its decoder is not known.
        ConfigError: No file names the end token.
    """
    path = Path(directory)
    directory = path.parent if path.is_file() else path
    beside = any((directory / f"tokenizer.{kind}").exists() for kind in ("json", "model"))
    gguf = None if beside and (directory / "config.json").exists() else find_gguf(path)
    metadata = {} if gguf is None else gguf_metadata(gguf)
    config = {} if gguf is None else tokenizer_config(metadata, gguf)
    if gguf is not None and not beside:
        content, _ = tokenizer_json(metadata, gguf)
        backend = tokenizer_of("json", json.dumps(content).encode(), gguf)
    elif (file := directory / "tokenizer.json").exists():
        backend = tokenizer_of("json", read_whole(file), file)
    elif (file := directory / "tokenizer.model").exists():
        backend = tokenizer_of("model", read_whole(file), file)
    elif found := next((f for n in _RANKS for f in sorted(directory.glob(n))), None):
        raise CheckpointError(
            f"{found} is in tiktoken's format, which is not read here; write a tokenizer.json "
            "beside it with transformers.integrations.tiktoken.convert_tiktoken_to_fast, or use "
            "load_model() and token ids."
        )
    else:
        raise CheckpointError(
            f"{directory} has neither tokenizer.json nor tokenizer.model; fetch one, or use "
            "load_model() and token ids."
        )
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).exists():
            config |= read_json_object(directory / name, error=ConfigError)
    config |= overrides
    eos = set(end_ids(metadata))
    for name in ("config.json", "generation_config.json"):
        if (directory / name).exists():
            raw = read_json_object(directory / name, error=ConfigError)
            text = raw.get("text_config")
            for source in (raw, text if isinstance(text, dict) else {}):
                eos |= _end_ids(source.get("eos_token_id"), directory / name)
    template, tool_template = _chat_templates(directory, config)
    return Tokenizer(
        backend,
        config=config,
        eos_token_ids=eos,
        chat_template=template,
        tool_template=tool_template,
        name_or_path=str(directory),
    )


def _end_ids(found: Any, file: Path) -> set[int]:
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(map(is_natural, ids)):
        raise ConfigError(f"{file}: eos_token_id is {found!r}; expected an id or a list of ids.")
    return set(ids)


def _chat_templates(directory: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the template, and the one for requests with tools if it is another."""
    file = directory / "chat_template.jinja"
    if file.exists():
        try:
            return read_whole(file, error=ConfigError).decode(), None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 ({error}); fetch it again.") from None
    template, source = config.get("chat_template"), "tokenizer_config.json"
    tool_template = None
    if template is None and (directory / "chat_template.json").exists():
        source = "chat_template.json"
        template = read_json_object(directory / source, error=ConfigError).get("chat_template")
    if isinstance(template, list):
        try:
            named: dict[Any, Any] = {entry["name"]: entry["template"] for entry in template}
        except (TypeError, KeyError):
            named = {None: template}
        template = named.get("default", next(iter(named.values()), None))
        tool_template = named.get("tool_use")
    for one in (template, tool_template):
        if not isinstance(one, str | None):
            raise ConfigError(
                f"{directory / source}: chat_template is neither text nor a list of named texts."
            )
    return template, tool_template


def _token(config: dict[str, Any], name: str, place: str) -> str | None:
    """Return a special token of tokenizer_config.json: a text, or a dict with one."""
    found = config.get(name)
    text = found.get("content") if isinstance(found, dict) else found
    if not isinstance(text, str | None):
        raise ConfigError(f"{place or 'the tokenizer'}: {name} is {found!r}; expected a text.")
    return text


def _id(token: Any) -> int:
    token = int(token)
    if token < 0:
        raise InputError(f"token id {token} is negative; ids count from 0.")
    return token
