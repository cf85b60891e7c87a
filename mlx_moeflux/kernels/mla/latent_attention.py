"""Multi-head latent attention. Its cache has one latent and one rotary key per position.

Head h has keys ``k_s = [W_K(h) c_s, r_s]`` and values ``v_s = W_V(h) c_s`` of the latent c_s and
the rotary key r_s of position s, which all heads share. Two forms of the same sum:

    absorbed      score = (W_K(h)^T q_nope) c_s + q_rotary r_s,  y = W_V(h) (sum p_s c_s)
    materialised  score = q_nope (W_K(h) c_s) + q_rotary r_s,    y = sum p_s (W_V(h) c_s)

This module has the absorbed one, :mod:`~mlx_moeflux.kernels.mla.latent_prefill` the other. Neither
holds the scores of all heads, queries and keys: it takes some keys at a time with a running softmax
in float32.

Evaluates: every part of keys and heads, unless one part takes all.

Shapes:
    q_latent: ``[B, H, T, R]`` (W_K^T q_nope); q_rotary: ``[B, H, T, Dr]``.
    latents: ``[B, 1, capacity, R]``; rotary_keys: ``[B, 1, capacity, Dr]``: whole buffers, of
    which the first `length` rows count and no other is read. The T queries are the last of them:
    query t sees keys up to length - T + t.
    mask: None (every query sees every key), "causal", or bool ``[B or 1, 1, T, length]``.
    length: An int, or (one query only) int32 ``[1]`` or ``[B]``.
    start: None, or int32 ``[B]``: the first key of each sequence; a query before it sees itself
    alone, and its result is undefined.
    tail: None, or (one query only) the newest rows of both buffers, as in
    :mod:`mlx_moeflux.kernels.attention.attention`.
    values: None, or each head's matrix ``[Dv, R]``, which the weighted latents go through.
    returns: the weighted latents ``[B, H, T, R]``, with `values` ``[B, H, T, Dv]``, in the dtype of
    q_latent.

On a GPU every head reads the same latents: a threadgroup owns 16 or more rows (heads x tokens) and
a part of the keys. :func:`~mlx_moeflux.kernels.mla.latent_values.attend_values` joins the parts,
and puts each head's result through its matrix.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention.attention import joined
from mlx_moeflux.kernels.attention.plan import (
    ENOUGH_GROUPS,
    SHARED,
    AttentionCall,
    AttentionPlan,
    check_dtypes,
    check_shapes,
    check_tail,
    join_options,
    launch_attention,
    shared_sizes,
    tiled_plan,
)
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.mla import latent_token, latent_values
from mlx_moeflux.kernels.mla.head_product import (
    HEAD_PRODUCT,
    HeadMatrices,
    head_product,
    head_product_fused,
)
from mlx_moeflux.kernels.mla.latent_values import attend_values, takes_values
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launcher import backend

# Scores computed together: 16 MiB in float32, and as much again for each step to the weights.
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
    """Stock MLX."""
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
        y = (mx.softmax(scores, axis=-1) @ keys[..., :R]).astype(q_latent.dtype)
        return y if values is None else head_product(y, values)
    heads = heads_scored_at_once(H, B * T, length)
    q = mx.concatenate([q_latent, q_rotary], axis=-1).astype(mx.float32) * scale
    parts = []
    for first in range(0, H, heads):
        # All heads read the same keys: one product of h T rows.
        h = min(heads, H - first)
        rows = q[:, first : first + h].reshape(B, 1, h * T, -1)
        sums = None
        for begin, end in stretches(length, B * max(h * T, rows.shape[-1])):
            c, r = latents[:, :, begin:end], rotary_keys[:, :, begin:end]
            keys = mx.concatenate([c, r], axis=-1).astype(mx.float32)
            scores = (rows @ keys.swapaxes(-1, -2)).reshape(B, h, T, -1)
            scores = masked_scores(scores, mask, begin, length, start).reshape(B, 1, h * T, -1)
            sums = softmax_sums(scores, keys[..., :R], sums)
        assert sums is not None, "there is a first block"
        _, weight, total = sums
        parts.append((total / weight).reshape(B, h, T, R).astype(q_latent.dtype))
        if heads < H:
            mx.eval(parts[-1])
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
    return y if values is None else head_product(y, values)


def softmax_sums(scores: mx.array, values: mx.array, before: Any) -> tuple[mx.array, ...]:
    """scores ``[..., T, s]``, values ``[..., s, D]`` float32 -> the highest score, sum exp(score)
    and sum exp(score) value, both less the highest; before: None, or the same of the keys before.
    """
    high = scores.max(axis=-1, keepdims=True)
    if before is None:
        p = mx.exp(scores - high)
        return high, p.sum(axis=-1, keepdims=True), p @ values
    highest, weight, total = before
    # Else MLX begins the blocks together and holds the scores of several.
    mx.eval(total, weight)
    high = mx.maximum(high, highest)
    p, fade = mx.exp(scores - high), mx.exp(highest - high)
    return high, weight * fade + p.sum(axis=-1, keepdims=True), total * fade + p @ values


def heads_scored_at_once(heads: int, rows: int, length: int) -> int:
    """Return how many of `heads`, of `rows` queries and `length` keys each, stay within bounds."""
    return max(1, min(heads, SCORES_AT_ONCE // (rows * min(length, KEYS_AT_ONCE))))


def stretches(length: int, rows: int) -> list[tuple[int, int]]:
    """Stretches of keys for so many rows of scores."""
    step = max(KEYS_AT_ONCE, SCORES_AT_ONCE // rows // KEYS_AT_ONCE * KEYS_AT_ONCE)
    if rows * KEYS_AT_ONCE > SCORES_AT_ONCE:
        step = max(1, SCORES_AT_ONCE // rows)
    starts = range(0, length, step)
    return list(zip(starts, [*starts[1:], length], strict=True))


def masked_scores(
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


def latent_attention_fused(
    q_latent,
    q_rotary,
    latents,
    rotary_keys,
    *,
    length,
    scale,
    mask,
    start=None,
    tail=None,
    values=None,
):
    """:func:`latent_attention` in one launch. Over parts of the keys a second launch joins them
    and applies `values`. The reference takes a mask that is an array.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, R is no multiple of 64 or P of 16, or
            they are too large for threadgroup memory (R 512 in float32 on Metal).
        UnsupportedError: MLX drives no GPU.
    """
    if isinstance(mask, mx.array):
        return latent_attention(
            q_latent, q_rotary, latents, rotary_keys,
            length=length, scale=scale, mask=mask, start=start, tail=tail, values=values,
        )  # fmt: skip
    R, P = latents.shape[-1], rotary_keys.shape[-1]
    if q_rotary.shape != (*q_latent.shape[:3], P) or (*latents.shape[:3], P) != rotary_keys.shape:
        raise ShapeError(
            f"latent_attention: q_rotary {q_rotary.shape} and rotary_keys {rotary_keys.shape} do "
            f"not fit q_latent {q_latent.shape} and latents {latents.shape}."
        )
    if latents.shape[1] != 1 or R % 64:
        raise ShapeError(
            f"latent_attention: latents {latents.shape} must be [B, 1, S, R], R a multiple of 64."
        )
    others = {"q_rotary": q_rotary, "latents": latents, "rotary_keys": rotary_keys}
    check_dtypes("latent_attention", q_latent.dtype, others)
    call = AttentionCall(
        "latent_attention", q_latent.shape, latents.shape, latents.shape, q_latent.dtype,
        mask is not None, beside=P, tail=0 if tail is None else tail[0].shape[2],
    )  # fmt: skip
    if tail is not None:
        check_tail(call, *tail)
    plan, join = _plan(backend().name, call), None
    if values is not None and plan.join and call.q[2] == 1 and takes_values(values, R):
        join = functools.partial(attend_values, matrices=values, dtype=q_latent.dtype)
    ends = tail if tail and plan.kernel is latent_token.KERNEL else (latents,)
    y = launch_attention(
        plan, (q_latent, q_rotary, latents, rotary_keys, *ends), scale=scale, length=length,
        start=start, tail=tail, join=join,
    )  # fmt: skip
    return y if values is None or join is not None else head_product_fused(y, values)


# Row tiles, simdgroups and keys of a tile of all heads, the best first. So many rows fill a GPU by
# blocks of 64; only CUDA gives a lane the registers.
TILES, TILES_OF_MANY = ((1, 4, 32), (2, 8, 16), (1, 4, 16)), ((4, 8, 16),)
MANY_ROWS = 64 * ENOUGH_GROUPS


@functools.lru_cache(maxsize=4096)
def _plan(backend_name: str, call: AttentionCall) -> AttentionPlan:
    """Checks shapes and lays a launch out, once for each."""
    check_shapes(call)
    H, memory = call.q[1], latent_token.memory_and_more(backend_name)
    token = latent_token.launch_of(*memory, call.q, call.k, call.beside, call.tail, call.dtype)
    if token is not None:
        return AttentionPlan(call, latent_token.KERNEL, token, join_options(call, H, 0))
    many = H * (call.tokens or call.q[2]) >= MANY_ROWS and backend_name == "cuda"
    tiles = (*TILES_OF_MANY, *TILES) if many else TILES
    # Values are the first columns of the keys.
    sizes = shared_sizes(backend_name, call, tiles=tiles, layouts=(2,), pack=H)
    plan = tiled_plan(call, "shared", sizes, call.k[2])
    # A block has rows of several heads, and no piece has whole blocks.
    unit = 1 if plan.join is None else call.q[2]
    return replace(plan, replan=functools.partial(_plan, backend_name), unit=unit)


def attention_workload(s: Sizes, n: int, x: Normal) -> Arguments:
    rows = s.keys + -(-n // s.step) * s.step
    cache = x(s.B, 1, rows, s.latent), x(s.B, 1, rows, s.Dr)
    return (x(s.B, s.heads, n, s.latent), x(s.B, s.heads, n, s.Dr), *cache), {
        "length": s.keys + n, "scale": (s.Dn + s.Dr) ** -0.5, "mask": None if n == 1 else "causal"
    }  # fmt: skip


LATENT_ATTENTION = Operation(
    name="latent_attention",
    reference=latent_attention,
    others={
        "fused": Implementation(
            latent_attention_fused,
            kernels=(
                *SHARED,
                latent_token.KERNEL,
                *HEAD_PRODUCT.others["fused"].kernels,
                latent_values.KERNEL,
            ),
        )
    },
    size=slice(2, 3),
    tokens={"q_latent": 2, "q_rotary": 2},
    proof=Proof(
        example=attention_workload,
        workloads={"": attention_workload},
        positions={"latents": 2, "rotary_keys": 2},
        apart=True,
    ),
)
