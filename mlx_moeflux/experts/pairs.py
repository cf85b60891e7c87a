"""The routed experts of a call whose ids the host knows: some pairs at a time, as experts come.

What computes them is in :mod:`mlx_moeflux.experts.compute`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.compute import ExpertMix, Form, block_bytes, indices, needs_cast
from mlx_moeflux.kernels import metal
from mlx_moeflux.kernels.expert_ffn import ExpertBank, accumulate_experts
from mlx_moeflux.kernels.expert_mix import ABSENT, expert_inner, expert_mix_pairs, expert_outer


@dataclass(frozen=True)
class Pairs:
    """The (token, expert) pairs of a call without padding, token by token, ids ascending.

    token, rank, expert: ``[P]``; rank is the column in ids and weights.
    """

    token: np.ndarray
    rank: np.ndarray
    expert: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, num_experts: int) -> Pairs:
        """ids ``[N, K]``; entries equal to `num_experts` are padding."""
        token, rank = np.nonzero(ids < num_experts)
        return cls(token, rank, ids[token, rank])

    def __len__(self) -> int:
        return len(self.token)

    def between(self, first: int, last: int) -> Pairs:
        """The pairs whose expert is in [first, last]."""
        return self.where((self.expert >= first) & (self.expert <= last))

    def where(self, keep: np.ndarray | slice) -> Pairs:
        """The pairs that a mask or a slice keeps."""
        return Pairs(self.token[keep], self.rank[keep], self.expert[keep])

    def grid(self, shape: tuple[int, int], slot_of: np.ndarray) -> np.ndarray:
        """Their slots by token and rank, ``[N, K]`` uint32; ABSENT where there is no pair."""
        slots = np.full(shape, ABSENT, np.uint32)
        slots[self.token, self.rank] = slot_of[self.expert]
        return slots


def few_pairs(
    x: mx.array,
    weights: mx.array,
    pairs: Pairs,
    slot_of: np.ndarray,
    bank: ExpertBank,
    form: Form,
    *,
    early: Early | None = None,
) -> mx.array:
    """x ``[N, C]``, weights ``[N, K]`` -> ``[N, C]`` float32 in one lazy piece, without padding.

    early: What :func:`begin_few` began.
    """
    N, K = weights.shape
    mix = form.mixer(x, weights, bank)
    if mix is not None:
        slots = mx.array(pairs.grid(weights.shape, slot_of))
        if early is None:
            return form.mixed(mix, x, slots, weights, bank)
        rest = pairs.where(~early.known)
        h = expert_inner(x, mx.array(rest.grid(weights.shape, slot_of)), bank)
        h = mx.where(mx.array(early.known)[:, None], early.rows, h)
        return expert_outer(h, slots, weights, bank, dtype=x.dtype)
    if early is None:
        out = form.few_rows(x, pairs, slot_of, bank)
    else:
        rest = form.few_rows(x, pairs.where(~early.known), slot_of, bank)
        order = [np.flatnonzero(early.known), np.flatnonzero(~early.known)]
        out = mx.concatenate([early.rows, rest])[indices(np.argsort(np.concatenate(order)))]
    return accumulate_experts(out.reshape(N, K, -1), weights)


class Early(NamedTuple):
    """Work on some of a call's pairs, begun before the others' experts are there.

    known: A mask over the pairs. rows: Their outputs in order, or with :func:`expert_mix_pairs`
    the inner values of all pairs, of which only theirs mean anything.
    """

    known: np.ndarray
    rows: mx.array


def begin_few(
    x: mx.array,
    weights: mx.array,
    pairs: Pairs,
    known: np.ndarray,
    slot_of: np.ndarray,
    bank: ExpertBank,
    form: Form,
) -> Early | None:
    """Begin :func:`few_pairs` with the pairs that are `known`; None if the form cannot."""
    mix = form.mixer(x, weights, bank)
    if mix is None:
        return Early(known, form.few_rows(x, pairs.where(known), slot_of, bank))
    if mix is not expert_mix_pairs:
        return None
    slots = mx.array(pairs.where(known).grid(weights.shape, slot_of))
    return Early(known, expert_inner(x, slots, bank))


class ExpertSum:
    """Sums a call's experts into ``total [N, C]`` float32, some ascending ids at a time.

    :meth:`add` must be given the pairs of lower experts before those of higher ones. A form of
    the mix that `adds` to an array of the host is left to do so.

    Evaluates: all of its work but the last step of the last :meth:`add`.
    """

    def __init__(self, x: mx.array, weights: mx.array, form: Form):
        N, C = x.shape
        self.x, self.form = x, form
        self._total = mx.full((N, C), -0.0, mx.float32)
        self._on_host: np.ndarray | None = None
        self.weights = weights
        self._weights = mx.concatenate([weights.reshape(-1), mx.zeros((1,), mx.float32)])
        self._K = weights.shape[1]
        self._started = False

    def add(self, pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank) -> None:
        """Add the outputs of `pairs`, whose experts are in `bank` at ``slot_of[expert]``."""
        mix = self.form.mixer(self.x, self.weights, bank)
        if hasattr(mix, "adds"):
            self._add_on_host(mix, pairs, slot_of, bank)
            return
        if mix is not None:
            self._mix(mix, pairs, slot_of, bank)
            return
        if not needs_cast(bank):
            self._add_chunks(pairs, slot_of, bank, cast=False)
            return
        experts = np.unique(pairs.expert)
        group = max(1, self.form.take_bytes // block_bytes(bank))
        for i in range(0, len(experts), group):
            chosen = experts[i : i + group]
            part = pairs.between(chosen[0], chosen[-1])
            self._add_chunks(part, slot_of, bank, cast=True)

    @property
    def total(self) -> mx.array:
        """The sum so far."""
        return self._total if self._on_host is None else mx.array(self._on_host)

    def evaluate(self) -> None:
        """Wait until nothing reads a bank any more."""
        if self._on_host is None:
            metal.settle()
            mx.eval(self._total)

    def _add_on_host(
        self, mix: ExpertMix, pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank
    ) -> None:
        if self._on_host is None:
            self._on_host = np.full(self.x.shape, -0.0, np.float32)
        pairs = pairs.where(np.argsort(pairs.expert, kind="stable"))
        mix.adds(
            self._on_host,
            self.x,
            self.weights,
            token=pairs.token,
            rank=pairs.rank,
            slot=slot_of[pairs.expert],
            bank=bank,
            at_once=self.form.pairs_at_once(bank),
        )

    def _mix(self, mix: ExpertMix, pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank) -> None:
        # Tokens without a pair come along: where a slot is ABSENT nothing is read or added, and
        # MLX compiles the kernels that pick rows for each process anew, 1 s each on an H100.
        slots = mx.array(pairs.grid(self.weights.shape, slot_of))
        N, chunk = len(slots), self.form.rows_at_once(mix, self.weights, bank, self.x.dtype)
        if chunk >= N:
            self._next_step()
            self._total = mix(self.x, slots, self.weights, bank, initial=self._total)
            return
        for start in range(0, N, chunk):
            self._next_step()
            some = slice(start, start + chunk)
            self._total[some] = mix(
                self.x[some], slots[some], self.weights[some], bank, initial=self._total[some]
            )

    def _next_step(self) -> None:
        """Evaluate the steps before: only one step's scratch is allocated at a time."""
        if self._started:
            self.evaluate()
        self._started = True

    def _add_chunks(self, pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank, cast: bool) -> None:
        if not len(pairs):
            return
        firsts, counts = np.unique(pairs.token, return_index=True, return_counts=True)[1:]
        # A chunk is whole tokens; each costs its pairs and a row of the padded grid.
        cost = np.cumsum(counts + counts.max())
        chunk_of = cost // max(1, self.form.pairs_at_once(bank))
        starts = np.append(firsts[np.flatnonzero(np.diff(chunk_of, prepend=-1))], len(pairs))
        for start, stop in pairwise(starts):
            self._next_step()
            self._add_chunk(pairs.where(slice(start, stop)), slot_of, bank, cast)

    def _add_chunk(self, pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank, cast: bool) -> None:
        slots = slot_of[pairs.expert]
        if cast:
            chosen, slots = np.unique(slots, return_inverse=True)
            bank = bank.take(indices(chosen), mx.float32)
        order = np.argsort(slots, kind="stable")
        rows = self.x[indices(pairs.token[order])]
        out = self.form.rows(rows, indices(slots[order]), bank, ascending=True)  # [P, C]
        grid, weights = self._grid(pairs, order)
        out = mx.concatenate([out, mx.full((1, out.shape[1]), -0.0, out.dtype)])
        out, weights = out[indices(grid)], self._weights[indices(weights)]  # [n, R, C], [n, R]
        if len(grid) == self._total.shape[0]:
            self._total = accumulate_experts(out, weights, self._total)
            return
        tokens = indices(np.unique(pairs.token))
        self._total[tokens] = accumulate_experts(out, weights, self._total[tokens])

    def _grid(self, pairs: Pairs, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each token with pairs, where its outputs are in the sorted rows, and its weights:
        two index arrays ``[n, R]``, filled up with the entry that contributes -0.0."""
        P = len(pairs)
        _, first, row, counts = np.unique(
            pairs.token, return_index=True, return_inverse=True, return_counts=True
        )
        column = np.arange(P) - first[row]
        grid = np.full((len(first), counts.max()), P)
        weights = np.full(grid.shape, self._weights.shape[0] - 1)
        position = np.empty(P, np.int64)
        position[order] = np.arange(P)
        grid[row, column] = position
        weights[row, column] = pairs.token * self._K + pairs.rank
        return grid, weights
