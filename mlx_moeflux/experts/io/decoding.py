"""Read experts of formats that need decoding: read the stored bytes, decode them into the slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from mlx_moeflux.checkpoint.formats.decoded import DecodedRef
from mlx_moeflux.checkpoint.tensors import ExpertRefs, TensorRef
from mlx_moeflux.errors import CheckpointError, ShapeError
from mlx_moeflux.experts.io.layout import RAW, BlockLayout, Layout

Experts = Mapping[int, Mapping[str, ExpertRefs]]


def needs_decoding(experts: Experts) -> bool:
    """Return True if any component is stored in another form than it is computed with."""
    return any(
        isinstance(refs[0], DecodedRef) for parts in experts.values() for refs in parts.values()
    )


def stored_form(experts: Experts) -> Experts:
    """Return the stored bytes of `experts`: what they are decoded from, if they are."""
    if not needs_decoding(experts):
        return experts
    return {layer: _Plan(parts).stored for layer, parts in experts.items()}


class StoredReader(Protocol):
    """A reader of stored bytes: see :class:`~mlx_moeflux.experts.io.readers.Reader`."""

    name: str
    layers: tuple[int, ...]
    num_experts: int
    staging_bytes: int

    def layout(self, layer: int) -> Layout: ...

    def read(self, layer: int, expert: int, into: Sequence[memoryview]) -> int: ...

    def close(self) -> None: ...


class DecodingReader:
    """A reader that decodes what another reader fetches, with NumPy, in the reading threads.

    make: Makes the reader of the stored bytes, such as
    :class:`~mlx_moeflux.experts.io.readers.PreadReader`. See
    :class:`~mlx_moeflux.experts.io.readers.Reader`.
    """

    def __init__(self, make: Callable[[Experts], StoredReader], experts: Experts):
        self._experts = experts
        self._layouts = {layer: BlockLayout.of(parts) for layer, parts in experts.items()}
        plans = {layer: _Plan(parts) for layer, parts in experts.items()}
        self._plans = plans
        self._stored = make({layer: plan.stored for layer, plan in plans.items()})
        self.name = self._stored.name
        self.layers, self.num_experts = self._stored.layers, self._stored.num_experts
        self._local = threading.local()
        self.staging_bytes = self._stored.staging_bytes + max(
            sum(plan.staged_sizes()) + plan.scratch_bytes for plan in plans.values()
        )

    def layout(self, layer: int) -> BlockLayout:
        """See :meth:`Reader.layout`: the decoded components."""
        self._stored.layout(layer)
        return self._layouts[layer]

    def stored_bytes(self, layer: int) -> int:
        """Return the bytes that one read fetches."""
        return self._stored.layout(layer).nbytes

    def read(self, layer: int, expert: int, into: Sequence[memoryview]) -> int:
        """See :meth:`Reader.read`."""
        components = self.layout(layer).components
        if [view.nbytes for view in into] != [c.nbytes for c in components]:
            raise ShapeError(
                f"the buffers for an expert of layer {layer} have {[v.nbytes for v in into]} "
                f"bytes, its components {[c.nbytes for c in components]}."
            )
        plan = self._plans[layer]
        staged = self._buffers(plan.staged_sizes())
        names = [c.name for c in components]
        views = [
            staged[place].data if name is None else into[names.index(name)]
            for name, place in plan.targets
        ]
        count = self._stored.read(layer, expert, views)
        raw = [np.frombuffer(view, np.uint8) for view in views]
        for name, view in zip(names, into, strict=True):
            ref = self._experts[layer][name][expert]
            if isinstance(ref, DecodedRef):
                ref.decode([raw[i] for i in plan.inputs[name]], np.frombuffer(view, np.uint8))
        return count

    def close(self) -> None:
        """See :meth:`Reader.close`."""
        self._stored.close()
        self._local = threading.local()

    def _buffers(self, sizes: tuple[int, ...]) -> list[np.ndarray]:
        """Return buffers of this thread, one of each size."""
        known = self._local.__dict__.setdefault("buffers", {})
        if sizes not in known:
            known[sizes] = [np.empty(size, np.uint8) for size in sizes]
        return known[sizes]


class _Plan:
    """The stored tensors of one expert of a layer, and where each goes.

    stored: Raw name -> one ref per expert. targets: For each, the component that needs no decoding
    (None: it does), and its index among the staging buffers. inputs: Decoded component -> indices
    of its sources. scratch_bytes: Bytes that decoding one component allocates besides.
    """

    def __init__(self, parts: Mapping[str, ExpertRefs]):
        self.stored: dict[str, list[TensorRef]] = {}
        self.targets: list[tuple[str | None, int]] = []
        self.inputs: dict[str, list[int]] = {}
        self.scratch_bytes = 0
        self._sizes: list[int] = []
        places: dict[tuple, int] = {}
        for name, refs in parts.items():
            if not isinstance(refs[0], DecodedRef):
                self._add(name, _key(refs[0]), list(refs), places)
        for name, refs in parts.items():
            if isinstance(refs[0], DecodedRef):
                decoded = _alike(refs)
                self.scratch_bytes = max(self.scratch_bytes, decoded[0].scratch_bytes)
                self.inputs[name] = [
                    self._add(None, _key(source), [ref.sources[i] for ref in decoded], places)
                    for i, source in enumerate(decoded[0].sources)
                ]

    def staged_sizes(self) -> tuple[int, ...]:
        """Return the bytes of each staging buffer."""
        return tuple(self._sizes)

    def _add(self, name: str | None, key: tuple, refs: list[TensorRef], places: dict) -> int:
        if key not in places:
            places[key] = len(self.targets)
            self.targets.append((name, len(self._sizes)))
            self.stored[f"{RAW}{len(self.stored)}"] = refs
            if name is None:
                self._sizes.append(refs[0].nbytes)
        return places[key]


def _key(ref: TensorRef) -> tuple:
    return ref.file, ref.offset, ref.nbytes


def _alike(refs: ExpertRefs) -> list[DecodedRef]:
    """Return the refs of all experts, which are decoded alike."""
    first, found = refs[0], []
    for ref in refs:
        if not isinstance(ref, DecodedRef) or (ref.dtype, ref.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{ref.file}: '{ref.name}' is {ref.dtype} {list(ref.shape)}, but expert 0 has "
                f"{first.dtype} {list(first.shape)}, decoded."
            )
        found.append(ref)
    return found
