"""Rows of a table, looked up by hashes of the last tokens, added to the residual streams.

    r: a token's rows, [E];   k = norm(W_k r), v = W_v r;   q = norm(x), stream by stream
    g = q . k / sqrt(C);   u = sigmoid(sign(g) sqrt(max(|g|, 1e-6))) v, for each stream
    x <- x + u + silu(conv(norm(u)))

The convolution is causal, depthwise and dilated by ``ngram_size``.

Source: transformers 5.24 `Qwen4ExpTextPLELayer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache.ngrams import NgramCache, Reading
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.delta.delta_mixer import causal_conv_silu
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.layers import weights_of
from mlx_moeflux.models.modules import Linear, Module
from mlx_moeflux.models.ngrams import NgramHashes
from mlx_moeflux.models.qwen3_5_moe import Convolution
from mlx_moeflux.models.residual_streams import GroupedNorm


class Rows(Protocol):
    """Table of rows."""

    def begin(self, ids: np.ndarray) -> Reading:
        """Begin to read rows ``ids [...]``; they come as ``[..., width]``."""
        ...


class NgramLayer(Module):
    """x ``[B, T, S C]``, cache entry -> what is added to x. Parameters ``key_proj``,
    ``value_proj``, ``norm_key``, ``norm_query``, ``norm_conv``, ``conv1d``.

    index: Number of this layer among those with n-grams.
    """

    reads: ClassVar[Mapping[str, type]] = {"conv1d": Convolution}

    def __init__(self, config: Any, kernels: Kernels, index: int):
        super().__init__()
        S, C, E = config.hc_count, config.hidden_size, config.ple_embed_dim
        self._kernels, self._streams, self._stop = kernels, S, config.stop_token
        self._context, self._dilation = config.ngram_size - 1, config.ngram_size
        self.key_proj = Linear(E, S * C, bias=False)
        self.value_proj = Linear(E, C, bias=False)
        self.norm_key = GroupedNorm(S, C, eps=config.rms_norm_eps)
        self.norm_query = GroupedNorm(S, C, eps=config.rms_norm_eps)
        self.norm_conv = GroupedNorm(S, C, eps=config.rms_norm_eps)
        self.conv1d = Convolution(S * C, config.ple_conv_kernel_size)
        self._hashes = NgramHashes(config, index)
        self._table: Rows | None = None

    def set_table(self, table: Rows) -> None:
        """Set where the rows are."""
        self._table = table

    def begin(self, ids: mx.array, cache: NgramCache) -> None:
        """Begin to read the rows of ids ``[B, T]``, the next of `cache`. Evaluates: `ids`.

        Raises:
            UnsupportedError: The ids are not known, as inside a compiled function.
        """
        try:
            host = np.array(ids.astype(mx.int32))
        except ValueError as error:
            raise UnsupportedError(
                "rows of n-grams are read by the ids, which a compiled function does not know; "
                "call the model outside of mx.compile."
            ) from error
        history = cache.history(host, self._context)
        known = np.where(history == 0, self._stop, history - 1)
        assert self._table is not None
        cache.feed(history, host.shape[1], self._table.begin(self._hashes(known)))

    def __call__(self, x: mx.array, cache: NgramCache) -> mx.array:
        B, T, _ = x.shape
        S, real = self._streams, cache.real_tokens(T)
        rows, tokens = cache.taken(T)
        rows = rows.reshape(B, T, -1).astype(x.dtype)
        key, value = self._kernels.project(rows, weights_of(self.key_proj, self.value_proj))
        agree = self.norm_key(key).astype(mx.float32) * self.norm_query(x).astype(mx.float32)
        score = agree.reshape(B, T, S, -1).sum(axis=-1) / (x.shape[-1] // S) ** 0.5
        gate = mx.sigmoid(mx.sign(score) * mx.sqrt(mx.maximum(mx.abs(score), 1e-6)))
        added = (gate.astype(x.dtype)[..., None] * value[..., None, :]).reshape(x.shape)
        normed = self.norm_conv(added)
        if real is not None:
            added, normed = (mx.where(real[..., None], each, 0.0) for each in (added, normed))
        taps, window = self.conv1d.taps(), cache.ngram_conv
        if window is None:
            window = mx.zeros((B, (taps.shape[1] - 1) * self._dilation, x.shape[-1]), x.dtype)
        mixed, cache.ngram_conv = causal_conv_silu(
            normed, taps, window, lengths=cache.lengths, dilation=self._dilation
        )
        cache.tokens = tokens
        return added + mixed
