"""Policies by name or by object. Pure Python, no MLX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_moeflux.checks import check_method, shown
from mlx_moeflux.errors import InputError

NONE = "none"


def policy_of(
    protocol: type,
    policy: Any,
    known: Mapping[str, Callable[[], Any]],
    *,
    optional: bool = False,
) -> Any:
    """Return a policy by name, or the given object if it has what `protocol` declares; only `name`
    may be missing. optional: None and ``none`` mean no policy, which is None.

    Raises:
        InputError: The name is unknown, the object is a class, an attribute is missing, or a method
            cannot be called with the protocol's arguments.
    """
    kind = protocol.__name__.lower()
    if optional and (policy is None or (isinstance(policy, str) and policy == NONE)):
        return None
    if isinstance(policy, str):
        if policy not in known:
            names = ", ".join([NONE] * optional + list(known))
            raise InputError(f"no {kind} is called {shown(policy)}; there are {names}.")
        return known[policy]()
    if isinstance(policy, type):
        raise InputError(f"the {kind} {policy.__name__} is a class; pass an instance of it.")
    methods = [name for name in vars(protocol) if not name.startswith("_")]
    for name in (*methods, *protocol.__annotations__):
        absent = name in methods and not callable(getattr(policy, name, None))
        if absent or (name != "name" and not hasattr(policy, name)):
            raise InputError(
                f"the {kind} {type(policy).__name__} has no '{name}'; see the {protocol.__name__} "
                "protocol."
            )
    for name in methods:
        wanted = vars(protocol)[name]
        check_method(f"the {kind} {type(policy).__name__}", getattr(policy, name), wanted)
    return policy


def label(policy: Any) -> str:
    """Return the name of a policy for messages."""
    return str(getattr(policy, "name", type(policy).__name__))


def distinct_ids(answer: Any) -> list[int] | None:
    """Return an answer as a list if it is a collection of different whole numbers, else None."""
    try:
        ids = [e.__index__() for e in answer]
    except (TypeError, AttributeError):
        return None
    return ids if len(set(ids)) == len(ids) else None
