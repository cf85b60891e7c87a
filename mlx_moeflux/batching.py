"""Continuous batching: prompts join a running batch between steps and leave it when they end."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.batch import Batch
from mlx_moeflux.batch_sequence import Prefill, Request, begin, sampled
from mlx_moeflux.cache import SequenceState
from mlx_moeflux.cache.prompt import PromptCache
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.kernels import failures
from mlx_moeflux.sampling import LogitsProcessor, Sampler, check_ids, check_integer, make_sampler
from mlx_moeflux.steps import CLEAR_EVERY


@dataclass
class BatchReply:
    """One token of one sequence.

    logprobs: ``[V]``. finish_reason: "stop" (this is the token that ended it), "length", or None
    before the last. prompt_cache: The state behind this token, on the last if states are kept.
    """

    uid: int
    token: int
    logprobs: mx.array
    finish_reason: str | None
    prompt_cache: SequenceState | None = None


class BatchGenerator:
    """Replies to many prompts at once, token by token.

    max_tokens: Of a reply, where :meth:`insert` says no other. stop_ids: End every reply.
    sampler, logits_processors: mlx-lm's callables, for sequences without their own.
    completion_batch_size: Sequences in a step at most. prefill_batch_size: Prompts read together
    at most: each expert is then read once for all of them. prefill_step_size: Tokens of a prompt
    between two steps of the others. keep_states: Replies end with their states. kv_pool_bytes: See
    :class:`~mlx_moeflux.batch.Batch`; prompts wait until the pool has room for their whole reply.
    prompt_cache: Knows beginnings of prompts and learns these.

    A reply is that of a call with its prompt alone, but for the rounding of larger matrix
    products. Between two calls of :meth:`next` sequences may be inserted and removed.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_tokens: int = 128,
        stop_ids: Iterable[int] = (),
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        completion_batch_size: int = 32,
        prefill_batch_size: int = 8,
        prefill_step_size: int = 2048,
        keep_states: bool = False,
        kv_pool_bytes: int | None = None,
        prompt_cache: PromptCache | None = None,
    ):
        for name, number in {
            "max_tokens": max_tokens, "completion_batch_size": completion_batch_size,
            "prefill_batch_size": prefill_batch_size, "prefill_step_size": prefill_step_size,
        }.items():  # fmt: skip
            check_integer(name, number, 1)
        self.model, self.max_tokens = model, max_tokens
        self.completion_batch_size = completion_batch_size
        self.prefill_batch_size = min(prefill_batch_size, completion_batch_size)
        self.prefill_step_size, self.keep_states = prefill_step_size, keep_states
        self.prompt_cache = prompt_cache
        self._stops = set(check_ids("stop_ids", stop_ids))
        self._sampler, self._processors = sampler or make_sampler(), list(logits_processors)
        # One step ahead hides the host's work behind a GPU's; states that are kept hold the last
        # token, which must go through the model before its sequence leaves.
        self._ahead = keep_states or mx.default_device() != mx.cpu
        self._waiting: deque[Request] = deque()
        self._prefill: Prefill | None = None
        self._batch = Batch(model, kv_pool_bytes=kv_pool_bytes)
        self._sequences: dict[int, Request] = {}
        self._tokens: mx.array | None = None
        self._logprobs: mx.array | None = None
        self._uids = self._steps = 0
        self._fresh = False  # tokens were not told of yet
        self._closed = False

    def insert(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int] | None = None,
        caches: Sequence[Any] | None = None,
        samplers: Sequence[Sampler | None] | None = None,
        logits_processors: Sequence[Sequence[LogitsProcessor] | None] | None = None,
    ) -> list[int]:
        """Queue prompts of ids; their uids. caches: States to go on from, which stay as they are,
        or None for an empty one.

        Raises:
            InputError: A prompt is empty, an id is out of range, or lists differ in length.
            CacheError: A prompt does not fit in the context.
        """
        self._check_open()
        count = len(prompts)
        columns = {
            "max_tokens": max_tokens,
            "caches": caches,
            "samplers": samplers,
            "logits_processors": logits_processors,
        }
        for name, column in columns.items():
            if column is not None and len(column) != count:
                raise InputError(f"{name} has {len(column)} entries for {count} prompts.")
        given = {name: column or [None] * count for name, column in columns.items()}
        new = [
            self._sequence(i, prompt, *(column[i] for column in given.values()))
            for i, prompt in enumerate(prompts)
        ]
        self._waiting.extend(new)
        self._uids += count
        return [sequence.uid for sequence in new]

    def next(self) -> list[BatchReply]:
        """The next token of every sequence that is being replied to, after reading at most one
        step's worth of waiting prompts; more only while there is nothing else to do. Empty when
        all is done.

        After an error or interrupt the next call goes on as if this one had not been.
        """
        self._check_open()
        with self.model.lock, failures.reported():
            return self._next()

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        """Forget sequences, wherever they are; their states by uid if asked for (of those that
        are being replied to)."""
        uids = set(uids)
        states = {}
        with self.model.lock:
            if return_prompt_caches:
                states = {uid: self._batch.state(uid) for uid in self._batch.names if uid in uids}
            self._waiting = deque(s for s in self._waiting if s.uid not in uids)
            if self._prefill is not None:
                self._prefill.drop(uids)
                if not self._prefill.sequences:
                    self._prefill = None
            self._drop(uids)
        return states

    def close(self) -> None:
        """Free all states. A second call does nothing."""
        self._closed = True
        self._waiting.clear()
        self._sequences.clear()
        self._prefill = self._tokens = self._logprobs = None
        self._batch.leave(list(self._batch.names))

    def warm_up(self, prompt_tokens: int = 32) -> None:
        """Run a prompt and steps of every batch size that is a power of two, so that kernels are
        compiled and buffers made before the first request."""
        self._check_open()
        size, prompt = 1, [0] * prompt_tokens
        while size <= self.completion_batch_size:
            trial = BatchGenerator(
                self.model,
                max_tokens=2,
                completion_batch_size=size,
                prefill_batch_size=self.prefill_batch_size,
                prefill_step_size=self.prefill_step_size,
            )
            trial.insert([prompt] * size)
            while trial.next():
                pass
            trial.close()
            size *= 2

    def __len__(self) -> int:
        """Sequences that are not done."""
        reading = 0 if self._prefill is None else len(self._prefill.sequences)
        return len(self._waiting) + reading + len(self._sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of the states of all sequences that are being replied to."""
        return self._batch.nbytes

    def __enter__(self) -> BatchGenerator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this batch generator is closed; make another.")

    def _sequence(
        self, i: int, prompt: Sequence[int], limit: int | None, state: Any, sampler: Any, processors
    ) -> Request:
        ids = check_ids("prompts", prompt, self.model.config.vocab_size)
        if not ids:
            raise InputError(f"prompt {i} is empty; give at least one token.")
        limit = self.max_tokens if limit is None else limit
        check_integer("max_tokens", limit, 1)
        fresh = state is None
        state = self.model.make_cache() if fresh else copy.deepcopy(state)
        room = self.model.context_left(state) - len(ids)
        if room < 0:
            raise CacheError(
                f"Prompt {i} has {len(ids)} tokens, {-room} more than the context has room for; "
                "shorten it or raise max_context."
            )
        limit = min(limit, max(room + (not self.keep_states), 1))
        pool, total = self._batch.pool, len(ids) + max(entry.size() for entry in state) + limit
        if pool is not None and pool.blocks_for(total) > pool.blocks:
            raise CacheError(
                f"Prompt {i} and its reply take {pool.blocks_for(total)} blocks of {pool.block} "
                f"tokens, the KV pool has {pool.blocks}; give it more bytes or ask for less."
            )
        processors = self._processors if processors is None else list(processors)
        sampler = sampler or self._sampler
        return Request(self._uids + i, ids, limit, state, sampler, processors, total, fresh=fresh)

    def _next(self) -> list[BatchReply]:
        if not self._ahead and len(self._batch) and not self._fresh:
            self._tokens, self._logprobs, _ = self._fed()
            self._fresh = True
        self._read_prompts()
        while not len(self._batch):
            if self._prefill is None:
                return []
            self._read_prompts()
        logprobs, names = self._logprobs, list(self._batch.names)
        if self._ahead:
            self._tokens, self._logprobs, tokens = self._fed()
        else:
            tokens, self._fresh = self._tokens.tolist(), False
        replies = [
            self._reply(uid, token, logprobs[i])
            for i, (uid, token) in enumerate(zip(names, tokens, strict=True))
        ]
        self._drop({reply.uid for reply in replies if reply.finish_reason})
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        return replies

    def _reply(self, uid: int, token: int, logprobs: mx.array) -> BatchReply:
        sequence = self._sequences[uid]
        sequence.reply.append(token)
        finish = None
        if token in self._stops:
            finish = "stop"
        elif len(sequence.reply) >= sequence.limit:
            finish = "length"
        state = self._batch.state(uid) if finish and self.keep_states else None
        return BatchReply(uid, token, logprobs, finish, state)

    def _drop(self, uids: set[int]) -> None:
        keep = [i for i, uid in enumerate(self._batch.names) if uid not in uids]
        if len(keep) == len(self._batch):
            return
        for uid in uids:
            self._sequences.pop(uid, None)
        self._batch.leave(uids)
        if not keep:
            self._tokens = self._logprobs = None
        else:
            rows = mx.array(keep)
            self._tokens, self._logprobs = self._tokens[rows], self._logprobs[rows]

    def _fed(self) -> tuple[mx.array, mx.array, list[int]]:
        """The newest token of every sequence goes through the model: the tokens and logprobs that
        follow, and what went in."""
        sequences = [self._sequences[uid] for uid in self._batch.names]
        pending = [self._tokens] if self._ahead else []
        with self._batch.transaction():
            logits = self._batch.step(self._tokens)
            tokens, logprobs = sampled(logits, sequences, pending=pending)
            if self._ahead:
                mx.async_eval(tokens, logprobs)
                self.model.hand_over()
            else:
                self._batch.evaluate(tokens, logprobs)
            # Awaited here: an interrupt must find the states as they were.
            return tokens, logprobs, self._tokens.tolist()

    def _read_prompts(self) -> None:
        """Begin to read waiting prompts if there is room, and read one step's worth."""
        if self._prefill is None:
            room = min(self.prefill_batch_size, self.completion_batch_size - len(self._batch))
            first = self._admitted(room)
            if not first:
                return
            self._prefill = begin(self.model, first, self.prompt_cache)
        done = self._prefill.advance(self.prefill_step_size)
        if done is None:
            return
        sequences, logits = self._prefill.sequences, done
        self._prefill.keep()
        tokens, logprobs = sampled(logits, sequences)
        mx.eval(tokens, logprobs)
        self._sequences |= {s.uid: s for s in sequences}
        self._batch.join([s.uid for s in sequences], self._prefill.entries)
        both = ((self._tokens, tokens), (self._logprobs, logprobs))
        self._tokens, self._logprobs = (
            new if old is None else mx.concatenate([old, new]) for old, new in both
        )
        for sequence in sequences:
            sequence.state = sequence.resumed = None
        self._prefill, self._fresh = None, True

    def _admitted(self, room: int) -> list[Request]:
        """The next prompts, at most `room`, whose whole replies the pool has blocks for."""
        pool, first = self._batch.pool, []
        promised = sum(self._blocks(s) for s in self._sequences.values())
        while self._waiting and len(first) < room:
            promised += self._blocks(self._waiting[0])
            if pool is not None and promised > pool.blocks:
                break
            self._waiting[0].resume(self.model, self.prompt_cache)
            first.append(self._waiting.popleft())
        return first

    def _blocks(self, sequence: Request) -> int:
        pool = self._batch.pool
        return 0 if pool is None else pool.blocks_for(sequence.tokens)
