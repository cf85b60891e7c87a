"""The engine: one thread owns MLX and steps the batch, the event loop is on the other side."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_moeflux.awake import Awake
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.errors import CacheError, InputError, MemoryBudgetError, MoefluxError
from mlx_moeflux.experts.system_memory import MemoryPressure
from mlx_moeflux.generation.batch import BatchGenerator, BatchReply
from mlx_moeflux.generation.elastic import elastic_banks
from mlx_moeflux.generation.idle import Idle
from mlx_moeflux.generation.memory import LIMITS, Needs
from mlx_moeflux.generation.sampling import (
    LogitsProcessor,
    Sampler,
    make_logits_processors,
    make_sampler,
)
from mlx_moeflux.generation.sampling_fields import REQUEST_FIELDS
from mlx_moeflux.generation.scheduler import Workload
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.protocol import LoadedModel
from mlx_moeflux.server.errors import PromptTooLong, RequestError
from mlx_moeflux.server.following import LeadingGenerator
from mlx_moeflux.server.request import Sampling

LOG = logging.getLogger("mlx_moeflux.server")

# Tokens of a prompt whose activations may stay allocated between two prompts.
KEPT_PROMPT = 8192

# Sequences of the largest batch that is warmed up. NVIDIA's compiler makes other kernels for larger
# ones, so that all sizes are warmed up there.
WARM_BATCH = 8

# An idle engine waits so long for prompts that are being rendered.
GATHER_SECONDS = 0.02

# Penalties count the whole reply, however long.
WHOLE = 1 << 30


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token, and the most probable ones at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Token(NamedTuple):
    """One token of a reply, or its failure. finish: "stop" (the token is no text), "length" or
    None."""

    id: int = -1
    finish: str | None = None
    cached: int = 0
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


@dataclass(eq=False)
class Job:
    """A prompt in the engine, which answers it with one reply.

    limit: Most tokens of the reply, -1 for no limit.
    on_token: Called in the event loop with each token.
    logprobs: Number of alternatives to report, None reports nothing.
    processors: Besides those of `sampling`.
    breakpoints: Positions in the prompt whose states are kept.
    """

    prompt: list[int]
    limit: int
    sampling: Sampling
    on_token: Callable[[Token], None]
    logprobs: int | None = None
    processors: Sequence[LogitsProcessor] = ()
    breakpoints: Sequence[int] = ()
    uid: int = field(default=-1, init=False)


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine.

    concurrency: Most replies that take a step together.
    prompts: Most prompts read together.
    waiting: Most further requests; state_bytes: Most bytes of all states.
    warm_up: Run small prompts and steps before the first request.
    prefill_step_size, max_pause: See :class:`~mlx_moeflux.generation.batch.BatchGenerator`.
    idle_release: Seconds without a request after which the experts' memory is freed; None: never.
    pressure: What tells that memory is scarce, so that banks shrink; None: they do not.
    awake: What keeps the machine awake; the engine says when it works and when it rests.
    """

    concurrency: int = 32
    prompts: int = 8
    waiting: int = 128
    warm_up: bool = False
    state_bytes: int | None = None
    prefill_step_size: int | None = None
    max_pause: float = 0.3
    idle_release: float | None = None
    pressure: MemoryPressure | None = None
    awake: Awake = field(default_factory=Awake)


class Engine:
    """Steps a batch in a thread of its own, which alone uses the model from :meth:`start` on.

    The methods are for the event loop's thread. After a failure of a step all replies end with an
    error, and later ones are answered.

    stop_ids: Ids that end every reply. elastic: What shrinks the banks, or None. workload: What
    there was to do after the last step. expected: Number of replies whose prompts are being
    rendered; the event loop counts them.
    """

    def __init__(
        self,
        model: LoadedModel,
        stop_ids: Iterable[int],
        options: EngineOptions,
        prompt_cache: PromptCache | None = None,
    ):
        self.model, self.options = model, options
        self._stop_ids, self._prompt_cache = set(stop_ids), prompt_cache
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # of the thread
        self._live: set[Job] = set()  # of the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = self._warm = self._closing = False
        self._on_warm: Callable[[], object] = lambda: None
        self._samplers = functools.lru_cache(64)(make_sampler)
        self._generator = self._make_generator()
        self.elastic = elastic_banks(model.runtime, options.pressure, LOG.warning)
        self.workload = Workload()
        self.expected = 0

    def start(self, on_warm: Callable[[], object] = lambda: None) -> None:
        """Start the thread, which warms up before the first request. on_warm: Called in the event
        loop once it has, or would not."""
        self._loop, self._on_warm = asyncio.get_running_loop(), on_warm
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    async def close(self) -> None:
        """End the thread, and all replies with an error."""
        if self._thread is not None:
            self._closing = True
            self._commands.put(self._stop)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
            self._end_live(RequestError("the server is shutting down.", status=503))

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def warm(self) -> bool:
        """Return True once requests are answered without delay by kernels that compile or have
        trials."""
        return self._warm

    @property
    def live(self) -> int:
        """Return the number of replies that wait or run."""
        return len(self._live)

    def check_room(self, replies: int, *, expected: int = 0) -> None:
        """Refuse a request of so many replies. expected: Replies that will be submitted before.

        Raises:
            RequestError: The queue is full, or the engine has ended.
        """
        if not self.alive:
            raise RequestError("the model does not run any more.", status=503)
        options, live = self.options, len(self._live) + expected
        if live and live + replies > options.concurrency + options.waiting:
            raise RequestError(
                f"{live} replies wait or run, which is the most; try again later.",
                status=429,
                code="rate_limit_exceeded",
                retry_after=1 + live // options.concurrency,
            )

    @property
    def prompt_room(self) -> int:
        """Return the most tokens that a prompt may have in context and memory."""
        return self._generator.prompt_room()

    def too_long(self, prompt_tokens: int, *, estimated: bool = False) -> PromptTooLong | None:
        """Return the error of a prompt that can never be read, None for any other."""
        most = self.prompt_room
        if prompt_tokens <= most:
            return None
        memory = self.options.state_bytes if most < self.model.context_left() else None
        return PromptTooLong(prompt_tokens, most, memory=memory, estimated=estimated)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue prompts of one request.

        Raises:
            RequestError: See :meth:`check_room`.
        """
        self.check_room(len(jobs))
        self._live.update(jobs)
        self._commands.put(lambda: self._insert(jobs))

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Remove the unfinished ones of these prompts; nothing more is delivered of them."""
        gone = [job for job in jobs if job in self._live]
        if gone:
            self._live.difference_update(gone)
            self._commands.put(lambda: self._remove(gone))

    def _make_generator(self) -> BatchGenerator:
        options = self.options
        spread = self.model.store.ranks is not None
        return (LeadingGenerator if spread else BatchGenerator)(
            self.model,
            stop_ids=self._stop_ids,
            completion_batch_size=options.concurrency,
            prefill_batch_size=options.prompts,
            prefill_step_size=options.prefill_step_size,
            # Ranks would pause at different layers.
            max_pause=None if spread else options.max_pause,
            state_bytes=options.state_bytes,
            prompt_cache=self._prompt_cache,
        )

    def _run(self) -> None:
        try:
            with LIMITS.held(self._needs()):
                self._warm_up()
                while not self._stopped:
                    self._carry_out()
                    self._step()
                    if self.elastic is not None:
                        self.elastic.look()
                    self.workload = self._generator.workload()
                self._generator.close()
        except Exception as error:  # noqa: BLE001  # the clients must learn of it
            LOG.error("the engine ended: %s", _line(error))
            failed = RequestError("the model ended; the server's log says why.", status=500)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._end_live, failed)

    def _warm_up(self) -> None:
        if self.options.warm_up:
            most = None if device.kind() == "cuda" else WARM_BATCH
            try:
                self._generator.warm_up(most=most, go_on=lambda: not self._closing)
            except Exception as error:  # noqa: BLE001  # requests meet it again, or other kernels
                LOG.error("the warm-up failed: %s", _line(error))
        self._warm = True
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # a loop that was closed meanwhile
            self._loop.call_soon_threadsafe(self._on_warm)

    def _needs(self) -> Needs:
        prompt = min(KEPT_PROMPT, self.model.context_left())
        state_bytes = self.model.state_bytes(0) + (self.options.state_bytes or 0)
        return Needs.of(self.model, prompt_tokens=prompt, state_bytes=state_bytes, batch=True)

    def _carry_out(self) -> None:
        """Carry out all commands; wait for one if there is nothing else to do."""
        if not len(self._generator) and not self._stopped:
            self.options.awake.rest()
            command = self._wait_for_command()
            self.options.awake.work()
            command()
            self._gather()
        while not self._commands.empty():
            self._commands.get()()

    def _gather(self) -> None:
        """Wait a little for prompts that are being rendered: read together they take less time."""
        until = time.monotonic() + GATHER_SECONDS
        while self.expected and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=left)()

    def _wait_for_command(self) -> Callable[[], None]:
        idle = Idle(self.model, self.options.idle_release, self.elastic)
        while True:
            try:
                return self._commands.get(timeout=idle.pause)
            except queue.Empty:
                idle.look()
            if idle.released:
                if self.model.store.rest is not None:
                    LOG.info("no prompt for %g s: experts freed", self.options.idle_release)
                # The next step reads the experts again.
                self._generator.forget()

    def _stop(self) -> None:
        self._stopped = True

    def _insert(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            try:
                (job.uid,) = self._generator.insert(
                    [job.prompt],
                    [job.limit],
                    samplers=[self._sampler(job.sampling)],
                    logits_processors=[_processors(job)],
                    breakpoints=[job.breakpoints],
                )
                self._jobs[job.uid] = job
            except MoefluxError as error:
                # What the request's reader did not foresee: it concerns this one alone.
                wrong = isinstance(error, InputError | CacheError | MemoryBudgetError)
                status = 400 if wrong else 500
                self._deliver([(job, Token(error=RequestError(str(error), status=status)))])

    def _remove(self, jobs: Iterable[Job]) -> None:
        uids = [job.uid for job in jobs if self._jobs.pop(job.uid, None)]
        if uids:
            self._generator.remove(uids)

    def _step(self) -> None:
        if not len(self._generator):
            return
        try:
            replies = self._generator.step()
            tokens = [(job, _token(job, r)) for r in replies for job in (self._jobs[r.uid],)]
        except Exception as error:  # noqa: BLE001  # later requests are answered
            LOG.error("a step failed: %s", _line(error))
            self._end_all(RequestError("the model failed; the server's log says why.", status=500))
            self._generator.close()
            self._generator = self._make_generator()
            return
        for job, token in tokens:
            if token.finish:
                del self._jobs[job.uid]
        self._deliver(tokens)

    def _sampler(self, sampling: Sampling) -> Sampler:
        options: dict[str, Any] = {
            option.name: sampling[name]
            for name, option in REQUEST_FIELDS.items()
            if not option.window
        }
        # Rows with one sampler are sampled together; a seed is the reply's own.
        if sampling.seed is None:
            return self._samplers(**options)
        return make_sampler(**options, seed=sampling.seed % 2**64)

    def _end_all(self, error: RequestError) -> None:
        jobs = list(self._jobs.values())
        self._jobs.clear()
        self._deliver([(job, Token(error=error)) for job in jobs])

    def _end_live(self, error: RequestError) -> None:
        """End all replies, of jobs that were not inserted yet too. Of the event loop."""
        self._receive([(job, Token(error=error)) for job in self._live])

    def _deliver(self, tokens: list[tuple[Job, Token]]) -> None:
        if tokens:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._receive, tokens)

    def _receive(self, tokens: list[tuple[Job, Token]]) -> None:
        for job, token in tokens:
            if job in self._live:
                if token.finish or token.error:
                    self._live.discard(job)
                job.on_token(token)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _processors(job: Job) -> list[LogitsProcessor]:
    """Return the processors of a prompt: bias, penalties over the reply, or over prompt and reply,
    and its own."""
    sampling = job.sampling
    found = make_logits_processors(dict(sampling.logit_bias) or None)
    for name, option in REQUEST_FIELDS.items():
        if option.window and sampling[name] != option.off:
            given: dict[str, Any] = {option.name: sampling[name], option.window: WHOLE}
            made = make_logits_processors(**given)
            if not option.counts_prompt:
                made = [_of_reply(processor, len(job.prompt)) for processor in made]
            found += made
    return [*found, *job.processors]


def _of_reply(processor: LogitsProcessor, prompt_tokens: int) -> LogitsProcessor:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        reply = tokens[prompt_tokens:]
        return processor(reply, logits) if reply.size else logits

    return process


def _token(job: Job, reply: BatchReply) -> Token:
    logprobs = None
    if job.logprobs is not None:
        logprobs = _logprobs(reply.logprobs, reply.token, job.logprobs)
    return Token(reply.token, reply.finish_reason, reply.cached_tokens, logprobs)


def _logprobs(row: mx.array, token: int, count: int) -> TokenLogprobs:
    """Return the logprob of `token` and the `count` largest of a row ``[V]``; evaluates it."""
    best = mx.argpartition(-row, kth=count)[:count] if count else mx.array([], mx.uint32)
    ids: Any = best.tolist()
    values: Any = row[best].tolist()
    own: Any = row[token].item()
    top = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token, own, tuple(top))
