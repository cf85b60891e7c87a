"""Check the results of a benchmark: it prints no speed unless they are right in the same run.

The judge of a streamed or resident model is the same model with :class:`FreshStore`, which reads
every expert anew on every call: it has no slots, no policy and nothing to confuse. The judge of
our arithmetic is mlx-lm on the same checkpoint and ids.

In 16 bits the logits of two right programs differ wildly once a router has chosen another expert
among equally good ones, and random weights are full of these. A single layer on the same input
does not drift: most of its positions must agree to the rounding of the dtype. So these are
compared layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import ExactnessError
from mlx_moeflux.experts.compute import REFERENCE_MIX, ExpertCompute, ExpertMix, from_whole_bank
from mlx_moeflux.experts.io.readers import Reader
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.streaming.bank import LayerBank
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.expert_ffn import Activation, swiglu
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.decoder import DecoderModel

# Difference of float32 logits by their size (root mean squares over the vocabulary) at the worst
# position, of the same arithmetic. :func:`limit` has another program's.
SAME = 1e-4

PREFILL_TOKENS = 24
DECODE_TOKENS = 8


class FreshStore(ExpertStore):
    """Reads what a call needs into a bank of its own, computes, and forgets both.
    See :class:`~mlx_moeflux.experts.store.ExpertStore`; slow on purpose."""

    def __init__(
        self, reader: Reader, *, mix: ExpertMix = REFERENCE_MIX, activation: Activation = swiglu
    ):
        self._activation = activation
        self.reader, self.layers, self.num_experts = reader, reader.layers, reader.num_experts
        self._expert_compute, self._stats = ExpertCompute(mix=mix), ExpertStats(reader.layers)

    def experts(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """See :meth:`ExpertStore.experts`."""
        needed = np.unique(np.array(ids))
        needed = needed[needed < self.num_experts]
        slots = max(1, len(needed))
        bank = LayerBank(self.reader.layout(layer), slots, activation=self._activation)
        table = np.zeros(self.num_experts + 1, np.uint32)
        for slot, expert in enumerate(needed.tolist()):
            self.reader.read(layer, expert, bank.slot_views(slot))
            table[expert] = slot
        y = from_whole_bank(
            x, ids, weights, bank.current.experts, self._expert_compute, table=mx.array(table)
        )
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
    """The distance of two sets of logits: `worst` and `median` over positions; `largest` over
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
    """Compute ids ``[B, T]`` -> logits ``[B, T, V]`` float32: all but the last `decode` tokens
    in one call, those one by one. call: tokens ``[B, n]`` -> logits ``[B, n, V]``; it owns a
    cache."""
    split = ids.shape[1] - decode
    parts: Sequence[np.ndarray] = [ids[:, :split], *np.split(ids[:, split:], decode, axis=1)]
    return np.concatenate([_host(call(mx.array(part))) for part in parts], axis=1)


def _host(logits: Any) -> np.ndarray:
    return np.array(logits.astype(mx.float32))


LIMITS = {"bfloat16": 4e-2, "float16": 1e-2, "float32": 1e-3}
OF_INPUT = 0.2


def limit(dtype: str) -> float:
    """Return the largest difference from another program: of most positions of a layer, by what the
    layer adds to its input and :data:`OF_INPUT` of the input, whose rounding is unavoidable; of
    float32 also that of logits. Products in TF32 have the bits of float16."""
    return LIMITS["float16" if dtype == "float32" and device.rounds_to_tf32() else dtype]


class OurParts:
    """Embedding, layers and head of our model, one at a time."""

    def __init__(self, model: DecoderModel):
        self._model, self.count = model, len(model.layers)

    def embed(self, ids: mx.array) -> mx.array:
        return self._model.model.embed_tokens(ids)

    def layer(self, index: int, parts: Sequence[mx.array]) -> mx.array:
        """Parts ``[B, n, C]`` of a sequence, one after another through one layer."""
        cache = self._model.make_cache()[index]
        out = [_evaluated(self._model.run_layer(index, part, cache)) for part in parts]
        return mx.concatenate(out, axis=1)

    def head(self, hidden: mx.array) -> mx.array:
        return _head(self._model, hidden)


class TheirParts:
    """The same of a model of mlx-lm."""

    def __init__(self, model: Any):
        self._model, self._text = model, getattr(model, "language_model", model)
        self.count = len(self._text.model.layers)

    def embed(self, ids: mx.array) -> mx.array:
        return self._text.model.embed_tokens(ids)

    def layer(self, index: int, parts: Sequence[mx.array]) -> mx.array:
        """See :meth:`OurParts.layer`."""
        from mlx_lm.models.base import create_attention_mask
        from mlx_lm.models.cache import make_prompt_cache

        layer, out = self._text.model.layers[index], []
        cache = make_prompt_cache(self._model)[index]
        for part in parts:
            mask = None
            if not getattr(layer, "is_linear", False):
                mask = create_attention_mask(part, cache, return_array=True)
            out.append(_evaluated(layer(part, mask, cache=cache)))
        return mx.concatenate(out, axis=1)

    def head(self, hidden: mx.array) -> mx.array:
        return _head(self._text, hidden)


def compare_layers(
    what: str,
    ours: OurParts,
    theirs: OurParts | TheirParts,
    ids: np.ndarray,
    *,
    decode: int,
    dtype: str,
) -> str:
    """Run `ids` ``[B, T]`` through our layers, the last `decode` one by one, and each layer's
    input through theirs too; a line that says how far apart they are.

    Raises:
        ExactnessError: A layer, the embedding or the head differs by more than rounding.
    """
    tokens = mx.array(ids)
    h = _evaluated(ours.embed(tokens))
    apart = {"the embedding": _apart(decode, theirs.embed(tokens), h, h)}
    for index in range(ours.count):
        parts = list(mx.split(h, list(range(h.shape[1] - decode, h.shape[1])), axis=1))
        found, other = ours.layer(index, parts), theirs.layer(index, parts)
        scale = mx.abs(found - h), OF_INPUT * mx.abs(h)
        apart[f"layer {index}"] = _apart(decode, found, other, *scale)
        h = found
    last = h[:, -decode:]
    logits = ours.head(last)
    apart["the head"] = _apart(decode, theirs.head(last), logits, logits)
    worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else np.inf)
    what = f"{what}, layer by layer in {dtype}: {worst} differs most, by {apart[worst]:.1e}"
    if not apart[worst] <= limit(dtype):
        raise ExactnessError(
            f"{what} (most positions), more than {limit(dtype):g}; no speed is printed for "
            "wrong results."
        )
    return f"exact: {what} (most positions), tolerance {limit(dtype):g}"


def _apart(decode: int, found: mx.array, other: mx.array, *scale: mx.array) -> float:
    """The difference by the size of `scale`: the median over the prompt's positions, or the lower
    quartile over the few that were decoded, whichever is larger; NaN if anything is not finite."""
    size = sum(_size(part) for part in scale)
    difference = _size(found.astype(mx.float32) - other.astype(mx.float32))
    if not np.isfinite(difference + size).all():
        return float("nan")
    relative = difference / size
    prompt, decoded = relative[:, :-decode], relative[:, -decode:]
    typical = float(np.median(prompt)) if prompt.size else 0.0
    return max(typical, float(np.quantile(decoded, 0.25)))


def _size(array: mx.array) -> np.ndarray:
    """``[B, T, ...]`` -> root mean squares ``[B, T]``."""
    values = np.array(array.astype(mx.float32)).astype(np.float64)
    return np.sqrt((values**2).mean(-1))


def _head(model: Any, hidden: mx.array) -> mx.array:
    """``[B, n, C]`` -> logits, position by position as decoding has them: MLX on NVIDIA compiles
    a product of this matrix with more rows for half a minute."""
    head = model.lm_head if "lm_head" in model else model.model.embed_tokens.as_linear
    hidden = model.model.norm(hidden)
    return mx.concatenate([head(one) for one in mx.split(hidden, hidden.shape[1], axis=1)], axis=1)


def _evaluated(array: mx.array) -> mx.array:
    mx.eval(array)
    return array
