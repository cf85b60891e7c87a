"""Continuous batching: prompts join a running batch between steps, replies leave at their end."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.backend import use_mlx
from mlx_moeflux.cache import SequenceState
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.checks import check_integer, check_number
from mlx_moeflux.errors import InputError
from mlx_moeflux.generation.prefill import Request
from mlx_moeflux.generation.runner import Batch, Runner
from mlx_moeflux.generation.sampling import (
    LogitsProcessor,
    Sampler,
    check_ids,
    check_processors,
    check_sampler,
    make_sampler,
)
from mlx_moeflux.generation.scheduler import UNLIMITED, Scheduler, Workload
from mlx_moeflux.kernels.verify import failures
from mlx_moeflux.models.protocol import LoadedModel

OPEN_REPLY = 4096
"""Tokens that memory is kept for if a reply has no limit, or one beyond memory."""


@dataclass
class BatchReply:
    """One token of one sequence.

    logprobs: ``[V]``. finish_reason: "stop" (this token ended the reply), "length", or None before
    the last. prompt_cache: The state after this token, on the last if states are kept.
    cached_tokens: Tokens of the prompt that a prompt cache supplied.
    """

    uid: int
    token: int
    logprobs: mx.array
    finish_reason: str | None
    prompt_cache: SequenceState | None = None
    cached_tokens: int = 0


class BatchGenerator:
    """Generator of replies to many prompts, one token of each per :meth:`next`.

    max_tokens: Default limit of a reply.
    stop_ids: Ids that end every reply.
    sampler, logits_processors: mlx-lm's callables, for sequences without their own.
    completion_batch_size: Most sequences in a step.
    prefill_batch_size: Most prompts read together; each expert is then read once for all of them.
    prefill_step_size: Tokens of a prompt between two steps of the others; None reads a prompt in
        one call.
    max_pause: Seconds after which such a call pauses for a step of the others, between two layers
        or parts of a mixer; it still reads each expert once.
    keep_states: Return the state of each reply.
    kv_pool_bytes: See :class:`~mlx_moeflux.generation.batch.Batch`; prompts wait until the pool has
        room for their whole reply.
    state_bytes: Prompts wait until the states of all sequences after their whole replies fit in so
        many bytes.
    prompt_cache: Supplies known beginnings of prompts and stores these. With it, prompts that are
        removed while they are read stay in memory as far as they came, those of one call, until
        others need it; a prompt that begins as one of them goes on there.
    open_reply: Tokens for which a reply with no limit waits for room.

    A reply with no limit (-1), or one beyond what context and memory hold, waits for room for
    `open_reply` tokens. It may have more while there is memory, and else ends with "length".

    A reply equals that of its prompt alone, but for the rounding of larger matrix products. While
    one sequence is alone, the model may read drafts, and a call returns several tokens of it; not
    with `keep_states`, nor with a pool. One thread at a time may call its methods; sequences are
    inserted and removed between calls of :meth:`next`.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_tokens: int = 128,
        stop_ids: Iterable[int] = (),
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        completion_batch_size: int = 32,
        prefill_batch_size: int = 8,
        prefill_step_size: int | None = 2048,
        max_pause: float | None = None,
        keep_states: bool = False,
        kv_pool_bytes: int | None = None,
        state_bytes: int | None = None,
        prompt_cache: PromptCache | None = None,
        open_reply: int = OPEN_REPLY,
    ):
        use_mlx()
        for name, number in {
            "max_tokens": max_tokens, "completion_batch_size": completion_batch_size,
            "prefill_batch_size": prefill_batch_size, "prefill_step_size": prefill_step_size,
            "state_bytes": state_bytes, "open_reply": open_reply,
        }.items():  # fmt: skip
            if number is not None:
                check_integer(name, number, 1)
        if max_pause is not None:
            check_number("max_pause", max_pause, 0.0)
        if not isinstance(prompt_cache, PromptCache | None):
            raise InputError(f"prompt_cache is {prompt_cache!r}; give a PromptCache.")
        self.model, self.max_tokens, self.max_pause = model, max_tokens, max_pause
        self.prefill_step_size, self.keep_states = prefill_step_size, keep_states
        self._open_reply = open_reply
        self._stops = set(check_ids("stop_ids", stop_ids))
        self._sampler = check_sampler(sampler) or make_sampler()
        self._processors = check_processors(logits_processors)
        self._batch = Batch(model, kv_pool_bytes=kv_pool_bytes)
        self._scheduler = Scheduler(
            model,
            completion_batch_size=completion_batch_size,
            prefill_batch_size=prefill_batch_size,
            pool=self._batch.pool,
            state_bytes=state_bytes,
            prompt_cache=prompt_cache,
            keep_states=keep_states,
        )
        self._runner = Runner(model, self._batch, keep_states=keep_states)
        self._uids = 0
        self._closed = False

    def insert(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int] | None = None,
        caches: Sequence[Any] | None = None,
        samplers: Sequence[Sampler | None] | None = None,
        logits_processors: Sequence[Sequence[LogitsProcessor] | None] | None = None,
        breakpoints: Sequence[Iterable[int] | None] | None = None,
    ) -> list[int]:
        """Queue prompts of ids and return their uids.

        caches: States to continue from, which do not change, or None for an empty one.
        breakpoints: Positions in each prompt that the prompt cache stores besides its own.

        Raises:
            InputError: A prompt is empty, an id is out of range, or lists differ in length.
            CacheError: A prompt does not fit in the context.
            MemoryBudgetError: It does not fit in the pool or `state_bytes`.
        """
        self._check_open()
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            raise InputError(f"prompts is {prompts!r}; give a list of lists of ids.")
        count = len(prompts)
        columns = {
            "max_tokens": max_tokens, "caches": caches, "samplers": samplers,
            "logits_processors": logits_processors, "breakpoints": breakpoints,
        }  # fmt: skip
        for name, column in columns.items():
            if not isinstance(column, Sequence | None) or isinstance(column, str | bytes):
                raise InputError(f"{name} is {column!r}; give one for each prompt.")
            if column is not None and len(column) != count:
                raise InputError(f"{name} has {len(column)} entries for {count} prompts.")
        given = [column or [None] * count for column in columns.values()]
        rows = zip(prompts, *given, strict=True)
        new = [self._sequence(i, *row) for i, row in enumerate(rows)]
        self._scheduler.add(new)
        self._uids += count
        return [sequence.uid for sequence in new]

    def next(self) -> list[BatchReply]:
        """Return the next token of every running sequence, and further ones that were drafts, or an
        empty list if no sequence is left.

        The call first reads one step of the waiting prompts, or more if no sequence is running.
        After an error or interrupt the next call repeats this one.
        """
        while not (replies := self.step()) and len(self):
            pass
        return replies

    def step(self) -> list[BatchReply]:
        """Do what :meth:`next` does, but read at most one step of the prompts.

        The list is empty while no sequence is running, though prompts may wait or be half read.
        """
        self._check_open()
        scheduler, runner = self._scheduler, self._runner
        with self.model.runtime.lock, failures.reported(), runner.drafting(alone=scheduler.idle):
            runner.prepare()
            prefill = scheduler.schedule(self._batch.names)
            if prefill is not None:
                until = None if self.max_pause is None else time.monotonic() + self.max_pause
                if runner.read(prefill, self.prefill_step_size, until):
                    scheduler.end_prefill()
            if not len(self._batch):
                return []
            tokens = runner.step(self._stops)
            scheduler.shorten(self._batch.names)
            replies = [self._reply(*token) for token in tokens]
            pairs = zip(tokens, replies, strict=True)
            ended = [sequence for (sequence, *_), reply in pairs if reply.finish_reason]
            self._keep_replies(ended)
            runner.end_step(ended)
            return replies

    def prompt_room(self) -> int:
        """Return the most tokens that a prompt may have: context and memory hold it with the first
        token of its reply. Any thread."""
        return self._scheduler.prompt_room()

    def fitting(
        self, prompt_tokens: int, limit: int, *, used: int = 0, what: str = "the prompt"
    ) -> int:
        """Return how many tokens the reply to a prompt may have: at most `limit` (-1: no limit),
        what the context has room for, and what memory holds. Any thread.

        used: Tokens of the state that it continues from. what: Its name in an error.

        Raises:
            CacheError: The prompt does not fit in the context.
            MemoryBudgetError: It does not fit in the pool or `state_bytes` with one token more.
        """
        return self._scheduler.fitting(prompt_tokens, limit, used=used, what=what)

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        """Remove waiting, prefilling and running sequences.

        Return the states of the running ones by uid if `return_prompt_caches`.
        """
        uids = set(uids)
        states = {}
        with self.model.runtime.lock:
            gone = [s for s in self._batch.names if s.uid in uids]
            if return_prompt_caches:
                states = {s.uid: self._batch.state(s) for s in gone}
            self._scheduler.remove(uids)
            self._runner.remove(gone)
        return states

    def forget(self) -> None:
        """Free what is kept of prompts that were removed while they were read."""
        self._scheduler.forget()

    def close(self) -> None:
        """Free all states. A second call does nothing."""
        self._closed = True
        self._scheduler.close()
        self._runner.close()

    def warm_up(
        self,
        prompt_tokens: int = 32,
        *,
        most: int | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run prompts in every batch size that is a power of two, to compile and to try kernels
        before the first request. Their states take at most `state_bytes` and are freed.

        most: Sequences of the largest batch; None: as many as take a step. go_on: Asked before each
        step; the rest is left out once it is False.
        """
        self._check_open()
        scheduler = self._scheduler
        largest = scheduler.completion_batch_size
        most = min(most or largest, largest)
        prompt_tokens = min(prompt_tokens, self.model.context_left() - 2)
        for count in (2**power for power in range(most.bit_length())):
            if prompt_tokens < 1 or not scheduler.fits([prompt_tokens + 2] * count):
                return
            with BatchGenerator(
                self.model,
                max_tokens=2,
                completion_batch_size=count,
                prefill_batch_size=scheduler.prefill_batch_size,
                prefill_step_size=self.prefill_step_size,
                state_bytes=scheduler.state_bytes,
            ) as trial:
                trial.insert([[0] * prompt_tokens] * count)
                while len(trial):
                    if not go_on():
                        return
                    trial.step()

    def __len__(self) -> int:
        """Return the number of unfinished sequences."""
        return sum(self.workload()[:3])

    def workload(self) -> Workload:
        """Return what there is to do, as of the last step."""
        return self._scheduler.workload(len(self._batch))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the states of all running sequences."""
        return self._batch.nbytes

    def __enter__(self) -> BatchGenerator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        use_mlx()
        if self._closed:
            raise InputError("this batch generator is closed; make another.")

    def _sequence(
        self,
        i: int,
        prompt: Sequence[int],
        limit: int | None,
        state: Any,
        sampler: Any,
        processors: Sequence[LogitsProcessor] | None,
        breakpoints: Iterable[int] | None,
    ) -> Request:
        ids = check_ids("prompts", prompt, self.model.config.vocab_size)
        if not ids:
            raise InputError(f"prompt {i} is empty; give at least one token.")
        given = self.max_tokens if limit is None else limit
        if given != UNLIMITED:
            check_integer("max_tokens", given, 1, hint=" (-1: no limit)")
        fresh = state is None
        if not fresh:
            self.model.states.check(state)
        breakpoints = check_ids("breakpoints", breakpoints or (), what="position")
        state = self.model.make_cache() if fresh else copy.deepcopy(state)
        used = max(entry.size() for entry in state)
        limit = self.fitting(len(ids), given, used=used, what=f"prompt {i}")
        return Request(
            self._uids + i,
            ids,
            limit,
            state,
            check_sampler(sampler) or self._sampler,
            self._processors if processors is None else check_processors(processors),
            used + len(ids),
            limit if limit == given else min(limit, self._open_reply),
            fresh=fresh,
            breakpoints=breakpoints,
        )

    def _reply(self, sequence: Request, token: int, logprobs: mx.array) -> BatchReply:
        sequence.reply.append(token)
        stopped, full = token in self._stops, len(sequence.reply) >= sequence.limit
        finish = "stop" if stopped else "length" if full else None
        state = self._batch.state(sequence) if finish and self.keep_states else None
        return BatchReply(sequence.uid, token, logprobs, finish, state, sequence.cached)

    def _keep_replies(self, ended: list[Request]) -> None:
        """Store the states after replies, from which next turns go on, if the prompt cache does."""
        cache = self._scheduler.prompt_cache
        if cache is None or not cache.replies:
            return
        for sequence in ended:
            if sequence.fresh:
                state = self._batch.state(sequence)
                tokens = [*sequence.prompt, *sequence.reply][: state.position]
                cache.store(self.model, tokens, state)
