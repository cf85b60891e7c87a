"""Oracle: the reference of an operation. What it takes, each implementation takes as well and
gives the same, or refuses in so many words: None where there may be none, flags the other way, and
what is seldom given."""

from __future__ import annotations

import inspect
from itertools import combinations

import mlx.core as mx
import pytest

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.operation import REFERENCE
from mlx_moeflux.kernels.registry import OPERATIONS
from tests.kernels.experts import BETWEEN
from tests.kernels.harness import emulated
from tests.kernels.implementations import IMPLEMENTATIONS, differences
from tests.kernels.metal.emulator import Emulator

T, C, E, F = examples.T, examples.TINY.C, examples.TINY.E, examples.TINY.F
SELDOM = {
    "project": {
        "weights": lambda dtype: [Weight(mx.random.normal((C, C)).astype(dtype))],
        "residual": lambda dtype: mx.random.normal((3, C)).astype(dtype),
    },
    "delta_mixer": {
        "mask": lambda _: mx.arange(T) < mx.array([[T], [T - 2]]),
        "lengths": lambda _: mx.array([T, T - 2], mx.int32),
        "gate": lambda _: "sigmoid",
    },
    "gated_delta": {"mask": lambda _: mx.arange(T) < mx.array([[T], [T - 2]])},
    "norm_rope": {
        "frequencies": lambda _: 1e3 ** (-mx.arange(0, 16, 2) / 16),
        "offset": lambda _: mx.array([3, 0], mx.int32),
    },
    "latent_prepare": {"offset": lambda _: mx.array([3, 0], mx.int32)},
    "choose_positions": {
        "length": lambda _: mx.array([44], mx.int32),
        "tail": lambda dtype: mx.random.normal((2, 1, 16, 32)).astype(dtype),
    },
    "latent_attention": {"start": lambda _: mx.array([0, 1], mx.int32)},
    "latent_prefill": {"start": lambda _: mx.array([0, 1], mx.int32)},
    "moe_step": {
        "weights": lambda dtype: [
            Weight(mx.random.normal((E, C)), precise=True),
            Weight(mx.random.normal((2 * F, C)).astype(dtype), outs=(F, F)),
        ]
    },
    "sdpa": {
        "length": lambda _: mx.array([T + 2, T + 3], mx.int32),
        "sinks": lambda dtype: mx.random.normal((examples.TINY.Hq,)).astype(dtype),
    },
    "paged_sdpa": {
        "sinks": lambda dtype: mx.random.normal((examples.TINY.Hq,)).astype(dtype),
    },
}


def changes(operation: str):
    """Name of an argument and what else it may be."""
    for name, parameter in inspect.signature(OPERATIONS[operation].reference).parameters.items():
        if "None" in str(parameter.annotation):
            yield name, lambda _: None
        elif parameter.annotation == "bool":
            yield name, lambda _, default=parameter.default: not default
    yield from SELDOM.get(operation, {}).items()


def calls(operation: str, dtype: mx.Dtype, implementation: str, pairs: bool):
    """A call of the operation with one argument changed, with two (`pairs`), and with all: words
    and the arguments. Those that the reference does not take are left out."""
    reference = OPERATIONS[operation].reference
    names = list(inspect.signature(reference).parameters)
    every = list(changes(operation))
    several = combinations(every, 2) if pairs else ()
    for chosen in [(), *combinations(every, 1), *several, tuple(every)]:
        args, kwargs = OPERATIONS[operation].proof.example_call(dtype)
        if implementation == "blas":
            kwargs.pop("start", None)  # which BLAS refuses
        given = dict(zip(names, args, strict=False)) | kwargs
        given |= {name: value(dtype) for name, value in chosen}
        args = tuple(given.pop(name) for name in names[: len(args)])
        try:
            mx.eval(reference(*args, **given))
        except (AttributeError, IndexError, TypeError, ValueError):
            continue
        yield ", ".join(name for name, _ in chosen), args, given


NAMED = [
    (op, name)
    for op, implementations in IMPLEMENTATIONS.items()
    for name in implementations
    if name != REFERENCE
]


@pytest.mark.parametrize(
    "pairs", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["singly", "in pairs"]
)
@pytest.mark.parametrize("back_end", ["metal", pytest.param("cuda", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("operation", "name"), NAMED, ids=map("=".join, NAMED))
def test_a_form_takes_what_its_reference_takes(operation, name, back_end, pairs):
    mx.random.seed(0)
    implementation, wrong, taken = IMPLEMENTATIONS[operation][name], [], 0
    # Where experts are chosen in the middle, float32 alone chooses the same; so does BLAS.
    exact = operation == "moe_step" or not implementation.kernels
    options = {"name": back_end, "schedules": Emulator.FIRST, "partly_written": BETWEEN}
    with emulated(**options):
        dtype = mx.float32 if exact else mx.bfloat16
        for words, args, kwargs in calls(operation, dtype, name, pairs):
            try:
                actual = implementation(*args, **kwargs)
            except (ShapeError, UnsupportedError) as error:
                if implementation.takes is not None and implementation.takes(*args, **kwargs):
                    wrong.append(f"with other {words}: said that it takes it, but {error}")
                continue
            taken += 1
            found = differences(operation, args, kwargs, actual)
            wrong += [f"with other {words}: {what}" for what in found]
    assert not wrong, "\n".join(wrong)
    assert taken
