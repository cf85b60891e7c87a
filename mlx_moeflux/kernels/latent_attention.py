"""Latent attention with absorbed projections on a GPU: every head reads the same latents.

    y = softmax((q_latent latents^T + q_rotary rotary_keys^T) scale) latents

Shapes, mask, length, start, tail: see :func:`mlx_moeflux.kernels.latent.latent_attention`, the
reference; the value half of kv_b_proj comes after. length may be int32 ``[B]`` too.

``[H, T, S]`` scores are never held: a threadgroup owns 16 or more rows (heads x tokens) and a part
of the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import latent_values
from mlx_moeflux.kernels.attention import EXPANDED, LATENT, plan_of, run
from mlx_moeflux.kernels.attention_call import Call, check_dtypes, check_tail
from mlx_moeflux.kernels.heads import HeadMatrices, head_product_fused
from mlx_moeflux.kernels.latent import Mask, latent_attention, latent_prefill
from mlx_moeflux.kernels.metal import backend, launches

# Numbers of keys and values that are held at once: 128 heads of 2048 positions, a few heads of very
# long prompts.
VALUES_AT_ONCE = 128 << 20


@launches(*LATENT, *head_product_fused.kernels, latent_values.KERNEL)
def latent_attention_fused(
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
    """The absorbed form in one launch and, over parts of the keys, one that joins them, and goes
    on with `values`. A mask that is an array goes to the reference.

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
    tensors = (q_latent, q_rotary, latents, rotary_keys, *(tail or ()))
    if tail is not None:
        check_tail(call, *tail)
    options = {"scale": scale, "length": length, "start": start}
    if values is None:
        return run(call, tensors, None, **options)
    parts = plan_of(backend().name, call).join is not None
    if parts and q_latent.shape[2] == 1 and latent_values.takes(values, R):
        join = functools.partial(latent_values.attend_values, matrices=values, dtype=q_latent.dtype)
        return run(call, tensors, None, **options, join=join)
    return head_product_fused(run(call, tensors, None, **options), values)


@launches(*EXPANDED)
def latent_prefill_expanded(
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
    """:func:`~mlx_moeflux.kernels.latent.latent_prefill`: keys and values of some heads, then
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
        tensors = q, q_rotary[:, own], k, rotary, v
        names = "q", "q_rotary", "keys", "rotary_keys", "values"
        check_dtypes("latent_prefill", q.dtype, dict(zip(names, tensors, strict=True)))
        call = Call(
            "latent_prefill", (B, own.stop - first, T, D - Dr), k.shape, v.shape, None, q.dtype,
            mask is not None, Dr, expanded=True, q_heads=H,
        )  # fmt: skip
        if "QH" not in plan_of(backend().name, call).options["template"]:
            call = call._replace(q_heads=0)
            tensors = q[:, :, own, : D - Dr].swapaxes(1, 2), *tensors[1:]
        parts.append(run(call, tensors, None, **options, first_head=first))
        if heads < H:
            # Else MLX makes the keys and values of many heads before it needs them.
            mx.eval(parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def heads_at_once(B: int, H: int, Dn: int, length: int) -> int:
    """How many heads' keys and values are made at once, both of width Dn."""
    most = max(1, VALUES_AT_ONCE // (B * length * 2 * Dn))
    return -(-H // -(-H // most))
