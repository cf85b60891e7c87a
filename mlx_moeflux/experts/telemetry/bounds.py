"""Bounds for eviction policies: the best possible one, and traces without order. No MLX."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import replace

import numpy as np

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.telemetry.trace import Call, Trace, requests_of

# Of pairs of experts, over all layers: 2 GiB of counts.
MOST_COUNTS = 1 << 28
# Times an expert's number it is still a whole number that a float holds.
NEVER = 1 << 40


class Belady:
    """Evicts the expert whose next use is farthest away. Knows the future, so it can only be
    replayed, on the trace that it was made from and from its beginning.

    No policy hits more often as long as every call's experts fit; in a sweep the order of the
    turns is the engine's, and this is only the best choice of whom to keep for later calls.
    """

    name = "belady"

    def __init__(self, trace: Trace):
        self._experts = trace.info.num_experts
        self._uses, self._first = _next_uses(trace)
        self.reset()

    def touch(
        self, layer: int, experts: Sequence[int], last: Sequence[int], uses: Sequence[int]
    ) -> None:
        """See :class:`~mlx_moeflux.experts.policies.eviction.Eviction`, also for the rest."""
        self._next[layer].update(self._uses[layer][self._at[layer]])
        self._at[layer] += 1

    def choose(
        self, layer: int, count: int, *, resident: Collection[int], protected: Container[int]
    ) -> list[int]:
        following, E = self._next[layer], self._experts
        able = sorted([following[e] for e in resident if e not in protected], reverse=True)
        return [E - 1 - int(use % E) for use in able[:count]]

    def evict(self, layer: int, expert: int) -> None:
        pass

    def admit(self, layer: int, expert: int) -> None:
        pass

    def reset(self) -> None:
        self._at = dict.fromkeys(self._uses, 0)
        self._next = {layer: dict(uses) for layer, uses in self._first.items()}


def _next_uses(
    trace: Trace,
) -> tuple[dict[int, list[dict[int, float]]], dict[int, dict[int, float]]]:
    """Return for each layer: for each call, the times of the next use of its experts; and the time
    of each expert's first use. Cached for each trace.

    A time is a float that holds a whole number, ``call * E + (E - 1 - expert)``: floats sort
    fastest, and of two experts that are never used again the lower one comes first.
    """
    known = trace.__dict__.get("_next_uses")
    if known is not None and known[0] == len(trace.calls):
        return known[1:]
    E = trace.info.num_experts
    never = {e: float(NEVER * E + E - 1 - e) for e in range(E)}
    calls: dict[int, list[list[int]]] = {layer: [] for layer in trace.info.layers}
    for call, request in zip(trace.calls, requests_of(trace), strict=True):
        calls[call.layer].append(request.needed)
    uses: dict[int, list[dict[int, float]]] = {}
    first: dict[int, dict[int, float]] = {}
    for layer, needed in calls.items():
        following, backwards = dict(never), []
        for i in reversed(range(len(needed))):
            backwards.append({e: following[e] for e in needed[i]})
            now = float(i * E + E - 1)
            for e in needed[i]:
                following[e] = now - e
        uses[layer], first[layer] = backwards[::-1], following
    trace.__dict__["_next_uses"] = len(trace.calls), uses, first
    return uses, first


def compulsory(trace: Trace) -> int:
    """Misses that no bank can avoid: different experts of all layers."""
    return int(sum((counts > 0).sum() for counts in popularity(trace).values()))


def popularity(trace: Trace) -> dict[int, np.ndarray]:
    """MoE layer id -> how often each expert was chosen, ``[E]``."""
    E = trace.info.num_experts
    counts = {layer: np.zeros(E + 1, np.int64) for layer in trace.info.layers}
    for call in trace:
        counts[call.layer] += np.bincount(call.ids.reshape(-1), minlength=E + 1)
    return {layer: each[:E] for layer, each in counts.items()}


def coactivation(trace: Trace) -> dict[int, np.ndarray]:
    """MoE layer id -> how many tokens chose both experts of each pair, ``[E, E]`` int64; on the
    diagonal, how many chose the expert.

    Raises:
        InputError: All layers together have more than MOST_COUNTS pairs.
    """
    E = trace.info.num_experts
    if (pairs := E * E * len(trace.info.layers)) > MOST_COUNTS:
        raise InputError(
            f"the trace has {pairs} pairs of experts, {E} x {E} in each of "
            f"{len(trace.info.layers)} layers; they are counted up to {MOST_COUNTS}."
        )
    counts = {layer: np.zeros((E + 1) ** 2, np.int64) for layer in trace.info.layers}
    for call in trace:
        ids = call.ids.astype(np.int64)
        pairs, number = np.unique(ids[:, :, None] * (E + 1) + ids[:, None, :], return_counts=True)
        counts[call.layer][pairs] += number
    return {layer: each.reshape(E + 1, E + 1)[:E, :E] for layer, each in counts.items()}


def reuse_distances(trace: Trace) -> np.ndarray:
    """Return for every use of an expert the number of other experts that its layer used since its
    last use; -1 for the first use. In an LRU bank a hit needs one slot more than that."""
    E = trace.info.num_experts
    stacks: dict[int, list[int]] = {layer: [] for layer in trace.info.layers}
    distances = []
    for call in trace:
        stack = stacks[call.layer]
        for expert in call.ids.reshape(-1).tolist():
            if expert == E:
                continue
            place = stack.index(expert) if expert in stack else -1
            distances.append(place)
            if place >= 0:
                del stack[place]
            stack.insert(0, expert)
    return np.array(distances, np.int64)


def shuffled(trace: Trace, seed: int = 0) -> Trace:
    """The same choices with the tokens of each layer in random order: no locality is left, the
    popularity of the experts is. Calls keep their sizes."""
    random = np.random.default_rng(seed)
    return _redrawn(trace, lambda layer, rows: random.permutation(rows))


def independent(trace: Trace, seed: int = 0, *, uniform: bool = False) -> Trace:
    """Every token draws its experts anew, by the popularity that they have in `trace`, or all
    alike: what a model without memory would do."""
    random = np.random.default_rng(seed)
    counts = popularity(trace)

    def draw(layer: int, rows: np.ndarray) -> np.ndarray:
        odds = np.ones_like(counts[layer]) if uniform else counts[layer]
        with np.errstate(divide="ignore"):
            logits = np.log(odds)
        # The largest of log-odds plus Gumbel noise are drawn without replacement.
        noisy = logits + random.gumbel(size=(len(rows), len(odds)))
        chosen = np.argpartition(-noisy, rows.shape[1] - 1, axis=1)[:, : rows.shape[1]]
        return np.sort(chosen, axis=1).astype(rows.dtype)

    return _redrawn(trace, draw)


def _redrawn(trace: Trace, draw) -> Trace:
    """`trace` with the rows of each layer replaced by ``draw(layer, rows [tokens, K])``."""
    rows = {layer: [] for layer in trace.info.layers}
    for call in trace:
        rows[call.layer].append(call.ids)
    new = {layer: iter(draw(layer, np.concatenate(r))) for layer, r in rows.items() if r}
    calls = [
        Call(
            call.layer,
            call.token,
            np.stack([next(new[call.layer]) for _ in range(len(call.ids))]),
            call.weights,
        )
        for call in trace
    ]
    return replace(trace, calls=calls, info=replace(trace.info, cold=True))
