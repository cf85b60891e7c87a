"""Oracle: two of the bundled model's layers with references on the CPU, for whole calls and token
by token after them."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.loading import load_model
from tests.kernels.harness import on_the_cpu


def logits(
    directory: Path, implementation: str, *, T: int, left: list[int], rest: str = "reference"
) -> list[np.ndarray]:
    """Of a prompt of T columns and of two tokens after it; `left`: padding of each row."""
    rng = np.random.default_rng(T)
    kernels = f"{rest},delta_mixer={implementation}"
    with load_model(directory, dtype=mx.float32, kernels=kernels) as model:
        assert model.kernels.names()["delta_mixer"] == implementation
        tokens = mx.array(rng.integers(0, model.config.vocab_size, (len(left), T + 2)))
        cache = model.make_cache()
        for entry in cache:
            entry.prepare(left_padding=left)
        found = [model(tokens[:, :T], cache=cache)]
        found += [model(tokens[:, t : t + 1], cache=cache) for t in (T, T + 1)]
        return [np.array(a) for a in found]


@pytest.mark.parametrize(("T", "left"), [(3, [0]), (20, [0, 7])])
def test_fused_mixer(two_bundled_layers, device_of_a_model, T, left):
    with on_the_cpu():
        expected = logits(two_bundled_layers, "reference", T=T, left=left)
    # Only the mixer in the emulator, which is slow.
    rest = "auto" if device_of_a_model == "gpu" else "reference"
    actual = logits(two_bundled_layers, "fused", T=T, left=left, rest=rest)
    for a, b in zip(actual, expected, strict=True):
        for row, padding in enumerate(left if a.shape[1] > 1 else [0] * len(left)):
            real = slice(padding, None)
            difference = np.abs(a[row, real] - b[row, real]).max()
            assert difference <= 1e-4 * np.abs(b[row, real]).max()
