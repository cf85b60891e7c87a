"""The two programs that are measured, and the ids that both process.

Greedy text would differ between programs, and with it the experts in use. So both run their own
generation loop with a sampler that chooses greedily and then returns the next id of a fixed random
stream: the work of choosing, and the dependency of each step on the one before, stay.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import CheckpointError, UnsupportedError
from mlx_moeflux.generation import loop
from mlx_moeflux.generation.memory import LIMITS, Needs
from mlx_moeflux.installation import install_command
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.measure.benchmark.exact import DECODE_TOKENS, forced_logits
from mlx_moeflux.models.decoder import DecoderModel

MLX_LM_PREFILL = 2048


@dataclass(frozen=True)
class Stream:
    """Ids that every program is fed: prompt ``[B, P]``, following ``[B, G]`` (the last of which
    is chosen and never read)."""

    prompt: np.ndarray
    following: np.ndarray

    @classmethod
    def random(cls, *, batch: int, prompt: int, following: int, vocabulary: int, seed: int):
        ids = np.random.default_rng(seed).integers(0, vocabulary, (batch, prompt + following))
        ids = ids.astype(np.int32)
        return cls(ids[:, :prompt], ids[:, prompt:])


class ForcedSampler:
    """Maps logprobs ``[B, V]`` to the stream's next ids ``[B]``, after sampling greedily."""

    def __init__(self, stream: Stream):
        self._columns = [mx.array(column) for column in stream.following.T.astype(np.uint32)]
        # One more, for programs that begin a step too many.
        self._columns.append(self._columns[-1])
        mx.eval(self._columns)
        self._next = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        chosen = mx.argmax(logprobs, axis=-1)
        given = self._columns[min(self._next, len(self._columns) - 1)]
        self._next += 1
        # Never true, but only the device could know.
        return mx.where(chosen == logprobs.shape[-1], chosen, given)


@dataclass(frozen=True)
class Timing:
    """One run: seconds to the first token, seconds from there to the last, tokens of both, peak
    bytes that MLX held for this program."""

    prompt_seconds: float
    decode_seconds: float
    prompt_tokens: int
    decode_tokens: int
    peak_bytes: int

    @property
    def prompt_tps(self) -> float:
        return self.prompt_tokens / self.prompt_seconds

    @property
    def generation_tps(self) -> float:
        """Tokens a second after the first token, over all sequences."""
        return self.decode_tokens / self.decode_seconds


Report = Callable[[int, int], None]
Steps = Callable[[Stream, Report], Generator[Any, None, None]]


def held_memory() -> int:
    """Return the bytes that MLX holds after garbage collection: a model that is collected while
    another is loaded would make that one look smaller."""
    gc.collect()
    return mx.get_active_memory()


class Side(Protocol):
    """A program under measurement. held_bytes: What MLX holds for it between runs."""

    name: str
    held_bytes: int

    def steps(self, stream: Stream, report: Report) -> Generator[Any, None, None]:
        """Generate ``following.shape[1]`` tokens; report(P, P) when the first is known."""
        ...

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """ids ``[B, T]`` -> ``[B, T, V]`` float32, the last few one by one."""
        ...

    def close(self) -> None: ...


def run(
    side: Side,
    stream: Stream,
    *,
    at_first_token: Callable[[], None] | None = None,
    between: Callable[[], None] | None = None,
) -> Timing:
    """One run on the clock.

    at_first_token: Called off the clock. between: Too, after every token but the last, with
    nothing under way on the device.
    """
    B, P = stream.prompt.shape
    mx.synchronize()
    others_hold = max(0, mx.get_active_memory() - side.held_bytes)
    mx.reset_peak_memory()
    began, first, paused = time.perf_counter(), None, 0.0

    def report(done: int, total: int) -> None:
        nonlocal first, paused
        if done < total or first is not None:
            return
        first = time.perf_counter()
        if at_first_token is not None:
            at_first_token()
            paused += time.perf_counter() - first

    steps, count = side.steps(stream, report), stream.following.shape[1]
    for i in range(count):
        next(steps)
        if between is not None and i < count - 1:
            mx.synchronize()
            stopped = time.perf_counter()
            between()
            paused += time.perf_counter() - stopped
    ended = time.perf_counter()
    steps.close()
    mx.synchronize()
    assert first is not None, "a generation loop that does not report its first token"
    return Timing(
        prompt_seconds=first - began,
        decode_seconds=ended - first - paused,
        prompt_tokens=B * P,
        decode_tokens=B * (count - 1),
        peak_bytes=max(0, mx.get_peak_memory() - others_hold),
    )


class Ours:
    """This package: its generation loop for one sequence, its model in a plain loop for more."""

    name = "mlx_moeflux"

    def __init__(self, model: DecoderModel, *, prefill_step_size: int | None, held_bytes: int = 0):
        self.model: Any = model
        self.held_bytes = held_bytes
        self._size = prefill_step_size

    def steps(self, stream: Stream, report: Report) -> Generator[Any, None, None]:
        """See :meth:`Side.steps`."""
        (B, P), model = stream.prompt.shape, self.model
        if B == 1:
            yield from loop.generate_step(
                mx.array(stream.prompt[0]),
                model,
                max_tokens=stream.following.shape[1],
                sampler=ForcedSampler(stream),
                prefill_step_size=self._size,
                prompt_progress_callback=report,
            )
            return
        cache = model.make_cache()
        state_bytes = model.state_bytes(B * (P + stream.following.shape[1]))
        needs = Needs.of(model, prompt_tokens=B * P, state_bytes=state_bytes, batch=True)
        with LIMITS.held(needs):
            yield from _batched(
                lambda ids: model(ids, cache, last_only=True)[:, -1],
                cache,
                stream,
                report,
                chunk=self._size or P,
                handed_over=model.runtime.start_eval,
            )

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """See :meth:`Side.logits`."""
        cache = self.model.make_cache()
        return forced_logits(lambda part: self.model(part, cache), ids, decode=DECODE_TOKENS)

    def close(self) -> None:
        self.model.close()
        self.model = None


class MlxLm:
    """mlx-lm on the same checkpoint, as its user runs it.

    Raises:
        UnsupportedError: mlx-lm is not installed. CheckpointError: It cannot load this one.
    """

    name = "mlx-lm"

    def __init__(self, directory: Path, *, prefill_step_size: int | None):
        try:
            from mlx_lm.utils import load_model
        except ImportError as error:
            raise UnsupportedError(
                f"mlx-lm is not installed here; install it with {install_command('mlx-lm')}."
            ) from error
        before = held_memory()
        self.model: Any = None
        try:
            self.model, _ = load_model(Path(directory))
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise CheckpointError(f"{directory}: mlx-lm cannot load this ({error}).") from error
        mx.eval(self.model.parameters())
        self.held_bytes = held_memory() - before
        self._size = prefill_step_size or MLX_LM_PREFILL

    def steps(self, stream: Stream, report: Report) -> Generator[Any, None, None]:
        """See :meth:`Side.steps`."""
        from mlx_lm.generate import generate_step, generation_stream, wired_limit
        from mlx_lm.models.cache import make_prompt_cache

        streams: list[Any] = [generation_stream]
        with wired_limit(self.model, streams):
            if stream.prompt.shape[0] == 1:
                yield from generate_step(
                    mx.array(stream.prompt[0]),
                    self.model,
                    max_tokens=stream.following.shape[1],
                    sampler=ForcedSampler(stream),
                    prefill_step_size=self._size,
                    prompt_progress_callback=report,
                )
                return
            cache = make_prompt_cache(self.model)
            yield from _batched(
                lambda ids: self.model(ids, cache=cache)[:, -1],
                cache,
                stream,
                report,
                chunk=self._size,
                handed_over=lambda: None,
            )

    def logits(self, ids: np.ndarray, *, dtype: mx.Dtype | None = None) -> np.ndarray:
        """See :meth:`Side.logits`; computed in `dtype` if it is given, the weights kept."""
        from mlx_lm.models.cache import make_prompt_cache

        own = self.model.parameters()
        if dtype is not None:
            self.model.set_dtype(dtype)
        cache = make_prompt_cache(self.model)
        try:
            return forced_logits(
                lambda part: self.model(part, cache=cache), ids, decode=DECODE_TOKENS
            )
        finally:
            self.model.update(own)

    def close(self) -> None:
        self.model = None


def _batched(
    last_logits: Callable[[mx.array], mx.array],
    cache: list[Any],
    stream: Stream,
    report: Report,
    *,
    chunk: int,
    handed_over: Callable[[], None],
) -> Generator[mx.array, None, None]:
    """Prefill and decode of ``[B, T]`` ids, one step ahead on a GPU as generation is.

    last_logits: tokens ``[B, T]`` -> logits ``[B, V]`` of the last position, with `cache`.
    """
    sampler, total = ForcedSampler(stream), stream.prompt.shape[1]
    ahead = device.kind() != "cpu"

    def step(ids: mx.array) -> mx.array:
        logits = last_logits(ids).astype(mx.float32)
        token = sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.async_eval(token)
        handed_over()
        return token

    done = 0
    while total - done > chunk:
        logits = last_logits(mx.array(stream.prompt[:, done : done + chunk]))
        mx.eval(logits, [entry.state for entry in cache])
        done += chunk
    token = step(mx.array(stream.prompt[:, done:]))
    mx.eval(token, [entry.state for entry in cache])
    report(total, total)
    for _ in range(stream.following.shape[1] - 1):
        if not ahead:
            mx.eval(token)
        following = step(token[:, None])
        mx.eval(token)
        yield token
        token = following
    mx.eval(token)
    yield token
