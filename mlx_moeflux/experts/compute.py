"""The numeric form of the routed experts, shared by every store.

What a token gets depends on its own row, its experts' bytes and the order of their ids, never on
slots, hits, or how the work was cut. There are two ways: pair by pair through an operation like
:func:`~mlx_moeflux.kernels.expert_ffn.expert_ffn`, whose rows do not see each other, with sums
over ascending ids in one routine; or token by token through an operation like
:func:`~mlx_moeflux.kernels.expert_mix.expert_mix`, which weights and adds as well. -0.0 is what
absent terms contribute, because adding it changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.kernels.blas import KEPT_BYTES
from mlx_moeflux.kernels.expert_ffn import ExpertBank, accumulate_experts, expert_ffn
from mlx_moeflux.kernels.expert_mix import (
    ABSENT,
    expert_inner,
    expert_mix,
    expert_mix_pairs,
    expert_outer,
)

# Up to this many (token, expert) pairs are computed as they come; more are grouped by slot.
FEW_PAIRS = 64
# Bounds what one step of a long call allocates besides its result. A GPU wants more rows an
# expert than a CPU, which gains nothing from them.
SCRATCH_BYTES = {"cpu": 64 << 20, "gpu": 256 << 20}
# Bounds the copy of chosen experts that the CPU computes with.
TAKE_BYTES = 64 << 20

ExpertFFN = Callable[..., mx.array]
ExpertMix = Callable[..., mx.array]


@dataclass(frozen=True)
class Form:
    """How experts are computed.

    ffn, mix: The operations. Where `mix` is the reference, pairs go through `ffn` as suits the
    device; another form of it gets whole tokens, and `ffn` is not asked. scratch_bytes: None is
    what suits the device.
    """

    ffn: ExpertFFN = expert_ffn
    mix: ExpertMix = expert_mix
    scratch_bytes: int | None = None
    take_bytes: int = TAKE_BYTES

    def mixer(self, x: mx.array, weights: mx.array, bank: ExpertBank) -> ExpertMix | None:
        """The form of `mix` for a whole call, which all of its parts take; None: the reference,
        also where a form of `ffn` was chosen and none of `mix`."""
        if getattr(self.mix, "choice", "") == "auto" != getattr(self.ffn, "choice", "auto"):
            return None
        choose = getattr(self.mix, "form", None)
        # Where experts are is not known yet, and must not matter.
        mix = self.mix if choose is None else choose(x, None, weights, bank)
        return None if mix is expert_mix else mix

    def mixed(
        self,
        mix: ExpertMix,
        x: mx.array,
        slots: mx.array,
        weights: mx.array,
        bank: ExpertBank,
        initial: mx.array | None = None,
    ) -> mx.array:
        """x ``[n, C]``, slots and weights ``[n, K]`` -> ``[n, C]`` float32 through `mix`, as many
        rows at a time as the scratch holds."""
        n = x.shape[0]
        chunk = self.rows_at_once(mix, weights, bank, x.dtype)
        if n <= chunk:
            return mix(x, slots, weights, bank, initial=initial)
        chunk = -(-n // -(-n // chunk))  # of one size: small remainders use a GPU badly
        totals = []
        for start in range(0, n, chunk):
            part = slice(start, start + chunk)
            before = None if initial is None else initial[part]
            totals.append(mix(x[part], slots[part], weights[part], bank, initial=before))
        return mx.concatenate(totals)

    def rows_at_once(
        self, mix: ExpertMix, weights: mx.array, bank: ExpertBank, dtype: mx.Dtype
    ) -> int:
        """Tokens that :meth:`mixed` computes in one step. A form that needs less than the
        reference says so in `pair_bytes(bank, dtype)`."""
        pair_bytes = getattr(mix, "pair_bytes", None)
        pair = None if pair_bytes is None else pair_bytes(bank, dtype)
        return max(1, self.pairs_at_once(bank, pair) // weights.shape[1])

    def rows(self, x: mx.array, slots: mx.array, bank: ExpertBank, *, ascending: bool) -> mx.array:
        """x ``[P, C]``, slots ``[P]`` -> ``[P, C]``; float32 on the CPU, which is fastest there."""
        if on_cpu():
            x = x.astype(mx.float32)
        return self.ffn(x, slots, bank, ascending=ascending)

    def few_rows(
        self, x: mx.array, pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank
    ) -> mx.array:
        """x ``[N, C]`` -> the experts' outputs ``[P, C]``, one row for each pair."""
        slots = slot_of[pairs.expert]
        if needs_cast(bank):
            chosen, slots = np.unique(slots, return_inverse=True)
            bank = bank.take(_indices(chosen), mx.float32)
        return self.rows(x[_indices(pairs.token)], _indices(slots), bank, ascending=False)

    def takes_few(self, pairs: int, tokens: int, bank: ExpertBank) -> bool:
        """Whether so few pairs are computed as they come, in one piece."""
        small = tokens == 1 or pairs * block_bytes(bank) <= self.take_bytes
        return pairs <= FEW_PAIRS and (small or not needs_cast(bank))

    def pairs_at_once(self, bank: ExpertBank, pair_bytes: int | None = None) -> int:
        """Pairs whose inputs, inner values and outputs fit in the scratch."""
        F, C = bank.gate.weight.shape[1], bank.down.weight.shape[1]
        scratch = self.scratch_bytes or SCRATCH_BYTES["cpu" if on_cpu() else "gpu"]
        return max(1, scratch // (pair_bytes or 4 * (3 * C + 3 * F)))


def compute_scratch_bytes() -> int:
    """What computing experts may allocate at once, besides results; on the CPU dense matrices that
    are kept count as well."""
    if not on_cpu():
        return SCRATCH_BYTES["gpu"]
    return SCRATCH_BYTES["cpu"] + TAKE_BYTES + KEPT_BYTES


def on_cpu() -> bool:
    """Whether operations run on the CPU by default."""
    return mx.default_device() == mx.cpu


def block_bytes(bank: ExpertBank) -> int:
    """Bytes of one slot."""
    parts = (bank.gate, bank.up, bank.down)
    arrays = [a for p in parts for a in (p.weight, p.scales, p.biases) if a is not None]
    return sum(array.nbytes for array in arrays) // bank.slots


def needs_cast(bank: ExpertBank) -> bool:
    """Whether the CPU would cast every slot of `bank` on each call: its floats are not float32."""
    parts = (p.weight if p.scales is None else p.scales for p in (bank.gate, bank.up, bank.down))
    return on_cpu() and any(part.dtype != mx.float32 for part in parts)


def from_whole_bank(
    x: mx.array,
    ids: mx.array,
    weights: mx.array,
    bank: ExpertBank,
    form: Form,
    *,
    table: mx.array | None = None,
) -> mx.array:
    """Experts of a layer that are all in `bank`: lazy, differentiable, nothing leaves the device.

    x ``[N, C]``, ids ``[N, K]``, weights ``[N, K]`` float32 -> ``[N, C]`` float32. table:
    ``[E + 1]`` uint32, expert -> slot, and in entry E, for padding, ABSENT; None: expert e is in
    slot e.
    """
    N, K = ids.shape
    slots = ids if table is None else table[ids]
    mix = form.mixer(x, weights, bank)
    if mix is not None:
        return form.mixed(mix, x, slots, weights, bank)
    chunk = max(1, form.pairs_at_once(bank) // K)
    real = slots < bank.slots  # [N, K]
    # Padding is computed with the last slot and thrown away.
    slots = mx.minimum(slots, mx.array(bank.slots - 1, mx.uint32))
    weights = mx.where(real, weights, 0.0)
    totals = []
    for start in range(0, N, chunk):
        part = slice(start, start + chunk)
        out = _chunk_of_whole_bank(x[part], slots[part], bank, form)  # [n, K, C]
        out = mx.where(real[part, :, None], out, mx.array(-0.0, out.dtype))
        totals.append(accumulate_experts(out, weights[part]))
    return totals[0] if len(totals) == 1 else mx.concatenate(totals)


def _chunk_of_whole_bank(x: mx.array, slots: mx.array, bank: ExpertBank, form: Form) -> mx.array:
    n, K = slots.shape
    flat = slots.reshape(-1)
    if not form.takes_few(n * K, n, bank):
        order = mx.argsort(flat)
        out = form.rows(x[order // K], flat[order], bank, ascending=True)
        out = out[mx.argsort(order)]
    elif needs_cast(bank) and 4 * n * K <= bank.slots:
        small = bank.take(flat, mx.float32)
        own = mx.arange(n * K, dtype=mx.uint32)
        out = form.rows(mx.repeat(x, K, axis=0), own, small, ascending=True)
    else:
        out = form.rows(mx.repeat(x, K, axis=0), flat, bank, ascending=False)
    return out.reshape(n, K, -1)


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
        out = mx.concatenate([early.rows, rest])[_indices(np.argsort(np.concatenate(order)))]
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

    :meth:`add` must be given the pairs of lower experts before those of higher ones.

    Evaluates: all of its work but the last step of the last :meth:`add`.
    """

    def __init__(self, x: mx.array, weights: mx.array, form: Form):
        N, C = x.shape
        self.x, self.form = x, form
        self.total = mx.full((N, C), -0.0, mx.float32)
        self.weights = weights
        self._weights = mx.concatenate([weights.reshape(-1), mx.zeros((1,), mx.float32)])
        self._K = weights.shape[1]
        self._started = False

    def add(self, pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank) -> None:
        """Add the outputs of `pairs`, whose experts are in `bank` at ``slot_of[expert]``."""
        mix = self.form.mixer(self.x, self.weights, bank)
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

    def _mix(self, mix: ExpertMix, pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank) -> None:
        N = self.x.shape[0]
        tokens = np.unique(pairs.token)
        slots = pairs.grid(self.weights.shape, slot_of)
        chunk = self.form.rows_at_once(mix, self.weights, bank, self.x.dtype)
        for start in range(0, len(tokens), chunk):
            self._next_step()
            some = tokens[start : start + chunk]
            rows = slice(None) if len(some) == N else _indices(some)
            self.total[rows] = mix(
                self.x[rows],
                mx.array(slots[some]),
                self.weights[rows],
                bank,
                initial=self.total[rows],
            )

    def _next_step(self) -> None:
        """Evaluate the steps before: only one step's scratch is allocated at a time."""
        if self._started:
            mx.eval(self.total)
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
            bank = bank.take(_indices(chosen), mx.float32)
        order = np.argsort(slots, kind="stable")
        rows = self.x[_indices(pairs.token[order])]
        out = self.form.rows(rows, _indices(slots[order]), bank, ascending=True)  # [P, C]
        grid, weights = self._grid(pairs, order)
        out = mx.concatenate([out, mx.full((1, out.shape[1]), -0.0, out.dtype)])
        out, weights = out[_indices(grid)], self._weights[_indices(weights)]  # [n, R, C], [n, R]
        if len(grid) == self.total.shape[0]:
            self.total = accumulate_experts(out, weights, self.total)
            return
        tokens = _indices(np.unique(pairs.token))
        self.total[tokens] = accumulate_experts(out, weights, self.total[tokens])

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


def _indices(values: np.ndarray) -> mx.array:
    return mx.array(values.astype(np.uint32))
