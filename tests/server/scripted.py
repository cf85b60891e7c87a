"""A server whose model says what a test wants: every other token is made impossible."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from mlx_moeflux.server.engine import Job, Token
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.request import Defaults
from tests.server.conftest import Running, served


class Forced:
    """Logits processor that allows only the ids of a reply, one after the other."""

    def __init__(self, prompt_tokens: int, ids: list[int]):
        self._prompt_tokens, self._ids = prompt_tokens, ids

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        token = self._ids[tokens.size - self._prompt_tokens]
        return mx.where(mx.arange(logits.shape[-1]) == token, logits, -mx.inf)


class Script:
    """Replies of a model. texts: In order; the last one is repeated.

    prompts, jobs: What was asked, as text and as the engine got it.
    """

    def __init__(self, *texts: str):
        self.texts = list(texts)
        self.prompts: list[str] = []
        self.jobs: list[Job] = []

    def take(self, tokenizer: Any, job: Job) -> None:
        """Note a job, and make it say the next text."""
        self.prompts.append(tokenizer.decode(job.prompt))
        self.jobs.append(job)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        job.processors = [*job.processors, Forced(len(job.prompt), ids)]


@contextlib.contextmanager
def saying(model: Any, tokenizer: Any, script: Script, **options: Any) -> Iterator[Running]:
    """A server that follows a script; all but the choice of tokens is real."""
    options = {"reasoning_parser": "think", "defaults": Defaults(max_tokens=4096), **options}
    with served(model, tokenizer, **options) as server:
        submit: Callable[[Any], None] = server.service.engine.submit

        def scripted(jobs: list[Job]) -> None:
            for job in jobs:
                script.take(tokenizer, job)
            submit(jobs)

        server.service.engine.submit = scripted
        yield server


@contextlib.contextmanager
def spoken(
    model: Any, tokenizer: Any, text: str, *, fails: bool = False, **options: Any
) -> Iterator[Running]:
    """A server whose engine says a text up to the limit, without the model. fails: The engine
    fails behind the text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    failure = RequestError("the engine failed.", status=500)
    last = Token(error=failure) if fails else Token(0, "stop")

    def submit(jobs: list[Job]) -> None:
        loop = asyncio.get_running_loop()
        for job in jobs:
            tokens = [Token(i) for i in ids[: job.limit]]
            if len(tokens) == job.limit:
                tokens[-1] = Token(tokens[-1].id, "length")
            else:
                tokens.append(last)
            for token in tokens:
                loop.call_soon(job.on_token, token)

    options = {"defaults": Defaults(max_tokens=4096), **options}
    with served(model, tokenizer, **options) as server:
        server.service.engine.submit = submit
        yield server
