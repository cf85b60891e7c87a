"""Models on a Mac whose times a test chooses. Oracle: the same model with another memory for its
experts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion import synthesize
from mlx_moeflux.kernels.verify import verdicts
from mlx_moeflux.loading import load_model
from tests.kernels.harness import on_the_cpu
from tests.kernels.metal import metal_device
from tests.kernels.verify.clock import Clock

PROMPT = mx.array(np.random.default_rng(0).integers(0, 1000, (1, 9)))


@pytest.fixture(autouse=True)
def stock_operations():
    with on_the_cpu():
        yield


# Family -> layers, and the operations of its prompts that are timed.
FAMILIES = {
    "qwen3-tiny": (1, {"norm_rope", "sdpa", "softmax_top_k", "moe_combine"}),
    "qwen3.5-tiny": (4, {"norm_rope", "sdpa", "softmax_top_k"}),
}


# ---- Models


def logits_of(directory, memory, folder, **times):
    """Logits of a prompt and of a step on a Mac, the number of evaluations that it timed, and the
    operations that stock MLX computes. folder: Of choices."""
    with (
        load_model(directory, dtype=mx.bfloat16, expert_memory=memory, fuse=True) as model,
        metal_device.on_metal(folder),
        pytest.MonkeyPatch.context() as patch,
    ):
        clock = Clock(patch, runs=False, **times)
        model.compile_steps = False  # the emulator computes nothing in a trace
        cache = model.make_cache()
        logits = [model(tokens, cache)[:, -1] for tokens in (PROMPT, PROMPT[:, :1])]
        mx.eval(logits)
        chosen = {key.partition("=")[0] for key in verdicts.stock_choices()}
        return mx.stack(logits), len(clock.evaluations), chosen


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f != "qwen3-tiny")) for f in FAMILIES]
)
def test_streamed_and_resident_models_follow_the_same_choice(tmp_path, family):
    """Times of the second process say the opposite."""
    directory, (layers, operations) = tmp_path / "model", FAMILIES[family]
    synthesize.synthesize(family, directory, layers=layers, experts=16)
    resident, timed, chosen = logits_of(
        directory, "100%", tmp_path / "a", kernel=2e-5, reference=1e-5
    )
    assert timed
    assert chosen == operations
    streamed, timed, _ = logits_of(directory, "50%", tmp_path / "a", kernel=1e-5, reference=2e-5)
    assert not timed
    assert mx.array_equal(resident, streamed)
    # A machine on which kernels are faster has other bits, resident and streamed the same.
    kernels, _, chosen = logits_of(directory, "50%", tmp_path / "b", kernel=1e-5, reference=2e-5)
    assert not chosen
    assert not mx.array_equal(kernels, streamed)
    again, timed, _ = logits_of(directory, "100%", tmp_path / "b", kernel=2e-5, reference=1e-5)
    assert not timed
    assert mx.array_equal(kernels, again)
