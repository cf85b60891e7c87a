"""Prompt in, text out: prefill and decode over ids, then text, then one string.

:func:`generate_step` knows ids only; :func:`stream_generate` adds text and timing in mlx-lm's
terms; :func:`generate` returns the string.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import transaction
from mlx_moeflux.detokenizer import PieceDetokenizer, StopText
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.experts.stats import ExpertStats
from mlx_moeflux.memory import housekept
from mlx_moeflux.prompt import Prompt, prompt_ids
from mlx_moeflux.sampling import (
    LogitsProcessor,
    Sampler,
    check_ids,
    check_integer,
    choose_sampling,
    make_sampler,
)
from mlx_moeflux.tokenizer import Tokenizer

Progress = Callable[[int, int], None]

# MLX keeps freed buffers; as many steps between clearing them as mlx-lm takes.
CLEAR_EVERY = 256


@dataclass
class GenerationResponse:
    """One step's text, with mlx-lm's fields.

    text: New text, may be empty. token: Its id. logprobs: ``[V]``. prompt_tps, generation_tps:
    Tokens per second. peak_memory: GB (10^9 bytes) that MLX held at most. finish_reason: "stop",
    "length", or None before the last. experts: The store's account of this call, on the last.
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


@housekept
def generate_step(
    prompt: mx.array,
    model: Any,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int | None = None,
    prompt_progress_callback: Progress | None = None,
) -> Iterator[tuple[int, mx.array]]:
    """Yield (token, logprobs ``[V]``) for a prompt of ids ``[T]``; max_tokens -1 is no limit.

    prefill_step_size: Tokens a call. None: the whole prompt at once, so that every expert is read
    at most once; the model bounds its own scratch.

    A step is prepared while the one before it is used. A prefill that fails or is interrupted
    leaves `prompt_cache` as it was. Afterwards it stands behind the last token that was yielded,
    whether the end was a limit, the caller or a failure.

    Evaluates: one step ahead of the caller.
    """
    cache = model.make_cache() if prompt_cache is None else prompt_cache
    loop = _Loop(model, cache, sampler or make_sampler(), list(logits_processors), prompt)
    with model.lock, transaction(cache):
        following = loop.prefill(
            prefill_step_size or prompt.shape[0], prompt_progress_callback, stop=max_tokens == 0
        )
    # One step ahead hides the host's work behind the GPU's. On the CPU there is nothing to hide,
    # and a pending reader would keep MLX from writing the key-value buffers in place.
    ahead = mx.default_device() != mx.cpu
    count = 0
    while count != max_tokens:
        count += 1
        token, logprobs = following
        if not ahead:
            mx.eval(token)
        # An interrupt may come while a result is awaited, when the cache has moved on already.
        with model.lock, transaction(cache):
            if count != max_tokens:
                following = loop.step(token)
            elif prompt_cache is not None:
                loop.read(token)
            value = token.item()
        yield value, logprobs
        if count % CLEAR_EVERY == 0:
            mx.clear_cache()


class _Loop:
    """A model, its cache and the tokens that went into it."""

    def __init__(
        self,
        model: Any,
        cache: list[Any],
        sampler: Sampler,
        processors: list[LogitsProcessor],
        prompt: mx.array,
    ):
        self._model, self._cache = model, cache
        self._sampler, self._processors = sampler, processors
        self._prompt, self._tokens = prompt, None

    def prefill(
        self, size: int, progress: Progress | None, *, stop: bool
    ) -> tuple[mx.array, mx.array] | None:
        """Read the prompt, `size` tokens a call; the first step's result, or None with `stop`."""
        prompt, report = self._prompt, progress or (lambda done, total: None)
        start, total = 0, prompt.shape[0]
        report(0, total)
        while total - start > size:
            self.read(prompt[start : start + size])
            mx.clear_cache()
            start += size
            report(start, total)
        if stop:
            self.read(prompt[start:])
            return None
        first = self.step(prompt[start:])
        mx.eval(first, [entry.state for entry in self._cache])
        report(total, total)
        return first

    def read(self, inputs: mx.array) -> None:
        """inputs ``[T]`` go into the cache, and nothing is left lazy.

        The last layer's experts are computed too, which the cache does not need: the store waits
        for whatever reads its bank, and another thread could not evaluate it later.
        """
        logits = self._model(inputs[None], cache=self._cache, last_only=True)
        mx.eval(logits, [entry.state for entry in self._cache])
        self._model.hand_over()

    def step(self, inputs: mx.array) -> tuple[mx.array, mx.array]:
        """inputs ``[T]`` -> token ``[1]``, logprobs ``[V]``; both scheduled, not awaited."""
        raw = self._model(inputs[None], cache=self._cache, last_only=True)[:, -1]  # [1, V]
        try:
            logits = raw
            if self._processors:
                seen = self._tokens
                self._tokens = (
                    self._prompt
                    if seen is None
                    else mx.concatenate([seen, inputs.astype(seen.dtype)])
                )
                for processor in self._processors:
                    logits = processor(self._tokens, logits)
            logits = logits.astype(mx.float32)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            token = self._sampler(logprobs)
            mx.async_eval(token, logprobs)
            self._model.hand_over()
        except BaseException:
            mx.eval(raw)  # as read() does, and why
            raise
        return token, logprobs[0]


def stream_generate(
    model: Any,
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
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int | None = None,
    prompt_progress_callback: Progress | None = None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """Generate from a prompt: text (taken as it is), ids, or messages (the template is applied).

    Args:
        sampler, logits_processors: mlx-lm's callables; or instead plain options:
        options: Those of :func:`~mlx_moeflux.sampling.make_sampler` and
            :func:`~mlx_moeflux.sampling.make_logits_processors`, such as ``temp=0.7, top_p=0.9``.
        max_tokens: Most tokens of the reply; -1 is what the context has room for.
        stop: Texts that end the reply and are not part of it. stop_ids: More ids that end it.
        seed: Of the drawing thread's generator, set when the first token is asked for.
        tools, template_options: For the chat template.
        prompt_cache: Of ``model.make_cache()``; grows by the prompt and the tokens yielded.

    Raises:
        InputError: The prompt or an option cannot be used. CacheError: It exceeds the context.
        ExpertFileError: An expert could not be read; the cache is as :func:`generate_step` says.
    """
    _check_numbers(max_tokens, prefill_step_size, seed)
    for name in ("logit_bias", "xtc_special_tokens"):
        if options.get(name) is not None:
            check_ids(name, options[name], model.config.vocab_size)
    others = {
        *inspect.signature(stream_generate).parameters,
        *inspect.signature(generate).parameters,
    }
    sampler, processors = choose_sampling(sampler, logits_processors, options, others=others)
    ids = prompt_ids(model, tokenizer, prompt, tools=tools, options=template_options)
    room = _room(model, prompt_cache, len(ids))
    limit = room if max_tokens == -1 else min(max_tokens, room)
    return _stream(
        _detokenizer(tokenizer),
        _end_ids(tokenizer) | set(check_ids("stop_ids", stop_ids)),
        StopText(_stop_texts(stop)),
        store=model.store,
        prompt_tokens=len(ids),
        limit=limit,
        seed=seed,
        steps=generate_step(
            mx.array(ids, mx.int32),
            model,
            max_tokens=limit,
            sampler=sampler,
            logits_processors=processors,
            prompt_cache=prompt_cache,
            prefill_step_size=prefill_step_size,
            prompt_progress_callback=prompt_progress_callback,
        ),
    )


def _stream(
    detokenizer: Any,
    ends: set[int],
    stop: StopText,
    *,
    store: Any,
    prompt_tokens: int,
    limit: int,
    seed: int | None,
    steps: Iterator[tuple[int, mx.array]],
) -> Iterator[GenerationResponse]:
    if seed is not None:
        # Each thread has a random state of its own: here it is that of the drawing one.
        mx.random.seed(seed % 2**64)
    before = store.stats().snapshot()
    mx.reset_peak_memory()
    began = time.perf_counter()
    prompt_seconds, count, token, logprobs = 0.0, 0, -1, None

    def response(text: str, finish: str | None = None) -> GenerationResponse:
        seconds = time.perf_counter() - began - prompt_seconds
        return GenerationResponse(
            text=text,
            token=token,
            logprobs=logprobs,
            from_draft=False,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tokens / prompt_seconds if prompt_seconds else 0.0,
            generation_tokens=count,
            generation_tps=count / seconds if seconds else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish,
            experts=store.stats().since(before) if finish else None,
        )

    try:
        for token, logprobs in steps:  # noqa: B007
            if not count:
                prompt_seconds = time.perf_counter() - began
            count += 1
            if token in ends:
                yield response(stop.finish(detokenizer.finish()), "stop")
                return
            text = stop.add(detokenizer.add(token))
            if not stop.found and count == limit:
                text += stop.finish(detokenizer.finish())
            if stop.found or count == limit:
                yield response(text, "stop" if stop.found else "length")
                return
            yield response(text)
        yield response("", "length")
    finally:
        steps.close()


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    verbose: bool = False,
    *,
    return_response: bool = False,
    **options: Any,
) -> str | GenerationResponse:
    """The whole reply as a string.

    verbose: Print the text as it comes, and the speed. return_response: Return the last
    :class:`GenerationResponse` with the whole text and the expert statistics instead. options:
    Those of :func:`stream_generate`. A second call on the same model waits for the first.
    """
    parts, last = [], None
    with model.lock:
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
    """One line: speeds, peak memory, and what the experts cost."""
    total = last.experts.total
    return (
        f"prompt {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tok/s; "
        f"generation {last.generation_tokens} tokens, {last.generation_tps:.1f} tok/s; "
        f"peak memory {last.peak_memory:.3f} GB; hit rate {100 * total.hit_rate:.1f} %; "
        f"{total.bytes_read / 1e9:.3f} GB read"
    )


def _check_numbers(max_tokens: int, prefill_step_size: int | None, seed: int | None) -> None:
    check_integer("max_tokens", max_tokens, -1, hint=" (-1: no limit)")
    if prefill_step_size is not None:
        check_integer("prefill_step_size", prefill_step_size, 1)
    if seed is not None:
        check_integer("seed", seed, 0)


def _stop_texts(stop: str | Sequence[str]) -> tuple[str, ...]:
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


def _end_ids(tokenizer: Any) -> set[int]:
    return set(getattr(tokenizer, "eos_token_ids", None) or [tokenizer.eos_token_id]) - {None}


def _room(model: Any, cache: list[Any] | None, prompt_tokens: int) -> int:
    """Tokens that may follow the prompt; in a caller's cache the last one needs a place too."""
    context = getattr(model, "max_context", None) or model.config.max_position_embeddings
    used = max((_position(entry) for entry in cache or ()), default=0)
    if used + prompt_tokens > context:
        raise CacheError(
            f"{used} tokens in the cache and a prompt of {prompt_tokens} exceed the context of "
            f"{context}; shorten the prompt or raise max_context."
        )
    return context - used - prompt_tokens + (cache is None)


def _position(entry: Any) -> int:
    offset = entry.offset
    return int(offset.max().item()) if isinstance(offset, mx.array) else int(offset)
