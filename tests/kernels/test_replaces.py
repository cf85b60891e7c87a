"""Fused operations beside operations whose work they do. Oracle: counted calls of a given
callable, on Apple's back end; and logits of references."""

from __future__ import annotations

import functools

import mlx.core as mx
import pytest

from mlx_moeflux.errors import InputError
from mlx_moeflux.generation.batch import Batch
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.registry import OPERATIONS, Kernels, choose_kernels
from mlx_moeflux.kernels.runtime.launcher import MetalBackend, set_backend
from mlx_moeflux.loading import load_model
from tests.kernels.harness import error, on_the_cpu
from tests.kernels.implementations import IMPLEMENTATIONS
from tests.kernels.metal.metal_device import _blank, on_metal

PROMPT, TOKEN = mx.array([[5, 6, 7]]), mx.array([[9]])
REPLACES = {name: record.replaces for name, record in OPERATIONS.items() if record.replaces}
PAIRS = [(fused, one) for fused, replaced in REPLACES.items() for one in replaced]
FAMILIES = {
    "latent_step": "deepseek-tiny",
    "read_streams": "qwen4-exp-tiny",
    "chosen_sdpa": "qwen4-exp-tiny",
    "chosen_latent_attention": "glm-5-tiny",
}


class BlankDevice(MetalBackend):
    """Apple's back end whose launches compute nothing: for what is called, not what it returns."""

    checks_first_use = False

    def build(self, kernel):
        def launch(*, output_shapes, output_dtypes, **options):
            return [_blank(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return launch


@pytest.fixture
def blank_device(monkeypatch):
    before = set_backend(BlankDevice())
    with on_the_cpu():
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        yield
        monkeypatch.undo()
    set_backend(before)


def counted(operation, calls):
    """The reference of an operation, which notes its name."""
    reference = OPERATIONS[operation].reference

    @functools.wraps(reference)
    def given(*args, **kwargs):
        calls.append(operation)
        return reference(*args, **kwargs)

    return given


def prompt_of(model):
    """A state behind a prompt, and the prompt's logits, evaluated."""
    state = model.make_cache()
    logits = model(PROMPT, state)
    mx.eval(logits)
    return state, logits


def step_of(model, state, fused):
    """Logits of a step, of a batch in a pool for the operation that needs one."""
    if fused != "paged_sdpa":
        return model(TOKEN, state)
    batch = Batch(model, kv_pool_bytes=1 << 20)
    batch.join(["a"], state)
    return batch.step(TOKEN[0])[:, None]


@pytest.mark.usefixtures("uncompiled", "blank_device")
@pytest.mark.parametrize(("fused", "replaced"), PAIRS)
def test_a_given_callable_is_called_although_a_fused_operation_does_its_work(
    two_layers, fused, replaced
):
    directory, calls = two_layers / FAMILIES.get(fused, "qwen3.5-tiny"), []
    given = {replaced: counted(replaced, calls)}
    with load_model(directory, kernels=given, expert_memory="100%", dtype=mx.float32) as model:
        assert model.kernels.names()[fused] == "reference"
        state, _ = prompt_of(model)
        calls.clear()
        mx.eval(step_of(model, state, fused))
        assert model.steps.whole.traces == 1
        assert set(calls) == {replaced}


@pytest.mark.usefixtures("uncompiled", "blank_device")
@pytest.mark.parametrize(
    ("family", "memory"),
    [
        ("qwen3.5-tiny", "50%"),
        ("deepseek-tiny", "100%"),
        pytest.param("qwen3.5-tiny", "100%", marks=pytest.mark.slow),
        pytest.param("deepseek-tiny", "50%", marks=pytest.mark.slow),
    ],
)
def test_what_references_are_made_of_is_called_where_it_is_given(two_layers, family, memory):
    """So no fused operation is missing in REPLACES."""

    def called(*operations):
        calls = []
        given = {name: counted(name, calls) for name in operations}
        options = {"expert_memory": memory, "dtype": mx.float32, "fuse": True}
        with load_model(two_layers / family, kernels=Kernels(given), **options) as model:
            state, _ = prompt_of(model)
            prompt, calls[:] = set(calls), []
            mx.eval(step_of(model, state, None))
            return prompt, set(calls)

    whole = set(IMPLEMENTATIONS) - set(REPLACES)
    prompt, step = called(*whole, "delta_mixer", "add_shared")
    assert {"project", "expert_mix"} <= prompt & step
    for name in prompt | step:
        alone = called(name)
        assert alone == (prompt & {name}, step & {name}), name


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("fused", "replaced"), [pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]
)
def test_a_composed_operation_says_what_references_say(two_layers, tmp_path, fused, replaced):
    directory, calls = two_layers / FAMILIES.get(fused, "qwen3.5-tiny"), []
    options = {"dtype": mx.float32, "expert_memory": "100%"}

    def logits_of(model):
        state, first = prompt_of(model)
        y = mx.concatenate([first, step_of(model, state, fused)], axis=1)
        mx.eval(y)
        return y

    with on_the_cpu():
        with load_model(directory, kernels="reference", **options) as model:
            expected = logits_of(model)
        given = {replaced: counted(replaced, calls)}
        with load_model(directory, kernels=given, **options) as model, on_metal(tmp_path):
            actual = logits_of(model)
    assert error(actual, expected) <= 1e-4 * float(mx.abs(expected).max())


@pytest.mark.parametrize(("fused", "replaced"), PAIRS)
def test_what_contradicts_itself_is_one_line(monkeypatch, fused, replaced):
    both = {fused: IMPLEMENTATIONS[fused]["reference"], replaced: "reference"}
    message = f"'{fused}' does the work of '{replaced}', and both are chosen by name"
    with pytest.raises(InputError, match=message):
        choose_kernels(both, check_values=False)
    monkeypatch.setenv("MOEFLUX_KERNELS", f"{replaced}=reference")
    with pytest.raises(InputError, match=message):
        choose_kernels({fused: both[fused]})


@pytest.mark.parametrize("fused", REPLACES)
def test_a_fused_operation_is_what_was_said_of_it(fused):
    mine = OPERATIONS[fused].reference
    # For all others "reference" was not said by name.
    assert choose_kernels("reference").names()[fused] == "reference"
    kernels = Kernels(dict.fromkeys(IMPLEMENTATIONS, "reference") | {fused: mine})
    assert kernels.names()[fused] == mine.__name__
    assert choose_kernels({fused: "reference", REPLACES[fused][0]: "reference"})
    assert choose_kernels({fused: "auto"}).names()[fused] == Kernels().names()[fused]


def test_what_a_replaced_operation_replaces_is_replaced():
    for fused, replaced in REPLACES.items():
        for one in replaced:
            assert set(REPLACES.get(one, ())) <= set(replaced), fused


def test_a_composed_operation_computes_with_what_was_given():
    calls = []
    kernels = choose_kernels({"moe_combine": counted("moe_combine", calls)})
    calls.clear()
    residual, experts = mx.random.normal((2, 8)), mx.random.normal((2, 8))
    gate, up, score = (mx.random.normal((2, n)) for n in (4, 4, 1))
    down = Weight(mx.random.normal((8, 4)))
    y = kernels.add_shared(residual, experts, gate, up, down, score=score)
    inner = gate * mx.sigmoid(gate) * up
    right = residual + experts + mx.sigmoid(score) * (inner @ down.weight.T)
    assert calls == ["moe_combine"]
    assert error(y, right) <= 1e-5


def test_a_callable_that_no_call_reaches_is_named():
    mine = counted("sdpa", [])
    kernels = choose_kernels({"sdpa": mine, "moe_combine": counted("moe_combine", [])})
    x = mx.ones((2, 8))
    mx.eval(kernels.add_shared(x, x, x, x, Weight(mx.ones((8, 8)))))
    assert kernels.fallbacks() == [f"sdpa={mine.__name__} was given and never called"]
    q = mx.ones((1, 2, 1, 8))
    mx.eval(kernels.sdpa(q, q, q, scale=1.0, mask=None))
    assert kernels.fallbacks() == []
