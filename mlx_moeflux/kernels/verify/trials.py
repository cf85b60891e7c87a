"""Trials: is an implementation right on this GPU? Asked before its first use in an unknown place.

A *variant* is what an implementation launches for a call: kernels, templates, dtypes. Before a
variant first runs on a GPU, with a version of MLX and a build of macOS that are not known, the call
is computed three times: by the implementation, by stock MLX, and by the reference on the CPU in
float32, which is the truth. The implementation passes if its result is finite everywhere, close to
stock everywhere, and off from the truth by at most twice what stock is off. Stock operations have
trials too, against an absolute limit; :mod:`mlx_moeflux.kernels.verify.verdicts` keeps verdicts.

Where a record declares calls as ``timed``, an implementation that passed is then timed beside stock
MLX, once for calls of a size, and stock MLX computes them where it is faster in every round. The
choice is kept with the verdicts before the first result of such a call is used, and never made
again, so that streamed and resident models follow the same one. The table of kernels holds where it
cannot be kept, on a virtual GPU, and while the machine is busy.

A trial runs on the arrays of the call, because only those have the shapes, the layout and the banks
that will be used. A graph that ``mx.compile`` traces has no values; :func:`compiled` therefore runs
a function once without tracing where an operation in it was never tried.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import BoundArguments, signature
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlx_moeflux._version import __version__
from mlx_moeflux.errors import ExactnessError, ShapeError, UnsupportedError
from mlx_moeflux.kernels.examples import Arguments, fresh_key
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.nested import arrays, describe
from mlx_moeflux.kernels.operation import REFERENCE, Function, Implementation, Operation
from mlx_moeflux.kernels.runtime import device, launcher
from mlx_moeflux.kernels.verify import failures, timing, verdicts
from mlx_moeflux.kernels.verify.verdicts import Choice, Verdict

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

# Bytes of arguments in which numbers change places, of each that is copied in float32, and of the
# positions of a cache; larger ones are those of the call. Arrays of one number say nothing and are
# replaced up to the second size.
MOST_BYTES, MOST_OF_ONE_NUMBER = 4 * 2**20, 32 * 2**20
# Tokens of a prompt's trial, at least; rows of which the truth is computed, and half as many where
# the experts of one have more than MOST_BYTES.
TOKENS, ROWS = 64, 4
# Positions of a cache's trial are a multiple of this, and so of the rows of its tail.
POSITIONS = 256

# What an argument is shrunk by.
SHRINKAGE = 1 / 16

# Bytes of the arrays of a call that is timed, at most: stock MLX may allocate as much again. Its
# seconds, at most: a prompt has few calls that take longer.
MOST_TIMED, LONGEST = 64 << 20, 0.1


class _State(threading.local):
    """tracing: A graph without values is being built. pending: Keys of variants in it that need a
    trial. untimed: A choice in it needs times. rehearsing: It is being run for its trials.
    references: Only stock operations may be used."""

    tracing = untimed = rehearsing = references = False
    pending: frozenset[str] = frozenset()


_state = _State()
_warned: set[str] = set()

# Called with how many trials have ended, and how many are known to come with them.
Watcher = Callable[[int, int], None]


class _Watched:
    """Trials of this process that have ended, and who wants to know."""

    ended = 0
    watchers: tuple[Watcher, ...] = ()


@contextmanager
def watched(show: Watcher) -> Iterator[None]:
    """Call `show` before and after each trial inside the block, in the thread that tries: with the
    number of trials that have ended in the block, and of those that are known.

    Those of a traced step are known once it is traced. Those of a prompt are not: a call has no
    arguments before the one in front of it has a result, so the second number grows.
    """
    before = _Watched.ended

    def since(ended: int, known: int) -> None:
        show(ended - before, known - before)

    _Watched.watchers += (since,)
    try:
        yield
    finally:
        _Watched.watchers = tuple(one for one in _Watched.watchers if one is not since)


def _tell() -> None:
    left = sum(verdicts.get(key) is None for key in _state.pending)
    for watcher in _Watched.watchers:
        watcher(_Watched.ended, _Watched.ended + left)


@contextmanager
def _counted(key: str) -> Iterator[None]:
    """Tell the watchers of a trial, around it and the verdict that is kept."""
    before, _state.pending = _state.pending, _state.pending | {key}
    try:
        _tell()
        yield
    finally:
        _state.pending = before
    _Watched.ended += 1
    _tell()


# ---- Calls


def call(
    operation: Operation,
    found: tuple[str, Implementation] | None,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    timed: bool = False,
) -> Any:
    """Compute an operation by `found`, a name and an implementation, by stock MLX where that fails
    its trial or is None, or by one of `others` where stock fails. timed: Stock MLX may compute
    where it is faster.

    Raises:
        ShapeError, UnsupportedError: `found` does not take these arguments.
        ExactnessError: Nothing is right here.
    """
    reference = operation.implementations[REFERENCE].function
    if _state.references:
        return reference(*args, **kwargs)
    if found is not None:
        result, right = launched(operation, *found, args, kwargs)
        if right:
            if timed and _stock_is_faster(operation, *found, args, kwargs):
                return reference(*args, **kwargs)
            return result
    if operation.composed and kwargs.get("steps") is not None:
        return reference(*args, **kwargs)
    if found is not None and _state.tracing and _state.pending:
        return reference(*args, **kwargs)  # the trace is made again
    key = _key(operation.name, REFERENCE, _shapes(args, kwargs))
    if _verdict(key, operation, REFERENCE, args, kwargs, "").ok:
        return reference(*args, **kwargs)
    for name, other in operation.implementations.items():
        tried = name == REFERENCE or (found is not None and name == found[0])
        if tried or other.mixes_rows or failures.failed(other):
            continue
        try:
            result, right = launched(operation, name, other, args, kwargs)
        except (ShapeError, UnsupportedError):
            continue
        if right:
            return result
    raise ExactnessError(
        f"'{operation.name}' is wrong on {verdicts.gpu()}, by stock MLX and by every kernel that "
        "takes these arguments; 'mlx_moeflux check' shows by how much."
    )


def launched(
    operation: Operation,
    name: str,
    implementation: Implementation,
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[Any, bool]:
    """Return a result of `implementation` that is not evaluated, and whether it can be trusted."""
    if _state.references:
        return None, False
    with launcher.recorded() as launches:
        result = implementation.function(*args, **kwargs)
    key = _key(operation.name, name, sorted(set(launches)) or _shapes(args, kwargs))
    texts = ", ".join(sorted({launch[0] for launch in launches}))
    return result, _verdict(key, operation, name, args, kwargs, texts).ok


def _stock_is_faster(
    operation: Operation,
    name: str,
    implementation: Implementation,
    args: tuple,
    kwargs: dict[str, Any],
) -> bool:
    """Return True if stock MLX is right and computes calls of this size faster than `name`, which
    is right: what was chosen, else what their times say."""
    timed = operation.proof.timed
    if timed is None or not timed(*args, **kwargs):
        return False
    sizes, nbytes = _sizes(operation, args, kwargs)
    if nbytes > MOST_TIMED:
        return False
    kind = "" if operation.kind is None else operation.kind(*args)
    key = f"{_key(operation.name, name, [__version__, kind, *sizes])} beside stock"
    if (chosen := verdicts.choice(key)) is None:
        if _state.tracing or not _have_values([args, list(kwargs.values())]):
            _state.untimed |= _state.tracing
            return False
        chosen = _chosen(key, operation, name, implementation, args, kwargs)
    if not chosen.stock:
        return False
    stock = _key(operation.name, REFERENCE, _shapes(args, kwargs))
    return _verdict(stock, operation, REFERENCE, args, kwargs, "").ok


def _chosen(
    key: str,
    operation: Operation,
    name: str,
    implementation: Implementation,
    args: tuple,
    kwargs: dict[str, Any],
) -> Choice:
    """Time an implementation beside stock MLX on the arguments of a call and keep the choice."""
    if verdicts.is_virtual():
        return verdicts.leave(key, "the GPU is virtual")
    if not verdicts.can_keep():
        return verdicts.leave(key, "there is no folder for the choice")
    both = {name: implementation.function, REFERENCE: operation.reference}
    refusals: list[str] = []
    calls = _rotated(operation, args, kwargs)
    times = timing.times(both, calls, longest=LONGEST, report=refusals.append)
    if refusals:
        return verdicts.leave(key, refusals[0])
    if not times:
        return verdicts.choose(key, Choice(False, reason=f"a call takes more than {LONGEST} s"))
    if not timing.is_quiet(times):
        return verdicts.leave(key, "the machine was busy")
    us = {n: float(f"{1e6 * timing.median(each):.3g}") for n, each in times.items()}
    return verdicts.choose(key, Choice(timing.is_faster(times[REFERENCE], times[name]), us))


def _rotated(operation: Operation, args: tuple, kwargs: dict[str, Any]) -> list[Arguments]:
    """Return calls with the same numbers, evaluated, each with caches of its own. Other arguments
    of calls that are timed were computed just before, in a model too."""
    call = signature(operation.reference).bind(*args, **kwargs)
    caches = {name: call.arguments[name] for name in operation.proof.positions}
    most = timing.ROTATED // max(1, sum(array.nbytes for array in caches.values()))
    calls: list[Arguments] = []
    for _ in range(min(timing.MANY, most) if caches else 0):
        own: Any = {name: array + mx.zeros((), array.dtype) for name, array in caches.items()}
        mx.eval(list(own.values()))
        bound = BoundArguments(call.signature, call.arguments | own)
        calls.append((bound.args, bound.kwargs))
    return calls or [(args, kwargs)]


# Asked at each call of a prompt.
_signature = functools.cache(signature)


def _sizes(operation: Operation, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], int]:
    """Return what decides which of two implementations is faster, dtypes, words, and lengths within
    a factor of two; and the bytes of all arrays. Caches count as far as they are in use: what a
    state has room for depends on where it comes from."""
    call = _signature(operation.reference).bind(*args, **kwargs).arguments
    found, nbytes = [], 0
    positions, length = operation.proof.positions, call.get("length")
    for name, value in call.items():
        if isinstance(value, str | bool):
            found.append((name, value))
        for array in arrays(value):
            shape = list(array.shape)
            if name in positions and length is not None:
                shape[positions[name]] = length
            nbytes += math.prod(shape) * array.dtype.size
            found.append((name, str(array.dtype), [(n - 1).bit_length() for n in shape]))
    return found, nbytes


def _key(operation: str, name: str, variant: Any) -> str:
    digest = hashlib.blake2b(repr(variant).encode(), digest_size=12).hexdigest()
    return f"{operation}={name} {digest}"


def _shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what stock MLX chooses its kernels by, but for lengths that grow."""
    first = arrays(args)[0].shape
    tokens = math.prod(first[:-1])
    size = (tokens > 1) + (tokens > 8) + (tokens > 64)
    parts = [(str(a.dtype), a.ndim, a.shape[-1:]) for a in arrays((args, list(kwargs.values())))]
    return [size, *parts]


def _verdict(
    key: str,
    operation: Operation,
    name: str,
    args: tuple,
    kwargs: dict[str, Any],
    launched: str,
) -> Verdict:
    """Return what is known, else try. While a graph is traced, what is unknown is not used."""
    if (known := verdicts.get(key)) is not None:
        return known
    if _state.tracing or not _have_values((args, list(kwargs.values()))):
        if _state.tracing:
            _state.pending |= {key}
        return Verdict(name == REFERENCE, reason="not tried yet")
    with _counted(key):
        with verdicts.running(key):
            # For want of memory this raises, and the next call tries again.
            verdict = attempt(operation, operation.implementations[name].function, args, kwargs)
        verdict = dataclasses.replace(verdict, launched=launched)
        verdicts.put(key, verdict)
    if not verdict.ok:
        _warn(operation.name, name, verdict)
    return verdict


def tracing() -> bool:
    """Return True while this thread builds a graph without values, see :class:`compiled`."""
    return _state.tracing


def rehearsing() -> bool:
    """Return True while this thread runs a function for the trials in it alone, see
    :class:`compiled`. Other processes may have no such need."""
    return _state.rehearsing


def _have_values(value: Any) -> bool:
    """Evaluate; return False for arrays that somebody else traces."""
    try:
        mx.eval(arrays(value))
    except ValueError as error:
        if "function transformations" in str(error):
            return False
        raise
    return True


def _warn(operation: str, name: str, verdict: Verdict) -> None:
    """Warn once of each implementation; later processes are silent."""
    if (what := f"{operation}={name}") in _warned:
        return
    _warned.add(what)
    instead = "a kernel computes" if name == REFERENCE else "stock MLX computes"
    warnings.warn(
        f"{what} is not used on {verdicts.gpu()} because its trial failed ({verdict.reason}); "
        f"{instead} instead, see 'mlx_moeflux check'.",
        RuntimeWarning,
        stacklevel=4,
    )


class compiled:  # called like mx.compile
    """``mx.compile(function)`` whose operations are tried before they are used.

    function: Has no side effects. It runs a second time, not traced, where a trace has met an
    operation that needs a trial, and is then traced again.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function, self._run = function, mx.compile(_traced(function))

    def __call__(
        self,
        *inputs,
        ready: Callable[[], object] = lambda: None,
        repeated: Callable[[], object] = lambda: None,
    ):
        """Return the function's results. ready: Called before anything that needs the values of
        `inputs`. repeated: Called when the function has run a second time, parts of which were
        evaluated."""
        outputs = self._run(*inputs)
        if _state.pending or _state.untimed:
            ready()
            _state.rehearsing = True
            try:
                self._function(*tree_map(_as_traced, inputs))
            finally:
                _state.rehearsing = False
            repeated()
            self._run = mx.compile(_traced(self._function))
            _state.pending, _state.untimed = frozenset(), False
            outputs = self._run(*inputs)
            _state.pending, _state.untimed = frozenset(), False
        return outputs


def _as_traced(value: Any) -> Any:
    """Return an array with the same numbers that is no view of a known buffer, as in a trace. Its
    launches are then those of the trace: a kernel that is given a buffer is another variant."""
    return mx.stop_gradient(value) if isinstance(value, mx.array) else value


def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    # No method: the arrays of a trace would wait for the garbage collector.
    def traced(*inputs):
        before, _state.tracing = _state.tracing, True
        try:
            return function(*inputs)
        finally:
            _state.tracing = before

    return traced


# ---- One trial


class Errors(NamedTuple):
    """The errors of an array. They are infinite for NaN, and for integers that differ.

    rms: Root mean square of a row's error, divided by that of the true row; the largest. worst: The
    largest error, divided by the largest true number. slope: How much longer or shorter a row is in
    the direction of the true one, as a share; the largest. size: Numbers in a row.
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
    call = _cut(operation, function, call)
    dtype = _dtype(call)
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
            drawn = _drawn(operation, call, keep=draw == 0)
        rows = _sampled_rows(operation, drawn)
        if rows is None:
            truth = _truth(operation, drawn)
        else:
            # One by one, so that few experts' matrices are copied at a time.
            each = [_truth(operation, _of_row(operation, drawn, row)) for row in rows.tolist()]
            results = map(list, zip(*each, strict=True))
            truth = [mx.concatenate(parts, -2, stream=mx.cpu) for parts in results]
        if all(_is_finite(array) for array in truth):
            yield drawn, truth, rows


def _truth(operation: Operation, call: BoundArguments) -> list[mx.array]:
    """Return the results of the reference on the CPU in float32, evaluated."""
    with _references(), mx.stream(mx.cpu):
        wide: Any = {name: _wide(value) for name, value in call.arguments.items()}
        reference = operation.implementations[REFERENCE].function
        truth = arrays(_called(reference, BoundArguments(call.signature, wide)))
        mx.eval(truth)
    return truth


def _run(function: Function, call: BoundArguments) -> tuple[Any, str]:
    """Return what `function` gives, evaluated, or None and why it fails."""
    try:
        result = _called(function, call)
        mx.eval(arrays(result))
        return result, ""
    except (ShapeError, UnsupportedError) as error:
        return None, f"refuses the arguments: {error}"
    except (RuntimeError, ValueError) as error:
        if failures.lacks_memory(error):
            raise  # it says nothing of the kernel
        # What MLX raises when Metal's compiler or a launch fails.
        return None, " ".join(str(error).split())[:300]


def _called(function: Function, call: BoundArguments) -> Any:
    return function(*call.args, **call.kwargs)


@contextmanager
def _references() -> Iterator[None]:
    """Operations that are called within, by a function among the arguments, are stock MLX."""
    before, _state.references = _state.references, True
    try:
        yield
    finally:
        _state.references = before


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


# ---- Arguments of a trial


def _dtype(call: BoundArguments) -> mx.Dtype:
    """The shortest floats among the arguments."""
    found = {array.dtype for array in arrays(list(call.arguments.values()))}
    return next((d for d in (mx.bfloat16, mx.float16) if d in found), mx.float32)


def _cut(operation: Operation, function: Function, call: BoundArguments) -> BoundArguments:
    """Return the call with the first tokens alone, as few as `function` launches the same for, and
    of a cache with as few of the first positions."""
    if any(one.mixes_rows and one.function is function for one in operation.others.values()):
        return call  # fewer rows would be computed in another way
    return _cut_positions(operation, function, _cut_tokens(operation, function, call))


def _cut_tokens(operation: Operation, function: Function, call: BoundArguments) -> BoundArguments:
    if not operation.tokens or call.arguments.get("lengths") is not None:
        return call
    total = _extent(call, operation.tokens)
    causal = call.arguments.get("mask", "causal")
    if causal is not None and causal != "causal" and "length" in call.arguments:
        return call
    length = call.arguments.get("length", 0)
    if total <= TOKENS or not isinstance(length, int):
        return call

    def first(tokens: int) -> BoundArguments:
        some = _map_tokens(operation, call, lambda a, axis: mx.take(a, mx.arange(tokens), axis))
        if "length" in some.arguments:
            some.arguments["length"] = length - (total - tokens)
        return some

    whole = _variant(function, call)
    most, least = TOKENS, 0  # the least that is known to differ
    while most < total and _variant(function, first(most)) != whole:
        most, least = 2 * most, most
    if most >= total:
        return call
    while most - least > TOKENS:
        between = (most + least) // 2
        same = _variant(function, first(between)) == whole
        most, least = (between, least) if same else (most, between)
    return first(most)


def _cut_positions(
    operation: Operation, function: Function, call: BoundArguments
) -> BoundArguments:
    """Return the call of attention over a cache of MOST_BYTES, or of more if that launches other
    kernels."""
    axes, length = operation.proof.positions, call.arguments.get("length")
    if not axes or isinstance(call.arguments.get("mask"), mx.array):
        return call
    caches = {name: call.arguments[name] for name in axes}
    total, tokens = _extent(call, axes), _extent(call, operation.tokens)
    on_device = isinstance(length, mx.array)
    longest: Any = length.max().item() if on_device else total if length is None else length
    fitting = MOST_BYTES // (sum(array.nbytes for array in caches.values()) // total)
    # Rows past the length stay, which must not be read.
    spare = min(total - longest, POSITIONS // 2)
    kept = max(fitting // POSITIONS, -(-(tokens + spare) // POSITIONS)) * POSITIONS
    tail = call.arguments.get("tail")
    rows = 1 if tail is None else tail[0].shape[2]
    whole = _variant(function, call) if kept < total else None
    while kept < total and kept % rows == 0:
        some = dict(call.arguments)
        for name, axis in axes.items():
            some[name] = mx.take(caches[name], mx.arange(kept), axis)
        if longest > kept - spare and length is not None:
            # The newest rows stay where they are in a tail.
            gone = -(-(longest - kept + spare) // rows) * rows
            some["length"] = mx.maximum(length - gone, 1) if on_device else length - gone
            if (start := some.get("start")) is not None:
                some["start"] = mx.maximum(start - gone, 0)
        bound = BoundArguments(call.signature, some)  # pyright: ignore[reportArgumentType]
        if _variant(function, bound) == whole:
            return bound
        kept *= 2
    return call


def _extent(call: BoundArguments, axes: Mapping[str, int]) -> int:
    """Return the length of the first of these axes of arguments."""
    name, axis = next(iter(axes.items()))
    return call.arguments[name].shape[axis]


def _variant(function: Function, call: BoundArguments) -> list[Any]:
    """Return what `function` launches; nothing is evaluated."""
    with launcher.recorded() as launches:
        _called(function, call)
    return sorted(set(launches))


def _map_tokens(operation: Operation, call: BoundArguments, change: Callable) -> BoundArguments:
    """Return the call with ``change(array, axis)`` for each argument that has tokens."""
    changed = dict(call.arguments)
    for name, axis in operation.tokens.items():
        if isinstance(array := changed.get(name), mx.array):
            changed[name] = change(array, axis)
    return BoundArguments(call.signature, changed)  # pyright: ignore[reportArgumentType]


def _of_row(operation: Operation, call: BoundArguments, row: int) -> BoundArguments:
    """Return the call of one of its rows, or of attention of one of its tokens."""
    index = mx.array([row])
    some = _map_tokens(operation, call, lambda array, axis: mx.take(array, index, axis))
    mask, length = call.arguments.get("mask"), call.arguments.get("length")
    if not operation.proof.apart or mask is None:
        return some
    if isinstance(mask, mx.array):
        some.arguments["mask"] = mx.take(mask, index, 2)
        return some
    length = _extent(call, operation.proof.positions) if length is None else length
    some.arguments["length"] = length - (_extent(call, operation.tokens) - 1 - row)
    return some


def _sampled_rows(operation: Operation, call: BoundArguments) -> np.ndarray | None:
    """Return the rows for which the truth is computed, None for all."""
    proof = operation.proof
    if not proof.by_rows and not proof.apart:
        return None
    given = [call.arguments.get(name) for name in operation.tokens]
    with_rows = [array for array in given if isinstance(array, mx.array)]
    if proof.apart:
        total = _extent(call, operation.tokens)
    else:
        total = with_rows[0].shape[-2] if with_rows[0].ndim > 1 else 1
        alike = all(math.prod(a.shape[:-2]) == 1 and a.shape[-2] == total for a in with_rows)
        if not (alike or proof.keeps_axes):
            return None
    most = ROWS
    if isinstance(bank := call.arguments.get("bank"), ExpertBank):
        read = call.arguments["slots"].shape[-1] * sum(a.nbytes for a in bank.flat) // bank.slots
        most = ROWS if read <= MOST_BYTES else ROWS // 2
    if total <= most:
        return None
    return np.unique(np.linspace(0, total - 1, most).astype(np.int64))


def _drawn(operation: Operation, call: BoundArguments, *, keep: bool) -> BoundArguments:
    """Return the call with floats that say something. keep: Those of the call, but for arrays of
    one number, such as a state before the first token; otherwise they change places, in the
    smallest arguments first. Some are shrunk."""
    drawn, left = dict(call.arguments), MOST_BYTES
    for name, value in sorted(call.arguments.items(), key=lambda item: _bytes(item[1])):
        left -= _bytes(value)
        drawn[name] = _redrawn(value, keep or left < 0)
    for name in operation.proof.shrunk:
        if drawn.get(name) is not None:
            drawn[name] = drawn[name] * SHRINKAGE
    return BoundArguments(call.signature, drawn)  # pyright: ignore[reportArgumentType]


def _bytes(value: Any) -> int:
    return sum(array.nbytes for array in arrays(value))


def _redrawn(value: Any, keep: bool) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_redrawn(entry, keep) for entry in value)
    if not isinstance(value, mx.array) or not mx.issubdtype(value.dtype, mx.floating):
        return value
    if value.size < 2 or value.nbytes > MOST_OF_ONE_NUMBER:
        return value
    if (value.min() == value.max()).item():
        # Not above zero, because some arguments are logarithms of decays.
        drawn = -mx.abs(mx.random.normal(value.shape, key=fresh_key()))
        return drawn.astype(value.dtype)
    if keep:
        return value
    # Rows change places, and so do columns: no number passes through NumPy.
    rows, random = value.reshape(-1, value.shape[-1]), np.random.default_rng()
    for axis, count in enumerate(rows.shape):
        rows = mx.take(rows, mx.array(random.permutation(count)), axis)
    return rows.reshape(value.shape)


def _wide(value: Any) -> Any:
    """The same in float32, except large arrays and matrices, whose products are float32 anyway. Of
    a large matrix the first rows."""
    if isinstance(value, (tuple, list)):
        return type(value)(_wide(entry) for entry in value)
    if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
        return value.astype(mx.float32) if value.nbytes <= MOST_BYTES else value
    if isinstance(value, Weight) and value.weight.nbytes > MOST_BYTES and len(value.results) == 1:
        rows = max(1, MOST_BYTES // (value.weight.nbytes // value.weight.shape[0]))
        return value.rows(0, rows)
    if isinstance(value, ExpertBank):
        parts = {name: _Chosen(**vars(getattr(value, name))) for name in ("gate", "up", "down")}
        return dataclasses.replace(value, **parts)
    return value


class _Chosen(ProjectionBank):
    """A projection of experts, of which the CPU casts those that a call chooses, not all."""

    def matmul(self, x: mx.array, slots: mx.array, *, in_tiles: bool = False) -> mx.array:
        every = mx.arange(slots.size, dtype=mx.uint32)
        return ProjectionBank.matmul(self.take(slots, x.dtype), x, every)


# ---- Comparisons


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
