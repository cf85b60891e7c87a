"""Arguments of operations at the sizes at which models call them, to time forms with.

Every builder takes :class:`Sizes`, a number of tokens and a drawer of random arrays. Names are
those of dispatch.json: an operation, or one and the kind of call that has rows of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.examples import Arguments, Normal, fresh_key
from mlx_moeflux.kernels.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.heads import HeadMatrices
from mlx_moeflux.kernels.project import Weight

SPEC = QuantSpec(4, 64)
KEYS = 2048  # in front of the new tokens of an attention
BLOCK = 16  # rows of a block of a pool


@dataclass(frozen=True)
class Sizes:
    """A model's widths: hidden C, inside an expert F, experts E and K, and heads."""

    C: int
    F: int
    E: int
    K: int
    Hq: int
    Hkv: int
    Dh: int
    Hk: int
    Hv: int
    Dk: int
    heads: int  # of latent attention
    latent: int


# Qwen3.6-35B-A3B with DeepSeek-V3's latents; and what a CPU is asked to run.
LARGE = Sizes(2048, 512, 256, 8, 16, 2, 256, 16, 32, 128, 128, 512)
SMALL = Sizes(768, 256, 32, 4, 8, 2, 128, 4, 8, 128, 16, 512)


def _normal(default: mx.Dtype) -> Normal:
    def normal(*shape: int, dtype: mx.Dtype = default) -> mx.array:
        return mx.random.normal(shape, key=fresh_key()).astype(dtype)

    return normal


def _weight(x: Normal, *shape: int) -> tuple[mx.array, mx.array, mx.array]:
    return mx.quantize(x(*shape) * shape[-1] ** -0.5, group_size=64, bits=4)


def _project(s: Sizes, n: int, x: Normal) -> Arguments:
    widths = (2 * s.Hk * s.Dk + s.Hv * s.Dk, s.Hv * s.Dk)
    weights = [Weight(*_weight(x, sum(widths), s.C), SPEC, widths)]
    return (x(1, n, s.C), weights), {"norm": x(s.C)}


def _gated_delta(s: Sizes, n: int, x: Normal) -> Arguments:
    q, k = (x(1, n, s.Hk, s.Dk) * s.Dk**-0.5 for _ in range(2))
    return (q, k, x(1, n, s.Hv, s.Dk)), {
        "log_decay": -0.3 * mx.abs(x(1, n, s.Hv, dtype=mx.float32)),
        "beta": mx.sigmoid(x(1, n, s.Hv, dtype=mx.float32)),
        "state": x(1, s.Hv, s.Dk, s.Dk, dtype=mx.float32),
    }


def _gated_rms_norm(s: Sizes, n: int, x: Normal) -> Arguments:
    return (x(1, n, s.Hv, s.Dk), x(1, n, s.Hv, s.Dk), x(s.Dk)), {"eps": 1e-6}


def _delta_mixer(s: Sizes, n: int, x: Normal) -> Arguments:
    channels = (2 * s.Hk + s.Hv) * s.Dk
    return (x(1, n, channels), x(1, n, s.Hv * s.Dk), x(1, n, s.Hv), x(1, n, s.Hv)), {
        "conv_weight": x(channels, 4),
        "conv_state": x(1, 3, channels),
        "state": x(1, s.Hv, s.Dk, s.Dk, dtype=mx.float32),
        "a_log": x(s.Hv, dtype=mx.float32),
        "dt_bias": x(s.Hv, dtype=mx.float32),
        "norm_weight": x(s.Dk),
        "eps": 1e-6,
    }


def _norm_rope(s: Sizes, n: int, x: Normal) -> Arguments:
    q, k, v = (x(1, n, h, s.Dh) for h in (s.Hq, s.Hkv, s.Hkv))
    options = {"eps": 1e-6, "dims": s.Dh // 4, "base": 1e7, "offset": 1000}
    return (q, k, v), {"q_weight": x(s.Dh), "k_weight": x(s.Dh), **options}


def _append_row(s: Sizes, n: int, x: Normal) -> Arguments:
    tail = (x(1, s.Hkv, 256, s.Dh), x(1, s.Hkv, 256, s.Dh))
    rows = (x(1, s.Hkv, 1, s.Dh), x(1, s.Hkv, 1, s.Dh))
    return (tail, *rows), {"position": mx.array([300], dtype=mx.int32)}


def _sdpa(Dh: int, Dv: int, Hq: int, Hkv: int, n: int, x: Normal) -> Arguments:
    rows = KEYS + n + 255 - (n - 1) % 256  # buffers are larger than what they hold
    keys, values = x(1, Hkv, rows, Dh), x(1, Hkv, rows, Dv)
    mask = None if n == 1 else "causal"
    return (x(1, Hq, n, Dh), keys, values), {
        "scale": Dh**-0.5, "mask": mask, "length": KEYS + n
    }  # fmt: skip


def _paged_sdpa(s: Sizes, n: int, x: Normal) -> Arguments:
    """Of n sequences, their blocks one behind another."""
    pages, tail = (KEYS + 256) // BLOCK, (x(n, s.Hkv, 64, s.Dh), x(n, s.Hkv, 64, s.Dh))
    rows = (n * pages + 1) * BLOCK
    table = (1 + mx.arange(n * pages)).reshape(n, pages).astype(mx.int32)
    return (x(n, s.Hq, 1, s.Dh), x(rows, s.Hkv, s.Dh), x(rows, s.Hkv, s.Dh)), {
        "table": table, "page": BLOCK, "length": mx.array([KEYS + 1], dtype=mx.int32),
        "tail": tail, "scale": s.Dh**-0.5,
    }  # fmt: skip


def _latent_attention(s: Sizes, n: int, x: Normal) -> Arguments:
    rows = KEYS + n + 255 - (n - 1) % 256
    cache = x(1, 1, rows, s.latent), x(1, 1, rows, 64)
    mask = None if n == 1 else "causal"
    return (x(1, s.heads, n, s.latent), x(1, s.heads, n, 64), *cache), {
        "length": KEYS + n, "scale": 192**-0.5, "mask": mask
    }  # fmt: skip


def _latent_prefill(s: Sizes, n: int, x: Normal) -> Arguments:
    w_k, w_v = x(s.heads, s.latent, 128), x(s.heads, s.latent, 128)

    def expand(latent: mx.array, first: int, last: int) -> tuple[mx.array, mx.array]:
        return latent @ w_k[first:last], latent @ w_v[first:last]

    (_, *rest), options = _latent_attention(s, n, x)
    return (x(1, n, s.heads, 192), *rest), options | {"expand": expand, "mask": "causal"}


def _latent_prepare(s: Sizes, n: int, x: Normal) -> Arguments:
    frequencies = 1e4 ** (-mx.arange(0, 64, 2) / 64)
    options = {"norm": x(s.latent), "eps": 1e-6, "frequencies": frequencies, "offset": 3}
    arrays = (x(1, n, s.heads, 192), x(1, n, s.latent + 64))
    return arrays, options | {"factor": 1.0, "interleaved": True}


def _latent_step(s: Sizes, n: int, x: Normal) -> Arguments:
    (q, kv), options = _latent_prepare(s, 1, x)
    tail = x(1, 1, 64, s.latent), x(1, 1, 64, 64)
    matrices = HeadMatrices(*_weight(x, s.heads, s.latent, 128), SPEC, 0, s.latent)
    options |= {"position": mx.array([3], dtype=mx.int32)}
    return (q, kv, tail, matrices), options


def _head_product(s: Sizes, n: int, x: Normal) -> Arguments:
    matrices = HeadMatrices(*_weight(x, s.heads, 256, s.latent), SPEC, 128, 128)
    return (x(1, s.heads, n, s.latent), matrices), {}


def _softmax_top_k(s: Sizes, n: int, x: Normal) -> Arguments:
    return (x(n, s.E),), {"k": s.K}


def _sigmoid_top_k(s: Sizes, n: int, x: Normal) -> Arguments:
    options = {"k": s.K, "groups": 8, "kept_groups": 4, "scale": 2.5}
    return (x(n, s.E), x(s.E, dtype=mx.float32)), options


@functools.lru_cache(maxsize=1)
def _bank(s: Sizes, dtype: mx.Dtype) -> ExpertBank:
    """One for all calls, which differ in their routes."""
    shapes = ((s.F, s.C), (s.F, s.C), (s.C, s.F))
    parts = [_weight(_normal(dtype), s.E, *shape) for shape in shapes]
    mx.eval(parts)
    return ExpertBank(*(ProjectionBank(*part, SPEC) for part in parts))


def _slots(s: Sizes, n: int) -> mx.array:
    order = mx.argsort(mx.random.uniform(shape=(n, s.E), key=fresh_key()), axis=-1)[:, : s.K]
    return mx.sort(order, axis=-1).astype(mx.uint32)


def _expert_mix(s: Sizes, n: int, x: Normal) -> Arguments:
    weights = mx.random.uniform(shape=(n, s.K), key=fresh_key())
    rows = x(n, s.C)
    return (rows, _slots(s, n), weights, _bank(s, rows.dtype)), {}


def _expert_ffn(s: Sizes, n: int, x: Normal) -> Arguments:
    rows = x(n * s.K, s.C)
    return (rows, _slots(s, n).reshape(-1), _bank(s, rows.dtype)), {}


def _add_shared(s: Sizes, n: int, x: Normal) -> Arguments:
    down = Weight(*_weight(x, s.C, s.F), SPEC)
    inner = (x(n, s.F), x(n, s.F), down)
    return (x(1, n, s.C), x(n, s.C, dtype=mx.float32), *inner), {"score": x(n, 1)}


def _moe_step(s: Sizes, n: int, x: Normal) -> Arguments:
    router = Weight(
        *mx.quantize(x(s.E + 1, s.C), group_size=64, bits=8), QuantSpec(8, 64), (s.E, 1)
    )
    shared = Weight(*_weight(x, 2 * s.F, s.C), SPEC, (s.F, s.F))
    rows = x(1, n, s.C)
    options = {"norm": x(s.C), "eps": 1e-6, "k": s.K, "down": Weight(*_weight(x, s.C, s.F), SPEC)}
    return (rows, [router, shared], _bank(s, rows.dtype)), options


def _moe_combine(s: Sizes, n: int, x: Normal) -> Arguments:
    return (x(n, s.C), x(n, s.C, dtype=mx.float32)), {"shared": x(n, s.C), "score": x(n, 1)}


def _collect(s: Sizes, n: int, x: Normal) -> Arguments:
    layers = [x(n * s.K, s.F + 3, dtype=mx.float32) for _ in range(40)]
    return (x(64 * 40 * 2 * n * s.K, dtype=mx.float32), layers), {"count": 2 * n * s.K}


WORKLOADS: dict[str, Callable[[Sizes, int, Normal], Arguments]] = {
    "project": _project,
    "gated_delta": _gated_delta,
    "gated_rms_norm": _gated_rms_norm,
    "delta_mixer": _delta_mixer,
    "norm_rope": _norm_rope,
    "append_row": _append_row,
    "sdpa": lambda s, n, x: _sdpa(s.Dh, s.Dh, s.Hq, s.Hkv, n, x),
    "sdpa 64": lambda s, n, x: _sdpa(64, 64, 2 * s.Hq, s.Hq // 2, n, x),
    "sdpa 128": lambda s, n, x: _sdpa(128, 128, 2 * s.Hq, 2 * s.Hkv, n, x),
    "sdpa 192": lambda s, n, x: _sdpa(192, 128, s.heads, s.heads, n, x),
    "paged_sdpa": _paged_sdpa,
    "latent_attention": _latent_attention,
    "latent_prefill": _latent_prefill,
    "latent_prepare": _latent_prepare,
    "latent_step": _latent_step,
    "head_product": _head_product,
    "softmax_top_k": _softmax_top_k,
    "sigmoid_top_k": _sigmoid_top_k,
    "expert_ffn": _expert_ffn,
    "expert_mix": _expert_mix,
    "moe_combine": _moe_combine,
    "moe_step": _moe_step,
    "collect": _collect,
    "add_shared": _add_shared,
}


def workload(name: str, sizes: Sizes, tokens: int, dtype: mx.Dtype) -> Arguments:
    """Arguments of one call, not evaluated."""
    return WORKLOADS[name](sizes, tokens, _normal(dtype))
