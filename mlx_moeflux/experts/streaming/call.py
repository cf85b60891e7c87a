"""A call of a layer of a streamed store, and its computation from slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.compute import ExpertSum, Pairs
from mlx_moeflux.experts.policies.eviction import ExpertRequest
from mlx_moeflux.experts.policies.wave_schedule import Wave, WaveSchedule, run_waves
from mlx_moeflux.experts.streaming.layer import StreamedLayer

# On the device, or where the host knows them already.
Ids = mx.array | np.ndarray


@dataclass(slots=True, eq=False)
class Call:
    """A call of a layer, from :meth:`StreamedStore.begin_load` to
    :meth:`StreamedStore.release_after`.

    ids, ahead: ``[N, K]``. training: Whether gradients are taken. host, request: The ids on the
    host, and the experts that they need; None if the host need not know. missing: Experts that are
    being read for the call. waves: The schedule of a call that needs more experts than there are
    slots.
    """

    state: StreamedLayer
    ids: Ids
    ahead: Ids | None
    training: bool
    host: np.ndarray | None = None
    request: ExpertRequest | None = None
    missing: list[int] | None = None
    waves: WaveSchedule | None = None

    def begin_wave(self, wave: Wave) -> None:
        """Begin to read the missing experts of `wave`, in place of those that no wave needs."""
        assert self.waves is not None, "this call has no waves"
        self.state.look_up(wave.experts, wave.missing)
        self.state.begin_reads(wave.missing, self.waves.protected)

    def add(self, pairs: Pairs, total: ExpertSum) -> None:
        """Add the outputs of `pairs`, whose experts are in slots."""
        bank, slot_of = self.state.bank.current.experts, self.state.table.slots_by_expert
        if self.training and len(pairs):
            # Gradients read the experts after other ones have been read into their slots.
            experts = np.unique(pairs.expert)
            bank = bank.take(mx.array(slot_of[experts].astype(np.uint32)))
            mx.eval(bank.flat)
            slot_of = np.zeros_like(slot_of)
            slot_of[experts] = np.arange(len(experts))
        total.add(pairs, slot_of, bank)

    def add_waves(self, pairs: Pairs, total: ExpertSum, following: Callable[[int], None]) -> None:
        """Add waves to `total` in ascending id and read the next one meanwhile. Evaluate each, so
        that its slots can be read into. following: Called with the number of needed experts when
        the last reads have begun."""
        state, waves, request = self.state, self.waves, self.request
        assert waves is not None, "this call has no waves"
        assert request is not None, "the host knows the ids of calls in waves"
        needed = frozenset(request.needed)

        def finish() -> None:
            if state.early:
                state.finish_early(needed)
            else:
                state.finish()

        def compute(wave: Wave) -> None:
            part = pairs.between(wave.experts[0], wave.experts[-1])
            if len(part):
                self.add(part, total)
                total.evaluate()

        run_waves(waves, self.begin_wave, finish, compute, lambda: following(len(needed)))
