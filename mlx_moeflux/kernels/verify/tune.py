"""Measures which implementation of each operation is the fastest here, and from which size on.

Calls are those of a model, or have published sizes. Each implementation that the back end runs is
timed at each size, as a trial times two (:mod:`~mlx_moeflux.kernels.verify.timing`); one takes over
where it is faster in every round than the one before it, at first the reference. One that is
hopelessly slow is not timed at larger sizes. The machine should do nothing else meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moeflux.checkpoint.files import write_output
from mlx_moeflux.errors import InputError
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.examples import LARGE, SMALL, Arguments
from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.operation import REFERENCE, Implementation, row_name
from mlx_moeflux.kernels.registry import OPERATIONS
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.kernels.verify import timing

TOKENS = {"gpu": (1, 2, 4, 6, 8, 16, 32, 64, 256, 1024, 2048), "cpu": (1, 2, 4, 8, 16, 64, 256)}

Report = Callable[[str], None]

# Names of dispatch.json: an operation, or one and a kind of call.
WORKLOADS = tuple(
    row_name(name, kind) for name, record in OPERATIONS.items() for kind in record.proof.workloads
)


# Operation, or operation and kind -> tokens -> calls to take turns with.
Calls = Mapping[str, Mapping[int, Sequence[Arguments]]]


def tune(
    operations: Iterable[str] | None = None,
    *,
    calls: Calls | None = None,
    report: Report = lambda line: None,
) -> dict:
    """Return the table in use with the rows of this back end measured anew.

    operations: Only these, or kinds of them. calls: Those of a model; None: the workloads of the
        records.

    Raises:
        InputError: There is no such operation.
    """
    there = tuple(WORKLOADS if calls is None else calls)
    wanted = tuple(operations or there)
    for name in wanted:
        if name not in there:
            raise InputError(f"'{name}' cannot be measured; there are {', '.join(there)}.")
    table, backend = dispatch.read(), launcher.backend().name
    for name in wanted:
        found = measure(name, _published(name) if calls is None else calls[name].items(), report)
        if found:
            table.setdefault(name, {})[backend] = rows(found)
    place = mx.device_info().get("device_name", "CPU") if _gpu() else "CPU"
    version = mx.__version__  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
    measured_on = f"{place}, MLX {version}, {time.strftime('%Y-%m-%d', time.gmtime())}"
    table[dispatch.MEASURED] = table.get(dispatch.MEASURED, {}) | {backend: measured_on}
    return table


def rows(found: Mapping[int, timing.Times]) -> list[dict[str, Any]]:
    """Tokens -> times, as rows: another name wherever the fastest is faster in every round than
    that before it; at first than the reference."""
    table: list[dict[str, Any]] = []
    for tokens, times in sorted(found.items()):
        us = {n: timing.microseconds(each) for n, each in sorted(times.items())}
        now, best = table[-1]["form"] if table else REFERENCE, min(us, key=us.__getitem__)
        if now in times and not timing.is_faster(times[best], times[now]):
            best = now
        if table and best == now:
            continue
        table.append({"form": best, "from": tokens if table else 1, "us": us})
    return table


def measure(
    name: str, calls: Iterable[tuple[int, Sequence[Arguments]]], report: Report
) -> dict[int, timing.Times]:
    """Return tokens -> times; nothing if there is but one implementation.

    calls: Tokens, and calls to take turns with, by ascending tokens.
    """
    operation = OPERATIONS[name.partition(" ")[0]]
    runs = {n: each.function for n, each in operation.implementations.items() if _runs(each)}
    if not (operation.equal_rows or isinstance(launcher.backend(), launcher.NoBackend)):
        del runs[REFERENCE]
    found: dict[int, timing.Times] = {}
    if len(runs) < 2:
        return {}
    for tokens, rotated in calls:

        def told(line: str, n: int = tokens) -> None:
            report(f"{name} {n}: {line}")

        times = timing.times(runs, rotated, report=told)
        if not times:
            continue
        found[tokens], medians = times, {n: timing.median(each) for n, each in times.items()}
        told(", ".join(f"{n} {1e6 * t:.1f}" for n, t in medians.items()) + " us")
        if not timing.is_quiet(times):
            told("the machine does something else")
        most = timing.HOPELESS * min(medians.values())
        runs = {n: each for n, each in runs.items() if medians.get(n, 0.0) <= most}
    return found


def _published(name: str) -> Iterator[tuple[int, list[Arguments]]]:
    """Yield calls of an operation in the sizes of published models."""
    device, sizes = ("gpu", LARGE) if _gpu() else ("cpu", SMALL)
    dtype = mx.bfloat16 if device == "gpu" else mx.float32
    operation, _, kind = name.partition(" ")
    record = OPERATIONS[operation]
    for tokens in TOKENS[device][: 1 if record.size is None else None]:
        number = 8 if tokens <= 64 else 2
        calls = [record.proof.workload(kind, sizes, tokens, dtype) for _ in range(number)]
        mx.eval(arrays([[args, list(kwargs.values())] for args, kwargs in calls]))
        yield tokens, calls


def write(table: Mapping[str, Any], file: str | os.PathLike[str]) -> None:
    """Write a table, a row a line, atomically.

    Raises:
        InputError: It cannot be written.
    """
    entries = []
    for operation, backends in table.items():
        if operation == dispatch.MEASURED:
            entries.append(f'  "{operation}": {json.dumps(backends)}')
            continue
        lists = []
        for backend, found in backends.items():
            lines = ",\n".join(f"      {json.dumps(row)}" for row in found)
            lists.append(f'    "{backend}": [\n{lines}\n    ]')
        entries.append(f'  "{operation}": {{\n' + ",\n".join(lists) + "\n  }")
    write_output(file, ("{\n" + ",\n".join(entries) + "\n}\n").encode())


def keep(table: Mapping[str, Any]) -> Path:
    """Write a table for later processes on this machine and return its file.

    Raises:
        InputError: It cannot be written.
    """
    file = dispatch.kept_file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(table, file)
    return file


def _gpu() -> bool:
    return mx.default_device().type == mx.gpu


def _runs(implementation: Implementation) -> bool:
    if implementation.mixes_rows:
        return False
    if implementation.on_cpu:
        return not _gpu()
    return not implementation.kernels or not isinstance(launcher.backend(), launcher.NoBackend)
