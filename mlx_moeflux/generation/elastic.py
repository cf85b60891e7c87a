"""Banks that shrink while the system lacks memory, and grow back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mlx_moeflux.experts.budget import format_bytes
from mlx_moeflux.experts.system_memory import MemoryPressure, about_available
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.verify.failures import lacks_memory

# From one look at the system's memory to the next.
LOOK_SECONDS = 0.5
# Of a shrinking bank, of equal size; the last leaves the experts of one token.
STEPS = 4
# How long memory must not have been scarce before a step back, and bytes that others must have
# given up since the step was taken. Else memory would soon be scarce again.
CALM_SECONDS, ROOM_BYTES = 10.0, 256 << 20


class ElasticBanks:
    """Shrinks the banks of a streamed model a step at a time while memory is scarce.

    They grow back to the slots that they had, also to those of a budget that the user gave; slots
    that somebody sets meanwhile are the new ones. Results keep their bits. The thread that runs the
    model calls :meth:`look` between two steps; another may, while the model does not run.

    tell: Called with a line for each change. available: Returns the bytes that can be had without
    swapping. shrunk, grown: Number of steps since the start.
    """

    def __init__(
        self,
        model: Any,
        pressure: MemoryPressure,
        tell: Callable[[str], object],
        *,
        available: Callable[[], int] = about_available,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._model, self._pressure, self._tell = model, pressure, tell
        self._available, self._clock = available, clock
        self.shrunk = self.grown = 0
        self._next = self._calm_since = clock()
        # Layer -> slots before the first step, and as they were left.
        self._full: dict[int, int] = {}
        self._left: dict[int, int] = {}
        # Bytes that were available before each step that is not taken back.
        self._steps: list[int] = []

    def look(self) -> None:
        """Shrink or grow by a step if that is due; look at the system at most twice a second."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        if self._slots() != self._left:
            self._full, self._steps = self._slots(), []
        if self._pressure.scarce():
            self._calm_since = now
            self._shrink()
        elif self._steps and now - self._calm_since >= CALM_SECONDS:
            self._calm_since = now
            self._grow()

    def _shrink(self) -> None:
        wanted = self._after(len(self._steps) + 1)
        if len(self._steps) < STEPS and wanted != self._slots():
            self._steps.append(self._available())
            if self._resize(wanted, "the system lacks memory: experts shrink"):
                self.shrunk += 1

    def _grow(self) -> None:
        wanted, block_bytes = self._after(len(self._steps) - 1), self._model.store.block_bytes
        more = sum((n - self._left[layer]) * block_bytes[layer] for layer, n in wanted.items())
        if self._available() - more < self._steps[-1] + ROOM_BYTES:
            return
        if self._resize(wanted, "memory is free again: experts grow"):
            self._steps.pop()
            self.grown += 1

    def _after(self, steps: int) -> dict[int, int]:
        """Return the slots after so many steps from the full ones."""
        least = min(self._model.router.num_experts_per_tok, self._model.store.streaming.most_slots)
        return {
            layer: max(min(least, n), n * (STEPS - steps) // STEPS)
            for layer, n in self._full.items()
        }

    def _resize(self, slots: dict[int, int], why: str) -> bool:
        """Give the layers so many slots; return False if there is no memory for the new arrays."""
        streaming = self._model.store.streaming
        before = format_bytes(streaming.bank_bytes)
        try:
            self._model.resize_banks(slots)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            return False
        finally:
            self._left = self._slots()
        self._tell(f"{why} from {before} to {format_bytes(streaming.bank_bytes)}")
        return True

    def _slots(self) -> dict[int, int]:
        return dict(self._model.store.streaming.slots)


def elastic_banks(
    model: Any, pressure: MemoryPressure | None, tell: Callable[[str], object]
) -> ElasticBanks | None:
    """Return what shrinks the banks of `model`; None where there are none in the system's memory,
    or on several ranks, which wait for one another."""
    store = model.store
    if pressure is None or store.streaming is None or store.ranks is not None:
        return None
    return None if device.kind() == "cuda" else ElasticBanks(model, pressure, tell)
