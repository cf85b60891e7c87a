"""Gives a streamed store the slots that the trial of a smaller budget wants."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.budget import format_bytes
from mlx_moeflux.experts.policies.chooser import Cost
from mlx_moeflux.experts.policies.prefetch import MOST_PAIRS
from mlx_moeflux.experts.policies.timed_budget import TimedBudget
from mlx_moeflux.experts.policies.timed_switch import DecodeSteps, TimedSwitch
from mlx_moeflux.experts.store import Streaming
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.verify.failures import lacks_memory


class BudgetTrial:
    """Follows a trial of a smaller budget between the steps of a store. Times decode steps, for the
    trial, and after it for the switch of a prefetcher: each would disturb the other.

    timed: The trial; None: there is none, or somebody else gave the layers slots. switch: The
    prefetcher's, or None. heard: A listener gets events, which would disturb the trial. steps:
    Times decode steps; None: nobody decides by time.
    """

    def __init__(self, timed: TimedBudget | None, stats: ExpertStats, *, heard: bool):
        self.timed, self._stats, self.heard = timed, stats, heard
        self.steps: DecodeSteps | None = None
        self.switch: TimedSwitch | None = None
        self._turning = False
        # Layer -> experts that lost their slots to the smaller budget.
        self._left: dict[int, list[int]] = {}

    def choose(self) -> None:
        """Choose who gets what decode steps cost from now on."""
        listener, pairs = self.switch, MOST_PAIRS
        if self.timed is not None and not self.timed.over and not self.heard:
            listener, pairs = self.timed, self.timed.pairs
        steps = self.steps
        if listener is (None if steps is None else steps.listener):
            return
        if steps is not None:
            steps.disturb()
        self.steps = None if listener is None else DecodeSteps(listener, self._clock, pairs)

    def end(self) -> None:
        """End the trial, because layers are given slots, unless it gives them itself."""
        if not self._turning:
            self.timed = None
            self.choose()

    def disturb(self) -> None:
        """Note that steps before and after now cannot be compared, unless the trial does so."""
        if self.steps is not None and not self._turning:
            self.steps.disturb()

    def forget(self) -> None:
        """Forget what steps cost, because numbers of slots change."""
        self.disturb()
        if self.switch is not None:
            self.switch.reset()

    def follow(self, store: Streaming) -> None:
        """Give the layers the slots that the trial wants, between two steps: not while there is a
        listener, or a pending output that this thread cannot wait for. If there is no memory for
        them, the present budget stays. A larger budget reads again what a smaller one left."""
        self.choose()
        timed = self.timed
        if timed is None or self.heard or timed.wanted.slots == store.slots:
            return
        wanted = timed.wanted
        if not all(store.read_missing(layer, (), protected=()) for layer in wanted.slots):
            return
        held = {layer: store.residents(layer) for layer in wanted.slots}
        self._turning = True
        try:
            store.resize_all(wanted.slots, tight=True)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            present = timed.larger if wanted is timed.smaller else timed.smaller
            timed.end(f"no memory was left for {format_bytes(wanted.nbytes)}", present)
            store.resize_all(present.slots, tight=True)
        finally:
            self._turning = False
        # A block that cannot be read is left to the call that needs it.
        with suppress(ExpertFileError):
            for layer, left in self._left.items():
                store.read_missing(layer, left, protected=store.residents(layer))
        now = {layer: store.residents(layer) for layer in held}
        self._left = {layer: [e for e in held[layer] if e not in now[layer]] for layer in held}

    def _clock(self) -> Cost:
        """Return the time, and the time waited for reads."""
        layers = self._stats.layers.values()
        return Cost(perf_counter(), sum(stats.stall_seconds for stats in layers))
