"""Values of loading's options: each kind is a check of type, unit and range that opens no file.

A check is called as ``check(name, value)`` and raises an :class:`InputError` that names both. What
only a checkpoint can tell, such as the experts that a token has, the steps of loading check.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_moeflux.checks import check_callable, check_integer, is_positive, shown
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import parse_budget

Check = Callable[[str, Any], object]

# Of which percentages are taken while their whole is not known.
SOME_BYTES = 10**12


# What computes the experts of prompts.
AUTO, STOCK = "auto", "stock"


def optional(check: Check) -> Check:
    """Return a check that lets None pass."""
    return lambda name, value: None if value is None else check(name, value)


def amount(*words: str, least: int = 1) -> Check:
    """Return the check of bytes, as :func:`~mlx_moeflux.experts.budget.parse_budget` takes them, of
    at least `least`; or one of `words`."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, str) and value.strip().lower() in words:
            return
        what = name.replace("_", " ")
        if parse_budget(value, SOME_BYTES, what=what, least=least) is None:
            raise InputError(f"the {what} is {shown(value)}; give an amount such as 64MB or 10%.")

    return check


def boolean(name: str, value: Any) -> None:
    """Check True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {shown(value)}; give True or False.")


def integer(name: str, value: Any) -> None:
    """Check an integer from 1 on that 63 bits hold."""
    check_integer(name, value, 1)
    if not is_positive(value):
        raise InputError(f"{name} is {shown(value)}; it must be below 2^63.")


def text(name: str, value: Any) -> None:
    """Check a text that has characters, which UTF-8 can have."""
    if not isinstance(value, str):
        raise InputError(f"{name} is {shown(value)}; give a text.")
    if not value.strip() or "\0" in value or not _is_utf8(value):
        raise InputError(f"{name} is {shown(value)}; give a name.")


def _is_utf8(value: str) -> bool:
    """Return False for a text with half of a pair of surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def mapping(name: str, value: Any) -> None:
    """Check a mapping of texts."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{name} is {shown(value)}; give a mapping from names to values.")


def path(name: str, value: Any, *, mend: str = "give a path") -> None:
    """Check a path that the system can name; nothing need be there. mend: The end of a message."""
    try:
        given = os.fspath(value)
    except TypeError:
        given = value
    if not isinstance(given, str) or not given or "\0" in given:
        raise InputError(f"{name} is {shown(given)}; {mend}.")
    try:
        os.lstat(given)
    except UnicodeEncodeError:
        raise InputError(f"{name} is {shown(given)}, which no file can be called.") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(
                f"{name} is a path of {len(given)} characters, more than the system allows."
            ) from None


def paths(name: str, value: Any) -> None:
    """Check a path or a sequence of paths."""
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > 0
    for each in value if several else (value,):
        path(name, each, mend="give a directory, or a list of them")


def event_hook(name: str, value: Any) -> None:
    """Check a function of one event."""
    check_callable(name, value, "event")


# Checks below import rooms that need MLX, which reading a command line does not.


def router(name: str, value: Any) -> None:
    """Check what a router has besides its answers."""
    from mlx_moeflux.models.moe import check_router_members

    check_router_members(value)


def store(name: str, value: Any) -> None:
    """Check what a store of experts has besides its answers."""
    from mlx_moeflux.experts.store import check_members

    check_members(value)


def reader(name: str, value: Any) -> None:
    """Check the methods of a reader."""
    from mlx_moeflux.experts.io.readers import check_methods

    check_methods(value)


def kernels(name: str, value: Any) -> None:
    """Check operations and kinds of choices; their names and answers the registry checks."""
    from mlx_moeflux.kernels.registry import OPERATIONS, Kernels, parse, unknown_operation

    if isinstance(value, Kernels):
        return
    if isinstance(value, str):
        choices = [(operation, choice) for operation, choice in parse(value, name) if operation]
    elif isinstance(value, Mapping):
        choices = value.items()
    else:
        raise InputError(
            f"{name} is {shown(value)}; give operation -> name or callable, or a text such as "
            "'auto,sdpa=reference'."
        )
    for operation, choice in choices:
        if not isinstance(operation, str) or not (isinstance(choice, str) or callable(choice)):
            raise InputError(
                f"{name} has {shown(operation)}: {shown(choice)}; give operation -> name or "
                "callable."
            )
        if operation not in OPERATIONS:
            raise unknown_operation(operation)


def kv_bits(name: str, value: Any) -> None:
    """Check bits of stored keys and values."""
    from mlx_moeflux.cache.kv import KV_BITS

    _one_of(name, value, KV_BITS)


def kv_group_size(name: str, value: Any) -> None:
    """Check how many stored keys or values share a scale."""
    from mlx_moeflux.checkpoint.quantization import GROUP_SIZES

    _one_of(name, value, GROUP_SIZES)


def _one_of(name: str, value: Any, numbers: Sequence[int]) -> None:
    """Check an integer that is one of a few."""
    check_integer(name, value, 1)
    if value not in numbers:
        known = f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
        raise InputError(f"{name} is {shown(value)}; give {known}.")


def dtype(name: str, value: Any) -> None:
    """Check a dtype that models compute in."""
    import mlx.core as mx

    floats = mx.bfloat16, mx.float16, mx.float32
    if not isinstance(value, mx.Dtype) or value not in floats:
        raise InputError(f"{name} is {shown(value)}; give mx.bfloat16, mx.float16 or mx.float32.")


def reader_name(name: str, value: Any) -> None:
    """Check the name of a reader."""
    from mlx_moeflux.experts.io.readers import reader_called

    text(name, value)
    reader_called(value)


def prompt_kernels(name: str, value: Any) -> None:
    """Check what computes prompts."""
    if not isinstance(value, str) or value not in (AUTO, STOCK):
        raise InputError(f"{name} is {shown(value)}; give '{AUTO}' or '{STOCK}'.")


def threads(name: str, value: Any) -> None:
    """Check a number of threads that read experts."""
    from mlx_moeflux.experts.streaming.store import check_threads

    check_threads(value)


def wired(name: str, value: Any) -> None:
    """Check memory that is never paged out."""
    from mlx_moeflux.generation.memory import parse_wired_memory

    parse_wired_memory(value)


def eviction(name: str, value: Any) -> None:
    """Check a policy of eviction."""
    from mlx_moeflux.experts.policies.eviction import make_eviction

    make_eviction(value)


def prefetch(name: str, value: Any) -> None:
    """Check a policy of reading ahead."""
    from mlx_moeflux.experts.policies.prefetch import make_prefetch

    make_prefetch(value)


def drafts(name: str, value: Any) -> None:
    """Check a source of drafts."""
    from mlx_moeflux.generation.drafting import check_drafts

    check_drafts(value)


def placement(name: str, value: Any) -> None:
    """Check a placement, but no file that it names."""
    from mlx_moeflux.distributed.placement import check_placement

    check_placement(value)


def group(name: str, value: Any) -> None:
    """Check a group of ranks, or a bool."""
    import mlx.core as mx

    from mlx_moeflux.distributed.ranks import Ranks

    if not isinstance(value, bool | mx.distributed.Group | Ranks):
        raise InputError(f"{name} is {shown(value)}; give True or a group of mx.distributed.")
