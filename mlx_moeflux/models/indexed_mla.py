"""Latent attention whose queries see chosen positions: DeepSeek's sparse attention.

Each query sees the ``index_topk`` best of the positions before it and its own, as
:mod:`~mlx_moeflux.kernels.mla.choose_positions` chooses them. A query with no more positions than
that sees all of them, by plain latent attention. A layer without an indexer takes what the last
layer with one chose.

A few tokens read the rows that they see (:mod:`~mlx_moeflux.kernels.mla.chosen_latents`). The
tokens of a prompt hide the others by a mask, and as many of them are scored together as
:data:`~mlx_moeflux.kernels.mla.latent_attention.SCORES_AT_ONCE` allows. A traced step chooses as
soon as its buffers have more rows than a query sees: the lengths are on the device, and a query
with fewer positions sees them all.

Source: transformers 5.24 `DeepseekV32Indexer`, `GlmMoeDsaAttention`, which take equal scores in the
order of torch's topk. DeepSeek's own code scores in FP8, after a Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.kernels.attention.norm_rope import for_each_sequence
from mlx_moeflux.kernels.mla.latent_attention import SCORES_AT_ONCE
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.layers import project_normed, weights_of
from mlx_moeflux.models.mla import LatentAttention, Queries
from mlx_moeflux.models.modules import LayerNorm, Linear, Module

# So many tokens at most read the rows that they see; more share a mask.
FEW_TOKENS = 8
# Epsilon of the norm of index keys in transformers.
KEY_EPS = 1e-6


class Index(NamedTuple):
    """What an indexer makes of T tokens: rotated queries ``[B, Hi, T, Di]`` and keys ``[B, 1, T,
    Di]``, and the weights of the heads ``[B, T, Hi]``."""

    queries: mx.array
    keys: mx.array
    weights: mx.array


class Indexer(Module):
    """Parameters ``wq_b.weight [Hi Di, Rq]``, ``wk.weight [Di, C]``, ``k_norm.weight``, ``.bias
    [Di]``, ``weights_proj.weight [Hi, C]``."""

    def __init__(self, config: Any):
        super().__init__()
        H, Di, C = config.index_n_heads, config.index_head_dim, config.hidden_size
        self._heads, self._dims = H, config.qk_rope_head_dim
        self._interleaved = config.indexer_rope_interleave
        self._factor = config.rope.attention_factor
        self._periods = mx.array(config.rope.periods(self._dims))
        mx.eval(self._periods)
        self.wq_b = Linear(config.q_lora_rank, H * Di, bias=False)
        self.wk = Linear(C, Di, bias=False)
        self.k_norm = LayerNorm(Di, eps=KEY_EPS)
        self.weights_proj = Linear(C, H, bias=False)

    def index(
        self, keys: mx.array, weights: mx.array, queries: mx.array, offset: int | mx.array
    ) -> Index:
        """keys ``[B, T, Di]``, weights ``[B, T, Hi]``, queries ``[B, T, Hi Di]``: as projected.
        offset: Position of the first token, or one for each sequence."""
        B, T, _ = queries.shape
        queries = queries.reshape(B, T, self._heads, -1).swapaxes(1, 2)
        keys = self._rotated(self.k_norm(keys)[:, None], offset)
        return Index(self._rotated(queries, offset), keys, weights)

    def _rotated(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Rotate the first dimensions of rows ``[B, H, T, Di]``."""
        if self._factor != 1.0:
            turned, rest = mx.split(x, [self._dims], axis=-1)
            x = mx.concatenate([turned * self._factor, rest], axis=-1)
        if not isinstance(offset, int):
            offset = for_each_sequence(offset, len(x))
        options = {"base": None, "scale": 1.0, "offset": offset, "freqs": self._periods}
        return mx.fast.rope(x, self._dims, traditional=self._interleaved, **options)


class IndexedLatentAttention(LatentAttention):
    """Latent attention to the positions that an :class:`Indexer` chooses. Parameters: those of
    :class:`LatentAttention`, and ``indexer.*`` if the layer has one.

    indexed: The layer has an indexer; else it takes the choice of an earlier one. shares: Later
    layers take its choice, too.
    """

    def __init__(
        self, config: Any, kernels: Kernels, *, indexed: bool = True, shares: bool = False
    ):
        super().__init__(config, kernels)
        self._shares = shares
        if indexed:
            self.indexer = Indexer(config)

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        (group,) = super().stacks()
        if "indexer" not in self:
            return [group]
        indexer = self.indexer
        return [(*group, indexer.wk, indexer.weights_proj), (self.q_b_proj, indexer.wq_b)]

    def _project_inputs(self, x: mx.array, norm: nn.RMSNorm) -> Sequence[mx.array]:
        """See :meth:`LatentAttention._project_inputs`; adds keys, weights and queries of the
        indexer."""
        if "indexer" not in self:
            return super()._project_inputs(x, norm)
        first, second = self.stacks()
        low, kv, *index = project_normed(self._kernels, x, weights_of(*first), norm)
        norm = self.q_a_layernorm
        q, index_q = self._kernels.project(low, weights_of(*second), norm=norm.weight, eps=norm.eps)
        return q, kv, *index, index_q

    def index(self, projected: Sequence[mx.array], offset: int | mx.array) -> Index:
        """See :meth:`LatentAttention.index`."""
        keys, weights, queries = projected
        return self.indexer.index(keys, weights, queries, offset)

    def attend(self, queries: Queries, index: Index | None, cache: Any, **options: Any) -> mx.array:
        """See :meth:`LatentAttention.attend`."""
        length, budget, T = options["length"], self.config.index_topk, queries.whole.shape[1]
        if isinstance(length, mx.array):  # a traced step
            if options["k"].shape[2] <= budget:
                return super().attend(queries, None, cache, **options)
            return self._seen(queries, self._positions(index, cache, cache.row, 1, length), options)
        before, outputs = length - T, []
        plain = min(max(cache.first_column + budget - before, 0), T)
        if plain:
            seen = {"length": before + plain, "mask": options["mask"] if plain > 1 else None}
            outputs.append(super().attend(queries.of(slice(plain)), None, cache, **options | seen))
        if plain < T:
            rest, few = queries.of(slice(plain, T)), T - plain <= FEW_TOKENS
            positions = self._positions(index, cache, before + plain, T - plain, length)
            if few and rest.latent is not None:
                y = self._seen(rest, positions, options)
                if T == 1 and (short := cache.shorter(budget)) is not None:
                    # As without the longer sequences beside them.
                    every = super().attend(queries, None, cache, **options)
                    y = mx.where(short[:, None, None, None], every, y)
                outputs.append(y)
            else:
                hidden = mx.zeros((*positions.shape[:2], length), mx.bool_)
                mask = mx.put_along_axis(hidden, positions, mx.array(True), axis=-1)[:, None]
                hides = {"mask": mask, "start": None}
                outputs.append(super().attend(rest, None, cache, **options | hides))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)

    def _seen(self, queries: Queries, positions: mx.array, options: dict[str, Any]) -> mx.array:
        """Return the values of a few tokens, which read the rows that they see."""
        given = {name: value for name, value in options.items() if name not in ("k", "v", "mask")}
        return self._kernels.chosen_latent_attention(
            queries.latent,
            queries.rotary,
            options["k"],
            options["v"],
            positions,
            values=queries.values,
            steps=self._kernels,
            **given,
        )

    def _positions(
        self, index: Index | None, cache: Any, begin: int, count: int, length: int | mx.array
    ) -> mx.array:
        """Return the positions int32 ``[B, count, k]`` that the last `count` of `length` columns
        see, from this layer's indexer or from an earlier one's, which knows them by `begin`."""
        if index is None:
            return cache.chosen.take(begin, last=not self._shares and not self.training)
        queries, weights, (keys, tail) = index.queries, index.weights, cache.index_rows()
        if self.training:
            queries, weights, keys = map(mx.stop_gradient, (queries, weights, keys))
        B, T, parts = len(queries), queries.shape[2], []
        at_once = count
        if isinstance(length, int):
            at_once = max(1, SCORES_AT_ONCE // (B * length))
        for start in range(T - count, T, at_once):
            stop = min(start + at_once, T)
            parts.append(
                self._kernels.choose_positions(
                    queries[:, :, start:stop],
                    weights[:, start:stop],
                    keys,
                    k=self.config.index_topk,
                    length=length - (T - stop),
                    start=cache.left_padding,
                    tail=tail,
                )
            )
            if at_once < count:
                # Else MLX holds the scores of several parts.
                mx.eval(parts[-1])
        positions = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
        if self._shares:
            cache.chosen.put(self, begin, positions)
        return positions
