"""A prompt and two decode steps of every family on :mod:`tests.kernels.metal.metal_device`, with no
kernel checked before. Oracle: the same model with references on the CPU."""

from __future__ import annotations

import dataclasses
import gc
import warnings

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import AttentionCache
from mlx_moeflux.conversion import synthesize
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.runtime import device, views
from mlx_moeflux.kernels.runtime.launcher import MetalBackend
from mlx_moeflux.kernels.verify import trials, verdicts
from mlx_moeflux.loading import load_model
from tests.kernels.cases import all_cases
from tests.kernels.harness import error, on_the_cpu
from tests.kernels.implementations import IMPLEMENTATIONS
from tests.kernels.metal.metal_device import MetalDevice, on_metal
from tests.kernels.metal.variant import plain_name

PROMPT, STEPS = 9, 2
TOKENS = mx.array(np.random.default_rng(0).integers(0, 1000, (1, PROMPT + STEPS)))

# Family -> what makes two layers of it hold every kind.
SHAPES = {
    "qwen3.5-tiny": {"full_attention_interval": 2},
    "deepseek-tiny": {},
    "glm-5-tiny": {"indexer_types": ("full", "shared"), "num_attention_heads": 16},
    "qwen3-tiny": {},
    "qwen3-next-tiny": {"full_attention_interval": 2},
    "gpt-oss-tiny": {"sliding_window": 8},
    "gemma-4-tiny": {"sliding_window": 8},
    "laguna-tiny": {"sliding_window": 8},
    "qwen4-exp-tiny": {"full_attention_interval": 2, "ple_layer_ids": (1,)},
}
ATTENTION = {"project", "norm_rope", "sdpa", "append_row"}
LATENTS = {"project", "latent_prepare", "latent_attention", "append_row", "head_product"}
CHOSEN = LATENTS - {"latent_attention"} | {"choose_positions", "chosen_latent_attention"}
RESIDENT, STREAMED = {"moe_step"}, {"softmax_top_k", "expert_mix", "add_shared"}

# Family, memory of its experts, and the operations whose kernels a step launches.
RUNS = {
    "qwen3.5-tiny": ("100%", ATTENTION | RESIDENT | {"delta_mixer"}),
    "qwen3.5-tiny streamed": ("50%", ATTENTION | STREAMED | {"delta_mixer"}),
    "deepseek-tiny": ("100%", LATENTS | {"sigmoid_top_k", "expert_mix", "add_shared"}),
    "glm-5-tiny": ("100%", CHOSEN | {"sigmoid_top_k", "expert_mix", "add_shared"}),
    "glm-5-tiny streamed": ("50%", CHOSEN | {"sigmoid_top_k", "expert_mix", "add_shared"}),
    "qwen3-tiny": ("100%", ATTENTION | RESIDENT),
    "qwen3-next-tiny": ("100%", ATTENTION | RESIDENT | {"delta_mixer"}),
    "gpt-oss-tiny": ("100%", ATTENTION - {"project"} | {"softmax_top_k", "expert_mix"}),
    "gpt-oss-tiny streamed": ("50%", ATTENTION - {"project"} | {"softmax_top_k", "expert_mix"}),
    "gemma-4-tiny": ("100%", ATTENTION | {"softmax_top_k", "expert_mix"}),
    "gemma-4-tiny streamed": ("50%", ATTENTION | {"softmax_top_k", "expert_mix"}),
    "laguna-tiny": ("100%", ATTENTION | {"sigmoid_top_k", "expert_mix", "add_shared"}),
    "qwen4-exp-tiny": ("100%", ATTENTION | STREAMED | {"delta_mixer", "read_streams"}),
}


@pytest.fixture(autouse=True)
def stock_operations():
    with on_the_cpu():
        yield


@pytest.fixture(autouse=True)
def small_views(monkeypatch):
    """Arrays of tiny models have short views too."""
    monkeypatch.setattr(views, "LEAST_ELEMENTS", 16)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        for family, changes in SHAPES.items():
            shape = dataclasses.replace(synthesize.SHAPES[family], **changes)
            patch.setitem(synthesize.SHAPES, family, shape)
            synthesize.synthesize(family, root / family, layers=2, experts=16)
    return root


def by_default(*names):
    """These runs, and the others with -m slow."""
    runs = [pytest.param(r, marks=[pytest.mark.slow] * (r not in names)) for r in RUNS]
    return pytest.mark.parametrize("run", runs, indirect=True)


@pytest.fixture
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
    """(operation, implementation) of the trials; each must have been passed."""
    assert not verdicts.refused(), verdicts._known.verdicts
    return {tuple(key.split(" ")[0].split("=")) for key in verdicts._known.verdicts}


def kernels_of(implementations: set[tuple[str, str]]) -> set[str]:
    found = (IMPLEMENTATIONS[op][name].kernels for op, name in implementations)
    return {kernel.name for kernels in found for kernel in kernels}


def implementation_of_a_step(operation: str) -> tuple[str, str]:
    return operation, dispatch.pick(dispatch.rows(operation, MetalBackend.name), 1)


def test_only_launches_differ_from_apples_back_end():
    own = {name for name in vars(MetalDevice) if not name.startswith("__")}
    assert own == {"build"}
    assert MetalDevice.follows_device
    assert MetalDevice.checks_first_use


@pytest.mark.slow
@by_default("qwen3-tiny")
def test_a_step_is_traced_while_its_kernels_are_checked(run, tmp_path):
    directory, options, operations = run
    with (
        load_model(directory, dtype=mx.bfloat16, **options) as model,
        on_metal(tmp_path / "cache") as gpu,
    ):
        cache, _ = prompt_of(model)
        assert not gpu.traced
        before = asked()
        logits = steps_of(model, cache)
        # Evaluating what a trace left behind would raise.
        mx.eval(logits, [entry.state for entry in cache])
        # Traced, run for the trials, and traced again with what passed.
        assert model.steps.whole.traces + model.steps.segments.traces == 3
        implementations = asked()
        # A trace for which everything is known.
        gpu.traced.clear()
        model.steps.whole.forget()
        model.steps.segments.forget()
        mx.eval(model(TOKENS[:, -1:], cache))
        assert model.steps.whole.traces + model.steps.segments.traces == 4
        assert asked() == implementations
    assert all(y.shape == (1, 1, model.config.vocab_size) for y in logits)
    launched = set(gpu.traced)
    assert ("append_row", "fused") in implementations - before
    for implementation in map(implementation_of_a_step, operations):
        assert implementation in implementations
        assert kernels_of({implementation}) & launched, implementation
    assert launched <= kernels_of(implementations)


LIMIT = 1e-4  # of the largest logit, in float32


def logits_of(model):
    cache, first = prompt_of(model)
    y = mx.concatenate([first, *steps_of(model, cache)], axis=1)
    mx.eval(y)
    return y


@by_default("deepseek-tiny")
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.slow
def test_checked_kernels_say_what_references_say(run, tmp_path):
    directory, options, _ = run

    with load_model(directory, dtype=mx.float32, kernels="reference", **options) as model:
        expected = logits_of(model)
    with load_model(directory, dtype=mx.float32, **options) as model, on_metal(tmp_path / "cache"):
        actual = logits_of(model)
        assert model.steps.whole.traces + model.steps.segments.traces == STEPS + 2
        assert asked()
    assert error(actual, expected) <= LIMIT * float(mx.abs(expected).max())


@by_default("qwen3.5-tiny streamed")
@pytest.mark.usefixtures("uncompiled")
def test_short_views_change_no_bit(run, tmp_path, monkeypatch):
    directory, options, _ = run
    results = []
    with on_metal(tmp_path / "cache"):
        for least in (16, 1 << 40):
            monkeypatch.setattr(views, "LEAST_ELEMENTS", least)
            before = len(views.SHORTS)
            with load_model(directory, dtype=mx.bfloat16, **options) as model:
                assert (len(views.SHORTS) > before) == (least == 16)
                results.append(logits_of(model))
            del model
            gc.collect()
    assert mx.array_equal(*results).item()


# ---- Where caches lie


def places_of(cache) -> dict[tuple[int, int], tuple[tuple[int, ...], int]]:
    """Shape and address of each array with rows, in buffers that nothing else holds."""
    mx.eval([entry._arrays() for entry in cache])

    def place(array):
        return array.shape, device.address_of(device.bytes_of(array))

    entries = [(i, entry) for i, entry in enumerate(cache) if isinstance(entry, AttentionCache)]
    return {(i, j): place(a) for i, entry in entries for j, a in enumerate(entry._arrays())}


def each_moves_only_when_it_grows(model, batch: int) -> None:
    """In 130 steps, in which tails are full twice, and after rewinding."""
    tokens = np.random.default_rng(0).integers(0, 1000, (batch, PROMPT + 130))
    cache = model.make_cache()
    mx.eval(model(mx.array(tokens[:, :PROMPT]), cache))
    before, grown, with_views = places_of(cache), 0, 0
    for i in range(PROMPT, tokens.shape[1]):
        if i % 40 == 0 and cache[0].is_trimmable() and cache[-1].is_trimmable():
            for entry in cache:
                entry.trim(3)
        mx.eval(model(mx.array(tokens[:, i : i + 1]), cache))
        after = places_of(cache)
        for key, (shape, address) in after.items():
            grown += shape != before[key][0]
            assert (shape, address) == before[key] or shape != before[key][0], (i, key)
        before = after
        with_views += any(entry._tail.views for entry in cache if hasattr(entry, "_tail"))
    assert with_views == 130
    assert not grown, "a buffer has 256 rows at first"


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.slow)])
# Stock products of bfloat16 on the CPU may fail a trial, which is another test's concern.
@pytest.mark.filterwarnings("ignore:project=reference is not used")
@by_default("qwen3.5-tiny", "qwen3.5-tiny streamed")
def test_a_cached_array_moves_only_when_it_grows(run, tmp_path, batch):
    directory, options, _ = run
    with load_model(directory, dtype=mx.bfloat16, **options) as model, on_metal(tmp_path / "cache"):
        each_moves_only_when_it_grows(model, batch)
        # Three tokens may need more experts than there are slots, and then no trace is made.
        assert model.steps.whole.traces + model.steps.segments.traces > 0 or batch > 1


@by_default()
@pytest.mark.usefixtures("uncompiled")
def test_without_a_trace_a_cached_array_moves_only_when_it_grows(run, tmp_path):
    directory, options, _ = run
    with load_model(directory, dtype=mx.bfloat16, **options) as model, on_metal(tmp_path / "cache"):
        each_moves_only_when_it_grows(model, 1)


@pytest.mark.slow
def test_every_kernel_of_every_implementation_is_launched(tmp_path):
    implementations = [
        implementation
        for implementations in IMPLEMENTATIONS.values()
        for implementation in implementations.values()
    ]
    names = {kernel.name for implementation in implementations for kernel in implementation.kernels}
    with on_metal(tmp_path) as gpu:
        for cases in all_cases().values():
            cases[0].check()
    assert names
    assert names <= gpu.launched


# ---- Kernels that fail


def each_kernel_broken(run, tmp_path, only=None):
    """A model says the same with each of its kernels broken; the user is told once, and a second
    process is silent."""
    directory, options, _ = run
    with load_model(directory, dtype=mx.float32, kernels="reference", **options) as model:
        expected = logits_of(model)
    limit = LIMIT * float(mx.abs(expected).max())
    with load_model(directory, dtype=mx.float32, **options) as model:
        with on_metal(tmp_path / "whole") as gpu:
            logits_of(model)
            tried = verdicts._known.verdicts.values()
            names = sorted({plain_name(n) for v in tried for n in v.launched.split(", ") if n})
        assert set(names) <= gpu.launched
        for name in names if only is None else names[:: -(-len(names) // only)]:
            for process in (1, 2):
                actual, refused, said = with_broken(model, name, tmp_path / name)
                where = f"{name}, process {process}"
                assert error(actual, expected) <= limit, where
                assert mx.array_equal(actual.argmax(axis=-1), expected.argmax(axis=-1)), where
                # One for each implementation that launches the kernel.
                assert said == (refused if process == 1 else []), where
                assert refused, where


def with_broken(model, name, cache):
    """Logits of a new process in which a kernel does not compile, the implementations that failed
    their trials, and those that the user was warned of."""
    model.steps.forget()
    trials._warned.clear()
    with on_metal(cache) as gpu, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        gpu.broken = frozenset([name])
        logits = logits_of(model)
        refused = {key.split(" ")[0] for key in verdicts.refused()}
    return logits, sorted(refused), sorted(str(w.message).split(" ")[0] for w in warned)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_kernel_that_does_not_compile_changes_no_text(directories, tmp_path):
    memory, operations = RUNS["qwen3.5-tiny streamed"]
    run = directories / "qwen3.5-tiny", {"expert_memory": memory, "fuse": True}, operations
    each_kernel_broken(run, tmp_path, only=3)


@by_default()
@pytest.mark.usefixtures("uncompiled")
def test_each_kernel_of_each_family_may_fail(run, tmp_path):
    each_kernel_broken(run, tmp_path)


@by_default()
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("most", [640, 896, 1024])
def test_no_launch_is_too_large_for_an_apple_gpu(run, tmp_path, most):
    """Threads that an M1, an M2 Ultra and an M4 allow where registers are short."""
    directory, options, _ = run
    with (
        load_model(directory, dtype=mx.bfloat16, **options) as model,
        on_metal(tmp_path / "cache") as gpu,
    ):
        gpu.most = most
        logits_of(model)
        assert gpu.launched
        assert not verdicts.refused()
