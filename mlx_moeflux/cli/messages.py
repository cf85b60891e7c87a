"""What commands show beside their result: messages, and bars of progress."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

# Where no bar can be drawn, a line comes so often.
LINE_SECONDS = 5.0


def say(kind: str, message: object) -> None:
    """Write a message to stderr, see :func:`write_line`."""
    write_line(f"{kind}: {' '.join(str(message).split())}")


def write_line(line: str) -> None:
    """Write one line to stderr in a single call, so that lines of threads do not mix. Where stderr
    cannot be written, the exit status is all that is left to say."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    # A bar that is shown is removed, and drawn again below the line.
    beside = contextlib.nullcontext() if bars is None else bars.external_write_mode(sys.stderr)
    with contextlib.suppress(OSError), beside:
        sys.stderr.write(f"{line}\n")


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


class Trying:
    """Says that kernels are tried before their first use, while the block runs them: a bar on a
    terminal's stderr, elsewhere a line now and then, and one line of all that were tried.

    The bar's total grows, see :func:`~mlx_moeflux.kernels.verify.trials.watched`. note: Shows a
    line, and there is no bar; None: to stderr.
    """

    WHAT = "trying kernels on this GPU, once"

    def __init__(self, note: Callable[[str], object] | None = None):
        self._draws = note is None and sys.stderr.isatty()
        self._note = note or write_line
        self._bar: Any = None
        self._watching = contextlib.ExitStack()
        self._done = self._said = 0
        self._began = self._last = self._shown = 0.0
        self._ended = False

    def __enter__(self) -> Trying:
        from mlx_moeflux.kernels.verify import trials

        self._watching.enter_context(trials.watched(self._show))
        return self

    def _show(self, done: int, total: int) -> None:
        now = self._last = time.monotonic()
        self._done = done
        self._began = self._began or now
        if self._ended:
            return
        if self._draws:
            from tqdm import tqdm

            if self._bar is None:
                self._bar = tqdm(desc=self.WHAT, unit="kernel", leave=False, file=sys.stderr)
            self._bar.total, self._bar.n = total, done
            self._bar.refresh()
        elif not self._shown:
            self._note(self.WHAT if total == 1 else self.WHAT.replace("kern", f"{total} kern"))
            self._shown = now
        elif now >= self._shown + LINE_SECONDS:
            self._note(f"{self.WHAT}: {done} so far")
            self._shown = now

    def end(self, *, lines: bool = False) -> None:
        """Remove the bar and say what was tried. lines: Lines tell of later trials; else only one
        does, at the end of the block, so that nothing is drawn into a text."""
        self._ended, self._draws, self._shown = not lines, False, 0.0
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if tried := self._done - self._said:
            seconds = self._last - self._began
            kernels = "kernel" if tried == 1 else "kernels"
            self._note(f"tried {tried} {kernels} on this GPU in {seconds:.1f} s, once")
            self._said, self._began = self._done, 0.0

    def __exit__(self, *exception: object) -> None:
        self._watching.close()
        self.end()
