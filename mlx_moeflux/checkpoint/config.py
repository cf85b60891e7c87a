"""Read config.json strictly: an unknown key must not change a model silently.

Every architecture declares a frozen dataclass. Its fields are the keys that are used: one
without a default must be there. ``INERT`` lists the keys that are known to change nothing
at inference, in addition to those that any model may have. Any other key is an error unless its
value is null, false, 0 or empty.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlx_moeflux.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

QUANTIZATION_KEYS = ("quantization", "quantization_config")
# Keys that change nothing at inference: bookkeeping; transformers 4's defaults of every config, of
# generation and of other kinds of models; marks of training frameworks and of kernels.
BOOKKEEPING = frozenset(
    """
    architectures transformers_version torch_dtype dtype model_type auto_map task_specific_params
    quantization quantization_config original_max_position_embeddings
    id2label label2id problem_type finetuning_task tokenizer_class prefix num_labels
    output_attentions output_hidden_states output_scores output_logits return_dict
    return_dict_in_generate use_return_dict use_cache torchscript use_bfloat16 tf_legacy_loss
    is_encoder_decoder is_decoder tie_encoder_decoder chunk_size_feed_forward
    max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p epsilon_cutoff
    eta_cutoff repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size encoder_repetition_penalty bad_words_ids num_return_sequences
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    forced_decoder_ids cache_implementation
    output_router_logits router_jitter_noise seq_aux aux_loss_alpha ep_size pretraining_tp
    load_balance_coeff device_map gradient_checkpointing gradient_checkpointing_kwargs
    attn_implementation experts_implementation moe_implementation use_grouped_mm use_kernels
    use_flash_attn use_flash_attention use_flash_attention_2 use_liger_kernel flash_attn_version
    """.split()  # noqa: SIM905 (a list would take a line for each name)
)
# Names that start with _ are transformers' private state.
_MARKS = re.compile(
    r"_.*|unsloth_.*|.*_token_ids?|.*_token_index|.*dropout(_.*)?|.*_pdrop|init(ializer)?_.*"
    r"|.*(aux|z|balanc\w*)_loss(_.*)?"
)

WAY_OUT = "if that changes nothing, pass --no-strict-config, in Python strict_config=False"

# Numbers beyond them fit no argument of MLX; NaN is not below.
MOST_INT, MOST_FLOAT = 1 << 63, 1e30


def hoisted(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the quantisation of ``text_config``, where Kimi-K2.5 has it, at the
    top."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    moved = {key: text[key] for key in QUANTIZATION_KEYS if text.get(key) is not None}
    inner = {key: value for key, value in text.items() if key not in QUANTIZATION_KEYS}
    return moved | config | {"text_config": inner}


def _matches(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, option) for option in typing.get_args(kind))
    if origin is tuple:
        inner = typing.get_args(kind)[0]
        return isinstance(value, (list, tuple)) and all(_matches(v, inner) for v in value)
    if kind is float:
        return type(value) in (int, float) and abs(value) <= MOST_FLOAT
    if kind is int:
        return type(value) is int and abs(value) < MOST_INT
    return kind is Any or isinstance(value, kind)


def parse_config(
    cls: type[T],
    data: dict[str, Any],
    *,
    file: Path | str,
    inert: frozenset[str],
    strict: bool = True,
) -> T:
    """Build the frozen dataclass `cls` from the keys of `data`.

    Raises:
        ConfigError: A key is missing, has the wrong type, or (when `strict`) is unknown and
            set to something that could matter.
    """
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    fields = dataclasses.fields(cls)
    for field in fields:
        value, kind = data.get(field.name), hints[field.name]
        if _matches(value, kind) and field.name in data:
            if kind in (float, float | None) and value is not None:
                value = float(value)
            values[field.name] = tuple(value) if isinstance(value, list) else value
        elif value is not None:
            name = kind.__name__ if isinstance(kind, type) else kind
            raise ConfigError(f"{file}: '{field.name}' is {value!r}, expected {name}.")
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{file}: the key '{field.name}' is missing; add it.")
    if strict:
        known = {field.name for field in fields} | inert | BOOKKEEPING
        unknown = sorted(
            key
            for key, value in data.items()
            if key not in known and not _MARKS.fullmatch(key) and not says_nothing(value)
        )
        if unknown:
            raise ConfigError(
                f"{file}: nothing here reads {', '.join(repr(k) for k in unknown)}; {WAY_OUT}."
            )
    return cls(**values)


def says_nothing(value: Any) -> bool:
    """Return True for null, false, 0 and what is empty, which an unknown key may have."""
    return value in (None, False, 0, "", [], {})


def positive(config: Any, file: Path | str, *names: str) -> None:
    """Raise :class:`ConfigError` unless every named field is greater than zero."""
    for name in names:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{file}: '{name}' is {getattr(config, name)}, must be positive.")


def not_negative(config: Any, file: Path | str, *names: str) -> None:
    """Raise :class:`ConfigError` if a named field is less than zero; None is not."""
    for name in names:
        if (getattr(config, name) or 0) < 0:
            raise ConfigError(f"{file}: '{name}' is {getattr(config, name)}, must not be negative.")


def divides(config: Any, file: Path | str, small: str, large: str) -> None:
    """Raise :class:`ConfigError` unless field `small` divides field `large`."""
    positive(config, file, small)
    if getattr(config, large) % getattr(config, small):
        raise ConfigError(
            f"{file}: '{small}' {getattr(config, small)} does not divide "
            f"'{large}' {getattr(config, large)}."
        )


def only(file: Path | str, name: str, value: Any, computed: Any) -> None:
    """Raise :class:`UnsupportedError` unless key `name` has the one value that is computed."""
    if value != computed:
        raise UnsupportedError(f"{file}: '{name}' is {value!r}; only {computed!r} is computed.")
