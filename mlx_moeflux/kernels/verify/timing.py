"""Times implementations of an operation beside each other: for a trial two, for ``tune`` all.

The time of a call is the slope over the calls of one evaluation, from :data:`FEW` to :data:`MANY`,
so that what an evaluation costs by itself cancels. Implementations alternate, :data:`ROUNDS` times:
a machine that slows down slows all alike. Each call has the next of the given arguments, so that
large ones are read from memory.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import mlx.core as mx

from mlx_moeflux.kernels.examples import Arguments
from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.operation import Function
from mlx_moeflux.kernels.verify import failures

ROUNDS = 5
FEW, MANY = 4, 16
# Bytes of the arguments of all calls: more than the caches of most GPUs hold. The results of one
# evaluation have as many at most.
ROTATED = 64 << 20
# A call of so many seconds is evaluated alone: what an evaluation costs is small beside it.
SHORT = 5e-4
# One that is so many times slower than the fastest is not timed again.
HOPELESS = 8.0
# An implementation is faster if it takes so much less in every round. A machine on which the rounds
# of one implementation differ by such a factor does something else besides.
MARGIN, SPREAD = 0.1, 1.5
# Noise makes a slope zero or negative.
RESOLUTION = 1e-7

# Name of an implementation -> seconds of a call in each round.
Times = Mapping[str, Sequence[float]]


def times(
    implementations: Mapping[str, Function],
    calls: Sequence[Arguments],
    *,
    longest: float | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, list[float]]:
    """Return name -> seconds of a call in each round, without those that refuse the call, which are
    reported. Nothing if one takes more than `longest` seconds. calls: Arguments, over and over.

    Raises:
        RuntimeError: Memory is exhausted.
    """
    turns, once = itertools.cycle(calls), {}
    for name, implementation in implementations.items():
        try:
            seconds_of(name, implementation, turns, 1)  # compiles
            once[name] = seconds_of(name, implementation, turns, 1)
        except (RuntimeError, ValueError) as error:
            if failures.lacks_memory(error):
                raise
            # Metal raises ValueError for too many threads, and so do shapes that one refuses.
            report(f"{name} refuses: {str(error).splitlines()[0]}")
    fastest = min(once.values(), default=0.0)
    if longest is not None and max(once.values(), default=0.0) > longest:
        return {}
    found = {name: [seconds] * ROUNDS for name, seconds in once.items()}
    timed = [name for name, seconds in once.items() if seconds <= HOPELESS * fastest]
    if len(once) < 2:
        return found
    alone = fastest > SHORT or MANY * _result_bytes(implementations[timed[0]], calls[0]) > ROTATED
    for number in range(ROUNDS):
        for name in timed[:: -1 if number % 2 else 1]:
            found[name][number] = _slope(name, implementations[name], turns, alone)
    return found


def _slope(name: str, function: Function, turns: Iterator[Arguments], alone: bool) -> float:
    """Return the seconds of one call. alone: It is the only one of an evaluation."""
    if alone:
        return seconds_of(name, function, turns, 1)
    few, many = (seconds_of(name, function, turns, count) for count in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def _result_bytes(function: Function, call: Arguments) -> int:
    args, kwargs = call
    return sum(array.nbytes for array in arrays(function(*args, **kwargs)))


def seconds_of(name: str, function: Function, turns: Iterator[Arguments], count: int) -> float:
    """Return the seconds of one evaluation of `count` calls. name: Of the implementation, for tests
    that put their own times in the place of this function."""
    outputs, start = [], time.perf_counter()
    for args, kwargs in itertools.islice(turns, count):
        outputs.append(function(*args, **kwargs))
    if mx.default_device().type == mx.gpu:
        # On a CPU some compute while they are called; a GPU's host is busy elsewhere.
        start = time.perf_counter()
    mx.eval(outputs)
    mx.synchronize()
    return time.perf_counter() - start


def is_faster(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return True if the first of two implementations won every round by the margin."""
    return all(a < (1 - MARGIN) * b for a, b in zip(first, second, strict=True))


def is_quiet(found: Times) -> bool:
    """Return True if nothing else seems to have computed during a measurement."""
    return all(min(each) > 0 and max(each) <= SPREAD * min(each) for each in found.values())


def median(seconds: Sequence[float]) -> float:
    """Return the time of a call, in seconds above zero."""
    return max(statistics.median(seconds), RESOLUTION)


def microseconds(seconds: Sequence[float]) -> float:
    """Return the time of a call in microseconds, with the three digits that are kept."""
    return float(f"{1e6 * median(seconds):.3g}")
