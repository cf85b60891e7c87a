"""One trial: compares a function with stock MLX and with the truth on the arguments of a call."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import BoundArguments, signature
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.nested import arrays, describe
from mlx_moeflux.kernels.operation import REFERENCE, Function, Operation
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.verify import arguments, failures
from mlx_moeflux.kernels.verify.verdicts import Verdict

# What stock MLX may be off, root mean square by root mean square; a wrong operation is off by more
# than a tenth.
STOCK_LIMITS = {mx.float32: 2e-4, mx.float16: 1e-2, mx.bfloat16: 4e-2}
LIMIT_OF_TF32 = 4e-3
# What an implementation may be off where stock is exact: half a unit in the last place of 16 bits,
# and in float32 what sums of some thousand terms lose.
FLOORS = {mx.float32: 2e-5, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}

# Draws of arguments: of the call, then its numbers in other orders. An implementation is right
# after so many passes, and wrong after so many failures, of draws in which stock is right. A right
# one fails up to one draw in fifty, where a row's terms cancel by chance. One error of so many
# times all limits is no rounding, and ends the trial. But of a router's experts two may be as good
# as equal, and then one draw says nothing.
DRAWS, PASSES, FAILURES = 12, 3, 5
GROSS = 4.0


class _StockOnly(threading.local):
    """on: Only stock operations may be used by this thread, as within a trial."""

    on = False


stock_only = _StockOnly()


class Errors(NamedTuple):
    """The errors of an array. They are infinite for NaN, and for integers that differ.

    rms: Root mean square of a row's error, divided by that of the true row; the largest.
    worst: The largest error, divided by the largest true number.
    slope: How much longer or shorter a row is in the direction of the true one, as a share; the
        largest.
    size: Numbers in a row.
    """

    rms: float
    worst: float
    slope: float
    size: int


def attempt(
    operation: Operation, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Verdict:
    """Try `function` on the arguments of a call; the reference itself is held against the absolute
    limit. Evaluates."""
    reference = operation.implementations[REFERENCE].function
    call = signature(reference).bind(*args, **kwargs)
    call.arguments.pop("steps", None)
    if call.arguments.get("exchange") is not None:
        # Other processes may have no such trial now.
        call.arguments["exchange"] = lambda *given: given[-1]
    call = arguments.cut(operation, function, call)
    dtype = arguments.dtype_of(call)
    floor = FLOORS[dtype] * operation.proof.floor
    least, passed, failed, without_stock = math.inf, 0, 0, 0
    reason = "no finite arguments to try it on"
    for drawn, truth, rows in _draws(operation, call):
        actual, broken = _run(function, drawn)
        if broken:
            return Verdict(False, reason=broken)
        errors = _errors(actual, truth, rows)
        least = min(least, max((e.rms for e in errors), default=0.0))
        reason = f"error {least:.2g}"
        if function is reference:
            if _is_near(errors, dtype):
                return Verdict(True, least)
            continue
        with _references():
            stock, broken = _run(reference, drawn)
        naive = _errors(stock, truth, rows)
        if broken or not _is_near(naive, dtype):
            # Stock is wrong, or a router's last two experts are as good as equal.
            without_stock += _is_near(errors, dtype)
            continue
        if describe(actual) != describe(stock):
            return Verdict(False, reason=f"returns {describe(actual)}, not {describe(stock)}")
        pairs = list(zip(errors, naive, strict=True))
        right = all(_within(*pair, floor) for pair in pairs)
        if rows is not None:  # of all rows the errors say as much
            right = right and _is_like(actual, stock, naive, floor)
        passed, failed = passed + right, failed + (not right)
        if passed == PASSES:
            return Verdict(True, least)
        gross = any(
            e.rms > GROSS * max(_rms_limit(n, floor), _stock_limit(dtype)) for e, n in pairs
        )
        if failed == FAILURES or (gross and not operation.proof.chooses):
            break
    if without_stock >= PASSES and not failed:
        return Verdict(True, least)
    return Verdict(False, None if math.isinf(least) else least, reason)


def _is_near(errors: Sequence[Errors], dtype: mx.Dtype) -> bool:
    """Return True if errors are so small that they can be rounding."""
    limit = _stock_limit(dtype)
    return bool(errors) and all(e.rms <= limit and e.slope <= limit for e in errors)


def _stock_limit(dtype: mx.Dtype) -> float:
    tf32 = dtype == mx.float32 and device.rounds_to_tf32()
    return LIMIT_OF_TF32 if tf32 else STOCK_LIMITS[dtype]


def _within(error: Errors, naive: Errors, floor: float) -> bool:
    """Return True if an error is at most twice the naive one. Rounding has no direction, so an
    epsilon or a factor that is a little wrong shows in the slope before it shows elsewhere."""
    return (
        error.rms <= _rms_limit(naive, floor)
        and error.worst <= 2 * naive.worst + 2 * floor
        and error.slope <= 2 * naive.slope + floor / 8 + floor / math.sqrt(error.size)
    )


def _rms_limit(naive: Errors, floor: float) -> float:
    return 2 * naive.rms + floor / 2


def _is_like(actual: Any, stock: Any, naive: Sequence[Errors], floor: float) -> bool:
    """Return True if a result is everywhere as close to stock as errors on sampled rows allow."""
    return all(
        e.rms <= 3 * n.rms + floor and e.worst <= 5 * n.worst + 4 * floor
        for e, n in zip(_errors(actual, arrays(stock), None), naive, strict=True)
    )


Draw = tuple[BoundArguments, list[mx.array], "np.ndarray | None"]


def _draws(operation: Operation, call: BoundArguments) -> Iterator[Draw]:
    """Yield arguments, the true results, and the rows that these are, None for all: first for the
    call's numbers, then for the same in other orders."""
    for draw in range(DRAWS):
        with mx.stream(mx.cpu):
            drawn = arguments.drawn(operation, call, keep=draw == 0)
        rows = arguments.sampled_rows(operation, drawn)
        if rows is None:
            truth = _truth(operation, drawn)
        else:
            # One by one, so that few experts' matrices are copied at a time.
            calls = (arguments.of_row(operation, drawn, row) for row in rows.tolist())
            each = [_truth(operation, one) for one in calls]
            results = map(list, zip(*each, strict=True))
            truth = [mx.concatenate(parts, -2, stream=mx.cpu) for parts in results]
        if all(_is_finite(array) for array in truth):
            yield drawn, truth, rows


def _truth(operation: Operation, call: BoundArguments) -> list[mx.array]:
    """Return the results of the reference on the CPU in float32, evaluated."""
    with _references(), mx.stream(mx.cpu):
        wide: Any = {name: arguments.wide(value) for name, value in call.arguments.items()}
        reference = operation.implementations[REFERENCE].function
        truth = arrays(arguments.called(reference, BoundArguments(call.signature, wide)))
        mx.eval(truth)
    return truth


def _run(function: Function, call: BoundArguments) -> tuple[Any, str]:
    """Return what `function` gives, evaluated, or None and why it fails."""
    try:
        result = arguments.called(function, call)
        mx.eval(arrays(result))
        return result, ""
    except (ShapeError, UnsupportedError) as error:
        return None, f"refuses the arguments: {error}"
    except (RuntimeError, ValueError) as error:
        if failures.lacks_memory(error):
            raise  # it says nothing of the kernel
        # What MLX raises when Metal's compiler or a launch fails.
        return None, " ".join(str(error).split())[:300]


@contextmanager
def _references() -> Iterator[None]:
    """Operations that are called within, by a function among the arguments, are stock MLX."""
    before, stock_only.on = stock_only.on, True
    try:
        yield
    finally:
        stock_only.on = before


def _errors(actual: Any, truth: Sequence[mx.array], rows: np.ndarray | None) -> list[Errors]:
    found = arrays(actual)
    if len(found) != len(truth):
        return []
    return [_errors_of(a, t, rows) for a, t in zip(found, truth, strict=True)]


def _errors_of(actual: mx.array, truth: mx.array, rows: np.ndarray | None) -> Errors:
    if not _is_finite(actual):
        return Errors(math.inf, math.inf, math.inf, 1)
    with mx.stream(mx.cpu):
        if rows is not None:
            actual = mx.take(actual, mx.array(rows), -2)
        # Of a large matrix only the first columns may be in the truth.
        if truth.ndim and actual.shape[:-1] == truth.shape[:-1]:
            actual = actual[..., : truth.shape[-1]]
        a, t = _numbers(actual), _numbers(truth)
    if a.shape != t.shape or (a.dtype.kind != "f" and (a != t).any()):
        return Errors(math.inf, math.inf, math.inf, 1)
    if a.dtype.kind != "f" or not t.size:
        return Errors(0.0, 0.0, 0.0, 1)
    size = t.shape[-1] if t.ndim else 1
    # One number may be small because its terms cancel; several together are not.
    size = t.size if size == 1 else size
    d, t = (a - t).reshape(-1, size), t.reshape(-1, size)

    def mean_product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.einsum("ij,ij->i", x, y) / size

    # A row of small numbers is held against a quarter of the others' size.
    squares = mean_product(t, t)
    squares = np.maximum(squares, max(squares.mean() / 16, 1e-30))
    rms = np.sqrt(mean_product(d, d) / squares)
    slope = np.abs(mean_product(d, t)) / squares
    worst = _largest(d) / max(_largest(t), 1e-15)
    return Errors(float(rms.max()), worst, float(slope.max()), size)


def _largest(numbers: np.ndarray) -> float:
    return float(max(numbers.max(), -numbers.min()))


def _numbers(array: mx.array) -> np.ndarray:
    """float64, or integers as they are."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return np.array(array)
    return np.asarray(array.astype(mx.float32, stream=mx.cpu)).astype(np.float64)


def _is_finite(array: mx.array) -> bool:
    with mx.stream(mx.cpu):
        return bool(mx.isfinite(array).all().item())


def largest_error(actual: Any, expected: Any) -> float:
    """Return the largest error of arrays, nested alike, each by the largest expected value;
    infinite for NaN, and where integers differ."""
    return max((e.worst for e in _errors(actual, arrays(expected), None)), default=0.0)


def on_example(
    operation: Operation, function: Function, dtype: mx.Dtype, form: str | None = None
) -> Verdict:
    """Return the verdict of `function` on a small call with every option of the operation, or on
    one of its other forms, for ``check``."""
    args, kwargs = operation.proof.example_call(dtype, form=form)
    mx.eval(arrays((args, list(kwargs.values()))))
    return attempt(operation, function, args, kwargs)
