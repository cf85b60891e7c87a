"""Attention whose queries see chosen blocks of tokens: Qwen4-Exp's sparse attention.

The tokens of a sequence form blocks of ``indexer_compress_ratio``. A block's key is the mean of its
tokens' index keys, normed, and rotated at the first token's position. A query's score of a complete
block is the sum over index heads of relu(q . k), by sqrt(Di). Each query sees the best
``indexer_budget // indexer_compress_ratio`` complete blocks, equal ones from the first on, and all
tokens behind the last complete block. A query with no more blocks than that sees everything, by
plain attention.

Source: transformers 5.24 `Qwen4ExpTextQSAIndexer`, which takes equal scores in the order of torch's
topk.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache.kv import IndexedCache, IndexedStep
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.layers import weights_of
from mlx_moeflux.models.modules import Linear, Module, RMSNorm


def chosen_blocks(scores: mx.array, counts: mx.array, most: int) -> mx.array:
    """scores ``[..., N]`` of blocks, which `counts` ``[..., N]`` or not -> bool ``[..., N]``: the
    `most` best, the lower of equals, or all if there are fewer."""
    scores = mx.where(counts, scores, -mx.inf)
    least = mx.topk(scores, min(most, scores.shape[-1])).min(axis=-1, keepdims=True)
    above, equal = scores > least, scores == least
    room = most - above.sum(axis=-1, keepdims=True)
    chosen = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
    return chosen & (scores > -mx.inf)


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
        turned = {"dims": config.rotary_dims, "traditional": False, "base": config.rope_theta}
        self._rope = partial(mx.fast.rope, **turned)

    def project(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """x ``[B, T, C]``; offset: position of the first token, or one for each sequence.

        Returns rotated queries ``[B, H, T, Di]`` and the tokens' keys ``[B, 1, T, Di]``."""
        B, T, _ = x.shape
        rows = self._kernels.project(x, weights_of(self.index_qk_proj))[0]
        rows = rows.reshape(B, T, -1, self._width).swapaxes(1, 2)
        q = self.q_layernorm(rows[:, : self._heads])
        return self._rope(q, scale=1.0, offset=offset), rows[:, self._heads :]

    def plain_until(self, first: int) -> int:
        """See :meth:`~mlx_moeflux.cache.kv.BlockMaker.plain_until`."""
        return first + (self.blocks + 1) * self.ratio - 1

    def pooled(self, keys: mx.array, first: Any) -> mx.array:
        """See :meth:`~mlx_moeflux.cache.kv.BlockMaker.pooled`."""
        B, _, rows, Di = keys.shape
        groups = keys.reshape(B, 1, rows // self.ratio, self.ratio, Di)
        mean = groups.astype(mx.float32).mean(axis=3).astype(keys.dtype)
        # Block i begins at position i * ratio.
        return self._rope(self.k_layernorm(mean), scale=float(self.ratio), offset=first)

    def scores(self, q: mx.array, blocks: mx.array) -> mx.array:
        """q ``[B, H, T, Di]``, blocks ``[B, 1, N, Di]`` -> ``[B, 1, T, N]`` float32."""
        (B, H, T, Di), keys = q.shape, blocks.astype(mx.float32).swapaxes(2, 3)
        scores = mx.zeros((B, 1, T, blocks.shape[2]))
        for head in range(H):
            product = q[:, head : head + 1].astype(mx.float32) @ keys
            scores = scores + mx.maximum(product, 0.0)
        return scores / Di**0.5

    def choose(self, q: mx.array, step: IndexedStep) -> tuple[mx.array, mx.array]:
        """Return the columns ``[B, M]`` of the tokens that the token of a step sees: those of
        chosen blocks, ascending, and those behind the last complete block; and which of them count,
        bool ``[B, 1, 1, M]``. The others are in range and mean nothing.

        q: ``[B, H, 1, Di]``.
        """
        B, ratio, (_, _, N, _) = q.shape[0], self.ratio, step.blocks.shape
        first = mx.zeros((B, 1), mx.int32) if step.padding is None else step.padding[:, None]
        complete = (step.column - first + 1) // ratio  # [B, 1]
        numbers, scores = mx.broadcast_to(mx.arange(N), (B, N)), self.scores(q, step.blocks)
        counts = numbers < complete
        if step.tail is not None:
            before = (step.start - first) // ratio  # [B, 1], blocks before the tail
            own = self.pooled(step.tail[2], before[:, 0])
            in_tail = before + mx.arange(own.shape[2])
            counts = mx.concatenate([numbers < before, (in_tail >= 0) & (in_tail < complete)], -1)
            numbers = mx.concatenate([numbers, in_tail], axis=-1)
            scores = mx.concatenate([scores, self.scores(q, own)], axis=-1)
        chosen = chosen_blocks(scores, counts[:, None, None], self.blocks)[:, 0, 0]
        none = step.buffers[0].shape[2]
        found = mx.sort(mx.where(chosen, numbers, none), axis=-1)[:, : self.blocks]
        token = mx.arange(ratio)
        columns = (first + found * ratio)[..., None] + token
        behind = first + complete * ratio + token
        seen = mx.concatenate([mx.repeat(found < none, ratio, axis=-1), behind <= step.column], -1)
        columns = mx.concatenate([columns.reshape(B, -1), behind], axis=-1)
        return mx.minimum(columns, none - 1), seen[:, None, None]

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
        complete = (position + 1) // ratio
        counts = mx.arange(count) < complete
        chosen = chosen_blocks(self.scores(q, blocks), counts, self.blocks)
        key = mx.arange(S)
        of = key - first[:, None, None, None]  # [B, 1, 1, S]
        block = mx.broadcast_to(mx.clip(of // ratio, 0, count - 1), (B, 1, T, S))
        seen = mx.where(of // ratio < complete, mx.take_along_axis(chosen, block, axis=-1), True)
        return (seen & (key <= column) & (of >= 0)) | ((key == column) & (position < 0))


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
        columns, mask = self.indexer.choose(index_q, step)
        columns = columns[:, None, :, None]
        keys, values = (mx.take_along_axis(rows, columns, axis=2) for rows in step.buffers)
        if step.tail is not None:
            row = columns - step.start
            inside, row = row >= 0, mx.clip(row, 0, step.tail[0].shape[2] - 1)
            keys, values = (
                mx.where(inside, mx.take_along_axis(tail, row, axis=2), rows)
                for tail, rows in zip(step.tail, (keys, values), strict=False)
            )
        return self._kernels.sdpa(q, k=keys, v=values, mask=mask, **options)
