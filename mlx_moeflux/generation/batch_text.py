"""Text generation for many prompts: :func:`batch_generate`, with mlx-lm's signature."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import mlx.core as mx

from mlx_moeflux.backend import use_mlx
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.generation.batch import BatchGenerator, BatchReply
from mlx_moeflux.generation.prompt import Prompt, prompt_ids
from mlx_moeflux.generation.sampling import (
    LogitsProcessor,
    Sampler,
    SamplingOptions,
    check_ids,
    choose_sampling,
)
from mlx_moeflux.generation.text import end_ids, stop_texts
from mlx_moeflux.models.protocol import LoadedModel


@dataclass
class BatchStats:
    """Cost of a call: times in seconds, peak_memory in GB, experts: the store's statistics."""

    prompt_tokens: int
    generation_tokens: int
    wall_time: float
    peak_memory: float
    experts: ExpertStats

    @property
    def tokens_per_second(self) -> float:
        """Return tokens of all replies by wall time, prefill included."""
        return self.generation_tokens / self.wall_time if self.wall_time else 0.0


@dataclass
class BatchResponse:
    """Replies in the order of the prompts.

    caches, token_ids, logprobs (of the chosen tokens): If requested, else None. Ids and logprobs
    leave out the token that ended a reply; caches contain it.
    """

    texts: list[str]
    stats: BatchStats
    caches: list[Any] | None = None
    token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None


def batch_generate(
    model: LoadedModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    prompt_caches: Sequence[Any] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Iterable[int] = (),
    seed: int | None = None,
    completion_batch_size: int = 32,
    prefill_batch_size: int = 8,
    prefill_step_size: int = 2048,
    prompt_cache: PromptCache | None = None,
    **options: Unpack[SamplingOptions],
) -> BatchResponse:
    """Generate a reply to every prompt, in any form that
    :func:`~mlx_moeflux.generation.text.generate` takes.

    prompt_caches: States to continue from, which do not change. max_tokens: One limit for all, or
    one for each. verbose: Print how many are done. completion_batch_size, prefill_batch_size,
    prefill_step_size, prompt_cache: See :class:`~mlx_moeflux.generation.batch.BatchGenerator`;
    larger batches read each expert fewer times. The others: as for one prompt.

    Raises:
        InputError, CacheError: As for one prompt; raised before anything is generated.
    """
    use_mlx()
    sampler, processors = choose_sampling(sampler, logits_processors, options)
    ids = [prompt_ids(model, tokenizer, prompt) for prompt in prompts]
    stops = stop_texts(stop)
    limits = [max_tokens] * len(ids) if isinstance(max_tokens, int) else list(max_tokens)
    if seed is not None:
        mx.random.seed(seed % 2**64)
    before = model.store.stats().snapshot()
    mx.reset_peak_memory()
    began = time.perf_counter()
    with BatchGenerator(
        model,
        stop_ids=end_ids(tokenizer) | set(check_ids("stop_ids", stop_ids)),
        sampler=sampler,
        logits_processors=processors,
        completion_batch_size=completion_batch_size,
        prefill_batch_size=prefill_batch_size,
        prefill_step_size=prefill_step_size,
        keep_states=return_prompt_caches,
        prompt_cache=prompt_cache,
    ) as generator:
        uids = generator.insert(ids, limits, caches=prompt_caches)
        replies = {uid: _Reply(tokenizer, stops, logprobs=return_logprobs) for uid in uids}
        _run(generator, replies, verbose=verbose)
    done = [replies[uid] for uid in uids]
    stats = BatchStats(
        prompt_tokens=sum(map(len, ids)),
        generation_tokens=sum(reply.count for reply in done),
        wall_time=time.perf_counter() - began,
        peak_memory=mx.get_peak_memory() / 1e9,
        experts=model.store.stats().since(before),
    )
    if verbose:
        print(_summary(stats))  # noqa: T201
    return BatchResponse(
        [reply.text() for reply in done],
        stats,
        caches=[reply.state for reply in done] if return_prompt_caches else None,
        token_ids=[reply.ids for reply in done] if return_token_ids else None,
        logprobs=[reply.logprobs for reply in done] if return_logprobs else None,
    )


class _Reply:
    def __init__(self, tokenizer: Any, stops: tuple[str, ...], *, logprobs: bool):
        self._tokenizer, self._stops = tokenizer, stops
        self._keep_logprobs = logprobs
        self.ids: list[int] = []
        self.logprobs: list[Any] = []
        self.state, self.count = None, 0

    def add(self, reply: BatchReply) -> bool:
        """Append a token; return True if a stop text ends the reply here."""
        self.count += 1
        if reply.finish_reason is not None:
            self.state = reply.prompt_cache
        if reply.finish_reason != "stop":
            self.ids.append(reply.token)
            if self._keep_logprobs:
                self.logprobs.append(reply.logprobs[reply.token].item())
        if not self._stops:
            return False
        # A character has at most four tokens.
        tail = self._tokenizer.decode(self.ids[-4 * max(map(len, self._stops)) - 4 :])
        return any(stop in tail for stop in self._stops)

    def text(self) -> str:
        text = self._tokenizer.decode(self.ids)
        return text[: min((i for i in map(text.find, self._stops) if i >= 0), default=len(text))]


def _run(generator: BatchGenerator, replies: dict[int, _Reply], *, verbose: bool) -> None:
    done = 0
    while current := generator.next():
        ended = set()
        for reply in current:
            if reply.uid in ended:
                continue  # a draft behind a stop text
            stopped = replies[reply.uid].add(reply)
            if stopped and reply.finish_reason is None:
                states = generator.remove([reply.uid], return_prompt_caches=generator.keep_states)
                replies[reply.uid].state = states.get(reply.uid)
            if stopped or reply.finish_reason:
                ended.add(reply.uid)
                done += 1
                if verbose:
                    print(f"{done} of {len(replies)} replies", end="\r", flush=True)  # noqa: T201


def _summary(stats: BatchStats) -> str:
    return (
        f"{stats.prompt_tokens} prompt tokens, {stats.generation_tokens} generated in "
        f"{stats.wall_time:.1f} s ({stats.tokens_per_second:.1f} tok/s); "
        f"peak memory {stats.peak_memory:.3f} GB; "
        f"{stats.experts.total.bytes_read / 1e9:.3f} GB read"
    )
