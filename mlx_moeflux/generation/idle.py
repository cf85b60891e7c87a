"""Give the experts' memory back while a program waits for its next prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlx_moeflux.errors import InputError


def check_idle_release(seconds: float | None) -> None:
    """Raise InputError unless `seconds` is None or a positive number that a timer takes."""
    if seconds is not None and not 0 < seconds <= threading.TIMEOUT_MAX:
        raise InputError(f"--idle-release is {seconds}; give a positive number of seconds.")


@contextmanager
def released_when_idle(model: Any, seconds: float | None) -> Iterator[None]:
    """Release the experts of `model` once the block has taken `seconds`; None: never.

    The block must not run the model.
    """
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, model.release)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
