"""Qwen4-Exp (Qwen3.8-Flash-Next): Qwen3.5-MoE's mixers in several residual streams, with attention
to chosen blocks of tokens and rows of n-grams.

Source: transformers 5.24 `models/qwen4_exp/modeling_qwen4_exp.py`, which is authoritative.
Checkpoints: Hugging Face originals (text or vision-language wrapper), files for MLX with norms that
are zero-centred or have their one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.formats.decoded import sources_of
from mlx_moeflux.checkpoint.load import load_all
from mlx_moeflux.checkpoint.names import MappedTensors, Transform
from mlx_moeflux.checkpoint.tables import Shard
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import CheckpointError, UnsupportedError
from mlx_moeflux.experts.budget import parse_share
from mlx_moeflux.experts.io.row_table import RowTable
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.models import qwen3_5_moe
from mlx_moeflux.models.decoder import TextModel
from mlx_moeflux.models.indexed_attention import IndexedAttention
from mlx_moeflux.models.layers import DecoderLayer, decoder_layer
from mlx_moeflux.models.modules import Linear, RMSNorm
from mlx_moeflux.models.ngram_layer import NgramLayer
from mlx_moeflux.models.ngrams import NgramHashes, check_tables
from mlx_moeflux.models.qwen4_exp_config import Config
from mlx_moeflux.models.residual_streams import GatedResidual, StreamsLayer
from mlx_moeflux.models.weights import infer_spec

GROUPED = (*(f"ple.norm_{name}.weight" for name in ("key", "query", "conv")), ".hc_norm.weight")
NORMS = (
    *(f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")),
    *(f"indexer.{name}_layernorm.weight" for name in ("q", "k")),
    *GROUPED,
)
"""Ends of the names of norms that the originals store zero-centred. Some files for MLX have added
their one: names, shapes and dtypes are the same, so that the numbers alone tell them apart."""
CENTRED, WHOLE = 0.5, 0.75
"""Half of the norms have means below the first: they lack their one; or above the second: they have
it. Of the originals the means are 0.22 on average (docs/formats.md)."""


class GatedDeltaNet(qwen3_5_moe.GatedDeltaNet):
    """Delta net whose output gate is what the config says."""

    def __init__(self, config: Config, kernels: Any):
        super().__init__(config, kernels)
        self._gate = config.output_gate


class StreamsModel(TextModel):
    """Embedding, layers and the last mixer of streams."""

    def make_end(self, config: Config, kernels: Any) -> None:
        """See :meth:`TextModel.make_end`."""
        self.hyper_connection_mixer = GatedResidual(config, kernels, injects=False)


class StreamsHead(qwen3_5_moe.Head):
    """Head that reads and returns all S streams; the embedding is added to each.

        x = fc_embedding(norm_e(embedding)) + fc_hidden(stream s of norm_h(h))   for each s

    The norm of h is one of all S C numbers, and a mixer stands before the output head.

    Parameters: ``fc_embedding``, ``fc_hidden`` ``.weight [C, C]``, ``pre_fc_norm_embedding.weight
    [C]``, ``pre_fc_norm_hidden.weight [S C]``, ``model.hyper_connection_mixer.*``,
    ``model.layers.0.*``.

    Source: SGLang `models/qwen4_exp_mtp.py` (pull request 36497).
    """

    ZERO_CENTRED = (*NORMS, *qwen3_5_moe.FUSION_NORMS)

    def transforms(self, mapped: MappedTensors) -> dict[str, Transform]:
        """See :meth:`PredictionHead.transforms`. Where names of experts do not say it, the numbers
        do; no text depends on a head, so that no answer of them is refused."""
        if found := super().transforms(mapped):
            return found
        norms = _ending(mapped.trunk, NORMS).values()
        add = _with_one(cache(lambda: middle_of(norms) < CENTRED))
        return dict.fromkeys(_ending(mapped.trunk, self.ZERO_CENTRED), add)

    def make_fusion(self, config: Config) -> None:
        """See :meth:`PredictionHead.make_fusion`."""
        C, S, eps = config.hidden_size, config.hc_count, config.rms_norm_eps
        self.fc_embedding = Linear(C, C, bias=False)
        self.fc_hidden = Linear(C, C, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(C, eps=eps)
        self.pre_fc_norm_hidden = RMSNorm(S * C, eps=eps)

    def entering(self, hidden: mx.array) -> mx.array:
        """See :meth:`PredictionHead.entering`; ``[B, T, S C]``."""
        return hidden

    def fuse(self, embedding: mx.array, read: mx.array) -> mx.array:
        """See :meth:`PredictionHead.fuse`; read ``[B, T, S C]``."""
        normed = self.pre_fc_norm_embedding(embedding)
        streams = self.pre_fc_norm_hidden(read).reshape(*read.shape[:-1], -1, normed.shape[-1])
        added = self.project(self.fc_embedding, normed)
        hidden = self.project(
            self.fc_hidden, streams.reshape(*read.shape[:-2], -1, normed.shape[-1])
        )
        return (hidden.reshape(streams.shape) + added[..., None, :]).reshape(read.shape)

    def leaving(self, h: mx.array) -> mx.array:
        """See :meth:`PredictionHead.leaving`; ``[B, T, S C]``."""
        return h

    def logits(self, read: mx.array) -> mx.array:
        """See :meth:`PredictionHead.logits`."""
        mixed, _ = self.model.hyper_connection_mixer(read)
        return super().logits(mixed)


class Model(qwen3_5_moe.Model):
    """``model(tokens [B, T], cache=None, last_only=False) -> logits [B, T or 1, V]``."""

    Config = Config
    MODEL_TYPE = "qwen4_exp"
    DELTA_NET = GatedDeltaNet
    HEAD = StreamsHead
    TEXT_MODEL = StreamsModel
    ZERO_CENTRED = NORMS
    CAN_LOOK_AHEAD = False

    @property
    def dtype(self) -> mx.Dtype:
        """See :attr:`StreamingModel.dtype`."""
        norms = (
            part for part in self.modules() if isinstance(part, (qwen3_5_moe.GatedNorm, RMSNorm))
        )
        return next(norms).weight.dtype

    def make_layer(self, layer: int) -> DecoderLayer:
        """Build a layer of mixer, then MoE block with a gated shared expert."""
        config, kernels, index = self.config, self._kernels, self.config.ngram_index(layer)
        mixer = "self_attn", IndexedAttention(config, kernels)
        if config.is_linear(layer):
            mixer = "linear_attn", self.DELTA_NET(config, kernels)
        extra = None if index is None else ("ple", NgramLayer(config, kernels, index))
        mlp = self.make_mlp(layer)
        return StreamsLayer(config, kernels, mixer=mixer, mlp=mlp, extra=extra)

    def ngram_layers(self) -> dict[int, NgramLayer]:
        """Return layer id -> its part with n-grams."""
        layers = ((i, decoder_layer(layer)) for i, layer in enumerate(self.layers))
        return {i: layer["ple"] for i, layer in layers if layer is not None and "ple" in layer}

    @classmethod
    def check_tables(
        cls, tables: Mapping[int, Sequence[Shard]], config: Config, file: Path | str
    ) -> None:
        """See :meth:`DecoderModel.check_tables`."""
        check_tables(tables, config, file)

    @classmethod
    def table_shapes(cls, config: Config) -> dict[int, tuple[int, int]]:
        """See :meth:`DecoderModel.table_shapes`."""
        indices = ((layer, config.ngram_index(layer)) for layer in range(config.num_hidden_layers))
        return {
            layer: (NgramHashes(config, index).rows, config.ngram_width)
            for layer, index in indices
            if index is not None
        }

    def open_tables(
        self,
        tables: Mapping[int, Sequence[Shard]],
        *,
        file: Path,
        memory: str | float,
        threads: int,
    ) -> None:
        """See :meth:`StreamingModel.open_tables`."""
        self.check_tables(tables, self.config, file)
        refs = [ref for shards in tables.values() for shard in shards for ref in shard.values()]
        # The parts of a row in blocks are made of the same bytes.
        total = sum({source: source.nbytes for ref in refs for source in sources_of(ref)}.values())
        budget = parse_share(memory, total)
        found, parts = {}, self.ngram_layers()
        for layer, shards in tables.items():
            spec, first = None, shards[0]
            if "scales" in first:
                spec = infer_spec(first["weight"], first["scales"], self.config.ngram_width)
            found[layer] = RowTable(
                shards,
                spec,
                memory_bytes=budget // len(tables),
                name=f"the n-gram table of layer {layer}",
                threads=threads,
            )
            parts[layer].set_table(found[layer])
        self.runtime.tables = MappingProxyType(found)

    def set_store(self, store: ExpertStore) -> None:
        """See :meth:`StreamingModel.set_store`.

        Raises:
            UnsupportedError: The store looks ahead.
        """
        if store.looks_ahead:
            raise UnsupportedError(
                "prefetch ahead asks the next router with this layer's residual, and this model "
                "has several residual streams; take another prefetch."
            )
        super().set_store(store)

    def feed(self, tokens: Sequence[mx.array], states: Sequence[Sequence[Any]]) -> None:
        """See :meth:`DecoderModel.feed`; begins to read the rows of n-grams."""
        for layer, part in self.ngram_layers().items():
            for rows, state in zip(tokens, states, strict=True):
                part.begin(rows, state[layer])

    def embed(self, tokens: Sequence[mx.array]) -> list[mx.array]:
        """See :meth:`DecoderModel.embed`."""
        return [mx.tile(h, (1, 1, self.config.hc_count)) for h in super().embed(tokens)]

    def logits(self, h: mx.array) -> mx.array:
        """See :meth:`DecoderModel.logits`."""
        read, _ = self.model.hyper_connection_mixer(h)
        return self._kernels.project(read, self.head())[0]

    def activation_bytes(self, tokens: int) -> int:
        """See :meth:`StreamingModel.activation_bytes`; adds streams, index scores and masks."""
        config, chunk = self.config, min(tokens, self.prefill_chunk)
        streams = 6 * tokens * config.hc_count * config.hidden_size
        blocks = tokens // config.indexer_compress_ratio
        index = chunk * (4 * blocks + tokens)
        return super().activation_bytes(tokens) + 4 * (streams + index)

    @classmethod
    def lacking_in_mlx_lm(cls, config: Config) -> str | None:
        """See :meth:`DecoderModel.lacking_in_mlx_lm`."""
        return f"model_type {cls.MODEL_TYPE!r}"

    @staticmethod
    def transforms(trunk: dict[str, TensorRef]) -> dict[str, Transform]:
        """See :meth:`DecoderModel.transforms`.

        Hugging Face originals store convolutions as [D, 1, W], MLX's files as [D, W, 1]. Norms are
        zero-centred in the former, and in those of the latter that mlx-vlm 0.7.10 reads
        (`models/qwen4_exp/language.py`); of the others :func:`lack_their_one` decides when they
        are read. ``linear_attn.norm`` is never zero-centred.
        """
        found = qwen3_5_moe.as_mlx_lm(trunk, NORMS)
        if qwen3_5_moe.is_original(trunk):
            return found
        norms = _ending(trunk, NORMS)
        add = _with_one(cache(partial(lack_their_one, tuple(norms.values()))))
        return found | dict.fromkeys(norms, add)

    @classmethod
    def conversions(cls, trunk: dict[str, TensorRef]) -> dict[str, Transform]:
        """See :meth:`DecoderModel.conversions`."""
        return qwen3_5_moe.as_mlx_lm(trunk, ())

    @staticmethod
    def keeps_float32(name: str) -> bool:
        """See :meth:`DecoderModel.keeps_float32`; 1 + w does not fit a bfloat16, and these norms
        compute in float32."""
        return qwen3_5_moe.Model.keeps_float32(name) or name.endswith(GROUPED)


def lack_their_one(norms: Sequence[TensorRef]) -> bool:
    """Return True if norms are stored zero-centred, by the numbers in their files. Warns if they
    are not.

    Raises:
        CheckpointError: They are neither, or cannot be read.
    """
    middle = middle_of(norms)
    if middle < CENTRED:
        return True
    where = f"{norms[0].file}: half of the {len(norms)} norms"
    if middle > WHOLE:
        warnings.warn(
            f"{where} have means of at least {middle:.2f}: their one is in the file, as in some "
            "conversions for MLX, and is not added again.",
            stacklevel=2,
        )
        return False
    raise CheckpointError(
        f"{where} have means below {middle:.2f}, neither about 0 nor about 1: whether they are "
        "zero-centred is not known; convert the original again."
    )


def middle_of(norms: Iterable[TensorRef]) -> float:
    """Return the median of the norms' means. The norm before the last mixer has 2.75 in the
    originals, so that a mean over few layers says less."""
    means = [norm.astype(mx.float32).mean() for norm in load_all(norms)]
    return float(np.median(np.array(mx.stack(means))))


def _ending(trunk: Mapping[str, TensorRef], ends: tuple[str, ...]) -> dict[str, TensorRef]:
    return {name: ref for name, ref in trunk.items() if name.endswith(ends)}


def _with_one(lacking: Callable[[], bool]) -> Transform:
    """Return the function that gives norms their one if they are `lacking` it."""

    def add(weight: mx.array) -> mx.array:
        return weight.astype(mx.float32) + 1.0 if lacking() else weight

    return add
