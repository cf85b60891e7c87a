"""The store's and the system's counters around one trial."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_moeflux.benchmarking import pages
from mlx_moeflux.experts.stats import ExpertStats

FROM_DISK = 0.95
"""Bytes read that must have come from the disk for a run to count as cold; for a warm one, the
rest may."""


class Account:
    """What one trial read.

    cached: Share of the experts' pages that were in memory before it. from_disk: Bytes that came
    from disks by bytes read; both None where nobody can tell. prompt, decode: The store's account
    up to the first token, and from there.
    """

    def __init__(self, stats: ExpertStats, *, cached: float | None):
        self._stats, self.cached = stats, cached
        self._start = self._first = stats.snapshot()
        self._disk = pages.bytes_from_disk()
        self.from_disk: float | None = None
        self.prompt = self.decode = stats

    def first_token(self) -> None:
        self._first = self._stats.snapshot()

    def end(self) -> None:
        self.decode = self._stats.since(self._first)
        self.prompt = self._first.since(self._start)
        read, now = self._stats.since(self._start).total.bytes_read, pages.bytes_from_disk()
        if now is not None and read:
            self.from_disk = (now - self._disk) / read


def cache_state(accounts: Sequence[Account], *, cold: bool) -> str:
    """ "cold", "warm" or "unverified": what the counters say, whatever was asked for."""
    shares = [account.from_disk for account in accounts]
    cached = [account.cached for account in accounts]
    if None in shares or None in cached:
        return "unverified"
    if cold and max(cached) <= pages.COLD_SHARE and min(shares) >= FROM_DISK:
        return "cold"
    if not cold and max(shares) <= 1 - FROM_DISK:
        return "warm"
    return "unverified"
