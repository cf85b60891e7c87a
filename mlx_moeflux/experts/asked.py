"""What a call of a layer asks for, as policies are told it. No MLX."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Asked(NamedTuple):
    """The distinct experts of a call.

    needed: Ascending. experts, last, uses: The same in the order of their last use, see
    :meth:`~mlx_moeflux.experts.policy.Eviction.touch`.
    """

    needed: list[int]
    experts: list[int]
    last: list[int]
    uses: list[int]

    @classmethod
    def of(cls, ids: np.ndarray, num_experts: int, first: int) -> Asked:
        """ids ``[N, K]``, ascending in each row; entries equal to `num_experts` are padding.

        first: How many tokens the layer had seen before.
        """
        if len(ids) == 1:
            needed = ids[0].tolist()
            while needed and needed[-1] == num_experts:
                needed.pop()
            return cls(needed, needed, [first] * len(needed), [1] * len(needed))
        flat = ids.reshape(-1)
        places = np.flatnonzero(flat < num_experts)[::-1]
        # The first of the reversed places is the last use.
        needed, at, uses = np.unique(flat[places], return_index=True, return_counts=True)
        last = places[at]
        order = np.argsort(last)
        return cls(
            needed.tolist(),
            needed[order].tolist(),
            (first + last[order] // ids.shape[1]).tolist(),
            uses[order].tolist(),
        )
