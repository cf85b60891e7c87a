"""Oracle: the formula in float64; and the launches that it replaces, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.mla.head_product import HeadMatrices, head_product, head_product_fused
from mlx_moeflux.kernels.mla.latent_attention import latent_attention, latent_attention_fused
from mlx_moeflux.kernels.mla.latent_values import attend_values, takes_values
from tests.kernels.harness import Case, emulated, error, float64, one_rounding

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
# dtype, B, heads, parts, R, out, first row of a block, bits (0: floats), group
SIZES = [
    (F32, 2, 3, 11, 128, 128, 3, 4, 32),
    (BF16, 1, 2, 43, 256, 64, 0, 8, 64),
    (F16, 1, 4, 5, 64, 64, 1, 0, 32),
    (BF16, 1, 2, 7, 512, 128, 0, 4, 64),
]


def matrices(dtype, heads, R, out, first, bits, group):
    weight = 0.2 * mx.random.normal((heads, first + out + 2, R)).astype(dtype)
    parts = mx.quantize(weight, group_size=group, bits=bits) if bits else (weight, None, None)
    dense = mx.dequantize(*parts, group_size=group, bits=bits) if bits else weight
    spec = QuantSpec(bits, group) if bits else None
    return HeadMatrices(*parts, spec, first, out), float64(dense)[:, first : first + out]


def arguments(dtype, B, heads, parts, R, out, first, bits, group):
    mx.random.seed(R)
    partial = mx.random.normal((B, parts, heads, R))
    tops, totals = (
        5 * mx.random.normal((B, parts, heads)),
        mx.random.uniform(shape=(B, parts, heads)),
    )
    # The last part has by far the largest of one head; another head saw no key.
    tops[:, -1, 0] = tops[:, -1, 0] + 300
    partial[-1, :, -1] = totals[-1, :, -1] = 0
    stats = mx.stack([tops, totals], axis=-1)
    values, dense = matrices(dtype, heads, R, out, first, bits, group)
    share = 2 ** (float64(tops) - float64(tops).max(axis=1, keepdims=True))
    joined = (share[..., None] * float64(partial)).sum(1)
    total = (share * float64(totals)).sum(1)[..., None]
    joined = np.where(total > 0, joined / np.maximum(total, 1e-300), 0)
    wanted = np.einsum("bhr,hor->bho", joined, dense)[:, :, None]
    return (partial, stats, values, dtype), joined, wanted


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_agrees_with_float64(device, sizes):
    args, joined, wanted = arguments(*sizes)
    y = attend_values(*args)
    assert y.dtype == sizes[0]
    # What is joined is rounded once, and the product once.
    limit = one_rounding(wanted, sizes[0]) + 4 * one_rounding(joined, sizes[0])
    assert error(y, wanted) <= max(limit, 3e-6 * np.abs(wanted).max())


def test_as_many_simdgroups_as_cuda_takes():
    with emulated(name="cuda"):
        test_agrees_with_float64("emulator", SIZES[3])


@pytest.mark.parametrize("bits", [pytest.param(4, marks=pytest.mark.slow), 8, 0])
def test_attention_goes_on_with_the_same_bits(device, bits):
    mx.random.seed(bits)
    draw = lambda *shape: mx.random.normal(shape).astype(BF16)  # noqa: E731
    arrays = draw(2, 3, 1, 128), draw(2, 3, 1, 16), draw(2, 1, 320, 128), draw(2, 1, 320, 16)
    values, _ = matrices(BF16, 3, 128, 128, 3, bits, 32)
    for out in (128, 24):
        # Of 24 rows not every simdgroup gets as many: they take a launch of their own.
        own = HeadMatrices(*values.parts(), values.spec, 0, out)
        options = {"length": 300, "scale": 0.1, "mask": None}
        y = latent_attention_fused(*arrays, **options)
        once = latent_attention_fused(*arrays, **options, values=own)
        assert mx.array_equal(once, head_product_fused(y, own)).item()
        reference = head_product(latent_attention(*arrays, **options), own)
        assert mx.array_equal(latent_attention(*arrays, **options, values=own), reference).item()
    assert takes_values(values, 128)


def case(sizes):
    args, _, wanted = arguments(*sizes)
    limit = 3e-6 * np.abs(wanted).max()
    return Case(str(sizes), lambda: [attend_values(*args)], lambda: [wanted], limit)


EQUIVALENT = {
    "latent_values.metal": {
        "attend_values: off by one < -> <= (2)": "a value that nobody reads",
        "attend_values: swapped parameters 1 and 2 of narrow_steps": "a product",
    },
}
CASES = {"attend_values": [case(SIZES[0]), case((F32, 1, 2, 43, 256, 64, 0, 8, 64))]}
