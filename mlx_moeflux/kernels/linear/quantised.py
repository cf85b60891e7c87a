"""The storage of matrices, for kernels that read them without dequantising them first.

An affine matrix ``[out, in]`` holds numbers of 2, 4 or 8 bits in uint32 words, the lowest first,
and a scale and a bias for every `group` neighbours of a row: value = scale * number + bias.
Kernels of experts also read MXFP4 (:mod:`mlx_moeflux.checkpoint.quantization`), whose scales stand
where a launch wants biases. They and those of single rows read ggml's blocks too
(:mod:`mlx_moeflux.checkpoint.blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from mlx_moeflux.checkpoint.formats.decoded import NVFP4_UNIT
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError

BITS = (2, 4, 8)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class Stored(Protocol):
    """A matrix or several of one shape: weight, and scales and biases unless `spec` is None."""

    @property
    def weight(self) -> mx.array: ...
    @property
    def scales(self) -> mx.array | None: ...
    @property
    def biases(self) -> mx.array | None: ...
    @property
    def spec(self) -> QuantSpec | None: ...


def scaled(product: mx.array, global_scale: mx.array, dtype: mx.Dtype) -> mx.array:
    """Multiply a product with a matrix in NVFP4 by its global scale, in float32.

    global_scale: float32, one number or one for each row of `product`, ``[..., 1]``. Returns
    `dtype`.
    """
    return (product.astype(mx.float32) * (global_scale / NVFP4_UNIT)).astype(dtype)


def wide(x: mx.array) -> mx.array:
    """The input of a product that :func:`scaled` takes: without its scale, a sum of some hundreds
    of weights exceeds what float16 holds."""
    return x.astype(mx.float32) if x.dtype == mx.float16 else x


def settings(spec: QuantSpec) -> dict[str, Any]:
    """Group size, bits and mode, as MLX's operations name them, of a mode of MLX's."""
    return {"group_size": spec.group_size, "bits": spec.bits, "mode": spec.mode}


@dataclass(frozen=True)
class Matrix:
    """The storage of the numbers of a row; bits 0: floats; tiny: MXFP4; block: The mode of ggml's
    blocks, a type of blocks.metal, or ""."""

    bits: int
    group: int
    tiny: bool = False
    block: str = ""

    def words(self, width: int) -> int:
        """Words of a row of `width` numbers."""
        return width * self.bits // 32 if self.bits else width

    def access(self, width: int, most: int) -> int:
        """Return the words that a lane reads together: a power of two that keeps the 32 lanes busy
        with a row, belongs to one group and has at most `most` bytes, but at least four numbers."""
        per = 32 // self.bits if self.bits else 1
        limit = min(most // 4, self.group // per) if self.bits else most // 2
        count = 1 if self.bits else 4
        while 2 * count <= limit and 64 * count * per <= width and width % (2 * count * per) == 0:
            count *= 2
        return count


def matrix_of(
    matrix: Stored, width: int, *, blocks: bool = False, of_expert: bool = False
) -> Matrix:
    """Return the storage of rows of `width` numbers. blocks: The kernels also read blocks.
    of_expert: They also read blocks, MXFP4, and floats in rows of multiples of 8.

    Raises:
        ShapeError: The arrays do not fit together.
        UnsupportedError: The kernels cannot read them.
    """
    weight, spec = matrix.weight, matrix.spec
    if weight is None:
        raise UnsupportedError("kernels read matrices, not modules that stand for one.")
    if (blocks or of_expert) and spec is not None and spec.block is not None:
        return _blocks_of(weight, spec, width)
    if spec is None:
        found = Matrix(0, 32)
        known = weight.dtype in FLOATS
    else:
        tiny = of_expert and spec.mode == "mxfp4"
        found = Matrix(spec.bits, spec.group_size, tiny)
        known = tiny or (spec.is_affine and spec.bits in BITS)
        known = known and weight.dtype == mx.uint32
    step = 8 if of_expert and spec is None else 32
    if not known or width % step:
        raise UnsupportedError(
            f"kernels read floats and affine {BITS} bits in rows of multiples of {step}, not {spec}"
            f" of {weight.dtype} in rows of {width}; take the reference."
        )
    if weight.shape[-1] != found.words(width):
        raise ShapeError(f"a matrix {list(weight.shape)} of {spec} has no rows of {width}.")
    if spec is not None:
        expected = (*weight.shape[:-1], width // spec.group_size)
        scales, biases = matrix.scales, matrix.biases
        if found.tiny:
            if scales is None or scales.shape != expected or scales.dtype != mx.uint8:
                raise ShapeError(f"scales of {list(weight.shape)} must be uint8 {list(expected)}.")
            return found
        if scales is None or biases is None or not scales.shape == biases.shape == expected:
            raise ShapeError(f"scales and biases of {list(weight.shape)} must be {list(expected)}.")
        if scales.dtype not in FLOATS or scales.dtype != biases.dtype:
            raise UnsupportedError(
                f"kernels read scales and biases of one float type, not {scales.dtype} and "
                f"{biases.dtype}; take the reference."
            )
    return found


def _blocks_of(weight: mx.array, spec: QuantSpec, width: int) -> Matrix:
    assert spec.block is not None
    size, elements = spec.block.nbytes, spec.block.elements
    if weight.dtype != mx.uint8 or weight.shape[-1] * elements != width * size:
        raise ShapeError(
            f"a matrix {weight.dtype} {list(weight.shape)} of {spec.mode} has no rows of {width}."
        )
    return Matrix(spec.bits, elements, block=spec.mode)


def staged_floats(matrix: Matrix, words: int, width: int) -> tuple[int, int]:
    """Floats of threadgroup memory for a row of x, and for the sums of what lanes take, `words` at
    a time. See ``stage`` in quantised.metal."""
    numbers = words * (32 // matrix.bits if matrix.bits else 1)
    steps = -(-width // (32 * numbers))
    return steps * 32 * numbers, steps * 32


def arrays_of(matrix: Stored) -> tuple[mx.array, ...]:
    """weight, scales, biases of what :func:`matrix_of` takes; where there are none, any array of
    the same type may stand. Of blocks the weight alone."""
    weight, scales, biases = matrix.weight, matrix.scales, matrix.biases
    if matrix.spec is not None and matrix.spec.block is not None:
        return (weight,)
    if scales is None:
        return weight, weight, weight
    return weight, scales, scales if biases is None else biases


def three_arrays_of(matrix: Stored) -> tuple[mx.array, ...]:
    """:func:`arrays_of` for kernels of any storage: the weight of blocks stands for all three."""
    arrays = arrays_of(matrix)
    return arrays if len(arrays) == 3 else arrays * 3


@dataclass(frozen=True)
class ExpertLayout:
    """Sizes and storage of a bank of experts: C hidden, F inner width.

    inner: Gate, and up too unless both are in blocks. biased: Each product adds a bias. activation:
    ALPHA and LIMIT of ``activated`` in common.metal; zeros for silu(gate) up.
    """

    C: int
    F: int
    inner: Matrix
    up: Matrix
    down: Matrix
    biased: bool = False
    activation: tuple[int, int] = (0, 0)

    @property
    def plain(self) -> bool:
        """True for affine numbers or floats without biases, and silu(gate) up."""
        tiny = self.inner.tiny or self.down.tiny
        return not (self.biased or any(self.activation) or tiny or self.in_blocks)

    @property
    def in_blocks(self) -> bool:
        """True if all matrices are in ggml's blocks."""
        return bool(self.inner.block)


def expert_layout(gate: Stored, up: Stored, down: Stored) -> ExpertLayout:
    """The layout of a bank ``[slots, F, C]``, ``[slots, F, C]``, ``[slots, C, F]``.

    Raises:
        ShapeError: Its arrays do not fit together.
        UnsupportedError: The kernels cannot read it.
    """
    S, F, _ = gate.weight.shape
    C = down.weight.shape[1]
    found = [matrix_of(m, width, of_expert=True) for m, width in ((gate, C), (up, C), (down, F))]
    if up.weight.shape[:2] != (S, F) or down.weight.shape[0] != S:
        shapes = [p.weight.shape for p in (gate, up, down)]
        raise ShapeError(f"expert matrices {shapes} are not of one size.")
    in_blocks = {bool(matrix.block) for matrix in found}
    if len(in_blocks) > 1:
        raise UnsupportedError(
            f"expert kernels read blocks beside blocks alone, not {gate.spec}, {up.spec} and "
            f"{down.spec}; take the reference (MOEFLUX_KERNELS=expert_mix=reference)."
        )
    alike = (p.weight.dtype if p.scales is None else p.scales.dtype for p in (gate, up))
    if (found[0] != found[1] or len(set(alike)) > 1) and in_blocks == {False}:
        raise UnsupportedError(
            f"expert kernels need gate and up stored alike, not {gate.spec} and {up.spec}; take "
            "the reference (MOEFLUX_KERNELS=expert_mix=reference)."
        )
    inner, second, outer = found
    return ExpertLayout(C, F, inner, second, outer)
