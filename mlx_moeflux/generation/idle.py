"""What a program gives up while it waits for its next prompt, and how it comes back.

Without pressure and without ``--idle-release`` nothing is given up: the first token after a wait of
any length takes what any other one does. After a release the next prompt first reads the experts
that were in memory, at most the bytes of all banks. After memory was scarce the banks are smaller,
and a prompt reads what it misses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlx_moeflux.errors import InputError
from mlx_moeflux.generation.elastic import LOOK_SECONDS, ElasticBanks
from mlx_moeflux.models.protocol import LoadedModel


def check_idle_release(seconds: float | None) -> None:
    """Raise InputError unless `seconds` is None or a positive number that a timer takes."""
    if seconds is not None and not 0 < seconds <= threading.TIMEOUT_MAX:
        raise InputError(f"--idle-release is {seconds}; give a positive number of seconds.")


class Idle:
    """A wait for one prompt, from now on, in which nothing runs `model`.

    release_after: Seconds after which its experts are released; None: never. elastic: What looks at
    the system's memory; None: nothing does.
    """

    def __init__(
        self,
        model: LoadedModel,
        release_after: float | None,
        elastic: ElasticBanks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._model, self._elastic, self._clock = model, elastic, clock
        self._until = None if release_after is None else clock() + release_after
        self.released = False

    @property
    def pause(self) -> float | None:
        """Seconds after which :meth:`look` is due; None: never."""
        if self.released:
            return None
        looks = [] if self._elastic is None else [LOOK_SECONDS]
        if self._until is not None:
            looks.append(max(self._until - self._clock(), 0.0))
        return min(looks, default=None)

    def look(self) -> None:
        """Release the experts if it is time to; else shrink or grow if that is due."""
        if self._until is not None and self._clock() >= self._until:
            self._model.release()
            self.released = True
        elif self._elastic is not None:
            self._elastic.look()


@contextmanager
def released_when_idle(
    model: LoadedModel, seconds: float | None, elastic: ElasticBanks | None = None
) -> Iterator[None]:
    """Give up memory beside the block, as :class:`Idle` does, in a thread of its own.

    The block must not run the model.
    """
    idle, done = Idle(model, seconds, elastic), threading.Event()
    if idle.pause is None:
        yield
        return

    def watch() -> None:
        while (pause := idle.pause) is not None and not done.wait(pause):
            idle.look()

    thread = threading.Thread(target=watch, name="idle", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
