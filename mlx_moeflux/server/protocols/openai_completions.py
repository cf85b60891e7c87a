"""OpenAI's completions of plain text: ``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from mlx_moeflux.server.assemble import Delta
from mlx_moeflux.server.fields import Count, Positive
from mlx_moeflux.server.protocols.openai import LEAST_LOGPROB, ChunkBody, ChunkStream, usage
from mlx_moeflux.server.request import MOST_LOGPROBS, GenerationRequest
from mlx_moeflux.server.service import Generation, Service


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    ids = isinstance(value, list) and all(type(i) is int for i in value)
    if not value or not (isinstance(value, str) or ids):
        raise ValueError("give one text or one list of ids, not empty")
    return value


class Body(ChunkBody):
    """The body of a request."""

    prompt: Annotated[str | list[int], PlainValidator(_prompt)]
    logprobs: Annotated[Count, Field(le=MOST_LOGPROBS)] | None = None
    best_of: Annotated[Positive, Field(le=1)] = 1


def read(body: Body, service: Service) -> GenerationRequest:
    """Return the request of a body; refuse what would not act."""
    service.check_model(body.model)
    return GenerationRequest(
        sampling=body.sampling(service),
        prompt=body.prompt,
        max_tokens=body.max_tokens,
        n=body.n,
        stop=body.stop,
        logprobs=body.logprobs,
        stream=body.stream,
        usage=body.usage,
    )


class _Logprobs:
    """Log-probabilities of one reply in this protocol's form, with offsets in its text."""

    def __init__(self, service: Service):
        self._service, self._offset = service, 0

    def of(self, delta: Delta) -> dict[str, Any]:
        decode = self._service.tokenizer.decode
        found: dict[str, Any] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for one in delta.logprobs:
            text = decode([one.token])
            found["tokens"].append(text)
            found["token_logprobs"].append(max(one.logprob, LEAST_LOGPROB))
            top = {decode([token]): max(value, LEAST_LOGPROB) for token, value in one.top}
            found["top_logprobs"].append(top)
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return found


def _head(service: Service) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.options.name,
        "system_fingerprint": None,
    }


def _choice(i: int, delta: Delta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": i, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}


def reply(deltas: list[Delta], generation: Generation, service: Service) -> dict[str, Any]:
    """Return the body of the whole reply."""
    wanted = generation.request.logprobs is not None
    choices = [
        _choice(i, delta, _Logprobs(service).of(delta) if wanted else None)
        for i, delta in enumerate(deltas)
    ]
    return {**_head(service), "choices": choices, "usage": usage(generation)}


class Stream(ChunkStream):
    """The chunks of a streamed reply."""

    def __init__(self, generation: Generation, service: Service):
        super().__init__(generation, _head(service))
        self._logprobs = [_Logprobs(service) for _ in range(generation.request.n)]

    def start(self) -> str:
        return ""

    def wait(self) -> str:
        return self._still(_choice(0, Delta(), None))

    def add(self, i: int, delta: Delta) -> str:
        wanted = self._generation.request.logprobs is not None
        return self._chunk(_choice(i, delta, self._logprobs[i].of(delta) if wanted else None))
