"""Multi-head latent attention in the materialised form: less work when many queries share keys.

    score = q_nope (W_K(h) c_s) + q_rotary r_s,  y = sum p_s (W_V(h) c_s)

Evaluates: every part of keys and heads, unless one part takes all.

Shapes:
    q: ``[B, T, H, Dn + Dr]``, of which each head's first Dn count; q_rotary: ``[B, H, T, Dr]``;
    latents, rotary_keys, mask, length, start: see
    :mod:`~mlx_moeflux.kernels.mla.latent_attention`.
    expand: (latents ``[B, 1, s, R]``, first head, last head + 1) -> keys ``[B, h, s, Dn]`` and
    values ``[B, h, s, Dv]`` of those heads.
    returns: ``[B, H, T, Dv]`` in the dtype of q.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention.plan import (
    SDPA_KERNELS,
    AttentionCall,
    check_dtypes,
    launch_attention,
    plan_of,
)
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.mla.latent_attention import (
    Mask,
    attention_workload,
    heads_scored_at_once,
    masked_scores,
    softmax_sums,
    stretches,
)
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launcher import backend

# Numbers of keys and values that are held together: 128 heads of 2048 positions, a few heads of
# very long prompts.
VALUES_AT_ONCE = 128 << 20


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
    """Stock MLX."""
    B, T, H, D = q.shape
    q_nope = q[..., : D - q_rotary.shape[3]].swapaxes(1, 2)
    heads = heads_scored_at_once(H, B * T, length)
    parts = []
    for first in range(0, H, heads):
        last = min(first + heads, H)
        q_n, q_r = (q[:, first:last].astype(mx.float32) * scale for q in (q_nope, q_rotary))
        sums = None
        for begin, end in stretches(length, B * (last - first) * T):
            c, r = latents[:, :, begin:end], rotary_keys[:, :, begin:end]
            k, v = expand(c, first, last)
            scores = q_n @ k.astype(mx.float32).swapaxes(-1, -2)
            scores = scores + q_r @ r.astype(mx.float32).swapaxes(-1, -2)
            scores = masked_scores(scores, mask, begin, length, start)
            sums = softmax_sums(scores, v.astype(mx.float32), sums)
        assert sums is not None, "there is a first block"
        _, weight, total = sums
        parts.append((total / weight).astype(q_nope.dtype))
        if heads < H:
            mx.eval(parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def latent_prefill_expanded(
    q,
    q_rotary,
    latents,
    rotary_keys,
    *,
    expand,
    length,
    scale,
    mask,
    start=None,
    values_at_once=VALUES_AT_ONCE,
):
    """:func:`latent_prefill`: keys and values of some heads, then attention over them, without
    scores in device memory. A mask that is an array goes to the reference.

    values_at_once: Numbers of keys and values that are held together, see :func:`heads_at_once`.

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
    heads = heads_at_once(B, H, D - Dr, length, values_at_once)
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
        call = AttentionCall(
            "latent_prefill", (B, own.stop - first, T, D - Dr), k.shape, v.shape, q.dtype,
            mask is not None, beside=Dr,
        )  # fmt: skip
        plan = plan_of(backend().name, call, QH=H)
        # attend_rows takes queries as their projection gives them.
        lying = "QH" in plan.options["template"]
        queries = q if lying else q[:, :, own, : D - Dr].swapaxes(1, 2)
        arrays, number = (queries, q_rotary[:, own], k, rotary, v), first if lying else None
        parts.append(launch_attention(plan, arrays, number=number, **options))
        if heads < H:
            # Else MLX makes the keys and values of many heads before it needs them.
            mx.eval(parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def heads_at_once(
    B: int, H: int, Dn: int, length: int, values_at_once: int = VALUES_AT_ONCE
) -> int:
    """Return how many heads' keys and values are computed together, both of width Dn. They have at
    most `values_at_once` numbers, unless one head has more."""
    most = max(1, values_at_once // (B * length * 2 * Dn))
    return -(-H // -(-H // most))


def _workload(s: Sizes, n: int, x: Normal) -> Arguments:
    w_k, w_v = x(s.heads, s.latent, s.Dn), x(s.heads, s.latent, s.Dv)

    def expand(latent: mx.array, first: int, last: int) -> tuple[mx.array, mx.array]:
        return latent @ w_k[first:last], latent @ w_v[first:last]

    (_, *rest), options = attention_workload(s, n, x)
    options |= {"expand": expand, "mask": "causal"}
    return (x(s.B, n, s.heads, s.Dn + s.Dr), *rest), options


LATENT_PREFILL = Operation(
    name="latent_prefill",
    reference=latent_prefill,
    others={"expanded": Implementation(latent_prefill_expanded, kernels=SDPA_KERNELS)},
    size=slice(1, 2),
    tokens={"q": 1, "q_rotary": 2},
    proof=Proof(
        example=_workload,
        workloads={"": _workload},
        positions={"latents": 2, "rotary_keys": 2},
    ),
)
