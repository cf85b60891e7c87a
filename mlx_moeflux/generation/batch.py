"""Continuous batching: prompts join a running batch between steps, replies leave at their end."""

from __future__ import annotations

import copy
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_moeflux.backend import use_mlx
from mlx_moeflux.cache import SequenceState, transaction
from mlx_moeflux.cache.paged import KVPool, PagedCache
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.checks import check_integer, check_number
from mlx_moeflux.errors import CacheError, InputError, MemoryBudgetError, UnsupportedError
from mlx_moeflux.generation.drafting import Drafter
from mlx_moeflux.generation.loop import CLEAR_EVERY
from mlx_moeflux.generation.prefill import Prefill, Request, make_prefill
from mlx_moeflux.generation.sampling import (
    LogitsProcessor,
    Sampled,
    Sampler,
    check_drawn,
    check_finite,
    check_ids,
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
from mlx_moeflux.kernels.verify import failures

UNLIMITED = -1  # tokens of a reply
OPEN_REPLY = 4096
"""Tokens that memory is kept for if a reply has no limit, or one beyond memory."""


class Batch:
    """Sequences that take every step together, under the caller's names. Not thread-safe.

    ``names``: In the order of the rows of :meth:`step`. ``entries``: Their state, an entry a layer.
    kv_pool_bytes: Keep keys and values in blocks of a pool of this size, so that nothing is copied
    when sequences join or leave; None gives each layer one buffer as long as the longest sequence.

    Raises:
        InputError: The pool has no room for one block.
        UnsupportedError: There is a pool, and the model's attention has an indexer.
    """

    def __init__(self, model: Any, *, kv_pool_bytes: int | None = None):
        self.model = model
        self.names: list[Any] = []
        self.pool = None if kv_pool_bytes is None else KVPool(model.state_spec(), kv_pool_bytes)
        self.entries: list[Any] = []
        self._paged: dict[int, PagedCache] = {}
        if self.pool is not None:
            specs = model.state_spec().entries
            for i, (entry, spec) in enumerate(zip(model.make_cache(), specs, strict=True)):
                if "index_keys" in spec.arrays:
                    raise UnsupportedError(
                        "a KV pool holds no index keys, and this model's attention has an indexer; "
                        "leave kv_pool_bytes out."
                    )
                if entry.declared.grows:
                    windowed = model.config.windowed
                    self._paged[i] = PagedCache(self.pool, spec, type(entry), windowed=windowed)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all states, padding and reserve included."""
        return sum(entry.nbytes for entry in self.entries)

    def join(self, names: Sequence[Hashable], state: Sequence[Any]) -> None:
        """Append the sequences of a state, of one sequence or merged of several.

        The caller must not use the state afterwards.

        Raises:
            InputError: A name is taken, or names and sequences differ in number.
            CacheError: The pool is full.
        """
        names = list(names)
        if len({*self.names, *names}) < len(self.names) + len(names):
            raise InputError(f"a sequence of {names} is in the batch already; use other names.")
        if any(entry.batch_size != len(names) for entry in state):
            raise InputError(f"{len(names)} names for a state of {state[0].batch_size} sequences.")
        if self.pool is not None:
            for entry in self._paged.values():
                entry.flush()
            self.pool.admit(state[0].seen())
        if not self.names:
            self.entries = [
                self._paged[i] if i in self._paged else type(entry).merge([entry])
                for i, entry in enumerate(state)
            ]
        for i, (mine, theirs) in enumerate(zip(self.entries, state, strict=True)):
            if self.names or i in self._paged:
                mine.extend(theirs)
        self.names += names

    def leave(self, names: Iterable[Hashable]) -> None:
        """Remove these sequences and free their memory."""
        gone = set(names)
        keep = [i for i, name in enumerate(self.names) if name not in gone]
        if len(keep) == len(self.names):
            return
        self.names = [self.names[i] for i in keep]
        if keep or self._paged:
            for entry in self.entries:
                entry.filter(keep)
        if self.pool is not None:
            self.pool.release(keep)
        if not keep:
            self.entries = []

    def state(self, name: Hashable) -> SequenceState:
        """Return a copy of one sequence's state.

        Raises:
            InputError: The sequence is not in the batch.
        """
        if name not in self.names:
            raise InputError(f"sequence {name} is not in the batch; there are {self.names}.")
        i = self.names.index(name)
        return self.model.new_state(entry.extract(i) for entry in self.entries)

    def step(self, tokens: mx.array) -> mx.array:
        """Append one token to each sequence, ``[B]`` in the order of `names`; return lazy logits
        ``[B, V]``.

        A call that raises changes no state.

        Raises:
            InputError: There is not one token per sequence. CacheError: The pool is full.
        """
        if not isinstance(tokens, mx.array) or tokens.shape != (len(self.names),):
            array = isinstance(tokens, mx.array)
            found = f"have shape {list(tokens.shape)}" if array else f"are {describe(tokens)}"
            raise InputError(
                f"tokens {found}, expected [{len(self.names)}]: one for each sequence."
            )
        return self.model(tokens[:, None], cache=self.entries, last_only=True)[:, -1]

    def evaluate(self, *arrays: mx.array) -> None:
        """Evaluate the results of :meth:`step` and the states."""
        mx.eval(arrays, [entry.state for entry in self.entries])
        self.model.start_eval()

    def transaction(self):
        """Return a context that rolls all states back if its block raises."""
        return transaction(self.entries)


def sampled(
    model: Any, logits: mx.array, sequences: list[Request], *, pending: Sequence[mx.array] = ()
) -> Sampled:
    """Sample tokens from logits ``[B, V]`` of `model`.

    Each row takes its own sequence's processors and sampler; rows of one sampler are sampled
    together. pending: Arrays ``[B]`` of tokens that are not in the replies yet.
    """
    if any(sequence.processors for sequence in sequences):
        rows = []
        for i, sequence in enumerate(sequences):
            row = logits[i : i + 1]
            if sequence.processors:
                unread = [tokens[i : i + 1] for tokens in pending]
                row = processed(sequence.processors, sequence.seen(unread), row)
            rows.append(row)
        logits = mx.concatenate(rows)
    logprobs, finite = normalised(logits)
    groups: dict[Sampler, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(sequence.sampler, []).append(i)
    if len(groups) == 1:
        return Sampled(model.lead(drawn(sequences[0].sampler, logprobs)), logprobs, finite)
    parts = [drawn(sampler, logprobs[mx.array(rows)]) for sampler, rows in groups.items()]
    order = [i for rows in groups.values() for i in rows]
    places = sorted(range(len(order)), key=order.__getitem__)
    return Sampled(model.lead(mx.concatenate(parts)[mx.array(places)]), logprobs, finite)


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


class Workload(NamedTuple):
    """The sequences of a generator: prompts that wait, prompts that are read together, and replies.

    layers: Number of layers that the prompts have passed in their present call. share: How much
    of them is read, see :meth:`Prefill.share`; 0 if none is read. prompts: uid -> (tokens that a
    prompt cache supplied, tokens that are read, these included) of each prompt that is read.
    """

    waiting: int = 0
    reading: int = 0
    running: int = 0
    layers: int = 0
    share: float = 0.0
    prompts: Mapping[int, tuple[int, int]] = MappingProxyType({})


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
    with `keep_states`, nor with a pool. One
    thread at a time may call its methods; sequences are inserted and removed between calls of
    :meth:`next`.
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
        self.model, self.max_tokens = model, max_tokens
        self.completion_batch_size = completion_batch_size
        self.prefill_batch_size = min(prefill_batch_size, completion_batch_size)
        self.prefill_step_size, self.keep_states = prefill_step_size, keep_states
        self.max_pause, self.state_bytes = max_pause, state_bytes
        self._open_reply = open_reply
        if not isinstance(prompt_cache, PromptCache | None):
            raise InputError(f"prompt_cache is {prompt_cache!r}; give a PromptCache.")
        self.prompt_cache = prompt_cache
        self._stops = set(check_ids("stop_ids", stop_ids))
        self._sampler = check_sampler(sampler) or make_sampler()
        self._processors = check_processors(logits_processors)
        # One step ahead hides the host's work behind a GPU's. A returned state contains the last
        # token, which must go through the model before its sequence leaves.
        self._ahead = keep_states or device.kind() != "cpu"
        self._waiting: deque[Request] = deque()
        self._prefill: Prefill | None = None
        self._parked: Prefill | None = None  # half read; its clients left
        self._batch = Batch(model, kv_pool_bytes=kv_pool_bytes)
        self._newest: Any = None  # Sampled, not reported yet
        self._uids = self._steps = 0
        self._unreported = False
        # The sequence that is alone since some steps, and its drafts.
        self._drafts: tuple[Request, Drafter] | None = None
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
        self._waiting.extend(new)
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
        with self.model.lock, failures.reported():
            drafter, self._drafts = self._alone(), None
            if drafter is None:
                return self._next(None)
            drafter.resume()
            (sequence,) = self._batch.names
            replies = self._next(drafter)
            drafter.pause()
            self._drafts = sequence, drafter
            return replies

    def prompt_room(self) -> int:
        """Return the most tokens that a prompt may have: context and memory hold it with the first
        token of its reply. Any thread."""
        lengths = range(1, self.model.context_left() + 1)
        return bisect_left(lengths, True, key=lambda n: not self._fit([n + 1]))

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
        context, begin = self.model.context_left() - used, used + prompt_tokens
        if prompt_tokens > context:
            # Claude Code reads both numbers.
            raise CacheError(
                f"{what} has {prompt_tokens} tokens > {context} that the context has room for; "
                "shorten it or raise max_context."
            )
        most = max(context - prompt_tokens + (not self.keep_states), 1)
        if limit != UNLIMITED:
            most = min(limit, most)
        lengths = range(1, most + 1)
        fitting = bisect_left(lengths, True, key=lambda n: not self._fit([begin + n]))
        if fitting:
            return fitting
        if (pool := self._batch.pool) is not None:
            raise MemoryBudgetError(
                f"{what} takes {pool.blocks_for(begin + 1)} blocks of {pool.block} tokens, the KV "
                f"pool has {pool.blocks}; give the pool more bytes or shorten it."
            )
        raise MemoryBudgetError(
            f"{what} of {prompt_tokens} tokens has a state of {self.model.state_bytes(begin + 1)} "
            f"bytes, and memory holds {self.state_bytes} for all sequences; allow more or "
            "shorten it."
        )

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        """Remove waiting, prefilling and running sequences.

        Return the states of the running ones by uid if `return_prompt_caches`.
        """
        uids = set(uids)
        states = {}
        with self.model.lock:
            gone = [s for s in self._batch.names if s.uid in uids]
            if return_prompt_caches:
                states = {s.uid: self._batch.state(s) for s in gone}
            self._waiting = deque(s for s in self._waiting if s.uid not in uids)
            if self._prefill is not None:
                for sequence in self._prefill.sequences:
                    sequence.left |= sequence.uid in uids
                self._park()
            self._drop(gone)
        return states

    def forget(self) -> None:
        """Free what is kept of prompts that were removed while they were read."""
        self._parked = None

    def close(self) -> None:
        """Free all states. A second call does nothing."""
        self._closed = True
        self._waiting.clear()
        self._prefill = self._parked = self._newest = None
        self._batch.leave(list(self._batch.names))

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
        most = min(most or self.completion_batch_size, self.completion_batch_size)
        prompt_tokens = min(prompt_tokens, self.model.context_left() - 2)
        for count in (2**power for power in range(most.bit_length())):
            if prompt_tokens < 1 or not self._fit([prompt_tokens + 2] * count):
                return
            with BatchGenerator(
                self.model,
                max_tokens=2,
                completion_batch_size=count,
                prefill_batch_size=self.prefill_batch_size,
                prefill_step_size=self.prefill_step_size,
                state_bytes=self.state_bytes,
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
        waiting, running, prefill = len(self._waiting), len(self._batch), self._prefill
        if prefill is None:
            return Workload(waiting, 0, running)
        share = prefill.share()
        prompts = {
            s.uid: (s.cached, s.cached + int(share * (len(s.prompt) - s.cached)))
            for s in prefill.live
        }
        return Workload(waiting, len(prompts), running, prefill.layers, share, prompts)

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
            self.model.check_cache(state)
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

    def _alone(self) -> Drafter | None:
        """Return the drafts of the only sequence, or None while there is none or another prompt."""
        drafting, known = self.model.drafting, self._drafts
        if drafting is None or len(self._batch) != 1 or self.workload()[:2] != (0, 0):
            return None
        if self.keep_states or self._batch.pool is not None:
            return None
        (sequence,) = self._batch.names
        if known is not None and known[0] is sequence:
            return known[1]
        tokens = [*sequence.prompt, *sequence.reply]
        read = len(tokens) - (not self._ahead and not self._unreported)
        drafter = drafting.begin(self.model, tokens[:read], read=read)
        for newest in tokens[read:]:
            drafter.learn(newest)
        return drafter

    def _next(self, drafter: Drafter | None) -> list[BatchReply]:
        if not self._ahead and len(self._batch) and not self._unreported:
            self._newest = self._advance(drafter)
            self._unreported = True
        self._read_prompts()
        if not len(self._batch):
            return []
        if drafter is not None and (replies := self._verified(drafter)):
            return replies
        newest, sequences = self._newest, list(self._batch.names)
        if self._ahead:
            self._newest = self._advance(drafter)
        else:
            self._unreported = False
        check_finite(newest.finite, max(len(s.prompt) + len(s.reply) for s in sequences))
        self._shorten(sequences)
        replies = [
            self._reply(sequence, token, newest.logprobs[i])
            for i, (sequence, token) in enumerate(
                zip(sequences, newest.tokens.tolist(), strict=True)
            )
        ]
        self._end_step([s for s, r in zip(sequences, replies, strict=True) if r.finish_reason])
        return replies

    def _verified(self, drafter: Drafter) -> list[BatchReply]:
        """Read the newest token of the only sequence and drafts as rows. Return it and the accepted
        drafts as replies, or an empty list if nothing was proposed."""
        (sequence,), newest = self._batch.names, self._newest
        # The last token takes a plain step, as in a loop.
        room = min(sequence.limit, sequence.reserved) - len(sequence.reply) - 2
        drafts = drafter.propose(newest.tokens, room, ahead=self._ahead)
        if not drafts:
            return []

        def sample(logits: mx.array, read: mx.array) -> Sampled:
            pending = [read[i : i + 1] for i in range(read.size)]
            return sampled(self.model, logits, [sequence], pending=pending)

        given, at_once = [], sequence.sampler is greedy and not sequence.processors
        rows = drafter.verify(
            newest, drafts, self._batch.entries, sample, at_once=at_once, stops=self._stops
        )
        with self._batch.transaction(), closing(rows):
            for value, logprobs, following in rows:
                given.append((value, logprobs))
                newest = following
        self._newest, self._unreported = newest, True
        replies = [self._reply(sequence, value, logprobs) for value, logprobs in given]
        self._end_step([sequence] if replies[-1].finish_reason else [])
        return replies

    def _end_step(self, ended: list[Request]) -> None:
        self._keep_replies(ended)
        self._drop(ended)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()

    def _shorten(self, sequences: list[Request]) -> None:
        """End the longest of the grown replies with their next token until the states of all fit in
        memory after the one behind it."""
        going = [*sequences, *(self._prefill.sequences if self._prefill else [])]
        while grown := [s for s in going if s.grown]:
            if self._has_room(going):
                return
            longest = max(grown, key=lambda s: s.tokens)
            longest.limit = len(longest.reply) + 1
            going.remove(longest)

    def _reply(self, sequence: Request, token: int, logprobs: mx.array) -> BatchReply:
        sequence.reply.append(token)
        stopped, full = token in self._stops, len(sequence.reply) >= sequence.limit
        finish = "stop" if stopped else "length" if full else None
        state = self._batch.state(sequence) if finish and self.keep_states else None
        return BatchReply(sequence.uid, token, logprobs, finish, state, sequence.cached)

    def _keep_replies(self, ended: list[Request]) -> None:
        """Store the states after replies, from which next turns go on, if the prompt cache does."""
        if self.prompt_cache is None or not self.prompt_cache.replies:
            return
        for sequence in ended:
            if sequence.fresh:
                state = self._batch.state(sequence)
                tokens = [*sequence.prompt, *sequence.reply][: state.position]
                self.prompt_cache.store(self.model, tokens, state)

    def _drop(self, gone: list[Request]) -> None:
        if not gone:
            return
        keep = [i for i, sequence in enumerate(self._batch.names) if sequence not in gone]
        self._batch.leave(gone)
        if not keep:
            self._newest = None
        else:
            rows = mx.array(keep)
            self._newest = Sampled(*(array[rows] for array in self._newest))

    def _advance(self, drafter: Drafter | None) -> Sampled:
        """Run the model on every sequence's newest token and sample the next ones. drafter: Of the
        only sequence."""
        if drafter is None:
            return self._step()
        if not self._ahead:
            drafter.stepped(self._newest.tokens.item())
        with drafter.observing() as hidden:
            following = self._step()
        if self._ahead:
            drafter.stepped(self._newest.tokens.item())
        drafter.observe(hidden, 1)
        return following

    def _step(self) -> Sampled:
        tokens = self._newest.tokens
        pending = [tokens] if self._ahead else []
        with self._batch.transaction(), self.model.ahead():
            logits = self._batch.step(tokens)
            if any(sequence.processors for sequence in self._batch.names):
                # A processor may wait for `tokens`; the model goes on meanwhile.
                mx.async_eval(logits)
                self.model.start_eval()
            following = sampled(self.model, logits, self._batch.names, pending=pending)
            if self._ahead:
                mx.async_eval(following)
                self.model.start_eval()
            else:
                self._batch.evaluate(*following)
            # Wait inside the transaction, which an interrupt rolls back.
            mx.eval(self._newest)
            read = self._newest if self._ahead else following
            drawn: Any = read.tokens.tolist()
            check_drawn(drawn, read.logprobs.shape[-1])
            return following

    def _read_prompts(self) -> None:
        """Admit waiting prompts if there is room, and read one step of them."""
        if self._prefill is None and self._parked is not None and self._continued(self._parked):
            self._prefill, self._parked = self._parked, None
        if self._prefill is None:
            room = min(self.prefill_batch_size, self.completion_batch_size - len(self._batch))
            first = self._admitted(room)
            if not first:
                return
            self._prefill = make_prefill(self.model, first, self.prompt_cache)
        until = None if self.max_pause is None else time.monotonic() + self.max_pause
        logits = self._prefill.advance(self.prefill_step_size, until)
        if logits is None:
            return
        sequences = self._prefill.live
        self._prefill.keep()
        if not sequences:
            self._prefill = None
            return
        following = sampled(self.model, logits, sequences)
        mx.eval(following)
        drawn: Any = following.tokens.tolist()
        check_drawn(drawn, following.logprobs.shape[-1])
        self._batch.join(sequences, self._prefill.entries)
        if self._newest is not None:
            pairs = zip(self._newest, following, strict=True)
            following = Sampled(*(mx.concatenate(list(pair)) for pair in pairs))
        self._newest = following
        for sequence in sequences:
            sequence.state = sequence.logits = None
        self._prefill, self._unreported = None, True

    def _admitted(self, room: int) -> list[Request]:
        """Return at most `room` next prompts whose whole replies there is memory for."""
        first: list[Request] = []
        for request in islice(self._waiting, max(room, 0)):
            if not self._has_room([*self._batch.names, *first, request]):
                break
            request.resume(self.model, self.prompt_cache)
            first.append(request)
        # Only now: an error above leaves all of them waiting.
        for _ in first:
            self._waiting.popleft()
        return first

    def _park(self) -> None:
        """Set the prefill aside if all its clients left, and no waiting prompt begins as one of its
        prompts."""
        prefill = self._prefill
        if prefill is None or prefill.live or self._continued(prefill):
            return
        self._prefill = None
        if self.prompt_cache is not None and prefill.share():
            self._parked = prefill

    def _continued(self, prefill: Prefill) -> bool:
        """Return True if a waiting prompt begins as one of `prefill` does up to its last stop, from
        where the prompt cache can continue."""
        starts = [s.prompt[: s.stops[-1]] if s.stops else s.prompt for s in prefill.sequences]
        return any(
            request.fresh and request.prompt[: len(start)] == start
            for request in self._waiting
            for start in starts
        )

    def _has_room(self, sequences: Sequence[Request]) -> bool:
        """Return True if memory holds the states of these; forget parked prompts in their way."""
        tokens = [sequence.tokens for sequence in sequences]
        if self._parked is not None:
            if self._fit([*tokens, *(s.tokens for s in self._parked.sequences)]):
                return True
            self._parked = None
        return self._fit(tokens)

    def _fit(self, lengths: Sequence[int]) -> bool:
        """Return True if states of so many tokens fit in memory together."""
        pool = self._batch.pool
        if pool is not None:
            return sum(pool.blocks_for(tokens) for tokens in lengths) <= pool.blocks
        if self.state_bytes is None:
            return True
        # All are padded to the longest.
        return len(lengths) * self.model.state_bytes(max(lengths)) <= self.state_bytes
