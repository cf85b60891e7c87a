"""Parts of all of OpenAI's protocols: errors, log-probabilities, usage, content of messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mlx_moeflux.server.assemble import Delta
from mlx_moeflux.server.engine import TokenLogprobs
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.fields import Fields
from mlx_moeflux.server.service import Generation, Service

# Log-probability of a token that cannot occur; JSON has no infinity.
LEAST_LOGPROB = -9999.0

INERT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "client_metadata",
)  # fmt: skip
"""Fields of requests that change nothing in a reply."""


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


def read_stream(body: Fields) -> tuple[bool, bool]:
    """Return whether a reply is streamed, and whether its stream ends with a usage."""
    stream, options, counted = body.flag("stream"), body.object("stream_options"), False
    if options is not None:
        if not stream:
            raise RequestError("'stream_options' is for streams alone.", param="stream_options")
        counted = options.flag("include_usage")
        options.ignore("include_obfuscation")
        options.finish()
    return stream, counted


def text_of(fields: Fields, name: str, kinds: Iterable[str] = ("text",)) -> str | None:
    """Return the text of a message's content: a string, or parts of these kinds, concatenated.

    Raises:
        RequestError: A part is no text. Images and files are never fetched.
    """
    value = fields.any(name)
    if value is None or isinstance(value, str):
        return value
    texts = []
    for part in fields.objects(name):
        if (part.text("type") or "") not in kinds:
            raise part.wrong(
                "type", f"this server reads {', '.join(kinds)} alone, and fetches nothing"
            )
        texts.append(part.text("text", ""))
    return "".join(texts)


def parsed_arguments(service: Service, text: str, fields: Fields, name: str) -> Any:
    """Return the arguments of an earlier call as the chat template wants them."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        raise fields.wrong(name, "give the JSON text of an object") from None
    if not isinstance(arguments, dict):
        raise fields.wrong(name, "give the JSON text of an object")
    syntax = service.tool_syntax
    return (
        json.dumps(arguments, ensure_ascii=False) if syntax and syntax.text_arguments else arguments
    )


def merged_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose first system messages are one: many templates take no second."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]
