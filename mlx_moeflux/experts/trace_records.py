"""The records of a trace file: see docs/trace-format.md. No MLX."""

from __future__ import annotations

import struct

import numpy as np

from mlx_moeflux.experts.events import PrefetchDrop, PrefetchEnd, PrefetchStart, Steps

CALL = struct.Struct("<cBHIQQ")  # kind, K, layer, N, token, nanoseconds
RESULT = struct.Struct("<cxHIIIQd")  # kind, layer, hits, prefetched, misses, bytes, seconds
GUESS = struct.Struct("<cBH")  # kind, count, layer
PREFETCH = struct.Struct("<cxHH")  # kind, layer, expert
RESIZE = struct.Struct("<cxHI")  # kind, layer, slots
KINDS = {PrefetchStart: b"P", PrefetchEnd: b"A", PrefetchDrop: b"D"}


def records_of(block: Steps, began: int) -> bytes:
    """The records of traced steps, their calls' and, where hits are told of, their results';
    began: when the trace did, in nanoseconds."""
    S, L, N, K = block.ids.shape
    calls = np.zeros((S, L), _dtype(N * K, block.found))
    calls["kind"], calls["K"], calls["layer"], calls["N"] = b"C", K, block.layers, N
    calls["token"] = block.counts
    calls["nanoseconds"] = block.nanoseconds[:, None] - began
    calls["ids"] = block.ids.reshape(S, L, N * K)
    calls["weights"] = block.weights.reshape(S, L, N * K)
    if block.found:
        ids = np.sort(calls["ids"], axis=-1)
        calls["kind_2"], calls["layer_2"] = b"R", block.layers
        calls["hits"] = 1 + (ids[..., 1:] != ids[..., :-1]).sum(axis=-1)
    return calls.tobytes()


def _dtype(pairs: int, found: bool) -> np.dtype:
    """A call of so many ids, and what it met if that was `found`: CALL and RESULT."""
    fields = [("kind", "S1"), ("K", "u1"), ("layer", "<u2"), ("N", "<u4"), ("token", "<u8")]
    fields += [("nanoseconds", "<u8"), ("ids", "<u2", (pairs,)), ("weights", "<f2", (pairs,))]
    if found:
        fields += [("kind_2", "S1"), ("none", "u1"), ("layer_2", "<u2"), ("hits", "<u4")]
        fields += [("prefetched", "<u4"), ("misses", "<u4"), ("bytes", "<u8"), ("seconds", "<f8")]
    return np.dtype(fields)
