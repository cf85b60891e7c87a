"""Continuous batching: prompts join a running batch between steps and leave it when they end."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import SequenceState, transaction
from mlx_moeflux.cache.paged import KVPool, PagedCache
from mlx_moeflux.cache.prompt.cache import PromptCache, Resumed
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.generation.loop import CLEAR_EVERY, STOPS_PER_CALL
from mlx_moeflux.generation.sampling import (
    LogitsProcessor,
    Sampler,
    check_ids,
    check_integer,
    make_sampler,
)
from mlx_moeflux.kernels.runtime import failures


class Batch:
    """Sequences that take every step together, under names of the caller's.

    ``names``: In the order of the rows of :meth:`step`. kv_pool_bytes: Keep keys and values in
    blocks of a pool of this size, so that nothing is copied when sequences join or leave; None:
    each layer has one buffer as long as the longest sequence.

    Raises:
        InputError: The pool has not room for a block.
    """

    def __init__(self, model: Any, *, kv_pool_bytes: int | None = None):
        self.model = model
        self.names: list[Hashable] = []
        self.pool = None if kv_pool_bytes is None else KVPool(model.state_spec(), kv_pool_bytes)
        self._entries: list[Any] = []
        self._paged: dict[int, PagedCache] = {}
        if self.pool is not None:
            specs = model.state_spec().entries
            for i, (entry, spec) in enumerate(zip(model.make_cache(), specs, strict=True)):
                if entry.token_axis is not None:
                    windowed = getattr(model.config, "window", None) is not None
                    self._paged[i] = PagedCache(self.pool, spec, type(entry), windowed=windowed)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        """Bytes of all states, with their padding and reserve."""
        return sum(entry.nbytes for entry in self._entries)

    def join(self, names: Sequence[Hashable], state: Sequence[Any]) -> None:
        """Take in the sequences of a state (of one sequence, or merged of several), which must
        not be used any more.

        Raises:
            InputError: A name is taken, or there are not as many as sequences.
            CacheError: The pool is full.
        """
        names = list(names)
        if len({*self.names, *names}) < len(self.names) + len(names):
            raise InputError(f"a sequence of {names} is in the batch already; use other names.")
        if any(entry.batch_size != len(names) for entry in state):
            raise InputError(f"{len(names)} names for a state of {state[0].batch_size} sequences.")
        if self.pool is not None:
            for entry in self._paged.values():
                entry.settle()
            self.pool.admit(state[0].seen())
        if not self.names:
            self._entries = [
                self._paged[i] if i in self._paged else type(entry).merge([entry])
                for i, entry in enumerate(state)
            ]
        for i, (mine, theirs) in enumerate(zip(self._entries, state, strict=True)):
            if self.names or i in self._paged:
                mine.extend(theirs)
        self.names += names

    def leave(self, names: Iterable[Hashable]) -> None:
        """Let these sequences go, and what they held."""
        gone = set(names)
        keep = [i for i, name in enumerate(self.names) if name not in gone]
        if len(keep) == len(self.names):
            return
        self.names = [self.names[i] for i in keep]
        if keep or self._paged:
            for entry in self._entries:
                entry.filter(keep)
        if self.pool is not None:
            self.pool.release(keep)
        if not keep:
            self._entries = []

    def state(self, name: Hashable) -> SequenceState:
        """A copy of one sequence's state.

        Raises:
            InputError: It is not in the batch.
        """
        if name not in self.names:
            raise InputError(f"sequence {name} is not in the batch; there are {self.names}.")
        i = self.names.index(name)
        return self.model.new_state(entry.extract(i) for entry in self._entries)

    def step(self, tokens: mx.array) -> mx.array:
        """One token for each sequence, ``[B]`` in the order of `names` -> logits ``[B, V]``, lazy.

        A call that raises leaves all states as they were.

        Raises:
            InputError: The tokens are not one for each sequence. CacheError: The pool is full.
        """
        if tokens.shape != (len(self.names),):
            raise InputError(
                f"tokens have shape {list(tokens.shape)}, expected [{len(self.names)}]: one for "
                "each sequence."
            )
        return self.model(tokens[:, None], cache=self._entries, last_only=True)[:, -1]

    def evaluate(self, *arrays: mx.array) -> None:
        """Compute what :meth:`step` returned, and the states behind it."""
        mx.eval(arrays, [entry.state for entry in self._entries])
        self.model.start_eval()

    def transaction(self):
        """A block that leaves all states as they were if it raises."""
        return transaction(self._entries)


def merged(states: Sequence[Sequence[Any]]) -> list[Any]:
    """One state for the sequences of several, which stay as they are."""
    return [type(row[0]).merge(list(row)) for row in zip(*states, strict=True)]


@dataclass
class Request:
    """A prompt, its reply so far, and what it was asked with.

    limit: Tokens of the reply. state: Where it goes on from, until it is read. tokens: Of its
    state at the end, at most. fresh: The prompt begins the sequence. resumed: What a prompt cache
    knows of it.
    """

    uid: int
    prompt: list[int]
    limit: int
    state: Any
    sampler: Sampler
    processors: list[LogitsProcessor]
    tokens: int
    fresh: bool = True
    resumed: Resumed | None = None
    reply: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        """First tokens of the prompt that need not be read."""
        return 0 if self.resumed is None else self.resumed.position

    def resume(self, model: Any, cache: PromptCache | None) -> None:
        """Begin with what `cache` knows."""
        if cache is not None and self.fresh:
            self.resumed = cache.resume(model, self.prompt)
            self.state = self.resumed.state


def begin(model: Any, sequences: list[Request], cache: PromptCache | None = None) -> Prefill:
    """Read prompts together, in the way that suits the device. cache: Learns them.

    On an H100, milliseconds for eight prompts of a 35B model: of 64 tokens 78 padded, 195 without
    padding and 375 one by one; of 512 tokens 133, 205 and 449; of 16 to 1,000 tokens 185, 185
    and 462. On a CPU launches cost nothing, and padding as much as any token.
    """
    padded = (
        len(sequences) > 1
        and mx.default_device() != mx.cpu
        and all(s.known < len(s.prompt) for s in sequences)
    )
    return (PaddedPrefill if padded else Prefill)(model, sequences, cache)


class Prefill:
    """Prompts that are read together: every expert once for all, the rest prompt by prompt, so
    that none is padded, and each gets the bits that it gets alone.
    """

    def __init__(self, model: Any, sequences: list[Request], cache: PromptCache | None = None):
        self._model, self.sequences, self._cache = model, sequences, cache
        self._done = {s.uid: s.known for s in sequences}
        self._stops: dict[int, list[int]] = {}
        self._logits: dict[int, mx.array] = {}
        for sequence in sequences:
            resumed = sequence.resumed
            if resumed is not None:
                self._logits[sequence.uid] = resumed.logits
                self._stops[sequence.uid] = resumed.stops[-STOPS_PER_CALL:]
                sequence.state.watch(self._stops[sequence.uid])

    @property
    def entries(self) -> list[Any]:
        """One state of all sequences."""
        return merged([sequence.state for sequence in self.sequences])

    def drop(self, uids: set[int]) -> None:
        """Go on without these sequences."""
        self.sequences = [s for s in self.sequences if s.uid not in uids]

    def advance(self, size: int) -> mx.array | None:
        """Read at most `size` tokens of each prompt; the logits behind all of them ``[B, V]``, or
        None while there is more to read."""
        unread = self._unread()
        if unread:
            parts = [s.prompt[self._done[s.uid] :][:size] for s in unread]
            logits = self._read(parts, [s.state for s in unread])
            for i, sequence in enumerate(unread):
                self._done[sequence.uid] += len(parts[i])
                self._logits[sequence.uid] = logits[i]
        if self._unread():
            return None
        return mx.stack([self._logits[s.uid] for s in self.sequences])

    def keep(self) -> None:
        """Tell the prompt cache what was read; call it once the logits are there."""
        for sequence in self.sequences if self._cache is not None else ():
            if sequence.fresh:
                uid, prompt, state = sequence.uid, sequence.prompt, sequence.state
                for stop in self._stops[uid]:
                    self._cache.store(self._model, prompt[:stop], state)
                self._cache.store(self._model, prompt, state, self._logits[uid])

    def _unread(self) -> list[Request]:
        return [s for s in self.sequences if self._done[s.uid] < len(s.prompt)]

    def _read(self, parts: list[list[int]], states: list[Any]) -> mx.array:
        tokens = [mx.array(part, mx.int32) for part in parts]
        entries = [entry for state in states for entry in state]
        with transaction(entries):
            if len(parts) == 1:
                logits = self._model(tokens[0][None], cache=states[0], last_only=True)[:, -1]
            else:
                logits = self._model.read_together(tokens, states)
            mx.eval(logits, [entry.state for entry in entries])
        self._model.start_eval()
        return logits


class PaddedPrefill(Prefill):
    """Prompts that are read as one batch, right-padded to the longest. Their last tokens take a
    step of their own, at which all end alike; only the states at their ends are kept."""

    def __init__(self, model: Any, sequences: list[Request], cache: PromptCache | None = None):
        super().__init__(model, sequences, cache)
        self._begin()

    def _begin(self) -> None:
        self._merged = merged([sequence.state for sequence in self.sequences])
        unread = [s.prompt[s.known : -1] for s in self.sequences]
        self._read_columns, width = 0, max(map(len, unread))
        self._ends: mx.array | None = None
        self._rows = mx.array([ids + [0] * (width - len(ids)) for ids in unread], mx.int32)
        ends = [len(ids) for ids in unread]
        for entry in self._merged:
            entry.prepare(lengths=ends, right_padding=[width - n for n in ends])

    @property
    def entries(self) -> list[Any]:
        """See :attr:`Prefill.entries`."""
        return self._merged

    def drop(self, uids: set[int]) -> None:
        """See :meth:`Prefill.drop`; what was read of the others is read again."""
        before = len(self.sequences)
        super().drop(uids)
        if self.sequences and len(self.sequences) < before:
            self._begin()

    def advance(self, size: int) -> mx.array | None:
        """See :meth:`Prefill.advance`."""
        width = self._rows.shape[1]
        if self._read_columns < width:
            part = self._rows[:, self._read_columns : self._read_columns + size]
            self._call(part)
            self._read_columns += part.shape[1]
            if self._read_columns < width:
                return None
        for entry in self._merged:
            entry.finalize()
        if self._ends is None:
            self._ends = self._call(mx.array([s.prompt[-1:] for s in self.sequences], mx.int32))
        return self._ends

    def keep(self) -> None:
        """See :meth:`Prefill.keep`."""
        for i, sequence in enumerate(self.sequences if self._cache is not None else ()):
            if sequence.fresh:
                state = [entry.extract(i) for entry in self._merged]
                self._cache.store(self._model, sequence.prompt, state, self._ends[i])

    def _call(self, tokens: mx.array) -> mx.array:
        with transaction(self._merged):
            logits = self._model(tokens, cache=self._merged, last_only=True)[:, -1]
            mx.eval(logits, [entry.state for entry in self._merged])
        self._model.start_eval()
        return logits


def sampled(
    logits: mx.array, sequences: list[Request], *, pending: Sequence[mx.array] = ()
) -> tuple[mx.array, mx.array]:
    """logits ``[B, V]`` -> tokens ``[B]`` and logprobs ``[B, V]`` float32, each row by its own
    sequence's processors and sampler. pending: ``[B]`` tokens that are not in the replies yet."""
    if any(sequence.processors for sequence in sequences):
        rows = []
        for i, sequence in enumerate(sequences):
            row = logits[i : i + 1]
            if sequence.processors:
                seen = mx.array([*sequence.prompt, *sequence.reply], mx.int32)
                for tokens in pending:
                    seen = mx.concatenate([seen, tokens[i : i + 1].astype(mx.int32)])
                for processor in sequence.processors:
                    row = processor(seen, row)
            rows.append(row)
        logits = mx.concatenate(rows)
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    samplers = [sequence.sampler for sequence in sequences]
    if all(sampler is samplers[0] for sampler in samplers):
        return samplers[0](logprobs), logprobs
    drawn = [sampler(logprobs[i : i + 1]) for i, sampler in enumerate(samplers)]
    return mx.concatenate(drawn), logprobs


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
    :class:`~mlx_moeflux.generation.batch.Batch`; prompts wait until the pool has room for
    their whole reply. prompt_cache: Knows beginnings of prompts and learns these.

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
                self.model.start_eval()
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
