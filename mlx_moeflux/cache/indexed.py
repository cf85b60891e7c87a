"""Rows of attention with an indexer that chooses blocks of them, of one sequence or a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlx_moeflux.cache.kv import (
    TAIL_ROWS,
    AttentionCache,
    TracedAttention,
    resized,
    tail_start,
    written,
)
from mlx_moeflux.cache.traced import Step
from mlx_moeflux.state_arrays import INDEXED, ROW_AXIS


class BlockMaker(Protocol):
    """The methods of an indexer that a cache calls. ratio: Tokens of a block."""

    ratio: int

    def plain_until(self, first: int) -> int:
        """Return the first column whose token may see less than all tokens before it, for sequences
        that begin at column `first` or later."""
        ...

    def pooled(self, keys: mx.array, first: Any) -> mx.array:
        """Return the keys of the blocks that index keys ``[B, 1, n ratio, Di]`` make. first: Number
        of the first block, an int or int32 ``[B]``."""
        ...


class IndexedStep(NamedTuple):
    """The arrays that attention with an indexer reads for one more token.

    buffers: Keys and values. blocks: Keys of complete blocks, [B, 1, N, Di]. column: Of the token,
    int or int32 [1]. padding: int32 [B], or None. plain: Sequences that see everything, bool [B];
    None if there are none. tail: If there is one, keys, values and index keys of the rows from
    `start` on, which are not in `buffers` and `blocks`.
    """

    buffers: tuple[mx.array, ...]
    blocks: mx.array
    column: Any
    padding: mx.array | None
    plain: mx.array | None = None
    tail: tuple[mx.array, ...] | None = None
    start: Any = None


class TracedIndexed(TracedAttention):
    """Traced form of :class:`IndexedCache`."""

    def __init__(self, kind: type[AttentionCache], step: Step, arrays: Sequence[Any]):
        *others, self._blocks = arrays
        super().__init__(kind, step, others)

    def last_step(self, indexer: BlockMaker) -> IndexedStep | None:
        """See :meth:`IndexedCache.last_step`."""
        if self._blocks is None:
            return None
        column = self._counts[self.row]
        start = column // TAIL_ROWS * TAIL_ROWS
        keys, values, _ = self._buffers
        return IndexedStep(
            (keys, values), self._blocks, column, self.left_padding, None, self._tail, start
        )


class IndexedCache(AttentionCache):
    """Cache of attention with an indexer: ``index_keys`` [B, 1, capacity, Di] beside keys and
    values, as projected.

    What :meth:`blocks` makes of them is kept and never saved: it can be made again.
    """

    declared, kind = INDEXED, INDEXED.name
    form = TracedIndexed
    indexer: BlockMaker | None = None
    """That of the layer, which sets it."""
    _blocks: mx.array | None = None
    _pooled = 0
    """Column up to which ``_blocks`` has the complete blocks of every sequence."""

    @property
    def index_keys(self) -> mx.array | None:
        """Return the buffer of index keys, the tail's rows included."""
        return self.arrays[2]

    def blocks(self, indexer: BlockMaker) -> mx.array:
        """Return the keys of blocks, [B, 1, N, D], with N as in the sequence that has most; a
        shorter one's last blocks mean nothing. Those that were complete in every sequence are
        kept."""
        self.flush()
        blocks, N = self._made(indexer, self.columns)
        return blocks[:, :, :N]

    def _made(self, indexer: BlockMaker, columns: int) -> tuple[mx.array, int]:
        """Return a buffer with the blocks of the first so many columns, and their number."""
        padding, ratio = self._padding or [0], indexer.ratio
        done = min(max(min(self._pooled, columns) - first, 0) // ratio for first in padding)
        N = max(max(columns - first, 0) // ratio for first in padding)
        blocks, self._pooled = self._blocks, max(columns, self._pooled)
        keys, first, stop = self._buffers[2], done * ratio, N * ratio
        if blocks is None or blocks.shape[ROW_AXIS] < N:
            rows = -(-max(N, 1) // TAIL_ROWS) * TAIL_ROWS
            blocks = resized(blocks, self.unpacked(keys[:, :, :1]), rows, done)
        if done < N:
            if not any(padding):
                keys = keys[:, :, first:stop]
            else:
                column = mx.arange(first, stop) + mx.array(padding)[:, None]
                column = mx.minimum(column, columns - 1)[:, None, :, None]
                keys = mx.take_along_axis(keys, column, axis=ROW_AXIS)
            blocks = written(blocks, indexer.pooled(self.unpacked(keys), done), done)
        self._blocks = blocks
        return blocks, N

    # One token: blocks begin with the tail.

    @property
    def takes_steps(self) -> bool:
        """Return True if a block begins where a tail does in every sequence, and all or none of
        them see everything."""
        indexer, padding = self.indexer, self._padding or [0]
        if indexer is None or self.packs or TAIL_ROWS % indexer.ratio:
            return False
        plain = {self.columns < indexer.plain_until(first) for first in padding}
        return len(plain) == 1 and not any(first % indexer.ratio for first in padding)

    def rows_ahead(self) -> int:
        """Return what :meth:`AttentionCache.rows_ahead` does; all or none see everything."""
        count = super().rows_ahead()
        if count and self.indexer is not None:
            plain = self.indexer.plain_until(self.first_column) - self.columns
            count = min(count, plain) if plain > 0 else count
        return count

    def begin_step(self, count: int = 1) -> tuple[Any, ...]:
        """Return what :meth:`AttentionCache.begin_step` does, and the blocks before the tail; None
        if every token is seen."""
        arrays, indexer = super().begin_step(count), self.indexer
        if indexer is None or self.columns < indexer.plain_until(self.first_column):
            return *arrays, None
        return *arrays, self._made(indexer, tail_start(self.columns))[0]

    def last_step(self, indexer: BlockMaker) -> IndexedStep | None:
        """Return what the token that was appended last needs; None if it sees every token."""
        column, padding = self.columns - 1, self._padding or [0]
        plain = [column < indexer.plain_until(first) for first in padding]
        if all(plain):
            return None
        keys, values, _ = self.buffers()
        some = mx.array(plain) if any(plain) else None
        return IndexedStep((keys, values), self.blocks(indexer), column, self.left_padding, some)

    def _truncate(self, columns: int) -> None:
        super()._truncate(columns)
        # Other tokens may follow: blocks behind the end are made again.
        self._pooled = min(self._pooled, columns)

    def _row_state(self) -> Any:
        return super()._row_state(), self._blocks, self._pooled

    def _back_to(self, columns: int, states: list[Any]) -> None:
        super()._back_to(columns, [capacity for capacity, *_ in states])
        _, self._blocks, self._pooled = states[-1]

    def _rearranged(self) -> None:
        super()._rearranged()
        self._blocks, self._pooled = None, 0

    def _join(self, parts: list[AttentionCache]) -> None:
        super()._join(parts)
        self.indexer = next(
            (part.indexer for part in parts if isinstance(part, IndexedCache)), None
        )

    def extract(self, i: int) -> IndexedCache:
        """See :meth:`AttentionCache.extract`."""
        single: Any = super().extract(i)
        single.indexer = self.indexer
        return single
