"""Is a value, from a file or from a caller, the number or the function that it must be?"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

from mlx_moeflux.errors import InputError, whole_words

MOST_AXES = 8


def shown(value: object) -> str:
    """Return a value for a message, in one line of at most 60 characters."""
    try:
        line = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # a caller's class, or more digits than Python writes
        return f"of type {type(value).__name__}, which cannot be printed"
    return line if len(line) <= 60 else f"{whole_words(line[:57])}..."


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
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InputError(f"{name} is {shown(value)}; give a number.")
    if not _is_finite(value):
        raise InputError(f"{name} is {shown(value)}; it must be finite.")
    if not low <= value <= high:
        bounds = [f"at least {low}"] * (low > -math.inf) + [f"at most {high}"] * (high < math.inf)
        raise InputError(f"{name} is {shown(value)}; it must be {' and '.join(bounds)}.")


def _is_finite(value: Real) -> bool:
    """Return True for a number that a float can have."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def check_integer(name: str, value: int, low: int, *, hint: str = "") -> None:
    """Raise an InputError unless `value` is an integer from `low` up. True is none."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(f"{name} is {shown(value)}; give an integer{hint}.")
    if value < low:
        raise InputError(f"{name} is {shown(value)}; it must be at least {low}{hint}.")


def check_callable(name: str, value: object, *arguments: str) -> None:
    """Raise an InputError unless `value` is None or callable, and takes `arguments` if there are
    any."""
    if value is None:
        return
    if not callable(value):
        raise InputError(f"{name} is {shown(value)}; give a callable.")
    if arguments:
        _check_call(name, value, f"({', '.join(arguments)})", arguments)


def check_method(whose: str, method: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    """Raise an InputError unless a bound `method` can be called with the arguments of `wanted`, a
    function of a protocol."""
    _, *parameters = inspect.signature(wanted).parameters.values()
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    by_place = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    call = ", ".join([*by_place, *(f"{name}=" for name in by_name)])
    _check_call(whose, method, f"{wanted.__name__}({call})", by_place, by_name)


def _check_call(
    whose: str,
    function: Callable[..., Any],
    call: str,
    by_place: Sequence[str],
    by_name: Sequence[str] = (),
) -> None:
    """Raise an InputError unless `function` can be called so; `call` is how the message says it."""
    try:
        found = inspect.signature(function)
    except ValueError:  # written in C
        return
    try:
        found.bind(*by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        raise InputError(f"{whose} is called as {call}: {error}.") from error


def has_parameter(function: Any, name: str) -> bool:
    """Return True if a callable can be passed an argument of this name, which it has declared."""
    try:
        found = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # not callable, or written in C
        return False
    return found is not None and found.kind is not found.POSITIONAL_ONLY
