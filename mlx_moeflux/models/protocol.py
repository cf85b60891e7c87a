"""Protocol of a model, as decode traces and state specs use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_moeflux.cache import SequenceState
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.state_arrays import EntrySpec


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
    kv_bits: int | None
    kv_group_size: int

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
    def router(self) -> Any: ...

    def parameters(self) -> dict[str, Any]: ...

    def make_cache(self) -> SequenceState: ...

    def entry_specs(self) -> tuple[EntrySpec, ...]: ...

    def embed(self, tokens: Sequence[mx.array]) -> list[mx.array]: ...

    def logits(self, h: mx.array) -> mx.array: ...


def named_parameters(model: HasParameters) -> list[tuple[str, mx.array]]:
    """Return the parameters with their dotted names, in no order."""
    return list(tree_flatten(model.parameters()))  # pyright: ignore[reportReturnType]  # of a tree
