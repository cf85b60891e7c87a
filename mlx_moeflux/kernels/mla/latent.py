"""Multi-head latent attention over a cache of one latent and one rotary key per position.

Head h has keys ``k_s = [W_K(h) c_s, r_s]`` and values ``v_s = W_V(h) c_s`` of the latent c_s and
the rotary key r_s of position s, which all heads share. Two forms of the same sum:

    absorbed      score = (W_K(h)^T q_nope) c_s + q_rotary r_s,  y = W_V(h) (sum p_s c_s)
    materialised  score = q_nope (W_K(h) c_s) + q_rotary r_s,    y = sum p_s (W_V(h) c_s)

Neither holds the scores of all heads, queries and keys: it takes some keys at a time with a running
softmax in float32.

Evaluates: every part of keys and heads, unless one part takes all.

Shapes:
    latents: ``[B, 1, capacity, R]``; rotary_keys: ``[B, 1, capacity, Dr]``: whole buffers, of
    which the first `length` rows count and no other is read. The T queries are the last of them:
    query t sees keys up to length - T + t.
    mask: None (every query sees every key), "causal", or bool ``[B or 1, 1, T, length]``.
    length: An int, or (one query only) int32 ``[1]``.
    start: None, or int32 ``[B]``: the first key of each sequence; a query before it sees itself
    alone, and its result is undefined.
    tail: None, or (one query only) the newest rows of both buffers, as in
    :mod:`mlx_moeflux.kernels.attention.attention`.
    values: None, or of the absorbed form each head's matrix ``[Dv, R]``, which the weighted latents
    go through.

On a GPU every head reads the same latents: a threadgroup owns 16 or more rows (heads x tokens) and
a part of the keys. :func:`attend_values` joins the parts, and puts each head's result through its
matrix.

"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.attention.attention import (
    SDPA,
    SHARED,
    Call,
    check_dtypes,
    check_tail,
    joined,
    plan_of,
    run,
)
from mlx_moeflux.kernels.linear.quantised import Matrix, arrays_of, matrix_of
from mlx_moeflux.kernels.mla import latent_token
from mlx_moeflux.kernels.mla.per_head_matmul import (
    HeadMatrices,
    head_product,
    head_product_fused,
    narrow_rows,
)
from mlx_moeflux.kernels.runtime.metal import MetalKernel, backend, launches, most_threads

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
        self._sums: tuple[mx.array, mx.array, mx.array] | None = None

    def add(self, scores: mx.array, values: mx.array) -> None:
        """scores ``[..., T, s]`` float32, values ``[..., s, D]`` float32."""
        high = scores.max(axis=-1, keepdims=True)
        if self._sums is None:
            p = mx.exp(scores - high)
            self._sums = high, p.sum(axis=-1, keepdims=True), p @ values
            return
        before, weight, total = self._sums
        # Else MLX begins the blocks together and holds the scores of several.
        mx.eval(total, weight)
        high = mx.maximum(high, before)
        p, fade = mx.exp(scores - high), mx.exp(before - high)
        self._sums = high, weight * fade + p.sum(axis=-1, keepdims=True), total * fade + p @ values

    def result(self) -> mx.array:
        assert self._sums is not None, "there is a first block"
        _, weight, total = self._sums
        return total / weight


def _at_once(count: int, cost: int) -> int:
    """Return how many of `count` heads with `cost` scores each stay within bounds."""
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


# SIMDGROUPS: or half as many, where there may not be so many threads. MOST_STEPS: a lane holds so
# many parts of rows. MOST_COLUMNS: threadgroup memory holds ten floats for each.
SIMDGROUPS, MOST_STEPS, MOST_COLUMNS = 16, 8, 512

VALUES_KERNEL = MetalKernel(
    "attend_values",
    file="latent_values.metal",
    inputs=("partial", "stats", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float shared[8 * (DV + 1)];
        threadgroup float values[2 * DV];
        attend_values<ROWS, SIMDGROUPS, HEADS, DV, OUT, FIRST, BLOCK, PACKS, BITS, GROUP, V, EXACT>(
            partial, stats, w, scales, biases, y, shared, values, partial_shape[1],
            threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)


def takes_values(matrices: HeadMatrices, R: int) -> bool:
    """Return True if the kernel reads these matrices of rows of R numbers."""
    try:
        layout = matrix_of(matrices, matrices.width)
    except UnsupportedError:
        return False
    known = matrices.heads is None and matrices.width == R <= MOST_COLUMNS
    return known and _values_rows(layout, matrices.count, R, most_threads()) is not None


def _values_rows(layout: Matrix, out: int, R: int, threads: int) -> dict[str, int] | None:
    """Template arguments for rows of the matrices: each simdgroup has equally many."""
    simdgroups = SIMDGROUPS if threads >= 32 * SIMDGROUPS else SIMDGROUPS // 2
    narrow, rows = narrow_rows(layout, out, R), out // simdgroups
    if R % 32 or out % simdgroups or narrow is None:
        return None
    numbers = narrow["V"] * (32 // layout.bits if layout.bits else 1)
    even = rows * R % (32 * numbers) == 0 and rows * R // (32 * numbers) <= MOST_STEPS
    return {"ROWS": rows, "V": narrow["V"], "SIMDGROUPS": simdgroups} if even else None


def attend_values(
    partial: mx.array, stats: mx.array, matrices: HeadMatrices, dtype: mx.Dtype
) -> mx.array:
    """The module's formula in `dtype`, for matrices that it :func:`takes`.

    Raises:
        UnsupportedError: MLX drives no GPU.
    """
    layout = matrix_of(matrices, matrices.width)
    launch = _values_launch(
        partial.shape, matrices.weight.shape, layout, matrices.first, matrices.count, dtype,
        most_threads(),
    )  # fmt: skip
    return VALUES_KERNEL(partial, stats, *arrays_of(matrices), **launch)[0]


@functools.lru_cache(maxsize=64)
def _values_launch(
    partial: tuple[int, ...],
    weight: tuple[int, ...],
    layout: Matrix,
    first: int,
    out: int,
    dtype: mx.Dtype,
    threads: int,
) -> dict[str, Any]:
    (B, _, H, R), rows = partial, _values_rows(layout, out, partial[3], threads)
    assert rows is not None, "joins_values() was not asked"
    return {
        "template": {
            **{"T": dtype, **rows, "HEADS": H},
            **{"DV": R, "OUT": out, "FIRST": first, "BLOCK": weight[1], "PACKS": weight[2]},
            **{"BITS": layout.bits, "GROUP": layout.group},
            "EXACT": dtype == mx.float32,
        },
        "grid": (32 * rows["SIMDGROUPS"] * H, B, 1),
        "threadgroup": (32 * rows["SIMDGROUPS"], 1, 1),
        "output_shapes": [(B, H, 1, out)],
        "output_dtypes": [dtype],
    }


# Numbers of keys and values that are held together: 128 heads of 2048 positions, a few heads of
# very long prompts.
VALUES_AT_ONCE = 128 << 20


@launches(*SHARED, latent_token.KERNEL, *head_product_fused.kernels, VALUES_KERNEL)
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
    """Compute the absorbed form in one launch. Over parts of the keys a second launch joins them
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
    call = Call(
        "latent_attention", q_latent.shape, latents.shape, latents.shape, None, q_latent.dtype,
        mask is not None, P, 0 if tail is None else tail[0].shape[2],
    )  # fmt: skip
    if tail is not None:
        check_tail(call, *tail)
    options = {"scale": scale, "length": length, "start": start, "tail": tail}
    attend = functools.partial(
        run, call, q_latent, latents, latents, rotary=(q_rotary, rotary_keys), **options
    )
    if values is None:
        return attend()
    parts = plan_of(backend().name, call).join is not None
    if parts and q_latent.shape[2] == 1 and takes_values(values, R):
        join = functools.partial(attend_values, matrices=values, dtype=q_latent.dtype)
        return attend(join=join)
    return head_product_fused(attend(), values)


@launches(*SDPA)
def latent_prefill_expanded(
    q, q_rotary, latents, rotary_keys, *, expand, length, scale, mask, start=None
):
    """:func:`~mlx_moeflux.kernels.mla.latent.latent_prefill`: keys and values of some heads, then
    attention over them, without scores in device memory. A mask that is an array goes to the
    reference.

    Evaluates: each stretch of heads, unless one takes all.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, Dn or Dr is no multiple of 16 or Dv of 32,
            or they are too large for threadgroup memory.
        UnsupportedError: MLX drives no GPU.
    """
    if isinstance(mask, mx.array):
        return latent_prefill(
            q, q_rotary, latents, rotary_keys,
            expand=expand, length=length, scale=scale, mask=mask, start=start,
        )  # fmt: skip
    (B, T, H, D), Dr, parts = q.shape, q_rotary.shape[3], []
    rows, rotary = latents[:, :, :length], rotary_keys[:, :, :length]
    heads = heads_at_once(B, H, D - Dr, length)
    if q_rotary.shape != (B, H, T, Dr) or rotary.shape[1::2] != (1, Dr) or Dr >= D:
        raise ShapeError(
            f"latent_prefill: q_rotary {q_rotary.shape} and rotary_keys {rotary_keys.shape} do not "
            f"fit q {q.shape}."
        )
    options = {"scale": scale, "length": length, "start": start}
    for first in range(0, H, heads):
        own = slice(first, min(first + heads, H))
        k, v = expand(rows, own.start, own.stop)
        tensors = {"q_rotary": q_rotary, "keys": k, "rotary_keys": rotary, "values": v}
        check_dtypes("latent_prefill", q.dtype, tensors)
        queries, turned = q, (q_rotary[:, own], rotary)
        call = Call(
            "latent_prefill", (B, own.stop - first, T, D - Dr), k.shape, v.shape, None, q.dtype,
            mask is not None, Dr, expanded=True, q_heads=H,
        )  # fmt: skip
        if "QH" not in plan_of(backend().name, call).options["template"]:
            call = call._replace(q_heads=0)
            queries = q[:, :, own, : D - Dr].swapaxes(1, 2)
        parts.append(run(call, queries, k, v, **options, rotary=turned, first_head=first))
        if heads < H:
            # Else MLX makes the keys and values of many heads before it needs them.
            mx.eval(parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def heads_at_once(B: int, H: int, Dn: int, length: int) -> int:
    """Return how many heads' keys and values are computed together, both of width Dn."""
    most = max(1, VALUES_AT_ONCE // (B * length * 2 * Dn))
    return -(-H // -(-H // most))
