"""The chosen experts, computed out of a bank by slot number.

    out[p] = down[s] act(gate[s] x[p], up[s] x[p]),   s = slots[p]

act(g, u) is silu(g) u, :func:`geglu` or a :class:`ClampedSwiGLU`. Each of the three products may
add a bias.

One row per (token, expert) pair. A bank holds the experts of one layer in fixed slots; a slot
number says where, never which expert. A row's result depends on nothing but the row and the
slot's bytes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.linear.blocks import LEAST_ROWS, gather_blocks
from mlx_moeflux.kernels.linear.quantised import (
    ExpertLayout,
    arrays_of,
    expert_layout,
    scaled,
    settings,
    wide,
)
from mlx_moeflux.kernels.runtime.launcher import float_bits

# Names of the arrays of gate and up in kernels.
INNER_INPUTS = ("gate", "gate_scales", "gate_biases", "up", "up_scales", "up_biases")
INNER_BIASES = ("gate_bias", "up_bias")


# Rows of a tile of MLX's matrix units. Of an M5 wrong products were reported where rows whose slots
# ascend are no multiple of them.
TILE_ROWS = 64


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) up, element by element."""
    return nn.silu(gate) * up


def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) up, element by element; gelu by its tanh approximation, in float32.

    Source: transformers 5.24 `activations.GELUTanh`.
    """
    return nn.gelu_approx(gate.astype(mx.float32)).astype(gate.dtype) * up


@dataclass(frozen=True)
class ClampedSwiGLU:
    """(up' + 1) gate' sigmoid(alpha gate') with gate' = min(gate, limit) and up' = up clamped to
    [-limit, limit], element by element.

    Source: transformers 5.23 `gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate`.
    """

    alpha: float
    limit: float

    def __call__(self, gate: mx.array, up: mx.array) -> mx.array:
        gate = mx.minimum(gate, self.limit)
        up = mx.clip(up, -self.limit, self.limit)
        return (up + 1) * (gate * mx.sigmoid(self.alpha * gate))


Activation = Callable[[mx.array, mx.array], mx.array]
"""Maps gate and up to the input of down, element by element."""


def activation_bits(activation: Activation) -> tuple[int, int] | None:
    """Return ALPHA and LIMIT with which ``activated`` in common.metal computes `activation`, or
    None if it does not."""
    if isinstance(activation, ClampedSwiGLU):
        return float_bits(activation.alpha), float_bits(activation.limit)
    if activation is geglu:
        return float_bits(2 * math.sqrt(2 / math.pi)), 0
    return (0, 0) if activation is swiglu else None


def activation_template(activation: tuple[int, int]) -> dict[str, int]:
    """Return the template arguments of ``activated``, see :func:`activation_bits`."""
    alpha, limit = activation
    return {"ALPHA": alpha, "LIMIT": limit}


@dataclass(frozen=True)
class ProjectionBank:
    """One projection of all slots.

    weight: ``[S, out, in * bits / 32]`` uint32, ``[S, out, bytes of a row]`` uint8 when `spec` is
    of blocks, or ``[S, out, in]`` float when `spec` is None.
    scales, biases: ``[S, out, in / group_size]``; None when `spec` is None or of blocks. Scales are
    uint8 without biases when `spec` is not affine. bias: ``[S, out]``, added to the product, or
    None.
    global_scale: ``[S]`` or ``[S, 1]`` float32 of a `spec` that has one, or None.
    """

    weight: mx.array
    scales: mx.array | None
    biases: mx.array | None
    spec: QuantSpec | None
    bias: mx.array | None = None
    global_scale: mx.array | None = None

    def take(self, slots: mx.array, dtype: mx.Dtype | None) -> ProjectionBank:
        """The rows of `slots` only; floats but global scales cast to `dtype`, if it is given."""

        def rows(array: mx.array | None) -> mx.array | None:
            if array is None:
                return None
            found = array[slots]
            if dtype is None or not mx.issubdtype(found.dtype, mx.floating):
                return found
            return found.astype(dtype)

        return replace(
            self,
            weight=rows(self.weight),
            scales=rows(self.scales),
            biases=rows(self.biases),
            bias=rows(self.bias),
            global_scale=None if self.global_scale is None else self.global_scale[slots],
        )

    def matmul(self, x: mx.array, slots: mx.array, *, in_tiles: bool = False) -> mx.array:
        """x ``[P, in]``, slots ``[P]`` -> ``[P, out]``, of blocks in float32.

        in_tiles: Tell MLX that slots ascend. It then multiplies several rows in one tile, in a way
        that depends on the number of slots and on the other rows.
        """
        # Not x[:, None]: MLX gives an axis that is inserted a stride of 1, which was taken for the
        # distance between rows (docs/kernels.md).
        x = x.reshape(-1, 1, x.shape[-1])
        if self.spec is None:
            weight = self.weight.swapaxes(-1, -2)
            out = mx.gather_mm(x, weight, rhs_indices=slots, sorted_indices=in_tiles)
        elif self.spec.block is not None:
            out = gather_blocks(x, self.weight, slots, self.spec.block)
        else:
            known = settings(self.spec)
            assert self.scales is not None
            whole = self.global_scale
            rows = x if whole is None else wide(x)
            # MLX applies a global scale on GPUs alone, so the product is multiplied by it.
            out = mx.gather_qmm(
                rows,
                self.weight,
                self.scales,
                self.biases,
                rhs_indices=slots,
                transpose=True,
                sorted_indices=in_tiles,
                **known,
            )
            if whole is not None:
                out = scaled(out, whole[slots].reshape(-1, 1, 1), x.dtype)
        out = out[:, 0]
        return out if self.bias is None else out + self.bias[slots].astype(out.dtype)

    def arrays(self) -> list[mx.array]:
        """Return the arrays that there are, in the order of the fields."""
        every = (self.weight, self.scales, self.biases, self.bias, self.global_scale)
        return [array for array in every if array is not None]


@dataclass(frozen=True)
class ExpertBank:
    """The three projections of one layer's experts; all have the same number of slots.

    fixed: The content of slots never changes. experts: Number of experts that share the slots;
    None: one for each slot. activation: Between the products.
    """

    gate: ProjectionBank
    up: ProjectionBank
    down: ProjectionBank
    fixed: bool = False
    experts: int | None = None
    activation: Activation = swiglu

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, mx.array],
        specs: Mapping[str, QuantSpec | None],
        experts: int | None = None,
        activation: Activation = swiglu,
    ) -> ExpertBank:
        """From arrays named ``gate_proj.weight`` ... and a spec for each projection."""
        banks = []
        for p in ("gate_proj", "up_proj", "down_proj"):
            scales, biases = arrays.get(f"{p}.scales"), arrays.get(f"{p}.biases")
            weight, bias = arrays[f"{p}.weight"], arrays.get(f"{p}.bias")
            whole = arrays.get(f"{p}.global_scale")
            banks.append(ProjectionBank(weight, scales, biases, specs[p], bias, whole))
        return cls(*banks, experts=experts, activation=activation)

    @functools.cached_property
    def slots(self) -> int:
        return self.gate.weight.shape[0]

    @functools.cached_property
    def layout(self) -> ExpertLayout:
        """Its storage, biases and activation; see
        :func:`~mlx_moeflux.kernels.linear.quantised.expert_layout`.

        Raises:
            UnsupportedError: Kernels cannot read it, or do not compute its biases or activation.
        """
        found = expert_layout(self.gate, self.up, self.down)
        biased = [part.bias is not None for part in (self.gate, self.up, self.down)]
        activation = activation_bits(self.activation)
        types = {part.bias.dtype for part in (self.gate, self.up) if part.bias is not None}
        alike = len(set(biased)) == 1 and len(types) <= 1
        if not alike or activation is None:
            raise UnsupportedError(
                "kernels compute experts with all biases or none, those of gate and up of one "
                "type, and with silu(gate) up, its clamped form or gelu(gate) up; take the "
                "reference."
            )
        if found.in_blocks and any(biased):
            raise UnsupportedError(
                "kernels compute experts in blocks without biases; take the reference."
            )
        return replace(found, biased=biased[0], activation=activation)

    @functools.cached_property
    def arrays(self) -> tuple[tuple[mx.array, ...], ...]:
        """The arrays of gate, up and down that kernels take; see
        :func:`~mlx_moeflux.kernels.linear.quantised.arrays_of`."""
        return tuple(arrays_of(p) for p in (self.gate, self.up, self.down))

    @functools.cached_property
    def float_dtypes(self) -> set[mx.Dtype]:
        """The dtypes of its float weights and of its scales, but for scales in bytes."""
        parts = (self.gate, self.up, self.down)
        arrays = (array for p in parts for array in (p.weight, p.scales, p.biases))
        dtypes = {array.dtype for array in arrays if array is not None}
        return {dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating)}

    @functools.cached_property
    def flat(self) -> list[mx.array]:
        """The arrays of gate, up and down as they are stored, in the order of their fields."""
        return [array for part in (self.gate, self.up, self.down) for array in part.arrays()]

    @functools.cached_property
    def bias_arrays(self) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """The biases of gate and up, and that of down; empty if there are none."""
        inner = (self.gate.bias, self.up.bias)
        found = (tuple(b for b in part if b is not None) for part in (inner, (self.down.bias,)))
        first, second = found
        return first, second

    @functools.cached_property
    def launches(self) -> dict[Any, Any]:
        """Launch arguments for this bank; the launching functions keep them here."""
        return {}

    def take(self, slots: mx.array, dtype: mx.Dtype | None = None) -> ExpertBank:
        """A small bank of the given slots only, floats in `dtype`, if it is given: what the CPU
        computes with, because stock operations would cast every slot's scales on every call."""
        gate, up, down = (part.take(slots, dtype) for part in (self.gate, self.up, self.down))
        return ExpertBank(gate, up, down, activation=self.activation)


def expert_ffn(
    x: mx.array, slots: mx.array, bank: ExpertBank, *, in_tiles: bool = False
) -> mx.array:
    """x ``[P, C]``, slots ``[P]`` uint32 -> ``[P, C]`` in the dtype of x, or in float32 where the
    bank has other floats, or blocks. in_tiles: Slots ascend, see :meth:`ProjectionBank.matmul`."""
    P = x.shape[0]
    unit = TILE_ROWS if in_tiles else 1
    least = -(-P // unit) * unit
    if mx.default_device().type == mx.gpu:
        least = max(least, LEAST_ROWS)
    if least > P:
        # The last row again: slots still ascend.
        padding = mx.full((least - P,), P - 1, mx.uint32)
        x, slots = mx.concatenate([x, x[padding]]), mx.concatenate([slots, slots[padding]])
    gate, up = (part.matmul(x, slots, in_tiles=in_tiles) for part in (bank.gate, bank.up))
    return bank.down.matmul(bank.activation(gate, up), slots, in_tiles=in_tiles)[:P]


def add_outputs(outputs: mx.array) -> mx.array:
    """``[N, K, C]`` -> ``[N, C]``: weighted outputs of experts, added in the order of k."""
    return functools.reduce(operator.add, (outputs[:, k] for k in range(outputs.shape[1])))


def accumulate_experts(
    out: mx.array, weights: mx.array, initial: mx.array | None = None
) -> mx.array:
    """out ``[N, K, C]``, weights ``[N, K]`` float32 -> ``[N, C]`` float32.

    Adds in the order of k, one product and one sum at a time: the only place where expert
    outputs meet, so that every store gives the same bits. `initial` ``[N, C]`` float32 is a sum
    to continue; one of -0.0 changes nothing, not even the sign of a zero.
    """
    terms = [] if initial is None else [initial]
    for k in range(out.shape[1]):
        product = out[:, k].astype(mx.float32) * weights[:, k, None]
        # A view keeps a trace from fusing product and sum, which would then round once.
        terms.append(mx.unflatten(product.flatten(), 0, product.shape))
    return functools.reduce(operator.add, terms)
