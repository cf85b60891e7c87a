"""What a model asks for its routed experts, whatever holds them.

:class:`~mlx_moeflux.experts.resident.ResidentStore` has all of them in memory,
:class:`~mlx_moeflux.experts.streamed.StreamedStore` reads what is missing. Both give the same
bits.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.experts.stats import ExpertStats


class ExpertStore(Protocol):
    """Computes the experts that the router chose. Replace it with ``load(store=...)``."""

    num_experts: int
    layers: tuple[int, ...]

    def experts(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """The weighted sum of each token's experts: sum over k of weights[n, k] expert(x[n]).

        Shapes:
            x: ``[N, C]``; ids: ``[N, K]`` uint32, ascending in each row; weights: ``[N, K]``
            float32. An id equal to E marks padding: no expert, whatever its weight.
            returns: ``[N, C]`` float32.

        A store with a true attribute `looks_ahead` is also given ``ahead=``, ``[N, K]`` uint32:
        what the router of the next MoE layer would choose now, the likeliest first; E marks
        padding. It is None for the last layer and for long calls.
        """
        ...

    def stats(self) -> ExpertStats:
        """The live account of this store."""
        ...

    def close(self) -> None:
        """Free memory, files and threads; the store cannot be asked afterwards."""
        ...


def check_call(layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> None:
    """Raise :class:`ShapeError` unless the arguments of `experts` fit each other."""
    shapes = f"x {list(x.shape)}, ids {list(ids.shape)}, weights {list(weights.shape)}"
    if x.ndim != 2 or ids.ndim != 2 or x.shape[0] != ids.shape[0] or ids.shape != weights.shape:
        raise ShapeError(f"layer {layer}: {shapes}; expected [N, C], [N, K], [N, K].")
    if ids.dtype != mx.uint32 or weights.dtype != mx.float32:
        raise ShapeError(
            f"layer {layer}: ids are {ids.dtype} and weights {weights.dtype}; expected uint32 and "
            "float32."
        )
    if not ids.size:
        raise ShapeError(f"layer {layer}: {shapes}; there must be a token and an expert.")


def check_ids(layer: int, ids: np.ndarray, num_experts: int) -> None:
    """Raise :class:`ShapeError` unless ids ``[N, K]``, read from the device, are in range."""
    if ids.max() > num_experts or (ids[:, 1:] < ids[:, :-1]).any():
        raise ShapeError(
            f"layer {layer}: ids must ascend in each row and be at most {num_experts}, got "
            f"{ids[0].tolist()} in the first row."
        )
