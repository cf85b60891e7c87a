"""Source ``mtp``: drafts of a model's own head of multi-token prediction.

The head pairs each token with the hidden state before it and has a key-value state of its own,
which grows by the pairs of tokens that the text has; pairs of drafts are taken back. Nothing is
computed before a draft is wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import transaction
from mlx_moeflux.models.protocol import DraftHead

MOST_PAIRS = 4096
"""Most pairs that are read before a draft; of a longer text the newest. Bounds what is kept."""


class HeadDrafts:
    """Source ``mtp``. head: A :class:`~mlx_moeflux.models.mtp.PredictionHead`."""

    name = "mtp"

    def __init__(self, head: DraftHead):
        self._head = head

    def begin(self, prompt: Sequence[int]) -> HeadSequence:
        """Return the drafts of one sequence, whose prompt comes with the first proposal."""
        return HeadSequence(self._head)


class HeadSequence:
    """Drafts of one sequence, see :class:`~mlx_moeflux.generation.drafts.SequenceDrafts`.

    Evaluates: the drafts, in :meth:`propose`.
    """

    def __init__(self, head: DraftHead):
        self._head, self._cache = head, head.make_cache()
        # Positions and hidden states that are not read yet, and their number.
        self._observed: deque[tuple[int, mx.array]] = deque()
        self._count = 0
        # What the head reads for the pair after the last one, [1, 1, C].
        self._read: mx.array | None = None

    def observe(self, position: int, hidden: mx.array) -> None:
        """Keep hidden states ``[1, n, C]`` of the tokens from `position` on."""
        if hidden.shape[1] > MOST_PAIRS:
            position += hidden.shape[1] - MOST_PAIRS
            hidden = hidden[:, -MOST_PAIRS:]
        self._observed.append((position, hidden))
        self._count += hidden.shape[1]
        while self._count - self._observed[0][1].shape[1] >= MOST_PAIRS:
            self._count -= self._observed.popleft()[1].shape[1]

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return `most` drafts, each the likeliest token after those before it."""
        self._catch_up(tokens)
        if self._read is None or most < 1:
            return ()
        head, read, drafts = self._head, self._read, []
        marks = [entry.mark() for entry in self._cache]
        with transaction(self._cache):
            while True:
                drafts.append(mx.argmax(head.logits(read), axis=-1).astype(mx.uint32))
                if len(drafts) == most:
                    break
                read = head(read, drafts[-1], self._cache)
            ids: Any = mx.concatenate(drafts, axis=1)[0].tolist()
        for entry, mark in zip(self._cache, marks, strict=True):
            entry.rollback(mark)
        return ids

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Read the pairs of all hidden states that a token follows."""
        if not self._observed:
            return
        following: list[int] = []
        for position, hidden in self._observed:
            following += tokens[position + 1 : position + 1 + hidden.shape[1]]
        hidden = mx.concatenate([part for _, part in self._observed], axis=1)
        assert len(following) == hidden.shape[1], "the newest token has no hidden state yet"
        head = self._head
        with transaction(self._cache):
            ids = mx.array([following], mx.uint32)
            read = head(head.entering(hidden), ids, self._cache)[:, -1:]
            mx.eval(read, [entry.state for entry in self._cache])
        self._read = read
        self._observed.clear()
        self._count = 0
