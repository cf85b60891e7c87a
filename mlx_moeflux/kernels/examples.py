"""Small random arguments of every operation: every size different, no seed kept.

Forms are held against references on them: a replacement when it is given, a kernel before its
first use on Metal, all of them by ``mlx_moeflux check``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.delta_gates import normalise_qk
from mlx_moeflux.kernels.delta_mixer import References
from mlx_moeflux.kernels.expert_ffn import ExpertBank
from mlx_moeflux.kernels.heads import HeadMatrices
from mlx_moeflux.kernels.latent_step import Queries
from mlx_moeflux.kernels.project import Weight

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Normal = Callable[..., mx.array]

B, T, HQ, HK, HV, DK, DV, W = 2, 5, 4, 2, 6, 64, 32, 4
N, E, K, C, F = 7, 9, 3, 64, 32
LATENT, DR, DN = 64, 32, 48


def _causal_conv(x: Normal) -> Arguments:
    return (x(B, T, C), x(C, W), x(B, W - 1, C)), {}


def _normalise_qk(x: Normal) -> Arguments:
    return (x(B, T, HK, DK), x(B, T, HK, DK)), {}


def _decay_beta(x: Normal) -> Arguments:
    gates = {"a_log": x(HV, dtype=mx.float32), "dt_bias": x(HV, dtype=mx.float32)}
    return (x(B, T, HV), x(B, T, HV)), gates


def _gated_delta(x: Normal) -> Arguments:
    q, k = normalise_qk(x(B, T, HK, DK), x(B, T, HK, DK))
    return (q, k, x(B, T, HV, DV)), {
        "log_decay": -mx.abs(x(B, T, HV, dtype=mx.float32)),
        "beta": mx.sigmoid(x(B, T, HV, dtype=mx.float32)),
        "state": x(B, HV, DV, DK, dtype=mx.float32),
    }


def _gated_rms_norm(x: Normal) -> Arguments:
    return (x(B, T, HV, DV), x(B, T, HV, DV), x(DV)), {"eps": 1e-6}


def _delta_mixer(x: Normal) -> Arguments:
    D, gates = 2 * HK * DK + HV * DV, (B, T, HV)
    return (x(B, T, D), x(B, T, HV * DV), x(*gates), x(*gates)), {
        "conv_weight": x(D, W),
        "conv_state": x(B, W - 1, D),
        "state": x(B, HV, DV, DK, dtype=mx.float32),
        "a_log": x(HV, dtype=mx.float32),
        "dt_bias": x(HV, dtype=mx.float32),
        "norm_weight": x(DV),
        "eps": 1e-6,
        "steps": References,
    }


def _norm_rope(x: Normal) -> Arguments:
    options = {"eps": 1e-6, "dims": 16, "base": 1e4, "offset": 3}
    weights = {"q_weight": x(DK), "k_weight": x(DK)}
    return (x(B, T, HQ, 2 * DK), x(B, T, HK, DK), x(B, T, HK, DV)), weights | options


def _append_row(x: Normal) -> Arguments:
    tail = (x(B, HK, 16, DK), x(B, HK, 16, DV))
    position = mx.array([35], dtype=mx.int32)
    return (tail, x(B, HK, 1, DK), x(B, HK, 1, DV)), {"position": position}


def _sdpa(x: Normal) -> Arguments:
    keys, values = x(B, HK, T + 7, DK), x(B, HK, T + 7, DV)
    options = {"mask": "causal", "length": T + 2, "start": mx.array([0, 1])}
    return (x(B, HQ, T, DK), keys, values), {"scale": 0.1, **options, "gate": x(B, T, HQ, 2 * DV)}


def _latent_prepare(x: Normal) -> Arguments:
    frequencies = 1e4 ** (-mx.arange(0, DR, 2) / DR)
    options = {"norm": x(LATENT), "eps": 1e-6, "frequencies": frequencies, "offset": 3}
    arrays = (x(B, T, HQ, DN + DR), x(B, T, LATENT + DR))
    return arrays, options | {"factor": 1.2, "interleaved": True}


def _latent_step(x: Normal) -> Arguments:
    # One sequence and wide rows to make queries of: the kernel that does most. Of floats, because
    # MLX adds quantised products up in the dtype of x on the CPU.
    D, L = LATENT + DR, 1536
    frequencies = 1e4 ** (-mx.arange(0, DR, 2) / DR)
    options = {"norm": x(LATENT), "eps": 1e-6, "frequencies": frequencies, "offset": 3}
    options |= {"position": mx.array([19], dtype=mx.int32), "factor": 1.2, "interleaved": True}
    options["queries"] = Queries(Weight(L**-0.5 * x(HQ * D, L)), x(L), 1e-6)
    parts = mx.quantize(0.2 * x(HQ, LATENT, LATENT), group_size=32, bits=4)
    tail = (x(1, 1, 16, LATENT), x(1, 1, 16, DR))
    arrays = (x(1, 1, L), x(1, 1, LATENT + DR), tail)
    return (*arrays, HeadMatrices(*parts, QuantSpec(4, 32), 0, LATENT)), options


def _head_product(x: Normal) -> Arguments:
    parts = mx.quantize(0.2 * x(HQ, DN + DV, LATENT), group_size=32, bits=4)
    return (x(B, HQ, 1, LATENT), HeadMatrices(*parts, QuantSpec(4, 32), DN, DV)), {}


def _sdpa_blas(x: Normal) -> Arguments:
    args, kwargs = _sdpa(x)
    del kwargs["start"]
    return args, kwargs


def _paged_sdpa(x: Normal) -> Arguments:
    tail = (x(B, HK, 16, DK), x(B, HK, 16, DV))
    table = mx.array([[2, 0, 3, 0], [1, 4, 5, 0]], dtype=mx.int32)
    length, start = (mx.array(n, dtype=mx.int32) for n in ([40], [7, 0]))
    options = {"table": table, "page": 16, "length": length, "start": start, "tail": tail}
    return (x(B, HQ, 1, DK), x(96, HK, DK), x(96, HK, DV)), options | {"scale": DK**-0.5}


def _latent_attention(x: Normal) -> Arguments:
    queries = x(B, HQ, T, LATENT), x(B, HQ, T, DR)
    cache = x(B, 1, T + 5, LATENT), x(B, 1, T + 5, DR)
    return (*queries, *cache), {"length": T + 2, "scale": 0.1, "mask": "causal"}


def _latent_prefill(x: Normal) -> Arguments:
    w_k, w_v = x(HQ, LATENT, DN), x(HQ, LATENT, DV)

    def expand(latent: mx.array, first: int, last: int) -> tuple[mx.array, mx.array]:
        return latent @ w_k[first:last], latent @ w_v[first:last]

    (_, *rest), options = _latent_attention(x)
    return (x(B, T, HQ, DN + DR), *rest), options | {"expand": expand}


def _softmax_top_k(x: Normal) -> Arguments:
    return (x(N, E),), {"k": K}


def _sigmoid_top_k(x: Normal) -> Arguments:
    options = {"k": K, "groups": 4, "kept_groups": 2, "scale": 2.5}
    return (x(N, 4 * E), x(4 * E, dtype=mx.float32)), options


def _expert_ffn(x: Normal) -> Arguments:
    shapes = {"gate_proj": (E, F, C), "up_proj": (E, F, C), "down_proj": (E, C, F)}
    arrays, specs = {}, dict.fromkeys(shapes, QuantSpec(bits=4, group_size=32))
    for name, shape in shapes.items():
        parts = mx.quantize(0.2 * x(*shape), group_size=32, bits=4)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            arrays[f"{name}.{part}"] = array
    slots = mx.arange(N).astype(mx.uint32)
    return (x(N, C), slots, ExpertBank.of(arrays, specs)), {}


def _expert_mix(x: Normal) -> Arguments:
    (rows, _, bank), _ = _expert_ffn(x)
    slots = (mx.arange(N)[:, None] + mx.arange(K)).astype(mx.uint32)
    options = {"initial": x(N, C, dtype=mx.float32)}
    return (rows, slots, x(N, K, dtype=mx.float32), bank), options


def _weight(x: Normal, rows: int, width: int) -> Weight:
    return Weight(*mx.quantize(0.2 * x(rows, width), group_size=32, bits=4), QuantSpec(4, 32))


def _project(x: Normal) -> Arguments:
    weights = [_weight(x, F, C), Weight(0.2 * x(N, C))]
    return (x(3, C), weights), {"norm": x(C), "eps": 1e-6, "normed": True}


def _add_shared(x: Normal) -> Arguments:
    inner = (x(3, F), x(3, F), _weight(x, C, F))
    return (x(3, C), x(3, C, dtype=mx.float32), *inner), {"score": x(3, 1)}


def _moe_step(x: Normal) -> Arguments:
    (_, _, bank), _ = _expert_ffn(x)
    shared = Weight(
        *mx.quantize(0.2 * x(2 * F, C), group_size=32, bits=4), QuantSpec(4, 32), (F, F)
    )
    rows, norm, router = _decisive(x)
    weights = [Weight(router, outs=(E, 1)), shared]
    options = {"norm": norm, "eps": 1e-6, "k": K, "down": _weight(x, C, F)}
    return (rows, weights, bank), options | {"table": mx.arange(E, dtype=mx.uint32)}


def _decisive(x: Normal) -> tuple[mx.array, mx.array, mx.array]:
    """Rows, a norm's weight and a router that no rounding moves to another expert. Evaluates."""
    while True:
        rows, norm, router = x(3, C), x(C), 0.2 * x(E + 1, C)
        arrays = (array.astype(mx.float32) for array in (rows, norm, router[:E]))
        rows32, norm32, router32 = (np.array(array) for array in arrays)
        normed = norm32 * rows32 / np.sqrt((rows32**2).mean(axis=-1, keepdims=True))
        scores = np.sort(normed @ router32.T, axis=-1)
        if (scores[:, -K] - scores[:, -K - 1]).min() > 0.05 * np.abs(scores).max():
            return rows, norm, router


def _moe_combine(x: Normal) -> Arguments:
    return (x(N, C), x(N, C, dtype=mx.float32)), {"shared": x(N, C), "score": x(N, 1)}


def _collect(x: Normal) -> Arguments:
    log = x(20 * K, dtype=mx.float32)
    return (log, [x(K, F + 2, dtype=mx.float32) for _ in range(3)]), {"count": 2 * K}


EXAMPLES: dict[str, Callable[[Normal], Arguments]] = {
    "project": _project,
    "causal_conv": _causal_conv,
    "normalise_qk": _normalise_qk,
    "decay_beta": _decay_beta,
    "gated_delta": _gated_delta,
    "gated_rms_norm": _gated_rms_norm,
    "delta_mixer": _delta_mixer,
    "norm_rope": _norm_rope,
    "latent_prepare": _latent_prepare,
    "latent_step": _latent_step,
    "head_product": _head_product,
    "append_row": _append_row,
    "sdpa": _sdpa,
    "paged_sdpa": _paged_sdpa,
    "latent_attention": _latent_attention,
    "latent_prefill": _latent_prefill,
    "softmax_top_k": _softmax_top_k,
    "sigmoid_top_k": _sigmoid_top_k,
    "expert_ffn": _expert_ffn,
    "expert_mix": _expert_mix,
    "moe_combine": _moe_combine,
    "add_shared": _add_shared,
    "moe_step": _moe_step,
    "collect": _collect,
}

# "operation=form" -> a case that the form takes, where it refuses the operation's own.
OF_FORMS: dict[str, Callable[[Normal], Arguments]] = {"sdpa=blas": _sdpa_blas}


def fresh_key() -> mx.array:
    """For random numbers that leave MLX's own generator, which users seed, as it is."""
    return mx.random.key(int.from_bytes(os.urandom(8), "little"))


def example(operation: str, dtype: mx.Dtype = mx.float32, *, form: str | None = None) -> Arguments:
    """Positional and keyword arguments; activations and weights in `dtype`."""

    def normal(*shape: int, dtype: mx.Dtype = dtype) -> mx.array:
        return mx.random.normal(shape, key=fresh_key()).astype(dtype)

    return OF_FORMS.get(f"{operation}={form}", EXAMPLES[operation])(normal)
