"""Stock products of float32 that keep TF32's 11 bits, as on NVIDIA and on Apple's M5: the operands
are rounded here, but for the truth of trials. Oracle: what is said where they are not rounded."""

from __future__ import annotations

import contextlib

import mlx.core as mx
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.cli import main
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.operation import REFERENCE
from mlx_moeflux.kernels.registry import OPERATIONS
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.verify import comparison, stock
from mlx_moeflux.measure import machine_report
from mlx_moeflux.measure.benchmark import exact

# MLX multiplies fewer rows than these with vectors, exactly.
ROWS = 13
PRODUCTS = "float32 products of stock MLX"


def rounded(x: mx.array) -> mx.array:
    """The nearest numbers of 11 bits, with float32's exponents."""
    if x.dtype != mx.float32:
        return x
    return mx.bitwise_and(x.view(mx.uint32) + 0x1000, 0xFFFFE000).view(mx.float32)


@pytest.fixture
def in_tf32(monkeypatch):
    """Stock products round their operands."""
    plain, quantised, stream, exactly = mx.matmul, mx.quantized_matmul, mx.stream, []

    def matmul(a, b, **options):
        return plain(a, b, **options) if exactly else plain(rounded(a), rounded(b), **options)

    def quantized_matmul(x, w, scales, biases=None, transpose=True, **layout):
        if exactly or x.dtype != mx.float32 or x.shape[-2] < ROWS:
            return quantised(x, w, scales, biases, transpose=transpose, **layout)
        dense = mx.dequantize(w, scales, biases, **layout).astype(mx.float32)
        return matmul(x, dense.T if transpose else dense)

    @contextlib.contextmanager
    def truth(where):
        exactly.append(where)
        with stream(where):
            yield
        exactly.pop()

    for name, substitute in (
        ("matmul", matmul), ("quantized_matmul", quantized_matmul), ("stream", truth)
    ):  # fmt: skip
        monkeypatch.setattr(mx, name, substitute)
    device._rounds_to_tf32.cache_clear()
    yield
    device._rounds_to_tf32.cache_clear()


def test_float32_is_exact_here():
    assert not device.rounds_to_tf32()
    assert stock.LIMITS[mx.float32] == stock.ROUNDING[mx.float32] < stock.LIMIT_OF_TF32
    assert exact.limit("float32") == 1e-3
    assert machine_report.machine_facts()[PRODUCTS] == "float32"


@pytest.mark.usefixtures("in_tf32")
def test_check_allows_stock_products_their_rounding(capsys):
    assert device.rounds_to_tf32()
    assert main(["check", "--operation", "stock", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("stock MLX rounds float32 products to TF32 here")
    assert "wrong" not in out
    (line,) = (line for line in out.splitlines() if line.startswith("quantized_matmul "))
    assert stock.ROUNDING[mx.float32] < float(line.split()[3]) < stock.LIMITS[mx.float32]


@pytest.mark.usefixtures("in_tf32")
def test_a_trial_of_stock_passes_unless_something_else_is_wrong():
    operation = OPERATIONS["project"]
    reference = operation.implementations[REFERENCE].function
    weight = Weight(*mx.quantize(mx.random.normal((32, 64)), group_size=32), QuantSpec(4, 32))
    call = [mx.random.normal((2 * ROWS, 64)), [weight]], {}
    verdict = comparison.attempt(operation, reference, *call)
    assert verdict.ok
    assert comparison.STOCK_LIMITS[mx.float32] < verdict.error < comparison.LIMIT_OF_TF32
    wrong = comparison.attempt(operation, lambda x, w: [1.01 * y for y in reference(x, w)], *call)
    assert not wrong.ok


@pytest.mark.usefixtures("in_tf32")
def test_reports_and_comparisons_say_so():
    assert machine_report.machine_facts()[PRODUCTS] == "TF32"
    assert exact.limit("float32") == exact.limit("float16") == 1e-2
    assert exact.limit("bfloat16") == exact.LIMITS["bfloat16"]
