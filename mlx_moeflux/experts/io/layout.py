"""The layout of one routed expert as a block of bytes: components, order, sizes.

A block is the concatenation of an expert's tensors in a fixed order, gate, up, down projection,
each with ``weight`` and, when quantised in another form than blocks, ``scales`` and, if affine,
``biases``. Sizes and offsets follow from the shapes; no file holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.names import BIAS, COMPONENT_ORDER, GLOBAL_SCALE, PROJECTIONS
from mlx_moeflux.checkpoint.quantization import MODES, QuantSpec
from mlx_moeflux.checkpoint.tensors import ITEMSIZE, ExpertRefs
from mlx_moeflux.errors import CheckpointError, ShapeError, UnsupportedError

_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Component:
    """One tensor of a block: `name` such as ``gate_proj.weight``, `dtype` of ITEMSIZE, `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


RAW = "raw."
"""Prefix of the name of stored bytes that are no component before they are decoded."""


@dataclass(frozen=True)
class Layout:
    """Consecutive components."""

    components: tuple[Component, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return sum(c.nbytes for c in self.components)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Component name -> offset inside the block."""
        offsets, position = {}, 0
        for component in self.components:
            offsets[component.name] = position
            position += component.nbytes
        return offsets


def layout_of(refs: Mapping[str, ExpertRefs]) -> Layout:
    """Return the stored layout of a layer's experts: a :class:`BlockLayout`, or the bytes that one
    is decoded from, whose names begin with :data:`RAW`."""
    if not all(name.startswith(RAW) for name in refs):
        return BlockLayout.of(refs)
    first = {name: by_expert[0] for name, by_expert in refs.items()}
    return Layout(tuple(Component(n, r.dtype, tuple(r.shape)) for n, r in first.items()))


@dataclass(frozen=True)
class BlockLayout(Layout):
    """The components of one layer's experts, in block order.

    Shapes: ``gate_proj`` and ``up_proj`` map C to F, ``down_proj`` F to C. A weight is
    ``[out, in]`` float, or ``[out, in * bits / 32]`` uint32 with scales and biases
    ``[out, in / group_size]``, or with scales of one byte alone, or ``[out, bytes of a row]`` of
    blocks, whose dtype is their mode; a global scale is ``[1]`` float32, a bias ``[out]`` float.

    Raises:
        ShapeError: Components are missing, in another order, or do not fit each other.
        UnsupportedError: The shapes mean bits or a group size that MLX has no kernel for.
    """

    def __post_init__(self) -> None:
        names = tuple(c.name for c in self.components)
        if names != tuple(n for n in COMPONENT_ORDER if n in names):
            raise ShapeError(
                f"an expert's components are {', '.join(names)}; expected some of "
                f"{', '.join(COMPONENT_ORDER)}, each once and in this order."
            )
        missing = [p for p in PROJECTIONS if f"{p}.weight" not in names]
        if missing:
            raise ShapeError(f"an expert has no '{missing[0]}.weight'; it needs three projections.")
        for component in self.components:
            axes = 1 if component.name.endswith((f".{BIAS}", f".{GLOBAL_SCALE}")) else 2
            if len(component.shape) != axes or not prod(component.shape):
                raise ShapeError(f"'{component}' of an expert must have axes: {axes}, none empty.")
        for projection, (rows, width) in self._dims().items():
            self._check(projection, rows, width)

    @classmethod
    def of(cls, refs: Mapping[str, ExpertRefs]) -> BlockLayout:
        """Return the layout of a layer's experts in a checkpoint.

        refs: Component name -> one ref per expert.

        Raises:
            CheckpointError: As for the class; the message names the file of the first tensor.
        """
        first = {name: by_expert[0] for name, by_expert in refs.items()}
        known = [name for name in COMPONENT_ORDER if name in first]
        order = known + [name for name in first if name not in COMPONENT_ORDER]
        try:
            return cls(tuple(Component(n, first[n].dtype, tuple(first[n].shape)) for n in order))
        except (ShapeError, UnsupportedError) as error:
            raise CheckpointError(f"{first[order[0]].file}: {error}") from error

    @cached_property
    def specs(self) -> dict[str, QuantSpec | None]:
        """Projection name -> its quantisation, derived from dtypes and shapes; None for floats."""
        return {p: self._spec(p, width) for p, (_, width) in self._dims().items()}

    @property
    def hidden(self) -> int:
        """C, the width of a token's hidden state."""
        return self._by_name["down_proj.weight"].shape[0]

    @property
    def intermediate(self) -> int:
        """F, the width inside one expert."""
        return self._by_name["gate_proj.weight"].shape[0]

    @cached_property
    def _by_name(self) -> dict[str, Component]:
        return {c.name: c for c in self.components}

    def _dims(self) -> dict[str, tuple[int, int]]:
        """Projection name -> (out, in) in elements."""
        C, F = self.hidden, self.intermediate
        return {"gate_proj": (F, C), "up_proj": (F, C), "down_proj": (C, F)}

    def _spec(self, projection: str, width: int) -> QuantSpec | None:
        weight = self._by_name[f"{projection}.weight"]
        scales = self._by_name.get(f"{projection}.scales")
        if weight.dtype in BLOCK_MODES:
            return QuantSpec.of_mode(weight.dtype)
        if scales is None:
            return None
        return QuantSpec.of_shapes(
            width,
            weight.shape[1],
            scales.shape[1],
            byte_scales=scales.dtype == "U8",
            global_scale=f"{projection}.{GLOBAL_SCALE}" in self._by_name,
        )

    def _check(self, projection: str, rows: int, width: int) -> None:
        weight = self._by_name[f"{projection}.weight"]
        parts = [self._by_name.get(f"{projection}.{part}") for part in ("scales", "biases")]
        if (parts[1] is None) != (parts[0] is None or parts[0].dtype == "U8"):
            raise ShapeError(
                f"'{projection}' of an expert must have both scales and biases, or scales of one "
                "byte alone."
            )
        spec = self._spec(projection, width)
        if spec is not None and spec.block is not None and parts[0] is not None:
            raise ShapeError(
                f"'{projection}' of an expert is in blocks of {spec.mode} and must have no scales."
            )
        if spec is None:
            expected, dtypes = (rows, width), _FLOATS
        else:
            dtype, count = spec.row(width)
            expected, dtypes = (rows, count), (dtype,)
        if weight.shape != expected or weight.dtype not in dtypes:
            raise ShapeError(
                f"'{weight}' of an expert must be {' or '.join(dtypes)} {list(expected)}."
            )
        whole = self._by_name.get(f"{projection}.{GLOBAL_SCALE}")
        if whole is not None and (spec is None or (whole.shape, whole.dtype) != ((1,), "F32")):
            raise ShapeError(f"'{whole}' of an expert must be F32 [1] of a quantised weight.")
        bias = self._by_name.get(f"{projection}.{BIAS}")
        if bias is not None and (bias.shape != (rows,) or bias.dtype not in _FLOATS):
            raise ShapeError(f"'{bias}' of an expert must be {' or '.join(_FLOATS)} {[rows]}.")
        for part in parts:
            if spec is None or part is None:
                continue
            dtypes = MODES[spec.mode].scales
            if part.shape != (rows, spec.groups(width)) or part.dtype not in dtypes:
                raise ShapeError(
                    f"'{part}' of an expert must be {' or '.join(dtypes)} "
                    f"{[rows, spec.groups(width)]}."
                )
