"""The request of a layer call, as policies receive it. No MLX."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ExpertRequest(NamedTuple):
    """The distinct experts of a call.

    needed: Ascending. experts, last, uses: The same in the order of their last use, see
    :meth:`~mlx_moeflux.experts.policies.eviction.Eviction.touch`.
    """

    needed: list[int]
    experts: list[int]
    last: list[int]
    uses: list[int]

    @classmethod
    def of(cls, ids: np.ndarray, num_experts: int, first: int) -> ExpertRequest:
        """ids ``[N, K]``, ascending in each row; entries equal to `num_experts` are padding.

        first: How many tokens the layer had seen before.
        """
        if len(ids) == 1:
            needed = ids[0].tolist()
            while needed and needed[-1] == num_experts:
                needed.pop()
            return cls(needed, needed, [first] * len(needed), [1] * len(needed))
        flat = ids.reshape(-1)
        uses = np.bincount(flat, minlength=num_experts)[:num_experts]
        needed = np.flatnonzero(uses)
        last = np.empty(num_experts + 1, np.int64)
        last[flat] = np.arange(len(flat))  # of several assignments the last one stays
        last, uses = last[needed], uses[needed]
        order = np.argsort(last)
        return cls(
            needed.tolist(),
            needed[order].tolist(),
            (first + last[order] // ids.shape[1]).tolist(),
            uses[order].tolist(),
        )
