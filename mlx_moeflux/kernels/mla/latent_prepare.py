"""Split, norm and rotate what the projections of latent attention give.

    nope, rotary = q[..., :Dn], turn(q[..., Dn:])      of each head
    latent, key = norm(kv[..., :R]), turn(kv[..., R:])  that all heads share

Pair i of position p turns by p * frequencies[i] and is scaled by `factor`.

Shapes:
    q: ``[B, T, H, Dn + Dr]``; kv: ``[B, T, R + Dr]``; norm: ``[R]``; frequencies: ``[Dr / 2]``
    float32.
    offset: position of the first token, an int or int32 ``[B]``.
    returns: nope ``[B, H, T, Dn]`` (None without `nope`), rotary ``[B, H, T, Dr]``, latent
    ``[B, 1, T, R]``, key ``[B, 1, T, Dr]`` in the dtype of q.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention.norm_rope import for_each_sequence, offsets
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear.quantised import FLOATS
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launch_args import filled
from mlx_moeflux.kernels.runtime.launcher import MetalKernel

Parts = tuple[mx.array | None, mx.array, mx.array, mx.array]


def latent_prepare(
    q: mx.array,
    kv: mx.array,
    *,
    norm: mx.array,
    eps: float,
    frequencies: mx.array,
    offset: int | mx.array,
    factor: float = 1.0,
    interleaved: bool = False,
    nope: bool = True,
) -> Parts:
    """Stock MLX."""
    R, dims = norm.shape[0], 2 * frequencies.shape[0]
    if not isinstance(offset, int):
        offset = for_each_sequence(offset, q.shape[0])
    first, rotary = mx.split(q.swapaxes(1, 2), [q.shape[-1] - dims], axis=-1)
    latent, key = mx.split(kv[:, None], [R], axis=-1)

    def turned(x: mx.array) -> mx.array:
        dtype = x.dtype
        x = mx.fast.rope(
            x if factor == 1.0 else x * factor,
            dims,
            traditional=interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=1.0 / frequencies,
        )
        return x.astype(dtype)

    parts = turned(rotary), mx.fast.rms_norm(latent, norm, eps), turned(key)
    return (first if nope else None, *parts)


def _kernel(name: str, outputs: tuple[str, ...]) -> MetalKernel:
    whole = "nope" in outputs
    return MetalKernel(
        name,
        file="per_head_matmul.metal",
        inputs=("q", "kv", "weight", "frequencies", "numbers", "offset"),
        outputs=outputs,
        body=f"""
            latent_prepare<T, W, HEADS, DN, DR, RANK, INTERLEAVED, {str(whole).lower()}, EACH>(
                q, kv, weight, frequencies, numbers, offset, {"nope" if whole else "nullptr"},
                rotary, latents, keys, q_shape[0], q_shape[1], thread_position_in_grid.x / 32,
                thread_index_in_simdgroup);
        """,
    )


_PREPARED = ("nope", "rotary", "latents", "keys")
_WHOLE = _kernel("latent_prepare", _PREPARED)
_TURNED = _kernel("latent_turn", _PREPARED[1:])
# Of a threadgroup, and heads that a simdgroup turns by the same sines.
_THREADS, _EACH = 128, 8


def latent_prepare_fused(
    q, kv, *, norm, eps, frequencies, offset, factor=1.0, interleaved=False, nope=True
):
    """:func:`latent_prepare` in one launch; everything between is float32.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, or Dn or Dr is no multiple of 4.
        UnsupportedError: MLX drives no GPU.
    """
    launch = _launch(q.shape, kv.shape, norm.shape, frequencies.shape[0], interleaved)
    if q.dtype not in FLOATS or kv.dtype != q.dtype or norm.dtype not in FLOATS:
        raise ShapeError(f"latent_prepare: q is {q.dtype}, kv {kv.dtype} and norm {norm.dtype}.")
    template = {"T": q.dtype, "W": norm.dtype, **launch["template"]}
    shapes = launch["output_shapes"][0 if nope else 1 :]
    options = {
        "template": template,
        "output_shapes": shapes,
        "output_dtypes": [q.dtype] * len(shapes),
    }
    outputs = (_WHOLE if nope else _TURNED)(
        q, kv, norm, frequencies.astype(mx.float32), filled(eps, factor),
        offsets(offset, q.shape[0]), **launch | options,
    )  # fmt: skip
    return tuple(outputs) if nope else (None, *outputs)


@functools.lru_cache(maxsize=1024)
def _launch(q, kv, norm, pairs, interleaved) -> dict[str, Any]:
    """Shapes -> launch, checked once for each."""
    (B, T, H, D), Dr = q, 2 * pairs
    R = kv[-1] - Dr
    if len(kv) != 3 or kv[:2] != (B, T) or norm != (R,) or Dr >= D or (D - Dr) % 4 or Dr % 4:
        raise ShapeError(
            f"latent_prepare: q {q}, kv {kv}, norm {norm} and {pairs} pairs do not fit together; "
            "both parts of a head are multiples of 4."
        )
    simdgroups = B * T * (-(-H // _EACH) + 1)
    return {
        "template": {
            "HEADS": H,
            "DN": D - Dr,
            "DR": Dr,
            "RANK": R,
            "INTERLEAVED": interleaved,
            "EACH": _EACH,
        },
        "grid": (-(-simdgroups * 32 // _THREADS) * _THREADS, 1, 1),
        "threadgroup": (_THREADS, 1, 1),
        "output_shapes": [(B, H, T, D - Dr), (B, H, T, Dr), (B, 1, T, R), (B, 1, T, Dr)],
    }


def prepare_workload(s: Sizes, n: int, x: Normal) -> Arguments:
    frequencies = 1e4 ** (-mx.arange(0, s.Dr, 2) / s.Dr)
    options = {"norm": x(s.latent), "eps": 1e-6, "frequencies": frequencies, "offset": 3}
    arrays = (x(s.B, n, s.heads, s.Dn + s.Dr), x(s.B, n, s.latent + s.Dr))
    return arrays, options | {"factor": 1.2, "interleaved": True}


LATENT_PREPARE = Operation(
    name="latent_prepare",
    reference=latent_prepare,
    others={"fused": Implementation(latent_prepare_fused, kernels=(_WHOLE, _TURNED))},
    size=slice(1, 2),
    tokens={"q": 1, "kv": 1},
    proof=Proof(example=prepare_workload, workloads={"": prepare_workload}, shrunk=("kv",)),
)
