"""Times stock MLX beside an implementation that passed its trial, where the proof of the operation
declares calls as ``timed``.

This is done once for calls of a size, and stock MLX computes them where it is faster in every
round. The choice is kept with the verdicts before the first result of such a call is used, and
never made again, so that streamed and resident models follow the same one. The table of kernels
holds where it cannot be kept, on a virtual GPU, and while the machine is busy.
"""

from __future__ import annotations

import functools
import math
from inspect import BoundArguments, signature
from typing import Any

import mlx.core as mx

from mlx_moeflux.kernels.examples import Arguments
from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.operation import REFERENCE, Implementation, Operation
from mlx_moeflux.kernels.verify import timing, verdicts
from mlx_moeflux.kernels.verify.verdicts import Choice

# Bytes of the arrays of a call that is timed, at most: stock MLX may allocate as much again. Its
# seconds, at most: a prompt has few calls that take longer.
MOST_TIMED, LONGEST = 64 << 20, 0.1


def by_time(
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
    calls = rotated(operation, args, kwargs)
    times = timing.times(both, calls, longest=LONGEST, report=refusals.append)
    if refusals:
        return verdicts.leave(key, refusals[0])
    if not times:
        return verdicts.choose(key, Choice(False, reason=f"a call takes more than {LONGEST} s"))
    if not timing.is_quiet(times):
        return verdicts.leave(key, "the machine was busy")
    us = {n: timing.microseconds(each) for n, each in times.items()}
    return verdicts.choose(key, Choice(timing.is_faster(times[REFERENCE], times[name]), us))


def rotated(operation: Operation, args: tuple, kwargs: dict[str, Any]) -> list[Arguments]:
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


def sizes(operation: Operation, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], int]:
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
