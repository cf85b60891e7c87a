"""Oracle: numpy in float64; the naive error is stock MLX's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.mla.latent_prepare import latent_prepare, latent_prepare_fused
from tests.kernels.experts import random_array
from tests.kernels.harness import Case, emulated, error, float64
from tests.kernels.mla.test_head_product import half

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32
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


CASES = {
    "latent_prepare": [prepared_case(*sizes, nope=True) for sizes in PREPARED_CASES],
    "latent_turn": [prepared_case(*sizes, nope=False) for sizes in PREPARED_CASES],
}

STEP = "both sides are multiples of the step"
EQUIVALENT = {
    "per_head_matmul.metal": {
        "latent_prepare: off by one < -> + 1 < (2)": STEP,
        "latent_row: off by one < -> <=": "no column is that far right",
        "latent_row: off by one < -> <= (3)": "no column is that far right",
        "latent_row: off by one < -> <= (6)": "no column is that far right",
    },
}
