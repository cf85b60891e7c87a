"""Decides which sequences of a batch run: admission, parking, and what memory cuts short."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from mlx_moeflux.cache.paged import KVPool
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.errors import CacheError, MemoryBudgetError
from mlx_moeflux.generation.prefill import Prefill, Request, make_prefill
from mlx_moeflux.models.protocol import LoadedModel

UNLIMITED = -1  # tokens of a reply


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


class Scheduler:
    """Owns the queues of prompts that wait, are read or are parked, and decides by the memory that
    all sequences share. It runs no model. Any thread may call :meth:`prompt_room`, :meth:`fitting`
    and :meth:`fits`, one thread at a time the others.

    pool: Bounds the states; None: `state_bytes` does, or nothing. The others are those of
    :class:`~mlx_moeflux.generation.batch.BatchGenerator`.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        completion_batch_size: int,
        prefill_batch_size: int,
        pool: KVPool | None,
        state_bytes: int | None,
        prompt_cache: PromptCache | None,
        keep_states: bool,
    ):
        self.model, self.pool, self.state_bytes = model, pool, state_bytes
        self.completion_batch_size = completion_batch_size
        self.prefill_batch_size = min(prefill_batch_size, completion_batch_size)
        self.prompt_cache, self._keep_states = prompt_cache, keep_states
        self._waiting: deque[Request] = deque()
        self._reading: Prefill | None = None
        self._parked: Prefill | None = None  # half read; its clients left

    @property
    def idle(self) -> bool:
        """Return True if no prompt waits or is read."""
        return not self._waiting and self._reading is None

    def add(self, requests: Iterable[Request]) -> None:
        """Queue prompts."""
        self._waiting.extend(requests)

    def remove(self, uids: Collection[int]) -> None:
        """Remove waiting prompts, and note that the clients of those that are read left.

        The prefill is parked if all its clients left, and no waiting prompt begins as one of its
        prompts.
        """
        self._waiting = deque(s for s in self._waiting if s.uid not in uids)
        prefill = self._reading
        if prefill is None:
            return
        for sequence in prefill.sequences:
            sequence.left |= sequence.uid in uids
        if prefill.live or self._continued(prefill):
            return
        self._reading = None
        if self.prompt_cache is not None and prefill.share():
            self._parked = prefill

    def forget(self) -> None:
        """Free what is parked."""
        self._parked = None

    def close(self) -> None:
        """Forget all prompts."""
        self._waiting.clear()
        self._reading = self._parked = None

    def schedule(self, running: Sequence[Request]) -> Prefill | None:
        """Return the prompts to read now beside the `running` sequences: those that are half read,
        parked ones that a waiting prompt begins as, or waiting ones that there is room for."""
        if self._reading is None and self._parked is not None and self._continued(self._parked):
            self._reading, self._parked = self._parked, None
        if self._reading is None and (first := self._admitted(running)):
            self._reading = make_prefill(self.model, first, self.prompt_cache)
        return self._reading

    def end_prefill(self) -> None:
        """Note that the prompts of :meth:`schedule` are read."""
        self._reading = None

    def shorten(self, running: Sequence[Request]) -> None:
        """End the longest of the grown replies with their next token until the states of all fit in
        memory after the one behind it."""
        going = [*running, *(self._reading.sequences if self._reading else [])]
        while grown := [s for s in going if s.grown]:
            if self._has_room(going):
                return
            longest = max(grown, key=lambda s: s.tokens)
            longest.limit = len(longest.reply) + 1
            going.remove(longest)

    def workload(self, running: int) -> Workload:
        """Return what there is to do beside so many running sequences."""
        waiting, prefill = len(self._waiting), self._reading
        if prefill is None:
            return Workload(waiting, 0, running)
        share = prefill.share()
        prompts = {
            s.uid: (s.cached, s.cached + int(share * (len(s.prompt) - s.cached)))
            for s in prefill.live
        }
        return Workload(waiting, len(prompts), running, prefill.layers, share, prompts)

    def prompt_room(self) -> int:
        """See :meth:`~mlx_moeflux.generation.batch.BatchGenerator.prompt_room`."""
        lengths = range(1, self.model.context_left() + 1)
        return bisect_left(lengths, True, key=lambda n: not self.fits([n + 1]))

    def fitting(self, prompt_tokens: int, limit: int, *, used: int, what: str) -> int:
        """See :meth:`~mlx_moeflux.generation.batch.BatchGenerator.fitting`."""
        context, begin = self.model.context_left() - used, used + prompt_tokens
        if prompt_tokens > context:
            # Claude Code reads both numbers.
            raise CacheError(
                f"{what} has {prompt_tokens} tokens > {context} that the context has room for; "
                "shorten it or raise max_context."
            )
        most = max(context - prompt_tokens + (not self._keep_states), 1)
        if limit != UNLIMITED:
            most = min(limit, most)
        lengths = range(1, most + 1)
        fitting = bisect_left(lengths, True, key=lambda n: not self.fits([begin + n]))
        if fitting:
            return fitting
        if (pool := self.pool) is not None:
            raise MemoryBudgetError(
                f"{what} takes {pool.blocks_for(begin + 1)} blocks of {pool.block} tokens, the KV "
                f"pool has {pool.blocks}; give the pool more bytes or shorten it."
            )
        raise MemoryBudgetError(
            f"{what} of {prompt_tokens} tokens has a state of {self.model.state_bytes(begin + 1)} "
            f"bytes, and memory holds {self.state_bytes} for all sequences; allow more or "
            "shorten it."
        )

    def fits(self, lengths: Sequence[int]) -> bool:
        """Return True if states of so many tokens fit in memory together."""
        if (pool := self.pool) is not None:
            return sum(pool.blocks_for(tokens) for tokens in lengths) <= pool.blocks
        if self.state_bytes is None:
            return True
        # All are padded to the longest.
        return len(lengths) * self.model.state_bytes(max(lengths)) <= self.state_bytes

    def _admitted(self, running: Sequence[Request]) -> list[Request]:
        """Return the next prompts whose whole replies there is memory for."""
        room = min(self.prefill_batch_size, self.completion_batch_size - len(running))
        first: list[Request] = []
        for request in islice(self._waiting, max(room, 0)):
            if not self._has_room([*running, *first, request]):
                break
            request.resume(self.model, self.prompt_cache)
            first.append(request)
        # Only now: an error above leaves all of them waiting.
        for _ in first:
            self._waiting.popleft()
        return first

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
            if self.fits([*tokens, *(s.tokens for s in self._parked.sequences)]):
                return True
            self._parked = None
        return self.fits(tokens)
