"""Looking inside a forward pass: intermediate arrays of chosen layers, free when unused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.errors import InputError

# input: [B, T, C] entering the layer; h_mid: after attention and residual; h_post: after the
# second norm; router_logits [N, E], ids and weights [N, K] and shared_out [N, C], gate_score
# [N, 1] of the MoE block with N = B * T; output: [B, T, C] leaving the layer.
NAMES = (
    "input",
    "h_mid",
    "h_post",
    "router_logits",
    "ids",
    "weights",
    "shared_out",
    "gate_score",
    "output",
)


class Recorder:
    """Keeps arrays of one layer. It is the attribute `_recorder` of the modules that it listens to,
    which is None while nobody records."""

    def __init__(self, names: Iterable[str]):
        self._names, self.kept = frozenset(names), {}

    def wants(self, name: str) -> bool:
        """Whether to keep the array of this name."""
        return name in self._names

    def note(self, **arrays: mx.array) -> None:
        """Keep those of `arrays` that are wanted."""
        self.kept.update((name, array) for name, array in arrays.items() if self.wants(name))


@contextmanager
def record(
    layers: list[nn.Module],
    *,
    chosen: Iterable[int] | None = None,
    names: Iterable[str] | None = None,
) -> Iterator[dict[int, dict[str, mx.array]]]:
    """Record the last call of each chosen layer: ``{layer: {name: array}}``, arrays lazy.

    Raises:
        InputError: A layer or a name does not exist.
    """
    chosen = list(range(len(layers))) if chosen is None else list(chosen)
    names = set(NAMES if names is None else names)
    for layer in chosen:
        if not 0 <= layer < len(layers):
            raise InputError(f"layer {layer} does not exist; the model has {len(layers)}.")
    if names - set(NAMES):
        raise InputError(
            f"nothing is recorded as '{sorted(names - set(NAMES))[0]}'; there are "
            f"{', '.join(NAMES)}."
        )
    recorders = {layer: Recorder(names) for layer in chosen}
    modules = []
    for layer in chosen:
        for module in (layers[layer], layers[layer].mlp):
            module._recorder = recorders[layer]
            modules.append(module)
    try:
        yield {layer: recorder.kept for layer, recorder in recorders.items()}
    finally:
        for module in modules:
            module._recorder = None
