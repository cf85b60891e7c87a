"""Values of loading's options: each kind is a check of type, unit and range that opens no file.

A check is called as ``check(name, value)`` and raises an :class:`InputError` that names both. What
only a checkpoint can tell, such as the experts that a token has, the steps of loading check.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_moeflux.checks import check_callable, check_integer, shown
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
    """Check an integer from 1 on."""
    check_integer(name, value, 1)


def text(name: str, value: Any) -> None:
    """Check a text."""
    if not isinstance(value, str):
        raise InputError(f"{name} is {shown(value)}; give a text.")


def mapping(name: str, value: Any) -> None:
    """Check a mapping of texts."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{name} is {shown(value)}; give a mapping from names to values.")


def path(name: str, value: Any, *, mend: str = "give a path") -> None:
    """Check a path that the system can name; nothing need be there. mend: The end of a message."""
    given = os.fspath(value) if isinstance(value, str | os.PathLike) else value
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


# Protocols below are of rooms that need MLX, which reading a command line does not.


def anything(name: str, value: Any) -> None:
    """Let an object pass that its protocol's own check sees when it is used."""


def dtype(name: str, value: Any) -> None:
    """Check a dtype of MLX."""
    import mlx.core as mx

    if not isinstance(value, mx.Dtype):
        raise InputError(f"{name} is {shown(value)}; give an MLX dtype such as mx.bfloat16.")


def reader_name(name: str, value: Any) -> None:
    """Check the name of a reader."""
    from mlx_moeflux.experts.io.readers import reader_called

    text(name, value)
    reader_called(value)


def prompt_kernels(name: str, value: Any) -> None:
    """Check what computes prompts."""
    if value not in (AUTO, STOCK):
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
