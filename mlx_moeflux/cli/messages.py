"""What commands show beside their result: messages, and bars of progress."""

from __future__ import annotations

import contextlib
import sys


def say(kind: str, message: object) -> None:
    """Write one line to stderr in a single call, so that lines of threads do not mix. Where stderr
    cannot be written, the exit status is all that is left to say."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    # A bar that is shown is removed, and drawn again below the line.
    beside = contextlib.nullcontext() if bars is None else bars.external_write_mode(sys.stderr)
    with contextlib.suppress(OSError), beside:
        sys.stderr.write(f"{kind}: {' '.join(str(message).split())}\n")


class Bar:
    """Progress bar on a terminal's stderr, from the first report on. It is removed when all is done
    and at the end of the block: text that follows has the line for itself.

    what: Its title. unit: Of the numbers reported.
    """

    def __init__(self, what: str, unit: str):
        self._title, self._unit, self._bar = what, unit, None

    def __enter__(self) -> Bar:
        return self

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        if not sys.stderr.isatty():
            return
        from tqdm import tqdm

        if self._bar is None:
            shown = {"desc": self._title, "unit": self._unit, "unit_scale": self._unit == "B"}
            self._bar = tqdm(total=total, leave=False, file=sys.stderr, **shown)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
