"""Strict reader of a request's JSON: checks every value and refuses fields that were not read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from mlx_moeflux.server.errors import RequestError

T = TypeVar("T")

MOST_DEPTH = 100
LARGEST_INTEGER = 2**63 - 1


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


class Fields:
    """A JSON object that is being read. A field that is null counts as missing.

    where: Its dotted place in the body, for messages. Methods named after a kind of value check
    and return one field, and note that it was read; :meth:`finish` refuses those that were not.
    """

    def __init__(self, value: Any, where: str = ""):
        if not isinstance(value, dict):
            raise RequestError(f"{where or 'the body'} is {_kind(value)}; give an object.")
        self._value = {name: inner for name, inner in value.items() if inner is not None}
        self._where, self._read = where, set[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def place(self, name: str) -> str:
        """Return the dotted place of a field."""
        return f"{self._where}.{name}" if self._where else name

    def wrong(self, name: str, expected: str, *, code: str | None = None) -> RequestError:
        """Return the error of a field whose value is not as expected."""
        place = self.place(name)
        if name not in self._value:
            return RequestError(f"'{place}' is missing; {expected}.", param=place, code=code)
        value = self._value[name]
        shown = json.dumps(value) if isinstance(value, int | float | bool) else _kind(value)
        return RequestError(f"'{place}' is {shown[:80]}; {expected}.", param=place, code=code)

    def any(self, name: str, default: Any = None) -> Any:
        """Return a field of any type."""
        self._read.add(name)
        return self._value.get(name, default)

    def text(self, name: str, default: T = None) -> str | T:
        return self._typed(name, str, "give a string", default)

    def flag(self, name: str, default: T = False) -> bool | T:
        return self._typed(name, bool, "give true or false", default)

    def integer(
        self, name: str, default: T = None, *, low: int = 0, high: int = LARGEST_INTEGER
    ) -> int | T:
        """Return an integer from `low` to `high`; a boolean or 1.5 is none, 1.0 is one."""
        value = self.any(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"give an integer from {low} to {high}")
        return value

    def number(self, name: str, default: T = None, *, low: float, high: float) -> float | T:
        """Return a number from `low` to `high`; a boolean is none."""
        value = self.any(name)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.wrong(name, f"give a number from {low} to {high}")
        return float(value)

    def choice(self, name: str, choices: Collection[str], default: T = None) -> str | T:
        value = self.text(name)
        if value is None:
            return default
        if value not in choices:
            place, known = self.place(name), ", ".join(choices)
            raise RequestError(f"'{place}' is '{value[:40]}'; give one of {known}.", param=place)
        return value

    def object(self, name: str) -> Fields | None:
        """Return a field that is an object, whose own fields are to be read."""
        value = self.any(name)
        return None if value is None else Fields(value, self.place(name))

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a field that is an object, with everything in it."""
        return self._typed(name, dict, "give an object", None) or {}

    def items(self, name: str) -> list[Any]:
        return self._typed(name, list, "give a list", None) or []

    def objects(self, name: str) -> list[Fields]:
        """Return the objects of a list, each of which is to be read."""
        items = enumerate(self.items(name))
        return [Fields(item, f"{self.place(name)}.{i}") for i, item in items]

    def texts(self, name: str) -> list[str]:
        """Return a field that is a text or a list of texts, none of them empty."""
        value = self.any(name, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or any(not isinstance(t, str) or not t for t in texts):
            raise self.wrong(name, "give texts that are not empty")
        return texts

    def ignore(self, *names: str) -> None:
        """Accept any value of fields that change nothing in a reply."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuse the first field that was not read and asks for something."""
        for name, value in self._value.items():
            if name not in self._read and value not in (False, 0, "", [], {}):
                place = self.place(name[:60])
                raise RequestError(
                    f"'{place}' is not offered; leave it out.",
                    param=place,
                    code="unsupported_parameter",
                )

    def _typed(self, name: str, kind: type, expected: str, default: Any) -> Any:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.wrong(name, expected)
        return value


def required(fields: Fields, read: Callable[[str], T | None], name: str, expected: str) -> T:
    """Return ``read(name)``; refuse a missing field."""
    value = read(name)
    if value is None:
        raise fields.wrong(name, expected)
    return value


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")
