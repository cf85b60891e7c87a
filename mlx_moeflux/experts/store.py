"""The base class of expert stores, which compute a model's routed experts, and what only some of
them offer.

:class:`~mlx_moeflux.experts.resident.ResidentStore` has all experts in memory,
:class:`~mlx_moeflux.experts.streaming.store.StreamedStore` reads missing ones. Both give the same
bits.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx

from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.experts.io.readers import Reader
from mlx_moeflux.experts.policies.eviction import Eviction
from mlx_moeflux.experts.policies.prefetch import Prefetch
from mlx_moeflux.experts.policies.timed_budget import TimedBudget
from mlx_moeflux.experts.telemetry.events import EventHook
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank


class Direct(Protocol):
    """Banks that a caller computes with itself, instead of calling :meth:`ExpertStore.experts`."""

    @property
    def stays_on_device(self) -> bool:
        """True if all calls are lazy, and a trace may stand for them."""
        ...

    @property
    def generation(self) -> int:
        """Grows when arrays that a trace may hold are replaced."""
        ...

    def whole(self, layer: int) -> tuple[ExpertBank, mx.array | None] | None:
        """Return a layer's bank and its table, expert -> slot, ``[E + 1]`` uint32 (None: e is in
        slot e), if all experts of this process are in it and no listener wants its calls. Callers
        that compute with them report it to :meth:`count`."""
        ...

    @property
    def exchange(self) -> Callable[[int, mx.array, mx.array], mx.array] | None:
        """Adds the outputs of other processes to a short call; lazy. It takes the layer, the ids
        ``[N, K]`` and this process's weighted outputs ``[N, K, C]`` float32, and returns all
        outputs. The bank of :meth:`whole` has no slot for experts of others; their outputs are
        -0.0 before. None: This process has all experts."""
        ...

    def count(self, tokens: int, layer: int | None = None) -> None:
        """Count a call of a layer, or of all, that did not come through
        :meth:`ExpertStore.experts`."""
        ...


class Steps(Direct, Protocol):
    """The steps of a call, for a caller that makes them itself, inside :meth:`exclusive`. See
    :class:`~mlx_moeflux.experts.streaming.store.StreamedStore`, which describes them."""

    @property
    def slots(self) -> Mapping[int, int]:
        """MoE layer id -> number of slots."""
        ...

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the store for a whole step."""
        ...

    def partial(self) -> tuple[int, ...]:
        """Return the layers of whose calls the host needs the ids."""
        ...

    def begin_load(
        self, layer: int, ids: mx.array, weights: mx.array, *, ahead: mx.array | None = None
    ) -> Any:
        """Take the ids of a call and begin to read missing experts."""
        ...

    def slots_of(self, call: Any) -> mx.array:
        """Return the slots ``[N, K]`` in which the experts of a call are after :meth:`wait`."""
        ...

    def bank(self, layer: int) -> ExpertBank:
        """Return the slots of a layer as they are now."""
        ...

    def wait(self, call: Any) -> None:
        """Wait for the reads of :meth:`begin_load`."""
        ...

    def compute_slots(
        self, x: mx.array, slots: mx.array, weights: mx.array, bank: ExpertBank
    ) -> mx.array:
        """Compute a short call from the slots of :meth:`slots_of`; lazy."""
        ...

    def release_after(self, call: Any, output: mx.array) -> None:
        """End a call: keep its slots until `output`, perhaps lazy, is evaluated."""
        ...


class Streaming(Protocol):
    """Slots for some experts, and what reads the others."""

    @property
    def eviction(self) -> Eviction:
        """The policy that chooses which experts lose their slots."""
        ...

    @property
    def prefetch(self) -> Prefetch | None:
        """The policy of reading ahead, or None."""
        ...

    @property
    def timed_budget(self) -> TimedBudget | None:
        """The trial of a smaller budget; None if the budget was given."""
        ...

    @property
    def reader(self) -> Reader:
        """What reads the bytes of an expert."""
        ...

    @property
    def slots(self) -> Mapping[int, int]:
        """MoE layer id -> number of slots."""
        ...

    @property
    def most_slots(self) -> int:
        """Slots that a layer may have."""
        ...

    @property
    def bank_bytes(self) -> int:
        """Bytes of all slots."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and of the buffers of reading threads."""
        ...

    @property
    def cold(self) -> bool:
        """True if no expert is in a slot and no layer was called."""
        ...

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the store: no other thread changes slots meanwhile."""
        ...

    @property
    def ways(self) -> str | None:
        """Which steps took the handshake, or why none does, as a phrase; None: load() was not
        asked for it."""
        ...

    def residents(self, layer: int) -> dict[int, int]:
        """Return expert -> slot of a layer, as it is now."""
        ...

    def read_missing(
        self, layer: int, experts: Iterable[int], *, protected: Collection[int]
    ) -> bool | None:
        """Read missing ones of `experts` in place of others than `protected`. Return False if that
        must wait, None if the store is closed or has no such layer. They count as reads, not as
        misses."""
        ...

    def start_eval(self) -> None:
        """Begin to evaluate the pending outputs of this thread, so that others can wait for
        them."""
        ...

    def resize(self, layer: int, slots: int) -> None:
        """Change a layer's number of slots."""
        ...

    def resize_all(self, slots: Mapping[int, int], *, tight: bool = False) -> None:
        """Give every layer its number of slots. Memory exceeds the larger of before and after by at
        most one layer's bank. tight: By nothing; one bank is freed before the others are copied,
        and read again after them."""
        ...


class Handshake(Protocol):
    """Decode steps of one sequence in which kernels wait for experts, so that a trace may stand for
    a whole step."""

    def step(self) -> AbstractContextManager[None]:
        """Hold the store for such a step, which is evaluated inside. Calls of layers are lazy
        there. If it raises, the step may be made as others are."""
        ...

    def begin_again(self) -> None:
        """Forget what the step that is under way has asked for. Its kernels may have run already,
        and may run once more, then for other experts."""
        ...


class Rest(Protocol):
    """Memory that a store can do without for a while."""

    def release(self) -> None:
        """Free the memory of experts until :meth:`restore` or the next call, which reads them
        again."""
        ...

    def restore(self) -> None:
        """Read again what :meth:`release` freed, if anything."""
        ...


class Spread(Protocol):
    """The ranks over which experts are spread; a call waits for all of them. See
    :class:`~mlx_moeflux.distributed.ranks.Ranks`."""

    @property
    def leads(self) -> bool:
        """True on rank 0."""
        ...

    def lead(self, values: mx.array) -> mx.array:
        """Return rank 0's `values`, which every rank has in the same shape."""
        ...

    def same(self, facts: Any) -> bool:
        """Return True if every rank gives the same `facts`, a JSON value."""
        ...

    def marks(self, after: mx.array) -> tuple[mx.array, ...]:
        """Return, at the end of a call of the model, what tells whether all ranks chose the same
        experts in it: an array, or none if no layer was called. A trace returns it. after: The
        output of the last layer."""
        ...

    def check(self, *marks: mx.array) -> None:
        """Begin to evaluate the :meth:`marks` of a call, and wait for the exchanges under way;
        inside :meth:`ahead` for those of earlier calls.

        Raises:
            DistributedError: The ranks have chosen different experts, or a collective failed.
        """
        ...

    def ahead(self) -> AbstractContextManager[None]:
        """Let a GPU compute a step after the block, while the host goes on."""
        ...

    def wait(self, most: int = 0) -> None:
        """Wait until at most so many exchanges are under way. Raises what :meth:`check` does."""
        ...


# Not a subclass of ABC: classes that mix in others would have another layout than their store.
class ExpertStore(metaclass=ABCMeta):
    """Computes the experts that the router chose. Replace it with ``load(store=...)``.

    A subclass sets `layers` and `num_experts`, and defines :meth:`experts`, :meth:`stats` and
    :meth:`close`; that is enough. What only some stores offer is an object, or None: `direct`,
    `steps`, `handshake`, `streaming`, `rest`, `ranks`. A subclass of a store of this package that
    has :meth:`experts` of its own has none of the first three: models call its :meth:`experts` for
    every token.

    num_experts: E, of each layer. layers: Ids of the MoE layers, ascending.
    looks_ahead: True to get ``ahead=``, ``[N, K]`` uint32, in :meth:`experts`: what the router of
        the next MoE layer would choose now, the likeliest first; E marks padding. It is None for
        the last layer and for long calls.
    training: Whether gradients are taken of calls; a model sets it in its own :meth:`train`.
    block_bytes: MoE layer id -> bytes of one expert, of a store that reports events; else None.
    direct, steps: Access to the banks for models that compute some calls themselves.
    handshake: Steps in which kernels wait for experts, if the next one may be such.
    streaming: The slots of a store that reads experts.
    rest: Memory that can be freed for a while.
    ranks: Those over which the experts are spread.

    Raises:
        InputError: When made: a method is missing.
    """

    num_experts: int
    layers: tuple[int, ...]
    looks_ahead: bool = False
    training: bool = False
    block_bytes: Mapping[int, int] | None = None
    direct: Direct | None = None
    steps: Steps | None = None
    handshake: Handshake | None = None
    streaming: Streaming | None = None
    rest: Rest | None = None
    ranks: Spread | None = None

    def __new__(cls, *_: Any, **__: Any):
        if missing := sorted(cls.__abstractmethods__):
            raise lacks(cls, missing[0])
        return super().__new__(cls)

    def computes_as(self, kind: type[ExpertStore]) -> bool:
        """Return True if calls run the :meth:`experts` of `kind`, and no subclass's own: only then
        may `direct` and `steps` of `kind` stand for them."""
        return type(self).experts is kind.experts

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

    @abstractmethod
    def experts(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """Return the weighted sum of each token's experts: sum over k of weights[n, k]
        expert(x[n]).

        Shapes:
            x: ``[N, C]``; ids: ``[N, K]`` uint32, ascending in each row; weights: ``[N, K]``
            float32. An id equal to E marks padding: no expert, and its weight is ignored.
            returns: ``[N, C]`` float32.
        """

    @abstractmethod
    def stats(self) -> ExpertStats:
        """Return the live statistics of this store."""

    @abstractmethod
    def close(self) -> None:
        """Free memory, files and threads; the store cannot be used afterwards."""


def lacks(kind: type[ExpertStore], member: str) -> InputError:
    """Return the error of a store without a member that every store has."""
    return InputError(f"{kind.__name__} has no '{member}'; see the ExpertStore class.")


def check_members(store: Any) -> None:
    """Look at the class of a given store, and at what it sets besides the methods that its class
    requires.

    Raises:
        InputError: It is no ExpertStore, or a class; `layers` or `num_experts` is missing.
    """
    if isinstance(store, type):
        raise InputError(f"the given store {store.__name__} is a class; pass an instance of it.")
    if not isinstance(store, ExpertStore):
        raise InputError(
            f"the given store is of class {type(store).__name__}; make its class a subclass of "
            "ExpertStore."
        )
    try:
        _ = store.layers, store.num_experts
    except AttributeError as error:
        raise lacks(type(store), error.name or "layers") from error


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
