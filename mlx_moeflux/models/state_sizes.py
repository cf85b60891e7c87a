"""Bytes of a sequence's state in a layer, from a config's numbers. No MLX.

Loading measures the state of a built model instead; a test holds both equal.
"""

from __future__ import annotations

# Rows by which the buffers of :mod:`mlx_moeflux.cache` grow.
STEP = 256
BFLOAT16, FLOAT32 = 2, 4


def _rows(positions: int) -> int:
    return -(-positions // STEP) * STEP


def kv_bytes(positions: int, heads: int, head_dim: int) -> int:
    """Return the bytes of keys and values."""
    return 2 * BFLOAT16 * _rows(positions) * heads * head_dim


def latent_bytes(positions: int, rank: int, rotary: int) -> int:
    """Return the bytes of latents and rotary keys, which all heads share."""
    return BFLOAT16 * _rows(positions) * (rank + rotary)


def recurrent_bytes(kernel: int, channels: int, elements: int) -> int:
    """Return the bytes of a gated delta net: the convolution's last inputs and the delta rule's
    state of so many elements."""
    return BFLOAT16 * (kernel - 1) * channels + FLOAT32 * elements
