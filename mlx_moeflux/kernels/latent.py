"""Multi-head latent attention over a cache of one latent and one rotary key per position.

Head h has keys ``k_s = [W_K(h) c_s, r_s]`` and values ``v_s = W_V(h) c_s`` of the latent c_s and
the rotary key r_s of position s, which all heads share. Two forms of the same sum:

    absorbed      score = (W_K(h)^T q_nope) c_s + q_rotary r_s,  y = W_V(h) (sum p_s c_s)
    materialised  score = q_nope (W_K(h) c_s) + q_rotary r_s,    y = sum p_s (W_V(h) c_s)

Neither ever holds scores of all heads, queries and keys: keys are taken some at a time with a
running softmax in float32.

Evaluates: every stretch of keys and heads, unless one stretch takes all.

Shapes:
    latents: ``[B, 1, capacity, R]``; rotary_keys: ``[B, 1, capacity, Dr]``: whole buffers, of
    which the first `length` rows count and no other is read. The T queries are the last of them:
    query t sees keys up to length - T + t.
    mask: None (every query sees every key), "causal", or bool ``[B or 1, 1, T, length]``.
    length: An int, or (one query only) int32 ``[1]``.
    start: None, or int32 ``[B]``: the first key of each sequence; a query before it sees itself
    alone, and its result means nothing.
    tail: None, or (one query only) the newest rows of both buffers, as in
    :mod:`mlx_moeflux.kernels.attention`.
    values: None, or of the absorbed form each head's matrix ``[Dv, R]``, which the weighted latents
    go through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from mlx_moeflux.kernels.attention import joined
from mlx_moeflux.kernels.heads import HeadMatrices, head_product

# Scores computed at once: 16 MiB in float32, and as much again for each step to the weights.
SCORES_AT_ONCE = 4 << 20
KEYS_AT_ONCE = 512
# Stands for minus infinity, of which the difference to itself is no number.
_NEVER = -1e30

Mask = mx.array | str | None


def latent_attention(
    q_latent: mx.array,
    q_rotary: mx.array,
    latents: mx.array,
    rotary_keys: mx.array,
    *,
    length: int | mx.array,
    scale: float,
    mask: Mask,
    start: mx.array | None = None,
    tail: tuple[mx.array, mx.array] | None = None,
    values: HeadMatrices | None = None,
) -> mx.array:
    """The absorbed form.

    q_latent ``[B, H, T, R]`` (W_K^T q_nope), q_rotary ``[B, H, T, Dr]`` -> ``[B, H, T, R]``, the
    weighted latents, in the dtype of q_latent; with `values` ``[B, H, T, Dv]``.
    """
    if values is not None:
        options = {"length": length, "scale": scale, "mask": mask, "start": start, "tail": tail}
        y = latent_attention(q_latent, q_rotary, latents, rotary_keys, **options)
        return head_product(y, values)
    B, H, T, R = q_latent.shape
    if tail is not None:
        whole = (latents, rotary_keys)
        latents, rotary_keys = (joined(x, t, length) for x, t in zip(whole, tail, strict=True))
    if isinstance(length, mx.array):
        # In a traced step: nothing is evaluated, and the scores of one query are few.
        key, length = mx.arange(latents.shape[2]), length.reshape(-1, 1, 1, 1)
        visible = key < length
        if start is not None:
            visible = (visible & (key >= start[:, None, None, None])) | (key == length - 1)
        q = mx.concatenate([q_latent, q_rotary], axis=-1).astype(mx.float32) * scale
        keys = mx.concatenate([latents, rotary_keys], axis=-1).astype(mx.float32)
        scores = mx.where(visible, q @ keys.swapaxes(-1, -2), _NEVER)
        y = mx.softmax(scores, axis=-1) @ keys[..., :R]
        return y.astype(q_latent.dtype)
    heads = _at_once(H, B * T * min(length, KEYS_AT_ONCE))
    q = mx.concatenate([q_latent, q_rotary], axis=-1).astype(mx.float32) * scale
    parts = []
    for first in range(0, H, heads):
        # All heads read the same keys: one product of h T rows.
        h = min(heads, H - first)
        rows = q[:, first : first + h].reshape(B, 1, h * T, -1)
        total = _RunningSoftmax()
        for begin, end in _blocks(length, B * max(h * T, rows.shape[-1])):
            c, r = latents[:, :, begin:end], rotary_keys[:, :, begin:end]
            keys = mx.concatenate([c, r], axis=-1).astype(mx.float32)
            scores = (rows @ keys.swapaxes(-1, -2)).reshape(B, h, T, -1)
            scores = _masked(scores, mask, begin, length, start).reshape(B, 1, h * T, -1)
            total.add(scores, keys[..., :R])
        parts.append(total.result().reshape(B, h, T, R).astype(q_latent.dtype))
        if heads < H:
            mx.eval(parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def latent_prefill(
    q: mx.array,
    q_rotary: mx.array,
    latents: mx.array,
    rotary_keys: mx.array,
    *,
    expand: Callable[[mx.array, int, int], tuple[mx.array, mx.array]],
    length: int,
    scale: float,
    mask: Mask,
    start: mx.array | None = None,
) -> mx.array:
    """The materialised form: less work when many queries share the keys.

    q ``[B, T, H, Dn + Dr]``, of which each head's first Dn count, q_rotary ``[B, H, T, Dr]`` ->
    ``[B, H, T, Dv]`` in the dtype of q. expand: (latents ``[B, 1, s, R]``, first head, last head
    + 1) -> keys ``[B, h, s, Dn]`` and values ``[B, h, s, Dv]`` of those heads.
    """
    B, T, H, D = q.shape
    q_nope = q[..., : D - q_rotary.shape[3]].swapaxes(1, 2)
    heads = _at_once(H, B * T * min(length, KEYS_AT_ONCE))
    parts = []
    for first in range(0, H, heads):
        last = min(first + heads, H)
        q_n, q_r = (q[:, first:last].astype(mx.float32) * scale for q in (q_nope, q_rotary))
        total = _RunningSoftmax()
        for begin, end in _blocks(length, B * (last - first) * T):
            c, r = latents[:, :, begin:end], rotary_keys[:, :, begin:end]
            k, v = expand(c, first, last)
            scores = q_n @ k.astype(mx.float32).swapaxes(-1, -2)
            scores = scores + q_r @ r.astype(mx.float32).swapaxes(-1, -2)
            total.add(_masked(scores, mask, begin, length, start), v.astype(mx.float32))
        parts.append(total.result().astype(q_nope.dtype))
        if heads < H:
            mx.eval(parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


class _RunningSoftmax:
    """sum exp(score) value / sum exp(score) over keys that come in blocks."""

    def __init__(self):
        self.high = self.weight = self.total = None

    def add(self, scores: mx.array, values: mx.array) -> None:
        """scores ``[..., T, s]`` float32, values ``[..., s, D]`` float32."""
        if self.total is not None:
            # Else MLX begins the blocks together and holds the scores of several.
            mx.eval(self.total, self.weight)
        high = scores.max(axis=-1, keepdims=True)
        if self.high is None:
            p = mx.exp(scores - high)
            self.weight, self.total = p.sum(axis=-1, keepdims=True), p @ values
        else:
            high = mx.maximum(high, self.high)
            p, fade = mx.exp(scores - high), mx.exp(self.high - high)
            self.weight = self.weight * fade + p.sum(axis=-1, keepdims=True)
            self.total = self.total * fade + p @ values
        self.high = high

    def result(self) -> mx.array:
        return self.total / self.weight


def _at_once(count: int, cost: int) -> int:
    """How many of `count` heads keep `cost` scores each within bounds."""
    return max(1, min(count, SCORES_AT_ONCE // cost))


def _blocks(length: int, rows: int) -> Iterator[tuple[int, int]]:
    """Stretches of keys for so many rows of scores."""
    step = max(KEYS_AT_ONCE, SCORES_AT_ONCE // rows // KEYS_AT_ONCE * KEYS_AT_ONCE)
    if rows * KEYS_AT_ONCE > SCORES_AT_ONCE:
        step = max(1, SCORES_AT_ONCE // rows)
    for start in range(0, length, step):
        yield start, min(start + step, length)


def _masked(
    scores: mx.array, mask: Mask, begin: int, length: int, start: mx.array | None
) -> mx.array:
    """scores ``[B, h, T, s]`` of the keys from `begin` on, those hidden at `_NEVER`."""
    T, s = scores.shape[-2:]
    key, query = mx.arange(begin, begin + s), mx.arange(length - T, length)[:, None]
    visible = None
    if isinstance(mask, mx.array):
        visible = mask[..., begin : begin + s]
    elif mask is not None and begin + s > length - T + 1:
        visible = key <= query
    if start is not None:
        real = key >= start[:, None, None, None]
        visible = (real if visible is None else visible & real) | (key == query)
    return scores if visible is None else mx.where(visible, scores, _NEVER)
