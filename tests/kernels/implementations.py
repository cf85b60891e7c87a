"""What an implementation of an operation returns, held against the reference in float32."""

from __future__ import annotations

import dataclasses

import mlx.core as mx

from mlx_moeflux.kernels.nested import describe
from mlx_moeflux.kernels.operation import REFERENCE
from mlx_moeflux.kernels.registry import OPERATIONS
from tests.kernels.harness import error

# Operation -> name -> implementation, the reference too.
IMPLEMENTATIONS = {name: record.implementations for name, record in OPERATIONS.items()}

# Operations whose queries mean nothing before their sequence's first key, and where the keys are.
KEYS = {"sdpa": 1, "latent_attention": 2, "latent_prefill": 2}
INTEGERS = (mx.uint32, mx.int32)
# By the largest value.
LIMITS = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}


def differences(operation: str, args: tuple, kwargs: dict, actual) -> list[str]:
    """What is wrong with what an implementation returned for a call; nothing: an empty list."""
    shapes = describe(arrays_of(IMPLEMENTATIONS[operation][REFERENCE](*args, **kwargs)))
    if describe(arrays_of(actual)) != shapes:
        return [f"gives {describe(arrays_of(actual))}, not {shapes}"]
    expected = arrays_of(truth(operation, args, kwargs))
    pairs = list(zip(arrays_of(actual), expected, strict=True))
    if operation in KEYS and kwargs.get("start") is not None:
        length = kwargs.get("length")
        length = args[KEYS[operation]].shape[2] if length is None else length
        pairs = [tuple(without_padding(a, kwargs["start"], length) for a in pair) for pair in pairs]
    # Results of one call belong together: a single number near zero says nothing alone.
    numbers = [pair for pair in pairs if mx.issubdtype(pair[0].dtype, mx.floating)]
    largest = max((float(mx.abs(b).max()) for _, b in numbers), default=0.0)
    worst = max((error(a, b) for a, b in numbers), default=0.0)
    found = []
    if not worst <= LIMITS[arrays_of(args[0])[0].dtype] * largest:
        found.append(f"is off by {worst:.3g} of {largest:.3g}: {shapes}")
    if not all(mx.array_equal(a, b).item() for a, b in pairs if a.dtype in INTEGERS):
        found.append(f"chooses others: {shapes}")
    return found


def in_float32(value):
    """The same with all floats in float32: what an implementation should compute."""
    if isinstance(value, mx.array):
        return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
    if isinstance(value, (list, tuple)):
        return type(value)(map(in_float32, value))
    if isinstance(value, dict):
        return {key: in_float32(entry) for key, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{n: in_float32(getattr(value, n)) for n in names})
    return value


def truth(operation, args, kwargs):
    """What the reference gives in float32; of a whole block, in whose middle experts are chosen,
    as it is: rounding decides which."""
    reference = IMPLEMENTATIONS[operation][REFERENCE]
    if operation == "moe_step":
        return reference(*args, **kwargs)
    return reference(*in_float32(args), **in_float32(kwargs))


def arrays_of(value) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    return [] if value is None else [array for entry in value for array in arrays_of(entry)]


def without_padding(array: mx.array, start: mx.array, length: int | mx.array) -> mx.array:
    """array ``[B, H, T, D]`` with zeros for queries before their sequence's first key."""
    T = array.shape[2]
    query = mx.array(length).reshape(-1, 1) - T + mx.arange(T)
    return mx.where((query >= start[:, None])[:, None, :, None], array, 0.0)
