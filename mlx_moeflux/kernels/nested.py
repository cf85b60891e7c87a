"""Arrays in tuples, lists and dataclasses, as operations take and return them."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx


def arrays(value: Any) -> list[mx.array]:
    """Return the arrays of a value, of its entries and of its fields."""
    if isinstance(value, mx.array):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if not isinstance(value, (tuple, list)):
        return []
    return [array for entry in value for array in arrays(entry)]


def describe(value: Any) -> str:
    """Dtypes and shapes, nested as `value` is."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(v) for v in value)})"
    if isinstance(value, mx.array):
        return f"{str(value.dtype).removeprefix('mlx.core.')}{list(value.shape)}"
    return type(value).__name__
