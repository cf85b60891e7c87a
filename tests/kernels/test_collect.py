"""The ends of arrays in one, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import collect as module
from mlx_moeflux.kernels.collect import collect, collect_fused
from tests.kernels.harness import Case, emulated

# arrays, their shape, count, numbers in the log
SIZES = [
    (1, (16,), 16, 16),
    (3, (4, 34), 8, 64),
    (20, (2, 40), 48, 1000),
    (45, (8, 18), 16, 721),
    (131, (2, 5), 3, 400),
]


def arguments(arrays: int, shape: tuple[int, ...], count: int, log: int):
    """Any bits, NaNs and subnormals among them; and those that are wanted."""
    rng = np.random.default_rng(arrays)
    old = rng.integers(0, 2**32, log, dtype=np.uint32)
    bits = rng.integers(0, 2**32, (arrays, *shape), dtype=np.uint32)
    ends = bits.reshape(arrays, -1)[:, -count:].reshape(-1)
    parts = [mx.array(part).view(mx.float32) for part in bits]
    return (mx.array(old).view(mx.float32), parts), np.append(old, ends)[-log:]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_bit_arrives(device, sizes):
    (log, parts), expected = arguments(*sizes)
    for form in (collect, collect_fused):
        y = form(log, parts, count=sizes[2])
        assert y.dtype == mx.float32
        assert np.array_equal(np.array(y).view(np.uint32), expected)


@pytest.mark.parametrize(("backend", "launches"), [("metal", 7), ("cuda", 2)])
def test_as_many_in_a_launch_as_a_back_end_takes(backend, launches, monkeypatch):
    kernel, names = module._kernel, []
    monkeypatch.setattr(module, "_kernel", lambda n: names.append(n) or kernel(n))
    (log, parts), expected = arguments(*SIZES[-1])
    with emulated(name=backend):
        y = np.array(collect_fused(log, parts, count=3)).view(np.uint32)
    assert np.array_equal(y, expected)
    assert len(names) == launches


def test_wrong_arguments():
    a, b, log = mx.ones((3, 8)), mx.ones((4, 8)), mx.ones((24,))
    for old, arrays, count in (
        (log, [a, b], 2),
        (log, [a, a.astype(mx.float16)], 2),
        (log, [a], 25),
        (log, [a], 0),
        (log, [a, a], 13),
        (log.astype(mx.float16), [a], 2),
        (mx.ones((4, 6)), [a], 2),
    ):
        with pytest.raises(ShapeError), emulated():
            collect_fused(old, arrays, count=count)


def case(arrays: int, shape: tuple[int, ...], count: int, log: int):
    rng = np.random.default_rng(count)
    numbers = rng.normal(size=(arrays, *shape)).astype(np.float32)
    old = rng.normal(size=log).astype(np.float32)
    expected = np.append(old, numbers.reshape(arrays, -1)[:, -count:].reshape(-1))[-log:]
    args = mx.array(old), [mx.array(part) for part in numbers]
    return Case(
        f"{arrays}-{count}", lambda: [collect_fused(*args, count=count)], lambda: [expected], 0.0
    )


CASES = {"collect": [case(20, (2, 40), 48, 1200), case(20, (3, 9), 9, 180)]}
