"""The memory that resident experts live in: dense arrays of slots that readers write into.

For each layer there is one evaluated array ``[slots, ...]`` per component, all in one buffer where
they fit, with one byte view of its storage beside it. A slot is filled through the view, never
through MLX: assigning to an array rebinds it to new storage and orphans the view. Who may write
when is the store's business: MLX waits for an array's producer, not for its readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

from mlx_moeflux.checkpoint.refs import mlx_dtype
from mlx_moeflux.experts.block import BlockLayout
from mlx_moeflux.experts.uploads import address_of, driver
from mlx_moeflux.kernels import packing
from mlx_moeflux.kernels.expert_ffn import ExpertBank


class _Slots(NamedTuple):
    """One allocation: what MLX reads, what readers write."""

    count: int
    arrays: dict[str, mx.array]
    experts: ExpertBank | None
    views: list[tuple[memoryview, int]]
    addresses: list[tuple[int, int]]
    packed: packing.Packing | None = None


class LayerBank:
    """The slots of one layer. experts: How many may take turns in them; None: nobody says.

    Evaluates: its new arrays.
    """

    def __init__(self, layout: BlockLayout, slots: int, experts: int | None = None):
        assert slots > 0, "a bank without slots"
        self.layout, self._experts = layout, experts
        self._slots = self._allocate(slots)

    @property
    def slots(self) -> int:
        """How many there are."""
        return self._slots.count

    @property
    def arrays(self) -> dict[str, mx.array]:
        """Component name -> ``[slots, ...]``, dense and evaluated; others after :meth:`resize`."""
        return self._slots.arrays

    @property
    def experts(self) -> ExpertBank | None:
        """The arrays as the kernels take them; None once closed."""
        return self._slots.experts

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.layout.nbytes

    def slot_views(self, slot: int) -> list[memoryview]:
        """The writable bytes of one slot, one view per component in block order."""
        return [view[slot * n : (slot + 1) * n] for view, n in self._slots.views]

    def slot_addresses(self, slot: int) -> list[int]:
        """Where each component of one slot begins in memory."""
        return [address + slot * n for address, n in self._slots.addresses]

    def resize(self, slots: int, moves: Mapping[int, int] | None = None) -> None:
        """Change the number of slots.

        moves: Old slot -> new slot of the contents to keep; by default slots keep their number.

        The arrays are new and the old ones are never written again: work that was given them,
        evaluated or not, stays right.
        """
        if moves is None:
            moves = {slot: slot for slot in range(min(slots, self.slots))}
        new = self._allocate(slots)
        for (source, n), (target, _) in zip(self._slots.views, new.views, strict=True):
            for a, b in moves.items():
                target[b * n : (b + 1) * n] = source[a * n : (a + 1) * n]
        home = driver()
        for view, _ in new.views if home is not None else ():
            home.settle(address_of(view), view.nbytes)
        # One assignment: an interruption leaves all of the old or all of the new.
        self._slots = new

    def close(self) -> None:
        """Let go of arrays and views; lazy work that still reads them keeps them alive."""
        self._slots = _Slots(self.slots, {}, None, [], [])

    def _allocate(self, slots: int) -> _Slots:
        components, packed = self.layout.components, None
        like = [((slots, *c.shape), mlx_dtype(c.dtype)) for c in components]
        # Storage is viewed once and before any kernel reads it: on CUDA the first host access
        # moves an array to managed memory.
        if packing.fits(like):
            shape = packing.by_rows(like) or (packing.packed_bytes(like) // packing.WORD,)
            buffer = mx.zeros(shape, mx.uint32)
            mx.eval(buffer)
            whole = memoryview(buffer).cast("B")
            packed = packing.Packing(buffer, like)
            arrays = packed.arrays
            views = [
                whole[start : start + array.nbytes]
                for start, array in zip(packed.starts, arrays, strict=True)
            ]
        else:
            arrays = [mx.zeros(shape, dtype) for shape, dtype in like]
            mx.eval(arrays)
            views = [memoryview(array).cast("B") for array in arrays]
        home = driver()
        for view in views if home is not None else ():
            home.settle(address_of(view), view.nbytes)
        named = {c.name: array for c, array in zip(components, arrays, strict=True)}
        sized = [(view, c.nbytes) for view, c in zip(views, components, strict=True)]
        addresses = [(address_of(view), n) for view, n in sized]
        experts = ExpertBank.of(named, self.layout.specs, self._experts)
        return _Slots(slots, named, experts, sized, addresses, packed)


class Bank:
    """The banks of all layers, by MoE layer id."""

    def __init__(
        self,
        layouts: Mapping[int, BlockLayout],
        slots: Mapping[int, int],
        experts: int | None = None,
    ):
        self.layers = {layer: LayerBank(layouts[layer], slots[layer], experts) for layer in layouts}

    def __getitem__(self, layer: int) -> LayerBank:
        return self.layers[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of all layers."""
        return sum(bank.nbytes for bank in self.layers.values())

    def resize(self, layer: int, slots: int, moves: Mapping[int, int] | None = None) -> None:
        """See :meth:`LayerBank.resize`."""
        self.layers[layer].resize(slots, moves)

    def close(self) -> None:
        """See :meth:`LayerBank.close`."""
        for bank in self.layers.values():
            bank.close()
