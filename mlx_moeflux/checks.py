"""Is a value, from a file or from a caller, the number or the function that it must be?"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TypeGuard

from mlx_moeflux.errors import InputError

MOST_AXES = 8


def is_natural(value: object) -> TypeGuard[int]:
    """Return True for integers from 0 on that 63 bits hold. JSON's `true` is not one."""
    return type(value) is int and 0 <= value < 1 << 63


def is_positive(value: object) -> TypeGuard[int]:
    """Return True for integers from 1 on that 63 bits hold. JSON's `true` is not one."""
    return is_natural(value) and value > 0


def is_shape(value: object) -> TypeGuard[list[int]]:
    """Return True for a list of sizes; more axes than MOST_AXES make numbers of any length."""
    return isinstance(value, list) and len(value) <= MOST_AXES and all(map(is_natural, value))


def check_number(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise an InputError unless `value` is a finite number from `low` to `high`."""
    if not isinstance(value, Real):
        raise InputError(f"{name} is {value!r}; give a number.")
    if not (low <= value <= high and math.isfinite(value)):
        bounds = [f"at least {low}"] * (low > -math.inf) + [f"at most {high}"] * (high < math.inf)
        raise InputError(f"{name} is {value}; it must be {' and '.join(bounds) or 'finite'}.")


def check_integer(name: str, value: int, low: int, *, hint: str = "") -> None:
    """Raise an InputError unless `value` is an integer from `low` up."""
    if not isinstance(value, Integral):
        raise InputError(f"{name} is {value!r}; give an integer{hint}.")
    if value < low:
        raise InputError(f"{name} is {value}; it must be at least {low}{hint}.")


def check_callable(name: str, value: object) -> None:
    """Raise an InputError unless `value` is None or callable."""
    if value is not None and not callable(value):
        raise InputError(f"{name} is {value!r}; give a callable.")
