"""Oracle: the same model with references on the CPU in float32; the fused forms run in the
emulator, or with all the others on a GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux.loading import load_model
from mlx_moeflux.models.mla import LatentAttention
from mlx_moeflux.synthesize import synthesize
from tests.kernels.harness import error
from tests.models.twins import GOLDEN

FUSED = "reference," + ",".join(
    f"{name}=fused" for name in ("latent_attention", "latent_prepare", "head_product")
)
# Matrices that are not quantised: MLX compiles its quantised products on a GPU with headers that
# may be missing, and what these add is tested operation by operation.
TWIN = GOLDEN / "deepseek_v3_yarn40"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    return synthesize("deepseek-tiny", tmp_path_factory.mktemp("model") / "deepseek")


def logits(directory, kernels, *, padding, traced=False, **options):
    """A prompt of 9 tokens, two single ones, then three, in a batch of two."""
    tokens = mx.array([[7, 3, 9, 4, 5, 6, 2, 11, 8, 1, 2, 12, 13, 14], list(range(40, 54))])
    with load_model(directory, kernels=kernels, **options) as model:
        model.compile_steps = traced
        cache = model.make_cache()
        if padding:
            for entry in cache:
                entry.prepare(left_padding=[0, 3])
        steps = [model(tokens[:, a:b], cache) for a, b in ((0, 9), (9, 10), (10, 11), (11, 14))]
        y = mx.concatenate(steps, axis=1)
        mx.eval(y)
    # Padding columns mean nothing.
    return [y[0], y[1, 3 if padding else 0 :]]


def on_the_cpu(directory, **options):
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        return logits(directory, "reference", dtype=mx.float32, **options)
    finally:
        mx.set_default_device(device)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("absorbed", [True, False])
def test_a_model_says_the_same_with_fused_forms(device, quantised, monkeypatch, padding, absorbed):
    directory = TWIN if device == "gpu" else quantised
    reference = on_the_cpu(directory, padding=padding)
    kernels = FUSED
    if not absorbed:
        monkeypatch.setattr(LatentAttention, "absorbs", lambda self, T: T == 1)
        kernels += ",latent_prefill=expanded"
    # The emulator cannot be traced.
    options = {"traced": absorbed and device == "gpu", "padding": padding}
    fused = logits(directory, None if device == "gpu" else kernels, **options)
    scale = max(float(mx.abs(r).max()) for r in reference)
    # bfloat16 on a GPU, float32 elsewhere.
    limit = scale * (0.05 if device == "gpu" else 1e-4)
    assert max(map(error, fused, reference)) <= limit
