"""One trial. Oracle: faults that are planted, each of which must be found, and references, which
must pass."""

from __future__ import annotations

import dataclasses
import itertools
import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.kernels.examples import TINY
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.registry import OPERATIONS
from mlx_moeflux.kernels.verify import arguments, comparison, stock
from tests.kernels.harness import emulated
from tests.kernels.implementations import IMPLEMENTATIONS
from tests.kernels.verify.first_use import reference


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
        return comparison.on_example(OPERATIONS[operation], implementation, dtype)
    return comparison.attempt(OPERATIONS[operation], implementation, *square(dtype))


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
            if not (verdict := comparison.on_example(operation, implementation.function, dtype)).ok
        ]
    assert not alarms


def off_by(factors):
    """A product that is off by another factor at each call."""
    return of_result("project", lambda flat: flat * next(factors))


@pytest.mark.parametrize("unlucky", range(comparison.FAILURES + 1))
def test_some_unlucky_draws_refuse_no_kernel(unlucky):
    """delta_mixer in bfloat16 fails one draw of fifty, and is right."""
    implementation = off_by(itertools.chain([1.02] * unlucky, itertools.repeat(1)))
    verdict = comparison.attempt(OPERATIONS["project"], implementation, *square(mx.bfloat16))
    assert verdict.ok == (unlucky < comparison.FAILURES)


def test_one_gross_error_refuses_a_kernel():
    implementation = off_by(itertools.chain([1, 1.5], itertools.repeat(1)))
    assert not comparison.attempt(OPERATIONS["project"], implementation, *square(mx.bfloat16)).ok


def test_rows_of_one_number_are_taken_together():
    """A score may be small by chance, and what it lacks is then large beside it."""
    truth = mx.array([[1.0], [-0.7], [0.9], [0.01]])
    assert comparison._is_near(comparison._errors(truth + 0.02, [truth], None), mx.bfloat16)
    assert not comparison._is_near(comparison._errors(truth + 0.1, [truth], None), mx.bfloat16)


@pytest.mark.parametrize("operation", IMPLEMENTATIONS)
def test_stock_operations_pass(operation):
    assert comparison.on_example(OPERATIONS[operation], reference(operation), mx.bfloat16).ok


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
    monkeypatch.setattr(arguments, "MOST_BYTES", 1 << 17)
    sizes = dataclasses.replace(TINY, keys=1000, step=24)
    args, kwargs = OPERATIONS["sdpa"].proof.workload("", sizes, tokens, dtype)
    assert not comparison.attempt(OPERATIONS["sdpa"], unlike(fault), args, kwargs).ok
    assert comparison.attempt(OPERATIONS["sdpa"], reference("sdpa"), args, kwargs).ok


def test_a_state_before_the_first_token_is_no_example():
    """Zeros would hide a wrong decay."""
    args, kwargs = OPERATIONS["gated_delta"].proof.example_call(mx.bfloat16)
    kwargs["state"] = mx.zeros_like(kwargs["state"])
    implementation = FAULTS["decay 2 % off"][1]
    assert not comparison.attempt(OPERATIONS["gated_delta"], implementation, args, kwargs).ok
