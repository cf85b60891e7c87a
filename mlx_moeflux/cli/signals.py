"""Ctrl-C, SIGTERM and SIGHUP as exceptions that unwind a command, and their exit status."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

AGAIN_SECONDS = 0.02
HUNG_UP = 128 + signal.SIGHUP
_received: list[int] = []
_held = False


class Terminated(KeyboardInterrupt):
    """SIGTERM, a second of which ends the process without unwinding; or SIGHUP, which is sent when
    a terminal or an ssh session is closed."""


def status() -> int | None:
    """Return the exit status of a signal that was received and not :func:`handled`, or None.

    What a library raises instead of the interrupt, such as an ImportError, is its consequence.
    """
    return 128 + _received[-1] if _received else None


def handled(interrupt: KeyboardInterrupt) -> None:
    """Forget a Ctrl-C that the command has answered; another signal is raised again."""
    if isinstance(interrupt, Terminated):
        raise interrupt
    _received.clear()


@contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT, and Terminated at SIGTERM and SIGHUP, inside the block.

    Does nothing outside the main thread, and leaves signals alone that somebody else handles or
    that are ignored, as SIGHUP is under ``nohup``.
    """
    _received.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    plain: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    taken = [number for number, handler in plain.items() if signal.getsignal(number) == handler]
    hook = sys.unraisablehook
    sys.unraisablehook = _again_or(hook)
    for number in taken:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in taken:
            if signal.getsignal(number) == _raise:
                signal.signal(number, plain[number])


@contextmanager
def held() -> Iterator[None]:
    """Raise what arrives inside the block at its end. MLX aborts the process if an exception meets
    its import."""
    global _held
    before, _held = len(_received), True
    try:
        yield
    finally:
        _held = False
    if len(_received) > before:
        raise _interrupt(_received[-1])


def _raise(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP and _received:
        return  # the shell and the system both send it, and some send it behind SIGTERM
    _received.append(number)
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
    if not _held:
        raise _interrupt(number)


def _interrupt(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


def _again_or(hook: Any) -> Any:
    """Return a hook that sends a signal again whose exception Python dropped, because it was raised
    in a finaliser or a callback."""

    def unraisable(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            hook(dropped)
            return
        # Forgotten: a SIGHUP behind another signal is ignored.
        number = _received.pop() if _received else signal.SIGINT
        again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    return unraisable
