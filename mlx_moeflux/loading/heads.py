"""The head of multi-token prediction of a model: found, mapped, and filled but for its experts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moeflux.checkpoint.formats.foreign import in_our_form
from mlx_moeflux.checkpoint.names import MappedTensors, map_head
from mlx_moeflux.checkpoint.source import Checkpoint, head_beside
from mlx_moeflux.checkpoint.tensors import HEAD_FILES, TensorIndex, TensorRef
from mlx_moeflux.errors import CheckpointError, UnsupportedError
from mlx_moeflux.experts.io.layout import BlockLayout
from mlx_moeflux.experts.io.readers import Reader, make_reader
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.mtp import PredictionHead
from mlx_moeflux.models.weights import fill_head

# Keys of config.json that say how many heads there are.
_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")


@dataclass(frozen=True)
class OpenedHead:
    """A head whose trunk is in memory and whose experts have no store yet.

    mapped: Its tensors. layout: Of its experts' blocks. layer: Its number behind the model's
    layers, for a plan. reader: Of its experts, as layer 0.
    """

    head: PredictionHead
    mapped: MappedTensors
    layout: BlockLayout
    layer: int
    reader: Reader

    @property
    def num_experts(self) -> int:
        """Experts of the head; a pruned model's may keep all."""
        return self.head.body.config.num_experts

    @property
    def trunk_bytes(self) -> int:
        """Bytes of the parameters that are not routed experts."""
        return self.head.trunk_bytes()

    def block_bytes_for(self, num_experts: int) -> int:
        """Return the bytes of a block in a plan for layers of `num_experts`, in which a slot stands
        for the same share of all experts everywhere."""
        return -(-self.layout.nbytes * self.num_experts // num_experts)


def open_head(
    model: DecoderModel,
    checkpoint: Checkpoint,
    mapped: MappedTensors,
    *,
    path: str | os.PathLike[str] | None,
    reader: str,
    dtype: mx.Dtype,
) -> OpenedHead:
    """Read the head of `model`, but for its experts.

    mapped: The model's checkpoint. path: File or directory that has the head; None: the checkpoint
    has it, or a file beside it. reader: Name of a reader of experts.

    Raises:
        UnsupportedError: Heads of the family are not computed.
        CheckpointError: There is no head, or its tensors do not fit or cannot be read.
    """
    if model.config.prediction() is None:
        raise UnsupportedError(
            f"{checkpoint.config_file}: {_not_computed(model.config)}; take drafts without one, "
            "such as 'lookup'."
        )
    place = checkpoint.directory if path is None else Path(path)
    rules = model.config.name_rules()
    found = checkpoint.prediction(mapped) if path is None else _tensors_of(place)
    of_head = map_head(found, rules)
    if not of_head.trunk:
        if path is not None:
            raise CheckpointError(
                f"{place} has no head of multi-token prediction; give a file or directory with one."
            )
        why = _absent(checkpoint) or (
            "no head of multi-token prediction; give mtp_path a file or directory with one, or "
            "take drafts without one, such as 'lookup'"
        )
        raise CheckpointError(f"{place} has {why}.")
    head = model.HEAD(model, num_experts=of_head.count_of(0))
    layout = fill_head(head, of_head, directory=place, dtype=dtype)
    layer = model.config.num_hidden_layers
    return OpenedHead(head, of_head, layout, layer, make_reader(reader, of_head.experts))


def without_head(checkpoint: Checkpoint, config: Any) -> str | None:
    """Return why a checkpoint that was published with a head of multi-token prediction drafts
    without it; None: config.json promises none."""
    why = _absent(checkpoint)
    if why is not None and config.prediction() is None:
        why = _not_computed(config)
    return why


def _not_computed(config: Any) -> str:
    return f"heads of multi-token prediction of {config.MODEL_TYPE!r} are not computed"


def _tensors_of(place: Path) -> Mapping[str, TensorRef]:
    """Return the tensors of a safetensors file, or of a directory with some."""
    if place.is_dir():
        return head_beside(place) or in_our_form(TensorIndex.open(place))
    return in_our_form(TensorIndex.of([place]))


def _absent(checkpoint: Checkpoint) -> str | None:
    """Return in words what a checkpoint has in place of its head; None: config.json promises
    none."""
    if checkpoint.prediction_bytes:
        return (
            "a head of multi-token prediction in GGUF, which is not read; give mtp_path a file or "
            "directory in safetensors with one, such as the original's"
        )
    text: Any = checkpoint.config.get("text_config")
    keys = checkpoint.config | (text if isinstance(text, dict) else {})
    key = next((key for key in _KEYS if keys.get(key)), None)
    if key is None:
        return None
    return (
        f"no tensors of the head of multi-token prediction, of which '{key}' of config.json is "
        f"{keys[key]!r}: it was stripped, and there is no {' or '.join(HEAD_FILES)}; give mtp_path "
        "a file or directory with them, such as the original's"
    )
