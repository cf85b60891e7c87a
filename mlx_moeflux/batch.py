"""Many sequences at once: they share every step, so that an expert's block is read once for all.

:class:`Batch` is the bare mechanism: states join and leave between steps, and a step gives each
sequence's logits. :class:`~mlx_moeflux.batching.BatchGenerator` schedules prompts on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import SequenceState, transaction
from mlx_moeflux.cache.paged import KVPool, PagedCache
from mlx_moeflux.errors import InputError


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
        self.model.hand_over()

    def transaction(self):
        """A block that leaves all states as they were if it raises."""
        return transaction(self._entries)


def merged(states: Sequence[Sequence[Any]]) -> list[Any]:
    """One state for the sequences of several, which stay as they are."""
    return [type(row[0]).merge(list(row)) for row in zip(*states, strict=True)]
