"""Oracle: the same model with references on the CPU, in float32 on both sides. What bfloat16 says
on a GPU is in test_greedy_on_gpu.py."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.kernels.harness import emulated, error, on_the_cpu

REFERENCE, FUSED = "reference", "reference,sdpa=fused,norm_rope=fused"


def logits(kernels, *, padding):
    """A prompt of 9 tokens, then one token, then three, in a batch of two."""
    # Of two rows of different tokens: the same again and again makes routers' scores tie.
    tokens = mx.array([[7, 3, 9, 4, 5, 6, 2, 11, 8, 1, 12, 13, 14], list(range(40, 53))])
    with load_model(BUNDLED_MODEL, dtype=mx.float32, kernels=kernels) as model:
        cache = model.make_cache()
        if padding:
            for entry in cache:
                entry.prepare(left_padding=[0, 3])
        steps = [model(tokens[:, a:b], cache) for a, b in ((0, 9), (9, 10), (10, 13))]
        y = mx.concatenate(steps, axis=1)
        mx.eval(y)
    # Padding columns mean nothing.
    return [y[0], y[1, 3 if padding else 0 :]]


def check(kernels, *, padding):
    with on_the_cpu():
        reference = logits(REFERENCE, padding=padding)
    scale = max(float(mx.abs(r).max()) for r in reference)
    assert max(map(error, logits(kernels, padding=padding), reference)) <= 1e-4 * scale


@pytest.mark.slow
@pytest.mark.parametrize("padding", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_says_the_same_with_fused_attention(padding):
    with emulated():
        check(FUSED, padding=padding)


@pytest.mark.slow
@pytest.mark.usefixtures("whole_device")
@pytest.mark.parametrize("padding", [False, True])
def test_a_model_says_the_same_with_all_kernels(padding):
    check(None, padding=padding)
