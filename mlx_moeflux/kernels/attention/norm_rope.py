"""Per-head RMS norm and rotary embedding of new queries and keys, heads moved before tokens.

    x' = x / sqrt(mean(x^2) + eps) * weight           (weight None: x' = x)
    (a, b) -> (a cos - b sin, a sin + b cos)          at angle position * frequencies[i]

Pair i is (x'[i], x'[i + dims / 2]), or with `traditional` (x'[2 i], x'[2 i + 1]); values from
`dims` on are only normed. frequencies[i] = base^(-2 i / dims) unless given.

Shapes:
    q: ``[B, T, Hq, Dh]``, or ``[B, T, Hq, 2 Dh]`` whose second halves (a gate) are left out.
    k: ``[B, T, Hkv, Dh]``; v: ``[B, T, Hkv, Dv]``; weights: ``[Dh]`` or None.
    offset: position of the first token, an int or int32 ``[B]``.
    returns: q ``[B, Hq, T, Dh]``, k ``[B, Hkv, T, Dh]``, v ``[B, Hkv, T, Dv]``, each in
    the dtype of what came in.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launch_args import equal, filled, on_the_device
from mlx_moeflux.kernels.runtime.launcher import LEAST_INPUT, MetalKernel


def norm_rope(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    q_weight: mx.array | None,
    k_weight: mx.array | None,
    eps: float,
    dims: int,
    base: float,
    offset: int | mx.array,
    frequencies: mx.array | None = None,
    traditional: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    """Stock MLX: a norm and a rotation for q, the same for k, views for the rest."""
    q, offset = q[..., : k.shape[-1]], for_each_sequence(offset, q.shape[0])
    periods = None if frequencies is None else 1.0 / frequencies

    def normed_and_turned(x, weight):
        dtype = x.dtype
        if weight is not None:
            x = mx.fast.rms_norm(x, weight, eps)
        turned = mx.fast.rope(
            x.swapaxes(1, 2),
            dims,
            traditional=traditional,
            base=base if periods is None else None,
            scale=1.0,
            offset=offset,
            freqs=periods,
        )
        return turned.astype(dtype)

    q, k = normed_and_turned(q, q_weight), normed_and_turned(k, k_weight)
    return q, k, v.swapaxes(1, 2)


_KERNEL = MetalKernel(
    "norm_rope",
    file="norm_rope.metal",
    inputs=("q", "k", "v", "q_weight", "k_weight", "frequencies", "eps", "offset"),
    outputs=("q_out", "k_out", "v_out"),
    body="""
        norm_rope<T, WQ, WK, HQ, HK, HV, D, LQ, DV, P, PV, DIMS, INTERLEAVED, NORMQ, NORMK>(
            q, k, v, q_weight, k_weight, frequencies, eps, offset, q_out, k_out, v_out,
            q_shape[0], q_shape[1], thread_position_in_grid.x / 32, thread_index_in_simdgroup);
    """,
)
_THREADS = 256


def norm_rope_fused(
    q, k, v, *, q_weight, k_weight, eps, dims, base, offset, frequencies=None, traditional=False
):
    """:func:`norm_rope` in one launch: a simdgroup for each head of each token.

    Everything between is float32; sine and cosine are the precise ones.

    Raises:
        ShapeError: Sizes do not fit together, or Dh or Dv is no multiple of 32 (of 64 with
            `traditional`).
        UnsupportedError: MLX drives no GPU.
    """
    rows, template, shapes = _plan(q.shape, k.shape, v.shape, dims, traditional)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ShapeError(f"norm_rope: {name} is {x.dtype} and q {q.dtype}; cast one.")
    width = k.shape[-1]
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (width,):
            raise ShapeError(f"norm_rope: {name} is {weight.shape}, expected ({width},).")
    if frequencies is None:
        frequencies = _frequencies(dims, base)
    elif frequencies.shape != (dims // 2,):
        raise ShapeError(f"norm_rope: frequencies is {frequencies.shape}, not ({dims // 2},).")
    template = {
        "T": q.dtype,
        "WQ": mx.float32 if q_weight is None else q_weight.dtype,
        "WK": mx.float32 if k_weight is None else k_weight.dtype,
        **template,
        "NORMQ": q_weight is not None,
        "NORMK": k_weight is not None,
    }
    q, k, v = _KERNEL(
        q,
        k,
        v,
        filled(0.0) if q_weight is None else q_weight,
        filled(0.0) if k_weight is None else k_weight,
        frequencies.astype(mx.float32),
        filled(eps),
        offsets(offset, q.shape[0]),
        template=template,
        grid=(-(-rows * 32 // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=[q.dtype] * len(shapes),
    )
    return q, k, v


@functools.lru_cache(maxsize=4096)
def _plan(q, k, v, dims, traditional):
    """Shapes -> (rows of all heads, template, output shapes), checked once for each."""
    B, T, Hq, width = q
    _, _, Hk, D = k
    Hv, Dv = v[2:]
    if k[:2] != (B, T) or v[:2] != (B, T):
        raise ShapeError(f"norm_rope: q {q}, k {k} and v {v} differ in sequences or tokens.")
    if width not in (D, 2 * D):
        raise ShapeError(f"norm_rope: q has {width} values a head, k {D}; neither once nor twice.")
    if dims % 2 or not 0 < dims <= D:
        raise ShapeError(f"norm_rope: dims is {dims}, not even and from 2 to {D}.")
    unit = 64 if traditional else 32
    for name, size in (("Dh", D), ("Dv", Dv)):
        if size % unit:
            raise ShapeError(f"norm_rope: {name} is {size}, no multiple of {unit}.")
    pack = next(p for p in (8, 4, 2, 1) if p == 1 or (D % (32 * p) == 0 and dims // 2 % p == 0))
    if traditional:
        pack = max(pack, 2)
    template = {
        "HQ": Hq,
        "HK": Hk,
        "HV": Hv,
        "D": D,
        "LQ": width,
        "DV": Dv,
        "P": pack,
        "PV": next(p for p in (8, 4, 2, 1) if Dv % (32 * p) == 0),
        "DIMS": dims,
        "INTERLEAVED": traditional,
    }
    shapes = [(B, Hq, T, D), (B, Hk, T, D), (B, Hv, T, Dv)]
    return B * T * (Hq + Hk + Hv), template, shapes


@functools.lru_cache(maxsize=64)
def _frequencies(dims: int, base: float) -> mx.array:
    """base^(-2 i / dims), rounded once."""
    turns = [base ** (-2.0 * i / dims) for i in range(dims // 2)]
    return mx.array(turns, dtype=mx.float32)


def for_each_sequence(offset: int | mx.array, batch: int) -> int | mx.array:
    """`offset` as ``mx.fast.rope`` takes it: of one number for several sequences MLX's CUDA kernel
    reads the numbers behind it (docs/kernels.md)."""
    if isinstance(offset, int) or offset.size == batch:
        return offset
    return mx.contiguous(mx.broadcast_to(offset.reshape(-1), (batch,)))


def offsets(offset: int | mx.array, batch: int) -> mx.array:
    """int32 of at least `batch` elements."""
    if isinstance(offset, int):
        return equal(offset, max(batch, LEAST_INPUT))
    if offset.size not in (1, batch):
        raise ShapeError(f"norm_rope: {offset.size} offsets for {batch} sequences.")
    return on_the_device(offset, batch)


def _workload(s: Sizes, n: int, x: Normal, *, gates: int = 0) -> Arguments:
    q, k, v = (x(s.B, n, h, d) for h, d in ((s.Hq, s.Dh + gates), (s.Hkv, s.Dh), (s.Hkv, s.Dhv)))
    options = {"eps": 1e-6, "dims": s.Dh // 4, "base": 1e4, "offset": 3}
    return (q, k, v), {"q_weight": x(s.Dh), "k_weight": x(s.Dh), **options}


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    return _workload(s, n, x, gates=s.Dh)


NORM_ROPE = Operation(
    name="norm_rope",
    reference=norm_rope,
    others={
        "fused": Implementation(norm_rope_fused, kernels=(_KERNEL,), joins=True),
        "blas": Implementation(blas.norm_rope_blas, on_cpu=True, joins=True),
    },
    size=slice(1, 2),
    tokens=dict.fromkeys(("q", "k", "v"), 1),
    rows=("q", "k", "v", "offset"),
    proof=Proof(
        example=_example,
        workloads={"": _workload},
        shrunk=("q", "k"),
        timed=lambda q, *others, **options: q.shape[1] > 1,
    ),
)
