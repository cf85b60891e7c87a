"""Times that a test chooses, in place of measured ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

from mlx_moeflux.kernels.verify import timing, verdicts


class Clock:
    """Seconds of evaluations by the name of what computes: of an evaluation by itself, and of each
    of its calls.

    names: Implementation -> seconds of a call, "kernel" for those that are not named, or a function
    that returns them. runs: Whether the calls are computed. evaluations: (name, calls) in the order
    of time.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, fixed=3e-4, runs=True, **names):
        self.fixed, self.runs, self.names = fixed, runs, names
        self.evaluations: list[tuple[str, int]] = []
        patch.setattr(timing, "seconds_of", self)
        patch.setattr(verdicts, "is_virtual", lambda: False)

    def __call__(self, name: str, function: Callable, turns: Iterator, count: int) -> float:
        self.evaluations.append((name, count))
        calls = list(itertools.islice(turns, count))
        if self.runs:
            mx.eval([function(*args, **kwargs) for args, kwargs in calls])
        each = self.names[name] if name in self.names else self.names["kernel"]
        return self.fixed + count * (each() if callable(each) else each)
