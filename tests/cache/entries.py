"""Cache entries with random contents, and comparison bit for bit."""

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache import KVCache, RecurrentCache

HKV, DK, DV = 3, 5, 7


def rows(T, B=1):
    return mx.random.normal((B, HKV, T, DK)), mx.random.normal((B, HKV, T, DV))


def filled(T, B=1):
    cache, (keys, values) = KVCache(), rows(T, B)
    cache.update_and_fetch(keys, values)
    return cache, keys, values


def recurrent(seen, B=1, conv_dim=6, width=4):
    cache = RecurrentCache()
    cache.conv = mx.random.normal((B, width - 1, conv_dim))
    cache.delta = mx.random.normal((B, 4, DV, DK))
    cache.advance(seen)
    return cache


def same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and np.isfinite(a).all() and np.array_equal(a, b)


def tokens_of(cache, i, last=None):
    """Keys and values of the tokens of sequence i, padding cut off."""
    keys, values = cache.views()
    first = 0 if cache.left_padding is None else cache.left_padding[i].item()
    return keys[i, :, first:last], values[i, :, first:last]
