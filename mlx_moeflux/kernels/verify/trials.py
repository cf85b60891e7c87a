"""Trials: is an implementation right on this GPU? Asked before its first use in an unknown place.

A *variant* is what an implementation launches for a call: kernels, templates, dtypes. Before a
variant first runs on a GPU, with a version of MLX and a build of macOS that are not known, the call
is computed three times: by the implementation, by stock MLX, and by the reference on the CPU in
float32, which is the truth. The implementation passes if its result is finite everywhere, close to
stock everywhere, and off from the truth by at most twice what stock is off. Stock operations have
trials too, against an absolute limit; :mod:`mlx_moeflux.kernels.verify.verdicts` keeps verdicts.

:mod:`mlx_moeflux.kernels.verify.comparison` is one trial. What passed may be timed beside stock MLX
(:mod:`mlx_moeflux.kernels.verify.choices`).

A graph that ``mx.compile`` traces has no values; :func:`compiled` therefore runs a function once
without tracing where an operation in it was never tried.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mlx_moeflux._version import __version__
from mlx_moeflux.errors import ExactnessError, ShapeError, UnsupportedError
from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.operation import REFERENCE, Implementation, Operation
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.kernels.verify import choices, failures, verdicts
from mlx_moeflux.kernels.verify.comparison import attempt, stock_only
from mlx_moeflux.kernels.verify.verdicts import Verdict


class _State(threading.local):
    """tracing: A graph without values is being built. pending: Keys of variants in it that need a
    trial. untimed: A choice in it needs times. rehearsing: It is being run for its trials."""

    tracing = untimed = rehearsing = False
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
    if stock_only.on:
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
    if stock_only.on:
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
    sizes, nbytes = choices.sizes(operation, args, kwargs)
    if nbytes > choices.MOST_TIMED:
        return False
    kind = "" if operation.kind is None else operation.kind(*args)
    key = f"{_key(operation.name, name, [__version__, kind, *sizes])} beside stock"
    if (chosen := verdicts.choice(key)) is None:
        if _state.tracing or not _have_values([args, list(kwargs.values())]):
            _state.untimed |= _state.tracing
            return False
        chosen = choices.by_time(key, operation, name, implementation, args, kwargs)
    if not chosen.stock:
        return False
    stock = _key(operation.name, REFERENCE, _shapes(args, kwargs))
    return _verdict(stock, operation, REFERENCE, args, kwargs, "").ok


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
