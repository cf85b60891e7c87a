"""Norm and matrices in one launch against float64; the naive error is stock MLX's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.norm_matvec import Weight, norm_matvec, norm_matvec_fused
from tests.kernels.experts import dense, random_array, random_matrix
from tests.kernels.harness import error, float64

EPS = 1e-5
# tokens, C, (rows, bits, group) of each matrix, dtype
CASES = [
    (1, 96, [(5, 4, 32), (8, 8, 32), (3, 2, 32), (1, 0, 32)], mx.float32),
    (
        1,
        256,
        [(7, 2, 128), (6, 4, 64), (1, 8, 128), (2, 0, 32), (9, 4, 32), (4, 8, 64)],
        mx.float16,
    ),
    (3, 160, [(6, 4, 32)], mx.bfloat16),
    (2, 2048, [(2, 4, 64), (2, 8, 64)], mx.bfloat16),
    (4, 64, [(6, 8, 64), (7, 4, 32)], mx.float32),
    (4, 128, [(33, 0, 32)], mx.float16),
]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("sizes", CASES, ids=lambda sizes: "-".join(map(str, sizes[:3])))
def test_agrees_with_float64(device, sizes, with_norm, residual):
    tokens, C, parts, dtype = sizes
    rng = np.random.default_rng(C + tokens)
    parts = parts[:1] if residual else parts
    weights = [
        Weight(*random_matrix(rng, (out, C), bits=bits, group=group, dtype=dtype))
        for out, bits, group in parts
    ]
    x = random_array(rng, (tokens, C), dtype)
    norm = random_array(rng, (C,), dtype) if with_norm else None
    added = random_array(rng, (tokens, parts[0][0]), dtype) if residual else None
    outputs = norm_matvec_fused(x, weights, norm=norm, eps=EPS, residual=added)

    rows = float64(x)
    if with_norm:
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS) * float64(norm)
    truths = [rows @ dense(weight).T + (float64(added) if residual else 0) for weight in weights]
    references = norm_matvec(x, weights, norm=norm, eps=EPS, residual=added)
    assert len(outputs) == len(weights)
    for y, truth, reference in zip(outputs, truths, references, strict=True):
        assert y.dtype == dtype
        # One rounding of the result is no one's fault.
        floor = np.abs(truth).max() * {mx.float32: 3e-7}.get(dtype, float(mx.finfo(dtype).eps) / 2)
        assert error(y, truth) <= max(2 * error(reference, truth), floor)


def test_tokens_together_or_apart_give_the_same_bits(device):
    rng = np.random.default_rng(0)
    weight = Weight(*random_matrix(rng, (6, 128), bits=4, group=64, dtype=mx.bfloat16))
    x, norm = random_array(rng, (4, 128), mx.bfloat16), random_array(rng, (128,), mx.bfloat16)
    pairs = [norm_matvec_fused(x[i : i + 2], [weight], norm=norm)[0] for i in (0, 2)]
    assert mx.array_equal(
        norm_matvec_fused(x, [weight], norm=norm)[0], mx.concatenate(pairs)
    ).item()


def test_wrong_arguments():
    rng = np.random.default_rng(0)
    weight = Weight(*random_matrix(rng, (6, 64), bits=4, group=64, dtype=mx.float32))
    x = random_array(rng, (2, 64), mx.float32)
    for call in (
        lambda: norm_matvec_fused(mx.zeros((5, 64)), [weight]),
        lambda: norm_matvec_fused(x, [weight] * 7),
        lambda: norm_matvec_fused(x, []),
        lambda: norm_matvec_fused(x[:, :32], [weight]),
        lambda: norm_matvec_fused(x, [weight], norm=mx.ones((32,))),
        lambda: norm_matvec_fused(x, [weight], residual=x),
        lambda: norm_matvec_fused(x, [weight, weight], residual=x[:, :6]),
    ):
        with pytest.raises(ShapeError):
            call()
