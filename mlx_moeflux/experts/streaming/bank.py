"""The memory of resident experts: dense arrays of slots that readers write into.

Each layer has one evaluated array ``[slots, ...]`` per component, all in one buffer where they fit,
and one byte view of each array's storage. Readers fill a slot through the view, never through MLX:
assigning to an array rebinds it to new storage and orphans the view. The store decides when a slot
may be written: MLX waits for an array's producer, not for its readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

from mlx_moeflux.checkpoint.tensors import mlx_dtype
from mlx_moeflux.experts.io.layout import BlockLayout
from mlx_moeflux.kernels.moe.expert_ffn import Activation, ExpertBank, swiglu
from mlx_moeflux.kernels.runtime import device, packing
from mlx_moeflux.kernels.runtime.views import keep


class Slots(NamedTuple):
    """One allocation: arrays that MLX reads, views that readers write. experts: The arrays as the
    kernels take them."""

    count: int
    arrays: dict[str, mx.array]
    experts: ExpertBank
    views: list[tuple[memoryview, int]]
    addresses: list[tuple[int, int]]
    packed: packing.Packing | None = None


class LayerBank:
    """The slots of one layer. experts: Number of experts in the layer, or None if unknown.
    activation: Of the experts. current: The allocation; one assignment replaces it. allocations:
    How many there were.

    Evaluates: its new arrays.
    """

    def __init__(
        self,
        layout: BlockLayout,
        slots: int,
        experts: int | None = None,
        activation: Activation = swiglu,
    ):
        assert slots > 0, "a bank without slots"
        self.layout, self._experts, self._activation = layout, experts, activation
        self.allocations = 0
        self.current = self._allocate(slots)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.current.count

    @property
    def arrays(self) -> dict[str, mx.array]:
        """Component name -> ``[slots, ...]``, dense and evaluated; others after :meth:`resize`."""
        return self.current.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.layout.nbytes

    def slot_views(self, slot: int) -> list[memoryview]:
        """Return the writable bytes of one slot, one view per component in block order."""
        return [view[slot * n : (slot + 1) * n] for view, n in self.current.views]

    def resize(self, slots: int, moves: Mapping[int, int] | None = None) -> None:
        """Change the number of slots.

        moves: Old slot -> new slot of the contents to keep; by default slots keep their number.

        The arrays are new, and no one writes the old ones again: work that reads them, evaluated or
        not, stays right.
        """
        if moves is None:
            moves = {slot: slot for slot in range(min(slots, self.slots))}
        new = self._allocate(slots)
        for (source, n), (target, _) in zip(self.current.views, new.views, strict=True):
            for a, b in moves.items():
                target[b * n : (b + 1) * n] = source[a * n : (a + 1) * n]
        device.keep_on_gpu(view for view, _ in new.views)
        # One assignment: an interrupt leaves all of the old or all of the new.
        self.current = new

    def open(self, slots: int) -> None:
        """Allocate slots after :meth:`close`; all are empty."""
        self.current = self._allocate(slots)

    def close(self) -> None:
        """Release arrays and views; lazy work that still reads them keeps them alive."""
        self.current = _CLOSED

    def _allocate(self, slots: int) -> Slots:
        self.allocations += 1
        components, packed = self.layout.components, None
        like = [((slots, *c.shape), mlx_dtype(c.dtype)) for c in components]
        # View the storage once, before any kernel reads it: on CUDA the first access by the host
        # moves an array to managed memory.
        if packing.fits(like):
            shape = packing.by_rows(like) or (packing.packed_bytes(like) // packing.WORD,)
            buffer = mx.zeros(shape, mx.uint32)
            mx.eval(buffer)
            whole = device.bytes_of(buffer)
            packed = packing.Packing(buffer, like)
            arrays = packed.arrays
            views = [
                whole[start : start + array.nbytes]
                for start, array in zip(packed.starts, arrays, strict=True)
            ]
        else:
            arrays = [mx.zeros(shape, dtype) for shape, dtype in like]
            mx.eval(arrays)
            keep(arrays)
            views = [device.bytes_of(array) for array in arrays]
        device.keep_on_gpu(views)
        named = {c.name: array for c, array in zip(components, arrays, strict=True)}
        sized = [(view, c.nbytes) for view, c in zip(views, components, strict=True)]
        addresses = [(device.address_of(view), n) for view, n in sized]
        experts = ExpertBank.of(named, self.layout.specs, self._experts, self._activation)
        return Slots(slots, named, experts, sized, addresses, packed)


# A closed bank has no slots and no arrays.
_CLOSED = Slots(0, {}, None, [], [])  # pyright: ignore[reportArgumentType]
