"""Arrays with a row for each token, such as keys and values, of one sequence or a batch.

MLX updates a buffer in place only if it has no other holder. Decoding runs one step ahead of the
GPU, so the step before still holds the buffer, and every step would copy it. Decode steps therefore
append to a tail of TAIL_ROWS rows, which a kernel writes anew each time, and a full tail is copied
into the buffer.

Quantised entries pack the integers, scales and biases of a row's groups (MLX's affine
quantisation) into one run of 16-bit words, so the code that stores, moves and saves rows is shared.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from mlx_moeflux.cache.base import BaseCache, Mark, as_ints
from mlx_moeflux.cache.traced import Step
from mlx_moeflux.errors import CacheError, UnsupportedError
from mlx_moeflux.kernels.runtime.views import short
from mlx_moeflux.state_arrays import ATTENTION, ROW_AXIS, WORD, group_words, quantized_kind

# Buffers grow by multiples of it. It is a multiple of the keys that kernels take in one pass.
TAIL_ROWS = 64


class Tail(NamedTuple):
    """Rows from start on of a sequence: arrays ``[B, H, TAIL_ROWS, D]`` in the order of the fields.

    start: A multiple of TAIL_ROWS. Rows past the sequence's end hold garbage. views: See
    :meth:`AttentionCache.short_views`; they end with the tail, before the buffers are written.
    """

    start: int
    arrays: tuple[mx.array, ...]
    views: tuple[mx.array | None, ...] = ()


def tail_start(columns: int) -> int:
    """Return the first row of the tail that takes row `columns`."""
    return columns // TAIL_ROWS * TAIL_ROWS


class TracedAttention:
    """Traced form of an entry of class `kind`. Quantised rows are unpacked in each step."""

    row = -1
    """Number of the row of the step that was appended last."""

    def __init__(self, kind: type[AttentionCache], step: Step, arrays: Sequence[mx.array]):
        half = len(arrays) // 2
        self._buffers, self._tail = tuple(arrays[:half]), tuple(arrays[half:])
        self._kind, self._counts = kind, step.counts
        self.left_padding, self.chosen = step.padding, step.chosen
        self.appends_together = half == 2 and not kind.packs

    @property
    def ends(self) -> list[tuple[mx.array, ...]]:
        """See :attr:`~mlx_moeflux.cache.traced.TracedEntry.ends`."""
        return [self._tail]

    def real_tokens(self, T: int) -> None:
        """Return None: no column of a step is padding."""

    @property
    def columns(self) -> mx.array:
        """Column of the next row, int32 ``[1]``."""
        return self._counts[self.row + 1]

    def positions(self, T: int) -> mx.array:
        """See :meth:`AttentionCache.positions`."""
        return self.columns if self.left_padding is None else self.columns - self.left_padding

    def windowed(self, T: int, window: int) -> dict[str, Any]:
        """See :meth:`AttentionCache.windowed`; one trace serves any number of columns."""
        first = self.columns + 1 - window
        return {"start": mx.maximum(first, 0 if self.left_padding is None else self.left_padding)}

    @property
    def newest(self) -> tuple[mx.array, ...] | None:
        """Tail of keys and values for a kernel that writes the next row itself, see
        :meth:`appended`; None if rows are packed."""
        return None if self._kind.packs else self._tail[:2]

    def append(self, kernels: Any, *rows: mx.array) -> dict[str, Any]:
        """See :meth:`AttentionCache.append`; T is 1, and the newest rows are in a tail."""
        keys, values, *others = map(self._kind.packed, rows)
        tail = kernels.append_row(self._tail[:2], keys, values, position=self.columns)
        return self.appended(tail, *others)

    def appended(self, tail: Sequence[mx.array], *rows: mx.array) -> dict[str, Any]:
        """Do what :meth:`append` does, for a tail of keys and values that holds the new row
        already. rows: Those of the other arrays."""
        others = self._tail[2:]
        if rows:
            own = (mx.arange(TAIL_ROWS) == self.columns % TAIL_ROWS)[:, None]
            others = tuple(mx.where(own, row, old) for row, old in zip(rows, others, strict=True))
        self._tail, self.row = (*tail, *others), self.row + 1
        unpacked = self._kind.unpacked
        return {
            "k": unpacked(self._buffers[0]),
            "v": unpacked(self._buffers[1]),
            "length": self.columns,
            "start": self.left_padding,
            "tail": tuple(map(unpacked, tail)),
        }


class AttentionCache(BaseCache):
    """Keys [B, Hkv, capacity, Dk] and values [B, Hkv, capacity, Dv] of one layer.

    A subclass may declare other arrays, all of them [B, H, capacity, D] with a row for each token.
    Row s of the buffers is column s; rows from ``columns`` on hold garbage that no reader
    may see. The buffers grow in steps of ``declared.step`` rows, and new rows are written by one
    slice update that MLX carries out in place once every earlier reader has finished.
    """

    newest: ClassVar[None] = None
    """Tail for a kernel that writes the next row itself; a traced form has one."""
    declared, kind = ATTENTION, ATTENTION.name
    takes_steps = takes_rows = True
    form: ClassVar[type[TracedAttention]] = TracedAttention
    """Class of what :meth:`traced` returns."""
    packs: ClassVar[bool] = False
    """True if rows are stored packed, not as the model gives them."""

    def __init__(self) -> None:
        super().__init__()
        # Replaced, never changed: copies of this entry share the list.
        self._buffers: list[Any] = [None] * len(self.declared.fields)
        self._tail: Any = None  # a Tail while steps append rows
        self._marks: weakref.WeakSet[Mark] = weakref.WeakSet()

    def _arrays(self):
        return self._buffers

    @property
    def arrays(self) -> Sequence[mx.array | None]:
        self.flush()
        return self._buffers

    @arrays.setter
    def arrays(self, buffers: Iterable[mx.array | None]) -> None:
        # One assignment: an interrupt between two would leave buffers of different capacity.
        self._buffers, self._tail = list(buffers), None

    @property
    def keys(self) -> mx.array | None:
        """Return the buffer of keys, the tail's rows included."""
        return self.arrays[0]

    @property
    def values(self) -> mx.array | None:
        """Return the buffer of values, the tail's rows included."""
        return self.arrays[1]

    @property
    def capacity(self) -> int:
        """Return the rows allocated for each sequence."""
        first = self._buffers[0]
        return 0 if first is None else first.shape[ROW_AXIS]

    @classmethod
    def rows_for(cls, columns: int) -> int:
        """Return the rows that `columns` columns allocate, a multiple of ``step``."""
        step = cls.declared.step
        return -(-columns // step) * step

    # Appending and reading.

    def advance(self, T: int) -> None:
        """Count T columns as written (``update_and_fetch`` does so itself) and call the hook."""
        self.columns += T
        if self.on_advance is not None:
            self.on_advance()
        if self.rows is not None:
            self._note_row(self.rows)

    def positions(self, T: int) -> int | mx.array:
        """Return the position of the next column, as ``mx.fast.rope`` takes its offset.

        Padding columns get meaningless (perhaps negative) positions. Raises CacheError if T < 1.
        """
        if T < 1:
            raise CacheError(f"A model call needs at least one token per sequence, not T = {T}.")
        return self.offset if self._padding else self.columns

    def update_and_fetch(self, *rows: mx.array) -> tuple[mx.array, ...]:
        """Append T columns and return views of all S columns.

        keys [B, Hkv, T, Dk], values [B, Hkv, T, Dv] -> [B, Hkv, S, Dk], [B, Hkv, S, Dv].
        """
        self._write(*rows)
        return self.views()

    def _write(self, *rows: mx.array) -> None:
        """Append T columns to the buffers."""
        if self.packs:
            rows = tuple(map(self.packed, rows))
        columns, (B, _, T, _), first = self.columns, rows[0].shape, self._buffers[0]
        fresh = first is None
        if (fresh or first.shape[0] != B) and self._batch_known() and self.batch_size != B:
            raise CacheError(
                f"The cache holds {self.batch_size} sequences but {B} were given; use merge(), "
                "extend() or filter() to change the batch."
            )
        if self._tail is not None:
            self.flush()
        if fresh or columns + T > first.shape[ROW_AXIS]:
            self._reserve(rows)
        self._buffers = list(map(written, self._buffers, rows, repeat(columns)))
        self.advance(T)

    def views(self) -> tuple[mx.array, ...]:
        """Return views of all S columns, in the order of the fields: [B, H, S, D] each."""
        self.flush()
        return tuple(self.unpacked(buffer[:, :, : self.columns]) for buffer in self._buffers)

    @classmethod
    def packed(cls, rows: mx.array) -> mx.array:
        """Return rows of the model in their stored form."""
        return rows

    @classmethod
    def unpacked(cls, rows: mx.array) -> mx.array:
        """Return stored rows as the model gave them."""
        return rows

    def append(self, kernels: Any, *rows: mx.array) -> dict[str, Any]:
        """Append T columns; return the arguments of an attention operation: whole buffers, the
        number of rows in use and the first row of each sequence."""
        self._write(*rows)
        keys, values, *_ = self.buffers()
        start = self.left_padding if self._padding else None
        return {"k": keys, "v": values, "length": self.columns, "start": start}

    def buffers(self) -> Sequence[Any]:
        """Return whole buffers, as the model gives rows."""
        if self._tail is not None:
            self.flush()
        return self._buffers

    # Appending one row at a time.

    def rows_ahead(self) -> int:
        """Return what :meth:`BaseCache.rows_ahead` does; all are in one tail."""
        return min(super().rows_ahead(), TAIL_ROWS - self.columns % TAIL_ROWS)

    def begin_step(self, count: int = 1) -> tuple[mx.array, ...]:
        """Return buffers and tail for a step of `count` columns, which fit into one tail: rows
        before ``tail_start(columns)`` are in the buffers, the others in the tail."""
        if self._tail is None or self._tail.start != tail_start(self.columns):
            self.flush()
            self._reserve([buffer[:, :, :1] for buffer in self._buffers])
            start = tail_start(self.columns)
            rows = slice(start, start + TAIL_ROWS)
            self._tail = Tail(start, tuple(buffer[:, :, rows] for buffer in self._buffers))
        return *self._buffers, *self._tail.arrays

    def end_step(self, *tail: mx.array) -> None:
        """Store the tail of :meth:`begin_step` with the new row, and perhaps others behind it, and
        count its column."""
        self._tail = self._tail._replace(arrays=tail)
        self.advance(1)

    def short_views(self) -> tuple[mx.array | None, ...]:
        """Return short views of the buffers of :meth:`begin_step`, see
        :mod:`~mlx_moeflux.kernels.runtime.views`: as long as the buffers have rows, and the same
        until the tail is full. Kernels read packed rows from copies."""
        if self.packs:
            return ()
        if not self._tail.views:
            views = tuple(short(buffer, ROW_AXIS) for buffer in self._buffers)
            self._tail = self._tail._replace(views=views)
        return self._tail.views

    @classmethod
    def traced(cls, step: Step, arrays: Sequence[Any]) -> TracedAttention:
        """See :meth:`BaseCache.traced`."""
        return cls.form(cls, step, arrays)

    def flush(self) -> None:
        """Write the rows of the tail into the buffers."""
        if self._tail is None:
            return
        (start, tail, _), self._tail = self._tail, None
        rows = self.columns - start
        if rows > 0:
            new = [array[:, :, :rows] for array in tail]
            self._buffers = list(map(written, self._buffers, new, repeat(start)))

    def windowed(self, T: int, window: int) -> dict[str, Any]:
        """Return the extra arguments of an attention operation whose tokens see only the last
        `window` tokens, themselves included; call it before T columns are appended."""
        if self.columns + T <= window:
            return {}
        if T == 1:
            # As a traced step has it, so that both compute with one kernel.
            first = mx.array([self.columns + 1 - window], dtype=mx.int32)
            padding = self.left_padding
            return {"mask": None, "start": first if padding is None else mx.maximum(first, padding)}
        return {"mask": self.make_mask(T, window_size=window), "start": None}

    def _reserve(self, like: Sequence[mx.array]) -> None:
        needed = self.columns + like[0].shape[ROW_AXIS]
        if needed > self.capacity:
            self._resize(self.arrays, like, self.rows_for(needed))

    def _resize(
        self, buffers: Iterable[mx.array | None], like: Sequence[mx.array], rows: int
    ) -> None:
        """Take `buffers` with `rows` rows."""
        self.arrays = [
            resized(buffer, one, rows, self.columns)
            for buffer, one in zip(buffers, like, strict=True)
        ]

    def make_mask(
        self, T: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the attention mask of the next T columns.

        It is None (all visible), ``"causal"``, or bool [B or 1, 1, T, S] with S = columns + T,
        True where visible. Tokens never see padding. A left-padding column sees itself alone, so
        that its softmax stays finite; its result means nothing.
        """
        S = self.columns + T
        padding = self._padding or ()
        padded = any(padding)
        window = S if window_size is None else window_size
        windowed = window < S
        if not padded and not windowed and not return_array:
            return None if T == 1 else "causal"
        query = mx.arange(self.columns, S)[:, None]
        key = mx.arange(S)[None]
        mask = key <= query
        if windowed:
            mask = mask & (query - key < window)
        if not padded:
            return mask[None, None]
        first = mx.array(padding)[:, None, None, None]
        return (mask & (key >= first)) | (key == query)

    # Going back.

    def is_trimmable(self) -> bool:
        """Return True: dropping the last columns is exact."""
        return True

    def trim(self, n: int) -> int:
        """Drop the last n tokens of every sequence, at most the shortest's; return how many."""
        self._require_final("trim()")
        if n < 0:
            raise CacheError(f"trim() needs a number of tokens >= 0, not {n}.")
        n = min(n, min(self.seen(), default=0))
        self._truncate(self.columns - n)
        return n

    def _truncate(self, columns: int) -> None:
        for mark in list(self._marks):
            if mark.columns > columns:
                mark.spent = True
        if self._tail is not None and columns < self._tail.start:
            self._tail = None  # the remaining rows are in the buffers
        self.columns = columns

    def _row_state(self) -> int:
        return self.capacity

    def _back_to(self, columns: int, states: list[Any]) -> None:
        self._truncate(columns)
        # Kernels split keys by the length of the buffer.
        if (rows := states[-1]) < self.capacity:
            self.flush()
            self.arrays = [mx.contiguous(buffer[:, :, :rows]) for buffer in self._buffers]

    def mark(self) -> Mark:
        """Return a mark for ``rollback``. It holds no arrays, so appending stays in place."""
        fields = {"_padding": self._padding, "_ends": self._ends, "fresh": self._buffers[0] is None}
        mark = Mark(self.columns, fields)
        self._marks.add(mark)
        return mark

    def rollback(self, mark: Mark) -> None:
        """Return to the moment of ``mark``, also across a growth step.

        Raises:
            CacheError: Rows before the mark were moved or rewritten since (trim, merge, extend,
                filter or finalize).
        """
        if mark.spent:
            raise CacheError(
                f"The mark at column {mark.columns} is spent, because the cache was cut or "
                "rearranged since; mark again after such a call."
            )
        self._truncate(mark.columns)
        self._padding, self._ends = mark.fields["_padding"], mark.fields["_ends"]
        if mark.fields["fresh"]:
            self.arrays = [None] * len(self._buffers)

    def _rearranged(self) -> None:
        for mark in list(self._marks):
            mark.spent = True
        self._marks = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionCache:
        other = super().__deepcopy__(memo)
        other._marks = weakref.WeakSet()
        return other

    @property
    def to_quantized(self) -> None:
        """Refuse mlx-lm's ``kv_bits``.

        mlx-lm looks this name up before the first token but calls it only after many; a property
        raises at the look-up.
        """
        raise UnsupportedError(
            "Keys and values are quantised from the first token on or never; give kv_bits to "
            "load() or register_with_mlx_lm() and leave it out here."
        )

    # Batches.

    def _join(self, parts: list[AttentionCache]) -> None:
        self._rearranged()
        self._join_counts(parts)
        rows = self.rows_for(self.columns)
        sizes = [(part.columns, part.batch_size) for part in parts]
        together = zip(*(part.arrays for part in parts), strict=True)
        self.arrays = [_aligned(list(each), sizes, self.columns, rows) for each in together]

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only these sequences, in this order, and drop columns that pad all of them."""
        keep = as_ints(batch_indices, "batch_indices")
        self._rearranged()
        self.flush()  # while the counts are those of the rows
        all_stay = keep == list(range(self.batch_size))
        drop = self._keep(keep)
        if self._buffers[0] is None:
            return
        if not all_stay:
            index = mx.array(keep, dtype=mx.int32)
            self.arrays = [buffer[index] for buffer in self._buffers]
        if drop:
            kept = [buffer[:, :, drop : drop + self.columns] for buffer in self._buffers]
            self._resize(kept, self._buffers, self.rows_for(self.columns))

    def extract(self, i: int) -> AttentionCache:
        """Return an entry for sequence i alone, with a copy of its rows."""
        self._require_final("extract()")
        single = type(self)()
        first = 0 if self._padding is None else min(self._padding[i], self.columns)
        single.columns = self.columns - first
        self.flush()
        if self._buffers[0] is not None:
            own = [buffer[i : i + 1, :, first : self.columns] for buffer in self._buffers]
            single.arrays = map(mx.contiguous, own)
            mx.async_eval(single._buffers)
        return single

    def _move_right(self, extra: list[int]) -> None:
        self._rearranged()
        self.flush()
        if self._buffers[0] is None:
            return
        row = mx.arange(self.capacity)
        source = row - mx.array(extra)[:, None]
        source = mx.where((source >= 0) & (row < self.columns), source, row)[:, None, :, None]
        self.arrays = [mx.take_along_axis(each, source, axis=ROW_AXIS) for each in self._buffers]

    # Saving.

    @property
    def state(self) -> tuple[Any, ...]:
        """Return (*arrays, columns, left padding, ends), for saving and ``mx.eval``."""
        return *self.arrays, self.columns, *self._padding_state()

    @state.setter
    def state(self, state) -> None:
        self._rearranged()
        *self.arrays, columns, padding, ends = state
        self._load_padding(columns, padding, ends)
        if not 0 <= self.columns <= self.capacity:
            raise CacheError(
                f"The saved state claims {self.columns} columns of {self.capacity}; "
                "the file is damaged or belongs to another cache."
            )


KVCache = AttentionCache


def written(buffer: mx.array, rows: mx.array, start: int) -> mx.array:
    """Return ``buffer`` [B, H, capacity, D] with ``rows`` [B, H, T, D] written at ``start``."""
    # Assigning through the caller's handle would change arrays that others hold. The caller drops
    # its handle, so MLX can write in place.
    buffer = copy.copy(buffer)
    buffer[:, :, start : start + rows.shape[2]] = rows
    return buffer


def resized(buffer: mx.array | None, like: mx.array, rows: int, used: int) -> mx.array:
    """Return a buffer of ``rows`` rows that begins with the first ``used`` of ``buffer``."""
    B, H, _, D = like.shape
    if buffer is None or used == 0:
        return mx.zeros((B, H, rows, D), like.dtype)
    tail = mx.zeros((B, H, rows - used, D), buffer.dtype)
    return mx.concatenate([buffer[:, :, :used], tail], axis=2)


def _aligned(
    buffers: list[mx.array | None], sizes: list[tuple[int, int]], columns: int, rows: int
) -> mx.array | None:
    """Concatenate batches to [sum of B, H, rows, D] so that their last columns align.

    ``sizes``: columns in use and B of each; ``columns``: columns in use of the result.
    """
    like = next((buffer for buffer in buffers if buffer is not None), None)
    if like is None:
        return None
    _, H, _, D = like.shape
    joined = []
    for buffer, (used, B) in zip(buffers, sizes, strict=True):
        if buffer is None:
            joined.append(mx.zeros((B, H, rows, D), like.dtype))
        else:
            widths = [(0, 0), (0, 0), (columns - used, rows - columns), (0, 0)]
            joined.append(mx.pad(buffer[:, :, :used], widths))
    return mx.concatenate(joined)


KV_BITS = (4, 8)


@functools.cache
def quantized(
    kind: type[AttentionCache], *, bits: int, group_size: int, dtype: mx.Dtype
) -> type[AttentionCache]:
    """Return a subclass of `kind` with quantised rows, which it returns in `dtype`."""
    per_group = group_words(bits, group_size, dtype.size)

    class Quantized(kind):
        packs = True

        @classmethod
        def packed(cls, rows: mx.array) -> mx.array:
            """Quantise rows [..., D] to uint16 [..., W]."""
            parts = mx.quantize(rows.astype(dtype), group_size=group_size, bits=bits)
            return mx.concatenate([part.view(mx.uint16) for part in parts], axis=-1)

        @classmethod
        def unpacked(cls, rows: mx.array) -> mx.array:
            """Dequantise uint16 [..., W] to [..., D] in the compute dtype."""
            groups = rows.shape[-1] // per_group
            integers = groups * group_size * bits // WORD
            scales = (rows.shape[-1] - integers) // 2
            weight, scale, bias = mx.split(rows, [integers, integers + scales], axis=-1)
            return mx.dequantize(
                mx.contiguous(weight).view(mx.uint32),
                mx.contiguous(scale).view(dtype),
                mx.contiguous(bias).view(dtype),
                group_size=group_size,
                bits=bits,
            )

        def buffers(self) -> Sequence[Any]:
            """Return dequantised copies of the columns in use."""
            return self.views()

    Quantized.kind = quantized_kind(kind.kind, bits, group_size)
    # mlx-lm finds the class of a saved entry by this name.
    storage = f"{bits}Bit{group_size}{str(dtype).rpartition('.')[2].title()}"
    Quantized.__name__ = Quantized.__qualname__ = kind.__name__ + storage
    return Quantized
