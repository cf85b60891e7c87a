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
from operator import index
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import transaction
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.experts.stats import ExpertStats
from mlx_moeflux.sampling import LogitsProcessor, Sampler, make_logits_processors, make_sampler
from mlx_moeflux.stopping import StopText

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

    A step is prepared while the one before it is used. Whatever fails or is interrupted leaves
    `prompt_cache` after the last token that was yielded; before the first one, as it was. At the
    end it holds the prompt and every token that was yielded, the last one too.

    Evaluates: one step ahead of the caller.
    """
    cache = model.make_cache() if prompt_cache is None else prompt_cache
    sampler = sampler or make_sampler()
    tokens = prompt
    report = prompt_progress_callback or (lambda done, total: None)
    # One step ahead hides the host's work behind the GPU's. On the CPU there is nothing to hide,
    # and a pending reader would keep MLX from writing the key-value buffers in place.
    ahead = mx.default_device() != mx.cpu

    def step(inputs: mx.array) -> tuple[mx.array, mx.array]:
        """inputs ``[T]`` -> token ``[1]``, logprobs ``[V]``; both scheduled, not awaited."""
        logits = model(inputs[None], cache=cache, last_only=True)[:, -1]  # [1, V]
        for processor in logits_processors:
            logits = processor(tokens, logits)
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = sampler(logprobs)
        # State that stays lazy could not be used from another thread.
        kept = [] if prompt_cache is None else [entry.state for entry in cache]
        mx.async_eval(token, logprobs, kept)
        return token, logprobs[0]

    def settle(token: mx.array, count: int) -> tuple[int, tuple[mx.array, mx.array] | None]:
        """The number of the count-th token, and the step that follows it."""
        nonlocal tokens
        if not ahead:
            mx.eval(token)
        following = None
        if count != max_tokens:
            if logits_processors:
                tokens = mx.concatenate([tokens, token.astype(tokens.dtype)])
            following = step(token)
        elif prompt_cache is not None:
            model(token[None], cache=cache, last_only=True)
            mx.eval([entry.state for entry in cache])
        return token.item(), following

    with model.lock, transaction(cache):
        rest = _prefill(model, prompt, cache, size=prefill_step_size, report=report)
        if max_tokens == 0:
            model(rest[None], cache=cache, last_only=True)
        else:
            token, logprobs = step(rest)
            mx.eval(token)
        mx.eval([entry.state for entry in cache])
        report(prompt.shape[0], prompt.shape[0])
        if max_tokens == 0:
            return
        number, following = settle(token, 1)
    count = 1
    while True:
        yield number, logprobs
        if following is None:
            return
        if count % CLEAR_EVERY == 0:
            mx.clear_cache()
        count += 1
        token, logprobs = following
        with model.lock, transaction(cache):
            number, following = settle(token, count)


def _prefill(
    model: Any, prompt: mx.array, cache: list[Any], *, size: int | None, report: Progress
) -> mx.array:
    """Evaluate all of the prompt but its last `size` tokens or fewer, which are returned."""
    total, start = prompt.shape[0], 0
    size = size or total
    report(0, total)
    while total - start > size:
        model(prompt[None, start : start + size], cache=cache, last_only=True)
        mx.eval([entry.state for entry in cache])
        mx.clear_cache()
        start += size
        report(start, total)
    return prompt[start:]


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

    There is a response for each token; the last also carries what was held back.

    Raises:
        InputError: The prompt or an option cannot be used. CacheError: It exceeds the context.
        ExpertFileError: An expert could not be read; the cache is as :func:`generate_step` says.
    """
    sampler, processors = _choose_sampling(sampler, logits_processors, options)
    ids = prompt_ids(model, tokenizer, prompt, tools=tools, options=template_options)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(not isinstance(text, str) or not text for text in stops):
        raise InputError("a stop string is empty or no string; leave it out.")
    if max_tokens < -1:
        raise InputError(
            f"max_tokens is {max_tokens}; give a number from 0 up, or -1 for no limit."
        )
    if prefill_step_size is not None and prefill_step_size < 1:
        raise InputError(f"prefill_step_size is {prefill_step_size}; it must be at least 1.")
    room = _room(model, prompt_cache, len(ids), at_least=min(abs(max_tokens), 1))
    limit = room if max_tokens == -1 else min(max_tokens, room)
    clock = _PromptClock(prompt_progress_callback)
    return _stream(
        tokenizer.detokenizer(),
        set(tokenizer.eos_token_ids) | set(stop_ids),
        StopText(stops),
        store=model.store,
        prompt_tokens=len(ids),
        limit=limit,
        seed=seed,
        clock=clock,
        steps=generate_step(
            mx.array(ids, mx.int32),
            model,
            max_tokens=limit,
            sampler=sampler,
            logits_processors=processors,
            prompt_cache=prompt_cache,
            prefill_step_size=prefill_step_size,
            prompt_progress_callback=clock.report,
        ),
    )


class _PromptClock:
    """Seconds until the prompt was evaluated; the first step of decoding comes before its token."""

    def __init__(self, report: Progress | None):
        self._report, self._began, self.seconds = report, time.perf_counter(), 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def report(self, done: int, total: int) -> None:
        if done == total:
            self.seconds = time.perf_counter() - self._began
        if self._report is not None:
            self._report(done, total)

    def since(self) -> float:
        """Seconds since the prompt was evaluated."""
        return time.perf_counter() - self._began - self.seconds


def _stream(
    detokenizer: Any,
    ends: set[int],
    stop: StopText,
    *,
    store: Any,
    prompt_tokens: int,
    limit: int,
    seed: int | None,
    clock: _PromptClock,
    steps: Iterator[tuple[int, mx.array]],
) -> Iterator[GenerationResponse]:
    before = store.stats().snapshot()
    mx.reset_peak_memory()
    if seed is not None:
        # Here, because every thread draws from a state of its own.
        mx.random.seed(seed)
    count, token, logprobs = 0, -1, None
    clock.start()

    def response(text: str, finish: str | None = None) -> GenerationResponse:
        seconds = clock.since()
        return GenerationResponse(
            text=text,
            token=token,
            logprobs=logprobs,
            from_draft=False,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tokens / clock.seconds if clock.seconds else 0.0,
            generation_tokens=count,
            generation_tps=count / seconds if seconds else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish,
            experts=store.stats().since(before) if finish else None,
        )

    try:
        for token, logprobs in steps:
            count += 1
            if token in ends:
                yield response(stop.finish(detokenizer.finish()), "stop")
                return
            text = stop.add(detokenizer.add(token))
            if stop.found:
                yield response(text, "stop")
                return
            if count < limit:
                yield response(text)
                continue
            text += stop.finish(detokenizer.finish())
            yield response(text, "stop" if stop.found else "length")
            return
        yield response("", "length")
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
        reserved = {"conversation", "messages", "tokenize", "tools"} & set(options or {})
        if reserved:
            raise InputError(f"'{min(reserved)}' is no template option; it has its own place.")
        ids = tokenizer.apply_chat_template(prompt, tools=tools, **dict(options or {}))
    else:
        try:
            ids = [] if isinstance(prompt, (bytes, bytearray)) else [index(i) for i in prompt]
            unfit = isinstance(prompt, (bytes, bytearray))
        except TypeError:
            unfit = True
        if unfit:
            raise InputError(
                f"the prompt is a {type(prompt).__name__}; expected text, ids, or messages."
            )
    if not ids:
        raise InputError("the prompt is empty; give at least one token.")
    vocabulary = model.config.vocab_size
    for i in ids:
        if not 0 <= i < vocabulary:
            raise InputError(f"token id {i} is out of range; the vocabulary has {vocabulary}.")
    return ids


def _room(model: Any, cache: list[Any] | None, prompt_tokens: int, *, at_least: int) -> int:
    """Tokens that may follow the prompt."""
    context = getattr(model, "max_context", None) or model.config.max_position_embeddings
    used = max((_position(entry) for entry in cache or ()), default=0)
    room = context - used - prompt_tokens
    if room < at_least:
        raise CacheError(
            f"{used} tokens in the cache and a prompt of {prompt_tokens} leave no room in the "
            f"context of {context}; shorten the prompt or raise max_context."
        )
    return room


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
