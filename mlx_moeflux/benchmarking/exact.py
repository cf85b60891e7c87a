"""Whether what is measured is right: no speed is printed unless this holds in the same run.

The judge of a streamed or resident model is the same model with :class:`FreshStore`, which reads
every expert anew on every call: it has no slots, no policy and nothing to confuse. The judge of
our arithmetic is mlx-lm on the same checkpoint and ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import ExactnessError
from mlx_moeflux.experts.bank import LayerBank
from mlx_moeflux.experts.compute import ExpertFFN, ExpertMix, Form, from_whole_bank
from mlx_moeflux.experts.readers import Reader
from mlx_moeflux.experts.stats import ExpertStats
from mlx_moeflux.kernels.expert_ffn import expert_ffn
from mlx_moeflux.kernels.expert_mix import expert_mix

# Difference of float32 logits by their size (root mean squares over the vocabulary) at the worst
# position: of the same arithmetic, and of another program's.
SAME, OTHERS = 1e-4, 1e-3

PREFILL_TOKENS = 24
DECODE_TOKENS = 8


class FreshStore:
    """Reads what a call needs into a bank of its own, computes, and forgets both.
    See :class:`~mlx_moeflux.experts.store.ExpertStore`; slow on purpose."""

    def __init__(self, reader: Reader, *, ffn: ExpertFFN = expert_ffn, mix: ExpertMix = expert_mix):
        self.reader, self.layers, self.num_experts = reader, reader.layers, reader.num_experts
        self._form, self._stats = Form(ffn=ffn, mix=mix), ExpertStats(reader.layers)

    def experts(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """See :meth:`ExpertStore.experts`."""
        needed = np.unique(np.array(ids))
        needed = needed[needed < self.num_experts]
        bank = LayerBank(self.reader.layout(layer), max(1, len(needed)))
        table = np.zeros(self.num_experts + 1, np.uint32)
        for slot, expert in enumerate(needed.tolist()):
            self.reader.read(layer, expert, bank.slot_views(slot))
            table[expert] = slot
        y = from_whole_bank(x, ids, weights, bank.experts, self._form, table=mx.array(table))
        mx.eval(y)
        return y

    def stats(self) -> ExpertStats:
        """See :meth:`ExpertStore.stats`; nothing is counted."""
        return self._stats

    def close(self) -> None:
        """See :meth:`ExpertStore.close`."""
        self.reader.close()


@dataclass(frozen=True)
class Difference:
    """How far apart two sets of logits are: by position, `worst` and `median`; `largest` of all
    single logits; `same` if every bit agrees."""

    worst: float
    median: float
    largest: float
    same: bool

    def __str__(self) -> str:
        if self.same:
            return "identical bits"
        return f"relative difference {self.median:.1e} (median), {self.worst:.1e} (worst position)"


def difference(found: np.ndarray, expected: np.ndarray) -> Difference:
    """found, expected ``[B, T, V]`` float32; anything that is not finite differs infinitely."""
    if found.shape != expected.shape:
        raise ExactnessError(f"logits have shape {found.shape}, expected {expected.shape}.")
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return Difference(float("inf"), float("inf"), float("inf"), same=False)
    apart = found.astype(np.float64) - expected
    scale = np.sqrt((expected.astype(np.float64) ** 2).mean(-1))
    relative = np.sqrt((apart**2).mean(-1)) / np.maximum(scale, 1e-30)
    return Difference(
        worst=float(relative.max()),
        median=float(np.median(relative)),
        largest=float(np.abs(apart).max()),
        same=bool(np.array_equal(found, expected)),
    )


def hold(what: str, found: Difference, limit: float) -> str:
    """A line that says how far apart logits are.

    Raises:
        ExactnessError: They differ by more than `limit` at some position.
    """
    if not found.worst <= limit:
        raise ExactnessError(
            f"{what}: {found}, more than {limit:g}; no speed is printed for wrong results."
        )
    return f"exact: {what}: {found}, tolerance {limit:g}"


def forced_logits(
    call: Callable[[mx.array], mx.array], ids: np.ndarray, *, decode: int
) -> np.ndarray:
    """ids ``[B, T]`` -> logits ``[B, T, V]`` float32: all but the last `decode` tokens at once,
    those one by one. call: tokens ``[B, n]`` -> logits ``[B, n, V]``, with a cache inside."""
    split = ids.shape[1] - decode
    parts: Sequence[np.ndarray] = [ids[:, :split], *np.split(ids[:, split:], decode, axis=1)]
    return np.concatenate([_host(call(mx.array(part))) for part in parts], axis=1)


def _host(logits: Any) -> np.ndarray:
    return np.array(logits.astype(mx.float32))
