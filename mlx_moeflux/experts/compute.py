"""The numbers of the routed experts, shared by every store.

What a token gets depends on its own row, its experts' bytes and the order of their ids, never on
slots, hits, or how the work was cut. The reference of ``expert_mix`` is computed pair by pair with
:func:`~mlx_moeflux.kernels.moe.expert_ffn.expert_ffn`, whose rows do not see each other, and sums
over ascending ids in one routine; any other implementation of it gets whole tokens, and weights and
adds as well. -0.0 is what absent terms contribute, because adding it changes no bit.

:func:`from_whole_bank` computes experts that are all in the bank in one piece, from slots that may
be on the device. Of a long call whose ids the host knows, :class:`ExpertSum` adds some
:class:`Pairs` at a time, as experts come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import rows
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, accumulate_experts, expert_ffn
from mlx_moeflux.kernels.moe.expert_mix import ABSENT, expert_mix
from mlx_moeflux.kernels.moe.expert_pairs import columns_count
from mlx_moeflux.kernels.operation import Implementation
from mlx_moeflux.kernels.runtime import device

# Up to this many (token, expert) pairs are computed as they come; more are grouped by slot.
FEW_PAIRS = 64
# Bounds what one step of a long call allocates besides its result. A GPU wants more rows an
# expert than a CPU, which gains nothing from them.
SCRATCH_BYTES = {"cpu": 64 << 20, "gpu": 256 << 20}
# Bounds the copy of chosen experts that the CPU computes with.
TAKE_BYTES = 64 << 20


class ExpertMix(Protocol):
    """The operation that computes experts, as a store calls it."""

    def __call__(
        self,
        x: mx.array,
        slots: mx.array,
        weights: mx.array,
        bank: ExpertBank,
        *,
        initial: mx.array | None = None,
    ) -> mx.array:
        """See :func:`~mlx_moeflux.kernels.moe.expert_mix.expert_mix`."""
        ...

    def implementation(
        self, x: mx.array, slots: Any, weights: mx.array, bank: ExpertBank
    ) -> Implementation:
        """Return what computes all parts of a call that is made in parts."""
        ...


REFERENCE_MIX: ExpertMix = Implementation(expert_mix)


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


def check_ids(layer: int, ids: np.ndarray, num_experts: int, source: str = "") -> None:
    """Raise :class:`ShapeError` unless each row of ids ``[N, K]``, read from the device, has
    ascending, distinct experts, perhaps followed by `num_experts`, which stands for none. source:
    The name of what chose them, for the message."""
    if len(ids) == 1:
        # No generator: each of its steps is a call of Python, for every layer of a token.
        row = ids[0].tolist()
        absent = row.count(num_experts)
        distinct = len({*row}) == len(row) - max(absent - 1, 0)
        right = distinct and row == sorted(row) and row[-1] <= num_experts
        wrong = [] if right else [0]
    else:
        after, before = ids[:, 1:], ids[:, :-1]
        right = (before < after) | ((before == after) & (after == num_experts))
        wrong = np.flatnonzero(~right.all(axis=1) | (ids > num_experts).any(axis=1))
    if len(wrong):
        chosen_by = f" of {source}" if source else ""
        raise ShapeError(
            f"layer {layer}: the ids{chosen_by} are {ids[wrong[0]].tolist()} in row {wrong[0]}; "
            f"each row must be ascending and distinct, below {num_experts}, and may end in ids "
            f"{num_experts}, which stand for no expert."
        )


@dataclass(frozen=True)
class ExpertCompute:
    """Options of computing experts.

    mix: The operation. scratch_bytes: None: chosen by the device.
    """

    mix: ExpertMix = REFERENCE_MIX
    scratch_bytes: int | None = None
    take_bytes: int = TAKE_BYTES

    def mixer(self, x: mx.array, weights: mx.array, bank: ExpertBank) -> Implementation | None:
        """Return what computes a whole call, for all of its parts; None: the reference."""
        # Where experts are is not known yet, and must not matter.
        mix = self.mix.implementation(x, None, weights, bank)
        return None if mix.function is expert_mix else mix

    def mixed(
        self,
        mix: Implementation,
        x: mx.array,
        slots: mx.array,
        weights: mx.array,
        bank: ExpertBank,
        initial: mx.array | None = None,
    ) -> mx.array:
        """x ``[n, C]``, slots and weights ``[n, K]`` -> ``[n, C]`` float32 through `mix`, as many
        rows at a time as the scratch holds."""
        n = x.shape[0]
        chunk = 1 if n == 1 else self.rows_at_once(mix, weights, bank, x.dtype)
        if n <= chunk:
            return mix.function(x, slots, weights, bank, initial=initial)
        chunk = -(-n // -(-n // chunk))  # of one size: small remainders use a GPU badly
        totals = []
        for start in range(0, n, chunk):
            part = slice(start, start + chunk)
            before = None if initial is None else initial[part]
            totals.append(mix.function(x[part], slots[part], weights[part], bank, initial=before))
        return mx.concatenate(totals)

    def rows_at_once(
        self, mix: Implementation, weights: mx.array, bank: ExpertBank, dtype: mx.Dtype
    ) -> int:
        """Return the tokens that :meth:`mixed` computes in one step."""
        pair = None if mix.pair_bytes is None else mix.pair_bytes(bank, dtype)
        return max(1, self.pairs_at_once(bank, pair) // weights.shape[1])

    def rows(
        self, x: mx.array, slots: mx.array, bank: ExpertBank, mix: Implementation | None = None
    ) -> mx.array:
        """x ``[P, C]``, slots ``[P]`` -> ``[P, C]``; float32 on the CPU, which is fastest there,
        and where `x` and the bank have other floats. mix: Computes many rows, in float32."""
        if mix is not None:
            ones = mx.ones((x.shape[0], 1))
            if mix.takes_call(x, None, ones, bank):
                return mix.function(x, slots[:, None], ones, bank)
        if device.kind() == "cpu" or needs_cast(bank, x.dtype):
            x = x.astype(mx.float32)
        return expert_ffn(x, slots, bank)

    def takes_few(self, pairs: int, tokens: int, bank: ExpertBank) -> bool:
        """Return True if so few pairs are computed in their order, in one piece."""
        small = tokens == 1 or pairs * block_bytes(bank) <= self.take_bytes
        return pairs <= FEW_PAIRS and (
            small or device.kind() != "cpu" or not needs_cast(bank, mx.float32)
        )

    def pairs_at_once(self, bank: ExpertBank, pair_bytes: int | None = None) -> int:
        """Pairs whose inputs, inner values and outputs fit in the scratch."""
        F, C = bank.gate.weight.shape[1], bank.down.weight.shape[1]
        scratch = self.scratch_bytes or SCRATCH_BYTES["cpu" if device.kind() == "cpu" else "gpu"]
        return max(1, scratch // (pair_bytes or 4 * (3 * C + 3 * F)))


def compute_scratch_bytes() -> int:
    """Return the bytes that computing experts may allocate besides results; on the CPU cached dense
    matrices count as well."""
    if device.kind() != "cpu":
        return SCRATCH_BYTES["gpu"]
    return SCRATCH_BYTES["cpu"] + TAKE_BYTES + device.kept_bytes()


def block_bytes(bank: ExpertBank) -> int:
    """Bytes of one slot."""
    arrays = (array for part in (bank.gate, bank.up, bank.down) for array in part.arrays())
    return sum(array.nbytes for array in arrays) // bank.slots


def needs_cast(bank: ExpertBank, dtype: mx.Dtype) -> bool:
    """Return True if stock operations would cast every slot of `bank` on each call with x of
    `dtype`: its floats are not of the dtype that they compute in. Scales in bytes are never
    cast."""
    computed = mx.float32 if device.kind() == "cpu" else dtype
    return not bank.float_dtypes <= {computed}


def from_whole_bank(
    x: mx.array,
    ids: mx.array,
    weights: mx.array,
    bank: ExpertBank,
    compute: ExpertCompute,
    *,
    table: mx.array | None = None,
    padded: bool = True,
) -> mx.array:
    """Experts of a layer that are all in `bank`: lazy, differentiable; nothing leaves the device
    but the slots of many pairs in blocks (:mod:`~mlx_moeflux.kernels.linear.blocks`).

    x ``[N, C]``, ids ``[N, K]``, weights ``[N, K]`` float32 -> ``[N, C]`` float32. table:
    ``[E + 1]`` uint32, expert -> slot, and in entry E, for padding, ABSENT; None: expert e is in
    slot e. padded: Ids may be padding.
    """
    N, K = ids.shape
    slots = ids if table is None else table[ids]
    mix = compute.mixer(x, weights, bank)
    if mix is not None:
        return compute.mixed(mix, x, slots, weights, bank)
    if rows.calls.count > 1 and device.kind() != "cpu":
        # Stock MLX promises a row no bits there beside others.
        args, names = (x, ids, weights), ("x", "ids", "weights")
        alone = partial(from_whole_bank, bank=bank, compute=compute, table=table, padded=padded)
        return rows.one_by_one(alone, N, args, {}, names, names)
    chunk = max(1, compute.pairs_at_once(bank) // K)
    if padded:
        real = slots < bank.slots  # [N, K]
        # Padding is computed with the last slot and thrown away.
        slots = mx.minimum(slots, mx.array(bank.slots - 1, mx.uint32))
        weights = mx.where(real, weights, 0.0)
    totals = []
    for start in range(0, N, chunk):
        part = slice(start, start + chunk)
        out = _chunk_of_whole_bank(x[part], slots[part], bank, compute)  # [n, K, C]
        if padded:
            out = mx.where(real[part, :, None], out, mx.array(-0.0, out.dtype))
        totals.append(accumulate_experts(out, weights[part]))
    return totals[0] if len(totals) == 1 else mx.concatenate(totals)


def by_pair(
    x: mx.array,
    ids: mx.array,
    weights: mx.array,
    bank: ExpertBank,
    compute: ExpertCompute,
    *,
    absent: int,
) -> tuple[mx.array, mx.array, mx.array, ExpertBank, ExpertCompute]:
    """Turn a call of N tokens and K experts into one of N K tokens, one for each pair. That call
    returns the weighted output of each pair, and -0.0 for padding. The implementation of the whole
    call computes it. absent: An id of padding."""
    N, K = ids.shape
    compute = replace(compute, mix=compute.mix.implementation(x, None, weights, bank))
    x, ids, weights = mx.repeat(x, K, axis=0), ids.reshape(-1, 1), weights.reshape(-1, 1)
    if columns_count(bank):
        padding = N * K, K - 1
        ids = mx.concatenate([ids, mx.full(padding, absent, mx.uint32)], axis=1)
        weights = mx.concatenate([weights, mx.zeros(padding)], axis=1)
    return x, ids, weights, bank, compute


def _chunk_of_whole_bank(
    x: mx.array, slots: mx.array, bank: ExpertBank, compute: ExpertCompute
) -> mx.array:
    n, K = slots.shape
    flat = slots.reshape(-1)
    if not compute.takes_few(n * K, n, bank):
        order = mx.argsort(flat)
        out = compute.rows(x[order // K], flat[order], bank)
        out = out[mx.argsort(order)]
    elif needs_cast(bank, x.dtype) and (n == 1 or 4 * n * K <= bank.slots):
        small = bank.take(flat, mx.float32)
        own = mx.arange(n * K, dtype=mx.uint32)
        out = compute.rows(mx.repeat(x, K, axis=0), own, small)
    else:
        out = compute.rows(mx.repeat(x, K, axis=0), flat, bank)
    return out.reshape(n, K, -1)


def indices(values: np.ndarray) -> mx.array:
    """Return indices as MLX looks rows up by them."""
    return mx.array(values.astype(np.uint32))


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

    def grid(self, shape: tuple[int, ...], slot_of: np.ndarray) -> np.ndarray:
        """Their slots by token and rank, ``[N, K]`` uint32; ABSENT where there is no pair."""
        slots = np.full(shape, ABSENT, np.uint32)
        slots[self.token, self.rank] = slot_of[self.expert]
        return slots


class ExpertSum:
    """Sums a call's experts into ``total [N, C]`` float32, some ascending ids at a time.

    :meth:`add` must be given the pairs of lower experts before those of higher ones. An
    implementation of the mix that `adds` to an array of the host is left to do so.

    Evaluates: all of its work but the last step of the last :meth:`add`.
    """

    def __init__(self, x: mx.array, weights: mx.array, compute: ExpertCompute):
        N, C = x.shape
        self.x, self.compute = x, compute
        self._total = mx.full((N, C), -0.0, mx.float32)
        self._on_host: np.ndarray | None = None
        self.weights = weights
        self._weights = mx.concatenate([weights.reshape(-1), mx.zeros((1,), mx.float32)])
        self._K = weights.shape[1]
        self._started = False

    def add(self, pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank) -> None:
        """Add the outputs of `pairs`, whose experts are in `bank` at ``slot_of[expert]``."""
        mix = self.compute.mixer(self.x, self.weights, bank)
        if mix is not None and mix.adds is not None:
            self._add_on_host(mix.adds, pairs, slot_of, bank)
            return
        if mix is not None and not mix.mixes_rows:
            self._mix(mix, pairs, slot_of, bank)
            return
        if mix is not None or not needs_cast(bank, self.x.dtype):
            # Where rows are mixed, absent pairs would be computed too.
            self._add_chunks(pairs, slot_of, bank, mix=mix)
            return
        experts = np.unique(pairs.expert)
        group = max(1, self.compute.take_bytes // block_bytes(bank))
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
            device.settle()
            mx.eval(self._total)

    def _add_on_host(
        self, adds: Callable[..., None], pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank
    ) -> None:
        if self._on_host is None:
            self._on_host = np.full(self.x.shape, -0.0, np.float32)
        pairs = pairs.where(np.argsort(pairs.expert, kind="stable"))
        adds(
            self._on_host,
            self.x,
            self.weights,
            token=pairs.token,
            rank=pairs.rank,
            slot=slot_of[pairs.expert],
            bank=bank,
            at_once=self.compute.pairs_at_once(bank),
        )

    def _mix(
        self, mix: Implementation, pairs: Pairs, slot_of: np.ndarray, bank: ExpertBank
    ) -> None:
        # Tokens without a pair stay in: an ABSENT slot reads and adds nothing, and MLX compiles the
        # kernels that select rows anew in each process.
        slots = mx.array(pairs.grid(self.weights.shape, slot_of))
        N, chunk = len(slots), self.compute.rows_at_once(mix, self.weights, bank, self.x.dtype)
        if chunk >= N:
            self._next_step()
            self._total = mix.function(self.x, slots, self.weights, bank, initial=self._total)
            return
        for start in range(0, N, chunk):
            self._next_step()
            some = slice(start, start + chunk)
            self._total[some] = mix.function(
                self.x[some], slots[some], self.weights[some], bank, initial=self._total[some]
            )

    def _next_step(self) -> None:
        """Evaluate the steps before: only one step's scratch is allocated at a time."""
        if self._started:
            self.evaluate()
        self._started = True

    def _add_chunks(
        self,
        pairs: Pairs,
        slot_of: np.ndarray,
        bank: ExpertBank,
        *,
        cast: bool = False,
        mix: Implementation | None = None,
    ) -> None:
        if not len(pairs):
            return
        firsts, counts = np.unique(pairs.token, return_index=True, return_counts=True)[1:]
        # A chunk is whole tokens; each costs its pairs and a row of the padded grid.
        cost = np.cumsum(counts + counts.max())
        chunk_of = cost // max(1, self.compute.pairs_at_once(bank))
        starts = np.append(firsts[np.flatnonzero(np.diff(chunk_of, prepend=-1))], len(pairs))
        for start, stop in pairwise(starts):
            self._next_step()
            self._add_chunk(pairs.where(slice(start, stop)), slot_of, bank, cast, mix)

    def _add_chunk(
        self,
        pairs: Pairs,
        slot_of: np.ndarray,
        bank: ExpertBank,
        cast: bool,
        mix: Implementation | None,
    ) -> None:
        slots = slot_of[pairs.expert]
        if cast:
            chosen, slots = np.unique(slots, return_inverse=True)
            bank = bank.take(indices(chosen), mx.float32)
        order = np.argsort(slots, kind="stable")
        rows = self.x[indices(pairs.token[order])]
        out = self.compute.rows(rows, indices(slots[order]), bank, mix)  # [P, C]
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
