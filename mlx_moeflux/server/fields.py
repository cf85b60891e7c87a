"""Base of the models of a request's JSON: strict types, null as unset, one error for all faults."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails
from pydantic_core.core_schema import no_info_plain_validator_function

from mlx_moeflux.generation.sampling_fields import REQUEST_FIELDS
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.json_guard import read_json

T = TypeVar("T")
Model = TypeVar("Model", bound="Fields")

NOTHING = (None, False, 0, "", [], {})
"""Values that ask for nothing, also in fields that are not known: clients send `use_beam_search`
and `n_probs` as false and 0."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Samplers that are off.
    "repeat_penalty": (1,), "rep_pen": (1,), "encoder_repetition_penalty": (1,),
    "typical_p": (1,), "typical": (1,), "typ_p": (1,), "tfs_z": (1,), "tfs": (1,),
    "top_n_sigma": (-1,),
    "dynatemp_exponent": (1,), "temp_exponent": (1,), "min_temp": (1,), "max_temp": (1,),
    "dynatemp_low": (1,), "dynatemp_high": (1,), "smoothing_curve": (1,),
    "guidance_scale": (1,), "cfg_scale": (1,),
    "length_penalty": (1,), "diversity_penalty": (1,), "num_beams": (1,), "beam_width": (1,),
    # Lengths without a limit, one reply, and no choice of a place.
    "n_predict": (-1,), "max_new_tokens": (-1,), "best_of": (1,), "id_slot": (-1,),
    "truncate_prompt_tokens": (-1,), "n_keep": (-1,), "t_max_predict_ms": (-1,),
    "thinking_budget": (-1,), "reasoning_budget": (-1,),
    # What this server does.
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True, False),
    "add_bos_token": (True,), "add_special": (True,), "parse_special": (True,),
    "detokenize": (True,), "do_sample": (True,), "include_reasoning": (True,),
    "separate_reasoning": (True,), "stream_reasoning": (True,), "parse_tool_calls": (True,),
    "reasoning_format": ("auto", "deepseek"), "reasoning_in_content": (False,),
    "function_call": ("auto", "none"), "parallel_tool_calls": (True, False),
    "truncation": ("auto", "disabled"), "result_format": ("message",), "mode": ("instruct",),
    "route": ("fallback",),
}  # fmt: skip
"""Fields of other servers -> values by which they change nothing. Where that is True alone, False
asks for something."""

PENALTIES = {name: (None, 0, field.off) for name, field in REQUEST_FIELDS.items() if field.window}
"""Penalties that a server may have -> values by which they are off."""

WINDOWS = {
    "repetition_context_size": ("repetition_penalty",), "rep_pen_range": ("repetition_penalty",),
    "presence_context_size": ("presence_penalty",),
    "frequency_context_size": ("frequency_penalty",),
    "repeat_last_n": tuple(PENALTIES), "penalty_last_n": tuple(PENALTIES),
    "penalty_range": tuple(PENALTIES),
}  # fmt: skip
"""How many of the last tokens count -> for which penalties. Here all do, which -1 says."""

HINTS = (
    # Bounds of samplers that are refused when they are on.
    "penalize_nl", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "mirostat_tau", "mirostat_eta", "min_keep",
    # How long a model stays and how large a context it has, how a reply is computed, which request
    # it is, and what a reply has besides its text.
    "keep_alive", "ttl", "num_ctx", "guided_decoding_backend", "provider", "priority", "request_id",
    "rid", "session_id", "cache_salt", "usage", "timings_per_token", "return_progress",
    "verbosity", "tool_stream", "incremental_output",
)  # fmt: skip
"""Fields of other servers that change nothing, whatever their value."""

_THINKING = re.compile("think|reason")


def _asks(name: str, value: Any, body: Mapping[str, Any]) -> bool:
    """Return True if a field of a body that is not known asks for something, as `think_budget` does
    by 0."""
    if name in WINDOWS:
        return value != -1 and any(body.get(p) not in PENALTIES[p] for p in WINDOWS[name])
    if name in HINTS or value in NEUTRAL.get(name, ()):
        return False
    if value is False and any(neutral is True for neutral in NEUTRAL.get(name, ())):
        return True
    if isinstance(value, int | float) and _THINKING.search(name):
        return True
    return value not in NOTHING


class Fields(BaseModel):
    """The fields of a JSON object; one that is null counts as missing.

    inert: Names of fields that are known and change nothing in a reply. Others that are not the
    model's are refused if they ask for something.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    inert: ClassVar[tuple[str, ...]] = ()
    own: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.own = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("give an object")
        own, inert = cls.own, cls.inert
        given = {name: inner for name, inner in value.items() if inner is not None and name in own}
        for name, inner in value.items():
            if name not in own and name not in inert and _asks(name, inner, value):
                # One is enough to refuse the object, which may have millions.
                return given | {name: inner}
        return given


class OpenFields(Fields, extra="ignore"):
    """The fields of an object whose other fields are ignored."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole), Field(le=2**63 - 1)]
"""An integer; 1.0 is one, true is none."""

Count = Annotated[Integer, Field(ge=0)]
Positive = Annotated[Integer, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]

Items = Annotated[list[T], FailFast()]
"""A list that is read to its first fault."""


def _texts(value: Any) -> Any:
    texts = value if isinstance(value, list) else [value]
    if any(not isinstance(text, str | None) for text in texts):
        raise ValueError("give a text or a list of texts")
    return [text for text in texts if text]


Texts = Annotated[list[str], BeforeValidator(_texts)]
"""A text or a list of texts; empty ones are left out."""


def _or_off(value: Any) -> Any:
    return 0 if value == -1 else value


CountOrOff = Annotated[Count, BeforeValidator(_or_off)]
"""A count; -1 is 0, as vLLM has it."""


def _limit(value: int) -> int:
    if not value:
        raise ValueError("give 1 or more, or -1 for no limit")
    return value


TokenLimit = Annotated[Integer, Field(ge=-1), AfterValidator(_limit)]
"""The most tokens of a reply; -1 is no limit."""


@dataclass(frozen=True)
class OneOf:
    """Annotation of a union of models: the Literal `field` of an object says of which it is.

    Pydantic's own unions would put the model's name into the dotted place of a fault. other: The
    model of objects of all other kinds; without it they are refused.
    """

    field: str
    other: type[Fields] | None = None

    def __get_pydantic_core_schema__(self, source: Any, _: GetCoreSchemaHandler) -> CoreSchema:
        kinds: dict[Any, type[Fields]] = {
            kind: model
            for model in get_args(source)
            if model is not self.other
            for kind in get_args(model.model_fields[self.field].annotation)
        }
        known: Any = {self.field: (Literal[tuple(kinds)], ...)}
        other = self.other or create_model("Kind", __base__=OpenFields, **known)

        def choose(value: Any) -> Fields:
            kind = value.get(self.field) if isinstance(value, dict) else None
            model = kinds.get(kind) if kind is None or isinstance(kind, str) else None
            return (model or other).model_validate(value)

        return no_info_plain_validator_function(choose)


def read_body(model: type[Model], body: bytes | str) -> Model:
    """Return the JSON text of a request as a model.

    Raises:
        RequestError: It is no JSON or not of the model; the message names the first field at fault.
    """
    value = read_json(body, mend=True)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from None


def refusal(fault: ErrorDetails) -> RequestError:
    """Return the error of a request with a fault that a model found."""
    place = ".".join(str(name)[:60] for name in fault["loc"])
    subject = f"'{place}'" if place else "the body"
    if fault["type"] == "extra_forbidden":
        text = f"{subject} is not offered; leave it out."
        return RequestError(text, param=place, code="unsupported_parameter")
    if fault["type"] == "missing":
        return RequestError(f"{subject} is missing; give it.", param=place)
    hint = fault["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    hint = hint.replace("a valid dictionary", "an object").rstrip(".")
    text = f"{subject} is {_shown(fault['input'])}; {hint[:1].lower()}{hint[1:]}."
    return RequestError(text[:300], param=place or None)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value[:40] if isinstance(value, str) else value, ensure_ascii=False)[:80]
