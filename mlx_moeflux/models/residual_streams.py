"""Several residual streams instead of one: what a mixer or MLP reads, and where its output goes.

    x <- x + inject f(read), read and inject as :mod:`~mlx_moeflux.kernels.streams.read_streams`
    computes them of x, S streams of C numbers

Source: transformers 5.24 `Qwen4ExpTextGatedResidual`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.cache import BaseCache
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.streams.read_streams import grouped_norm
from mlx_moeflux.models.layers import DecoderLayer, weights_of
from mlx_moeflux.models.modules import Linear, Module
from mlx_moeflux.models.rows import RowsEntry


class GroupedNorm(Module):
    """RMS norm of each of S groups of a row. Parameter ``weight [S C]``."""

    def __init__(self, groups: int, width: int, *, eps: float):
        super().__init__()
        self.weight = mx.ones((groups * width,))
        self._groups, self.eps = groups, eps

    def __call__(self, x: mx.array) -> mx.array:
        """Compute :func:`~mlx_moeflux.kernels.streams.read_streams.grouped_norm` of x."""
        return grouped_norm(x, self.weight, groups=self._groups, eps=self.eps)


class GatedResidual(Module):
    """Mix the streams into one input, see the module. injects: False at the end of the model."""

    reads: ClassVar[Mapping[str, type]] = {"hc_norm": GroupedNorm}

    def __init__(self, config: Any, kernels: Kernels, *, injects: bool = True):
        super().__init__()
        S, C = config.hc_count, config.hidden_size
        self._streams, self._kernels = S, kernels
        self.hc_norm = GroupedNorm(S, C, eps=config.rms_norm_eps)
        self.input_mix_weight_down = Linear(S * C, config.hc_lowrank, bias=False)
        self.input_mix_weight_up = Linear(config.hc_lowrank, S * C, bias=False)
        if injects:
            self.block_inject_weight = Linear(S * C, S, bias=False)

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`StreamingModel.prepare`."""
        inject = (self.block_inject_weight,) if "block_inject_weight" in self else ()
        return [(self.input_mix_weight_down, *inject)]

    def __call__(self, x: mx.array) -> tuple[mx.array, Any]:
        """x ``[B, T, S C]`` -> what is read ``[B, T, C]``, and the injection ``[B, T, S]`` or
        None."""
        norm, kernels = self.hc_norm, self._kernels
        return kernels.read_streams(
            x,
            weights_of(*self.stacks()[0]),
            weights_of(self.input_mix_weight_up)[0],
            norm=norm.weight,
            eps=norm.eps,
            streams=self._streams,
            steps=kernels,
        )


class StreamsLayer(DecoderLayer):
    """Layer of S residual streams: x ``[B, T, S C]`` -> ``[B, T, S C]``. Mixer and MLP are called
    without a norm and return their output alone.

    extra: Name and module of what is added to x before the mixer; it maps (x, cache entry) to the
    shape of x.
    """

    def __init__(
        self,
        config: Any,
        kernels: Kernels,
        *,
        mixer: tuple[str, nn.Module],
        mlp: nn.Module,
        extra: tuple[str, nn.Module] | None = None,
    ):
        self._kernels = kernels
        super().__init__(config, mixer=mixer, mlp=mlp)
        self._extra_name = None
        if extra is not None:
            self._extra_name, self[extra[0]] = extra

    def make_residuals(self, config: Any) -> None:
        """See :meth:`DecoderLayer.make_residuals`."""
        self.attn_hyper_connection = GatedResidual(config, self._kernels)
        self.mlp_hyper_connection = GatedResidual(config, self._kernels)

    def mix(self, x: mx.array, cache: BaseCache) -> mx.array:
        """See :meth:`DecoderLayer.mix`."""
        if self._extra_name is not None and isinstance(cache, RowsEntry):
            # What is added and the mixer share an entry, which counts a row after both.
            return cache.each(self._mixed, x)
        return self._mixed(cache, x)

    def _mixed(self, cache: Any, x: mx.array) -> mx.array:
        if self._extra_name is not None:
            x = x + self[self._extra_name](x, cache)
        read, inject = self.attn_hyper_connection(x)
        return _injected(x, self[self._mixer_name](read, cache, None), inject)

    def feed_forward(
        self, h: mx.array, mask: mx.array | None, parts: list[tuple[int, int]]
    ) -> mx.array:
        """See :meth:`DecoderLayer.feed_forward`."""
        mlp: Any = self.mlp
        read, inject = self.mlp_hyper_connection(h)
        return _injected(h, mlp(read, None, mask), inject)

    def begin_experts(self, h: mx.array) -> Any:
        """See :meth:`DecoderLayer.begin_experts`."""
        mlp: Any = self.mlp
        read, inject = self.mlp_hyper_connection(h)
        begun = mlp.prepare(read, None)
        return begun._replace(shared=(*begun.shared, inject))

    def end_experts(self, h: mx.array, experts: mx.array, shared: tuple[mx.array, ...]) -> mx.array:
        """See :meth:`DecoderLayer.end_experts`."""
        mlp: Any = self.mlp
        *shared_expert, inject = shared
        none = mx.zeros((*h.shape[:-1], experts.shape[-1]), h.dtype)
        return _injected(h, mlp.combine(none, experts, tuple(shared_expert)), inject)

    def halves(self) -> list[tuple[nn.Module, ...]]:
        """See :meth:`DecoderLayer.halves`."""
        extra = () if self._extra_name is None else (self[self._extra_name],)
        first = self[self._mixer_name], self.attn_hyper_connection, *extra
        return [first, (self.mlp, self.mlp_hyper_connection)]


def _injected(x: mx.array, y: mx.array, inject: mx.array) -> mx.array:
    """Add y ``[B, T, C]`` to the streams x ``[B, T, S C]`` by factors ``[B, T, S]``."""
    return x + (y[..., None, :] * inject[..., None]).reshape(x.shape)
