"""Sizes and random arrays for the calls that records of operations build; no seed is kept.

Implementations are held against references on small examples: a replacement when it is given, a
kernel before its first use on Metal, all of them by ``mlx_moeflux check``. They are timed on
workloads, at the sizes at which models call them. A builder takes :class:`Sizes`, a number of
tokens and a drawer of random arrays.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.linear.weight import Weight

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Normal = Callable[..., mx.array]


@dataclass(frozen=True)
class Sizes:
    """A model's widths: hidden C, inside an expert F, experts E and K, and heads; then what a call
    has: sequences, rows of a tail, positions before the new tokens, and those that a buffer grows
    by."""

    C: int
    F: int
    E: int
    K: int
    Hq: int
    Hkv: int
    Dh: int
    Dhv: int  # of its values
    Hk: int
    Hv: int
    Dk: int
    heads: int  # of latent attention
    latent: int
    Dn: int = 128
    Dr: int = 64
    Dv: int = 128  # of the delta rule and of latent attention
    group: int = 64
    B: int = 1
    tail: int = 64
    keys: int = 2048
    step: int = 256

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(4, self.group)


# Qwen3.6-35B-A3B with DeepSeek-V3's latents; sizes for a CPU; and sizes for a check,
# whose tokens are T or, in a step of one token a sequence, N.
LARGE = Sizes(2048, 512, 256, 8, 16, 2, 256, 256, 16, 32, 128, 128, 512)
SMALL = Sizes(768, 256, 32, 4, 8, 2, 128, 128, 4, 8, 128, 16, 512)
TINY = Sizes(
    64, 32, 9, 3, 4, 2, 64, 32, 2, 6, 64, 4, 64,
    Dn=64, Dr=32, Dv=32, group=32, B=2, tail=16, keys=2, step=10,
)  # fmt: skip
T, N, BLOCK = 5, 7, 16  # BLOCK: Rows of a block of a pool


def fresh_key() -> mx.array:
    """For random numbers that leave MLX's own generator, which users seed, as it is."""
    return mx.random.key(int.from_bytes(os.urandom(8), "little"))


def normal(default: mx.Dtype) -> Normal:
    """Return a drawer of normal numbers, whose arguments are the lengths of axes."""

    def draw(*shape: int, dtype: mx.Dtype = default) -> mx.array:
        return mx.random.normal(shape, key=fresh_key()).astype(dtype)

    return draw


def quantised(s: Sizes, x: Normal, *shape: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return weight, scales and biases of matrices ``[..., in]`` in 4 bits."""
    return mx.quantize(x(*shape) * shape[-1] ** -0.5, group_size=s.group, bits=4)


@functools.cache
def block_size(mode: str) -> float:
    """Return how large elements are in blocks whose float16 factors are 1 and whose other bytes are
    random."""
    form = BLOCK_MODES[mode]
    blocks = np.random.default_rng(0).integers(0, 256, (256, form.nbytes), np.uint8)
    for at in form.halves:
        blocks[:, at : at + 2] = np.ones(1, np.float16).view(np.uint8)
    return float(np.sqrt((form.values(blocks, np) ** 2).mean()))


def in_blocks(mode: str, *shape: int) -> mx.array:
    """Return random matrices ``[..., in]`` in ggml's blocks, ``[..., bytes of a row]`` uint8."""
    form, size = BLOCK_MODES[mode], block_size(mode)
    *rows, width = shape
    count = math.prod(shape) // form.elements
    blocks = mx.random.randint(0, 256, (count, form.nbytes), key=fresh_key()).astype(mx.uint8)
    for at in form.halves:
        factors = mx.random.uniform(0.5, 1.5, (count, 1), key=fresh_key()) * width**-0.5 / size
        blocks[:, at : at + 2] = factors.astype(mx.float16).view(mx.uint8)
    return blocks.reshape(*rows, -1)


def block_width(width: int) -> int:
    """Return a width of whole blocks of any type: `width`, or a block's."""
    most = max(mode.elements for mode in BLOCK_MODES.values())
    return max(width // most, 1) * most


def block_weight(mode: str, *outs: int, width: int) -> Weight:
    """Return a matrix in ggml's blocks, several concatenated ones if there are several `outs`."""
    stored = in_blocks(mode, sum(outs), width)
    return Weight(stored, spec=QuantSpec.of_mode(mode), outs=outs if len(outs) > 1 else ())


def weight(s: Sizes, x: Normal, *outs: int, width: int) -> Weight:
    """Return a matrix in 4 bits, of several concatenated ones if there are several `outs`."""
    parts = quantised(s, x, sum(outs), width)
    return Weight(*parts, s.spec, outs if len(outs) > 1 else ())
