"""Decoder shared by all architectures: ids -> logits."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache import MOST_ROWS, BaseCache, transaction
from mlx_moeflux.cache.rows import begin_rows, check_rows
from mlx_moeflux.checkpoint.names import Transform
from mlx_moeflux.checkpoint.tables import Shard
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.telemetry.trace import Rows
from mlx_moeflux.kernels.linear.weight import Weight, multiplied
from mlx_moeflux.kernels.nested import describe
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.rows import together
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.base import StreamingModel
from mlx_moeflux.models.compiled import Outputs
from mlx_moeflux.models.layers import (
    Applied,
    DecoderLayer,
    Pause,
    project_normed,
    run,
    weights_of,
)
from mlx_moeflux.models.modules import Embedding, Linear, Module, RMSNorm
from mlx_moeflux.models.moe import Router, SoftmaxRouter, SparseMoeBlock
from mlx_moeflux.models.mtp import PredictionHead
from mlx_moeflux.models.rows import as_rows
from mlx_moeflux.models.steps import Steps

# A prompt's graph is submitted every LAYERS_AHEAD layers, so that the GPU computes while the host
# builds the rest. A hidden state of MANY_NUMBERS elements or more is submitted after each layer,
# and the host stays at most two layers ahead, since pending graphs hold memory.
LAYERS_AHEAD, MANY_NUMBERS = 4, 7 << 20


def _begin(begun: deque[mx.array], pause: Pause) -> None:
    """Submit a layer's output to a GPU without waiting, if enough was built since the last. If it
    is large, wait for the one before the last. begun: The last two that were submitted."""
    (h,) = pause.outputs
    many = h.size >= MANY_NUMBERS
    if device.kind() != "cpu" and (many or pause.layers % LAYERS_AHEAD == 0):
        begun.append(h)
        before = begun.popleft() if len(begun) > 2 else None
        device.settle()
        with contextlib.suppress(ValueError):  # a graph transformation refuses evaluation
            mx.async_eval(h)
            if many and before is not None:
                mx.eval(before)


def _check_shape(tokens: Any) -> None:
    """Raise InputError unless `tokens` are ids ``[B, T]``."""
    if not isinstance(tokens, mx.array):
        raise InputError(f"tokens are {describe(tokens)}; give an array of ids [B, T].")
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise InputError(f"tokens have shape {list(tokens.shape)}, expected [B, T] with T > 0.")
    if not mx.issubdtype(tokens.dtype, mx.integer):
        raise InputError(f"tokens are {tokens.dtype}; give integer ids.")


def _is_plain(layer: Any) -> bool:
    """Return True if a layer's parts may be called in place of the layer."""
    own = isinstance(layer, DecoderLayer) and type(layer).__call__ is DecoderLayer.__call__
    return own and layer._plain


class TextModel(Module):
    """Embedding, layers and final norm: the parameters under ``model.`` of a checkpoint."""

    def __init__(self, config: Any, layers: Iterable[DecoderLayer], kernels: Kernels):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = list(layers)
        self.make_end(config, kernels)

    def make_end(self, config: Any, kernels: Kernels) -> None:
        """Create what stands between the layers and the head."""
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DecoderModel(StreamingModel):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``.

    A subclass is one architecture: it names its ``Config`` and defines
    ``make_layer``, ``make_cache`` and ``activation_bytes``.
    """

    Config: ClassVar[type]
    MODEL_TYPE: ClassVar[str]
    MLX_LM_PREFIX: ClassVar[str] = ""
    """Prefix of every tensor name in the layout that mlx-lm loads."""
    TIED_IN_MLX_LM: ClassVar[bool] = True
    """Whether mlx-lm computes a head that is the embedding."""
    TEXT_MODEL: ClassVar[type[TextModel]] = TextModel
    ZERO_CENTRED: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of norms that mlx-lm's layout stores less one."""
    HEAD: ClassVar[type[PredictionHead]] = PredictionHead
    """Class of the head of multi-token prediction, for families whose config has one."""
    AROUND_ONE: ClassVar[tuple[str, ...]] = ("norm.weight",)
    """Ends of the names of vectors whose numbers are factors near one."""

    def __init__(
        self, config: Any, *, router: Router | None = None, kernels: Kernels | None = None
    ):
        kernels = kernels or Kernels()
        super().__init__(router or self.make_router(config, kernels), kernels)
        self.config, self.model_type = config, self.MODEL_TYPE
        self._kernels.references_only(self.training)  # a new module is in training mode
        self.steps = Steps(self, self._outputs)
        layers = (self.make_layer(layer) for layer in range(config.num_hidden_layers))
        self.model = self.TEXT_MODEL(config, layers, self._kernels)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

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
    def lacking_in_mlx_lm(cls, config: Any) -> str | None:
        """Return in words what of a model of `config` mlx-lm has not; None: it loads the model."""
        tied = config.tie_word_embeddings and not cls.TIED_IN_MLX_LM
        return f"head that is the embedding in {cls.MODEL_TYPE!r}" if tied else None

    @classmethod
    def mlx_lm_keys(cls, config: Any) -> dict[str, Any]:
        """Return keys of config.json that mlx-lm needs and newer spellings may lack."""
        return {}

    @classmethod
    def mlx_lm_config(cls, config: Any, raw: dict[str, Any]) -> dict[str, Any]:
        """Return config.json `raw`, which `config` was read from, as mlx-lm reads it. mlx-lm knows
        a text model by the type of the whole."""
        needed = cls.mlx_lm_keys(config).items()
        found = raw | {key: value for key, value in needed if raw.get(key) is None}
        if raw.get("model_type") == f"{cls.MODEL_TYPE}_text":
            found["model_type"] = cls.MODEL_TYPE
        return found

    def make_layer(self, layer: int) -> DecoderLayer:
        """Build layer number `layer`."""
        raise NotImplementedError

    def moe_block(
        self, layer: int, kind: type[SparseMoeBlock] = SparseMoeBlock, **options: Any
    ) -> SparseMoeBlock:
        """Build the MoE block of layer number `layer`; options: Further arguments of `kind`."""
        return kind(
            layer=layer,
            hidden_size=self.config.hidden_size,
            num_experts=self.config.num_experts,
            router=self._router,
            kernels=self._kernels,
            **options,
        )

    @classmethod
    def check_tables(
        cls, tables: Mapping[int, Sequence[Shard]], config: Any, file: Path | str
    ) -> None:
        """Raise a ConfigError unless a checkpoint's tables are those of `config`."""

    @classmethod
    def table_shapes(cls, config: Any) -> dict[int, tuple[int, int]]:
        """Return the rows and width of each layer's table of rows that stay on disk."""
        return {}

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
            InputError: Shape or dtype is wrong, or an id is outside the vocabulary. On a GPU, ids
                of one token with a cache are not read, because decode would wait; one outside the
                vocabulary counts as the last. CacheError: `cache` is no state of this model.
        """
        _check_shape(tokens)
        self.notice_edits()
        one = tokens.shape[1] == 1 and cache is not None
        tokens = self._ids(tokens, waits=not one)
        if cache is None:
            cache = self.make_cache()
            for entry in cache:
                entry.scratch = self.training
        elif not one or not isinstance(cache, list) or len(cache) != len(self.model.layers):
            self.states.check(cache)
        self.feed([tokens], [cache])
        logits = self.steps.run(tokens, cache)
        if logits is not None:
            return logits
        with transaction(cache):
            return self._forward(tokens, cache, last_only=last_only)

    def _ids(self, tokens: mx.array, *, waits: bool) -> mx.array:
        """Return ids ``[B, T]`` as samplers return them, uint32, for which there is one kernel that
        looks embeddings up; checked, or, if a GPU should not wait for them, at most the last."""
        if waits or device.kind() == "cpu":
            self._check_ids(tokens)
            return tokens.astype(mx.uint32)
        return mx.minimum(tokens.astype(mx.uint32), self.config.vocab_size - 1)

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
        self.notice_edits()
        for rows in prompts:
            self._check_ids(rows)
        with ExitStack() as transactions:
            for state in states:
                transactions.enter_context(transaction(state))
            rows = [ids.astype(mx.uint32)[None] for ids in prompts]
            self.feed(rows, states)
            with device.gathered():
                return self._last_logits(run(self._walk(rows, states, self.prefill_chunk)))

    def read_rows(self, tokens: mx.array, cache: list[BaseCache]) -> mx.array:
        """Return the logits ``[1, R, V]`` of tokens ``[1, R]``, R from 1 to MOST_ROWS, of a
        sequence that has at least one: row r has the bits of the r-th of R calls of one token.

        The state afterwards is that of these calls, and until the next call
        :func:`~mlx_moeflux.cache.keep_rows` takes it back to the one after any of them. A call that
        raises leaves `cache` as it was before.

        Raises:
            InputError: Shape or dtype is wrong, or an id is outside the vocabulary; see
                :meth:`__call__`. CacheError: `cache` is no state of this model, holds no token, or
                several sequences. UnsupportedError: A layer's state cannot forget rows.
        """
        _check_shape(tokens)
        B, R = tokens.shape
        if B != 1 or R > MOST_ROWS:
            raise InputError(f"rows have shape [{B}, {R}]; give [1, R] with R at most {MOST_ROWS}.")
        if not isinstance(cache, list) or len(cache) != len(self.model.layers):
            self.states.check(cache)
        check_rows(cache)
        with transaction(cache):
            begin_rows(cache, R)
            parts, start = [], 0
            while start < R:
                self.notice_edits()
                some = tokens[:, start : start + self.steps.rows_at_once(cache)]
                one = some.shape[1] == 1
                parts.append(self(some, cache) if one else self._rows_together(some, cache))
                start += some.shape[1]
            return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def _rows_together(self, tokens: mx.array, cache: list[BaseCache]) -> mx.array:
        """Return the logits ``[1, R, V]`` of tokens ``[1, R]`` in one pass through the layers."""
        R = tokens.shape[1]
        tokens = self._ids(tokens, waits=False)
        self.feed([tokens], [cache])
        with together(R):
            if self.steps.compiles:
                logits = self.steps.run_rows(tokens.T, cache)
            else:
                first: Any = cache[0].offset  # an int: there is one sequence
                positions = mx.arange(first, first + R, dtype=mx.int32)
                logits = self._forward(tokens.T, as_rows(cache, positions))
        return logits.swapaxes(0, 1)

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
        self.notice_edits()
        with ExitStack() as transactions:
            for state in states:
                transactions.enter_context(transaction(state))
            for rows in tokens:
                self._check_ids(rows)
            hidden, before, unsent = [], [], []
            ids = [rows.astype(mx.uint32) for rows in tokens]
            self.feed(ids, states)
            walk = self._walk(ids, states, self.prefill_chunk)
            while True:
                with device.gathered():
                    pause = next(walk, None)
                if pause is None:
                    break
                if not pause.layers:
                    if pause.left:
                        # On a GPU one part computes during a pause.
                        mx.async_eval(pause.outputs[-1], [entry.state for entry in pause.entries])
                        mx.eval(pause.outputs[-2:-1])
                        yield None
                    continue
                hidden = pause.outputs
                unsent += pause.entries
                many = sum(h.size for h in hidden) >= MANY_NUMBERS
                group = LAYERS_AHEAD if self.runtime.experts_stay_on_device and not many else 1
                if pause.layers % group == 0:
                    # A GPU works on this group while the host builds the next.
                    mx.async_eval(hidden, [entry.state for entry in unsent])
                    self.runtime.start_eval()
                    self.runtime.wait_for_ranks(1)
                    mx.eval(before)
                    before, unsent = hidden, []
                    yield pause.layers
            with device.gathered():
                logits = self._last_logits(hidden)
            mx.eval(logits, [entry.state for state in states for entry in state])
            self.runtime.start_eval()
            return logits

    def _forward(
        self, tokens: mx.array, cache: Sequence[Any], *, last_only: bool = False
    ) -> mx.array:
        return self.runtime.noted(*self._outputs(tokens, cache, last_only=last_only))

    def _outputs(
        self, tokens: mx.array, cache: Sequence[Any], *, last_only: bool = False
    ) -> Outputs:
        """Return logits ``[B, T or 1, V]``, the output of the last layer ``[B, T, C]`` and the
        marks of several ranks."""
        # Chunks are evaluated one by one, which a compiled training step excludes.
        chunk = tokens.shape[1] if self.training else self.prefill_chunk
        ahead = partial(_begin, deque()) if last_only and tokens.shape[1] > 1 else None
        with device.gathered():
            (h,) = run(self._walk([tokens], [cache], chunk), ahead)
            logits = self.logits(h[:, -1:] if last_only else h)
        return logits, h, *self.runtime.marks(h)

    def _walk(
        self, tokens: Sequence[mx.array], states: Sequence[Sequence[Any]], chunk: int
    ) -> Generator[Pause, None, list[mx.array]]:
        """Take uint32 tokens ``[B, T]`` of each state through all layers, and return what the last
        layer returns. Several have B = 1, each with its own T.

        It pauses after each layer, and after each of several parts of a mixer's input. What is
        evaluated at a pause is up to the consumer, who also gathers kernels.
        """
        hidden = self.embed(tokens)
        mask = states[0][0].real_tokens(tokens[0].shape[1]) if len(tokens) == 1 else None
        observers = self.runtime.observers
        rows = observers.rows_of(tokens, states) if observers.writers else None
        whole = None if rows is None else Rows.together(rows)
        for i, (layer, *entries) in enumerate(zip(self.model.layers, *states, strict=True), 1):
            if _is_plain(layer):
                walk = layer.walk(hidden, entries, mask, chunk=chunk)
                hidden = yield from (observers.told(walk, whole) if whole else walk)
            else:
                apart = []
                for k, (x, entry) in enumerate(zip(hidden, entries, strict=True)):
                    observers.tell(None if rows is None else rows[k])
                    apart.append(layer(x, entry, mask, chunk=chunk))
                observers.tell(None)
                hidden = apart
            yield Pause(hidden, entries, i)
        return hidden

    def feed(self, tokens: Sequence[mx.array], states: Sequence[Sequence[Any]]) -> None:
        """Do what the host has to do before each of `states` reads its ``[B, T]`` of `tokens`."""

    def embed(self, tokens: Sequence[mx.array]) -> list[mx.array]:
        """Return what the first layer gets, ``[B, T, C]`` for each ``[B, T]`` of `tokens`."""
        return [self.model.embed_tokens(rows) for rows in tokens]

    def _last_logits(self, hidden: list[mx.array]) -> mx.array:
        """Return the logits ``[B, V]`` after the last token of one x ``[B, T, C]``, or of B of them
        with B = 1."""
        if self.runtime.store.ranks is not None:
            self.runtime.store.ranks.check(*self.runtime.marks(hidden[-1]))
        if len(hidden) == 1:
            return self.logits(hidden[0][:, -1:])[:, 0]
        return self.logits(mx.concatenate([h[:, -1:] for h in hidden], axis=1))[0]

    def logits(self, h: mx.array) -> mx.array:
        """Return logits ``[B, T, V]`` of the last layer's output ``[B, T, C]``."""
        return project_normed(self._kernels, h, self.head(), self.model.norm)[0]

    def head(self) -> list[Weight | Applied]:
        """Return the matrix of the logits, the embedding's if it is tied."""
        tied = self.config.tie_word_embeddings
        weights = weights_of(self.model.embed_tokens if tied else self.lm_head)
        if tied and isinstance(weights[0], Applied):
            head = self.model.embed_tokens.as_linear
            return [Applied(partial(multiplied, head, out=self.config.vocab_size))]
        return weights

    @staticmethod
    def transforms(trunk: dict[str, TensorRef]) -> dict[str, Transform]:
        """Return the functions to apply to trunk tensors after reading, by canonical name."""
        return {}

    @classmethod
    def conversions(cls, trunk: dict[str, TensorRef]) -> dict[str, Transform]:
        """Return the functions to apply to trunk tensors in a conversion, whose result
        :meth:`transforms` has to read."""
        return cls.transforms(trunk)

    @staticmethod
    def keeps_float32(name: str) -> bool:
        """Return True if the parameter stays in float32 in every compute dtype."""
        return False
