"""Oracle: numpy in float64; the naive error is stock MLX's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.mla.head_product import (
    HeadMatrices,
    head_product,
    head_product_dequantised,
    head_product_fused,
)
from tests.kernels.experts import dense, random_array, random_matrix
from tests.kernels.harness import Case, error, float64

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32


def half(dtype: mx.Dtype, values: np.ndarray) -> float:
    """One rounding of the result is no one's fault."""
    return (3e-7 if dtype == F32 else float(mx.finfo(dtype).eps) / 2) * np.abs(values).max()


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
}

STEP = "both sides are multiples of the step"
PRODUCT = "a product"
EQUIVALENT = {
    "per_head_matmul.metal": {
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
