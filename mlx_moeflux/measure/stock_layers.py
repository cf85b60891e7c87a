"""mlx-lm's own model of a checkpoint, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.errors import CheckpointError, UnsupportedError
from mlx_moeflux.installation import install_command
from mlx_moeflux.measure.profile.instrument import uncompiled

# Matrix of latent attention that mlx-lm cuts in two and quantises anew.
REQUANTISED = ".kv_b_proj"


def check_installed() -> None:
    """Raise UnsupportedError unless mlx-lm is installed."""
    try:
        import mlx_lm  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"mlx-lm is not installed here; install it with {install_command('mlx-lm')}."
        ) from error


@dataclass
class _Call:
    """Tells the layers what to do in one call of the model, and keeps what they note.

    active: The layer that computes; None: none does. hidden: What it is given; every other layer
    returns it as it is. first: What the first layer was given. found: What the active layer
    returned. chosen: The ids of its experts, ``[..., K]``.
    """

    active: int | None = None
    hidden: mx.array | None = None
    first: mx.array | None = None
    found: mx.array | None = None
    chosen: list[mx.array] = field(default_factory=list)


class StockLayers:
    """Embedding, layers and head of mlx-lm's model of a checkpoint.

    mlx-lm's own forward pass runs, with its masks and caches. One layer computes, and the others
    return what they are given, so that MLX reads the weights of this one alone. The object holds
    every weight that was read until :meth:`forget`.

    exact: Compute in float32 on the CPU, where MLX runs no kernel of a GPU and no product in TF32.
    Quantised matrices keep their numbers; those that mlx-lm quantises anew are decoded instead.

    Raises:
        UnsupportedError: mlx-lm is not installed. CheckpointError: It cannot load this one.
    """

    def __init__(self, directory: Path, *, exact: bool = False):
        self._directory, self._exact = directory, exact
        self.forget()

    def forget(self) -> None:
        """Open the checkpoint anew, and free what was read of it."""
        self._model: Any = None
        mx.clear_cache()
        self._call = _Call()
        self._model = _opened(self._directory, exact=self._exact)
        self.count = len(self._model.layers)
        for index, layer in enumerate(self._model.layers):
            _watch(layer, index, lambda: self._call)

    def embed(self, ids: mx.array) -> mx.array:
        """Return what the first layer is given of ids ``[1, T]``: ``[1, T, C]``."""
        call, _ = self._run(_Call(), ids)
        mx.eval(call.first)
        assert call.first is not None
        return call.first

    def layer(
        self, index: int, ids: Sequence[mx.array], parts: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array | None]:
        """Run the parts ``[1, n, C]`` of a sequence through a layer, one after another. Return its
        outputs ``[1, T, C]``, and the ids ``[T, K]`` of each token's experts, ascending, or None.

        ids: Of the tokens of each part, ``[1, n]``.
        """
        from mlx_lm.models.cache import make_prompt_cache

        caches = make_prompt_cache(self._model)
        own, found, chosen = caches[index], [], []
        # mlx-lm makes the mask of a kind of layers from the cache of the first of them.
        caches = [own if _alike(each, own) else each for each in caches]
        for tokens, part in zip(ids, parts, strict=True):
            call, _ = self._run(_Call(index, part), tokens, cache=caches)
            mx.eval(call.found, call.chosen)
            found.append(call.found)
            chosen += [mx.sort(each.reshape(-1, each.shape[-1])) for each in call.chosen]
        return mx.concatenate(found, axis=1), mx.concatenate(chosen) if chosen else None

    def logits(self, ids: Sequence[mx.array], parts: Sequence[mx.array]) -> mx.array:
        """Return the logits ``[1, T, V]`` of parts ``[1, n, C]`` of the last layer's output.

        ids: See :meth:`layer`.
        """
        found = []
        for tokens, part in zip(ids, parts, strict=True):
            found.append(self._run(_Call(None, part), tokens)[1])
            mx.eval(found[-1])
        return mx.concatenate(found, axis=1)

    def _run(self, call: _Call, ids: mx.array, **options: Any) -> tuple[_Call, mx.array]:
        """Call the model with `call`; return both. Nothing is evaluated."""
        self._call = call
        with _on_the_cpu() if self._exact else nullcontext():
            return call, self._model(ids, **options)


def _opened(directory: Path, *, exact: bool) -> Any:
    """Return mlx-lm's model, whose weights are read when they are used."""
    check_installed()
    from mlx_lm import utils

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        kind, arguments = utils._get_classes(config)
        return (_decoding(kind, config) if exact else kind), arguments

    try:
        with _on_the_cpu() if exact else nullcontext():
            model, _ = utils.load_model(directory, lazy=True, get_model_classes=classes)
            if exact:
                model.set_dtype(mx.float32)
            return model
    # Of configs that lack its keys, of weights that it does not know, of damaged files.
    except (AttributeError, TypeError, ValueError, KeyError, RuntimeError, OSError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(f"{directory}: mlx-lm cannot load this ({what}).") from error


def _decoding(kind: Any, config: Mapping[str, Any]) -> Any:
    """Return a class of model that decodes :data:`REQUANTISED` before mlx-lm cuts it."""
    width = config.get("text_config", config).get("kv_lora_rank")
    if width is None:
        return kind

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        for name in [n for n in weights if n.endswith(f"{REQUANTISED}.scales")]:
            path = name.removesuffix(".scales")
            weight, scales = weights[f"{path}.weight"], weights.pop(name).astype(mx.float32)
            weights[f"{path}.weight"] = mx.dequantize(
                weight,
                scales,
                weights.pop(f"{path}.biases").astype(mx.float32),
                group_size=width // scales.shape[-1],
                bits=32 * weight.shape[-1] // width,
            )
        return kind.sanitize(self, weights)

    return type(kind.__name__, (kind,), {"sanitize": sanitize})


def _watch(layer: nn.Module, index: int, now: Callable[[], _Call]) -> None:
    """Let a layer and its experts do what :class:`_Call` says."""
    from mlx_lm.models.switch_layers import SwitchGLU

    kind: Any = type(layer)
    rest: list[int] = []

    def run(self: Any, x: mx.array, *arguments: Any, **options: Any) -> Any:
        call = now()
        call.first = x if call.first is None else call.first
        hidden = x if call.hidden is None else call.hidden
        if call.active != index:
            if not rest:  # some layers return a tuple; what is built here is never computed
                built = kind.__call__(self, hidden[:, :1], None, None)
                rest.append(len(built) - 1 if isinstance(built, tuple) else -1)
            return hidden if rest[0] < 0 else (hidden, *[None] * rest[0])
        found = kind.__call__(self, hidden, *arguments, **options)
        call.found = found[0] if isinstance(found, tuple) else found
        return found

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": run})
    for part in layer.modules():
        if isinstance(part, SwitchGLU):
            part.__class__ = _noting(type(part), index, now)


def _noting(kind: Any, index: int, now: Callable[[], _Call]) -> type:
    def run(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        if now().active == index:
            now().chosen.append(indices)
        return kind.__call__(self, x, indices)

    return type(kind.__name__, (kind,), {"__call__": run})


def _alike(entry: Any, other: Any) -> bool:
    """Return True if two entries of a cache are of one kind of layer."""
    sizes = [getattr(each, "max_size", None) for each in (entry, other)]
    return type(entry) is type(other) and sizes[0] == sizes[1]


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Build operations for the CPU; for those of ``mx.compile`` it would need a C++ compiler."""
    with uncompiled(), mx.stream(mx.cpu):
        yield
