"""The ends of arrays in one, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import collect as module
from mlx_moeflux.kernels.collect import collect, collect_fused
from tests.kernels.harness import Case, emulated

# arrays, their shape, count
SIZES = [
    (1, (16,), 16),
    (3, (4, 34), 8),
    (20, (2, 40), 48),
    (45, (8, 18), 16),
    (131, (2, 5), 3),
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


@pytest.mark.parametrize(("backend", "launches"), [("metal", 7), ("cuda", 2)])
def test_as_many_in_a_launch_as_a_back_end_takes(backend, launches, monkeypatch):
    sizes, kernel, names = SIZES[-1], module._kernel, []
    monkeypatch.setattr(module, "_kernel", lambda n: names.append(n) or kernel(n))
    bits, parts = arguments(*sizes)
    with emulated(name=backend):
        y = np.array(collect_fused(parts, count=3)).view(np.uint32)
    assert np.array_equal(y, bits.reshape(131, -1)[:, -3:].reshape(-1))
    assert len(names) == launches


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


CASES = {"collect": [case(20, (2, 40), 48), case(20, (3, 9), 9)]}
