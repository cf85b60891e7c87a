"""Oracle: the reference, which never launches."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.mla.head_product import HeadMatrices, head_product_dequantised
from mlx_moeflux.kernels.mla.latent_attention import latent_attention, latent_attention_fused
from mlx_moeflux.kernels.mla.latent_prefill import (
    VALUES_AT_ONCE,
    heads_at_once,
    latent_prefill,
    latent_prefill_expanded,
)
from tests.kernels.experts import random_array
from tests.kernels.harness import error, require_gpu

BF16 = mx.bfloat16
FEW = 3 * 80 * (3 * 64 + 32)


@pytest.mark.parametrize(
    ("at_once", "start"),
    [
        (FEW, [0, 40]),
        pytest.param(VALUES_AT_ONCE, None, marks=pytest.mark.slow),
        pytest.param(VALUES_AT_ONCE, [0, 40], marks=pytest.mark.slow),
        pytest.param(FEW, None, marks=pytest.mark.slow),
    ],
)
def test_prefill_over_expanded_heads(device, start, at_once):
    """Against the reference, which never launches; in one stretch of heads or several."""
    assert (heads_at_once(2, 5, 64, 77, at_once) < 5) == (at_once < VALUES_AT_ONCE)
    rng = np.random.default_rng(1)
    draw = lambda *shape: random_array(rng, shape, BF16)  # noqa: E731
    q, q2 = draw(2, 20, 5, 64 + 32), draw(2, 5, 20, 32)
    k, k2 = draw(2, 1, 90, 96), draw(2, 1, 90, 32)
    w_k, w_v = draw(5, 96, 64) * 0.1, draw(5, 96, 64) * 0.1

    def expand(latent, first, last):
        return latent @ w_k[first:last], latent @ w_v[first:last]

    options = {"expand": expand, "scale": 96**-0.5, "mask": "causal", "length": 77}
    options["start"] = None if start is None else mx.array(start)
    wanted = latent_prefill(q, q2, k, k2, **options)
    y = latent_prefill_expanded(q, q2, k, k2, **options, values_at_once=at_once)
    # bfloat16 probabilities and values against float32.
    limit = 2**-7 * float(mx.abs(wanted).max())
    assert error(y, wanted) <= limit


@pytest.mark.gpu
def test_64k_positions_on_a_gpu():
    """DeepSeek-V3's shape: scores of 128 heads, 256 queries and 65536 keys would take 4.3 GB in
    bfloat16, all heads' keys and values 5.4 GB."""
    require_gpu()
    B, H, T, S, R, Dn, Dr = 1, 128, 256, 65536, 512, 128, 64
    mx.random.seed(0)
    draw = lambda *shape: mx.random.normal(shape).astype(BF16)  # noqa: E731
    q, q2, k, k2 = draw(B, T, H, Dn + Dr), draw(B, H, T, Dr), draw(B, 1, S, R), draw(B, 1, S, Dr)
    parts = mx.quantize(0.05 * draw(H, 2 * Dn, R), group_size=64, bits=4)
    matrices = [HeadMatrices(*parts, QuantSpec(4), first, Dn) for first in (0, Dn)]

    def expand(latent, first, last):
        some = [dataclasses.replace(m, heads=(first, last)) for m in matrices]
        return tuple(head_product_dequantised(latent, m) for m in some)

    options = {"length": S, "scale": 192**-0.5, "mask": "causal"}
    mx.eval(q, q2, k, k2, parts)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y = latent_prefill_expanded(q, q2, k, k2, expand=expand, **options)
    mx.eval(y)
    # Keys and values, and matrices that are made dense: all in bfloat16.
    # MLX may give back one stretch of heads after it begins the next: two at most.
    assert mx.get_peak_memory() - before < 2 * 2 * VALUES_AT_ONCE + 0.1e9
    few, nope = (slice(T - 3, T), slice(60, 62)), q[..., :Dn].swapaxes(1, 2)
    heads = lambda c, first, last: expand(c, 60 + first, 60 + last)  # noqa: E731
    some = q[:, few[0], few[1]], q2[:, few[1], few[0]]
    wanted = latent_prefill(*some, k, k2, expand=heads, **options)
    assert error(y[:, few[1], few[0]], wanted) <= 0.02 * float(mx.abs(wanted).max())
    q_latent = head_product_dequantised(nope[:, :, -1:], matrices[0], transposed=True)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y = latent_attention_fused(q_latent, q2[:, :, -1:], k, k2, **options | {"mask": None})
    mx.eval(y)
    assert mx.get_peak_memory() - before < 64e6
    wanted = latent_attention(q_latent, q2[:, :, -1:], k, k2, **options | {"mask": None})
    assert error(y, wanted) <= 0.02 * float(mx.abs(wanted).max())
