"""Keys and values of attention layers, for one sequence or a batch.

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
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from mlx_moeflux.cache.base import BaseCache, Mark, as_ints
from mlx_moeflux.errors import CacheError, InputError, UnsupportedError

# Divides the rows by which buffers grow; a multiple of the keys that kernels take in one pass.
TAIL_ROWS = 64


class Tail(NamedTuple):
    """Rows from start on of a sequence: keys ``[B, Hkv, TAIL_ROWS, Dk]``, values likewise.

    start: A multiple of TAIL_ROWS. Rows past the sequence's end hold garbage.
    """

    start: int
    keys: mx.array
    values: mx.array


def tail_start(columns: int) -> int:
    """Return the first row of the tail to which row `columns` is appended."""
    return columns // TAIL_ROWS * TAIL_ROWS


def cut(keys: mx.array, values: mx.array, columns: int) -> Tail:
    """Return the tail for row `columns`, from buffers ``[B, Hkv, capacity, D]`` of all rows before
    it."""
    start = tail_start(columns)
    rows = slice(start, start + TAIL_ROWS)
    return Tail(start, keys[:, :, rows], values[:, :, rows])


class AttentionCache(BaseCache):
    """Keys [B, Hkv, capacity, Dk] and values [B, Hkv, capacity, Dv] of one layer.

    Row s of the buffers is column s; rows from ``columns`` on hold garbage that no reader
    may see. The buffers grow in steps of ``step`` rows, and new rows are written by one
    slice update that MLX carries out in place once every earlier reader has finished.
    """

    newest: ClassVar[None] = None
    """Tail for a kernel that writes the next row itself; a traced stand-in of an entry has one."""
    kind, fields, token_axis = "attention", ("keys", "values"), 2
    step = 256
    packs: ClassVar[bool] = False
    """True if rows are stored packed, not as the model gives them."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: Any = None
        self._values: Any = None
        self._tail: Any = None  # a Tail while steps append rows
        self._marks: weakref.WeakSet[Mark] = weakref.WeakSet()

    def _arrays(self):
        return self._keys, self._values

    @property
    def keys(self) -> mx.array | None:
        """Return the buffer of keys, the tail's rows included."""
        self.flush()
        return self._keys

    @keys.setter
    def keys(self, buffer: mx.array | None) -> None:
        self._keys, self._tail = buffer, None

    @property
    def values(self) -> mx.array | None:
        """Return the buffer of values, the tail's rows included."""
        self.flush()
        return self._values

    @values.setter
    def values(self, buffer: mx.array | None) -> None:
        self._values, self._tail = buffer, None

    @property
    def capacity(self) -> int:
        """Return the rows allocated for each sequence."""
        return 0 if self._keys is None else self._keys.shape[2]

    @classmethod
    def rows_for(cls, columns: int) -> int:
        """Return the rows that `columns` columns allocate, a multiple of ``step``."""
        return -(-columns // cls.step) * cls.step

    # Appending and reading.

    def advance(self, T: int) -> None:
        """Count T columns as written (``update_and_fetch`` does so itself) and call the hook."""
        self.columns += T
        if self.on_advance is not None:
            self.on_advance()

    def positions(self, T: int) -> int | mx.array:
        """Return the position of the next column, as ``mx.fast.rope`` takes its offset.

        Padding columns get meaningless (perhaps negative) positions. Raises CacheError if T < 1.
        """
        if T < 1:
            raise CacheError(f"A model call needs at least one token per sequence, not T = {T}.")
        return self.offset if self._padding else self.columns

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append T columns and return views of all S columns.

        keys [B, Hkv, T, Dk], values [B, Hkv, T, Dv] -> [B, Hkv, S, Dk], [B, Hkv, S, Dv].
        """
        self._write(keys, values)
        return self.keys_and_values()

    def _write(self, keys: mx.array, values: mx.array) -> None:
        """Append T columns to the buffers."""
        if self.packs:
            keys, values = self.packed(keys), self.packed(values)
        columns, (B, _, T, _) = self.columns, keys.shape
        fresh = self._keys is None
        if (fresh or self._keys.shape[0] != B) and self._batch_known() and self.batch_size != B:
            raise CacheError(
                f"The cache holds {self.batch_size} sequences but {B} were given; use merge(), "
                "extend() or filter() to change the batch."
            )
        if self._tail is not None:
            self.flush()
        if fresh or columns + T > self._keys.shape[2]:
            self._reserve(keys, values)
        self._keys, self._values = (
            _written(self._keys, keys, columns),
            _written(self._values, values, columns),
        )
        self.advance(T)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return views of all S columns: [B, Hkv, S, Dk] and [B, Hkv, S, Dv]."""
        self.flush()
        rows = slice(self.columns)
        return self.unpacked(self._keys[:, :, rows]), self.unpacked(self._values[:, :, rows])

    @classmethod
    def packed(cls, rows: mx.array) -> mx.array:
        """Return rows of the model in their stored form."""
        return rows

    @classmethod
    def unpacked(cls, rows: mx.array) -> mx.array:
        """Return stored rows as the model gave them."""
        return rows

    def append(self, kernels: Any, keys: mx.array, values: mx.array) -> dict[str, Any]:
        """Append T columns; return the arguments of an attention operation: whole buffers, the
        number of rows in use and the first row of each sequence."""
        self._write(keys, values)
        keys, values, length = self.buffer()
        start = self.left_padding if self._padding else None
        return {"k": keys, "v": values, "length": length, "start": start}

    def buffer(self) -> tuple[mx.array, mx.array, int]:
        """Return whole buffers and the number of columns in use."""
        if self._tail is not None:
            self.flush()
        return self._keys, self._values, self.columns

    # Appending one row at a time.

    def begin_step(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return (keys, values, tail keys, tail values) for a step of one column: rows before
        ``tail_start(columns)`` are in the buffers, the others in the tail."""
        if self._tail is None or self._tail.start != tail_start(self.columns):
            self.flush()
            self._reserve(self._keys[:, :, :1], self._values[:, :, :1])
            self._tail = cut(self._keys, self._values, self.columns)
        return self._keys, self._values, self._tail.keys, self._tail.values

    def end_step(self, keys: mx.array, values: mx.array) -> None:
        """Store the tail of :meth:`begin_step` with the new row and count its column."""
        self._tail = Tail(self._tail.start, keys, values)
        self.advance(1)

    def flush(self) -> None:
        """Write the rows of the tail into the buffers."""
        if self._tail is None:
            return
        start, keys, values = self._tail
        rows = self.columns - start
        self._tail = None
        if rows > 0:
            self._keys, self._values = (
                _written(self._keys, keys[:, :, :rows], start),
                _written(self._values, values[:, :, :rows], start),
            )

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

    def _reserve(self, keys: mx.array, values: mx.array) -> None:
        needed = self.columns + keys.shape[2]
        if needed <= self.capacity:
            return
        rows = self.rows_for(needed)
        # One assignment: an interrupt between two would leave buffers of different capacity.
        self.keys, self.values = (
            _resized(self.keys, keys, rows, self.columns),
            _resized(self.values, values, rows, self.columns),
        )

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

    def mark(self) -> Mark:
        """Return a mark for ``rollback``. It holds no arrays, so appending stays in place."""
        fields = {"_padding": self._padding, "_ends": self._ends, "fresh": self._keys is None}
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
            self.keys = self.values = None

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
        self.keys = _aligned([part.keys for part in parts], sizes, self.columns, rows)
        self.values = _aligned([part.values for part in parts], sizes, self.columns, rows)

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only these sequences, in this order, and drop columns that pad all of them."""
        keep = as_ints(batch_indices, "batch_indices")
        self._rearranged()
        self.flush()  # while the counts are those of the rows
        all_stay = keep == list(range(self.batch_size))
        drop = self._keep(keep)
        if self._keys is None:
            return
        if not all_stay:
            index = mx.array(keep, dtype=mx.int32)
            self.keys, self.values = self._keys[index], self._values[index]
        if drop:
            rows = self.rows_for(self.columns)
            kept = slice(drop, drop + self.columns)
            self.keys, self.values = (
                _resized(array[:, :, kept], array, rows, self.columns)
                for array in (self._keys, self._values)
            )

    def extract(self, i: int) -> AttentionCache:
        """Return an entry for sequence i alone, with a copy of its rows."""
        self._require_final("extract()")
        single = type(self)()
        first = 0 if self._padding is None else min(self._padding[i], self.columns)
        single.columns = self.columns - first
        if self.keys is not None:
            rows = slice(first, self.columns)
            single.keys = mx.contiguous(self._keys[i : i + 1, :, rows])
            single.values = mx.contiguous(self._values[i : i + 1, :, rows])
            mx.async_eval(single.keys, single.values)
        return single

    def _move_right(self, extra: list[int]) -> None:
        self._rearranged()
        if self.keys is None:
            return
        row = mx.arange(self.capacity)
        source = row - mx.array(extra)[:, None]
        source = mx.where((source >= 0) & (row < self.columns), source, row)[:, None, :, None]
        self.keys = mx.take_along_axis(self._keys, source, axis=2)
        self.values = mx.take_along_axis(self._values, source, axis=2)

    # Saving.

    @property
    def state(self) -> tuple[Any, ...]:
        """Return (keys, values, columns, left padding, ends), for saving and ``mx.eval``."""
        return self.keys, self.values, self.columns, *self._padding_state()

    @state.setter
    def state(self, state) -> None:
        self._rearranged()
        self.keys, self.values, columns, padding, ends = state
        self._load_padding(columns, padding, ends)
        if not 0 <= self.columns <= self.capacity:
            raise CacheError(
                f"The saved state claims {self.columns} columns of {self.capacity}; "
                "the file is damaged or belongs to another cache."
            )


KVCache = AttentionCache


class LatentCache(AttentionCache):
    """Cache of latent attention: ``keys`` are the latents [B, 1, capacity, R] and ``values`` the
    rotary keys [B, 1, capacity, Dr] that all heads share."""

    kind = "latent"


def _written(buffer: mx.array, rows: mx.array, start: int) -> mx.array:
    """Return ``buffer`` [B, H, capacity, D] with ``rows`` [B, H, T, D] written at ``start``."""
    # Assigning through the caller's handle would change arrays that others hold. The caller drops
    # its handle, so MLX can write in place.
    buffer = copy.copy(buffer)
    buffer[:, :, start : start + rows.shape[2]] = rows
    return buffer


def _resized(buffer: mx.array | None, like: mx.array, rows: int, used: int) -> mx.array:
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
WORD = 16


@functools.cache
def quantized(
    kind: type[AttentionCache], *, bits: int, group_size: int, dtype: mx.Dtype
) -> type[AttentionCache]:
    """Return a subclass of `kind` with quantised rows, which it returns in `dtype`."""
    per_group = group_size * bits // WORD + 2 * dtype.size * 8 // WORD

    class Quantized(kind):
        packs = True

        @classmethod
        def packed(cls, rows: mx.array) -> mx.array:
            """Quantise rows [..., D] to uint16 [..., W]."""
            if rows.shape[-1] % group_size:
                raise InputError(
                    f"rows of {rows.shape[-1]} numbers have no groups of {group_size}; give a "
                    "kv_group_size that divides them."
                )
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

        def buffer(self) -> tuple[mx.array, mx.array, int]:
            """Return dequantised copies of the columns in use, and their number."""
            return *self.keys_and_values(), self.columns

    Quantized.kind = f"{kind.kind}, {bits} bits in groups of {group_size}"
    # mlx-lm finds the class of a saved entry by this name.
    storage = f"{bits}Bit{group_size}{str(dtype).rpartition('.')[2].title()}"
    Quantized.__name__ = Quantized.__qualname__ = kind.__name__ + storage
    return Quantized
