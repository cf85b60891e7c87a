"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.found = tuple(stops), "", False

    def add(self, text: str) -> str:
        """What may be shown now; sets `found` once a stop string is complete."""
        self._held += text
        hits = [i for i in (self._held.find(stop) for stop in self._stops) if i >= 0]
        if hits:
            self.found = True
            shown, self._held = self._held[: min(hits)], ""
            return shown
        held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - held]
        self._held = self._held[len(self._held) - held :]
        return shown

    def finish(self, text: str) -> str:
        """The rest when no more comes."""
        shown = self.add(text)
        if self.found:
            return shown
        rest, self._held = self._held, ""
        return shown + rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )
