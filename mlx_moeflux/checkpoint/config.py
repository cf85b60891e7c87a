"""Read config.json strictly: an unknown key must not change a model silently.

Every architecture declares a frozen dataclass. Its fields are the keys that are used: one
without a default must be there. ``INERT`` lists the keys that are known to change nothing
at inference. Any other key is an error unless its value is null, false, 0 or empty.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlx_moeflux.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

# Written by transformers' save_pretrained or by mlx-lm's convert, for bookkeeping or training.
BOOKKEEPING = frozenset(
    """
    _name_or_path architectures transformers_version torch_dtype dtype model_type use_cache
    id2label label2id problem_type output_attentions output_hidden_states return_dict
    is_encoder_decoder chunk_size_feed_forward initializer_range attention_dropout bos_token_id
    eos_token_id pad_token_id sep_token_id output_router_logits router_aux_loss_coef
    quantization quantization_config
    """.split()  # noqa: SIM905 (a list would take a line for each name)
)


# Numbers beyond them fit no argument of MLX; NaN is not below.
MOST_INT, MOST_FLOAT = 1 << 63, 1e30


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
            k for k, v in data.items() if k not in known and v not in (None, False, 0, "", [], {})
        )
        if unknown:
            raise ConfigError(
                f"{file}: nothing here reads {', '.join(repr(k) for k in unknown)}; if that "
                "changes nothing, pass strict_config=False."
            )
    return cls(**values)


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


def check_groups(config: Any, file: Path | str) -> None:
    """Check the fields of a router that chooses among groups: ``n_group``, ``topk_group``,
    ``n_routed_experts``, ``num_experts_per_tok``.

    Raises:
        ConfigError: Groups do not divide the experts, or hold fewer than a token takes.
    """
    divides(config, file, "n_group", "n_routed_experts")
    if config.topk_group > config.n_group:
        raise ConfigError(
            f"{file}: 'topk_group' {config.topk_group} is more than 'n_group' {config.n_group}."
        )
    group = config.n_routed_experts // config.n_group
    if config.num_experts_per_tok > config.topk_group * group:
        raise ConfigError(
            f"{file}: 'num_experts_per_tok' {config.num_experts_per_tok} is more than the "
            f"{config.topk_group} groups of {group} experts that take part have."
        )
    if group < 2 and config.topk_group < config.n_group:
        raise ConfigError(f"{file}: 'n_group' {config.n_group} leaves groups of one expert.")


def only(file: Path | str, name: str, value: Any, computed: Any) -> None:
    """Raise :class:`UnsupportedError` unless key `name` has the one value that is computed."""
    if value != computed:
        raise UnsupportedError(f"{file}: '{name}' is {value!r}; only {computed!r} is computed.")
