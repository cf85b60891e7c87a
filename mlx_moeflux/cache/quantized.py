"""Keys and values in 8 or 4 bits: a row is packed when it is written and unpacked when it is read.

A packed row has the integers, scales and biases of its groups, as MLX's affine quantisation makes
them, in one run of 16-bit words; so all that holds, moves, saves and shares rows stays as it is.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from mlx_moeflux.cache.attention import AttentionCache
from mlx_moeflux.errors import InputError

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
