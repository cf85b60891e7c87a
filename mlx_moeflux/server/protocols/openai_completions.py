"""OpenAI's completions of plain text: ``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from typing import Any

from mlx_moeflux.server.assemble import Delta
from mlx_moeflux.server.fields import Fields
from mlx_moeflux.server.protocols.openai import (
    INERT,
    LEAST_LOGPROB,
    ChunkStream,
    read_stream,
    usage,
)
from mlx_moeflux.server.request import (
    MOST_CHOICES,
    MOST_LOGPROBS,
    GenerationRequest,
    read_sampling,
    read_stop,
)
from mlx_moeflux.server.service import Generation, Service


def read(body: Fields, service: Service) -> GenerationRequest:
    """Return the request of a body; refuse what would not act."""
    service.check_model(body.text("model"))
    stream, counted = read_stream(body)
    request = GenerationRequest(
        sampling=read_sampling(body, service.options.defaults, service.vocabulary),
        prompt=_prompt(body),
        max_tokens=body.integer("max_tokens", low=1),
        n=body.integer("n", 1, low=1, high=MOST_CHOICES),
        stop=read_stop(body),
        logprobs=body.integer("logprobs", high=MOST_LOGPROBS),
        stream=stream,
        usage=counted,
    )
    body.integer("best_of", low=1, high=1)
    body.ignore(*INERT)
    body.finish()
    return request


def _prompt(body: Fields) -> str | list[int]:
    """Return the one prompt: text, or ids."""
    value = body.any("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, list) and value and all(type(i) is int for i in value):
        return value
    if not isinstance(value, str) or not value:
        raise body.wrong("prompt", "give one text or one list of ids, not empty")
    return value


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


async def reply(generation: Generation, service: Service) -> dict[str, Any]:
    """Return the body of the whole reply."""
    wanted = generation.request.logprobs is not None
    choices = [
        _choice(i, delta, _Logprobs(service).of(delta) if wanted else None)
        for i, delta in enumerate(await generation.whole())
    ]
    return {**_head(service), "choices": choices, "usage": usage(generation)}


class Stream(ChunkStream):
    """The chunks of a streamed reply."""

    def __init__(self, generation: Generation, service: Service):
        super().__init__(generation, _head(service))
        self._logprobs = [_Logprobs(service) for _ in range(generation.request.n)]

    def start(self) -> str:
        return ""

    def add(self, i: int, delta: Delta) -> str:
        wanted = self._generation.request.logprobs is not None
        return self._chunk(_choice(i, delta, self._logprobs[i].of(delta) if wanted else None))
