"""From a replay and a measured profile of a machine to the time of a token. No MLX."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np

from mlx_moeflux.checkpoint.files import read_whole, write_output
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.chooser import Cost
from mlx_moeflux.experts.telemetry.simulate import Simulation
from mlx_moeflux.experts.telemetry.trace import Trace

# Decode steps from which a trace gives times.
MEASURED_TOKENS = 8
MOST_SECONDS = 1e9


@dataclass(frozen=True)
class Profile:
    """The times of one model on one machine.

    token_seconds: A decode step with every expert resident. sync_seconds: Extra time of a layer
    whose ids the host needs, their copy included. read_seconds: Until 1, 2, 3, ... blocks that are
    read together have arrived; beyond its end the last difference repeats. host_seconds: A token's
    time outside the model: sampling, text.
    """

    token_seconds: float
    sync_seconds: float
    read_seconds: tuple[float, ...]
    host_seconds: float = 0.0

    def __post_init__(self):
        numbers = (self.token_seconds, self.sync_seconds, self.host_seconds, *self.read_seconds)
        if not self.read_seconds or any(not 0 <= n <= MOST_SECONDS for n in numbers):
            raise InputError(
                f"a profile needs times of 0 to {MOST_SECONDS:g} s, and one read at least."
            )

    @classmethod
    def of_disk(
        cls,
        gigabytes_per_second: float,
        block_bytes: int,
        *,
        token_seconds: float,
        sync_seconds: float = 0.0,
        latency: float = 1e-4,
    ) -> Profile:
        """A disk of that bandwidth, reached as soon as two blocks are under way."""
        each = block_bytes / (1e9 * gigabytes_per_second)
        return cls(token_seconds, sync_seconds, (latency + each, latency + 2 * each))

    @classmethod
    def of_trace(cls, trace: Trace, gigabytes_per_second: float = 3.0) -> Profile | None:
        """Estimate the times from the clock of a recorded run; None if it has too few decode steps.

        Least squares over its tokens: compute time plus a time for each missed block. Blocks of a
        run without misses are read at `gigabytes_per_second`.
        """
        first = trace.info.layers[0]
        begun, misses = [], []
        for call in trace:
            if len(call.ids) == 1 and call.layer == first:
                begun.append(call.nanoseconds)
                misses.append(0)
            if begun and call.result is not None:
                misses[-1] += call.result.misses
        seconds, counts = np.diff(begun) / 1e9, np.array(misses[:-1])
        if len(seconds) < MEASURED_TOKENS or not (seconds > 0).all():
            return None
        # A pause between two tokens, of the reader for instance, is no time of the model.
        usual = seconds <= 3 * np.median(seconds)
        seconds, counts = seconds[usual], counts[usual]
        block = max(trace.info.block_bytes.values())
        each, token = 0.0, float(np.median(seconds))
        if counts.std() > 0:
            each, token = (max(float(value), 0.0) for value in np.polyfit(counts, seconds, 1))
        return cls(token, 0.0, (each or block / (1e9 * gigabytes_per_second),))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what :meth:`save` wrote.

        Raises:
            InputError: It is no profile.
        """
        times = ("token_seconds", "sync_seconds", "host_seconds")
        data = _fields(path, (*times, "read_seconds"))
        try:
            token, sync, host = (data[name] for name in times)
            return cls(token, sync, tuple(data["read_seconds"]), host)
        except TypeError as cause:
            raise InputError(f"{path} is no profile: its times are not numbers.") from cause

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON.

        Raises:
            InputError: It cannot be written.
        """
        write_output(path, (json.dumps(asdict(self), indent=2) + "\n").encode())

    def reading(self, blocks: int) -> float:
        """Seconds until `blocks` blocks have arrived."""
        times = list(self.read_seconds)
        if blocks <= 0:
            return 0.0
        if blocks <= len(times):
            return times[blocks - 1]
        step = times[-1] - times[-2] if len(times) > 1 else times[-1]
        return times[-1] + (blocks - len(times)) * step

    def call_cost(self, layers: int) -> Callable[[int, int], Cost]:
        """Return what a call of one of so many layers costs, as in :func:`forecast`, by the blocks
        that it has to read and those that were prefetched for it; for
        :func:`~mlx_moeflux.experts.telemetry.simulate.simulate`."""
        compute = self.token_seconds / layers

        def cost(missed: int, ahead: int) -> Cost:
            stalled = self.reading(missed) + max(self.reading(ahead) - compute, 0.0)
            return Cost(compute + self.sync_seconds + stalled, stalled)

        return cost


def open_tuning(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options of :func:`~mlx_moeflux.loading.load_model` in a file that ``tune``
    wrote, and the ``model`` that it is for.

    Raises:
        InputError: It is no such file.
    """
    kinds: dict[str, type | UnionType] = {
        "model": str, "expert_memory": str | int, "expert_reader": str, "expert_threads": int,
        "prefetch": str,
    }  # fmt: skip
    data = _fields(path, tuple(kinds))
    for name, kind in kinds.items():
        if not isinstance(data[name], kind) or isinstance(data[name], bool):
            raise InputError(f"{path}: '{name}' is {data[name]!r}; write the file anew with tune.")
    return data


def _fields(path: str | os.PathLike[str], names: Sequence[str]) -> dict[str, Any]:
    """These keys of a JSON object that ``tune`` wrote.

    Raises:
        InputError: It cannot be read, is no such object or lacks one.
    """
    text = read_whole(Path(path), error=InputError)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    data = data if isinstance(data, dict) else {}
    missing = next((name for name in names if name not in data), None)
    if missing is not None:
        raise InputError(f"{path} is no profile, it has no '{missing}'; write one with tune.")
    return {name: data[name] for name in names}


@dataclass(frozen=True)
class Forecast:
    """Mean seconds of a decode step: computing, synchronising, waiting for reads on demand and for
    reads ahead, the host; hidden: seconds of reads ahead that computing covered, part of no sum."""

    tokens: int
    compute: float
    sync: float
    demand: float
    ahead: float = 0.0
    hidden: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """All of a token."""
        return self.compute + self.sync + self.demand + self.ahead + self.host

    @property
    def tokens_per_second(self) -> float:
        """Its inverse."""
        return 1 / self.seconds if self.seconds else float("inf")


def forecast(trace: Trace, simulation: Simulation, profile: Profile) -> Forecast:
    """Estimate the time of the decode steps of `trace` from its `simulation`.

    Prefill is left out: it computes while it reads, so its bytes matter. The compute time of one
    layer can hide the reads ahead of the next.

    Raises:
        InputError: The trace has no decode step.
    """
    layers = simulation.info.layers
    looking = sum(simulation.slots[layer] < simulation.info.num_experts for layer in layers)
    cover = profile.token_seconds / len(layers)
    ahead = simulation.ahead or [0] * len(simulation.misses)
    steps, demand, waited, hidden = 0, 0.0, 0.0, 0.0
    for call, missed, early in zip(trace, simulation.misses, ahead, strict=True):
        if len(call.ids) == 1:
            steps += 1
            demand += profile.reading(missed)
            hidden += min(profile.reading(early), cover)
            waited += max(profile.reading(early) - cover, 0.0)
    if not steps:
        raise InputError("the trace has no decode step; record one that generates text.")
    tokens = steps / len(layers)
    return Forecast(
        tokens=round(tokens),
        compute=profile.token_seconds,
        sync=looking * profile.sync_seconds,
        demand=demand / tokens,
        ahead=waited / tokens,
        hidden=hidden / tokens,
        host=profile.host_seconds,
    )
