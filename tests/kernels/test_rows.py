"""Oracle: calls of one row. An implementation that joins rows gives each of them the bits of a call
by itself, and an operation with another one calls it row by row."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from itertools import product

import mlx.core as mx
import pytest

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels import rows
from mlx_moeflux.kernels.examples import LARGE, SMALL, Sizes
from mlx_moeflux.kernels.operation import REFERENCE
from mlx_moeflux.kernels.registry import OPERATIONS, Kernels
from tests.kernels.experts import BETWEEN
from tests.kernels.harness import emulated, require_gpu
from tests.kernels.implementations import arrays_of
from tests.kernels.metal.emulator import Emulator

COUNT = 3  # the rows of the examples that have a fixed number
JOINING = [
    (operation, name)
    for operation, record in OPERATIONS.items()
    for name, implementation in record.implementations.items()
    if implementation.joins
]
# What a decode step on a GPU calls with all rows at once.
EXPECTED = {
    *("project", "norm_rope", "softmax_top_k", "sigmoid_top_k", "expert_mix", "moe_combine"),
    *("add_shared", "moe_step", "read_streams", "sdpa"),
}
SLOW = ("moe_step", "read_streams")  # several kernels to compile


def test_what_decode_calls_between_its_states_joins_rows():
    assert {operation for operation, _ in ON_GPUS} == EXPECTED


def example(operation: str, dtype: mx.Dtype, form: str | None = None):
    return OPERATIONS[operation].proof.example_call(dtype, tokens=COUNT, form=form)


def workload(operation: str, kind: str, sizes: Sizes, dtype: mx.Dtype):
    """A call as models of such sizes make it."""
    return OPERATIONS[operation].proof.workload(kind, sizes, COUNT, dtype)


def as_rows(operation: str, args: tuple, kwargs: dict) -> tuple[list, dict]:
    """A call of COUNT tokens as one of rows, each a sequence of one token."""
    record = OPERATIONS[operation]
    named = list(signature(record.reference).parameters)
    call = dict(zip(named, args, strict=False)) | kwargs
    for name in record.rows:
        value = call.get(name)
        if isinstance(value, int):  # an offset
            call[name] = mx.array([value + r for r in range(COUNT)], mx.int32)
        elif value is not None and value.shape[0] != COUNT:
            call[name] = value[:1].swapaxes(0, record.tokens.get(name, 1))
    if operation == "sdpa":
        call |= {name: call[name][:1] for name in ("k", "v", "start") if name in call}
        call |= {"mask": None, "length": call["length"] - COUNT + 1}
    return [call[name] for name in named[: len(args)]], {name: call[name] for name in kwargs}


def compare(operation: str, name: str, call: tuple) -> None:
    record = OPERATIONS[operation]
    implementation = record.implementations[name]
    args, kwargs = as_rows(operation, *call)
    if name == REFERENCE and record.replaces:
        kwargs["steps"] = Kernels()
    assert implementation.joins_rows(*args, **kwargs)
    with rows.together(COUNT):
        found = implementation.function(*args, **kwargs)
    expected = one_by_one(operation, implementation.function, args, kwargs)
    for actual, single in zip(arrays_of(found), arrays_of(expected), strict=True):
        assert actual.shape == single.shape
        assert mx.isfinite(single).all().item()
        assert mx.array_equal(actual, single).item()
        assert single.dtype == mx.uint32 or not mx.array_equal(single[0], single[1]).item()


def one_by_one(operation: str, function, args, kwargs):
    record = OPERATIONS[operation]
    named = tuple(signature(record.reference).parameters)
    return rows.one_by_one(function, COUNT, args, kwargs, named, record.rows)


ON_GPUS = [(op, name) for op, name in JOINING if OPERATIONS[op].implementations[name].kernels]


@pytest.mark.parametrize(("operation", "name"), [one for one in JOINING if one not in ON_GPUS])
def test_joined_on_the_cpu(operation, name):
    compare(operation, name, example(operation, mx.float32))
    compare(operation, name, workload(operation, "", SMALL, mx.float32))


@pytest.mark.parametrize(
    ("operation", "name", "dtype"),
    [
        pytest.param(
            *one, dtype, marks=[pytest.mark.slow] * (one[0] in SLOW or dtype != mx.float32)
        )
        for one in ON_GPUS
        for dtype in (mx.float32, mx.bfloat16)
    ],
    ids=str,
)
def test_joined_by_kernels(operation, name, dtype):
    with emulated(schedules=Emulator.FIRST, partly_written=BETWEEN):
        compare(operation, name, example(operation, dtype))


FORMS = [(o, n, f) for o, n in ON_GPUS for f in OPERATIONS[o].proof.forms]


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "name", "form"), FORMS)
def test_joined_by_kernels_of_blocks(operation, name, form):
    with emulated(schedules=Emulator.FIRST, partly_written=BETWEEN):
        compare(operation, name, example(operation, mx.bfloat16, form))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("operation", "name"), ON_GPUS)
def test_joined_on_a_gpu(operation, name, dtype):
    require_gpu()
    compare(operation, name, example(operation, dtype))
    for kind, sizes in product(OPERATIONS[operation].proof.workloads, (SMALL, LARGE)):
        compare(operation, name, workload(operation, kind, sizes, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "name", "form"), FORMS)
def test_blocks_joined_on_a_gpu(operation, name, form):
    require_gpu()
    compare(operation, name, example(operation, mx.bfloat16, form))


# ---- What an operation does with rows.


@pytest.mark.parametrize("operation", sorted({operation for operation, _ in JOINING}))
def test_a_call_of_rows_has_the_size_of_one(operation):
    args, _ = as_rows(operation, *example(operation, mx.float32))
    one, dispatcher = [rows.of_row(value, 0) for value in args], Kernels()[operation]
    with rows.together(COUNT):
        assert dispatcher.size(args) == dispatcher.size(one[:1]) == 1


def test_given_callables_see_single_rows():
    seen = []

    def given(logits, *, k, normalise=True):
        seen.append(logits.shape)
        return OPERATIONS["softmax_top_k"].reference(logits, k=k, normalise=normalise)

    logits, options = mx.random.normal((COUNT, 20)), {"k": 3}
    with rows.together(COUNT):
        ids, weights = Kernels({"softmax_top_k": given}).softmax_top_k(logits, **options)
    assert seen == [(1, 20)] * COUNT
    expected = OPERATIONS["softmax_top_k"].reference(logits, **options)
    assert mx.array_equal(ids, expected[0]).item()
    assert mx.array_equal(weights, expected[1]).item()


def test_what_refuses_rows_is_asked_for_each(monkeypatch):
    asked = []

    def refuses(x, weights, **options):
        asked.append(x.shape)
        raise UnsupportedError("not this")

    record = OPERATIONS["project"]
    refusing = replace(record.implementations["blas"], function=refuses)
    monkeypatch.setitem(record.implementations, "blas", refusing)
    args, kwargs = as_rows("project", *example("project", mx.float32))
    with rows.together(COUNT):
        found = Kernels().project(*args, **kwargs)
    assert asked == [args[0].shape] + [args[0][:1].shape] * COUNT
    expected = one_by_one("project", record.reference, args, kwargs)
    for a, b in zip(found, expected, strict=True):
        assert mx.array_equal(a, b).item()


def test_calls_made_in_parts_are_made_for_each_row_where_none_joins():
    args, kwargs = as_rows("expert_mix", *example("expert_mix", mx.float32))
    seen = []

    def given(x, slots, weights, bank, *, initial=None):
        seen.append(len(x))
        return OPERATIONS["expert_mix"].reference(x, slots, weights, bank, initial=initial)

    with rows.together(COUNT):
        mix = Kernels({"expert_mix": given}).expert_mix.implementation(*args, **kwargs)
        mix.function(*args, **kwargs)
    assert seen == [1] * COUNT
