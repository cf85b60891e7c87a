"""Attention whose queries see chosen blocks of tokens: Qwen4-Exp's sparse attention.

The tokens of a sequence form blocks of ``indexer_compress_ratio``. A block's key is the mean of its
tokens' index keys, normed, and rotated at the first token's position. Each query sees the best
``indexer_budget // indexer_compress_ratio`` complete blocks, as
:mod:`~mlx_moeflux.kernels.attention.choose_blocks` chooses them, and all tokens behind the last
complete block. A query with no more blocks than that sees everything, by plain attention.

Source: transformers 5.24 `Qwen4ExpTextQSAIndexer`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_moeflux.cache.indexed import IndexedCache, IndexedStep
from mlx_moeflux.kernels.attention.choose_blocks import best_blocks, block_scores
from mlx_moeflux.kernels.attention.norm_rope import for_each_sequence
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.layers import weights_of
from mlx_moeflux.models.modules import Linear, Module, RMSNorm


class Indexer(Module):
    """Parameters ``index_qk_proj.weight [(H + 1) Di, C]``, ``q_layernorm``, ``k_layernorm``
    ``.weight [Di]``."""

    def __init__(self, config: Any, kernels: Kernels):
        super().__init__()
        H, Di = config.indexer_n_heads, config.indexer_head_dim
        self._kernels, self._heads, self._width = kernels, H, Di
        self.ratio, self.blocks = config.indexer_compress_ratio, config.block_topk
        self.index_qk_proj = Linear(config.hidden_size, (H + 1) * Di, bias=False)
        self.q_layernorm = RMSNorm(Di, eps=config.rms_norm_eps)
        self.k_layernorm = RMSNorm(Di, eps=config.rms_norm_eps)
        self._turned = {"dims": config.rotary_dims, "base": config.rope_theta}

    def project(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """x ``[B, T, C]``; offset: position of the first token, or one for each sequence.

        Returns rotated queries ``[B, H, T, Di]`` and the tokens' keys ``[B, 1, T, Di]``."""
        B, T, _ = x.shape
        rows = self._kernels.project(x, weights_of(self.index_qk_proj))[0]
        rows = rows.reshape(B, T, -1, self._width).swapaxes(1, 2)
        q = self.q_layernorm(rows[:, : self._heads])
        return self._rotated(q, offset), rows[:, self._heads :]

    def plain_until(self, first: int) -> int:
        """See :meth:`~mlx_moeflux.cache.indexed.BlockMaker.plain_until`."""
        return first + (self.blocks + 1) * self.ratio - 1

    def pooled(self, keys: mx.array, first: Any) -> mx.array:
        """See :meth:`~mlx_moeflux.cache.indexed.BlockMaker.pooled`."""
        B, _, rows, Di = keys.shape
        groups = keys.reshape(B, 1, rows // self.ratio, self.ratio, Di)
        mean = groups.astype(mx.float32).mean(axis=3).astype(keys.dtype)
        # Block i begins at position i * ratio.
        return self._rotated(self.k_layernorm(mean), first, self.ratio)

    def _rotated(self, x: mx.array, first: int | mx.array, apart: int = 1) -> mx.array:
        """Rotate rows ``[B, H, rows, Di]`` at positions `apart` each; first: of the first row
        divided by `apart`, one or one for each sequence."""
        offset = for_each_sequence(first, len(x))
        return mx.fast.rope(x, traditional=False, scale=float(apart), offset=offset, **self._turned)

    def choose(self, q: mx.array, step: IndexedStep) -> mx.array:
        """Return the blocks int32 ``[B, k + 1]`` that the token of a step sees; see the operation
        ``choose_blocks``. q: ``[B, H, 1, Di]``."""
        B, options = q.shape[0], {}
        first = mx.zeros((B,), mx.int32) if step.padding is None else step.padding
        complete = (step.column - first + 1) // self.ratio
        if step.tail is not None:
            before = (step.start - first) // self.ratio  # blocks before the tail
            options = {"tail": self.pooled(step.tail[2], before), "before": before}
        choose = self._kernels.choose_blocks
        return choose(q, step.blocks, complete[:, None], k=self.blocks, **options)[:, 0]

    def mask(self, q: mx.array, blocks: mx.array, S: int, padding: mx.array | None) -> mx.array:
        """Return which keys the queries see, bool ``[B, 1, T, S]``.

        q ``[B, H, T, Di]``: of the last T of S columns. blocks ``[B, 1, N, Di]``: keys of all
        complete blocks. padding: int32 ``[B]``, columns before each first token, or None. A column
        of padding sees itself alone.
        """
        (B, _, T, _), count, ratio = q.shape, blocks.shape[2], self.ratio
        first = mx.zeros((B,), mx.int32) if padding is None else padding
        column = mx.arange(S - T, S)[:, None]
        position = column - first[:, None, None, None]  # [B, 1, T, 1]
        complete = mx.maximum((position + 1) // ratio, 0)
        chosen = self._chosen(q, blocks, complete)
        key = mx.arange(S)
        of = key - first[:, None, None, None]  # [B, 1, 1, S]
        block = mx.broadcast_to(mx.clip(of // ratio, 0, count), (B, 1, T, S))
        seen = mx.take_along_axis(chosen, block, axis=-1) & (key <= column) & (of >= 0)
        return seen | ((key == column) & (position < 0))

    def _chosen(self, q: mx.array, blocks: mx.array, complete: mx.array) -> mx.array:
        """Return which blocks the queries see, the one behind the complete ones too: bool
        ``[B, 1, T, N + 1]``. complete: int32 ``[B, 1, T, 1]``."""
        (B, _, T, _), count, choose = q.shape, blocks.shape[2], self._kernels.choose_blocks
        if choose.goes_beyond_reference(q):
            chosen = choose(q, blocks, complete[:, 0, :, 0], k=self.blocks)[:, None]
            none = mx.zeros((B, 1, T, count + 1), mx.bool_)
            return mx.put_along_axis(none, chosen, mx.array(True), axis=-1)
        # Without a list, which would have to be sorted.
        counts = mx.arange(count) < complete
        chosen = best_blocks(block_scores(q, blocks), counts, self.blocks)
        return mx.concatenate([chosen, mx.zeros((B, 1, T, 1), mx.bool_)], axis=-1) | (
            mx.arange(count + 1) == complete
        )


class IndexedAttention(Attention):
    """Gated attention of the tokens that :class:`Indexer` chooses. Parameters: those of
    :class:`Attention`, and ``indexer.*``."""

    def __init__(self, config: Any, kernels: Kernels):
        super().__init__(config, kernels, gated=True)
        self.indexer = Indexer(config, kernels)

    def attend(
        self,
        x: mx.array,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        cache: IndexedCache,
        options: dict[str, Any],
    ) -> mx.array:
        """See :meth:`Attention.attend`."""
        T, indexer = q.shape[2], self.indexer
        index_q, index_k = indexer.project(x, cache.positions(T))
        cache.indexer = indexer
        rows = cache.append(self._kernels, k, v, index_k)
        if T == 1:
            step = cache.last_step(indexer)
            if step is not None:
                y = self._stepped(q, index_q, step, options)
                if step.plain is None:
                    return y
                plain = self._kernels.sdpa(q, **{"mask": None, **rows, **options})
                return mx.where(step.plain[:, None, None, None], plain, y)
            return self._kernels.sdpa(q, **{"mask": None, **rows, **options})
        before, first, padding = cache.columns - T, cache.first_column, cache.left_padding
        plain = min(max(indexer.plain_until(first) - before, 0), T)
        keys, values, _ = cache.buffers()
        gate, outputs = options.pop("gate"), []

        def attended(which: slice, **seen: Any) -> mx.array:
            """Return the outputs of some of the queries."""
            part = {"gate": gate[:, which], **seen, **options}
            return self._kernels.sdpa(q[:, :, which], k=keys, v=values, **part)

        if plain:
            mask = "causal" if plain > 1 else None
            seen = {"length": before + plain, "start": padding, "mask": mask}
            outputs.append(attended(slice(plain), **seen))
        if plain < T:
            blocks = cache.blocks(indexer)
            mask = indexer.mask(index_q[:, :, plain:], blocks, before + T, padding)
            seen = {"length": before + T, "start": None, "mask": mask}
            outputs.append(attended(slice(plain, T), **seen))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)

    def _stepped(
        self, q: mx.array, index_q: mx.array, step: IndexedStep, options: dict[str, Any]
    ) -> mx.array:
        """Return the attention of one query, which reads the tokens that it sees."""
        indexer, kernels = self.indexer, self._kernels
        return kernels.chosen_sdpa(
            q,
            *step.buffers,
            indexer.choose(index_q, step),
            ratio=indexer.ratio,
            length=step.column + 1,
            start=step.padding,
            tail=None if step.tail is None else step.tail[:2],
            steps=kernels,
            **options,
        )
