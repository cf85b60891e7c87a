"""Text generation: :func:`stream_generate` yields text and timing, :func:`generate` a string.

:func:`~mlx_moeflux.generation.loop.generate_step` computes the ids.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import mlx.core as mx

from mlx_moeflux.backend import use_mlx
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.checks import check_callable, check_integer
from mlx_moeflux.detokenizer import PieceDetokenizer, StopText
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.experts.streaming.warm_up import warm_up
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.generation.loop import Progress, generate_step
from mlx_moeflux.generation.prompt import Prompt, prompt_ids, turn_end
from mlx_moeflux.generation.sampling import (
    LogitsProcessor,
    Sampler,
    SamplingOptions,
    check_ids,
    choose_sampling,
)
from mlx_moeflux.models.protocol import LoadedModel
from mlx_moeflux.tokenizer import Tokenizer


@dataclass
class GenerationResponse:
    """One step of a generation, with mlx-lm's fields.

    text: New text, may be empty.
    token: Its id.
    logprobs: ``[V]``.
    from_draft: Whether the token was read as a draft.
    prompt_tps: Tokens of the prompt a second until its logits are known.
    generation_tps: Tokens of the reply, the first one included, a second from there on.
    peak_memory: MLX's peak in GB (10^9 bytes).
    finish_reason: "stop", "length", or None before the last.
    experts: The store's statistics of this call, on the last.
    cached_tokens: Tokens of the prompt that a prompt cache supplied.
    """

    text: str
    token: int
    logprobs: mx.array | None
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    experts: ExpertStats | None = None
    cached_tokens: int = 0


def stream_generate(
    model: LoadedModel,
    tokenizer: Any,
    prompt: Prompt,
    max_tokens: int = 256,
    *,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Iterable[int] = (),
    seed: int | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    template_options: Mapping[str, Any] | None = None,
    prompt_cache: list[Any] | PromptCache | None = None,
    breakpoints: Iterable[int] = (),
    prefill_step_size: int | None = None,
    prompt_progress_callback: Progress | None = None,
    **options: Unpack[SamplingOptions],
) -> Generator[GenerationResponse, None, None]:
    """Generate from a prompt: text (encoded as it is), ids, or messages (the template applies).

    Args:
        sampler, logits_processors: mlx-lm's callables, instead of plain options.
        options: Those of :func:`~mlx_moeflux.generation.sampling.make_sampler` and
            :func:`~mlx_moeflux.generation.sampling.make_logits_processors`, such as ``temp=0.7,
            top_p=0.9``.
        max_tokens: Largest number of tokens of the reply; -1 allows what the context has room for.
        stop: Texts that end the reply and are not part of it. stop_ids: More ids that end it.
        seed: Seeds the random state of the thread that iterates, when iteration begins.
        tools, template_options: Passed to the chat template.
        prompt_cache: A state of ``model.make_cache()``, which grows by the prompt and the tokens
            yielded. Or a :class:`~mlx_moeflux.cache.prompt.cache.PromptCache`, which supplies the
            longest known beginning of the prompt and stores this one. breakpoints: More positions
            in the prompt that it stores.
        prompt_progress_callback: See :func:`~mlx_moeflux.generation.loop.generate_step`.

    Raises:
        InputError: The prompt or an option cannot be used; a misspelt option is named with the
            nearest known one. CacheError: The prompt exceeds the context.
        ExpertFileError: An expert could not be read; the cache is as :func:`generate_step` says.
    """
    use_mlx()
    check_numbers(max_tokens, prefill_step_size, seed)
    checked = ["logit_bias"] + (["xtc_special_tokens"] if options.get("xtc_probability") else [])
    for name in checked:
        if (given := options.get(name)) is not None:
            check_ids(name, given, model.config.vocab_size)
    check_callable("prompt_progress_callback", prompt_progress_callback)
    breakpoints = check_ids("breakpoints", breakpoints, what="position")
    others = (*GenerationOptions.__annotations__, "verbose", "return_response")
    sampler, processors = choose_sampling(sampler, logits_processors, options, others=others)
    ids = prompt_ids(model, tokenizer, prompt, tools=tools, options=template_options)
    resumed = cache = None
    if isinstance(prompt_cache, PromptCache):
        room = _room(model, None, len(ids))
        end = turn_end(tokenizer, prompt, ids, tools=tools, options=template_options)
        positions = {*breakpoints, *([end] if end else [])}
        with model.runtime.lock:
            resumed = prompt_cache.resume(model, ids, breakpoints=positions)
        warm_up(model.store, resumed.experts)
    else:
        cache = prompt_cache
        if cache is not None:
            model.states.check(cache)
        room = _room(model, cache, len(ids))
    limit = room if max_tokens == -1 else min(max_tokens, room)
    read_at: list[float] = []
    drafted: list[bool] = []
    steps = generate_step(
        mx.array(ids, mx.int32),
        model,
        max_tokens=limit,
        sampler=sampler,
        logits_processors=processors,
        prompt_cache=cache,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=prompt_progress_callback,
        resumed=resumed,
        on_prompt_read=lambda: read_at.append(time.perf_counter()),
        on_draft=lambda: drafted.append(True),
    )
    ends = end_ids(tokenizer) | set(check_ids("stop_ids", stop_ids))
    stops, detokenizer = StopText(stop_texts(stop)), _detokenizer(tokenizer)

    def stream() -> Generator[GenerationResponse, None, None]:
        if seed is not None:
            # MLX has one random state per thread: seed in the thread that draws.
            mx.random.seed(seed % 2**64)
        before = model.store.stats().snapshot()
        mx.reset_peak_memory()
        began = time.perf_counter()
        count, token, logprobs = 0, -1, None

        def response(text: str, finish: str | None = None) -> GenerationResponse:
            prompt_seconds, seconds = read_at[0] - began, time.perf_counter() - read_at[0]
            return GenerationResponse(
                text=text,
                token=token,
                logprobs=logprobs,
                from_draft=bool(drafted),
                prompt_tokens=len(ids),
                prompt_tps=len(ids) / prompt_seconds if prompt_seconds else 0.0,
                generation_tokens=count,
                generation_tps=count / seconds if seconds else 0.0,
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=finish,
                experts=model.store.stats().since(before) if finish else None,
                cached_tokens=resumed.position if resumed else 0,
            )

        try:
            for token, logprobs in steps:  # noqa: B007
                count += 1
                if token in ends:
                    yield response(stops.finish(detokenizer.finish()), "stop")
                    return
                text = stops.add(detokenizer.add(token))
                if not stops.found and count == limit:
                    text += stops.finish(detokenizer.finish())
                if stops.found or count == limit:
                    yield response(text, "stop" if stops.found else "length")
                    return
                yield response(text)
                drafted.clear()
            yield response("", "length")
        finally:
            steps.close()

    return stream()


class GenerationOptions(SamplingOptions, total=False):
    """Keywords of :func:`stream_generate` that :func:`generate` passes on."""

    max_tokens: int
    sampler: Sampler | None
    logits_processors: Sequence[LogitsProcessor] | None
    stop: str | Sequence[str]
    stop_ids: Iterable[int]
    seed: int | None
    tools: Sequence[dict[str, Any]] | None
    template_options: Mapping[str, Any] | None
    prompt_cache: list[Any] | PromptCache | None
    breakpoints: Iterable[int]
    prefill_step_size: int | None
    prompt_progress_callback: Progress | None


@overload
def generate(
    model: LoadedModel,
    tokenizer: Any,
    prompt: Prompt,
    verbose: bool = False,
    *,
    return_response: Literal[False] = False,
    **options: Unpack[GenerationOptions],
) -> str: ...
@overload
def generate(
    model: LoadedModel,
    tokenizer: Any,
    prompt: Prompt,
    verbose: bool = False,
    *,
    return_response: Literal[True],
    **options: Unpack[GenerationOptions],
) -> GenerationResponse: ...
def generate(model, tokenizer, prompt, verbose=False, *, return_response=False, **options):
    """Return the whole reply as a string.

    verbose: Print the text as it comes, and the speed. return_response: Return the last
    :class:`GenerationResponse` instead, with the whole text and the expert statistics. options:
    Those of :func:`stream_generate`. A second call on the same model waits for the first.
    """
    last: Any = None
    parts = []
    with model.runtime.lock:
        for last in stream_generate(model, tokenizer, prompt, **options):
            parts.append(last.text)
            if verbose:
                print(last.text, end="", flush=True)  # noqa: T201
    if verbose:
        print(f"\n{summary(last)}")  # noqa: T201
    text = "".join(parts)
    if not return_response:
        return text
    last.text = text
    return last


def summary(last: GenerationResponse) -> str:
    """Return one line of speeds, peak memory, hit rate and bytes read."""
    assert last.experts is not None
    total = last.experts.total
    return (
        f"prompt {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tok/s; "
        f"generation {last.generation_tokens} tokens, {last.generation_tps:.1f} tok/s; "
        f"peak memory {last.peak_memory:.3f} GB; hit rate {100 * total.hit_rate:.1f} %; "
        f"{total.bytes_read / 1e9:.3f} GB read"
    )


def check_numbers(max_tokens: int, prefill_step_size: int | None, seed: int | None) -> None:
    """Raise an InputError if a number is of another type or out of range."""
    check_integer("max_tokens", max_tokens, -1, hint=" (-1: no limit)")
    if prefill_step_size is not None:
        check_integer("prefill_step_size", prefill_step_size, 1)
    if seed is not None:
        check_integer("seed", seed, 0)


def stop_texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings as a tuple; raise an InputError if one is empty or no string."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Iterable):
        raise InputError(f"stop is a {type(stop).__name__}; give texts.")
    stops = tuple(stops)
    if any(not isinstance(text, str) or not text for text in stops):
        raise InputError("a stop string is empty or no string; leave it out.")
    return stops


def _detokenizer(tokenizer: Any) -> Any:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.detokenizer()
    # transformers' and mlx-lm's tokenizers have the same two methods.
    return PieceDetokenizer(tokenizer.decode, tokenizer.convert_ids_to_tokens)


def end_ids(tokenizer: Any) -> set[int]:
    """Return the ids that end a reply."""
    return set(getattr(tokenizer, "eos_token_ids", None) or [tokenizer.eos_token_id]) - {None}


def _room(model: LoadedModel, cache: list[Any] | None, prompt_tokens: int) -> int:
    """Return how many tokens may follow the prompt; a caller's cache stores the last one too."""
    context, used = model.context_left(), model.context_left() - model.context_left(cache)
    if used + prompt_tokens > context:
        raise CacheError(
            f"{used} tokens in the cache and a prompt of {prompt_tokens} exceed the context of "
            f"{context}; shorten the prompt or raise max_context."
        )
    return context - used - prompt_tokens + (cache is None)
