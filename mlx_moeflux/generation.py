"""Prompt in, text out: prefill and decode over ids, then text, then one string.

:func:`generate_step` knows ids only; :func:`stream_generate` adds text and timing in mlx-lm's
terms; :func:`generate` returns the string.
"""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import transaction
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.experts.stats import ExpertStats
from mlx_moeflux.sampling import LogitsProcessor, Sampler, make_logits_processors, make_sampler

Prompt = str | Sequence[int] | mx.array | Sequence[Mapping[str, Any]]
Progress = Callable[[int, int], None]

# MLX keeps freed buffers; as many steps between clearing them as mlx-lm takes.
CLEAR_EVERY = 256

_SAMPLER_OPTIONS = frozenset(inspect.signature(make_sampler).parameters)
_PROCESSOR_OPTIONS = frozenset(inspect.signature(make_logits_processors).parameters)


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
    leaves `prompt_cache` as it was; so does a step, and then the cache stands after the last
    token that was yielded.

    Evaluates: one step ahead of the caller.
    """
    cache = model.make_cache() if prompt_cache is None else prompt_cache
    sampler = sampler or make_sampler()
    tokens = prompt

    def step(inputs: mx.array) -> tuple[mx.array, mx.array]:
        """inputs ``[T]`` -> token ``[1]``, logprobs ``[V]``; both scheduled, not awaited."""
        logits = model(inputs[None], cache=cache, last_only=True)[:, -1]  # [1, V]
        for processor in logits_processors:
            logits = processor(tokens, logits)
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = sampler(logprobs)
        mx.async_eval(token, logprobs)
        return token, logprobs[0]

    with model.lock, transaction(cache):
        total = prompt.shape[0]
        size = prefill_step_size or total
        report = prompt_progress_callback or (lambda done, total: None)
        report(0, total)
        start = 0
        while total - start > size:
            model(prompt[None, start : start + size], cache=cache, last_only=True)
            mx.eval([entry.state for entry in cache])
            mx.clear_cache()
            start += size
            report(start, total)
        if max_tokens == 0:
            model(prompt[None, start:], cache=cache, last_only=True)
            mx.eval([entry.state for entry in cache])
            return
        token, logprobs = step(prompt[start:])
        mx.eval(token, [entry.state for entry in cache])
        report(total, total)
    # One step ahead hides the host's work behind the GPU's. On the CPU there is nothing to hide,
    # and a pending reader would keep MLX from writing the key-value buffers in place.
    ahead = mx.default_device() != mx.cpu
    count = 0
    while True:
        count += 1
        if not ahead:
            mx.eval(token)
        last = count == max_tokens
        if not last:
            with model.lock:
                if logits_processors:
                    tokens = mx.concatenate([tokens, token.astype(tokens.dtype)])
                following = step(token)
        yield token.item(), logprobs
        if last:
            return
        if count % CLEAR_EVERY == 0:
            mx.clear_cache()
        token, logprobs = following


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    *,
    max_tokens: int = 256,
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
        stop: Texts that end the reply and are not part of it. stop_ids: More ids that end it.
        tools, template_options: For the chat template.
        prompt_cache: Of ``model.make_cache()``; grows by the prompt and the reply.

    Raises:
        InputError: The prompt or an option cannot be used. CacheError: It exceeds the context.
        ExpertFileError: An expert could not be read; the cache is as :func:`generate_step` says.
    """
    sampler, processors = _choose_sampling(sampler, logits_processors, options)
    ids = prompt_ids(model, tokenizer, prompt, tools=tools, options=template_options)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(not isinstance(text, str) or not text for text in stops):
        raise InputError("a stop string is empty or no string; leave it out.")
    room = _room(model, prompt_cache, len(ids))
    if max_tokens < -1:
        raise InputError(
            f"max_tokens is {max_tokens}; give a number from 0 up, or -1 for no limit."
        )
    limit = room if max_tokens == -1 else min(max_tokens, room)
    if seed is not None:
        mx.random.seed(seed)
    ends = set(tokenizer.eos_token_ids) | set(stop_ids)
    return _stream(
        model,
        tokenizer.detokenizer(),
        ends,
        StopText(stops),
        store=model.store,
        prompt_tokens=len(ids),
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
    model: Any,
    detokenizer: Any,
    ends: set[int],
    stop: StopText,
    *,
    store: Any,
    prompt_tokens: int,
    steps: Iterator[tuple[int, mx.array]],
) -> Iterator[GenerationResponse]:
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
            if stop.found:
                yield response(text, "stop")
                return
            yield response(text)
        rest = stop.finish(detokenizer.finish())
        yield response(rest, "stop" if stop.found else "length")
    finally:
        steps.close()


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    *,
    verbose: bool = False,
    return_response: bool = False,
    **options: Any,
) -> str | GenerationResponse:
    """The whole reply as a string.

    verbose: Print the text as it comes, and the speed. return_response: Return the last
    :class:`GenerationResponse` with the whole text and the expert statistics instead. options:
    Those of :func:`stream_generate`.
    """
    parts, last = [], None
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


class StopText:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.found = tuple(stops), "", False

    def add(self, text: str) -> str:
        """What may be shown now; sets `found` once a stop string is complete."""
        self._held += text
        hits = [i for i in (self._held.find(stop) for stop in self._stops) if i >= 0]
        if hits:
            self.found = True
            shown, self._held = self._held[: min(hits)], ""
            return shown
        held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - held]
        self._held = self._held[len(self._held) - held :]
        return shown

    def finish(self, text: str) -> str:
        """The rest when no more comes."""
        shown = self.add(text)
        if self.found:
            return shown
        rest, self._held = self._held, ""
        return shown + rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )


def prompt_ids(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """A prompt of any accepted form as ids, checked against the vocabulary.

    Raises:
        InputError: It is empty, of another type, or an id is out of range.
    """
    if isinstance(prompt, str):
        framed = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        ids = tokenizer.encode(prompt, add_special_tokens=framed)
    elif isinstance(prompt, mx.array):
        if prompt.ndim != 1 or not mx.issubdtype(prompt.dtype, mx.integer):
            raise InputError(
                f"the prompt is {prompt.dtype} {list(prompt.shape)}; expected ids [T]."
            )
        ids = prompt.tolist()
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt):
        ids = tokenizer.apply_chat_template(prompt, tools=tools, **dict(options or {}))
    else:
        ids = list(prompt) if isinstance(prompt, Iterable) else prompt
        if not isinstance(ids, list) or any(not hasattr(i, "__index__") for i in ids):
            raise InputError(
                f"the prompt is a {type(prompt).__name__}; expected text, ids, or messages."
            )
        ids = [int(i) for i in ids]
    if not ids:
        raise InputError("the prompt is empty; give at least one token.")
    vocabulary = model.config.vocab_size
    for i in ids:
        if not 0 <= i < vocabulary:
            raise InputError(f"token id {i} is out of range; the vocabulary has {vocabulary}.")
    return ids


def _room(model: Any, cache: list[Any] | None, prompt_tokens: int) -> int:
    """Tokens that may follow the prompt."""
    context = getattr(model, "max_context", None) or model.config.max_position_embeddings
    used = max((_position(entry) for entry in cache or ()), default=0)
    if used + prompt_tokens > context:
        raise CacheError(
            f"{used} tokens in the cache and a prompt of {prompt_tokens} exceed the context of "
            f"{context}; shorten the prompt or raise max_context."
        )
    return context - used - prompt_tokens + 1


def _position(entry: Any) -> int:
    offset = entry.offset
    return int(offset.max().item()) if isinstance(offset, mx.array) else int(offset)


def _choose_sampling(
    sampler: Sampler | None,
    processors: Sequence[LogitsProcessor] | None,
    options: dict[str, Any],
) -> tuple[Sampler, list[LogitsProcessor]]:
    known = _SAMPLER_OPTIONS | _PROCESSOR_OPTIONS
    for name in options:
        if name not in known:
            every = known | set(inspect.signature(stream_generate).parameters) - {"options"}
            near = difflib.get_close_matches(name, every, n=1)
            hint = (
                f"; did you mean '{near[0]}'?"
                if near
                else f"; there are {', '.join(sorted(known))}."
            )
            raise InputError(f"nothing is called '{name}'{hint}")
    ours = {k: v for k, v in options.items() if k in _SAMPLER_OPTIONS}
    theirs = {k: v for k, v in options.items() if k in _PROCESSOR_OPTIONS}
    for given, plain, what in (
        (sampler, ours, "sampler"),
        (processors, theirs, "logits_processors"),
    ):
        if given is not None and plain:
            raise InputError(f"give either {what} or '{next(iter(plain))}', not both.")
    return (
        sampler or make_sampler(**ours),
        list(processors) if processors is not None else make_logits_processors(**theirs),
    )
