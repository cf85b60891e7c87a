"""The chosen experts, computed out of a bank by slot number.

    out[p] = down[s] (silu(gate[s] x[p]) * (up[s] x[p])),   s = slots[p]

One row per (token, expert) pair. A bank holds the experts of one layer in fixed slots; a slot
number says where, never which expert. A row's result depends on nothing but the row and the
slot's bytes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.linear.quantised import ExpertLayout, arrays_of, expert_layout, settings
from mlx_moeflux.kernels.runtime.metal import on_apple

# Names of the arrays of gate and up in kernels.
INNER_INPUTS = ("gate", "gate_scales", "gate_biases", "up", "up_scales", "up_biases")


@dataclass(frozen=True)
class ProjectionBank:
    """One projection of all slots.

    weight: ``[S, out, in * bits / 32]`` uint32, or ``[S, out, in]`` float when `spec` is None.
    scales, biases: ``[S, out, in / group_size]``; None when `spec` is None. Scales are uint8
    without biases when `spec` is not affine.
    """

    weight: mx.array
    scales: mx.array | None
    biases: mx.array | None
    spec: QuantSpec | None

    def take(self, slots: mx.array, dtype: mx.Dtype) -> ProjectionBank:
        """The rows of `slots` only; floats cast to `dtype`."""
        weight = self.weight[slots]
        if self.spec is None or self.scales is None:
            return ProjectionBank(weight.astype(dtype), None, None, None)
        scales, biases = self.scales[slots], None if self.biases is None else self.biases[slots]
        if biases is not None:
            scales, biases = scales.astype(dtype), biases.astype(dtype)
        return ProjectionBank(weight, scales, biases, self.spec)

    def matmul(self, x: mx.array, slots: mx.array, *, ascending: bool) -> mx.array:
        """x ``[P, in]``, slots ``[P]`` -> ``[P, out]``; `ascending`: slots are sorted."""
        # Not x[:, None]: MLX gives an axis that is inserted a stride of 1, and its sorted
        # gather_mm on CUDA takes that stride for the distance between rows (docs/kernels.md).
        x = x.reshape(-1, 1, x.shape[-1])
        if self.spec is None:
            out = mx.gather_mm(
                x, self.weight.swapaxes(-1, -2), rhs_indices=slots, sorted_indices=ascending
            )
        else:
            # Sorted gather_qmm was reported wrong on the M5 for such rows (mlx #3887).
            ascending = ascending and not (x.shape[-1] % 64 and on_apple())
            known = settings(self.spec) | {"rhs_indices": slots, "sorted_indices": ascending}
            assert self.scales is not None
            out = mx.gather_qmm(x, self.weight, self.scales, self.biases, transpose=True, **known)
        return out[:, 0]


@dataclass(frozen=True)
class ExpertBank:
    """The three projections of one layer's experts; all have the same number of slots.

    fixed: The content of slots never changes. experts: Number of experts that share the slots;
    None: one for each slot.
    """

    gate: ProjectionBank
    up: ProjectionBank
    down: ProjectionBank
    fixed: bool = False
    experts: int | None = None

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, mx.array],
        specs: Mapping[str, QuantSpec | None],
        experts: int | None = None,
    ) -> ExpertBank:
        """From arrays named ``gate_proj.weight`` ... and a spec for each projection."""
        banks = []
        for p in ("gate_proj", "up_proj", "down_proj"):
            scales, biases = arrays.get(f"{p}.scales"), arrays.get(f"{p}.biases")
            banks.append(ProjectionBank(arrays[f"{p}.weight"], scales, biases, specs[p]))
        return cls(*banks, experts=experts)

    @functools.cached_property
    def slots(self) -> int:
        return self.gate.weight.shape[0]

    @functools.cached_property
    def layout(self) -> ExpertLayout:
        """Its storage; see :func:`~mlx_moeflux.kernels.linear.quantised.expert_layout`."""
        return expert_layout(self.gate, self.up, self.down)

    @functools.cached_property
    def arrays(self) -> tuple[tuple[mx.array, ...], ...]:
        """The arrays of gate, up and down that kernels take; see
        :func:`~mlx_moeflux.kernels.linear.quantised.arrays_of`."""
        return tuple(arrays_of(p) for p in (self.gate, self.up, self.down))

    @functools.cached_property
    def launches(self) -> dict[Any, Any]:
        """Launch arguments for this bank; the launching functions keep them here."""
        return {}

    def take(self, slots: mx.array, dtype: mx.Dtype) -> ExpertBank:
        """A small bank of the given slots only, floats in `dtype`: what the CPU computes with,
        because stock operations would cast every slot's scales on every call."""
        gate, up, down = (part.take(slots, dtype) for part in (self.gate, self.up, self.down))
        return ExpertBank(gate, up, down)


def expert_ffn(
    x: mx.array, slots: mx.array, bank: ExpertBank, *, ascending: bool = False
) -> mx.array:
    """x ``[P, C]``, slots ``[P]`` uint32 -> ``[P, C]`` in the dtype of x.

    ascending: The caller promises that `slots` never decreases (lets stock MLX group rows).
    """
    gate = bank.gate.matmul(x, slots, ascending=ascending)
    up = bank.up.matmul(x, slots, ascending=ascending)
    return bank.down.matmul(nn.silu(gate) * up, slots, ascending=ascending)


def accumulate_experts(
    out: mx.array, weights: mx.array, initial: mx.array | None = None
) -> mx.array:
    """out ``[N, K, C]``, weights ``[N, K]`` float32 -> ``[N, C]`` float32.

    Adds in the order of k, one product and one sum at a time: the only place where expert
    outputs meet, so that every store gives the same bits. `initial` ``[N, C]`` float32 is a sum
    to continue; one of -0.0 changes nothing, not even the sign of a zero.
    """
    terms = [] if initial is None else [initial]
    terms += [out[:, k].astype(mx.float32) * weights[:, k, None] for k in range(out.shape[1])]
    return functools.reduce(operator.add, terms)
