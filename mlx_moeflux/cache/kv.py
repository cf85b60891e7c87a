"""Keys and values of attention layers, for one sequence or a batch.

MLX updates a buffer in place only when nobody else holds it, and one step ahead of the GPU the
step before still does: 20 buffers of 32k rows then cost 3 ms of copies a token. So decode steps
append to a tail of at most TAIL_ROWS rows, which a kernel writes anew each time, and the buffer
gets the tail when it is full.

Quantised entries pack a row into the integers, scales and biases of its groups, as MLX's affine
quantisation makes them, in one run of 16-bit words; so all that holds, moves, saves and shares rows
stays as it is.
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

# Divides the rows by which buffers grow; a multiple of the keys that kernels take at once.
TAIL_ROWS = 64


class Tail(NamedTuple):
    """Rows start, start + 1, ... of a sequence: keys ``[B, Hkv, TAIL_ROWS, Dk]``, values likewise.

    start: A multiple of TAIL_ROWS. Rows past the sequence's end hold garbage.
    """

    start: int
    keys: mx.array
    values: mx.array


def tail_start(columns: int) -> int:
    """Where the tail of a sequence begins that appends its row `columns`."""
    return columns // TAIL_ROWS * TAIL_ROWS


def cut(keys: mx.array, values: mx.array, columns: int) -> Tail:
    """The tail that appends row `columns`, from buffers ``[B, Hkv, capacity, D]`` that hold all
    rows before it."""
    start = tail_start(columns)
    rows = slice(start, start + TAIL_ROWS)
    return Tail(start, keys[:, :, rows], values[:, :, rows])


class AttentionCache(BaseCache):
    """Keys [B, Hkv, capacity, Dk] and values [B, Hkv, capacity, Dv] of one layer.

    Row s of the buffers is column s; rows from ``columns`` on hold garbage that no reader
    may see. The buffers grow in steps of ``step`` rows, and new rows are written by one
    slice update that MLX carries out in place once every earlier reader has finished.
    """

    kind, fields, token_axis = "attention", ("keys", "values"), 2
    step = 256
    packs: ClassVar[bool] = False
    """Whether rows are kept in another form than the model's."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self._tail: Tail | None = None
        self._marks: weakref.WeakSet[Mark] = weakref.WeakSet()

    def _arrays(self):
        return self._keys, self._values

    @property
    def keys(self) -> mx.array | None:
        """The buffer of keys, with every row that was appended."""
        self._flush()
        return self._keys

    @keys.setter
    def keys(self, buffer: mx.array | None) -> None:
        self._keys, self._tail = buffer, None

    @property
    def values(self) -> mx.array | None:
        """The buffer of values, with every row that was appended."""
        self._flush()
        return self._values

    @values.setter
    def values(self, buffer: mx.array | None) -> None:
        self._values, self._tail = buffer, None

    @property
    def capacity(self) -> int:
        """Rows allocated for each sequence."""
        return 0 if self._keys is None else self._keys.shape[2]

    @classmethod
    def rows_for(cls, columns: int) -> int:
        """Rows that a cache of so many columns allocates: the buffers grow in steps."""
        return -(-columns // cls.step) * cls.step

    # Appending and reading.

    def positions(self, T: int) -> int | mx.array:
        """Positions where T new columns start, as ``mx.fast.rope`` takes its offset.

        Padding columns get meaningless (perhaps negative) positions. Raises CacheError for
        a call without columns.
        """
        if T < 1:
            raise CacheError(f"A model call needs at least one token per sequence, not T = {T}.")
        return self.offset if self._padding else self.columns

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends T columns; returns views of all S columns.

        keys [B, Hkv, T, Dk], values [B, Hkv, T, Dv] -> [B, Hkv, S, Dk], [B, Hkv, S, Dv].
        """
        self._write(keys, values)
        return self.keys_and_values()

    def _write(self, keys: mx.array, values: mx.array) -> None:
        """Append T columns to the buffers."""
        if self.packs:
            keys, values = self.packed(keys), self.packed(values)
        columns, (B, _, T, _) = self.columns, keys.shape
        if self._keys is None:
            fits = self._padding is None or len(self._padding) == B
        else:
            fits = self._keys.shape[0] == B
        if not fits:
            raise CacheError(
                f"The cache holds {self.batch_size} sequences but {B} were given; use merge(), "
                "extend() or filter() to change the batch."
            )
        if self._tail is not None:
            self._flush()
        if self._keys is None or columns + T > self._keys.shape[2]:
            self._reserve(keys, values)
        self._keys, self._values = (
            _written(self._keys, keys, columns),
            _written(self._values, values, columns),
        )
        self.advance(T)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Views of the S columns written so far: [B, Hkv, S, Dk] and [B, Hkv, S, Dv]."""
        rows = (self.keys[:, :, : self.columns], self.values[:, :, : self.columns])
        return self.unpacked(rows[0]), self.unpacked(rows[1])

    @classmethod
    def packed(cls, rows: mx.array) -> mx.array:
        """Rows of the model as they are kept."""
        return rows

    @classmethod
    def unpacked(cls, rows: mx.array) -> mx.array:
        """The reverse of :meth:`packed`."""
        return rows

    def append(self, kernels: Any, keys: mx.array, values: mx.array) -> dict[str, Any]:
        """:meth:`update_and_fetch`, but returns what an attention operation takes: whole buffers
        and which rows of them count."""
        self._write(keys, values)
        keys, values, length = self.buffer()
        start = self.left_padding if self._padding else None
        return {"k": keys, "v": values, "length": length, "start": start}

    def buffer(self) -> tuple[mx.array, mx.array, int]:
        """Whole buffers and the number of columns in use, for kernels that take a length."""
        if self._tail is not None:
            self._flush()
        return self._keys, self._values, self.columns

    # Appending one row at a time.

    def begin_step(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Buffers and tail (keys, values, tail keys, tail values) for a step of one column: rows
        before ``tail_start(columns)`` are in the buffers, the others in the tail."""
        if self._tail is None or self._tail.start != tail_start(self.columns):
            self._flush()
            self._reserve(self._keys[:, :, :1], self._values[:, :, :1])
            self._tail = cut(self._keys, self._values, self.columns)
        return self._keys, self._values, self._tail.keys, self._tail.values

    def end_step(self, keys: mx.array, values: mx.array) -> None:
        """The tail that :meth:`begin_step` gave, with the new column's row."""
        self._tail = Tail(self._tail.start, keys, values)
        self.advance(1)

    def _flush(self) -> None:
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
        """What an attention operation takes besides, before T columns are appended, if a token
        sees only `window` of them, itself included."""
        if self.columns + T <= window:
            return {}
        return {"mask": self.make_mask(T, window_size=window), "start": None}

    def _reserve(self, keys: mx.array, values: mx.array) -> None:
        needed = self.columns + keys.shape[2]
        if needed <= self.capacity:
            return
        rows = self.rows_for(needed)
        # Both at once: an interrupt between the two would leave buffers of different capacity.
        self.keys, self.values = (
            _resized(self.keys, keys, rows, self.columns),
            _resized(self.values, values, rows, self.columns),
        )

    def make_mask(
        self, T: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Who sees whom when T columns are about to be appended.

        None (all visible), ``"causal"``, or bool [B or 1, 1, T, S] with S = columns + T, True
        where visible. Tokens never see padding. A left-padding column sees itself and
        nothing else, so that its softmax stays finite; its result means nothing.
        """
        S = self.columns + T
        padded = self._padding is not None and any(self._padding)
        windowed = window_size is not None and window_size < S
        if not padded and not windowed and not return_array:
            return None if T == 1 else "causal"
        query = mx.arange(self.columns, S)[:, None]
        key = mx.arange(S)[None]
        mask = key <= query
        if windowed:
            mask = mask & (query - key < window_size)
        if not padded:
            return mask[None, None]
        first = mx.array(self._padding)[:, None, None, None]
        return (mask & (key >= first)) | (key == query)

    # Going back.

    def is_trimmable(self) -> bool:
        """True: forgetting the last columns is exact."""
        return True

    def trim(self, n: int) -> int:
        """Forgets the last n tokens of every sequence (at most the shortest); how many it did."""
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
            self._tail = None  # all that is left is in the buffers
        self.columns = columns

    def mark(self) -> Mark:
        """This moment, for ``rollback``; holds no arrays, so appending stays in place."""
        fields = {"_padding": self._padding, "_ends": self._ends, "fresh": self._keys is None}
        mark = Mark(self.columns, fields)
        self._marks.add(mark)
        return mark

    def rollback(self, mark: Mark) -> None:
        """Back to the moment of ``mark``, also across a growth step.

        Raises CacheError when rows before the mark were moved or rewritten since (trim,
        merge, extend, filter or finalize).
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
        """Refuses what mlx-lm's generators would do with ``kv_bits``.

        They look for this name before the first token and call it thousands of tokens later: a
        property refuses at once.
        """
        raise UnsupportedError(
            "Keys and values are quantised from the first token on or never; give kv_bits to "
            "load() and leave it out here."
        )

    # Batches.

    @classmethod
    def merge(cls, caches: Sequence[AttentionCache]) -> AttentionCache:
        """One entry for all sequences of ``caches``, which stay as they are."""
        merged = cls()
        merged._join(list(caches))
        return merged

    def extend(self, other: AttentionCache) -> None:
        """Appends the sequences of ``other`` to the batch."""
        self._join([copy.copy(self), other])

    def _join(self, parts: list[AttentionCache]) -> None:
        self._rearranged()
        self._join_counts(parts)
        rows = self.rows_for(self.columns)
        sizes = [(part.columns, part.batch_size) for part in parts]
        self.keys = _aligned([part.keys for part in parts], sizes, self.columns, rows)
        self.values = _aligned([part.values for part in parts], sizes, self.columns, rows)

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keeps only these sequences, in this order, and drops columns that pad them all."""
        keep = as_ints(batch_indices, "batch_indices")
        self._rearranged()
        self._flush()  # while the counts are those of the rows
        all_stay = keep == list(range(self.batch_size))
        drop = self._keep(keep)
        if self.keys is None:
            return
        if not all_stay:
            index = mx.array(keep, dtype=mx.int32)
            self.keys, self.values = self.keys[index], self.values[index]
        if drop:
            rows = self.rows_for(self.columns)
            kept = slice(drop, drop + self.columns)
            self.keys, self.values = (
                _resized(array[:, :, kept], array, rows, self.columns)
                for array in (self.keys, self.values)
            )

    def extract(self, i: int) -> AttentionCache:
        """An entry of its own for sequence i, with a copy of its rows."""
        self._require_final("extract()")
        single = type(self)()
        first = 0 if self._padding is None else min(self._padding[i], self.columns)
        single.columns = self.columns - first
        if self.keys is not None:
            rows = slice(first, self.columns)
            single.keys = mx.contiguous(self.keys[i : i + 1, :, rows])
            single.values = mx.contiguous(self.values[i : i + 1, :, rows])
            mx.async_eval(single.keys, single.values)
        return single

    def _move_right(self, extra: list[int]) -> None:
        self._rearranged()
        if self.keys is None:
            return
        row = mx.arange(self.capacity)
        source = row - mx.array(extra)[:, None]
        source = mx.where((source >= 0) & (row < self.columns), source, row)[:, None, :, None]
        self.keys = mx.take_along_axis(self.keys, source, axis=2)
        self.values = mx.take_along_axis(self.values, source, axis=2)

    # Saving.

    @property
    def state(self) -> tuple[Any, ...]:
        """(keys, values, columns, left padding, ends): what saving and ``mx.eval`` need."""
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
    """What latent attention remembers: ``keys`` are the latents [B, 1, capacity, R] and
    ``values`` the rotary keys [B, 1, capacity, Dr] that all heads share."""

    kind = "latent"


def _written(buffer: mx.array, rows: mx.array, start: int) -> mx.array:
    """``buffer`` [B, H, capacity, D] with ``rows`` [B, H, T, D] at row ``start``."""
    # A second handle: assigning through the caller's would change arrays that others hold,
    # and the old handle is dropped by the caller, which lets MLX write in place.
    buffer = copy.copy(buffer)
    buffer[:, :, start : start + rows.shape[2]] = rows
    return buffer


def _resized(buffer: mx.array | None, like: mx.array, rows: int, used: int) -> mx.array:
    """A buffer of ``rows`` rows that starts with the first ``used`` rows of ``buffer``."""
    B, H, _, D = like.shape
    if buffer is None or used == 0:
        return mx.zeros((B, H, rows, D), like.dtype)
    tail = mx.zeros((B, H, rows - used, D), buffer.dtype)
    return mx.concatenate([buffer[:, :, :used], tail], axis=2)


def _aligned(
    buffers: list[mx.array | None], sizes: list[tuple[int, int]], columns: int, rows: int
) -> mx.array | None:
    """Buffers of several batches as one [sum of B, H, rows, D] whose columns end together.

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
    """The class of entries like `kind` whose rows are quantised; dtype: of what they return."""
    per_group = group_size * bits // WORD + 2 * dtype.size * 8 // WORD

    class Quantized(kind):
        packs = True

        @classmethod
        def packed(cls, rows: mx.array) -> mx.array:
            """rows [..., D] -> uint16 [..., W]."""
            if rows.shape[-1] % group_size:
                raise InputError(
                    f"rows of {rows.shape[-1]} numbers have no groups of {group_size}; give a "
                    "kv_group_size that divides them."
                )
            parts = mx.quantize(rows.astype(dtype), group_size=group_size, bits=bits)
            return mx.concatenate([part.view(mx.uint16) for part in parts], axis=-1)

        @classmethod
        def unpacked(cls, rows: mx.array) -> mx.array:
            """uint16 [..., W] -> [..., D] in the compute dtype."""
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
            """See :meth:`AttentionCache.buffer`; copies of the columns in use."""
            return *self.keys_and_values(), self.columns

    Quantized.kind = f"{kind.kind}, {bits} bits in groups of {group_size}"
    Quantized.__name__ = Quantized.__qualname__ = f"{kind.__name__}{bits}Bit"
    return Quantized
