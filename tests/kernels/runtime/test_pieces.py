import contextlib
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.attention.attention import causal_sdpa
from mlx_moeflux.kernels.linear.project import Dense
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.registry import choose_kernels
from mlx_moeflux.kernels.runtime import pieces as module
from mlx_moeflux.kernels.runtime.pieces import MOST_OPERATIONS, UNIT_ROWS, pieces
from mlx_moeflux.kernels.verify import trials
from mlx_moeflux.models.layers import ScaledLinear, weights_of
from tests.kernels.harness import emulated, error, on_the_cpu, patched
from tests.kernels.metal.metal_device import on_metal

# So many rows have the operations of one launch.
LARGEST = (1, 20, 63, 64, 127, 128, 151, 1000, 5000)


@pytest.mark.parametrize("unit", [None, 1, 16])
@pytest.mark.parametrize("most", LARGEST)
@pytest.mark.parametrize("rows", [1, 31, 64, 65, 127, 129, 191, 2047, 2048, 100_001])
def test_pieces_are_all_rows_in_order_and_neither_small_nor_too_large(rows, most, unit):
    with emulated():
        parts = pieces(rows, MOST_OPERATIONS // most, unit)
    assert (parts[0].start, parts[-1].stop) == (0, rows)
    assert all(a.stop == b.start for a, b in pairwise(parts))
    sizes, unit = [part.stop - part.start for part in parts], unit or UNIT_ROWS
    if rows <= most:
        assert sizes == [rows]
        return
    assert all(size % unit == 0 for size in sizes[:-1])
    assert len(sizes) == 1 or 2 * min(sizes) >= unit
    # The last one may have some rows more than fit.
    most = max(most // unit, 1) * unit
    assert max(sizes[:-1], default=0) <= most
    assert 2 * (sizes[-1] - most) < unit
    assert max(sizes) - min(sizes) < 2 * unit


def test_nothing_is_cut_on_cuda_and_on_a_cpu():
    assert len(pieces(100_000, MOST_OPERATIONS)) == 1
    with emulated(name="cuda"):
        assert len(pieces(100_000, MOST_OPERATIONS)) == 1
    with emulated():
        assert len(pieces(100_000, MOST_OPERATIONS)) == -(-100_000 // UNIT_ROWS)


@contextlib.contextmanager
def products():
    """Shapes of what is multiplied meanwhile."""
    shapes = []

    def watched(function):
        def call(x, *args, **kwargs):
            shapes.append(x.shape)
            return function(x, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.array, "__matmul__", watched(mx.array.__matmul__))
        for where, name in (
            (mx, "quantized_matmul"),
            (mx.fast, "scaled_dot_product_attention"),
        ):
            patch.setattr(where, name, watched(getattr(where, name)))
        yield shapes


@pytest.mark.parametrize(("letter", "times"), [("g", 1), ("p", 1), ("s", 3), ("d", 6), ("", 1)])
def test_a_larger_gpu_has_larger_pieces(letter, times, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    info = {"architecture": f"applegpu_g13{letter}"} if letter else {}
    monkeypatch.setattr(mx, "device_info", lambda device=None: info)
    with emulated():
        assert len(pieces(64 * 6 * 10, MOST_OPERATIONS // 64)) == 60 // times
        assert len(pieces(64 * 3, MOST_OPERATIONS // 64)) == -(-3 // times)


def cut(**values):
    """On Metal, with so few operations that small calls are cut."""
    return patched(module, **values)


def matrices():
    w, spec = mx.random.normal((40, 64)), QuantSpec(4, 32)
    quantised = Weight(*mx.quantize(w, 32, 4), spec)
    linear = nn.QuantizedLinear(64, 40, bias=False, group_size=16, bits=4, mode="nvfp4")
    scaled = ScaledLinear.of(linear)
    scaled.global_scale = mx.array([0.37])
    return {
        "dense": Weight(w).matmul,
        "precise": Weight(w, precise=True).matmul,
        "quantised": quantised.matmul,
        "several results": Weight(*mx.quantize(w, 32, 4), spec, outs=(8, 32)).matmul,
        "made dense": Dense(quantised, 0, 40, 1 << 20).matmul,
        "nvfp4": scaled,
    }


PRODUCTS = ("dense", "precise", "quantised", "several results", "made dense", "nvfp4")


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_pieces(name):
    mx.random.seed(3)
    x, product = mx.random.normal((3, 67, 64)), matrices()[name]
    whole = product(x)
    with emulated(), cut(MOST_OPERATIONS=2 * 64 * 40 * 64), products() as shapes:
        got = product(x)
    assert shapes == [(64, 64), (64, 64), (73, 64)]
    assert got.shape == whole.shape
    assert got.dtype == whole.dtype
    assert error(got, whole) < 1e-6
    # The CPU's own products of floats depend on the number of rows.
    if name not in ("dense", "precise", "made dense"):
        assert mx.array_equal(got, whole)


def visible(T, S):
    return mx.random.uniform(shape=(2, 1, T, S)) < 0.6


@pytest.mark.parametrize("mask", ["causal", None, "an array", "start", "sinks", "gate"])
def test_stock_attention_in_pieces(mask):
    mx.random.seed(5)
    B, Hq, Hkv, T, S, D = 2, 4, 2, 133, 170, 32
    q, k, v = (mx.random.normal((B, H, n, D)) for H, n in ((Hq, T), (Hkv, S), (Hkv, S)))
    options = {"scale": 0.2, "mask": "causal", "length": 160}
    options |= {
        "an array": {"mask": visible(T, 160)},
        None: {"mask": None},
        "start": {"start": mx.array([0, 50])},
        "sinks": {"sinks": mx.random.normal((Hq,))},
        "gate": {"gate": mx.random.normal((B, T, Hq, D))},
    }.get(mask, {})
    whole = causal_sdpa(q, k, v, **options)
    with emulated(), cut(MOST_OPERATIONS=2 * B * Hq * 160 * 2 * D * 64), products() as shapes:
        got = causal_sdpa(q, k, v, **options)
    assert [shape[2] for shape in shapes] == [64, 69]
    assert error(got, whole) < 2e-6


def test_a_gradient_goes_through_pieces():
    x, w = mx.random.normal((200, 64)), Weight(mx.random.normal((40, 64)))
    grad = mx.grad(lambda x: (w.matmul(x) ** 2).sum())
    whole = grad(x)
    with emulated(), cut(MOST_OPERATIONS=2 * 64 * 40 * 64):
        assert error(grad(x), whole) < 1e-6


class Adapter(nn.Module):
    """As mlx-lm's: a linear layer and what is added to it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def __call__(self, x):
        return self.linear(x) + x[:, :1]


@pytest.mark.parametrize("kind", ["bias", "quantised bias", "adapter"])
def test_products_of_modules_that_stand_in_for_a_matrix(kind):
    linear = nn.Linear(64, 40, bias=kind != "adapter")
    module = {"bias": linear, "adapter": Adapter(linear)}.get(kind)
    module = module or nn.QuantizedLinear.from_linear(linear)
    (weight,), x = weights_of(module), mx.random.normal((130, 64))
    whole = weight.matmul(x)
    calls, call = [], type(module).__call__
    with emulated(), cut(MOST_OPERATIONS=2 * 64 * 40 * 64), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(module), "__call__", lambda self, x: calls.append(len(x)) or call(self, x)
        )
        got = weight.matmul(x)
    assert calls == [64, 66]
    assert error(got, whole) < 1e-6


def test_a_call_in_pieces_is_tried_as_one(tmp_path, monkeypatch):
    """On Metal, where nothing runs before its trial, pieces are the variant of the whole call."""
    tried, attempt = [], trials.attempt

    def watched(operation, *args):
        tried.append(operation.name)
        return attempt(operation, *args)

    monkeypatch.setattr(trials, "attempt", watched)
    q, k, v = (mx.random.normal((1, H, n, 256)) for H, n in ((2, 100), (1, 110), (1, 110)))
    with on_the_cpu(), on_metal(tmp_path):
        sdpa = choose_kernels().sdpa
        whole = sdpa(q, k, v, scale=0.1, mask="causal", length=105)
        mx.eval(whole)
        with cut(MOST_OPERATIONS=1):
            got = sdpa(q, k, v, scale=0.1, mask="causal", length=105)
            mx.eval(got)
    assert tried == ["sdpa"]
    assert error(got, whole) < 1e-6
