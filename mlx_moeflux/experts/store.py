"""The base class of expert stores, which compute a model's routed experts.

:class:`~mlx_moeflux.experts.resident.ResidentStore` has all of them in memory,
:class:`~mlx_moeflux.experts.streaming.store.StreamedStore` reads missing ones. Both give the same
bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.experts.telemetry.events import EventHook
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank

# Ways to compute experts that do not lead through `experts`.
PAST_EXPERTS = ("whole", "partial", "stays_on_device", "parts_calls")


def check_result(store: ExpertStore, layer: int, x: mx.array, y: Any) -> None:
    """Compare shape and dtype of a call's result with those of :meth:`ExpertStore.experts`.

    Raises:
        ShapeError: They differ.
    """
    if not isinstance(y, mx.array) or y.shape != x.shape or y.dtype != mx.float32:
        found = f"{y.dtype} {list(y.shape)}" if isinstance(y, mx.array) else type(y).__name__
        raise ShapeError(
            f"{type(store).__name__}.experts returns {found} in layer {layer}; expected float32 "
            f"{list(x.shape)}."
        )


class ExpertStore:
    """Computes the experts that the router chose. Replace it with ``load(store=...)``.

    A subclass sets `layers` and `num_experts` and defines :meth:`experts` and :meth:`stats`. This
    class has defaults for everything else that models use. A class that defines :meth:`experts`,
    but not the ways past it (`whole`, `partial`, `stays_on_device`, `parts_calls`), has none of
    them: models call its :meth:`experts` for every token.

    leads: True unless this is a rank other than 0 of several. looks_ahead: True to get ``ahead=``,
    ``[N, K]`` uint32, in :meth:`experts`: what the router of the next MoE layer would choose now,
    the likeliest first; E marks padding. It is None for the last layer and for long calls.
    generation: Grows when arrays that a trace may hold are replaced. cold: True if no expert is in
    memory and no layer was called. slots: MoE layer id -> number of slots, of a store that reads
    missing experts. nbytes: Bytes that experts may take. block_bytes: MoE layer id -> bytes of one
    expert. eviction, prefetch, reader: Its policies and reader, or None.
    """

    num_experts: int
    layers: tuple[int, ...]
    leads = True
    looks_ahead = False
    generation = 0
    cold = True
    slots: Mapping[int, int] = MappingProxyType({})
    nbytes = 0
    block_bytes: Mapping[int, int] = MappingProxyType({})
    eviction: Any = None
    prefetch: Any = None
    reader: Any = None
    stays_on_device = False
    """Whether all calls are lazy, and a trace may stand for them."""
    waits = False
    """Whether a call waits for others, so that work beside the experts should begin before it."""
    training = False
    """Whether gradients are taken of calls. A model sets it in its own :meth:`train`."""
    parts_calls = False
    """Whether a call may be made in the steps of
    :class:`~mlx_moeflux.experts.streaming.store.StreamedStore`."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)

        def place(name: str) -> int:
            return next(i for i, kind in enumerate(cls.__mro__) if name in vars(kind))

        for name in PAST_EXPERTS:
            if place("experts") < place(name):
                setattr(cls, name, vars(ExpertStore)[name])

    @property
    def most_slots(self) -> int:
        """Experts a layer that this store may hold."""
        return self.num_experts

    @property
    def events(self) -> EventHook | None:
        """The listener of events, or None. A class that reports events sets ``events = None``; its
        listener may be replaced at any time.

        Raises:
            InputError: When set: this store reports no events.
        """
        return None

    @events.setter
    def events(self, listener: EventHook | None) -> None:
        if listener is not None:
            raise InputError(f"{type(self).__name__} has no events to listen to.")

    def experts(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """Return the weighted sum of each token's experts: sum over k of weights[n, k]
        expert(x[n]).

        Shapes:
            x: ``[N, C]``; ids: ``[N, K]`` uint32, ascending in each row; weights: ``[N, K]``
            float32. An id equal to E marks padding: no expert, and its weight is ignored.
            returns: ``[N, C]`` float32.
        """
        raise NotImplementedError

    def lead(self, values: mx.array) -> mx.array:
        """Return rank 0's `values`, which every rank has in the same shape: the values where one
        process has all experts."""
        return values

    def agrees(self, facts: Any) -> bool:
        """Return True if every rank gives the same `facts`, a JSON value."""
        return True

    def stats(self) -> ExpertStats:
        """Return the live statistics of this store."""
        raise NotImplementedError

    def whole(self, layer: int) -> tuple[ExpertBank, mx.array | None] | None:
        """Return a layer's bank and its table, expert -> slot, ``[E + 1]`` uint32 (None: e is in
        slot e), if all experts are in it and no listener wants its calls. Callers that compute with
        them report it to :meth:`count`."""
        return None

    def partial(self) -> tuple[int, ...]:
        """Return the layers of whose calls the host needs the ids."""
        return self.layers

    def count(self, tokens: int, layer: int | None = None) -> None:
        """Count a call of a layer, or of all, that did not come through :meth:`experts`."""

    def residents(self, layer: int) -> dict[int, int]:
        """Return expert -> slot of a layer, as it is now; empty if the store reads nothing."""
        return {}

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the store for a whole step."""
        return nullcontext()

    def read_missing(
        self, layer: int, experts: Iterable[int], *, protected: Collection[int]
    ) -> bool | None:
        """Read missing ones of `experts` in place of others than `protected`. Return False if that
        must wait, None if there are no slots. They count as reads, not as misses."""
        return None

    def start_eval(self) -> None:
        """Begin to evaluate the pending outputs of this thread, so that others can wait for
        them."""

    def resize_all(self, slots: Mapping[int, int]) -> None:
        """Give every layer its number of slots.

        Raises:
            InputError: The experts are not streamed.
        """
        raise InputError("these experts are not streamed; load with a smaller expert_memory.")

    def release(self) -> None:
        """Free the memory of experts until :meth:`restore` or the next call, which reads them
        again. Nothing happens in a store that cannot."""

    def restore(self) -> None:
        """Read again what :meth:`release` freed, if anything."""

    def close(self) -> None:
        """Free memory, files and threads; the store cannot be used afterwards."""
