"""Parts of all of OpenAI's protocols: fields of bodies, errors, log-probabilities, usage."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    create_model,
    field_validator,
)

from mlx_moeflux.generation.sampling_fields import REQUEST_FIELDS, SamplingField
from mlx_moeflux.server.assemble import Delta
from mlx_moeflux.server.engine import TokenLogprobs
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import (
    CountOrOff,
    Fields,
    Integer,
    OpenFields,
    Positive,
    Texts,
    TokenLimit,
)
from mlx_moeflux.server.request import (
    AUTO,
    MOST_CHOICES,
    MOST_STOPS,
    NONE,
    REQUIRED,
    Sampling,
)
from mlx_moeflux.server.schemas import without_nulls
from mlx_moeflux.server.service import Generation, Service

# Log-probability of a token that cannot occur; JSON has no infinity.
LEAST_LOGPROB = -9999.0


def _annotation(field: SamplingField) -> Any:
    """Return the type of a field of sampling."""
    if field.kind is int:
        return CountOrOff
    low, high = field.requested

    def or_off(value: float) -> float:
        """Return the neutral value for 0, which mlx-lm's clients send for no penalty."""
        if 0 < value < field.least_on:
            raise ValueError(f"give 0 for none, or at least {field.least_on}")
        return value or field.off

    number = Annotated[float, Field(ge=low, le=high)]
    return Annotated[number, AfterValidator(or_off)] if field.least_on else number


class _Body(Fields):
    inert = (
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction", "client_metadata", "cache_prompt",
    )  # fmt: skip
    model: str | None = None
    stream: bool = False


_options: dict[str, Any] = {
    name: (_annotation(field) | None, None) for name, field in REQUEST_FIELDS.items()
}
_SampledBody = create_model("_SampledBody", __base__=_Body, **_options)


class OpenAIBody(_SampledBody):
    """Base of the bodies of OpenAI's protocols, with mlx-lm's options of sampling."""

    seed: Annotated[Integer, Field(ge=-(2**63))] | None = None
    logit_bias: dict[str, Any] = Field({})

    def sampling(self, service: Service) -> Sampling:
        """Return the options of sampling, with the server's where the body has none."""
        given = self.model_dump(include={*REQUEST_FIELDS}, exclude_unset=True)
        biases = self._biases(service.vocabulary)
        return service.options.defaults.sampling(given, seed=self.seed, logit_bias=biases)

    def _biases(self, vocabulary: int) -> tuple[tuple[int, float], ...]:
        found = []
        for key, bias in self.logit_bias.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocabulary):
                raise RequestError(
                    f"'logit_bias' names '{key[:40]}', which is no token id below {vocabulary}.",
                    param="logit_bias",
                )
            bias = 0 if bias is None else bias
            if type(bias) not in (int, float) or not -100 <= bias <= 100:
                place = f"logit_bias.{key}"
                raise RequestError(f"'{place}' must be a number from -100 to 100.", param=place)
            found.append((int(key), float(bias)))
        return tuple(sorted(found))


class StreamOptions(Fields):
    inert = ("include_obfuscation",)
    include_usage: bool = False


class ChunkBody(OpenAIBody):
    """Base of the bodies of chat completions and completions."""

    max_tokens: TokenLimit | None = None
    n: Annotated[Positive, Field(le=MOST_CHOICES)] = 1
    stop: Annotated[Texts, Field(max_length=MOST_STOPS)] = Field([])
    stream_options: StreamOptions | None = None

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream"):
            raise ValueError("it is for streams alone")
        return value

    @property
    def usage(self) -> bool:
        """Return True if a stream ends with counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


def _name(name: str) -> str:
    if any(c in name for c in "<>\"'`\n\\") or name != name.strip():
        raise ValueError("give a name of letters, digits, - and _")
    return name


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    schema = without_nulls(schema)
    for key, kind in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(key, kind()), kind):
            raise ValueError(f"its '{key}' must be of another type")
    return schema


FunctionName = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_name)]
Parameters = Annotated[dict[str, Any], AfterValidator(_parameters)]


class Function(OpenFields):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters = Field({})

    def tool(self, name: str | None = None) -> dict[str, Any]:
        """Return the function, under another name if one is given, as chat templates take it.

        Templates print it as it is: its fields come in the order that models were trained on, and
        the schema's as the client gives them.
        """
        found: dict[str, Any] = {"name": name or self.name}
        if self.description:
            found["description"] = self.description
        needed = {"type": "object", "properties": {}}
        missing = {key: value for key, value in needed.items() if key not in self.parameters}
        found["parameters"] = {**self.parameters, **missing}
        return {"type": "function", "function": found}


class OtherTool(OpenFields):
    """A tool that the provider would run; it is not offered to the model."""

    type: str


class _Named(OpenFields):
    name: str


class _Choice(OpenFields):
    type: Literal["function"] = "function"
    function: _Named | None = None


def _tool_choice(value: Any) -> str:
    if isinstance(value, str):
        if value not in (AUTO, NONE, REQUIRED):
            raise ValueError(f"give {AUTO}, {NONE}, {REQUIRED} or a function")
        return value
    # Responses name the function at the top.
    return (_Choice.model_validate(value).function or _Named.model_validate(value)).name


ToolChoice = Annotated[str, PlainValidator(_tool_choice)]
"""Auto, none, required, or the name of a function."""


AnswerSchema = Annotated[dict[str, Any], AfterValidator(without_nulls)]


class _Schema(OpenFields):
    value: AnswerSchema = Field(alias="schema")


class _Format(OpenFields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


def _format(value: Any) -> tuple[Any, ...]:
    form = _Format.model_validate(value)
    if form.type == "json_schema":
        # Responses have the schema at the top.
        return ((form.json_schema or _Schema.model_validate(value)).value,)
    return (None,) if form.type == "json_object" else ()


Format = Annotated[tuple[Any, ...], PlainValidator(_format)]
"""The schema of an answer: (schema,), (None,) for any object, () for any text."""


def error(found: RequestError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = "server_error" if found.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(found),
            "type": kinds.get(found.status, kind),
            "param": found.param,
            "code": found.code,
        }
    }


_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(data: Any, name: str | None = None) -> str:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else _encoded(data)
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


class ChunkStream:
    """Base of the streams of chat completions and completions: chunks, usage, end, failure.

    head: Fields of every chunk.
    """

    def __init__(self, generation: Generation, head: dict[str, Any]):
        self._generation, self._head = generation, head
        if generation.request.usage:
            self._head |= {"usage": None}

    def _chunk(self, choice: dict[str, Any]) -> str:
        return event({**self._head, "choices": [choice]})

    def _still(self, choice: dict[str, Any]) -> str:
        """Return a chunk without news, with the progress of the prompt as llama.cpp reports it."""
        found = self._generation.prompt_progress()
        progress = {} if found is None else {"prompt_progress": found}
        return event({**self._head, "choices": [choice], **progress})

    def end(self) -> str:
        last = event("[DONE]")
        if self._generation.request.usage:
            counts = {"choices": [], "usage": usage(self._generation)}
            return event({**self._head, **counts}) + last
        return last

    def fail(self, found: RequestError) -> str:
        return event(error(found))


def usage(generation: Generation) -> dict[str, Any]:
    """Return the counts of tokens of chat completions and completions."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
    }


def logprobs(service: Service, delta: Delta) -> dict[str, Any]:
    """Return the log-probabilities of a part as chat completions name them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = service.tokenizer.decode([token])
        return {
            "token": text,
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(service.token_bytes(token)),
        }

    def full(one: TokenLogprobs) -> dict[str, Any]:
        top = [entry(token, logprob) for token, logprob in one.top]
        return {**entry(one.token, one.logprob), "top_logprobs": top}

    return {"content": [full(one) for one in delta.logprobs], "refusal": None}


def shown_arguments(service: Service, arguments: dict[str, Any] | str) -> Any:
    """Return the arguments of an earlier call as the chat template wants them; the text of broken
    ones, or an object with it."""
    syntax = service.tool_syntax
    if syntax is not None and syntax.text_arguments:
        broken = isinstance(arguments, str)
        return arguments if broken else json.dumps(arguments, ensure_ascii=False)
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def merged_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose first system messages are one: many templates take no second."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]
