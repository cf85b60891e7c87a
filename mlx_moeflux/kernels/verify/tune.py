"""Measures which implementation of each operation is the fastest here, and from which size on.

Calls are those of a model, or have published sizes. Each implementation that the back end runs is
timed at each size; one takes over where it is faster than the one before it, at first the
reference, by :data:`MARGIN`. One that is :data:`HOPELESS` times slower than the best is not timed
at larger sizes. The machine should do nothing else meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moeflux.checkpoint.files import write_output
from mlx_moeflux.errors import InputError
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.examples import LARGE, SMALL, Arguments
from mlx_moeflux.kernels.operation import REFERENCE, Implementation, row_name
from mlx_moeflux.kernels.registry import OPERATIONS
from mlx_moeflux.kernels.runtime import launcher

TOKENS = {"gpu": (1, 2, 4, 6, 8, 16, 32, 64, 256, 1024, 2048), "cpu": (1, 2, 4, 8, 16, 64, 256)}
MARGIN, HOPELESS = 0.1, 8.0
# Of one measurement, and of one call that is still repeated.
SECONDS, LONGEST = 0.02, 0.2
# Noise makes a slope zero or negative.
RESOLUTION = 1e-7
ROUNDS = 3

Report = Callable[[str], None]

# Names of dispatch.json: an operation, or one and a kind of call.
WORKLOADS = tuple(
    row_name(name, kind) for name, record in OPERATIONS.items() for kind in record.workloads
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
        times = measure(name, _published(name) if calls is None else calls[name].items(), report)
        if times:
            table.setdefault(name, {})[backend] = rows(times)
    place = mx.device_info().get("device_name", "CPU") if _gpu() else "CPU"
    version = mx.__version__  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
    measured_on = f"{place}, MLX {version}, {time.strftime('%Y-%m-%d', time.gmtime())}"
    table[dispatch.MEASURED] = table.get(dispatch.MEASURED, {}) | {backend: measured_on}
    return table


def rows(times: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Tokens -> name -> seconds, as rows: another name wherever one is faster by the margin than
    that before it; at first than the reference."""
    found: list[dict[str, Any]] = []
    for tokens, by_name in sorted(times.items()):
        now, best = found[-1]["form"] if found else REFERENCE, min(by_name, key=by_name.__getitem__)
        if now in by_name and by_name[best] > (1 - MARGIN) * by_name[now]:
            best = now
        if found and best == now:
            continue
        us = {n: float(f"{1e6 * t:.3g}") for n, t in sorted(by_name.items())}
        found.append({"form": best, "from": tokens if found else 1, "us": us})
    return found


def measure(
    name: str, calls: Iterable[tuple[int, Sequence[Arguments]]], report: Report
) -> dict[int, dict[str, float]]:
    """Return tokens -> implementation -> seconds; nothing if there is but one implementation.

    calls: Tokens, and calls to take turns with, by ascending tokens.
    """
    operation = OPERATIONS[name.partition(" ")[0]]
    runs = {n: each for n, each in operation.implementations.items() if _runs(each)}
    if not (operation.equal_rows or isinstance(launcher.backend(), launcher.NoBackend)):
        del runs[REFERENCE]
    found: dict[int, dict[str, float]] = {}
    if len(runs) < 2:
        return {}
    for tokens, rotated in calls:
        by_name = seconds(
            runs, rotated, report=lambda line, n=tokens: report(f"{name} {n}: {line}")
        )
        if not by_name:
            continue
        found[tokens] = by_name
        best = min(by_name.values())
        runs = {n: each for n, each in runs.items() if by_name.get(n, 0.0) <= HOPELESS * best}
    return found


def _published(name: str) -> Iterator[tuple[int, list[Arguments]]]:
    """Yield calls of an operation in the sizes of published models."""
    device, sizes = ("gpu", LARGE) if _gpu() else ("cpu", SMALL)
    dtype = mx.bfloat16 if device == "gpu" else mx.float32
    operation, _, kind = name.partition(" ")
    record = OPERATIONS[operation]
    for tokens in TOKENS[device][: 1 if record.size is None else None]:
        number = 8 if tokens <= 64 else 2
        yield tokens, [record.workload(kind, sizes, tokens, dtype) for _ in range(number)]


def seconds(
    implementations: Mapping[str, Implementation], calls: Sequence[Arguments], *, report: Report
) -> dict[str, float]:
    """Return implementation -> seconds of one call: the median of slopes over the number of calls
    in one evaluation. Implementations alternate, so that a machine that slows down slows all alike.
    Those that refuse the call are left out."""

    def run(name: str, count: int) -> float:
        outputs, start = [], time.perf_counter()
        for i in range(count):
            args, kwargs = calls[i % len(calls)]
            outputs.append(implementations[name](*args, **kwargs))
        # On a CPU some compute while they are called; a GPU's host is busy elsewhere.
        start = time.perf_counter() if gpu else start
        mx.eval(outputs)
        mx.synchronize()
        return time.perf_counter() - start

    gpu, once, slopes = _gpu(), {}, {}
    for name in implementations:
        try:
            run(name, len(calls))  # compiles, and evaluates the arguments
            once[name], slopes[name] = run(name, 1), []
        except (RuntimeError, ValueError) as error:
            # Metal raises ValueError for too many threads, and so do shapes that one refuses.
            report(f"{name} refuses: {str(error).splitlines()[0]}")
    for _ in range(ROUNDS):
        for name, whole in once.items():
            if whole > LONGEST:
                slopes[name].append(run(name, 1))
                continue
            more = max(2, min(200, round(SECONDS / whole)))
            slopes[name].append((run(name, 1 + more) - run(name, 1)) / more)
    found = {name: max(statistics.median(times), RESOLUTION) for name, times in slopes.items()}
    report(", ".join(f"{name} {1e6 * t:.1f}" for name, t in found.items()) + " us")
    return found


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
    if implementation.on_cpu:
        return not _gpu()
    return not implementation.kernels or not isinstance(launcher.backend(), launcher.NoBackend)
