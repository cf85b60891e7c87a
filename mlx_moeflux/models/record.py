"""Intermediate arrays of chosen layers; costs nothing while unused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import InputError

# Name -> axis of tokens. input: [B, T, C] entering the layer; h_mid: after mixer and residual;
# h_post: after the second norm; output: leaving the layer. Of the MoE block, with N = B * T:
# router_logits [N, E], ids and weights [N, K], shared_out [N, C], gate_score [N, 1].
AXES = {
    "input": 1,
    "h_mid": 1,
    "h_post": 1,
    "router_logits": 0,
    "ids": 0,
    "weights": 0,
    "shared_out": 0,
    "gate_score": 0,
    "output": 1,
}
# What is kept beside them: bool, False for padding, in the form [B, T] or [N] of the tokens of the
# arrays that are recorded; where both forms are, ROW_MASK is of those with N.
MASK, ROW_MASK = "mask", "row_mask"


class Recorder:
    """Lazy arrays of one layer, concatenated over its calls.

    The layer and its MLP hold it as `_recorder`, which is None outside :func:`record`.
    """

    def __init__(self, names: Iterable[str]):
        self._names, self._batch = frozenset(names), 0
        self.kept: dict[str, mx.array] = {}

    def begin(self, batch: int) -> None:
        """Begin a layer call; another batch size discards the calls before."""
        if batch != self._batch:
            self._batch = batch
            self.kept.clear()

    def wants(self, name: str) -> bool:
        """Return True if arrays of this name are recorded."""
        return name in self._names

    def note(self, **arrays: mx.array) -> None:
        """Append those of `arrays` that are recorded."""
        for name, array in arrays.items():
            if self.wants(name):
                self._append(name, array, AXES[name])

    def note_mask(self, mask: mx.array | None, shape: tuple[int, ...]) -> None:
        """Append which tokens of a call are real. mask: False for padding, None if there is none.
        shape: That of the tokens in the arrays, ``[B, T]`` or ``[N]``."""
        axes = {AXES[name] for name in self._names}
        if (axis := len(shape) - 1) in axes:
            real = mx.ones(shape, mx.bool_) if mask is None else mask.reshape(shape)
            self._append(MASK if axis == max(axes) else ROW_MASK, real, axis)

    def _append(self, name: str, array: mx.array, axis: int) -> None:
        before = [self.kept[name]] if name in self.kept else []
        self.kept[name] = mx.concatenate([*before, array], axis=axis)


@contextmanager
def record(
    layers: Sequence[Any | None],
    *,
    chosen: Iterable[int] | None = None,
    names: Iterable[str] | None = None,
) -> Iterator[dict[int, dict[str, mx.array]]]:
    """Record the calls of each chosen layer: ``{layer: {name: array}}``, arrays lazy, and of each
    the mask of padding, see :data:`MASK`.

    layers: None stands for one that is no :class:`DecoderLayer` and holds none.

    The calls of a generation are concatenated along the tokens; a call with another batch size
    begins anew.

    Raises:
        InputError: A layer or a name does not exist, or the layer is None.
    """
    chosen = list(range(len(layers))) if chosen is None else list(chosen)
    names = set(AXES if names is None else names)
    modules: dict[int, tuple[Any, Any]] = {}
    for layer in chosen:
        if not 0 <= layer < len(layers):
            raise InputError(f"layer {layer} does not exist; the model has {len(layers)}.")
        part = layers[layer]
        if part is None:
            raise InputError(
                f"layer {layer} was replaced by one that cannot be recorded; wrap it instead."
            )
        modules[layer] = (part, part.mlp)
    if names - set(AXES):
        raise InputError(
            f"nothing is recorded as '{sorted(names - set(AXES))[0]}'; there are {', '.join(AXES)}."
        )
    recorders = {layer: Recorder(names) for layer in chosen}
    try:
        for layer, recorder in recorders.items():
            for module in modules[layer]:
                module._recorder = recorder
        yield {layer: recorder.kept for layer, recorder in recorders.items()}
    finally:
        for module in (module for both in modules.values() for module in both):
            module._recorder = None
