"""Contents of messages as text: the model reads nothing else, so a short text stands for the rest.

Only the newest message of a user may be refused for what it holds. Everything before it, and the
results of tools, is history: a client sends it again with every request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    BeforeValidator,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails

from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import Items, OneOf, OpenFields, refusal
from mlx_moeflux.server.json_guard import read_json

MEDIA = {
    "image": "image", "image_url": "image", "image_file": "image", "input_image": "image",
    "computer_screenshot": "image", "audio": "audio", "input_audio": "audio", "audio_url": "audio",
    "video": "video", "video_url": "video", "input_video": "video", "document": "document",
    "file": "document", "input_file": "document",
}  # fmt: skip
"""Types of parts -> the kind of medium that they hold."""

LABELS = {
    "type", "id", "status", "data", "file_data", "signature", "media_type", "cache_control",
    "citations", "annotations", "caller", "fingerprint",
}  # fmt: skip
"""Fields of a block that say nothing to a model; nor do ids and encrypted texts."""

EMPTY = (None, "", [], {})
_DATA = re.compile(r"data:[\w.+/;=-]*,.*|[A-Za-z0-9+/_=\r\n-]{200,}", re.DOTALL)


def described(block: dict[str, Any]) -> str:
    """Return a text that stands for a block: its type, and what of it a model can read.

    An image is ``[image: not readable by this model]``, a search ``[web search call: query]``.
    """
    kind, inner = block.get("type"), _readable(block)
    while isinstance(inner, dict) and len(inner) == 1:
        (inner,) = inner.values()
    shown = inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)
    if not isinstance(kind, str) or not kind or kind in MEDIA:
        return shown
    return f"[{kind.replace('_', ' ')}{f': {shown}' if inner not in EMPTY else ''}]"


def _readable(value: Any) -> Any:
    """Return a JSON value without what a model cannot read."""
    if isinstance(value, str):
        return "" if _DATA.fullmatch(value) else value
    if isinstance(value, list):
        return [kept for inner in value if (kept := _readable(inner)) not in EMPTY]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if isinstance(kind, str) and kind in MEDIA:
        return _text(value) or _medium(value)
    if isinstance(text := value.get("text"), str):
        return text
    return {
        name: kept
        for name, inner in value.items()
        # An object without a type is no block, but arguments of a call or the like.
        if not (kind and _says_nothing(name)) and (kept := _readable(inner)) not in EMPTY
    }


def _says_nothing(name: str) -> bool:
    return name in LABELS or name.endswith("_id") or name.startswith("encrypted_")


def _medium(block: dict[str, Any]) -> str:
    """Return the kind and the name of an image, a recording or a document."""
    holders = [block, *(value for value in block.values() if isinstance(value, dict))]
    names = [holder.get(key) for key in ("title", "filename", "name") for holder in holders]
    name = next((name for name in names if isinstance(name, str) and name), "")
    kind = MEDIA[block["type"]]
    return f"[{kind}: {f'{name[:200]}, ' if name else ''}not readable by this model]"


def _text(block: dict[str, Any]) -> str:
    """Return the text of a document that has one, with its title, or ""."""
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") not in ("text", "content"):
        return ""
    found = source.get("data") if source["type"] == "text" else _readable(source.get("content"))
    if isinstance(found, list):
        found = "\n".join(str(part) for part in found)
    parts = [block.get("title"), block.get("context"), found]
    return "\n".join(part for part in parts if isinstance(part, str) and part)


class Part(Protocol):
    """A part of a content. readable: The text is all that it holds."""

    @property
    def type(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def readable(self) -> bool: ...


class TextPart(OpenFields):
    type: Literal["text", "input_text", "output_text"]
    text: str = ""

    @property
    def readable(self) -> bool:
        return True


class OtherPart(OpenFields):
    """A part that is no text, or of a type that is not known. given: The whole part."""

    type: str
    given: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("give an object")
        own = {name: value[name] for name in cls.own & value.keys() if value[name] is not None}
        return {**own, "type": value.get("type") or "", "given": value}

    @property
    def text(self) -> str:
        text = self.given.get("refusal" if self.type == "refusal" else "text")
        return text if isinstance(text, str) else described(self.given)

    @property
    def readable(self) -> bool:
        """Return True for texts by another name, and for texts that a client has found."""
        if self.type in MEDIA:
            return bool(_text(self.given))
        return self.type in ("refusal", "search_result") or isinstance(self.given.get("text"), str)


@dataclass(frozen=True)
class WrongPart:
    """A part of a wrong type. The model reads its JSON; in a new question it is refused.

    fault: What is wrong with it, with its place.
    """

    text: str
    fault: ErrorDetails
    type: str = ""
    readable: bool = False
    cache_control: Any = None


def _or_wrong(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError as error:
        inner = value.get("text", value) if isinstance(value, dict) else value
        return WrongPart(as_text(inner), error.errors(include_url=False)[0])


OrWrong = WrapValidator(_or_wrong)
"""Annotation of the parts of a content: one of a wrong type becomes a :class:`WrongPart`."""


def as_text(value: Any) -> str:
    """Return a JSON value as a model reads it: a text as it is, null as "", else JSON."""
    found = _readable(value)
    if isinstance(found, str):
        return found
    return "" if found is None else json.dumps(found, ensure_ascii=False)


def first_fault(parts: Sequence[Part]) -> ErrorDetails | None:
    """Return what is wrong with the first part of a wrong type, with its place in the content."""
    for i, part in enumerate(parts):
        if isinstance(part, WrongPart):
            return {**part.fault, "loc": (i, *part.fault["loc"])}
    return None


@dataclass(frozen=True)
class Content:
    """The text of a message.

    unreadable: Place of the first part that is not all in it. fault: What is wrong with the first
    value that is neither a text nor a part.
    """

    text: str = ""
    unreadable: str | None = None
    fault: ErrorDetails | None = None


def joined(parts: Iterable[Part], separator: str = "") -> str:
    """Return the texts of parts; what stands for something unreadable gets a line of its own."""
    found, whole = "", True
    for part in parts:
        if text := part.text:
            between = separator if whole and part.readable else "\n"
            if found and not (between == "\n" and found.endswith("\n")):
                found += between
            found, whole = found + text, part.readable
    return found


def unreadable(parts: Sequence[Part]) -> str | None:
    """Return the place of the first part that the model cannot read whole."""
    for i, part in enumerate(parts):
        if not part.readable:
            return f"{i}.{part.type}" if part.type else str(i)
    return None


def contents(separator: str = "") -> PlainValidator:
    """Return the validator of a content: a text, or a list of parts. Other values become the text
    of their JSON, with a fault. Nothing is ever fetched."""
    kinds = OneOf("type", other=OtherPart)
    strict = TypeAdapter(Items[Annotated[TextPart | OtherPart, kinds]])
    items = TypeAdapter(list[Annotated[TextPart | OtherPart, kinds, OrWrong]])

    def read(value: Any) -> Content:
        if isinstance(value, str):
            return Content(value)
        given = [value] if isinstance(value, dict) else value
        if isinstance(given, list) and all(isinstance(one, dict) for one in given):
            parts = items.validate_python(given)
            return Content(joined(parts, separator), unreadable(parts), first_fault(parts))
        try:
            strict.validate_python(given)
        except ValidationError as error:
            return Content(as_text(value), fault=error.errors(include_url=False)[0])
        raise AssertionError

    return PlainValidator(read)


def newest(roles: Iterable[str]) -> int | None:
    """Return the number of the user's last message if no reply or result stands behind it."""
    for i, role in reversed(list(enumerate(roles))):
        if role == "user":
            return i
        if role not in ("system", "developer"):
            return None
    return None


def check_newest(content: Content | None, place: str) -> None:
    """Refuse the newest message if it is missing, or asks to read what the model cannot.

    Raises:
        RequestError: It does. The place is in Anthropic's form, by which Claude Code finds the
            part and goes on without it.
    """
    if content is None:
        raise RequestError(f"'{place}' is missing; give it.", param=place)
    if content.fault is not None:
        raise refusal({**content.fault, "loc": (*place.split("."), *content.fault["loc"])})
    if content.unreadable is not None:
        place = f"{place}.{content.unreadable}"[:200]
        kind = MEDIA.get(place.rpartition(".")[2], "content of this type")
        raise RequestError(
            f"'{place}' is not supported: this model reads text, no {kind}; leave it out.",
            param=place,
            code="unsupported_content",
        )


def _echoed(value: Any) -> str:
    return value if isinstance(value, str) else ""


Echoed = Annotated[str, BeforeValidator(_echoed)]
"""A text that a client repeats; what is no text counts as missing."""


Label = Annotated[str, BeforeValidator(as_text)]
"""An id, which some clients give as a number."""


def _arguments(value: Any) -> dict[str, Any] | str:
    if isinstance(value, dict):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        found = read_json(text.strip() or "{}", mend=True)
    except RequestError:
        return text
    return found if isinstance(found, dict) else text


Arguments = Annotated[dict[str, Any] | str, PlainValidator(_arguments)]
"""The arguments of an earlier call: an object, or the text of a broken one."""
