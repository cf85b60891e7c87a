"""Keeps a Mac from going to sleep while a command or the server works.

An idle Mac goes to sleep although its GPU computes, unless a process holds an assertion against
that. ``caffeinate -i``, a part of macOS, holds one for as long as it runs; the display may sleep.
It is a process of its own: a call of IOKit through ctypes with one wrong type would end ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings

CAFFEINATE = "/usr/bin/caffeinate"
# Requests that follow one another within this time share one process.
REST_SECONDS = 10.0


class Awake:
    """Holds the assertion while there is work; owns the process that does. Any thread may call it,
    and between two changes a call costs no more than a lock.

    A process that cannot be started, or that ends by itself, is one warning, and no other is
    started. allow_sleep: Hold nothing. On other systems than macOS nothing is held either.
    """

    def __init__(self, *, allow_sleep: bool = True):
        self._holds = sys.platform == "darwin" and not allow_sleep
        self._lock = threading.Lock()
        self._child: int | None = None
        self._rests_since: float | None = None

    def work(self) -> None:
        """Hold from now on."""
        if self._holds:
            with self._lock:
                self._rests_since = None
                if self._child is None:
                    self._start()

    def rest(self) -> None:
        """Hold for :data:`REST_SECONDS` more, or twice as long, unless work begins before."""
        if self._holds:
            with self._lock:
                self._rests_since = time.monotonic()

    def close(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._end()

    def __enter__(self) -> Awake:
        self.work()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        # -w: it ends with this process, however that ends.
        command = [CAFFEINATE, "-i", "-w", str(os.getpid())]
        null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        try:
            # No fork, for which the system would go through the pages of the model. A group of its
            # own: Ctrl-C in a terminal is for this process alone.
            self._child = os.posix_spawn(
                CAFFEINATE, command, os.environ, file_actions=null, setpgroup=0
            )
        except OSError as error:
            self._give_up(f"cannot be started ({error.strerror or error})")
            return
        watch = threading.Thread(target=self._watch, args=(self._child,), daemon=True, name="awake")
        watch.start()

    def _watch(self, child: int) -> None:
        """End the process after enough rest, and notice if it ends by itself."""
        while True:
            time.sleep(REST_SECONDS)
            with self._lock:
                if self._child != child:
                    return
                if _ended(child):
                    self._child = None
                    self._give_up("ended by itself")
                    return
                since = self._rests_since
                if since is not None and time.monotonic() - since >= REST_SECONDS:
                    self._end()
                    return

    def _end(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            if not _ended(child):
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(child, signal.SIGKILL)  # the system forgets its assertion
                    os.waitpid(child, 0)

    def _give_up(self, why: str) -> None:
        self._holds = False
        warnings.warn(f"{CAFFEINATE} {why}; this Mac may go to sleep meanwhile.", stacklevel=2)


def _ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:  # another thread has waited for it
        return True
