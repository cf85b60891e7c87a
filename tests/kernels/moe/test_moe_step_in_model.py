"""Oracle: the same model with the launches of a MoE block apart, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models.moe import SharedExpertMoeBlock
from tests.kernels.harness import launched
from tests.kernels.implementations import IMPLEMENTATIONS

APART = "auto,moe_step=reference"


def logits(
    kernels: str, memory: str, *, traced: bool | None = None, **options: Any
) -> list[np.ndarray]:
    """Of a short prompt and of two tokens after it. traced: Steps run from a trace."""
    with load_model(BUNDLED_MODEL, kernels=kernels, expert_memory=memory, **options) as model:
        model.compile_steps = traced
        cache = model.make_cache()
        calls = [model(mx.array([ids]), cache) for ids in ([5, 6, 7], [9], [8])]
        found = [np.array(y.astype(mx.float32)) for y in calls]
        assert {s.tokens for s in model.store.stats().layers.values()} == {5}
        return found


@pytest.fixture
def fused_calls(monkeypatch):
    """How often the fused implementation was called."""
    calls, fused = [], IMPLEMENTATIONS["moe_step"]["fused"]

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return fused(*args, **kwargs)

    monkeypatch.setitem(IMPLEMENTATIONS["moe_step"], "fused", replace(fused, function=counted))
    return calls


@pytest.mark.usefixtures("device_of_a_model")
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["100%", "50%"])
def test_the_same_bits(memory, fused_calls):
    apart = logits(APART, memory)
    assert not fused_calls
    for a, b in zip(logits("auto", memory), apart, strict=True):
        assert np.isfinite(a).all()
        assert np.array_equal(a, b)
    # A layer that may have to read its experts goes the long way.
    assert bool(fused_calls) == (memory == "100%")


@pytest.mark.slow
@pytest.mark.usefixtures("device_of_a_model")
@pytest.mark.parametrize("memory", ["100%", "50%"])
def test_a_rank_computes_its_own_experts(memory, fused_calls):
    """The only rank has all, so that its part and the end are the whole."""
    alone = logits("auto", memory)
    fused_calls.clear()
    mx.disable_compile()  # the emulator needs values
    try:
        with launched() as kernels:
            mine = logits("auto", memory, distributed=mx.distributed.init(), traced=True)
    finally:
        mx.enable_compile()
    for a, b in zip(mine, alone, strict=True):
        assert np.array_equal(a, b)
    assert bool(fused_calls) == (memory == "100%")
    assert ("expert_total" in kernels) == (memory == "50%")


@pytest.mark.slow
@pytest.mark.usefixtures("device_of_a_model")
def test_it_steps_aside(fused_calls):
    """For who looks inside, chooses a step's implementation, or changes what a block does."""
    tokens = mx.array([[5, 6]])
    with load_model(BUNDLED_MODEL) as model:
        with model.record(layers=[0], names=["ids"]) as seen:
            mx.eval(model(tokens))
        assert seen[0]["ids"].shape == (2, 4)
        assert len(fused_calls) == len(model.layers) - 1
        fused_calls.clear()

        class Other(SharedExpertMoeBlock):
            """Adds nothing but might."""

        model.layers[1].mlp.__class__ = Other
        mx.eval(model(tokens))
        assert len(fused_calls) == len(model.layers) - 1
        fused_calls.clear()
        model._router.kernels = model.kernels
        model._router.__class__ = type("Mine", (type(model._router),), {})
        mx.eval(model(tokens))
        assert not fused_calls
    for chosen in ("softmax_top_k=reference", "expert_mix=grouped", "project=reference"):
        with load_model(BUNDLED_MODEL, kernels=f"auto,{chosen}") as model:
            mx.eval(model(tokens))
    assert not fused_calls
