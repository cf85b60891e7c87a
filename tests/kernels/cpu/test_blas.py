"""Oracle: the references in MLX, and the same rows computed alone."""

from __future__ import annotations

import contextlib
import gc
import io
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.registry import OPERATIONS, Kernels
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models.layers import Applied
from tests.kernels.harness import error
from tests.kernels.implementations import IMPLEMENTATIONS

BLAS = [op for op, implementations in IMPLEMENTATIONS.items() if "blas" in implementations]
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@pytest.fixture(autouse=True)
def cpu():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def flat(result):
    return [a for a in (result if isinstance(result, (list, tuple)) else [result]) if a is not None]


def test_these_have_one():
    assert set(BLAS) == {
        "project", "delta_mixer", "norm_rope", "sdpa", "softmax_top_k", "expert_mix", "add_shared",
    }  # fmt: skip


def example(operation):
    """The arguments of an operation's example that BLAS takes."""
    args, kwargs = OPERATIONS[operation].proof.example_call()
    kwargs.pop("start", None)
    return args, kwargs


@pytest.mark.parametrize("operation", BLAS)
def test_agrees_with_the_reference(operation):
    args, kwargs = example(operation)
    expected = flat(IMPLEMENTATIONS[operation]["reference"](*args, **kwargs))
    actual = flat(IMPLEMENTATIONS[operation]["blas"](*args, **kwargs))
    assert [(a.shape, a.dtype) for a in actual] == [(b.shape, b.dtype) for b in expected]
    for a, b in zip(actual, expected, strict=True):
        # Sums of up to 64 products in float32, in another order.
        assert error(a, b) <= 64 * 2**-23 * max(1.0, float(mx.abs(b).max()))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dense_is_mlx_dequantised(bits, group, dtype):
    weight = mx.random.normal((3, 5, 256), key=mx.random.key(bits)).astype(dtype)
    arrays = mx.quantize(weight, group_size=group, bits=bits)
    wide = [arrays[0], *(a.astype(mx.float32) for a in arrays[1:])]
    expected = np.array(mx.dequantize(*wide, group_size=group, bits=bits))
    bank = ProjectionBank(*arrays, QuantSpec(bits, group))
    # A product and a sum, each rounded; MLX may fuse them.
    limit = 2**-22 * np.abs(expected).max()
    assert np.abs(blas.dense(bank) - expected).max() <= limit
    assert np.abs(blas.dense(bank, 1) - expected[1]).max() <= limit


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_quantised_is_taken_as_it_is(dtype):
    weight = mx.random.normal((5, 48)).astype(dtype)
    assert (blas.dense(Weight(weight)) == np.array(weight.astype(mx.float32))).all()


def rows_alone(N, C, out):
    return mx.random.normal((N, C)), Weight(mx.random.normal((out, C)))


@pytest.mark.parametrize(("C", "out"), [(64, 256), (768, 256), (256, 1000), (37, 5), (1024, 3)])
def test_a_row_gives_the_same_bits_alone(C, out):
    x, weight = rows_alone(50, C, out)
    norm = mx.random.normal((C,))
    project = IMPLEMENTATIONS["project"]["blas"]
    (whole,) = project(x[None], [weight], norm=norm)
    for start, stop in ((0, 1), (17, 18), (3, 19), (31, 50)):
        (part,) = project(x[None, start:stop], [weight], norm=norm)
        assert (part == whole[:, start:stop]).all()


@pytest.fixture
def bank():
    return random_bank(64, 96)


def random_bank(F, C, E=6):
    parts = []
    for out, width in ((F, C), (F, C), (C, F)):
        w = mx.random.normal((E, out, width)).astype(mx.bfloat16)
        parts.append(ProjectionBank(*mx.quantize(w, group_size=32, bits=4), QuantSpec(4, 32)))
    return ExpertBank(*parts)


def test_experts_give_the_same_bits_however_tokens_and_slots_lie(bank):
    x, weights = mx.random.normal((40, 96)), mx.random.uniform(shape=(40, 3))
    slots = np.sort([np.random.default_rng(n).permutation(6)[:3] for n in range(40)]).astype("u4")
    mix = IMPLEMENTATIONS["expert_mix"]["blas"]
    whole = mix(x, mx.array(slots), weights, bank)
    for part in (slice(0, 1), slice(5, 23), slice(23, 40)):
        assert (mix(x[part], mx.array(slots[part]), weights[part], bank) == whole[part]).all()
    moved = np.random.default_rng(1).permutation(6)
    other = ExpertBank(*(p.take(mx.array(np.argsort(moved)), p.scales.dtype)
                         for p in (bank.gate, bank.up, bank.down)))  # fmt: skip
    assert (mix(x, mx.array(moved[slots].astype("u4")), weights, other) == whole).all()
    # A sum cut in k, with experts that are absent.
    low = np.where(slots < 3, slots, 0xFFFFFFFF).astype("u4")
    high = np.where(slots < 3, 0xFFFFFFFF, slots).astype("u4")
    begun = mix(x, mx.array(low), weights, bank)
    assert (mix(x, mx.array(high), weights, bank, initial=begun) == whole).all()
    none = mix(x, mx.full((40, 3), 0xFFFFFFFF, mx.uint32), weights, bank)
    assert (none == 0).all()


@pytest.mark.parametrize(("F", "C", "several"), [(256, 288, 1), (192, 224, 3), (64, 96, 21)])
@pytest.mark.parametrize("fixed", [False, True])
def test_experts_added_on_the_host_give_the_bits_of_the_mix(F, C, several, fixed):
    """One by one, in two groups, all made dense at once; rows of an expert in parts."""
    assert several == blas.SEVERAL // (F * C)
    bank = replace(random_bank(F, C), fixed=fixed)
    x, weights = mx.random.normal((40, C)), mx.random.uniform(shape=(40, 3))
    ids = np.sort([np.random.default_rng(n).permutation(6)[:3] for n in range(40)])
    mix, slot_of = IMPLEMENTATIONS["expert_mix"]["blas"], np.array([4, 0, 5, 1, 3, 2])
    # Terms are added by ascending ids, which the columns have.
    expected = mix(x, mx.array(slot_of[ids].astype("u4")), weights, bank)
    total = np.full((40, C), -0.0, np.float32)
    for first, last, at_once in ((0, 2, 100), (3, 5, 4)):
        token, rank = np.nonzero((ids >= first) & (ids <= last))
        order = np.argsort(ids[token, rank], kind="stable")
        token, rank = token[order], rank[order]
        slot = slot_of[ids[token, rank]]
        pairs = {"token": token, "rank": rank, "slot": slot}
        mix.adds(total, x, weights, **pairs, bank=bank, at_once=at_once)
    assert (total == np.array(expected)).all()


@pytest.mark.parametrize(
    ("T", "S", "parts"), [(1, 300, 1), (20, 400, 3), (20, 5300, 1), (5, 99, 1)]
)
def test_attention_in_parts_of_keys_agrees_with_the_reference(T, S, parts):
    """On a busy machine a second thread of BLAS may be waited for; see ``_for_one_thread``."""
    assert len(blas._for_one_thread(S, 2 * T * 40)) == parts
    q = mx.random.normal((2, 6, T, 24))
    k, v = mx.random.normal((2, 3, S, 24)), mx.random.normal((2, 3, S, 40))
    options = {"scale": 0.2, "mask": "causal" if T > 1 else None}
    expected = IMPLEMENTATIONS["sdpa"]["reference"](q, k, v, **options)
    # Sums of up to 24 products, then of up to S terms of one sign that add to 1.
    assert error(IMPLEMENTATIONS["sdpa"]["blas"](q, k, v, **options), expected) <= 64 * 2**-23 * 5


def test_matrices_are_kept_within_the_bound_and_go_with_their_owner(monkeypatch):
    kept = blas.Kept(limit=4 * 5 * 64 + 100)
    monkeypatch.setattr(blas, "kept", kept)

    def quantised():
        arrays = mx.quantize(mx.random.normal((5, 64)), group_size=64, bits=4)
        mx.eval(arrays)
        return Weight(*arrays, QuantSpec(4))

    def key(weight):
        return id(weight.weight), None, id(weight.scales)

    first, second = quantised(), quantised()
    x = np.ones((1, 64), np.float32)
    blas.product(x, first)
    assert kept.nbytes == 0  # worth it only when it is used again
    blas.product(x, first)
    assert kept.nbytes == 4 * 5 * 64
    blas.product(x, second)
    expected = blas.product(x, second)
    assert list(kept.matrices) == [key(first)]
    del first
    gc.collect()
    assert kept.nbytes == 0
    assert (blas.product(x, second) == expected).all()
    assert list(kept.matrices) == [key(second)]


@pytest.mark.parametrize("bits", [3, 4])
def test_kept_or_made_anew_in_blocks_gives_the_same_bits(monkeypatch, bits):
    """A large block and a small one."""
    w = mx.random.normal((blas.BLOCK // 96 + 81, 96))
    weight = Weight(*mx.quantize(w, group_size=32, bits=bits), QuantSpec(bits, 32))
    x = np.array(mx.random.normal((7, 96)))
    results = []
    for limit in (0, 10**7):
        monkeypatch.setattr(blas, "kept", blas.Kept(limit))
        results.append([blas.product(rows, weight) for rows in (x, x[:1])])
        assert bool(blas.kept.nbytes) == bool(limit)
    (anew, alone), (kept, _) = results
    assert (anew == kept).all()
    assert (alone == anew[:1]).all()
    assert error(mx.array(anew), weight.matmul(mx.array(x))) <= 1e-4


@pytest.mark.parametrize("operation", BLAS)
def test_what_mlx_traces_goes_to_the_reference(operation):
    args, kwargs = example(operation)
    if operation == "expert_mix":
        pytest.skip("chosen before the call: see below")
    kernels = Kernels()

    def all_of(x):
        return flat(getattr(kernels, operation)(x, *args[1:], **kwargs))

    expected = flat(IMPLEMENTATIONS[operation]["reference"](*args, **kwargs))
    # Not evaluated: that MLX computes what it compiled is its own test, and takes seconds.
    compiled = mx.compile(all_of)(args[0])
    assert [y.shape for y in compiled] == [y.shape for y in expected]
    outputs, gradients = mx.vjp(all_of, [args[0]], expected)
    for a, b in zip(outputs, expected, strict=True):
        assert error(a, b) <= 1e-4
    assert mx.abs(gradients[0]).max() > 0
    with pytest.raises(UnsupportedError, match="traces"):
        mx.compile(lambda x: flat(IMPLEMENTATIONS[operation]["blas"](x, *args[1:], **kwargs)))(
            args[0]
        )


def seen_inside(transformed) -> dict[str, tuple[bool, bool]]:
    """What -> whether it can be evaluated and whether it then has a graph, inside a transformed
    function: its argument, what is computed of it, and an array that has nothing to do with it."""
    seen = {}

    def look(what: str, x: mx.array) -> None:
        evaluated = False
        with contextlib.suppress(ValueError):
            mx.eval(x)
            evaluated = True
        mx.export_to_dot(graph := io.StringIO(), x)
        assert graph.getvalue().startswith("digraph")
        seen[what] = evaluated, "rectangle" in graph.getvalue()
        taken = True
        try:
            other, none, view = blas.views_of(mx.array([1.0]), None, x)
            assert (other.tolist(), none) == ([1.0], None)
            assert np.array_equal(view, np.asarray(x))
        except UnsupportedError:
            taken = False
        assert taken == (seen[what] == (True, False))

    def function(x: mx.array) -> mx.array:
        look("given", x)
        y = x * 2
        look("computed", y)
        look("apart", mx.ones(3) + 1)
        return (y * y).sum()

    transformed(function)
    return seen


PLAIN = dict.fromkeys(("given", "computed", "apart"), (True, False))
GRADIENT = {"given": (True, True), "computed": (True, True), "apart": (True, False)}
TRACE = {"given": (False, False), "computed": (False, True), "apart": (True, False)}


@pytest.mark.parametrize(
    ("transformed", "expected"),
    [
        pytest.param(lambda f: f(mx.ones(4)), PLAIN, id="none"),
        pytest.param(lambda f: mx.checkpoint(f)(mx.ones(4)), PLAIN, id="checkpoint"),
        pytest.param(lambda f: mx.grad(f)(mx.ones(4)), GRADIENT, id="grad"),
        pytest.param(lambda f: mx.value_and_grad(f)(mx.ones(4)), GRADIENT, id="value_and_grad"),
        pytest.param(lambda f: mx.jvp(f, [mx.ones(4)], [mx.ones(4)]), GRADIENT, id="jvp"),
        pytest.param(  # computed again, where everything keeps its graph
            lambda f: mx.grad(mx.checkpoint(f))(mx.ones(4)),
            GRADIENT | {"apart": (True, True)},
            id="grad of checkpoint",
        ),
        pytest.param(lambda f: mx.compile(f)(mx.ones(4)), TRACE, id="compile"),
        pytest.param(lambda f: mx.vmap(f)(mx.ones((2, 4))), TRACE, id="vmap"),
        pytest.param(
            lambda f: mx.compile(mx.grad(f))(mx.ones(4)),
            TRACE | {"given": (False, True)},
            id="compiled grad",
        ),
    ],
)
def test_mlx_draws_what_it_traces(transformed, expected):
    """The contract of MLX that :func:`blas.views_of` rests on."""
    assert seen_inside(transformed) == expected


def test_mlx_draws_an_operation_that_is_not_evaluated():
    """So the drawing is asked for after evaluation."""
    y = mx.ones(4) * 2
    mx.export_to_dot(graph := io.StringIO(), y)
    assert "rectangle" in graph.getvalue()
    assert np.array_equal(blas.views_of(y)[0], [2, 2, 2, 2])


def test_results_are_reshaped_without_waiting_for_mlx():
    """Only those of this thread's last call, which are small and no module's."""
    module = Applied(nn.Linear(32, 12))
    few, many = (mx.array(np.random.default_rng(T).normal(size=(1, T, 32))) for T in (2, 1500))
    weight = Weight(mx.array(np.random.default_rng(1).normal(size=(24, 32)).astype(np.float32)))
    weights = [replace(weight, outs=(6, 18)), module]
    older = blas.project_blas(few.astype(mx.float32), weights)
    large = blas.project_blas(many.astype(mx.float32), weights)
    newer = blas.project_blas(few.astype(mx.float32) + 1, weights)
    for results, copied in ((older, []), (large, []), (newer, [0, 1])):
        for i, y in enumerate(results):
            split = blas.reshape(y, *y.shape[:-1], 3, -1)
            mx.export_to_dot(graph := io.StringIO(), split)
            assert ("rectangle" in graph.getvalue()) == (i not in copied)
            assert mx.array_equal(split, y.reshape(*y.shape[:-1], 3, -1)).item()


@pytest.mark.parametrize("computed", [lambda x: x, lambda x: 2 * x])
def test_what_is_reshaped_keeps_its_gradient(computed):
    def loss(x: mx.array) -> mx.array:
        return (blas.reshape(computed(x), 3, 4) ** 2).sum()

    x, factor = mx.arange(12.0), computed(mx.ones(1)).item() ** 2
    assert mx.array_equal(mx.grad(loss)(x), 2 * factor * x).item()


def test_experts_that_mlx_traces_go_to_the_reference(bank):
    mix = Kernels().expert_mix
    x, weights = mx.random.normal((2, 96)), mx.random.uniform(shape=(2, 3))
    seen = []

    def traced(x):
        seen.append(mix.implementation(x, None, weights, bank))
        return x * 2

    mx.compile(traced)(x)
    mx.grad(lambda x: traced(x * 3).sum())(x)
    scales = bank.gate.scales

    def of_scales(scales):
        gate = ProjectionBank(bank.gate.weight, scales, bank.gate.biases, bank.gate.spec)
        seen.append(mix.implementation(x, None, weights, ExpertBank(gate, bank.up, bank.down)))
        return scales.astype(mx.float32).sum()

    mx.grad(of_scales)(scales)
    assert seen == [IMPLEMENTATIONS["expert_mix"]["reference"]] * 3
    assert mix.implementation(x, None, weights, bank) is IMPLEMENTATIONS["expert_mix"]["blas"]
    assert mix.implementation(x.astype(mx.bfloat16), None, weights, bank) is seen[0]


@pytest.mark.parametrize("refused", ["start", "mask", "length", "tail"])
def test_attention_over_what_is_padded_goes_to_the_reference(refused):
    q, k, v = (mx.random.normal((2, h, n, 32)) for h, n in ((4, 3), (2, 16), (2, 16)))
    arrays = {
        "start": mx.array([0, 1]),
        "mask": mx.ones((2, 1, 3, 16), mx.bool_),
        "length": mx.array([9, 11]),
        "tail": (k[:, :, :8], v[:, :, :8]),
    }
    options = {"mask": "causal", "length": 12, "scale": 0.2} | {refused: arrays[refused]}
    if refused == "mask":
        del options["length"]
    expected = IMPLEMENTATIONS["sdpa"]["reference"](q, k, v, **options)
    assert (Kernels().sdpa(q, k, v, **options) == expected).all()


def test_a_mixer_takes_all_projections_in_one_array():
    (qkv, *rest), kwargs = OPERATIONS["delta_mixer"].proof.example_call()
    joined = mx.concatenate([qkv, *rest], axis=-1)
    apart = IMPLEMENTATIONS["delta_mixer"]["blas"](qkv, *rest, **kwargs)
    together = IMPLEMENTATIONS["delta_mixer"]["blas"](joined, None, None, None, **kwargs)
    assert all((a == b).all() for a, b in zip(apart, together, strict=True))


def test_a_delta_rule_that_was_chosen_is_taken():
    args, kwargs = OPERATIONS["delta_mixer"].proof.example_call()
    calls = []

    def rule(*args, **kwargs):
        calls.append(1)
        return IMPLEMENTATIONS["gated_delta"]["reference"](*args, **kwargs)

    kernels = Kernels({"gated_delta": rule})
    kernels.delta_mixer(*args, **kwargs | {"steps": kernels})
    assert calls


def test_a_model_that_is_closed_keeps_nothing():
    before = blas.kept.nbytes
    with load_model(BUNDLED_MODEL, expert_memory="100%") as model:
        for _ in range(2):
            mx.eval(model(mx.array([[1, 2, 3]])))
        # The trunk and some experts, four bytes a number.
        assert blas.kept.nbytes > before + 13_000_000
    assert blas.kept.nbytes == before


def test_what_is_not_finite_goes_its_way():
    x = mx.array([[[np.inf, 1.0, np.nan, -200.0] * 16]])
    weight = Weight(mx.random.normal((8, 64)))
    (y,) = IMPLEMENTATIONS["project"]["blas"](x, [weight], norm=mx.ones((64,)))
    assert mx.isnan(y).all()
    scores = mx.array([[-200.0, 200.0]])
    assert np.array(blas.quiet(blas.sigmoid)(np.array(scores))).tolist() == [[0.0, 1.0]]
