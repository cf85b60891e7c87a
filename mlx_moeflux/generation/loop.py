"""Prefill and decode over ids; on GPUs decode runs one step ahead of the caller, but for steps
that read drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.backend import use_mlx
from mlx_moeflux.cache import transaction
from mlx_moeflux.cache.prompt.cache import Resumed
from mlx_moeflux.checks import check_callable, check_integer
from mlx_moeflux.errors import InputError
from mlx_moeflux.generation.drafting import Drafter
from mlx_moeflux.generation.memory import with_memory_limits
from mlx_moeflux.generation.sampling import (
    LogitsProcessor,
    Sampled,
    Sampler,
    check_drawn,
    check_finite,
    check_processors,
    check_sampler,
    drawn,
    greedy,
    make_sampler,
    normalised,
    processed,
)
from mlx_moeflux.kernels.nested import describe
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.protocol import LoadedModel

Progress = Callable[[int, int], None]

# Steps after which MLX's freed buffers are cleared, as in mlx-lm.
CLEAR_EVERY = 256

# Drafts that a round has room for if the reply has no limit.
MANY = 1 << 30

# Most states that one call of a prefill keeps besides its last; each holds all recurrent layers'.
STOPS_PER_CALL = 4


def generate_step(
    prompt: mx.array,
    model: LoadedModel,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int | None = None,
    prompt_progress_callback: Progress | None = None,
    resumed: Resumed | None = None,
    on_prompt_read: Callable[[], object] = lambda: None,
    on_draft: Callable[[], object] = lambda: None,
) -> Generator[tuple[int, mx.array], None, None]:
    """Yield (token, logprobs ``[V]``) for a prompt of ids ``[T]``; max_tokens -1 is no limit.

    prefill_step_size: Tokens a call. None reads the whole prompt in one call, so that every expert
    is read at most once; the model bounds its own scratch.

    prompt_progress_callback: Called with (tokens done, tokens of the prompt) whenever layers have
    processed another token's share: the prompt passes layer by layer, so a call of 1,000 tokens
    counts 250 when a quarter of the layers is done.

    resumed: The known beginning of the prompt; its state replaces `prompt_cache`. on_prompt_read:
    Called when the logits after the prompt are known, before the first token is sampled. on_draft:
    Called before a token that was read as a draft is yielded.

    A model with ``drafting`` reads drafts; tokens, logprobs and states keep their bits. On GPUs
    the next step is scheduled before the caller gets the current token, unless it reads drafts. A
    prefill that fails or is interrupted leaves `prompt_cache` as it was. After decoding, however it
    ends, the cache holds everything up to the last token that was yielded.

    Evaluates: one step ahead of the caller.

    Raises:
        InputError: The prompt or an option is of another type or out of range, or the sampler drew
            an id outside the vocabulary. ShapeError: The sampler or a processor returned another
            shape or dtype. CacheError: `prompt_cache` is no state of this model.
    """
    use_mlx()
    if not isinstance(prompt, mx.array) or prompt.ndim != 1 or not prompt.size:
        raise InputError(f"the prompt is {describe(prompt)}; give an array of ids [T] with T > 0.")
    check_integer("max_tokens", max_tokens, -1, hint=" (-1: no limit)")
    if prefill_step_size is not None:
        check_integer("prefill_step_size", prefill_step_size, 1)
    check_callable("prompt_progress_callback", prompt_progress_callback)
    if prompt_cache is not None:
        model.states.check(prompt_cache)
    loop = _Loop(
        model,
        model.make_cache() if prompt_cache is None else prompt_cache,
        check_sampler(sampler) or make_sampler(),
        check_processors(logits_processors),
        prompt,
        resumed,
        prompt_progress_callback,
        on_prompt_read,
        on_draft,
    )
    if resumed is not None:
        loop.cache = resumed.state
    size = prefill_step_size or prompt.shape[0]
    options = {"max_tokens": max_tokens, "prompt_cache": prompt_cache}
    return _steps(prompt, model, loop=loop, size=size, **options)


@with_memory_limits
def _steps(
    prompt: mx.array,
    model: LoadedModel,
    *,
    loop: _Loop,
    max_tokens: int,
    size: int,
    prompt_cache: Any,
) -> Generator[tuple[int, mx.array], None, None]:
    """Yield what :func:`generate_step` yields. size: Tokens a call of the prefill."""
    cache, resumed, drafting = loop.cache, loop.resumed, model.drafting
    keep_last = prompt_cache is not None or (resumed is not None and resumed.keeps_reply)
    drafter: Drafter | None = None
    with model.runtime.lock, transaction(cache):
        if drafting is not None:
            known = 0 if resumed is None else resumed.position
            loop.drafter = drafter = drafting.begin(model, prompt.tolist(), read=known)
        following: Any = loop.prefill(size, stop=max_tokens == 0)
    # One step ahead hides the host's work behind the GPU's. On the CPU it hides nothing, and a
    # pending reader would keep MLX from writing the key-value buffers in place.
    ahead = device.kind() != "cpu"
    count, reply = 0, []
    if drafter is not None:
        drafter.resume()
    try:
        while count != max_tokens:
            if drafter is not None:
                # The last token takes a plain step, so that nothing is drawn behind it.
                room = MANY if max_tokens < 0 else max_tokens - count - 2
                with model.runtime.lock:
                    drafts = drafter.propose(following.tokens, room, ahead=ahead)
                if drafts:
                    following = yield from loop.verify(following, drafts, reply)
                    if len(reply) // CLEAR_EVERY > count // CLEAR_EVERY:
                        mx.clear_cache()
                    count = len(reply)
                    continue
            count += 1
            token, logprobs, finite = following
            logprobs = logprobs.squeeze(0)  # indexing is a gather
            if not ahead:
                check_drawn([token.item()], logprobs.size)
            # An interrupt may come at item(), when the cache has advanced already.
            with model.runtime.lock, transaction(cache):
                if count != max_tokens:
                    following = loop.step(token)
                elif keep_last:
                    loop.read(token)
                else:
                    model.runtime.wait_for_ranks()
                value: Any = token.item()
                check_drawn([value], logprobs.size)
                check_finite(finite, prompt.shape[0] + len(reply))
                reply.append(value)
                if drafter is not None:
                    drafter.stepped(value)
            if drafter is None:
                yield value, logprobs
            else:
                drafter.pause()
                yield value, logprobs
                drafter.resume()
            if count % CLEAR_EVERY == 0:
                mx.clear_cache()
    finally:
        if resumed is not None and resumed.keeps_reply and reply:
            with model.runtime.lock:
                resumed.replied(reply)


@dataclass
class _Loop:
    """A model, its cache, and the tokens that processors see; lives for one generation."""

    model: LoadedModel
    cache: list[Any]
    sampler: Sampler
    processors: list[LogitsProcessor]
    prompt: mx.array
    resumed: Resumed | None
    progress: Progress | None
    on_prompt_read: Callable[[], object]
    on_draft: Callable[[], object]
    tokens: mx.array | None = None
    drafter: Drafter | None = None

    def prefill(self, size: int, *, stop: bool) -> Sampled | None:
        """Read the prompt, `size` tokens a call.

        Return what :meth:`step` returns, or None with `stop`.
        """
        resumed, total, first = self.resumed, self.prompt.shape[0], None
        start, stops = (resumed.position, resumed.stops) if resumed else (0, [])
        self._report(start)
        for end in _ends(start, total, size, stops):
            self._pass(start, end)
            mx.clear_cache()
            start = end
            self._report(start)
        if resumed and resumed.logits is not None:
            raw = resumed.logits[None]
        else:
            raw = self._pass(start, total)
            if resumed:
                resumed.reached(total, raw[0])
        self.on_prompt_read()
        if not stop:
            first = self._sampled(raw, self.prompt[start:])
            mx.eval(first, [entry.state for entry in self.cache])
        self._report(total)
        return first

    def _pass(self, start: int, end: int) -> mx.array:
        """Read tokens ``[start, end)`` of the prompt, and store the states at the stops among them.

        Return the last logits ``[1, V]``.
        """
        resumed = self.resumed
        stops = [stop for stop in resumed.stops if start < stop <= end] if resumed else []
        if resumed and stops:
            resumed.state.watch(stops)
        with self._layer_progress(start, end):
            logits = self.read(self.prompt[start:end])
        if resumed and stops:
            for stop in stops:
                resumed.reached(stop)
            resumed.state.watch(())
        return logits

    @contextmanager
    def _layer_progress(self, start: int, end: int) -> Iterator[None]:
        """Report tokens in proportion to the layers that tokens ``[start, end)`` have passed.

        A layer has passed when the next one writes its cache. A streamed layer waits for its
        experts before that, so these reports follow the work.
        """
        if self.progress is None:
            yield
            return
        last = start

        def entered(layer: int) -> None:
            nonlocal last
            done = start + (end - start) * layer // len(entries)
            if done > last:
                last = done
                self._report(done)

        entries = list(self.cache)
        for layer, entry in enumerate(entries):
            entry.on_advance = functools.partial(entered, layer)
        try:
            yield
        finally:
            for entry in entries:
                entry.on_advance = None

    def _report(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, self.prompt.shape[0])

    def read(self, inputs: mx.array) -> mx.array:
        """Append inputs ``[T]`` to the cache and return the last logits ``[1, V]``, all evaluated.

        The logits are evaluated even if unused: the store waits for all outputs that read its bank,
        and another thread could not evaluate them later.
        """
        logits = self._logits(inputs)
        mx.eval(logits, [entry.state for entry in self.cache])
        self.model.runtime.start_eval()
        return logits

    def step(self, inputs: mx.array) -> Sampled:
        """Schedule a step on inputs ``[T]`` and return the token that it gives."""
        with self.model.runtime.ahead():
            return self._sampled(self._logits(inputs), inputs)

    def verify(
        self, newest: Sampled, drafts: list[int], reply: list[int]
    ) -> Generator[tuple[int, mx.array], None, Sampled]:
        """Append to `reply` and yield the newest token and each accepted draft, see
        :meth:`Drafter.verify`. Return the token that comes next."""
        drafter = self.drafter
        assert drafter is not None, "it proposed the drafts"

        def sample(logits: mx.array, read: mx.array) -> Sampled:
            return self._sampled(logits, read[-1:])

        at_once = self.sampler is greedy and not self.processors
        rows = drafter.verify(newest, drafts, self.cache, sample, at_once=at_once)
        with closing(rows):  # before the caller looks at the cache
            for r, (value, logprobs, following) in enumerate(rows):
                newest = following
                reply.append(value)
                if r:
                    self.on_draft()
                yield value, logprobs
        return newest

    def _logits(self, inputs: mx.array) -> mx.array:
        if self.drafter is None:
            return self.model(inputs[None], cache=self.cache, last_only=True)[:, -1]
        with self.drafter.observing() as hidden:
            logits = self.model(inputs[None], cache=self.cache, last_only=True)[:, -1]
        self.drafter.observe(hidden, inputs.size)
        return logits

    def _sampled(self, raw: mx.array, inputs: mx.array) -> Sampled:
        """Schedule what :meth:`step` returns from the logits ``[1, V]`` after `inputs`."""
        try:
            logits = raw
            if self.processors:
                seen = self.tokens
                new = self.prompt if seen is None else inputs.astype(seen.dtype)
                self.tokens = new if seen is None else mx.concatenate([seen, new])
                logits = processed(self.processors, self.tokens, raw)
            logprobs, finite = normalised(logits)
            token = self.model.runtime.lead(drawn(self.sampler, logprobs))
            mx.async_eval(token, logprobs, finite)
            self.model.runtime.start_eval()
        except BaseException:
            mx.eval(raw)  # for the reason that read() gives
            raise
        return Sampled(token, logprobs, finite)


def _ends(start: int, total: int, size: int, stops: Sequence[int]) -> Iterator[int]:
    """Yield the ends of all calls of a prefill but the last.

    A call has at most `size` tokens and at most STOPS_PER_CALL of `stops`.
    """
    while True:
        passed = [stop for stop in stops if stop > start]
        end = min(start + size, *passed[STOPS_PER_CALL - 1 : STOPS_PER_CALL], total)
        if end >= total:
            return
        yield end
        start = end
