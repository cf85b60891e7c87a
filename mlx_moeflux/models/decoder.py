"""What all decoders share: a layer of mixer and MLP, and the way from ids to logits."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.cache import BaseCache, SequenceState, transaction
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, NameRules, Transform
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import InputError
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.runtime import metal
from mlx_moeflux.models.base import StreamingModel
from mlx_moeflux.models.compiled import CompiledStep, SegmentedStep
from mlx_moeflux.models.layers import DenseMlp, weights_of
from mlx_moeflux.models.moe import Router, SoftmaxRouter, SparseMoeBlock
from mlx_moeflux.models.record import Recorder

# Layers of a prompt that a GPU begins at once: enough for an evaluation not to matter. Where what
# lies between two layers has so many numbers (1024 tokens of 7168), it begins each, and the host is
# two layers ahead at most: what it lays out holds memory.
LAYERS_AHEAD, MANY_NUMBERS = 4, 7 << 20


class DecoderLayer(nn.Module):
    """Mixer, then MLP or MoE block, each behind a norm and with a residual.

    mixer: Its name in the checkpoint (``self_attn``, ``linear_attn``) and the module, which maps
    (x ``[B, T, C]``, cache entry, norm) to ``[B, T, C]``: x itself plus what comes of norm(x).
    """

    _recorder: Recorder | None = None

    def __init__(
        self,
        config: Any,
        *,
        mixer: tuple[str, nn.Module],
        mlp: DenseMlp | SparseMoeBlock,
    ):
        super().__init__()
        self._mixer_name, module = mixer
        self[self._mixer_name] = module
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = mlp

    def __call__(self, x: mx.array, cache: BaseCache, *, chunk: int) -> mx.array:
        """x ``[B, T, C]`` -> ``[B, T, C]``. The mixer and a dense MLP take `chunk` tokens at a
        time, so that their scratch is bounded; a MoE block takes all, so that every expert is
        read once."""
        T, mlp, norm = x.shape[1], self.mlp, self.post_attention_layernorm
        mask = cache.real_tokens(T)
        parts = None if T == 1 else cache.parts(T, chunk)
        h = self.mix(x, cache, chunk=chunk)
        if isinstance(mlp, SparseMoeBlock):
            out = mlp(h, norm, mask)
        else:
            if parts is None:
                out = mlp(h, norm)
            else:
                out = _chunked(lambda part: mlp(part, norm), h, parts)
            if self._recorder is not None and self._recorder.wants("h_post"):
                self._recorder.note(h_post=norm(h))
        if self._recorder is not None:
            self._recorder.note(input=x, h_mid=h, output=out)
        return out

    def halves(self) -> list[tuple[nn.Module, ...]]:
        """Modules whose parameters are read by the same launches."""
        first = self[self._mixer_name], self.input_layernorm
        return [first, (self.mlp, self.post_attention_layernorm)]

    def together(
        self, xs: Sequence[mx.array], caches: Sequence[BaseCache], *, chunk: int
    ) -> list[mx.array]:
        """Several sequences, x ``[1, T, C]`` each with its own T: one after the other through the
        mixer, all at once through the MLP or MoE block."""
        mixed = [self.mix(x, cache, chunk=chunk) for x, cache in zip(xs, caches, strict=True)]
        h, norm = mx.concatenate(mixed, axis=1), self.post_attention_layernorm
        if isinstance(self.mlp, SparseMoeBlock):
            out = self.mlp(h, norm)
        else:
            parts = BaseCache().parts(h.shape[1], chunk)
            out = _chunked(lambda part: self.mlp(part, norm), h, parts)
        return mx.split(out, list(accumulate(x.shape[1] for x in xs))[:-1], axis=1)

    def mix(self, x: mx.array, cache: BaseCache, *, chunk: int) -> mx.array:
        """The first half: x ``[B, T, C]`` behind the mixer and its residual."""
        mixer, norm, T = self[self._mixer_name], self.input_layernorm, x.shape[1]
        if T == 1:  # the entry may be a trace's stand-in, which has no parts
            return mixer(x, cache, norm)
        return _chunked(lambda part: mixer(part, cache, norm), x, cache.parts(T, chunk))


def _chunked(function, x: mx.array, parts: list[tuple[int, int]]) -> mx.array:
    """`function` of x ``[B, T, C]``, one part after the other. Several are evaluated: a GPU works
    on one while the next is laid out, a CPU does both itself."""
    results, ahead = [], int(_on_gpu())
    for start, stop in parts:
        results.append(function(x[:, start:stop]))
        if len(parts) > 1:
            metal.settle()
            mx.async_eval(results[-1])
            mx.eval(results[-1 - ahead : len(results) - ahead])
    return results[0] if len(results) == 1 else mx.concatenate(results, axis=1)


def _begin(h: mx.array, before: mx.array | None = None) -> None:
    """Let a GPU work on `h` while the host lays out what follows, once `before` is there."""
    if _on_gpu():
        metal.settle()
        with contextlib.suppress(ValueError):  # inside a graph transformation
            mx.async_eval(h)
            if before is not None:
                mx.eval(before)


def _on_gpu() -> bool:
    return mx.default_device().type == mx.gpu


class TextModel(nn.Module):
    """Embedding, layers, final norm: the parameters under ``model.`` of a checkpoint."""

    def __init__(self, config: Any, layers: Iterable[DecoderLayer]):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = list(layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DecoderModel(StreamingModel):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``.

    A subclass is one architecture: it names its ``Config`` and defines
    ``make_layer``, ``make_cache`` and ``activation_bytes``.
    """

    Config: ClassVar[type]
    MODEL_TYPE: ClassVar[str]
    MLX_LM_PREFIX: ClassVar[str] = ""
    """Before every name in the layout that mlx-lm loads."""

    def __init__(
        self, config: Any, *, router: Router | None = None, kernels: Kernels | None = None
    ):
        super().__init__()
        self.config, self.model_type = config, self.MODEL_TYPE
        self._kernels = kernels or Kernels()
        # A new module is in training mode.
        self._kernels.references_only(self.training)
        self._router = router or self.make_router(config, self._kernels)
        self._step, self._segments = CompiledStep(self._forward), SegmentedStep(self)
        layers = (self.make_layer(layer) for layer in range(config.num_hidden_layers))
        self.model = TextModel(config, layers)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def layers(self) -> list[DecoderLayer]:
        """All layers, dense or sparse."""
        return self.model.layers

    @classmethod
    def make_router(
        cls, config: Any, kernels: Kernels, *, experts_per_token: int | None = None
    ) -> Router:
        """The architecture's own router, of fewer experts per token if told so."""
        k = experts_per_token or config.num_experts_per_tok
        return SoftmaxRouter(k, config.norm_topk_prob, kernels)

    @classmethod
    def name_rules(cls, config: Any) -> NameRules:
        """The table of tensor names of a checkpoint with this config."""
        return NameRules(experts=EXPERT_NAMES)

    @classmethod
    def mlx_lm_keys(cls, config: Any) -> dict[str, Any]:
        """Keys of config.json that mlx-lm wants and newer spellings may lack."""
        return {}

    def make_layer(self, layer: int) -> DecoderLayer:
        """Layer number `layer`, of ``self.config``, ``self._router`` and ``self._kernels``."""
        raise NotImplementedError

    def make_cache(self) -> SequenceState:
        """One empty state per layer."""
        raise NotImplementedError

    def fit_names(self, names: Iterable[str]) -> None:
        """Choose between forms of a module by the parameters that a checkpoint has."""

    def __call__(
        self,
        tokens: mx.array,
        cache: list[BaseCache] | None = None,
        *,
        last_only: bool = False,
    ) -> mx.array:
        """tokens ``[B, T]`` ints -> logits; `last_only` computes the last position's alone.

        A call that raises leaves `cache` as it was before.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise InputError(f"tokens have shape {list(tokens.shape)}, expected [B, T] with T > 0.")
        cache = self.make_cache() if cache is None else cache
        # As samplers give ids: one look-up of rows for prompts and replies.
        tokens = tokens.astype(mx.uint32)
        one = tokens.shape[1] == 1 and self._can_compile() and self._step.fits(cache)
        if one and not self.store.stays_on_device:
            if self._can_cut(tokens.shape[0]):
                return self._segments(tokens, cache)
        elif one:
            return self._whole_step(tokens, cache)
        with transaction(cache):
            return self._forward(tokens, cache, last_only=last_only)

    def read_together(
        self, prompts: Sequence[mx.array], states: Sequence[Sequence[BaseCache]]
    ) -> mx.array:
        """Tokens ``[T]`` of several sequences, each with its own T, behind their own states -> the
        logits after the last of each, ``[B, V]``. Without padding: mixers take the sequences one
        by one, and every expert is read at most once for all of them.

        A call that raises leaves all states as they were.
        """
        with ExitStack() as transactions:
            for state in states:
                transactions.enter_context(transaction(state))
            with metal.gathered():
                hidden = [self.model.embed_tokens(t.astype(mx.uint32)[None]) for t in prompts]
                for layer, *entries in zip(self.model.layers, *states, strict=True):
                    hidden = layer.together(hidden, entries, chunk=self.prefill_chunk)
                return self.logits(mx.concatenate([h[:, -1:] for h in hidden], axis=1))[0]

    def _forward(
        self, tokens: mx.array, cache: Sequence[Any], *, last_only: bool = False
    ) -> mx.array:
        with metal.gathered():
            h, begun = self.model.embed_tokens(tokens), deque()
            for i, (layer, entry) in enumerate(zip(self.model.layers, cache, strict=True), 1):
                h = layer(h, entry, chunk=self.prefill_chunk)
                many = h.size >= MANY_NUMBERS
                if last_only and h.shape[1] > 1 and (many or i % LAYERS_AHEAD == 0):
                    begun.append(h)
                    before = begun.popleft() if len(begun) > 2 else None
                    _begin(h, before if many else None)
            return self.logits(h[:, -1:] if last_only else h)

    def _whole_step(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """A step as one trace."""
        traces = self._step.traces
        logits = self._step(tokens, cache)
        if self._step.traces == traces:
            self.store.count(tokens.shape[0])  # the store itself was not asked
        return logits

    def logits(self, h: mx.array) -> mx.array:
        """What the last layer gave, ``[B, T, C]`` -> ``[B, T, V]``."""
        tied = self.config.tie_word_embeddings
        head = self.model.embed_tokens if tied else self.lm_head
        norm = self.model.norm
        return self._kernels.project(h, weights_of(head), norm=norm.weight, eps=norm.eps)[0]

    @staticmethod
    def transforms(trunk: dict[str, TensorRef]) -> dict[str, Transform]:
        """What to do to trunk tensors once read, by canonical name."""
        return {}

    @staticmethod
    def keeps_float32(name: str) -> bool:
        """Parameters that stay in float32 whatever the compute dtype is."""
        return False
