"""Trials of kernels before their first use. Oracle: faults that are planted, each of which must be
found, and references, which must pass."""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import itertools
import json
import math
import os
import plistlib
import subprocess
import sys
import warnings

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ExactnessError, UnsupportedError
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.examples import TINY, normal
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe import router
from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.registry import OPERATIONS, Kernels
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.kernels.runtime.packing import Packing
from mlx_moeflux.kernels.verify import stock, trials, verdicts
from mlx_moeflux.models.compiled import _bank_of
from tests.kernels.harness import emulated
from tests.kernels.implementations import IMPLEMENTATIONS
from tests.kernels.metal import metal_device
from tests.kernels.metal.recording import Recorder, recorded
from tests.kernels.metal.test_device_limits import FIRST, MODELS, model_of, walk
from tests.kernels.verify.first_use import LOGITS, another_process, reference, stand_in

# ---- Planted faults


def with_option(operation, name, change):
    def wrong(*args, **kwargs):
        return reference(operation)(*args, **(kwargs | {name: change(kwargs.get(name))}))

    return wrong


def of_result(operation, change):
    """Change the first array that an operation returns."""

    def wrong(*args, **kwargs):
        result = reference(operation)(*args, **kwargs)
        first, *rest = arrays(result)
        flat = change(first.reshape(-1)).astype(first.dtype).reshape(first.shape)
        return flat if isinstance(result, mx.array) else [flat, *rest]

    return wrong


def one_nan(flat):
    return mx.where(mx.arange(flat.size) == flat.size // 2, math.nan, flat)


def stale(flat):
    """As if the last 16 numbers had been computed from what another threadgroup left."""
    return mx.concatenate([flat[:-16], flat[-32:-16]])


def without_a_column(residual, experts, gate, up, down, **options):
    kept = (mx.arange(gate.shape[-1]) != 7).astype(gate.dtype)
    return reference("add_shared")(residual, experts, gate * kept, up, down, **options)


def transposed(x, weights, **options):
    return reference("project")(x, [Weight(weights[0].weight.T)], **options)


def square(dtype):
    def x(*shape):
        return mx.array(np.random.default_rng().standard_normal(shape)).astype(dtype)

    return (x(3, 64), [Weight(0.2 * x(64, 64))]), {}


EPSILON = 1e-2  # instead of 1e-6
FAULTS = {
    **{
        f"epsilon of {op}": (op, with_option(op, "eps", lambda eps: EPSILON))
        for op in ("project", "norm_rope", "delta_mixer", "latent_prepare", "latent_step")
    },
    "epsilon of moe_step": ("moe_step", with_option("moe_step", "eps", lambda eps: EPSILON)),
    "decay 2 % off": (
        "gated_delta", with_option("gated_delta", "log_decay", lambda g: g + math.log(0.98))),
    "logarithm of a decay 2 % off": (
        "delta_mixer", with_option("delta_mixer", "a_log", lambda a: a + math.log(1.02))),
    "one of 32 columns dropped": ("add_shared", without_a_column),
    "a transposed square matrix": ("project", transposed),
    **{
        f"{name} in {op}": (op, of_result(op, change))
        for op in ("project", "sdpa", "gated_delta", "expert_mix", "moe_combine", "latent_step")
        for name, change in (("one NaN", one_nan), ("stale memory", stale))
    },
}  # fmt: skip


def verdict_on(fault, dtype):
    operation, implementation = FAULTS[fault]
    if implementation is not transposed:
        return trials.on_example(OPERATIONS[operation], implementation, dtype)
    return trials.attempt(OPERATIONS[operation], implementation, *square(dtype))


@pytest.mark.parametrize("dtype", stock.DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, dtype):
    assert not verdict_on(fault, dtype).ok


@pytest.mark.slow
@pytest.mark.parametrize("dtype", stock.DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_a_hundred_times(fault, dtype):
    assert not sum(verdict_on(fault, dtype).ok for _ in range(100))


@pytest.mark.slow
def test_a_thousand_trials_of_right_kernels_find_nothing():
    with emulated():
        alarms = [
            (operation.name, name, str(dtype), verdict)
            for operation in OPERATIONS.values()
            for name, implementation in operation.implementations.items()
            if implementation.kernels
            for dtype in stock.DTYPES
            for _ in range(15)
            if not (verdict := trials.on_example(operation, implementation.function, dtype)).ok
        ]
    assert not alarms


def off_by(factors):
    """A product that is off by another factor at each call."""
    return of_result("project", lambda flat: flat * next(factors))


@pytest.mark.parametrize("unlucky", range(trials.FAILURES + 1))
def test_some_unlucky_draws_refuse_no_kernel(unlucky):
    """delta_mixer in bfloat16 fails one draw of fifty, and is right."""
    implementation = off_by(itertools.chain([1.02] * unlucky, itertools.repeat(1)))
    verdict = trials.attempt(OPERATIONS["project"], implementation, *square(mx.bfloat16))
    assert verdict.ok == (unlucky < trials.FAILURES)


def test_one_gross_error_refuses_a_kernel():
    implementation = off_by(itertools.chain([1, 1.5], itertools.repeat(1)))
    assert not trials.attempt(OPERATIONS["project"], implementation, *square(mx.bfloat16)).ok


def test_rows_of_one_number_are_taken_together():
    """A score may be small by chance, and what it lacks is then large beside it."""
    truth = mx.array([[1.0], [-0.7], [0.9], [0.01]])
    assert trials._is_near(trials._errors(truth + 0.02, [truth], None), mx.bfloat16)
    assert not trials._is_near(trials._errors(truth + 0.1, [truth], None), mx.bfloat16)


@pytest.mark.parametrize("operation", IMPLEMENTATIONS)
def test_stock_operations_pass(operation):
    assert trials.on_example(OPERATIONS[operation], reference(operation), mx.bfloat16).ok


# ---- A GPU where nothing runs before its trial


def scaled(factor):
    def function(logits, *, k, normalise=True):
        ids, weights = router.softmax_top_k(logits, k=k, normalise=normalise)
        return ids, weights * factor

    return function


def fails_when_evaluated(logits, *, k, normalise=True):
    """As a kernel that does not compile: MLX says so when it evaluates, not when it is called."""
    ids, weights = router.softmax_top_k(logits, k=k, normalise=normalise)
    return ids, weights + metal_device.never()


@pytest.mark.usefixtures("on_metal")
def test_the_first_use_is_tried_and_the_verdict_kept(calls, monkeypatch):
    Kernels().softmax_top_k(LOGITS, k=2)
    first, calls[:] = len(calls), []
    assert first > 3
    Kernels().softmax_top_k(LOGITS, k=2)
    assert calls == ["fused"]
    ((place, kept),) = json.loads(verdicts.file().read_text()).items()
    assert mx.__version__ in place
    ((key, entry),) = kept.items()
    assert key.startswith("softmax_top_k=fused ")
    assert entry["ok"] is True
    assert entry["launched"] == "softmax_top_k"
    another_process(monkeypatch)
    calls.clear()
    Kernels().softmax_top_k(LOGITS, k=2)
    assert calls == ["fused"]
    # Other dtypes are another variant.
    Kernels().softmax_top_k(LOGITS.astype(mx.bfloat16), k=2)
    assert len(calls) > 3


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("wrong", [scaled(1.01), fails_when_evaluated, scaled(math.nan)])
def test_what_fails_its_trial_is_not_used_and_said_once(monkeypatch, wrong):
    stand_in(monkeypatch, "fused", wrong)
    expected = router.softmax_top_k(LOGITS, k=2)
    kernels, said = Kernels(), r"softmax_top_k=fused is not used on .* its trial failed \("
    with pytest.warns(RuntimeWarning, match=said) as warned:
        found = [kernels.softmax_top_k(LOGITS.astype(t), k=2) for t in (mx.float32, mx.bfloat16)]
    assert all(mx.array_equal(ids, expected[0]) for ids, _ in found)
    assert len(warned) == 1
    assert len(verdicts.refused()) == 2
    another_process(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Kernels().softmax_top_k(LOGITS, k=2)
    assert all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("listed", [True, False])
def test_a_stock_operation_that_fails_gives_way_to_a_kernel(monkeypatch, listed):
    """Wrong in 16 bits alone: the truth is computed in float32."""
    right, logits = router.softmax_top_k, LOGITS.astype(mx.bfloat16)

    def wrong(logits, *, k, normalise=True):
        ids, weights = right(logits, k=k, normalise=normalise)
        return ids, weights if logits.dtype == mx.float32 else 3 * weights

    stand_in(monkeypatch, "reference", wrong)
    if not listed:
        monkeypatch.setattr(dispatch, "table", dict)
    expected = right(logits, k=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Kernels().softmax_top_k(logits, k=2)
        assert mx.allclose(found[1], expected[1], atol=1e-6)
        # And if the kernel is wrong as well, nothing computes.
        another_process(monkeypatch)
        verdicts.file().unlink()
        stand_in(monkeypatch, "fused", scaled(2.0))
        with pytest.raises(ExactnessError, match=r"'softmax_top_k' is wrong on .* every kernel"):
            Kernels().softmax_top_k(logits, k=2)


@pytest.mark.usefixtures("on_metal")
def test_a_kernel_that_refuses_the_arguments_is_no_failure(monkeypatch):
    def refuses(logits, *, k, normalise=True):
        raise UnsupportedError("takes no logits.")

    stand_in(monkeypatch, "fused", refuses)
    kernels = Kernels()
    kernels.softmax_top_k(LOGITS, k=2)
    assert kernels.fallbacks() == [
        "softmax_top_k=fused fell back to the reference 1 times: takes no logits."
    ]
    assert not verdicts.refused()


@pytest.mark.usefixtures("on_metal")
def test_want_of_memory_is_no_verdict(monkeypatch):
    def large(logits, *, k, normalise=True):
        if trials._state.references:
            return router.softmax_top_k(logits, k=k)
        raise RuntimeError("[metal::malloc] Attempting to allocate 9 bytes")

    stand_in(monkeypatch, "fused", large)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Attempting to allocate"):
            Kernels().softmax_top_k(LOGITS, k=2)
    assert not verdicts._known.verdicts
    assert not verdicts.file().exists()


@pytest.mark.usefixtures("on_metal")
def test_another_macos_tries_again(calls, monkeypatch, tmp_path):
    file = tmp_path / "SystemVersion.plist"
    monkeypatch.setattr(verdicts, "SYSTEM_VERSION", file)
    for build in ("24G90", "25A354"):
        file.write_bytes(plistlib.dumps({"ProductBuildVersion": build}))
        verdicts._macos_build.cache_clear()
        another_process(monkeypatch)
        calls.clear()
        Kernels().softmax_top_k(LOGITS, k=2)
        assert len(calls) > 3
    assert [place[-5:] for place in json.loads(verdicts.file().read_text())] == ["24G90", "5A354"]
    verdicts._macos_build.cache_clear()


@pytest.mark.usefixtures("on_metal")
def test_a_changed_kernel_is_tried_again(calls, monkeypatch):
    Kernels().softmax_top_k(LOGITS, k=2)
    another_process(monkeypatch)
    monkeypatch.setattr(launcher.MetalKernel, "_digest", lambda self: "another text")
    calls.clear()
    Kernels().softmax_top_k(LOGITS, k=2)
    assert len(calls) > 3


@pytest.mark.usefixtures("on_metal")
def test_trials_leave_the_random_numbers_of_users_alone():
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(3,))
    mx.random.seed(5)
    Kernels().softmax_top_k(LOGITS, k=2)
    for operation in IMPLEMENTATIONS:
        trials.on_example(OPERATIONS[operation], reference(operation), mx.float32)
    assert mx.array_equal(mx.random.uniform(shape=(3,)), expected)


# ---- Traces


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("wrong", [False, True])
def test_a_traced_function_is_tried_outside_of_its_trace(calls, monkeypatch, wrong):
    if wrong:
        stand_in(monkeypatch, "fused", scaled(1.5))
    kernels, called = Kernels(), []
    told = {name: functools.partial(called.append, name) for name in ("ready", "repeated")}
    step = trials.compiled(lambda x: kernels.softmax_top_k(x, k=2))
    expected = router.softmax_top_k(LOGITS, k=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = step(LOGITS, **told)
    if wrong:
        assert all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        assert verdicts.refused()
    assert called == ["ready", "repeated"]
    calls.clear()
    step(LOGITS, **told)
    assert called == ["ready", "repeated"]
    assert not calls


@pytest.mark.usefixtures("on_metal")
def test_in_a_trace_of_somebody_else_stock_computes(calls):
    step = mx.compile(lambda x: Kernels().softmax_top_k(x, k=2))
    expected = router.softmax_top_k(LOGITS, k=2)
    assert all(mx.array_equal(a, b) for a, b in zip(step(LOGITS), expected, strict=True))
    assert not verdicts._known.verdicts
    assert not trials._state.pending


@pytest.mark.usefixtures("on_metal")
def test_trials_are_told_before_and_after():
    told = []
    with trials.watched(lambda *counts: told.append(counts)):
        for k in (2, 3, 2):
            Kernels().softmax_top_k(LOGITS.astype(mx.bfloat16), k=k)
    assert told == [(0, 1), (1, 1), (1, 2), (2, 2)]
    Kernels().softmax_top_k(LOGITS.astype(mx.bfloat16), k=4)  # nobody watches
    assert len(told) == 4


@pytest.mark.usefixtures("on_metal")
def test_the_trials_of_a_traced_step_are_known_beforehand():
    kernels, told = Kernels(), []
    step = trials.compiled(lambda x: [kernels.softmax_top_k(x, k=k)[1] for k in (2, 3, 4, 2)])
    with trials.watched(lambda *counts: told.append(counts)):
        step(LOGITS)
        step(LOGITS)
    assert told == [(0, 3), (1, 3), (1, 3), (2, 3), (2, 3), (3, 3)]


@pytest.mark.usefixtures("on_metal")
def test_a_traced_step_is_tried_with_what_it_launches(monkeypatch):
    """A packed bank is one buffer outside a trace and several arrays in it: two variants."""
    rows = {"expert_mix": {"metal": (dispatch.Row("pairs", 1),)}}
    monkeypatch.setattr(dispatch, "table", lambda: rows)
    (x, slots, weights, bank), _ = OPERATIONS["expert_mix"].proof.workload("", TINY, 1, mx.bfloat16)
    packing, kernels, runs = Packing.of(bank.flat), Kernels(), []

    def step(*arrays):
        runs.append(trials.tracing())
        return kernels.expert_mix(x, slots, weights, _bank_of(arrays, bank))

    found = trials.compiled(step)(*packing.arrays)
    assert runs == [True, False, True]
    again = trials.compiled(step)(*packing.arrays)
    assert runs == [True, False, True, True]
    assert mx.array_equal(found, again)


# ---- What a trial runs on


def test_prompts_are_cut_and_the_truth_has_few_rows():
    args, kwargs = OPERATIONS["expert_mix"].proof.workload("", TINY, 300, mx.bfloat16)
    seen = []

    def right(x, slots, weights, bank, *, initial=None):
        seen.append(x.shape)
        return reference("expert_mix")(x, slots, weights, bank, initial=initial)

    assert trials.attempt(OPERATIONS["expert_mix"], right, args, kwargs).ok
    assert set(seen) == {(300, TINY.C), (trials.TOKENS, TINY.C)}


@pytest.mark.parametrize(
    "operation", sorted(name for name, record in OPERATIONS.items() if record.tokens)
)
def test_prompts_of_every_operation_can_be_cut(operation):
    args, kwargs = OPERATIONS[operation].proof.example_call(mx.float32, tokens=trials.TOKENS + 40)
    call = inspect.signature(reference(operation)).bind(*args, **kwargs)
    cut = trials._cut(OPERATIONS[operation], reference(operation), call)
    name, axis = next(iter(OPERATIONS[operation].tokens.items()))
    if operation == "project":
        args = (mx.concatenate([args[0]] * trials.TOKENS), *args[1:])
        call = inspect.signature(reference(operation)).bind(*args, **kwargs)
        cut = trials._cut(OPERATIONS[operation], reference(operation), call)
    assert cut.arguments[name].shape[axis] == trials.TOKENS
    # Of a cut call every result is that of the first tokens.
    some = arrays(reference(operation)(*cut.args, **cut.kwargs))
    whole = arrays(reference(operation)(*args, **kwargs))
    for a, b in zip(some, whole, strict=True):
        where = tuple(slice(n) for n in a.shape)
        same = mx.allclose(a, b[where], atol=1e-5).item()
        assert same or a.shape == b.shape  # states, which are of other tokens


@pytest.fixture
def prompts_by_stock(monkeypatch):
    """Kernels, a call whose experts stock MLX computes in tiles, and rows of those products."""
    kernels, rows, product = Kernels(), [], mx.gather_qmm
    kernels.take_stock_for_prompts()
    args, _ = OPERATIONS["expert_mix"].proof.example_call(mx.float32, tokens=200)

    def watched(x, *others, sorted_indices=False, **options):
        if sorted_indices:
            rows.append(len(x))
        return product(x, *others, sorted_indices=sorted_indices, **options)

    monkeypatch.setattr(mx, "gather_qmm", watched)
    return kernels, args, rows


@pytest.mark.usefixtures("on_metal")
def test_tiles_of_stock_are_tried_on_the_whole_prompt(prompts_by_stock):
    kernels, args, rows = prompts_by_stock
    y = kernels.expert_mix(*args)
    assert mx.allclose(y, reference("expert_mix")(*args), rtol=1e-4, atol=1e-4)
    assert set(rows) == {-(-200 * 3 // 64) * 64}
    assert len(rows) > 3
    rows.clear()
    kernels.expert_mix(*args)
    assert len(rows) == 3


@pytest.mark.usefixtures("on_metal")
def test_tiles_that_are_wrong_are_not_used(prompts_by_stock, monkeypatch):
    kernels, args, _ = prompts_by_stock
    product = mx.gather_qmm

    def wrong(x, *others, sorted_indices=False, **options):
        y = product(x, *others, sorted_indices=sorted_indices, **options)
        return mx.roll(y, 1, axis=0) if sorted_indices else y

    monkeypatch.setattr(mx, "gather_qmm", wrong)
    with pytest.warns(RuntimeWarning, match="expert_mix=in_tiles is not used"):
        y = kernels.expert_mix(*args)
    assert mx.allclose(y, reference("expert_mix")(*args), rtol=1e-4, atol=1e-4)


# Their long prompts have masks that are arrays, which are not cut, and take seconds.
INDEXED = {"deepseek-v3.2", "glm-5"}


def copied(call):
    """Bytes of the arguments that the truth copies in float32."""
    every = [value for value in call.arguments.values() if isinstance(value, mx.array)]
    return sum(4 * array.size for array in every if array.nbytes <= trials.MOST_BYTES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in {*FIRST.values()} - INDEXED))
        for n in MODELS
    ],
)
def test_a_trial_at_published_sizes_takes_few_bytes(name, monkeypatch):
    """Nothing was tried before a prompt of 20,000 tokens and the step behind it."""
    tried, large, short = set(), [], 0

    def verdict(key, operation, implementation, args, kwargs, launched):
        nonlocal short
        if key in tried:
            return verdicts.Verdict(True)
        tried.add(key)
        call = bound(operation.name, args, kwargs)
        call.arguments.pop("steps", None)
        cut = trials._cut(operation, operation.implementations[implementation].function, call)
        rows = trials._sampled_rows(operation, cut)
        count = copied(cut if rows is None else trials._of_row(operation, cut, int(rows[-1])))
        if count > 5 * trials.MOST_BYTES:
            large.append(f"{operation.name} {launched}: {count} bytes")
        if operation.proof.positions and not isinstance(call.arguments["mask"], mx.array):
            caches = [cut.arguments[name] for name in operation.proof.positions]
            short += caches[0].shape != call.arguments[next(iter(operation.proof.positions))].shape
            # How many heads latent_prefill computes together depends on the length.
            most = trials.MOST_BYTES if operation.proof.apart else math.inf
            if (count := sum(cache.nbytes for cache in caches)) > most:
                large.append(f"{operation.name} {launched}: a cache of {count} bytes")
        return verdicts.Verdict(True)

    monkeypatch.setattr(trials, "_verdict", verdict)
    monkeypatch.setattr(Recorder, "checks_first_use", True)
    with recorded():
        walk(model_of(name, mx.bfloat16, apart=False), prompts=(20_000,), batches=())
    assert len(tried) > 10
    assert not large  # an assertion within would print arrays that nobody has evaluated
    assert short or name in INDEXED


ATTENTION = sorted(name for name, record in OPERATIONS.items() if record.proof.positions)


def bound(operation, args, kwargs):
    return inspect.signature(reference(operation)).bind(*args, **kwargs)


@pytest.mark.parametrize("operation", [name for name in ATTENTION if OPERATIONS[name].proof.apart])
def test_the_truth_of_some_tokens_of_attention_is_that_of_all(operation):
    record = OPERATIONS[operation]
    calls = dict(record.proof.small_cases())
    args, kwargs = record.proof.example_call(mx.float32, tokens=20)
    calls |= {"20 tokens": (args, kwargs), "unmasked": (args, kwargs | {"mask": None})}
    if operation == "sdpa":
        calls["whole buffers"] = args, {"scale": 0.1, "mask": "causal"}
    sampled = 0
    for what, (args, kwargs) in calls.items():
        call = bound(operation, args, kwargs)
        rows = trials._sampled_rows(record, call)
        if rows is None:
            continue
        (whole,) = trials._truth(record, call)
        for row in rows.tolist():
            (one,) = trials._truth(record, trials._of_row(record, call, row))
            assert mx.allclose(one, whole[..., row : row + 1, :], atol=1e-5), (what, row)
            sampled += 1
    assert sampled >= 2 * trials.ROWS


def with_a_long_cache(operation, tokens, *, on_device=False):
    """A call on the first 2,000 of 2,048 positions, two sequences, the second of which has
    padding."""
    sizes = dataclasses.replace(TINY, keys=2000 - tokens, step=48 + tokens, heads=2)
    build = OPERATIONS[operation].proof.workloads[""]
    args, kwargs = build(sizes, tokens, normal(mx.float32))
    kwargs["start"] = mx.array([0, 1700])
    if on_device:
        names = list(OPERATIONS[operation].proof.positions)
        caches = [bound(operation, args, kwargs).arguments[name] for name in names]
        kwargs["tail"] = tuple(normal(mx.float32)(*x.shape[:2], 64, x.shape[3]) for x in caches)
        kwargs["length"] = mx.array([2000, 1990], mx.int32)
    return args, kwargs


@pytest.mark.parametrize(("tokens", "on_device"), [(1, False), (1, True), (80, False)])
@pytest.mark.parametrize("operation", ATTENTION)
def test_a_trial_has_a_short_cache(operation, tokens, on_device, monkeypatch):
    if on_device and operation == "latent_prefill":
        return  # it takes no tail
    record, most = OPERATIONS[operation], 600_000
    monkeypatch.setattr(trials, "MOST_BYTES", most)
    args, kwargs = with_a_long_cache(operation, tokens, on_device=on_device)
    call = bound(operation, args, kwargs)
    cut = trials._cut(record, reference(operation), call)
    caches = [cut.arguments[name] for name in record.proof.positions]
    S = caches[0].shape[2]
    assert sum(cache.nbytes for cache in caches) <= most
    assert S % trials.POSITIONS == 0
    for name, cache in zip(record.proof.positions, caches, strict=True):
        assert mx.array_equal(cache, call.arguments[name][:, :, :S])
    before, after = kwargs["length"], cut.arguments["length"]
    gone = 2000 - int(mx.array(after).max().item())
    gone -= tokens - min(tokens, trials.TOKENS)
    assert S - 48 - 64 < 2000 - gone <= S - 48
    if on_device:
        # The newest rows have the same places in the tail.
        assert gone % 64 == 0
        assert after.tolist() == [n - gone for n in before.tolist()]
    assert cut.arguments["start"].tolist() == [0, max(1700 - gone, 0)]
    (truth,) = trials._truth(record, cut)
    assert mx.isfinite(truth).all()


def unlike(change):
    """Attention that computes `change` of its arguments."""

    def wrong(q, k, v, **options):
        return reference("sdpa")(*change(q, k, v, options), **options)

    return wrong


def one_key_more(q, k, v, options):
    options["length"] += 1
    return q, k, v


def without_a_key(q, k, v, options):
    seen = (mx.arange(k.shape[2]) != 5)[:, None]
    return q, mx.where(seen, k, 0), v


def other_head(q, k, v, options):
    return q, k, mx.concatenate([v[:, 1:], v[:, :1]], axis=1)


@pytest.mark.parametrize("dtype", stock.DTYPES, ids=str)
@pytest.mark.parametrize("fault", [one_key_more, without_a_key, other_head])
@pytest.mark.parametrize("tokens", [1, 12])
def test_a_fault_of_attention_over_a_long_cache_is_found(fault, tokens, dtype, monkeypatch):
    monkeypatch.setattr(trials, "MOST_BYTES", 1 << 17)
    sizes = dataclasses.replace(TINY, keys=1000, step=24)
    args, kwargs = OPERATIONS["sdpa"].proof.workload("", sizes, tokens, dtype)
    assert not trials.attempt(OPERATIONS["sdpa"], unlike(fault), args, kwargs).ok
    assert trials.attempt(OPERATIONS["sdpa"], reference("sdpa"), args, kwargs).ok


def test_other_orders_have_the_same_numbers():
    small, large, zeros = mx.random.normal((3, 7)), mx.random.normal((600, 4096)), mx.zeros((2, 9))
    shrinks_nothing = OPERATIONS["sdpa"]
    call = inspect.signature(lambda small, large, zeros: None).bind(small, large, zeros)
    for _ in range(2):
        drawn = trials._drawn(shrinks_nothing, call, keep=False).arguments
        assert sorted(drawn["small"].flatten().tolist()) == sorted(small.flatten().tolist())
        assert not mx.array_equal(drawn["small"], small)
        assert drawn["large"] is large  # more than MOST_BYTES
        assert len(set(drawn["zeros"].flatten().tolist())) > 1
        assert (drawn["zeros"] <= 0).all()
    kept = trials._drawn(shrinks_nothing, call, keep=True).arguments
    assert kept["small"] is small
    assert not mx.array_equal(kept["zeros"], zeros)


def test_a_state_before_the_first_token_is_no_example():
    """Zeros would hide a wrong decay."""
    args, kwargs = OPERATIONS["gated_delta"].proof.example_call(mx.bfloat16)
    kwargs["state"] = mx.zeros_like(kwargs["state"])
    implementation = FAULTS["decay 2 % off"][1]
    assert not trials.attempt(OPERATIONS["gated_delta"], implementation, args, kwargs).ok


# ---- Processes that die in a trial

DIES = """
import os, mlx.core as mx
from mlx_moeflux.kernels.verify import verdicts
with verdicts.running("sdpa=fused 1"):
    os.kill(os.getpid(), 9)
"""


def test_a_trial_that_ends_the_process_twice_is_bad(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))
    for deaths in (1, 2):
        subprocess.run([sys.executable, "-c", DIES], check=False, timeout=60)
        assert list(tmp_path.glob("trial-*.json"))
        monkeypatch.setattr(verdicts, "_known", verdicts._Known())
        verdict = verdicts.get("sdpa=fused 1")
        assert (verdict is None) == (deaths == 1)
        assert not list(tmp_path.glob("trial-*.json"))
    assert verdict.reason == "its trial ended the process twice"


def test_an_interrupt_and_another_process_are_no_death(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "_known", verdicts._Known())
    with pytest.raises(KeyboardInterrupt), verdicts.running("a"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with verdicts.running("a"):  # of this process, which lives
        assert verdicts.get("a") is None
        assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / f"trial-{os.getpid()}.json").write_text("{")
    monkeypatch.setattr(verdicts, "_known", verdicts._Known())
    assert verdicts.get("a") is None


# ---- Processes that keep verdicts at once

KEEPS = """
import sys
from mlx_moeflux.kernels.verify import verdicts
from mlx_moeflux.kernels.verify.verdicts import Verdict
name = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
for i in range(40):
    verdicts.put(f"sdpa={name} {i}", Verdict(True, 0.5, launched=name))
"""


def test_processes_that_try_at_once_keep_each_others_verdicts(tmp_path):
    names, environment = ("a", "b", "c"), os.environ | {"MOEFLUX_CACHE_DIR": str(tmp_path / "new")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", KEEPS, name], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for name in names
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    (kept,) = json.loads((tmp_path / "new" / "trials.json").read_text()).values()
    assert sorted(kept) == sorted(f"sdpa={name} {i}" for name in names for i in range(40))


@pytest.mark.parametrize("lacking", ["folder", "locks", "patience"])
def test_without_a_lock_verdicts_are_kept_as_well_as_can_be(lacking, monkeypatch, tmp_path):
    monkeypatch.setattr(verdicts, "_known", verdicts._Known())
    folder = tmp_path / "cache"
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(folder))
    if lacking == "folder":
        folder.write_text("no folder")
    elif lacking == "locks":

        def flock(*_):
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(verdicts.fcntl, "flock", flock)
    else:  # of another process that was stopped
        monkeypatch.setattr(verdicts, "LOCK_SECONDS", 0.02)
        monkeypatch.setattr(verdicts, "_lock", lambda descriptor: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdicts.put("sdpa=fused 1", verdicts.Verdict(True))
    assert verdicts.get("sdpa=fused 1").ok
    verdicts.forget()
    assert (verdicts.get("sdpa=fused 1") is None) == (lacking == "folder")
