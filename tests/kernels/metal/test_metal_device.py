"""A prompt and two decode steps of every family on :mod:`tests.kernels.metal.metal_device`, with no
kernel checked before. Oracle: the same model with references on the CPU."""

from __future__ import annotations

import dataclasses
import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion import synthesize
from mlx_moeflux.kernels import dispatch, verdicts
from mlx_moeflux.kernels.registry import IMPLEMENTATIONS
from mlx_moeflux.kernels.runtime.metal import MetalBackend
from mlx_moeflux.loading import load_model
from tests.kernels.harness import error, on_the_cpu
from tests.kernels.metal.metal_device import MetalDevice, on_metal

PROMPT, STEPS = 9, 2
TOKENS = mx.array(np.random.default_rng(0).integers(0, 1000, (1, PROMPT + STEPS)))

# Family -> what makes two layers of it hold every kind.
SHAPES = {
    "qwen3.5-tiny": {"full_attention_interval": 2},
    "deepseek-tiny": {},
    "qwen3-tiny": {},
    "qwen3-next-tiny": {"full_attention_interval": 2},
}
ATTENTION = {"project", "norm_rope", "sdpa", "append_row"}
LATENTS = {"project", "latent_prepare", "latent_attention", "append_row", "head_product"}
RESIDENT, STREAMED = {"moe_step"}, {"softmax_top_k", "expert_mix", "add_shared"}

# Family, memory of its experts, and the operations whose kernels a step launches.
RUNS = {
    "qwen3.5-tiny": ("100%", ATTENTION | RESIDENT | {"delta_mixer"}),
    "qwen3.5-tiny streamed": ("50%", ATTENTION | STREAMED | {"delta_mixer"}),
    "deepseek-tiny": ("100%", LATENTS | {"sigmoid_top_k", "expert_mix", "add_shared"}),
    "qwen3-tiny": ("100%", ATTENTION | RESIDENT),
    "qwen3-next-tiny": ("100%", ATTENTION | RESIDENT | {"delta_mixer"}),
}


@pytest.fixture(autouse=True)
def stock_operations():
    with on_the_cpu():
        yield


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        for family, changes in SHAPES.items():
            shape = dataclasses.replace(synthesize.SHAPES[family], **changes)
            patch.setitem(synthesize.SHAPES, family, shape)
            synthesize.synthesize(family, root / family, layers=2, experts=16)
    return root


@pytest.fixture(params=RUNS)
def run(request, directories):
    """Where a model is, the options to load it as on a GPU, and the operations of a step."""
    memory, operations = RUNS[request.param]
    options = {"expert_memory": memory, "fuse": True}
    return directories / request.param.partition(" ")[0], options, operations


def prompt_of(model):
    """A state behind the prompt, and the prompt's logits."""
    cache = model.make_cache()
    logits = model(TOKENS[:, :PROMPT], cache)
    mx.eval(logits)
    return cache, logits


def steps_of(model, cache) -> list[mx.array]:
    """Logits of one token at a time."""
    return [model(TOKENS[:, i : i + 1], cache) for i in range(PROMPT, PROMPT + STEPS)]


def asked() -> set[tuple[str, str]]:
    """(operation, form) of the trials; each must have been passed."""
    assert not verdicts.refused(), verdicts._known.verdicts
    return {tuple(key.split(" ")[0].split("=")) for key in verdicts._known.verdicts}


def kernels_of(forms: set[tuple[str, str]]) -> set[str]:
    found = (getattr(IMPLEMENTATIONS[op][name], "kernels", ()) for op, name in forms)
    return {kernel.name for kernels in found for kernel in kernels}


def form_of_a_step(operation: str) -> tuple[str, str]:
    return operation, dispatch.pick(dispatch.rows(operation, MetalBackend.name), 1)


def test_only_launches_differ_from_apples_back_end():
    own = {name for name in vars(MetalDevice) if not name.startswith("__")}
    assert own == {"build"}
    assert MetalDevice.follows_device
    assert MetalDevice.checks_first_use


def test_a_step_is_traced_while_its_kernels_are_checked(run, tmp_path):
    directory, options, operations = run
    with (
        load_model(directory, dtype=mx.bfloat16, **options) as model,
        on_metal(tmp_path / "cache") as device,
    ):
        cache, _ = prompt_of(model)
        assert not device.traced
        before = asked()
        logits = steps_of(model, cache)
        # Evaluating what a trace left behind would raise.
        mx.eval(logits, [entry.state for entry in cache])
        # Traced, run for the trials, and traced again with what passed.
        assert model._step.traces + model._segments.traces == 3
        forms = asked()
        # A trace for which everything is known.
        device.traced.clear()
        model._step.forget()
        model._segments.forget()
        mx.eval(model(TOKENS[:, -1:], cache))
        assert model._step.traces + model._segments.traces == 4
        assert asked() == forms
    assert all(y.shape == (1, 1, model.config.vocab_size) for y in logits)
    # A kernel has the name of its text, with a digest behind it where inputs lie in one buffer.
    launched = {re.sub(r"_[0-9a-f]{6}$", "", name) for name in device.traced}
    assert ("append_row", "fused") in forms - before
    for form in map(form_of_a_step, operations):
        assert form in forms
        assert kernels_of({form}) & launched, form
    assert launched <= kernels_of(forms)


@pytest.mark.usefixtures("uncompiled")
def test_checked_kernels_say_what_references_say(run, tmp_path):
    directory, options, _ = run

    def logits(model):
        cache, first = prompt_of(model)
        y = mx.concatenate([first, *steps_of(model, cache)], axis=1)
        mx.eval(y)
        return y

    with load_model(directory, dtype=mx.float32, kernels="reference", **options) as model:
        expected = logits(model)
    with load_model(directory, dtype=mx.float32, **options) as model, on_metal(tmp_path / "cache"):
        actual = logits(model)
        assert model._step.traces + model._segments.traces == STEPS + 2
        assert asked()
    assert error(actual, expected) <= 1e-4 * float(mx.abs(expected).max())
