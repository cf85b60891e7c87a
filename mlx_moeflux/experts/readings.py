"""Results that read the slots of a layer: no slot changes before they are evaluated."""

from __future__ import annotations

import threading
from typing import NamedTuple

import mlx.core as mx


class Reading(NamedTuple):
    """A result that reads a bank; maker: whose streams it is on, None for anyone's to wait for."""

    maker: threading.Thread | None
    output: mx.array

    def ended(self) -> bool:
        """Wait until `output` is evaluated; False if this thread cannot do that, or must not.

        MLX waits for work that ``async_eval`` began, wherever that was, but does not see that
        another thread is inside ``eval``.
        """
        here = self.maker is None or self.maker is threading.current_thread()
        if not here and self.maker.is_alive():
            return False
        try:
            mx.eval(self.output)
        except RuntimeError as error:
            # The streams of a thread are its own, and end with it.
            if "in current thread" not in str(error):
                raise
            return False
        return True
