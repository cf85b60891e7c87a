"""Counts of a server, and their text in Prometheus' format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

PREFIX = "mlx_moeflux_"
SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts of values below each of `bounds`, and their sum."""

    def __init__(self, bounds: Iterable[float] = SECONDS):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        """Return the samples in Prometheus' format."""
        lines, count = [], 0
        for bound, number in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            count += number
            lines.append(f'{name}_bucket{{le="{bound}"}} {count}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {count}"]


class Metrics:
    """Counts since the server started; belongs to the event loop."""

    def __init__(self):
        self.requests: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.cache_hits = 0
        self.first_token, self.duration = Histogram(), Histogram()

    def text(self, others: Mapping[str, tuple[str, str, float]]) -> str:
        """Return all counts. others: Name -> (type, help, value) of what is counted elsewhere."""
        lines = _head("requests_total", "counter", "Requests by path and status.")
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'{PREFIX}requests_total{{path="{path}",status="{status}"}} {count}')
        counts = {
            "prompt_tokens_total": ("counter", "Tokens of prompts.", self.prompt_tokens),
            "cached_tokens_total": (
                "counter",
                "Tokens of prompts that the prompt cache supplied.",
                self.cached_tokens,
            ),
            "prompt_cache_hits_total": (
                "counter",
                "Requests whose prompt began with a stored state.",
                self.cache_hits,
            ),
            "completion_tokens_total": ("counter", "Tokens of replies.", self.completion_tokens),
            **others,
        }
        for name, (kind, purpose, value) in counts.items():
            lines += [*_head(name, kind, purpose), f"{PREFIX}{name} {value}"]
        for name, purpose, histogram in (
            ("time_to_first_token_seconds", "Time to a reply's first token.", self.first_token),
            ("request_seconds", "Time of whole requests.", self.duration),
        ):
            lines += [*_head(name, "histogram", purpose), *histogram.lines(f"{PREFIX}{name}")]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, purpose: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {purpose}", f"# TYPE {PREFIX}{name} {kind}"]
