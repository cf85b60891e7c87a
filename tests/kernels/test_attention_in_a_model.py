"""Oracle: the same model with references; the fused forms run in the emulator."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.kernels.harness import error

REFERENCE, FUSED = "reference", "reference,sdpa=fused,norm_rope=fused"


def logits(kernels, *, padding):
    """A prompt of 9 tokens, then one token, then three, in a batch of two."""
    tokens = mx.array([[7, 3, 9, 4, 5, 6, 2, 11, 8, 1, 12, 13, 14], [5] * 13])
    with load_model(BUNDLED_MODEL, kernels=kernels) as model:
        cache = model.make_cache()
        if padding:
            for entry in cache:
                entry.prepare(left_padding=[0, 3])
        steps = [model(tokens[:, a:b], cache) for a, b in ((0, 9), (9, 10), (10, 13))]
        y = mx.concatenate(steps, axis=1)
        mx.eval(y)
    # Padding columns mean nothing.
    return [y[0], y[1, 3 if padding else 0 :]]


@pytest.mark.parametrize("padding", [False, True])
def test_a_model_says_the_same_with_fused_attention(device, padding):
    reference = logits(REFERENCE, padding=padding)
    fused = logits(FUSED, padding=padding)
    scale = max(float(mx.abs(r).max()) for r in reference)
    # bfloat16 on a GPU, float32 elsewhere; six layers.
    limit = scale * (0.05 if device == "gpu" else 1e-4)
    assert max(map(error, fused, reference)) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("padding", [False, True])
def test_a_model_says_the_same_with_all_kernels(whole_device, padding):
    reference, fused = logits(REFERENCE, padding=padding), logits(None, padding=padding)
    scale = max(float(mx.abs(r).max()) for r in reference)
    limit = scale * (0.05 if whole_device == "gpu" else 1e-4)
    assert max(map(error, fused, reference)) <= limit
