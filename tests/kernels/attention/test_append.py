"""A row in a block of rows, against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention.append import append_row, append_row_fused
from tests.kernels.harness import Case, emulated, float64

# dtype, B, H, R, Dk, Dv, position, rows
SIZES = [
    (mx.float32, 2, 3, 16, 24, 8, 35, 1),
    (mx.bfloat16, 1, 2, 64, 64, 96, 63, 1),
    (mx.float16, 3, 1, 32, 40, 64, 64, 1),
    (mx.bfloat16, 1, 3, 32, 64, 40, 61, 3),
    (mx.float32, 2, 2, 16, 8, 16, 46, 4),
]


def arguments(dtype, B, H, R, Dk, Dv, position, count):
    mx.random.seed(position)
    draw = lambda *shape: mx.random.normal(shape).astype(dtype)  # noqa: E731
    tail, n = (draw(B, H, R, Dk), draw(B, H, R, Dv)), B * count
    rows = draw(n, H, 1, Dk), draw(n, H, 1, Dv)
    expected = [float64(block).copy() for block in tail]
    for block, row in zip(expected, rows, strict=True):
        for i in range(n):
            block[i // count, :, (position + i % count) % R] = float64(row)[i, :, 0]
    return (tail, *rows), {"position": mx.array([position], dtype=mx.int32)}, expected


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_only_the_rows_change(device, sizes):
    args, options, expected = arguments(*sizes)
    for implementation in (append_row, append_row_fused):
        for block, truth in zip(implementation(*args, **options), expected, strict=True):
            assert block.dtype == sizes[0]
            assert np.array_equal(float64(block), truth)


def test_wrong_arguments():
    (tail, k, v), options, _ = arguments(*SIZES[0])
    for wrong in (
        (tail, k[:1], v),
        (tail, k, v[..., :4]),
        (tail, k.astype(mx.float16), v),
        ((tail[0], tail[1][:, :, :8]), k, v),
    ):
        with pytest.raises(ShapeError), emulated():
            append_row_fused(*wrong, **options)


def case(sizes):
    args, options, expected = arguments(*sizes)
    return Case(str(sizes), lambda: append_row_fused(*args, **options), lambda: expected, 0.0)


CASES = {"append_row": [case(SIZES[0]), case(SIZES[2]), case(SIZES[4])]}
