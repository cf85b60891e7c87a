"""Banks that shrink while the system lacks memory, and grow back."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlx_moeflux.experts.budget import format_bytes
from mlx_moeflux.experts.store import Streaming
from mlx_moeflux.experts.system_memory import (
    MacPressure,
    MemoryPressure,
    available_memory,
    least_available,
)
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.verify.failures import lacks_memory
from mlx_moeflux.models.runtime import Runtime

# From one look at the system's memory to the next.
LOOK_SECONDS = 0.5
# Of a shrinking bank, of equal size; the last leaves the experts of one token.
STEPS = 4
# How long memory must not have been scarce before a step back, and bytes that must be left after
# it, for files that are read and for programs that grow meanwhile.
CALM_SECONDS, ROOM_BYTES = 10.0, 512 << 20
# A step back after which memory is scarce within so long may be the cause. The next one like it
# waits, and four times as long each time, unless ROOM_BYTES more are available than before it. The
# first wait is short, because the shortage may have come by chance.
SETTLE_SECONDS, FIRST_WAIT, LONGEST_WAIT = 60.0, 20.0, 600.0
# From a look to the next while nothing is scarce, on macOS: vm_stat is a process, 1 to 5 ms.
CALM_LOOK_SECONDS = 2.0


class ElasticBanks:
    """Shrinks the banks of a streamed model a step at a time while memory is scarce.

    They grow back to the slots that they had, also to those of a budget that the user gave; slots
    that somebody sets meanwhile are the new ones. Results keep their bits. The thread that runs the
    model calls :meth:`look` between two steps; another may, while the model does not run.

    tell: Called with a line for each change. available: Returns the bytes that can be had without
    swapping. least: Bytes of them below which memory is scarce. calm_look: Seconds from one look to
    the next while it is not. shrunk, grown: Number of steps since the start.
    """

    def __init__(
        self,
        runtime: Runtime,
        pressure: MemoryPressure,
        tell: Callable[[str], object],
        *,
        available: Callable[[], int] = lambda: available_memory()[0],
        least: int = 0,
        calm_look: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._runtime, self._pressure, self._tell = runtime, pressure, tell
        self._available, self._least, self._clock = available, least, clock
        self._calm_look = calm_look
        self.shrunk = self.grown = 0
        self._next = self._asked = self._changed = clock()
        # Layer -> slots before the first step, and as they were left.
        self._full: dict[int, int] = {}
        self._left: dict[int, int] = {}
        # Steps that are not taken back; the last one that was: when, from how many, and bytes that
        # were available before it; for steps that failed: the wait, and those bytes.
        self._steps = 0
        self._back: tuple[float, int, int] | None = None
        self._failed: dict[int, tuple[float, int]] = {}

    def look(self) -> None:
        """Shrink or grow by a step if that is due; look at the system at most twice a second."""
        now = self._clock()
        if now < self._next:
            return
        if self._slots() != self._left:
            self._full, self._steps, self._back, self._failed = self._slots(), 0, None, {}
        scarce = self._pressure.scarce()
        self._next = now + (LOOK_SECONDS if scarce else max(LOOK_SECONDS, self._calm_look))
        if scarce:
            self._judge(now)
            self._asked = self._changed = now
            self._shrink()
        elif self._steps and now - self._asked >= CALM_SECONDS:
            self._asked = now
            self._grow(now)

    def _judge(self, now: float) -> None:
        """Remember that the last step back may have made memory scarce."""
        if self._back is None:
            return
        (then, steps, available), self._back = self._back, None
        if now - then >= SETTLE_SECONDS:
            self._failed = {}
            return
        wait = 4 * self._failed[steps][0] if steps in self._failed else FIRST_WAIT
        self._failed[steps] = min(wait, LONGEST_WAIT), available

    def _shrink(self) -> None:
        wanted = self._after(self._steps + 1)
        if self._steps < STEPS and wanted != self._slots():
            self._steps += 1
            if self._resize(wanted, "the system lacks memory: experts shrink"):
                self.shrunk += 1

    def _grow(self, now: float) -> None:
        wanted, block_bytes = self._after(self._steps - 1), self._runtime.store.block_bytes
        assert block_bytes is not None  # a streamed store has them
        more = sum((n - self._left[layer]) * block_bytes[layer] for layer, n in wanted.items())
        available = self._available()
        wait, before = self._failed.get(self._steps, (0.0, 0))
        waits = now - self._changed < wait and available < before + ROOM_BYTES
        if waits or available - more < self._least + ROOM_BYTES:
            return
        if self._back is not None:
            # It was calm since the step before this one.
            self._failed.pop(self._back[1], None)
        if self._resize(wanted, "memory is free again: experts grow"):
            self._back, self._changed = (now, self._steps, available), now
            self._steps -= 1
            self.grown += 1

    def _after(self, steps: int) -> dict[int, int]:
        """Return the slots after so many steps from the full ones."""
        least = min(self._runtime.router.num_experts_per_tok, self._streaming.most_slots)
        return {
            layer: max(min(least, n), n * (STEPS - steps) // STEPS)
            for layer, n in self._full.items()
        }

    def _resize(self, slots: dict[int, int], why: str) -> bool:
        """Give the layers so many slots; return False if there is no memory for the new arrays."""
        streaming = self._streaming
        before = format_bytes(streaming.bank_bytes)
        try:
            self._runtime.resize_banks(slots)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            return False
        finally:
            self._left = self._slots()
        self._tell(f"{why} from {before} to {format_bytes(streaming.bank_bytes)}")
        return True

    def _slots(self) -> dict[int, int]:
        return dict(self._streaming.slots)

    @property
    def _streaming(self) -> Streaming:
        streaming = self._runtime.store.streaming
        assert streaming is not None  # such banks alone are elastic
        return streaming


def elastic_banks(
    runtime: Runtime, pressure: MemoryPressure | None, tell: Callable[[str], object]
) -> ElasticBanks | None:
    """Return what shrinks the banks of a model; None where there are none in the system's memory,
    or on several ranks, which wait for one another."""
    store = runtime.store
    if pressure is None or store.streaming is None or store.ranks is not None:
        return None
    if device.kind() == "cuda":
        return None
    calm_look = CALM_LOOK_SECONDS if isinstance(pressure, MacPressure) else 0.0
    return ElasticBanks(runtime, pressure, tell, least=least_available(), calm_look=calm_look)
