"""Decoder shared by all architectures: layer of mixer and MLP, and ids -> logits."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_moeflux.cache import BaseCache, SequenceState, transaction
from mlx_moeflux.checkpoint.names import Transform
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import InputError
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.runtime import metal
from mlx_moeflux.models.base import StreamingModel
from mlx_moeflux.models.compiled import CompiledStep, SegmentedStep
from mlx_moeflux.models.layers import DenseMlp, weights_of
from mlx_moeflux.models.moe import Router, SoftmaxRouter, SparseMoeBlock
from mlx_moeflux.models.record import Recorder

# A prompt's graph is submitted every LAYERS_AHEAD layers, so that the GPU computes while the host
# builds the rest. A hidden state of MANY_NUMBERS elements or more is submitted after each layer,
# and the host stays at most two layers ahead, since pending graphs hold memory.
LAYERS_AHEAD, MANY_NUMBERS = 4, 7 << 20


class DecoderLayer(nn.Module):
    """One layer: mixer, then MLP or MoE block, each after a norm and with a residual.

    mixer: Name in the checkpoint (``self_attn``, ``linear_attn``) and module; the module maps
    (x ``[B, T, C]``, cache entry, norm) to x + mixer(norm(x)) ``[B, T, C]``.
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
        """Map x ``[B, T, C]`` to ``[B, T, C]``.

        The mixer and a dense MLP take `chunk` tokens at a time, which bounds their scratch. A MoE
        block takes all tokens, so that every expert is read once.
        """
        T = x.shape[1]
        if self._recorder is not None:
            self._recorder.begin(x.shape[0])
        mask = cache.real_tokens(T)
        parts = None if T == 1 else cache.parts(T, chunk)
        return self._feed(x, self.mix(x, cache, chunk=chunk), mask, parts)

    def in_pauses(
        self, x: mx.array, cache: BaseCache, *, chunk: int
    ) -> Generator[None, None, mx.array]:
        """Do what a call does, and yield between the parts of the mixer."""
        T = x.shape[1]
        if self._recorder is not None:
            self._recorder.begin(x.shape[0])
        mask, parts = cache.real_tokens(T), cache.parts(T, chunk)
        h = yield from self.mix_in_pauses(x, cache, chunk=chunk)
        with metal.gathered():
            return self._feed(x, h, mask, parts)

    def _feed(
        self, x: mx.array, h: mx.array, mask: mx.array | None, parts: list[tuple[int, int]] | None
    ) -> mx.array:
        """Apply the second half to h ``[B, T, C]``, the mixer's output of x."""
        mlp, norm = self.mlp, self.post_attention_layernorm
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
        """Return groups of modules whose parameters the same launches read."""
        first = self[self._mixer_name], self.input_layernorm
        return [first, (self.mlp, self.post_attention_layernorm)]

    def together(
        self, xs: Sequence[mx.array], caches: Sequence[BaseCache], *, chunk: int
    ) -> list[mx.array]:
        """Map several sequences, x ``[1, T, C]`` each with its own T. The mixer takes them one by
        one, the MLP or MoE block takes them concatenated."""
        mixed = [self.mix(x, cache, chunk=chunk) for x, cache in zip(xs, caches, strict=True)]
        return self.feed_together(mixed, chunk=chunk)

    def feed_together(self, mixed: list[mx.array], *, chunk: int) -> list[mx.array]:
        """Apply the second half to the mixer's outputs of several sequences, concatenated."""
        h, norm = mx.concatenate(mixed, axis=1), self.post_attention_layernorm
        if isinstance(self.mlp, SparseMoeBlock):
            out = self.mlp(h, norm)
        else:
            parts = BaseCache().parts(h.shape[1], chunk)
            out = _chunked(lambda part: self.mlp(part, norm), h, parts)
        return list(mx.split(out, list(accumulate(m.shape[1] for m in mixed))[:-1], axis=1))

    def mix(self, x: mx.array, cache: BaseCache, *, chunk: int) -> mx.array:
        """Apply the first half, mixer and residual, to x ``[B, T, C]``."""
        mixer, norm, T = self[self._mixer_name], self.input_layernorm, x.shape[1]
        if T == 1:  # a traced stand-in of an entry has no parts
            return mixer(x, cache, norm)
        return _chunked(lambda part: mixer(part, cache, norm), x, cache.parts(T, chunk))

    def mix_in_pauses(
        self, x: mx.array, cache: BaseCache, *, chunk: int
    ) -> Generator[None, None, mx.array]:
        """Do what :meth:`mix` does, and yield between the parts."""
        mixer, norm, results = self[self._mixer_name], self.input_layernorm, []
        for start, stop in cache.parts(x.shape[1], chunk):
            if results:
                mx.async_eval(results[-1], cache.state)
                # On a GPU one part computes during a pause.
                mx.eval(results[-2:-1])
                yield
            with metal.gathered():
                results.append(mixer(x[:, start:stop], cache, norm))
        return results[0] if len(results) == 1 else mx.concatenate(results, axis=1)


def _chunked(function, x: mx.array, parts: list[tuple[int, int]]) -> mx.array:
    """Apply `function` to x ``[B, T, C]`` part by part.

    Several parts are evaluated one by one; on a GPU the next part's graph is built meanwhile.
    """
    results, ahead = [], int(_on_gpu())
    for start, stop in parts:
        results.append(function(x[:, start:stop]))
        if len(parts) > 1:
            metal.settle()
            mx.async_eval(results[-1])
            mx.eval(results[-1 - ahead : len(results) - ahead])
    return results[0] if len(results) == 1 else mx.concatenate(results, axis=1)


def _begin(h: mx.array, before: mx.array | None = None) -> None:
    """Submit `h` to a GPU without waiting, then wait for `before`."""
    if _on_gpu():
        metal.settle()
        with contextlib.suppress(ValueError):  # a graph transformation refuses evaluation
            mx.async_eval(h)
            if before is not None:
                mx.eval(before)


def _on_gpu() -> bool:
    return mx.default_device().type == mx.gpu


class TextModel(nn.Module):
    """Embedding, layers and final norm: the parameters under ``model.`` of a checkpoint."""

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
    """Prefix of every tensor name in the layout that mlx-lm loads."""

    def __init__(
        self, config: Any, *, router: Router | None = None, kernels: Kernels | None = None
    ):
        super().__init__()
        self.config, self.model_type = config, self.MODEL_TYPE
        self._kernels = kernels or Kernels()
        self._kernels.references_only(self.training)  # a new module is in training mode
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
        """Return the architecture's router; `experts_per_token` overrides the config's number."""
        k = experts_per_token or config.num_experts_per_tok
        return SoftmaxRouter(k, config.norm_topk_prob, kernels)

    @classmethod
    def mlx_lm_name(cls, name: str) -> str:
        """Return the name of parameter or module `name` in the layout that mlx-lm loads."""
        return cls.MLX_LM_PREFIX + name

    @classmethod
    def mlx_lm_keys(cls, config: Any) -> dict[str, Any]:
        """Return keys of config.json that mlx-lm needs and newer spellings may lack."""
        return {}

    def make_layer(self, layer: int) -> DecoderLayer:
        """Build layer number `layer`."""
        raise NotImplementedError

    def make_cache(self) -> SequenceState:
        """Return an empty state: one entry per layer."""
        raise NotImplementedError

    def fit_names(self, names: Iterable[str]) -> None:
        """Replace modules whose parameters have other names in this checkpoint."""

    def __call__(
        self,
        tokens: mx.array,
        cache: list[BaseCache] | None = None,
        *,
        last_only: bool = False,
    ) -> mx.array:
        """Return logits of tokens ``[B, T]`` ints; of the last position alone if `last_only`.

        A call that raises leaves `cache` as it was before.

        Raises:
            InputError: Shape or dtype is wrong, or an id is outside the vocabulary. Ids of one
                token with a cache are not checked: reading them would make decode wait.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise InputError(f"tokens have shape {list(tokens.shape)}, expected [B, T] with T > 0.")
        if not mx.issubdtype(tokens.dtype, mx.integer):
            raise InputError(f"tokens are {tokens.dtype}; give integer ids.")
        if cache is None or tokens.shape[1] > 1:
            self._check_ids(tokens)
        cache = self.make_cache() if cache is None else cache
        tokens = tokens.astype(mx.uint32)  # as samplers return ids: one embedding lookup kernel
        one = tokens.shape[1] == 1 and self._can_compile() and self._step.fits(cache)
        if one and not self.store.stays_on_device:
            if self._can_segment(tokens.shape[0]):
                return self._segments(tokens, cache)
        elif one:
            return self._whole_step(tokens, cache)
        with transaction(cache):
            return self._forward(tokens, cache, last_only=last_only)

    def _check_ids(self, tokens: mx.array) -> None:
        try:
            mx.eval(tokens)
        except ValueError:  # a graph transformation refuses evaluation
            return
        ids, V = np.array(tokens), self.config.vocab_size
        wrong = ids[(ids < 0) | (ids >= V)]
        if wrong.size:
            raise InputError(f"token id {wrong[0]} is outside the vocabulary; give 0 to {V - 1}.")

    def read_together(
        self, prompts: Sequence[mx.array], states: Sequence[Sequence[BaseCache]]
    ) -> mx.array:
        """Return the logits ``[B, V]`` after the last token of each prompt ``[T]``, each with its
        own T and state. There is no padding: mixers take the sequences one by one, and every
        expert is read at most once for all of them.

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

    def read_in_pauses(
        self, tokens: Sequence[mx.array], states: Sequence[Sequence[BaseCache]]
    ) -> Generator[int | None, None, mx.array]:
        """Read tokens like :meth:`read_together`, and yield between layers and between parts of
        their mixers, where other calls of the model may run. Each of `tokens` is ``[B, T]``,
        several have B = 1. Return the last logits ``[B, V]``.

        Yields: The number of layers that are done, or None between parts of a layer.

        A generator that raises or is closed before its end leaves all states as they were.

        Evaluates: what came before the last pause. At the end: everything.
        """
        with ExitStack() as transactions:
            for state in states:
                transactions.enter_context(transaction(state))
            for rows in tokens:
                self._check_ids(rows)
            hidden = [self.model.embed_tokens(rows.astype(mx.uint32)) for rows in tokens]
            many = sum(h.size for h in hidden) >= MANY_NUMBERS
            group = LAYERS_AHEAD if self.store.stays_on_device and not many else 1
            before, unsent, chunk = [], [], self.prefill_chunk
            for i, (layer, *entries) in enumerate(zip(self.model.layers, *states, strict=True), 1):
                if len(hidden) == 1:
                    hidden = [(yield from layer.in_pauses(hidden[0], entries[0], chunk=chunk))]
                else:
                    mixed = []
                    for x, entry in zip(hidden, entries, strict=True):
                        mixed.append((yield from layer.mix_in_pauses(x, entry, chunk=chunk)))
                    with metal.gathered():
                        hidden = layer.feed_together(mixed, chunk=chunk)
                unsent += entries
                if i % group == 0:
                    # A GPU works on this group while the host builds the next.
                    mx.async_eval(hidden, [entry.state for entry in unsent])
                    self.start_eval()
                    mx.eval(before)
                    before, unsent = hidden, []
                    yield i
            with metal.gathered():
                if len(hidden) == 1:
                    logits = self.logits(hidden[0][:, -1:])[:, 0]
                else:
                    logits = self.logits(mx.concatenate([h[:, -1:] for h in hidden], axis=1))[0]
            mx.eval(logits, [entry.state for state in states for entry in state])
            self.start_eval()
            return logits

    def _forward(
        self, tokens: mx.array, cache: Sequence[Any], *, last_only: bool = False
    ) -> mx.array:
        with metal.gathered():
            h, submitted = self.model.embed_tokens(tokens), deque()
            for i, (layer, entry) in enumerate(zip(self.model.layers, cache, strict=True), 1):
                h = layer(h, entry, chunk=self.prefill_chunk)
                many = h.size >= MANY_NUMBERS
                if last_only and h.shape[1] > 1 and (many or i % LAYERS_AHEAD == 0):
                    submitted.append(h)
                    before = submitted.popleft() if len(submitted) > 2 else None
                    _begin(h, before if many else None)
            return self.logits(h[:, -1:] if last_only else h)

    def _whole_step(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Run a step as one trace."""
        traces = self._step.traces
        logits = self._step(tokens, cache)
        if self._step.traces == traces:
            self.store.count(tokens.shape[0])  # a replayed trace does not call the store
        return logits

    def logits(self, h: mx.array) -> mx.array:
        """Return logits ``[B, T, V]`` of the last layer's output ``[B, T, C]``."""
        tied = self.config.tie_word_embeddings
        head = self.model.embed_tokens if tied else self.lm_head
        norm = self.model.norm
        return self._kernels.project(h, weights_of(head), norm=norm.weight, eps=norm.eps)[0]

    @staticmethod
    def transforms(trunk: dict[str, TensorRef]) -> dict[str, Transform]:
        """Return the functions to apply to trunk tensors after reading, by canonical name."""
        return {}

    @staticmethod
    def keeps_float32(name: str) -> bool:
        """Return True if the parameter stays in float32 in every compute dtype."""
        return False
