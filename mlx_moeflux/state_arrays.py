"""Arrays that a sequence's state holds in each layer, as configs declare them. No MLX.

A kind of entry names its arrays and says which of them have a row for each token. A config adds the
widths, layer by layer (``Config.state(layer, dtype)``). The rest follows from the declaration:
entries (:mod:`mlx_moeflux.cache`), files, prompt caches, pages, traced steps and byte formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from mlx_moeflux.checkpoint.tensors import ITEMSIZE
from mlx_moeflux.errors import InputError

ROW_AXIS = 2
"""Axis of the tokens' rows in arrays ``[B, heads, rows, width]`` that have them."""
WORD = 16
"""Bits of the words of packed rows."""


@dataclass(frozen=True)
class ArraySpec:
    """Dtype (safetensors code) and shape of an array; a dimension 0 stands for the tokens' rows."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of such an array."""
        return ITEMSIZE[self.dtype] * prod(self.shape)

    def rows(self, count: int) -> ArraySpec:
        """Return this spec with `count` rows of tokens."""
        return ArraySpec(self.dtype, tuple(n or count for n in self.shape))


@dataclass(frozen=True)
class EntrySpec:
    """Arrays of one layer's entry that has seen a token of one sequence.

    kind: Name of its :class:`EntryKind`, and how rows are packed. step: Rows of tokens by which its
    arrays grow.
    """

    kind: str
    arrays: Mapping[str, ArraySpec]
    step: int = 1

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token; 0 for entries that do not grow."""
        return sum(array.rows(1).nbytes for array in self.arrays.values() if 0 in array.shape)

    def nbytes(self, tokens: int) -> int:
        """Return the bytes after `tokens` tokens, reserved rows included."""
        rows = -(-tokens // self.step) * self.step
        return sum(array.rows(rows).nbytes for array in self.arrays.values())

    def quantized(self, bits: int, group_size: int) -> EntrySpec:
        """Return the spec of an entry with quantised rows; `self` if it has none.

        Raises:
            InputError: A group does not divide a row.
        """
        if not self.row_bytes:
            return self
        arrays = {}
        for name, array in self.arrays.items():
            *others, width = array.shape
            if width % group_size:
                raise InputError(
                    f"rows of {width} numbers have no groups of {group_size}; give a "
                    "kv_group_size that divides them."
                )
            words = width // group_size * group_words(bits, group_size, ITEMSIZE[array.dtype])
            arrays[name] = ArraySpec("U16", (*others, words))
        return replace(self, kind=quantized_kind(self.kind, bits, group_size), arrays=arrays)


def quantized_kind(kind: str, bits: int, group_size: int) -> str:
    """Return the kind of entries whose rows are quantised."""
    return f"{kind}, {bits} bits in groups of {group_size}"


def group_words(bits: int, group_size: int, itemsize: int) -> int:
    """Return the 16-bit words of a group: its integers, a scale and a bias of `itemsize` bytes."""
    return group_size * bits // WORD + 2 * itemsize * 8 // WORD


@dataclass(frozen=True)
class Field:
    """One array of a kind of entry. grows: It has a row for each token. dtype: A safetensors code;
    None: the model's."""

    name: str
    grows: bool = False
    dtype: str | None = None


@dataclass(frozen=True)
class EntryKind:
    """A kind of entry: its arrays in order. step: Rows of tokens by which they grow."""

    name: str
    fields: tuple[Field, ...]
    step: int = 1

    @property
    def grows(self) -> bool:
        """True if an array has a row for each token."""
        return any(field.grows for field in self.fields)

    def spec(self, dtype: str, **shapes: tuple[int, ...]) -> EntrySpec:
        """Return the arrays of a layer. shapes: Of one sequence, by name; arrays that grow are
        ``(heads, width)``. dtype: The model's, a safetensors code."""
        arrays = {}
        for field in self.fields:
            first, *others = shapes[field.name]
            shape = (1, first, 0, *others) if field.grows else (1, first, *others)
            arrays[field.name] = ArraySpec(field.dtype or dtype, shape)
        return EntrySpec(self.name, arrays, self.step)


ATTENTION = EntryKind("attention", (Field("keys", grows=True), Field("values", grows=True)), 256)
# Keys are the latents, values the rotary keys, which all heads share.
LATENT = EntryKind("latent", ATTENTION.fields, ATTENTION.step)
INDEXED = EntryKind("indexed", (*ATTENTION.fields, Field("index_keys", grows=True)), ATTENTION.step)
INDEXED_LATENT = EntryKind("indexed latent", INDEXED.fields, INDEXED.step)
RECURRENT = EntryKind("recurrent", (Field("conv"), Field("delta", dtype="F32")))
# The inputs of a second convolution, and the last tokens.
NGRAMS = EntryKind(
    "recurrent, n-grams", (*RECURRENT.fields, Field("ngram_conv"), Field("tokens", dtype="I32"))
)
