"""Rows of a table that the last tokens hash to (Qwen4-Exp's n-grams). No MLX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlx_moeflux.checkpoint.tables import Shard
from mlx_moeflux.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from mlx_moeflux.models.qwen4_exp_config import Config

_MASK = (1 << 64) - 1
# Constants of SplitMix64, and what parts the seeds of layers.
_GAMMA, _MIX = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAYER_STEP = 10007
# As witnesses they decide every number below 3.1e23 (Sorenson, Webster 2015).
_SMALL_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


class NgramHashes:
    """Row numbers of one layer's table: each n-gram of 2 to ``ngram_size`` tokens has
    ``heads_per_ngram`` hashes, each into rows of its own, a prime number of them.

    A hash is the exclusive or of ``token[t - i] * multipliers[i]`` in wrapping int64, modulo the
    rows of its head. A stop token ends the context: what lies before it counts as stop tokens.

    index: Place of the layer among those with a table. context: Tokens before the first one that
    the hashes look at. sizes, offsets: int64 ``[heads]``, rows of each head and where they begin.
    multipliers: int64 ``[ngram_size]``. rows: Rows of the table, padding included.

    Source: transformers 5.23 `Qwen4ExpTextNGramEmbedding`.
    """

    def __init__(self, config: Config, index: int):
        assert config.stop_token is not None
        first = index * config.ngram_heads
        primes = _primes_from(config.ngram_vocab_size_base)
        sizes = list(config.ngram_head_rows)
        sizes = sizes or list(islice(primes, first, first + config.ngram_heads))
        *offsets, total = accumulate(sizes, initial=0)
        step = config.make_ngram_vocab_size_divisible_by
        self.rows = -(-total // step) * step
        self.context = config.ngram_size - 1
        self.sizes = np.array(sizes, np.int64)
        self.offsets = np.array(offsets, np.int64)
        self.multipliers = np.array(
            config.ngram_multipliers or _multipliers(config, index), np.int64
        )
        self._stop, self._per_ngram = config.stop_token, config.heads_per_ngram

    def __call__(self, history: np.ndarray) -> np.ndarray:
        """Return the row numbers of a call's tokens.

        Args:
            history: Token ids, int32 or int64 ``[B, context + T]``: those of the call after the
                last `context` ones before it, stop tokens where a sequence has fewer.

        Returns:
            int64 ``[B, T, heads]``, heads of shorter n-grams first.

        Raises:
            ShapeError: `history` has another shape.
        """
        if history.ndim != 2 or history.shape[1] < self.context:
            raise ShapeError(
                f"the history of n-grams has shape {list(history.shape)}; expected [B, "
                f"{self.context} + T]."
            )
        history = history.astype(np.int64)
        first, last = self.context, history.shape[1]
        mixed = history[:, first:] * self.multipliers[0]
        cut = np.zeros(mixed.shape, bool)
        heads = []
        for back in range(1, self.context + 1):
            token = history[:, first - back : last - back]
            cut |= token == self._stop
            mixed = mixed ^ np.where(cut, self._stop, token) * self.multipliers[back]
            own = slice((back - 1) * self._per_ngram, back * self._per_ngram)
            heads.append(mixed[..., None] % self.sizes[own] + self.offsets[own])
        return np.concatenate(heads, axis=-1)


def check_tables(tables: Mapping[int, Sequence[Shard]], config: Config, file: Path | str) -> None:
    """Raise unless the layers with n-grams, and no others, have tables of the right rows.

    Raises:
        ConfigError: A table is missing or of no such layer, or has other rows or, if it is not
            quantised, another width.
    """
    for layer in sorted({*range(config.num_hidden_layers), *tables}):
        index, shards = config.ngram_index(layer), tables.get(layer)
        if (index is None) != (shards is None):
            has = "a table of n-grams" if index is None else "no table of n-grams"
            raise ConfigError(
                f"{file}: layer {layer} has {has}, but 'ple_layer_ids' is "
                f"{list(config.ple_layer_ids)} (the first layer is 1)."
            )
        if index is None or shards is None:
            continue
        rows, found = NgramHashes(config, index).rows, sum(s["weight"].shape[0] for s in shards)
        if found != rows:
            raise ConfigError(
                f"{file}: the n-grams of layer {layer} need a table of {rows} rows, but its "
                f"{len(shards)} shards have {found}; config.json and the weights are of different "
                "models, or a shard is missing."
            )
        weight = shards[0]["weight"]
        if "scales" not in shards[0] and weight.shape[1] != config.ngram_width:
            raise ConfigError(
                f"{file}: the n-grams of layer {layer} need rows of {config.ngram_width} numbers, "
                f"but '{weight.name}' has {weight.shape[1]}; config.json and the weights are of "
                "different models."
            )


def _multipliers(config: Config, index: int) -> list[int]:
    """Return an odd number for each token of an n-gram, whose product with an id fits 63 bits."""
    half = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    seed = config.seed + _LAYER_STEP * index
    values = (_splitmix64(seed + _GAMMA * (i + 1)) for i in range(config.ngram_size))
    return [2 * (value % half) + 1 for value in values]


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    for shift, factor in _MIX:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def _primes_from(start: int) -> Iterator[int]:
    return filter(_is_prime, count(start))


def _is_prime(n: int) -> bool:
    """Return True if `n`, below 3.1e23, is a prime number (Miller-Rabin)."""
    if n < 2:
        return False
    for prime in _SMALL_PRIMES:
        if n % prime == 0:
            return n == prime
    twos = ((n - 1) & -(n - 1)).bit_length() - 1
    for witness in _SMALL_PRIMES:
        power = pow(witness, (n - 1) >> twos, n)
        if power in (1, n - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % n
            if power == n - 1:
                break
        else:
            return False
    return True
