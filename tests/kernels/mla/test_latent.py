"""Oracles: numpy in float64; the naive error is stock MLX's. Rows of a tail are NaN elsewhere."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.mla import latent as fused
from mlx_moeflux.kernels.mla.latent import (
    HeadMatrices,
    head_product,
    head_product_dequantised,
    head_product_fused,
    latent_attention,
    latent_prefill,
    latent_prepare,
    latent_prepare_fused,
)
from tests.kernels.attention.test_attention import naive, truth
from tests.kernels.experts import dense, random_array, random_matrix
from tests.kernels.harness import Case, emulated, error, float64, require_gpu

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32


def half(dtype: mx.Dtype, values: np.ndarray) -> float:
    """One rounding of the result is no one's fault."""
    return (3e-7 if dtype == F32 else float(mx.finfo(dtype).eps) / 2) * np.abs(values).max()


# ---- Matrices of heads

# B, H, T, rows of a head's block, first, count, in, bits, group, dtype, transposed
PRODUCTS = [
    (1, 3, 1, 11, 0, 11, 96, 4, 32, F32, False),
    (2, 2, 2, 24, 5, 19, 128, 8, 64, BF16, False),
    (1, 5, 1, 12, 4, 8, 256, 2, 128, F16, False),
    (1, 2, 3, 9, 0, 9, 64, 0, 32, BF16, False),
    (1, 3, 1, 20, 0, 20, 288, 4, 32, F32, True),
    (2, 2, 2, 24, 5, 19, 192, 8, 64, BF16, True),
    (1, 5, 1, 12, 4, 8, 640, 2, 128, F16, True),
    (1, 2, 3, 9, 0, 7, 160, 0, 32, BF16, True),
]


def product(B, H, T, block, first, count, width, bits, group, dtype, transposed):
    """The call's arguments, and what it must give."""
    rng = np.random.default_rng(block + width)
    stored = random_matrix(rng, (H, block, width), bits=bits, group=group, dtype=dtype)
    matrices = HeadMatrices(*stored, first, count)
    x = random_array(rng, (B, H, T, count if transposed else width), dtype)
    exact = dense(matrices)[:, first : first + count]
    exact = exact if transposed else exact.swapaxes(-1, -2)
    return (x, matrices), {"transposed": transposed}, float64(x) @ exact


@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_products_of_heads(device, sizes):
    args, options, wanted = product(*sizes)
    # Dense products of float32 may keep 11 bits on a GPU.
    allowed = 1e-3 * np.abs(wanted).max() if device == "gpu" and sizes[-2] == F32 else 0.0
    with mx.stream(mx.cpu):
        naive_error = error(head_product(*args, **options), wanted)
    limit = max(2 * naive_error, half(sizes[-2], wanted))
    y = head_product_fused(*args, **options)
    assert y.dtype == sizes[-2]
    assert error(y, wanted) <= limit
    # Matrices in the dtype of x are rounded once more, each.
    rounded = limit + 2 * half(sizes[-2], wanted)
    assert error(head_product_dequantised(*args, **options), wanted) <= max(rounded, allowed)


def test_some_heads_and_shared_rows():
    for transposed in (False, True):
        (x, matrices), _, wanted = product(2, 6, 3, 24, 5, 19, 64, 4, 32, F32, transposed)
        for implementation in (head_product, head_product_dequantised, head_product_fused):
            some = HeadMatrices(
                matrices.weight, matrices.scales, matrices.biases, matrices.spec, 5, 19, (2, 5)
            )
            assert (
                error(implementation(x[:, 2:5], some, transposed=transposed), wanted[:, 2:5])
                <= 1e-5
            )
            shared = implementation(x[:, 3:4], some, transposed=transposed)
            assert shared.shape[:3] == (2, 3, 3)
            assert error(shared[:, 1:2], wanted[:, 3:4]) <= 1e-5
        for implementation in (head_product, head_product_dequantised, head_product_fused):
            with pytest.raises(ShapeError, match="expected"):
                implementation(x[..., :8], matrices, transposed=transposed)


# ---- After the projections

# dtype, B, T, H, Dn, Dr, R, interleaved, offset
PREPARED = [
    (F32, 1, 1, 3, 20, 8, 24, True, 5),
    (F32, 2, 3, 11, 132, 68, 40, False, [0, 70]),
    (BF16, 1, 2, 4, 128, 64, 512, True, 900),
]


def prepared(dtype, B, T, H, Dn, Dr, R, interleaved, offset, norm_dtype=None):
    rng = np.random.default_rng(Dn)
    q, kv = random_array(rng, (B, T, H, Dn + Dr), dtype), random_array(rng, (B, T, R + Dr), dtype)
    norm = random_array(rng, (R,), norm_dtype or dtype)
    frequencies = mx.array((1e4 ** (-np.arange(0, Dr, 2) / Dr)).astype(np.float32))
    options = {"norm": norm, "eps": 1e-5, "frequencies": frequencies, "factor": 1.3}
    options["interleaved"] = interleaved
    options["offset"] = offset if isinstance(offset, int) else mx.array(offset)

    def turned(x):  # [B, T, n, Dr]
        first = np.array([offset] * B if isinstance(offset, int) else offset)
        position = (first[:, None] + np.arange(T)).astype(np.float32)[..., None, None]
        # The angle is a product in float32.
        angle = (position * np.array(frequencies)).astype(np.float64)
        even, odd = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (
            slice(0, Dr // 2), slice(Dr // 2, None))  # fmt: skip
        y = np.empty_like(x)
        y[..., even] = 1.3 * (x[..., even] * np.cos(angle) - x[..., odd] * np.sin(angle))
        y[..., odd] = 1.3 * (x[..., odd] * np.cos(angle) + x[..., even] * np.sin(angle))
        return y

    a, b = float64(q), float64(kv)[:, :, None]
    latent = b[..., :R] / np.sqrt((b[..., :R] ** 2).mean(-1, keepdims=True) + 1e-5) * float64(norm)
    wanted = a[..., :Dn], turned(a[..., Dn:]), latent, turned(b[..., R:])
    return (q, kv), options, [x.swapaxes(1, 2) for x in wanted]


PREPARED_CASES = (
    *PREPARED[:2],
    (F32, 2, 2, 8, 8, 64, 32, True, [3, 9]),
    (BF16, 1, 1, 2, 8, 8, 32, True, 3, F32),
    # A latent that is no multiple of four.
    (F32, 1, 2, 1, 4, 4, 38, False, 5),
)


def prepared_case(*sizes, nope):
    args, options, wanted = prepared(*sizes)
    first = 0 if nope else 1
    wanted = wanted[first:]
    limit = max(half(sizes[0], x) for x in wanted) + 2e-6 * max(np.abs(x).max() for x in wanted)
    call = lambda: latent_prepare_fused(*args, **options, nope=nope)[first:]  # noqa: E731
    return Case(str(sizes), call, lambda: wanted, limit)


@pytest.mark.parametrize("nope", [True, False])
@pytest.mark.parametrize("sizes", PREPARED, ids=str)
def test_what_comes_of_the_projections(device, sizes, nope):
    args, options, wanted = prepared(*sizes)
    options["nope"] = nope
    ours, stock = latent_prepare_fused(*args, **options), latent_prepare(*args, **options)
    if not nope:
        assert ours[0] is stock[0] is None
        ours, stock, wanted = ours[1:], stock[1:], wanted[1:]
    for y, naive_y, truth_of in zip(ours, stock, wanted, strict=True):
        assert y.dtype == naive_y.dtype == sizes[0]
        limit = max(2 * error(naive_y, truth_of), half(sizes[0], truth_of))
        assert error(y, truth_of) <= limit
        # Stock MLX rounds x * factor first, in the dtype of x.
        assert error(naive_y, truth_of) <= 4 * half(sizes[0], truth_of) + 1e-5


def test_projections_that_do_not_fit():
    (q, kv), options, _ = prepared(*PREPARED[0])
    for args, changed in (
        ((q[..., :-1], kv), {}),
        ((q, kv[..., :-4]), {}),
        ((q, kv.astype(F16)), {}),
        ((q, kv), {"frequencies": options["frequencies"][:3]}),
    ):
        with pytest.raises(ShapeError), emulated():
            latent_prepare_fused(*args, **options | changed)


# ---- Attention over latents


class Latents:
    """One random call of one query, the newest rows apart, and its truth. loud: times its scores,
    so that the largest rises from tile to tile."""

    def __init__(self, dtype, B, H, capacity, R, P, length, rows, start=None, mask=None, loud=1):
        mx.random.seed(capacity)
        draw = lambda *shape: mx.random.normal(shape).astype(dtype)  # noqa: E731
        q, q2 = loud * draw(B, H, 1, R), loud * draw(B, H, 1, P)
        k, k2 = draw(B, 1, capacity, R), draw(B, 1, capacity, P)
        both = mx.concatenate([q, q2], -1), mx.concatenate([k, k2], -1), k
        given = {"scale": (R + P) ** -0.5, "causal": False, "length": [length] * B}
        given["start"] = start or [0] * B
        self.wanted = truth(*both, **given)
        self.limit = 2 * error(naive(*both, **given), self.wanted)
        first = (length - 1) // rows * rows
        ends, buffers = [], []
        for x in (k, k2):
            whole = np.array(x.astype(F32))
            end = np.full((B, 1, rows, x.shape[3]), np.nan, np.float32)
            end[:, :, : length - first] = whole[:, :, first:length]
            whole[:, :, first:] = np.nan
            ends.append(mx.array(end).astype(dtype))
            buffers.append(mx.array(whole).astype(dtype))
        self.arrays = q, q2, *buffers
        self.options = {"scale": (R + P) ** -0.5, "mask": mask, "tail": tuple(ends)}
        self.options |= {"length": length, "start": None if start is None else mx.array(start)}

    def case(self, name):
        call = lambda: [fused.latent_attention_fused(*self.arrays, **self.options)]  # noqa: E731
        return Case(name, call, lambda: [self.wanted], self.limit)


@pytest.mark.parametrize("start", [None, [0, 40]])
def test_a_tail_of_latents(device, start):
    call = Latents(BF16, 2, 6, 128, 64, 32, 75, 64, start)
    for length in (75, mx.array([75], dtype=mx.int32)):
        y = fused.latent_attention_fused(*call.arrays, **call.options | {"length": length})
        assert error(y, call.wanted) <= call.limit
    for clean in (False, True):
        # The reference reads what nobody wrote, with weight 0: so never NaN there.
        zero = lambda x: mx.where(mx.isnan(x), 0.0, x).astype(BF16)  # noqa: E731
        arrays = map(zero, call.arrays)
        options = call.options | {"tail": tuple(map(zero, call.options["tail"]))}
        options["length"] = mx.array([75], dtype=mx.int32) if clean else 75
        assert error(latent_attention(*arrays, **options), call.wanted) <= call.limit


def test_tails_of_latents_that_cannot_be():
    call = Latents(F32, 1, 4, 128, 64, 32, 65, 64)
    keys, rotary = call.options["tail"]
    for tail in ((keys[:, :, :48], rotary[:, :, :48]), (keys, rotary[..., :16]), (keys, keys)):
        with pytest.raises(ShapeError, match="tail"), emulated():
            fused.latent_attention_fused(*call.arrays, **call.options | {"tail": tail})


FEW = 3 * 80 * (3 * 64 + 32)


@pytest.mark.parametrize(
    ("at_once", "start"),
    [
        (FEW, [0, 40]),
        pytest.param(fused.VALUES_AT_ONCE, None, marks=pytest.mark.slow),
        pytest.param(fused.VALUES_AT_ONCE, [0, 40], marks=pytest.mark.slow),
        pytest.param(FEW, None, marks=pytest.mark.slow),
    ],
)
def test_prefill_over_expanded_heads(device, start, at_once):
    """Against the reference, which never launches; in one stretch of heads or several."""
    assert (fused.heads_at_once(2, 5, 64, 77, at_once) < 5) == (at_once < fused.VALUES_AT_ONCE)
    rng = np.random.default_rng(1)
    draw = lambda *shape: random_array(rng, shape, BF16)  # noqa: E731
    q, q2 = draw(2, 20, 5, 64 + 32), draw(2, 5, 20, 32)
    k, k2 = draw(2, 1, 90, 96), draw(2, 1, 90, 32)
    w_k, w_v = draw(5, 96, 64) * 0.1, draw(5, 96, 64) * 0.1

    def expand(latent, first, last):
        return latent @ w_k[first:last], latent @ w_v[first:last]

    options = {"expand": expand, "scale": 96**-0.5, "mask": "causal", "length": 77}
    options["start"] = None if start is None else mx.array(start)
    wanted = latent_prefill(q, q2, k, k2, **options)
    y = fused.latent_prefill_expanded(q, q2, k, k2, **options, values_at_once=at_once)
    # bfloat16 probabilities and values against float32.
    limit = 2**-7 * float(mx.abs(wanted).max())
    assert error(y, wanted) <= limit


@pytest.mark.gpu
def test_64k_positions_on_a_gpu():
    """DeepSeek-V3's shape: scores of 128 heads, 256 queries and 65536 keys would take 4.3 GB in
    bfloat16, all heads' keys and values 5.4 GB."""
    require_gpu()
    B, H, T, S, R, Dn, Dr = 1, 128, 256, 65536, 512, 128, 64
    mx.random.seed(0)
    draw = lambda *shape: mx.random.normal(shape).astype(BF16)  # noqa: E731
    q, q2, k, k2 = draw(B, T, H, Dn + Dr), draw(B, H, T, Dr), draw(B, 1, S, R), draw(B, 1, S, Dr)
    parts = mx.quantize(0.05 * draw(H, 2 * Dn, R), group_size=64, bits=4)
    matrices = [HeadMatrices(*parts, QuantSpec(4), first, Dn) for first in (0, Dn)]

    def expand(latent, first, last):
        some = [dataclasses.replace(m, heads=(first, last)) for m in matrices]
        return tuple(head_product_dequantised(latent, m) for m in some)

    options = {"length": S, "scale": 192**-0.5, "mask": "causal"}
    mx.eval(q, q2, k, k2, parts)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y = fused.latent_prefill_expanded(q, q2, k, k2, expand=expand, **options)
    mx.eval(y)
    # Keys and values, and matrices that are made dense: all in bfloat16.
    # MLX may give back one stretch of heads after it begins the next: two at most.
    assert mx.get_peak_memory() - before < 2 * 2 * fused.VALUES_AT_ONCE + 0.1e9
    few, nope = (slice(T - 3, T), slice(60, 62)), q[..., :Dn].swapaxes(1, 2)
    heads = lambda c, first, last: expand(c, 60 + first, 60 + last)  # noqa: E731
    some = q[:, few[0], few[1]], q2[:, few[1], few[0]]
    wanted = latent_prefill(*some, k, k2, expand=heads, **options)
    assert error(y[:, few[1], few[0]], wanted) <= 0.02 * float(mx.abs(wanted).max())
    q_latent = head_product_dequantised(nope[:, :, -1:], matrices[0], transposed=True)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y = fused.latent_attention_fused(q_latent, q2[:, :, -1:], k, k2, **options | {"mask": None})
    mx.eval(y)
    assert mx.get_peak_memory() - before < 64e6
    wanted = latent_attention(q_latent, q2[:, :, -1:], k, k2, **options | {"mask": None})
    assert error(y, wanted) <= 0.02 * float(mx.abs(wanted).max())


CASES = {
    "head_matvec": [
        Case(
            str(sizes),
            lambda args=args, options=options: [head_product_fused(*args, **options)],
            lambda wanted=wanted: [wanted],
            max(2 * error(head_product(*args, **options), wanted), half(sizes[-2], wanted)),
        )
        for sizes in (
            (2, 3, 2, 24, 5, 19, 96, 4, 32, F32, False),
            (1, 2, 1, 9, 2, 6, 2112, 4, 32, BF16, False),
        )
        for args, options, wanted in [product(*sizes)]
    ],
    "head_narrow": [
        Case(
            str(sizes),
            lambda args=args, options=options: [head_product_fused(*args, **options)],
            lambda wanted=wanted: [wanted],
            max(2 * error(head_product(*args, **options), wanted), half(sizes[-2], wanted)),
        )
        for sizes in (
            (2, 3, 2, 29, 5, 24, 128, 4, 32, F32, False),
            (1, 2, 1, 139, 2, 136, 64, 0, 32, F32, False),
            (1, 2, 1, 37, 5, 32, 64, 4, 32, F32, False),
        )
        for args, options, wanted in [product(*sizes)]
    ],
    "head_vecmat": [
        Case(
            str(sizes),
            lambda args=args, options=options: [head_product_fused(*args, **options)],
            lambda wanted=wanted: [wanted],
            max(2 * error(head_product(*args, **options), wanted), half(F32, wanted)),
        )
        for sizes in (
            (2, 3, 2, 24, 5, 19, 288, 4, 32, F32, True),
            (1, 2, 1, 12, 0, 9, 160, 0, 32, F32, True),
        )
        for args, options, wanted in [product(*sizes)]
    ],
    "latent_prepare": [prepared_case(*sizes, nope=True) for sizes in PREPARED_CASES],
    "latent_turn": [prepared_case(*sizes, nope=False) for sizes in PREPARED_CASES],
    "attend_shared": [
        Latents(F16, 264, 3, 64, 64, 16, 50, 32, mask="causal").case("one part, causal"),
    ],
    "attend_shared_parts": [
        Latents(BF16, 2, 6, 128, 64, 32, 75, 64, [0, 40]).case("padded left"),
        Latents(F32, 1, 4, 128, 64, 32, 65, 64, mask="causal").case("a tail of one row, causal"),
    ],
}

STEP = "both sides are multiples of the step"
PRODUCT = "a product"
EQUIVALENT = {
    "per_head_matmul.metal": {
        "latent_prepare: off by one < -> + 1 < (2)": STEP,
        "latent_row: off by one < -> <=": "no column is that far right",
        "latent_row: off by one < -> <= (3)": "no column is that far right",
        "latent_row: off by one < -> <= (6)": "no column is that far right",
        "narrow_matvec: swapped parameters 1 and 2 of narrow_steps": PRODUCT,
        "head_vecmat: off by one < -> + 1 <": STEP,
        "head_vecmat: off by one < -> + 1 < (7)": STEP,
        "head_vecmat: swapped arguments 1 and 2 of metal::fma": PRODUCT,
        "head_vecmat: swapped arguments 1 and 2 of metal::fma (2)": PRODUCT,
        "head_vecmat: swapped arguments 1 and 2 of metal::fma (3)": PRODUCT,
    },
    "matvec.metal": {
        "head_matvec: swapped parameters 12 and 13 of norm_matvec": "both are 0",
    },
}
