"""Reader of JSON from outside: what it returns has bounded depth, finite numbers and Unicode."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from mlx_moeflux.server.errors import RequestError

MOST_DEPTH = 100


def read_json(body: bytes | str) -> Any:
    """Return the value of a JSON text whose strings are Unicode and whose numbers are finite.

    Raises:
        RequestError: It is no JSON, is nested deeper than MOST_DEPTH, or has NaN, an infinity or a
            lone surrogate.
    """
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise RequestError(f"the body is nested deeper than {MOST_DEPTH} levels.") from None
    except ValueError as error:  # wrong UTF-8 and overlong integers too
        raise RequestError(f"the body is no JSON: {error}.") from None
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for outer in level for inner in _checked(outer)]
        if not level:
            return value
    raise RequestError(f"the body is nested deeper than {MOST_DEPTH} levels.")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _checked(value: Any) -> Iterator[Any]:
    """Check a value that holds no others; yield what the others hold."""
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value
    elif isinstance(value, float) and not math.isfinite(value):
        raise RequestError("the body has a number that is too large.")
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError("the body has a lone surrogate, which is no character.") from None
