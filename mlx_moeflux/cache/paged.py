"""Rows of a batch in blocks of one pool: nothing is copied when sequences join or leave.

A sequence has the same block numbers in every layer. Block 0 has no owner; padding reads it. A call
gathers each sequence's rows so that all end at the last column, which gives the arrays, and the
bits, of :class:`~mlx_moeflux.cache.kv.AttentionCache`. A traced step gathers nothing: its attention
kernel reads the blocks through their table.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache.base import as_ints
from mlx_moeflux.cache.kv import TAIL_ROWS, AttentionCache, Tail, TracedAttention, tail_start
from mlx_moeflux.cache.state.spec import StateSpec
from mlx_moeflux.cache.traced import Step
from mlx_moeflux.checkpoint.tensors import mlx_dtype
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.state_arrays import EntrySpec

BLOCK_TOKENS = 16


class KVPool:
    """Block tables of all sequences, shared by the attention layers of a model.

    nbytes: Bytes of all layers' blocks. block: Tokens of a block.

    Raises:
        InputError: The bytes have no room for one block.
    """

    def __init__(self, spec: StateSpec, nbytes: int, *, block: int = BLOCK_TOKENS):
        self.block = block
        self.block_bytes = block * sum(entry.row_bytes for entry in spec.entries)
        self.blocks = nbytes // self.block_bytes if self.block_bytes else 0
        if self.block_bytes and not self.blocks:
            raise InputError(
                f"a KV pool of {nbytes} bytes has no room for a block of {block} tokens; give at "
                f"least {self.block_bytes}."
            )
        self.tables: list[list[int]] = []
        self._free = list(range(self.blocks, 0, -1))
        self._index: tuple[list[int], mx.array] | None = None
        self._table: tuple[int, mx.array] | None = None

    @property
    def free(self) -> int:
        """Return the number of free blocks."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that a sequence of `tokens` tokens takes."""
        return -(-tokens // self.block) if self.block_bytes else 0

    def admit(self, lengths: Sequence[int]) -> None:
        """Add sequences of these lengths and allocate their blocks.

        Raises:
            CacheError: Too few blocks are free; nothing was allocated.
        """
        self._take([0] * len(self.tables) + [self.blocks_for(n) for n in lengths])
        self._index = self._table = None

    def release(self, keep: Sequence[int]) -> None:
        """Remove all sequences but these and free their blocks."""
        kept = set(keep)
        for i, table in enumerate(self.tables):
            if i not in kept:
                self._free.extend(reversed(table))
        self.tables = [self.tables[i] for i in keep]
        self._index = self._table = None

    def reserve(self, lengths: Sequence[int]) -> None:
        """Allocate the blocks that sequences of these lengths lack.

        Raises:
            CacheError: Too few blocks are free.
        """
        counts = [self.blocks_for(n) - len(t) for n, t in zip(lengths, self.tables, strict=True)]
        if max(counts, default=0) > 0:
            self._take(counts)
            self._table = None

    def table(self, pages: int) -> mx.array:
        """Return the first blocks of each sequence, int32 [B, pages], 0 where it has none."""
        if self._table is None or self._table[0] != pages:
            found = np.zeros((len(self.tables), pages), np.int32)
            for row, blocks in zip(found, self.tables, strict=True):
                row[: len(blocks)] = blocks[:pages]
            self._table = pages, mx.array(found)
        return self._table[1]

    def rows(self, lengths: Sequence[int]) -> mx.array:
        """Return the pool rows of sequences of these lengths, int32 [B, S].

        The last token of each sequence is in the last column; padding is 0. Missing blocks are
        allocated.

        Raises:
            CacheError: Too few blocks are free.
        """
        lengths = list(lengths)
        self.reserve(lengths)
        if self._index is not None:
            before, index = self._index
            steps = {after - n for n, after in zip(before, lengths, strict=True)}
            if steps == {0}:
                return index
            if len(steps) == 1 and min(steps) > 0:
                new = self.last_rows(lengths, steps.pop())
                self._index = lengths, mx.concatenate([index, new], axis=1)
                return self._index[1]
        self._index = lengths, self.last_rows(lengths, max(lengths))
        return self._index[1]

    def last_rows(self, lengths: Sequence[int], last: int) -> mx.array:
        """Return the `last` columns of :meth:`rows`, without allocating blocks."""
        found = np.zeros((len(lengths), last), np.int32)
        for row, n, table in zip(found, lengths, self.tables, strict=True):
            position = np.arange(max(n - last, 0), n)
            blocks = np.array(table, np.int32)[position // self.block]
            row[last - len(position) :] = blocks * self.block + position % self.block
        return mx.array(found)

    def _take(self, counts: Sequence[int]) -> None:
        needed = sum(max(count, 0) for count in counts)
        if needed > len(self._free):
            raise CacheError(
                f"The KV pool is full: {needed} blocks of {self.block} tokens are needed, "
                f"{len(self._free)} of {self.blocks} are free and {len(self.tables)} sequences "
                "hold the others; let one end, or give the pool more bytes."
            )
        self.tables += [[] for _ in range(len(counts) - len(self.tables))]
        for table, count in zip(self.tables, counts, strict=True):
            table += [self._free.pop() for _ in range(count)]


class TracedPages(TracedAttention):
    """Traced form of :class:`PagedCache`."""

    def __init__(self, kind: type[AttentionCache], step: Step, arrays: Sequence[mx.array]):
        *others, self._table = arrays
        super().__init__(kind, step, others)
        self.appends_together = False

    def appended(self, tail: Sequence[mx.array], *rows: mx.array) -> dict[str, Any]:
        """See :meth:`TracedAttention.appended`."""
        return super().appended(tail, *rows) | {"table": self._table, "page": BLOCK_TOKENS}


class PagedCache(AttentionCache):
    """One layer's rows in a pool, for each field [R, H, D].

    spec, kind: Arrays and class of the entries that join and that ``extract`` returns.
    windowed: Tokens see only a window of the others.
    """

    form = TracedPages

    def __init__(
        self, pool: KVPool, spec: EntrySpec, kind: type[AttentionCache], *, windowed: bool = False
    ):
        super().__init__()
        self._windowed = windowed
        self._pool, self._kind = pool, kind
        self._padding: list[int] = []
        rows = (pool.blocks + 1) * pool.block
        self._buffers = [
            mx.zeros((rows, array.shape[1], array.shape[3]), mlx_dtype(array.dtype))
            for array in spec.arrays.values()
        ]

    @property
    def batch_size(self) -> int:
        return len(self._padding)

    @property
    def capacity(self) -> int:
        """Return the rows of the pool."""
        return self._buffers[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all allocated blocks."""
        row = sum(buffer.nbytes for buffer in self._buffers) // self.capacity
        return row * self._pool.block * sum(map(len, self._pool.tables))

    def _write(self, *rows: mx.array) -> None:
        T = rows[0].shape[2]
        index = self._pool.rows([n + T for n in self.seen()])
        self._scatter(index[:, index.shape[1] - T :], list(map(self._kind.packed, rows)))
        self.advance(T)

    def views(self) -> tuple[mx.array, ...]:
        """Return copies of the S columns, in the order of the fields: [B, H, S, D] each."""
        self.flush()
        return tuple(map(self._kind.unpacked, self._gathered(self._pool.rows(self.seen()))))

    def buffers(self) -> Sequence[mx.array]:
        """Return copies as long as the buffers of contiguous entries.

        Attention kernels choose how to split the keys by the length of the buffer.
        """
        if self._kind.packs:
            return self.views()
        self.flush()
        index = self._pool.rows(self.seen())
        index = mx.pad(index, [(0, 0), (0, self.rows_for(self.columns) - index.shape[1])])
        return self._gathered(index)

    def _gathered(self, index: mx.array) -> tuple[mx.array, ...]:
        """Return the rows of `index` [B, S], each [B, H, S, D]."""
        return tuple(buffer[index].swapaxes(1, 2) for buffer in self._buffers)

    # Appending one row at a time.

    @property
    def takes_steps(self) -> bool:
        """Return True if the paged attention kernel can read the blocks."""
        return (
            self._kind is AttentionCache and not self._windowed and self._pool.block == BLOCK_TOKENS
        )

    def begin_step(self, count: int = 1) -> tuple[mx.array, ...]:
        """Return pools and tail, see :meth:`AttentionCache.begin_step`, and the block table."""
        self._pool.reserve([n + count for n in self.seen()])
        if self._tail is None or self._tail.start != tail_start(self.columns):
            self.flush()
            self._tail = self._cut()
        table = self._pool.table(self.rows_for(self.columns + count) // self._pool.block)
        return *self._buffers, *self._tail.arrays, table

    def _cut(self) -> Tail:
        start = tail_start(self.columns)
        index = self._pool.last_rows(self.seen(), self.columns - start)
        index = mx.pad(index, [(0, 0), (0, TAIL_ROWS - index.shape[1])])
        return Tail(start, self._gathered(index))

    def flush(self) -> None:
        """Write the tail into the blocks, as before the pool admits sequences."""
        if self._tail is None:
            return
        (start, ends, _), self._tail = self._tail, None
        rows = self.columns - start
        if rows > 0:
            index = self._pool.last_rows(self.seen(), rows)
            self._scatter(index, [end[:, :, :rows] for end in ends])

    def extend(self, other: AttentionCache) -> None:
        """Append the sequences of a contiguous entry, which the pool has admitted before."""
        self._join_counts([copy.copy(self), other] if self._padding else [other])
        arrays = other.arrays
        if arrays[0] is None:
            return
        index = self._pool.rows(self.seen())[-other.batch_size :]
        S = min(other.columns, index.shape[1])
        if S:
            columns = slice(other.columns - S, other.columns)
            rows = [array[:, :, columns] for array in arrays if array is not None]
            self._scatter(index[:, index.shape[1] - S :], rows)

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only these sequences; the caller releases the others' blocks."""
        self.flush()  # while the counts are those of the blocks
        self._keep(as_ints(batch_indices, "batch_indices"))

    def extract(self, i: int) -> AttentionCache:
        """Return a contiguous entry for sequence i."""
        single = self._kind()
        single.columns = n = self.seen()[i]
        if n:
            self.flush()
            index = self._pool.rows(self.seen())[i : i + 1, self.columns - n :]
            single.arrays = map(mx.contiguous, self._gathered(index))
            mx.async_eval(single._arrays())
        return single

    def _scatter(self, rows: mx.array, new: Sequence[mx.array]) -> None:
        """Write arrays [B, H, T, D], in the order of the fields, at rows [B, T]."""
        self.flush()
        rows = rows.reshape(-1)
        self._buffers = [
            _scattered(pool, rows, one) for pool, one in zip(self._buffers, new, strict=True)
        ]


def _scattered(pool: mx.array, rows: mx.array, new: mx.array) -> mx.array:
    """Return `pool` [R, H, D] with `new` [B, H, T, D] written at `rows` [B * T]."""
    _, H, _, D = new.shape
    # A second handle lets MLX write in place, as in AttentionCache. Padding of a joining sequence
    # goes to row 0, which is never read as a token.
    pool = copy.copy(pool)
    pool[rows] = new.swapaxes(1, 2).reshape(-1, H, D).astype(pool.dtype)
    return pool
