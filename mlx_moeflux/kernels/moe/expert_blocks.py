"""Routed experts of which a matrix is in ggml's blocks: each pair reads its expert's bytes.

See :mod:`mlx_moeflux.kernels.moe.expert_mix` for what is computed, and
:mod:`mlx_moeflux.checkpoint.blocks` for the blocks. Four launches, and the activation in plain MLX:
gate; up; down; the weighted sum. The other matrices are affine, of any number of bits. Numbers are
decoded, multiplied and summed in float32, in an order that nothing but the width decides.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.linear.launch import launch_of
from mlx_moeflux.kernels.linear.quantised import FLOATS, arrays_of
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.moe.expert_tiles import COMBINE, combine
from mlx_moeflux.kernels.runtime.launcher import MetalKernel

# How ``eight`` in expert_blocks.metal names what a row consists of.
KINDS = ("affine", "q2_k", "q3_k", "q6_k", "iq4_nl", "iq4_xs")
# Rows of a matrix for each simdgroup, and simdgroups for each threadgroup.
ROWS, SIMDGROUPS = 2, 4
# The kernel of the weighted sum takes multiples of it.
STEP = 4

_KERNEL = MetalKernel(
    "expert_blocks",
    file="expert_blocks.metal",
    inputs=("x", "slots", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        const uint pair = threadgroup_position_in_grid.y;
        block_rows<ROWS, IN, OUT, KIND, ELEMENTS, BYTES, BITS>(
            x + ulong(pair / K) * IN, w, scales, biases, y + ulong(pair) * OUT, w_shape[0],
            slots[pair],
            (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup) * ROWS,
            thread_index_in_simdgroup);
    """,
)
KERNELS = (_KERNEL, COMBINE)


class Form(NamedTuple):
    """What a row consists of: a place in :data:`KINDS`; numbers and bytes of a block, or of a group
    of affine numbers; their bits, 0 for a block."""

    kind: int
    elements: int
    nbytes: int
    bits: int


class Forms(NamedTuple):
    """C of a bank, and the forms of its matrices."""

    C: int
    gate: Form
    up: Form
    down: Form


def gather_rows(x: mx.array, slots: mx.array, bank: ProjectionBank, form: Form) -> mx.array:
    """y[p] = W[slots[p]] x[p / K] in one launch.

    x: ``[P / K, in]``; slots: ``[P]`` uint32; a number that no slot has gives zeros. returns:
    ``[P, out]`` float32. form: That of the bank for rows like those of `x`.

    Raises:
        UnsupportedError: There is no GPU.
    """
    launch = _launch(form, x.shape, slots.size, bank.weight.shape[1])
    return _KERNEL(x, slots, *arrays_of(bank), **launch)[0]


@functools.lru_cache(maxsize=256)
def _launch(form: Form, shape: tuple[int, ...], P: int, out: int) -> dict[str, Any]:
    N, width = shape
    template = {"ROWS": ROWS, "SIMDGROUPS": SIMDGROUPS, "K": P // N, "IN": width, "OUT": out}
    template |= {"KIND": form.kind, "ELEMENTS": form.elements, "BYTES": form.nbytes}
    template |= {"BITS": form.bits}
    groups = -(-out // (ROWS * SIMDGROUPS)), P
    return launch_of(template, groups, 32 * SIMDGROUPS, [(P, out)], mx.float32)


def form_of(bank: ProjectionBank, width: int) -> Form:
    """Return the form of rows of `width` numbers.

    Raises:
        ShapeError: The arrays do not fit together.
        UnsupportedError: The kernel does not read them.
    """
    weight, spec, scales = bank.weight, bank.spec, bank.scales
    if spec is None or spec.mode not in KINDS or bank.bias is not None:
        raise UnsupportedError(
            f"beside experts in blocks kernels read affine ones without biases, not {spec} of "
            f"{weight.dtype}; take the reference."
        )
    if spec.block is not None:
        mode, bits, dtype = spec.mode, 0, mx.uint8
        elements, size = spec.block.elements, spec.block.nbytes
    else:
        mode, bits, dtype, elements = "affine", spec.bits, mx.uint32, spec.group_size
        size = elements * bits // 8
        expected = (*weight.shape[:-1], width // elements)
        kept = [] if scales is None or bank.biases is None else [scales, bank.biases]
        if not kept or any(array.shape != expected for array in kept):
            raise ShapeError(f"scales and biases of {list(weight.shape)} must be {list(expected)}.")
        if kept[0].dtype != kept[1].dtype or kept[0].dtype not in FLOATS:
            raise UnsupportedError("kernels read scales and biases of one float type.")
    if weight.dtype != dtype or weight.shape[-1] * dtype.size * elements != width * size:
        raise ShapeError(
            f"a matrix {weight.dtype} {list(weight.shape)} of {mode} has no rows of {width}."
        )
    return Form(KINDS.index(mode), elements, size, bits)


def forms_of(bank: ExpertBank) -> Forms:
    """Return the forms of a bank, found once.

    Raises:
        ShapeError: Its arrays do not fit together.
        UnsupportedError: The kernel does not read it.
    """
    if (found := bank.launches.get(Forms)) is not None:
        return found
    S, F, _ = bank.gate.weight.shape
    C = bank.down.weight.shape[1]
    forms = [form_of(p, width) for p, width in ((bank.gate, C), (bank.up, C), (bank.down, F))]
    if bank.up.weight.shape[:2] != (S, F) or bank.down.weight.shape[0] != S:
        shapes = [part.weight.shape for part in (bank.gate, bank.up, bank.down)]
        raise ShapeError(f"expert matrices {shapes} are not of one size.")
    if C % STEP:
        raise UnsupportedError(f"kernels sum experts of multiples of {STEP}, not of {C}.")
    found = bank.launches[Forms] = Forms(C, *forms)
    return found


def pair_bytes(bank: ExpertBank) -> int:
    """Bytes of scratch for each pair: gate, up, what comes of them, and down."""
    return 4 * (3 * bank.gate.weight.shape[1] + bank.down.weight.shape[1])


def mix(
    x: mx.array, slots: mx.array, weights: mx.array, bank: ExpertBank, initial: mx.array | None
) -> mx.array:
    """Compute :func:`~mlx_moeflux.kernels.moe.expert_mix.expert_mix` of checked arguments."""
    flat, forms = slots.reshape(-1), forms_of(bank)
    gate = gather_rows(x, flat, bank.gate, forms.gate)
    up = gather_rows(x, flat, bank.up, forms.up)
    out = gather_rows(bank.activation(gate, up), flat, bank.down, forms.down)
    return combine(out, slots, weights, bank.slots, initial)
