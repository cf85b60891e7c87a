"""What a trial runs on: the arguments of a call, because only those have the shapes, the layout and
the banks that will be used. They are cut, put in other orders and widened as the proof of the
operation allows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from inspect import BoundArguments
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.kernels.examples import fresh_key
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.operation import Function, Operation
from mlx_moeflux.kernels.runtime import launcher

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


def called(function: Function, call: BoundArguments) -> Any:
    """Return what `function` gives for a call."""
    return function(*call.args, **call.kwargs)


def dtype_of(call: BoundArguments) -> mx.Dtype:
    """The shortest floats among the arguments."""
    found = {array.dtype for array in arrays(list(call.arguments.values()))}
    return next((d for d in (mx.bfloat16, mx.float16) if d in found), mx.float32)


def cut(operation: Operation, function: Function, call: BoundArguments) -> BoundArguments:
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
        called(function, call)
    return sorted(set(launches))


def _map_tokens(operation: Operation, call: BoundArguments, change: Callable) -> BoundArguments:
    """Return the call with ``change(array, axis)`` for each argument that has tokens."""
    changed = dict(call.arguments)
    for name, axis in operation.tokens.items():
        if isinstance(array := changed.get(name), mx.array):
            changed[name] = change(array, axis)
    return BoundArguments(call.signature, changed)  # pyright: ignore[reportArgumentType]


def of_row(operation: Operation, call: BoundArguments, row: int) -> BoundArguments:
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


def sampled_rows(operation: Operation, call: BoundArguments) -> np.ndarray | None:
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


def drawn(operation: Operation, call: BoundArguments, *, keep: bool) -> BoundArguments:
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


def wide(value: Any) -> Any:
    """The same in float32, except large arrays and matrices, whose products are float32 anyway. Of
    a large matrix the first rows."""
    if isinstance(value, (tuple, list)):
        return type(value)(wide(entry) for entry in value)
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
