"""Oracle: NumPy in float64, for every stock operation that references are made of."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.kernels.verify import stock
from tests.kernels.harness import require_gpu


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    if request.param == "gpu":
        require_gpu()
    return request.param


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[pytest.mark.slow] * (dtype == mx.float16))
        for dtype in stock.DTYPES
    ],
    ids=str,
)
def test_stock_operations_are_right_and_users_keep_their_random_numbers(dtype):
    mx.random.seed(3)
    users = mx.random.uniform(shape=(4,))
    mx.random.seed(3)
    found = stock.worst(dtype)
    assert mx.array_equal(mx.random.uniform(shape=(4,)), users)
    expected = {"gather_qmm", "rope", "matmul"} | ({"gather_mm"} if dtype == mx.float32 else set())
    assert {entry.operation for entry in found} >= expected
    assert [entry for entry in found if not entry.error <= stock.LIMITS[dtype]] == []


def flipped(x, w, **options):
    """Takes neighbouring rows for each other."""
    return TRUE_GATHER(x[::-1], w, **options)


def holed(x, *_, **__):
    """One element is not a number."""
    return mx.where(mx.arange(x.size).reshape(x.shape) == 0, mx.nan, x)


TRUE_GATHER = mx.gather_mm


@pytest.mark.parametrize(
    ("module", "name", "broken", "operation"),
    [
        pytest.param(mx, "gather_mm", flipped, "gather_mm", marks=pytest.mark.slow),
        pytest.param(mx, "sort", holed, "sort", marks=pytest.mark.slow),
        pytest.param(
            *(mx.fast, "rms_norm", lambda x, w, eps: x, "rms_norm"), marks=pytest.mark.slow
        ),
        pytest.param(
            *(mx, "argsort", lambda x, axis: mx.zeros(x.shape, mx.uint32), "argsort"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_operation_is_found(monkeypatch, module, name, broken, operation):
    monkeypatch.setattr(module, name, broken)
    wrong = {e.operation for e in stock.worst(mx.float32) if not e.error <= 1e-3}
    assert wrong == {operation}


def test_one_operation_fails_and_another_is_wrong(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(mx.fast, "rope", refuse)
    monkeypatch.setattr(mx, "gather_mm", flipped)
    found = stock.worst(mx.float32)
    assert {e.operation for e in found if not e.error <= 1e-3} == {"rope", "gather_mm"}
    (failed,) = (e for e in found if e.reason)
    assert (failed.operation, failed.reason) == ("rope", "no kernel for this")


def test_numbers_are_decoded_as_published():
    """Three bits of a number may lie in two bytes."""
    spec = stock.QuantSpec(3, 32)
    parts, truth = stock._quantised_matrix(stock._Draw(mx.float32), spec, 5, 96)
    assert np.abs(stock.float64(mx.dequantize(*parts, group_size=32, bits=3)) - truth).max() < 1e-6
