"""Random arguments of every operation, in the sizes of models or small; no seed kept.

Forms are held against references on small examples: a replacement when it is given, a kernel before
its first use on Metal, all of them by ``mlx_moeflux check``. They are timed on workloads, at the
sizes at which models call them. A builder takes :class:`Sizes`, a number of tokens and a drawer of
random arrays.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.delta.delta_mixer import normalise_qk
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.mla.latent import HeadMatrices
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Normal = Callable[..., mx.array]


@dataclass(frozen=True)
class Sizes:
    """A model's widths: hidden C, inside an expert F, experts E and K, and heads; then what a call
    has: sequences, rows of a tail, positions before the new tokens, and those that a buffer grows
    by."""

    C: int
    F: int
    E: int
    K: int
    Hq: int
    Hkv: int
    Dh: int
    Dhv: int  # of its values
    Hk: int
    Hv: int
    Dk: int
    heads: int  # of latent attention
    latent: int
    Dn: int = 128
    Dr: int = 64
    Dv: int = 128  # of the delta rule and of latent attention
    group: int = 64
    B: int = 1
    tail: int = 64
    keys: int = 2048
    step: int = 256

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(4, self.group)


# Qwen3.6-35B-A3B with DeepSeek-V3's latents; sizes for a CPU; and sizes for a check,
# whose tokens are T or, in a step of one token a sequence, N.
LARGE = Sizes(2048, 512, 256, 8, 16, 2, 256, 256, 16, 32, 128, 128, 512)
SMALL = Sizes(768, 256, 32, 4, 8, 2, 128, 128, 4, 8, 128, 16, 512)
TINY = Sizes(
    64, 32, 9, 3, 4, 2, 64, 32, 2, 6, 64, 4, 64,
    Dn=64, Dr=32, Dv=32, group=32, B=2, tail=16, keys=2, step=10,
)  # fmt: skip
T, N, BLOCK = 5, 7, 16  # BLOCK: Rows of a block of a pool


def fresh_key() -> mx.array:
    """For random numbers that leave MLX's own generator, which users seed, as it is."""
    return mx.random.key(int.from_bytes(os.urandom(8), "little"))


def _normal(default: mx.Dtype) -> Normal:
    def normal(*shape: int, dtype: mx.Dtype = default) -> mx.array:
        return mx.random.normal(shape, key=fresh_key()).astype(dtype)

    return normal


def _quantised(s: Sizes, x: Normal, *shape: int) -> tuple[mx.array, mx.array, mx.array]:
    return mx.quantize(x(*shape) * shape[-1] ** -0.5, group_size=s.group, bits=4)


def _weight(s: Sizes, x: Normal, *outs: int, width: int) -> Weight:
    parts = _quantised(s, x, sum(outs), width)
    return Weight(*parts, s.spec, outs if len(outs) > 1 else ())


def _project(s: Sizes, n: int, x: Normal) -> Arguments:
    widths = (2 * s.Hk * s.Dk + s.Hv * s.Dv, s.Hv * s.Dv)
    return (x(1, n, s.C), [_weight(s, x, *widths, width=s.C)]), {"norm": x(s.C)}


def _project_two(s: Sizes, n: int, x: Normal) -> Arguments:
    weights = [Weight(0.2 * x(N, s.C)), _weight(s, x, s.F, s.F, width=s.C)]
    return (x(3, s.C), weights), {"norm": x(s.C), "eps": 1e-6, "normed": True}


def _gated_delta(s: Sizes, n: int, x: Normal) -> Arguments:
    q, k = normalise_qk(x(s.B, n, s.Hk, s.Dk), x(s.B, n, s.Hk, s.Dk))
    return (q, k, x(s.B, n, s.Hv, s.Dv)), {
        "log_decay": -0.3 * mx.abs(x(s.B, n, s.Hv, dtype=mx.float32)),
        "beta": mx.sigmoid(x(s.B, n, s.Hv, dtype=mx.float32)),
        "state": x(s.B, s.Hv, s.Dv, s.Dk, dtype=mx.float32),
    }


def _delta_mixer(s: Sizes, n: int, x: Normal) -> Arguments:
    D, gates = 2 * s.Hk * s.Dk + s.Hv * s.Dv, (s.B, n, s.Hv)
    return (x(s.B, n, D), x(s.B, n, s.Hv * s.Dv), x(*gates), x(*gates)), {
        "conv_weight": x(D, 4),
        "conv_state": x(s.B, 3, D),
        "state": x(s.B, s.Hv, s.Dv, s.Dk, dtype=mx.float32),
        "a_log": x(s.Hv, dtype=mx.float32),
        "dt_bias": x(s.Hv, dtype=mx.float32),
        "norm_weight": x(s.Dv),
        "eps": 1e-6,
    }


def _norm_rope(s: Sizes, n: int, x: Normal, *, gates: int = 0) -> Arguments:
    q, k, v = (x(s.B, n, h, d) for h, d in ((s.Hq, s.Dh + gates), (s.Hkv, s.Dh), (s.Hkv, s.Dhv)))
    options = {"eps": 1e-6, "dims": s.Dh // 4, "base": 1e4, "offset": 3}
    return (q, k, v), {"q_weight": x(s.Dh), "k_weight": x(s.Dh), **options}


def _append_row(s: Sizes, n: int, x: Normal) -> Arguments:
    tail, row = (x(s.B, s.Hkv, s.tail, s.Dh), x(s.B, s.Hkv, s.tail, s.Dhv)), (s.B, s.Hkv, 1)
    position = mx.array([2 * s.tail + 3], dtype=mx.int32)
    return (tail, x(*row, s.Dh), x(*row, s.Dhv)), {"position": position}


def _sdpa(s: Sizes, n: int, x: Normal, Dh: int, Dv: int, Hq: int, Hkv: int) -> Arguments:
    rows = s.keys + -(-n // s.step) * s.step  # buffers are larger than what they hold
    keys, values = x(s.B, Hkv, rows, Dh), x(s.B, Hkv, rows, Dv)
    options = {"scale": Dh**-0.5, "mask": None if n == 1 else "causal", "length": s.keys + n}
    return (x(s.B, Hq, n, Dh), keys, values), options


def _sdpa_gated(s: Sizes, n: int, x: Normal) -> Arguments:
    args, options = _sdpa(s, n, x, s.Dh, s.Dhv, s.Hq, s.Hkv)
    return args, options | {"start": mx.array([0, 1]), "gate": x(s.B, n, s.Hq, 2 * s.Dhv)}


def _paged_sdpa(s: Sizes, n: int, x: Normal) -> Arguments:
    """Arguments for n sequences with consecutive blocks."""
    pages, tail = (s.keys + 256) // BLOCK, (x(n, s.Hkv, s.tail, s.Dh), x(n, s.Hkv, s.tail, s.Dh))
    rows = (n * pages + 1) * BLOCK
    table = (1 + mx.arange(n * pages)).reshape(n, pages).astype(mx.int32)
    options = {"table": table, "page": BLOCK, "length": mx.array([s.keys + 1], dtype=mx.int32)}
    return (x(n, s.Hq, 1, s.Dh), x(rows, s.Hkv, s.Dh), x(rows, s.Hkv, s.Dh)), {
        **options, "tail": tail, "scale": s.Dh**-0.5
    }  # fmt: skip


def _paged_anywhere(s: Sizes, n: int, x: Normal) -> Arguments:
    tail = (x(2, s.Hkv, s.tail, s.Dh), x(2, s.Hkv, s.tail, s.Dhv))
    table = mx.array([[2, 0, 3, 0], [1, 4, 5, 0]], dtype=mx.int32)
    length, start = (mx.array(value, dtype=mx.int32) for value in ([40], [7, 0]))
    options = {"table": table, "page": BLOCK, "length": length, "start": start, "tail": tail}
    return (x(2, s.Hq, 1, s.Dh), x(6 * BLOCK, s.Hkv, s.Dh), x(6 * BLOCK, s.Hkv, s.Dhv)), {
        **options, "scale": s.Dh**-0.5
    }  # fmt: skip


def _latent_attention(s: Sizes, n: int, x: Normal) -> Arguments:
    rows = s.keys + -(-n // s.step) * s.step
    cache = x(s.B, 1, rows, s.latent), x(s.B, 1, rows, s.Dr)
    return (x(s.B, s.heads, n, s.latent), x(s.B, s.heads, n, s.Dr), *cache), {
        "length": s.keys + n, "scale": (s.Dn + s.Dr) ** -0.5, "mask": None if n == 1 else "causal"
    }  # fmt: skip


def _latent_prefill(s: Sizes, n: int, x: Normal) -> Arguments:
    w_k, w_v = x(s.heads, s.latent, s.Dn), x(s.heads, s.latent, s.Dv)

    def expand(latent: mx.array, first: int, last: int) -> tuple[mx.array, mx.array]:
        return latent @ w_k[first:last], latent @ w_v[first:last]

    (_, *rest), options = _latent_attention(s, n, x)
    options |= {"expand": expand, "mask": "causal"}
    return (x(s.B, n, s.heads, s.Dn + s.Dr), *rest), options


def _latent_prepare(s: Sizes, n: int, x: Normal) -> Arguments:
    frequencies = 1e4 ** (-mx.arange(0, s.Dr, 2) / s.Dr)
    options = {"norm": x(s.latent), "eps": 1e-6, "frequencies": frequencies, "offset": 3}
    arrays = (x(s.B, n, s.heads, s.Dn + s.Dr), x(s.B, n, s.latent + s.Dr))
    return arrays, options | {"factor": 1.2, "interleaved": True}


def _latent_step(s: Sizes, n: int, x: Normal) -> Arguments:
    arrays, options = _latent_prepare(s, 1, x)
    tail = x(s.B, 1, s.tail, s.latent), x(s.B, 1, s.tail, s.Dr)
    matrices = HeadMatrices(*_quantised(s, x, s.heads, s.latent, s.Dn), s.spec, 0, s.latent)
    position = mx.array([s.tail + 3], dtype=mx.int32)
    return (*arrays, tail, matrices), options | {"position": position}


def _head_product(s: Sizes, n: int, x: Normal) -> Arguments:
    parts = _quantised(s, x, s.heads, s.Dn + s.Dv, s.latent)
    return (x(s.B, s.heads, n, s.latent), HeadMatrices(*parts, s.spec, s.Dn, s.Dv)), {}


def _softmax_top_k(s: Sizes, n: int, x: Normal) -> Arguments:
    return (x(n, s.E),), {"k": s.K}


def _sigmoid_top_k(s: Sizes, n: int, x: Normal) -> Arguments:
    E, options = s.E + -s.E % 8, {"k": s.K, "groups": 8, "kept_groups": 4, "scale": 2.5}
    return (x(n, E), x(E, dtype=mx.float32)), options


@functools.lru_cache(maxsize=1)
def _bank(s: Sizes, dtype: mx.Dtype) -> ExpertBank:
    """One for all calls, which differ in their routes."""
    shapes = ((s.F, s.C), (s.F, s.C), (s.C, s.F))
    parts = [_quantised(s, _normal(dtype), s.E, *shape) for shape in shapes]
    mx.eval(parts)
    gate, up, down = (ProjectionBank(*part, s.spec) for part in parts)
    return ExpertBank(gate, up, down)


def _expert_mix(s: Sizes, n: int, x: Normal) -> Arguments:
    order = mx.argsort(mx.random.uniform(shape=(n, s.E), key=fresh_key()), axis=-1)[:, : s.K]
    slots = mx.sort(order, axis=-1).astype(mx.uint32)
    weights, rows = mx.random.uniform(shape=(n, s.K), key=fresh_key()), x(n, s.C)
    return (rows, slots, weights, _bank(s, rows.dtype)), {}


def _expert_mix_continued(s: Sizes, n: int, x: Normal) -> Arguments:
    return _expert_mix(s, n, x)[0], {"initial": x(n, s.C, dtype=mx.float32)}


def _moe_combine(s: Sizes, n: int, x: Normal) -> Arguments:
    return (x(n, s.C), x(n, s.C, dtype=mx.float32)), {"shared": x(n, s.C), "score": x(n, 1)}


def _add_shared(s: Sizes, n: int, x: Normal) -> Arguments:
    inner = (x(n, s.F), x(n, s.F), _weight(s, x, s.C, width=s.F))
    return (x(1, n, s.C), x(n, s.C, dtype=mx.float32), *inner), {"score": x(n, 1)}


def _moe_step(s: Sizes, n: int, x: Normal) -> Arguments:
    spec = QuantSpec(8, 64)
    router = Weight(*mx.quantize(x(s.E + 1, s.C), group_size=64, bits=8), spec, (s.E, 1))
    rows, weights = x(1, n, s.C), [router, _weight(s, x, s.F, s.F, width=s.C)]
    options = {"norm": x(s.C), "eps": 1e-6, "k": s.K, "down": _weight(s, x, s.C, width=s.F)}
    return (rows, weights, _bank(s, rows.dtype)), options


def _moe_step_decisive(s: Sizes, n: int, x: Normal) -> Arguments:
    rows, norm, router = _decisive(s, x)
    (_, (_, shared), bank), options = _moe_step(s, n, x)
    options |= {"norm": norm, "table": mx.arange(s.E, dtype=mx.uint32)}
    return (rows, [Weight(router, outs=(s.E, 1)), shared], bank), options


def _decisive(s: Sizes, x: Normal) -> tuple[mx.array, mx.array, mx.array]:
    """Rows, a norm's weight and a router that no rounding moves to another expert. Evaluates."""
    while True:
        rows, norm, router = x(3, s.C), x(s.C), 0.2 * x(s.E + 1, s.C)
        arrays = (array.astype(mx.float32) for array in (rows, norm, router[: s.E]))
        rows32, norm32, router32 = (np.array(array) for array in arrays)
        normed = norm32 * rows32 / np.sqrt((rows32**2).mean(axis=-1, keepdims=True))
        scores = np.sort(normed @ router32.T, axis=-1)
        if (scores[:, -s.K] - scores[:, -s.K - 1]).min() > 0.05 * np.abs(scores).max():
            return rows, norm, router


# Names are those of dispatch.json: an operation, as its builder is called, or one and the kind of
# call that has rows of its own.
WORKLOADS: dict[str, Callable[[Sizes, int, Normal], Arguments]] = {
    build.__name__.removeprefix("_"): build
    for build in (
        _project, _gated_delta, _delta_mixer, _norm_rope, _append_row, _paged_sdpa,
        _latent_attention, _latent_prefill, _latent_prepare, _latent_step, _head_product,
        _softmax_top_k, _sigmoid_top_k, _expert_mix, _moe_combine, _moe_step, _add_shared,
    )
} | {
    "sdpa": lambda s, n, x: _sdpa(s, n, x, s.Dh, s.Dh, s.Hq, s.Hkv),
    "sdpa 64": lambda s, n, x: _sdpa(s, n, x, 64, 64, 2 * s.Hq, s.Hq // 2),
    "sdpa 128": lambda s, n, x: _sdpa(s, n, x, 128, 128, 2 * s.Hq, 2 * s.Hkv),
    "sdpa 192": lambda s, n, x: _sdpa(s, n, x, 192, 128, s.heads, s.heads),
}  # fmt: skip
# Examples have every option that the operation has.
EXAMPLES = {name: build for name, build in WORKLOADS.items() if " " not in name} | {
    "project": _project_two,
    "norm_rope": lambda s, n, x: _norm_rope(s, n, x, gates=s.Dh),
    "sdpa": _sdpa_gated,
    "paged_sdpa": _paged_anywhere,
    "expert_mix": _expert_mix_continued,
    "moe_step": _moe_step_decisive,
}
# Of those with one row a sequence or token.
TOKENS = {"head_product": 1, "add_shared": 3} | dict.fromkeys(
    ("softmax_top_k", "sigmoid_top_k", "expert_mix", "moe_combine"), N
)


def workload(name: str, sizes: Sizes, tokens: int, dtype: mx.Dtype) -> Arguments:
    """Arguments of one call, not evaluated."""
    return WORKLOADS[name](sizes, tokens, _normal(dtype))


def small_cases(operation: str) -> Iterator[tuple[str, Arguments]]:
    """Yield the cases on which a given callable is compared with the reference, with their names.

    Of attention also what traced steps on GPUs and other callers pass: a tail, a length on the
    device, a mask as an array, queries that are padding.
    """
    for what, tokens in (("several tokens", None), ("one token", 1)):
        if operation == "sdpa":
            yield from _cases_of_attention(what, tokens)
        else:
            yield what, example(operation, tokens=tokens)


def _cases_of_attention(what: str, tokens: int | None) -> Iterator[tuple[str, Arguments]]:
    (q, k, v), every = example("sdpa", tokens=tokens)
    T, length = q.shape[2], every["length"]
    plain = {name: every[name] for name in ("scale", "mask", "length")}
    cases = [every, plain | {"gate": every["gate"]}, plain]
    if T > 1:
        visible = mx.random.uniform(shape=(1, 1, T, length)) < 0.5
        visible[..., 0] = True
        # The first query of the second sequence is padding.
        cases += [plain | {"mask": visible}, plain | {"start": mx.array([0, length - T + 1])}]
    else:
        rows = next(n for n in (8, 4, 2, 1) if k.shape[2] % n == 0)
        tail = tuple(_normal(q.dtype)(*x.shape[:2], rows, x.shape[3]) for x in (k, v))
        cases += [every | {"tail": tail, "length": mx.array([length], dtype=mx.int32)}]
    for options in cases:
        yield f"{what}, {_given(options)}", ((q, k, v), options)


def without_padding(operation: str, arguments: Arguments, value: Any) -> Any:
    """Return the result of a small case with 0 for queries of padding if they have finite numbers:
    nobody reads them, but later layers compute with them."""
    (q, *_), options = arguments
    if operation != "sdpa" or "start" not in options or not isinstance(value, mx.array):
        return value
    T = q.shape[2]
    query = options["length"] - T + mx.arange(T)
    padding = (query < options["start"].reshape(-1, 1))[:, None, :, None]
    return mx.where(padding & mx.isfinite(value), mx.zeros_like(value), value)


def _given(options: dict[str, Any]) -> str:
    """The arguments of a call of attention that change what is computed."""
    names = [name for name in ("start", "tail", "gate") if name in options]
    mask, length = options["mask"], options["length"]
    shown = "an array" if isinstance(mask, mx.array) else mask
    on_device = ["length on the device"] if isinstance(length, mx.array) else []
    return ", ".join([f"mask {shown}", *names, *on_device])


def example(
    operation: str,
    dtype: mx.Dtype = mx.float32,
    *,
    form: str | None = None,
    tokens: int | None = None,
) -> Arguments:
    """Return positional and keyword arguments; activations and weights in `dtype`. form: The
    implementation that takes them. tokens: Another number of them than the example's own."""
    tokens = TOKENS.get(operation, T) if tokens is None else tokens
    args, options = EXAMPLES[operation](TINY, tokens, _normal(dtype))
    if form == "blas":
        options.pop("start", None)  # which BLAS refuses
    return args, options
