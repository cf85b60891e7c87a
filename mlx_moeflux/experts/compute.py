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
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_moeflux.kernels.blas import KEPT_BYTES
from mlx_moeflux.kernels.expert_ffn import ExpertBank, accumulate_experts, expert_ffn
from mlx_moeflux.kernels.expert_mix import expert_mix

if TYPE_CHECKING:
    from mlx_moeflux.experts.pairs import Pairs

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
            bank = bank.take(indices(chosen), mx.float32)
        return self.rows(x[indices(pairs.token)], indices(slots), bank, ascending=False)

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
    padded: bool = True,
) -> mx.array:
    """Experts of a layer that are all in `bank`: lazy, differentiable, nothing leaves the device.

    x ``[N, C]``, ids ``[N, K]``, weights ``[N, K]`` float32 -> ``[N, C]`` float32. table:
    ``[E + 1]`` uint32, expert -> slot, and in entry E, for padding, ABSENT; None: expert e is in
    slot e. padded: Ids may be padding.
    """
    N, K = ids.shape
    slots = ids if table is None else table[ids]
    mix = form.mixer(x, weights, bank)
    if mix is not None:
        return form.mixed(mix, x, slots, weights, bank)
    chunk = max(1, form.pairs_at_once(bank) // K)
    if padded:
        real = slots < bank.slots  # [N, K]
        # Padding is computed with the last slot and thrown away.
        slots = mx.minimum(slots, mx.array(bank.slots - 1, mx.uint32))
        weights = mx.where(real, weights, 0.0)
    totals = []
    for start in range(0, N, chunk):
        part = slice(start, start + chunk)
        out = _chunk_of_whole_bank(x[part], slots[part], bank, form)  # [n, K, C]
        if padded:
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


def indices(values: np.ndarray) -> mx.array:
    """As MLX looks rows up."""
    return mx.array(values.astype(np.uint32))
