"""Which implementation "auto" takes: dispatch.json, a table from operation and back end to names of
implementations ("form") and the sizes from which on they are used.

    {"gated_delta": {"cuda": [{"form": "recurrent", "from": 1, "us": {...}}, ...]}}

"us" holds microseconds measured at that size for those that were compared. An operation or a
back end that is not listed takes the reference. "sdpa 64" has the rows of calls of head size 64;
others take those of "sdpa". "measured" says where and when the rows of a back end were measured.
Those of "metal" in this package were not: one token takes kernels, and prompts take stock MLX where
its result depends on no slots. They hold for calls that a trial does not time, and in a process
that cannot keep a choice (:mod:`~mlx_moeflux.kernels.verify.trials`). ``mlx_moeflux tune
--kernels`` measures all sizes; what it keeps for this GPU, version of MLX and of this package is
used instead, and then trials time nothing. ``$MOEFLUX_DISPATCH`` names another file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from mlx_moeflux import user_cache
from mlx_moeflux._version import __version__
from mlx_moeflux.checkpoint.files import read_json_object
from mlx_moeflux.errors import InputError
from mlx_moeflux.kernels.verify import verdicts

TABLE = Path(__file__).with_name("dispatch.json")
ENVIRONMENT, MEASURED = "MOEFLUX_DISPATCH", "measured"


class Row(NamedTuple):
    """The name of an implementation, and the size from which on it is used."""

    name: str
    start: int = 1


BY_SIZE = attrgetter("start")


@functools.cache
def table() -> dict[str, dict[str, tuple[Row, ...]]]:
    """Operation, or operation and kind, -> back end -> rows by ascending size."""
    return {
        operation: {
            backend: tuple(sorted((Row(r["form"], r["from"]) for r in rows), key=BY_SIZE))
            for backend, rows in backends.items()
        }
        for operation, backends in read().items()
        if operation != MEASURED
    }


def read() -> dict[str, Any]:
    """Return the file in use: that of the environment, the one kept for this place, or the
    package's.

    Raises:
        InputError: ``$MOEFLUX_DISPATCH`` names a file that cannot be read.
    """
    if named := os.environ.get(ENVIRONMENT):
        try:
            return read_json_object(Path(named), error=InputError)
        except InputError as error:
            raise InputError(f"{ENVIRONMENT} wants a table of kernels: {error}") from error
    if (kept := kept_file()).exists():
        with contextlib.suppress(InputError):
            return read_json_object(kept, error=InputError)
    return read_json_object(TABLE, error=InputError)


def is_shipped() -> bool:
    """Return True if the table in use is the package's, which no measurement of this machine or of
    the user stands in."""
    named = os.environ.get(ENVIRONMENT)
    return Path(named) == TABLE if named else not kept_file().exists()


def kept_file() -> Path:
    """Return the file of what was measured on this GPU with these versions; it may not exist."""
    place = f"{verdicts.place()}, {__version__}"
    digest = hashlib.blake2b(place.encode(), digest_size=6).hexdigest()
    return user_cache.root() / f"dispatch-{digest}.json"


def rows(operation: str, backend: str) -> tuple[Row, ...]:
    """The rows of one operation on one back end; none: the reference."""
    return table().get(operation, {}).get(backend, ())


def special_rows(operation: str, backend: str) -> dict[str, tuple[Row, ...]]:
    """Kind of call -> rows, where it has its own."""
    first, found = f"{operation} ", table().items()
    named = {name.removeprefix(first): of for name, of in found if name.startswith(first)}
    return {kind: of[backend] for kind, of in named.items() if of.get(backend)}


def pick(chosen: Sequence[Row], size: int) -> str:
    """Return the implementation for a call of `size`."""
    return next((row.name for row in reversed(chosen) if row.start <= size), "reference")


def describe(chosen: Sequence[Row]) -> str:
    """``recurrent+chunkwise@64``: implementations and where they begin."""
    if not chosen:
        return "reference"
    named = [row.name if row.start <= 1 else f"{row.name}@{row.start}" for row in chosen]
    return "+".join(named if chosen[0].start <= 1 else ["reference", *named])
