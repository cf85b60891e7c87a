"""Many sequences at once: they share every step, so that an expert's block is read once for all.

:class:`Batch` is the bare mechanism: states join and leave between steps, and a step gives each
sequence's logits. :class:`~mlx_moeflux.batching.BatchGenerator` schedules prompts on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import SequenceState, transaction
from mlx_moeflux.errors import InputError


class Batch:
    """Sequences that take every step together, under names of the caller's.

    ``names``: In the order of the rows of :meth:`step`.
    """

    def __init__(self, model: Any):
        self.model = model
        self.names: list[Hashable] = []
        self._entries: list[Any] = []

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
        """
        names = list(names)
        if len({*self.names, *names}) < len(self.names) + len(names):
            raise InputError(f"a sequence of {names} is in the batch already; use other names.")
        if any(entry.batch_size != len(names) for entry in state):
            raise InputError(f"{len(names)} names for a state of {state[0].batch_size} sequences.")
        if not self.names:
            self._entries = [type(entry).merge([entry]) for entry in state]
        else:
            for mine, theirs in zip(self._entries, state, strict=True):
                mine.extend(theirs)
        self.names += names

    def leave(self, names: Iterable[Hashable]) -> None:
        """Let these sequences go, and what they held."""
        gone = set(names)
        keep = [i for i, name in enumerate(self.names) if name not in gone]
        if len(keep) == len(self.names):
            return
        self.names = [self.names[i] for i in keep]
        if not keep:
            self._entries = []
            return
        for entry in self._entries:
            entry.filter(keep)

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
