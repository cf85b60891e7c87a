"""Protocols of a model: as decode traces and state specs use it, and as the rooms above do."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_moeflux.cache import BaseCache, SequenceState, StateSpec
from mlx_moeflux.experts.budget import Plan
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.moe import Router
from mlx_moeflux.models.runtime import Runtime
from mlx_moeflux.models.states import States


class HasParameters(Protocol):
    """A module."""

    def parameters(self) -> dict[str, Any]: ...


class Decoder(Protocol):
    """A decoder: embedding, layers, logits. :class:`~mlx_moeflux.models.base.StreamingModel`
    documents the members."""

    config: Any
    model: Any
    identity: str
    experts_identity: Callable[[], str]
    compile_steps: bool | None
    runtime: Runtime
    states: States

    @property
    def training(self) -> bool: ...

    @property
    def layers(self) -> Sequence[Any]: ...

    @property
    def dtype(self) -> mx.Dtype: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def store(self) -> Any: ...

    @property
    def router(self) -> Router: ...

    def parameters(self) -> dict[str, Any]: ...

    def make_cache(self) -> SequenceState: ...

    def embed(self, tokens: Sequence[mx.array]) -> list[mx.array]: ...

    def logits(self, h: mx.array) -> mx.array: ...

    def head(self) -> list[Any]: ...


class LoadedModel(Decoder, Protocol):
    """A model with its experts, as generation and the server use it. See :class:`Decoder`."""

    drafting: Any

    @property
    def store(self) -> ExpertStore: ...

    @property
    def plan(self) -> Plan | None: ...

    @property
    def prediction(self) -> DraftHead | None: ...

    def __call__(
        self, tokens: mx.array, cache: list[BaseCache] | None = None, *, last_only: bool = False
    ) -> mx.array: ...

    def read_together(
        self, prompts: Sequence[mx.array], states: Sequence[Sequence[BaseCache]]
    ) -> mx.array: ...

    def read_in_pauses(
        self, tokens: Sequence[mx.array], states: Sequence[Sequence[BaseCache]]
    ) -> Generator[int | None, None, mx.array]: ...

    def read_rows(self, tokens: mx.array, cache: list[BaseCache]) -> mx.array: ...

    def context_left(self, cache: Sequence[BaseCache] | None = None) -> int: ...

    def state_spec(self) -> StateSpec: ...

    def state_bytes(self, positions: int) -> int: ...

    def activation_bytes(self, tokens: int) -> int: ...

    def release(self) -> None: ...


class DraftHead(Protocol):
    """A head of multi-token prediction, as drafts use it. See
    :class:`~mlx_moeflux.models.mtp.PredictionHead`."""

    def make_cache(self) -> SequenceState: ...

    def entering(self, hidden: mx.array) -> mx.array: ...

    def __call__(self, read: mx.array, tokens: mx.array, cache: SequenceState) -> mx.array: ...

    def logits(self, read: mx.array) -> mx.array: ...


def named_parameters(model: HasParameters) -> list[tuple[str, mx.array]]:
    """Return the parameters with their dotted names, in no order."""
    return list(tree_flatten(model.parameters()))  # pyright: ignore[reportReturnType]  # of a tree
