"""Reads experts of a streamed store before their layer is called, as a prefetcher proposes."""

from __future__ import annotations

import numpy as np

from mlx_moeflux.experts.policies.eviction import ExpertRequest
from mlx_moeflux.experts.policies.prefetch import (
    Prefetch,
    Switched,
    blocks_ahead,
    merged,
    proposed,
)
from mlx_moeflux.experts.policies.timed_switch import TimedSwitch
from mlx_moeflux.experts.streaming.call import Ids
from mlx_moeflux.experts.streaming.layer import StreamedLayer
from mlx_moeflux.experts.telemetry.events import Guess


class ReadAhead:
    """Begins to read what a prefetcher proposes, and enters it when its layer is called.

    policy: The prefetcher. switch: Decides by time whether it proposes; None: it always does.
    keep_all: Wait for every block. Otherwise those that are not needed and not begun are dropped.
    """

    def __init__(self, policy: Prefetch, keep_all: bool):
        self.policy, self.keep_all = policy, keep_all
        self.switch: TimedSwitch | None = policy.switch if isinstance(policy, Switched) else None

    def enter(self, state: StreamedLayer, request: ExpertRequest) -> None:
        """Enter the blocks that were read before this call, and notify the prefetcher of it."""
        if proposal := state.proposal:
            needed = frozenset(request.needed)
            state.commit_prefetch(needed, wait=self.keep_all)
            state.count(proposed=len(proposal), foreseen=len(proposal & needed))
            state.proposal = frozenset()
        self.policy.requested(state.layer, request.experts, request.last)

    def begin(self, following: StreamedLayer, ahead: Ids | None) -> None:
        """Begin to read experts of `following`, the layer after that of a call. ahead: The guess
        ``[N, K]`` of its router, if any."""
        layer, table = following.layer, following.table
        rows = () if ahead is None else np.array(ahead).tolist()
        guess = merged(rows, table.num_experts)
        if following.events is not None and (guess or self.switch is not None):
            following.events(Guess(layer, guess))
        if following.reading_ahead:
            return
        proposal = proposed(self.policy, layer, guess, table.num_experts)
        following.proposal = frozenset(proposal)
        blocks = blocks_ahead(self.policy, proposal, table, table.slots)
        if blocks:
            following.read_ahead(blocks, following.proposal)
