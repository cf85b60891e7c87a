"""The ends of arrays in one, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.collect import MOST_ARRAYS, collect, collect_fused
from tests.kernels.harness import Case, emulated

# arrays, their shape, count
SIZES = [
    (1, (16,), 16),
    (3, (4, 34), 8),
    (MOST_ARRAYS, (2, 40), 48),
    (2 * MOST_ARRAYS + 5, (8, 18), 16),
]


def arguments(arrays: int, shape: tuple[int, ...], count: int):
    """Any bits, NaNs and subnormals among them."""
    bits = np.random.default_rng(arrays).integers(0, 2**32, (arrays, *shape), dtype=np.uint32)
    return bits, [mx.array(part).view(mx.float32) for part in bits]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_bit_arrives(device, sizes):
    arrays, _, count = sizes
    bits, parts = arguments(*sizes)
    expected = bits.reshape(arrays, -1)[:, -count:].reshape(-1)
    for form in (collect, collect_fused):
        y = form(parts, count=count)
        assert y.dtype == mx.float32
        assert np.array_equal(np.array(y).view(np.uint32), expected)


def test_wrong_arguments():
    a, b = mx.ones((3, 8)), mx.ones((4, 8))
    for arrays, count in (([a, b], 2), ([a, a.astype(mx.float16)], 2), ([a], 25), ([a], 0)):
        with pytest.raises(ShapeError), emulated():
            collect_fused(arrays, count=count)


def case(arrays: int, shape: tuple[int, ...], count: int):
    numbers = np.random.default_rng(count).normal(size=(arrays, *shape)).astype(np.float32)
    expected = [numbers.reshape(arrays, -1)[:, -count:].reshape(-1)]
    parts = [mx.array(part) for part in numbers]
    return Case(
        f"{arrays}-{count}", lambda: [collect_fused(parts, count=count)], lambda: expected, 0.0
    )


CASES = {"collect": [case(MOST_ARRAYS, (2, 40), 48), case(MOST_ARRAYS, (3, 9), 9)]}
