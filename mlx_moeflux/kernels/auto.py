"""Which form "auto" takes: dispatch.json, a table from operation and back end to forms and the
sizes from which on they are used.

    {"gated_delta": {"cuda": [{"form": "recurrent", "from": 1, "us": {...}}, ...]}}

"us" holds microseconds measured at that size for the forms that were compared. An operation or a
back end that is not listed takes the reference.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("dispatch.json")

# What a row's "from" counts, where it is not the rows of the first argument: tokens of a sequence.
_AXES = {"causal_conv": 1, "gated_delta": 1, "delta_mixer": 1, "sdpa": 2, "norm_rope": 1}
_AXES |= {"latent_attention": 2, "latent_prefill": 2, "latent_prepare": 1}
_SIZES: dict[str, Callable[..., int]] = {
    "append_row": lambda *_, **__: 1,
    "head_product": lambda x, *_, **__: x.shape[0] * x.shape[2],
    "project": lambda x, *_, **__: x.size // x.shape[-1],
    "add_shared": lambda x, *_, **__: x.size // x.shape[-1],
    "moe_step": lambda x, *_, **__: x.size // x.shape[-1],
} | {name: lambda first, *_, axis=axis, **__: first.shape[axis] for name, axis in _AXES.items()}


@dataclass(frozen=True)
class Row:
    """A form, and the size from which on it is used."""

    form: str
    start: int = 1
    us: Mapping[str, float] = field(default_factory=dict)


@functools.cache
def table() -> dict[str, dict[str, tuple[Row, ...]]]:
    """Operation -> back end -> rows by ascending size."""
    return {
        operation: {
            backend: tuple(
                sorted(
                    (Row(r["form"], r["from"], r.get("us", {})) for r in rows),
                    key=lambda row: row.start,
                )
            )
            for backend, rows in backends.items()
        }
        for operation, backends in json.loads(TABLE.read_text()).items()
    }


def rows(operation: str, backend: str) -> tuple[Row, ...]:
    """The rows of one operation on one back end; none: the reference."""
    return table().get(operation, {}).get(backend, ())


def pick(chosen: Sequence[Row], size: int) -> str:
    """The form for a call of `size`."""
    form = "reference"
    for row in chosen:
        if size < row.start:
            break
        form = row.form
    return form


def size(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How large a call is: tokens, as the table counts them."""
    measure = _SIZES.get(operation)
    return measure(*args, **kwargs) if measure else args[0].shape[0]


def describe(chosen: Sequence[Row]) -> str:
    """``recurrent+chunkwise@64``: forms and where they begin."""
    if not chosen:
        return "reference"
    named = [row.form if row.start <= 1 else f"{row.form}@{row.start}" for row in chosen]
    return "+".join(named if chosen[0].start <= 1 else ["reference", *named])
