"""The output head: the embedding's matrix, or one of its own. No MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_moeflux.checkpoint.tensors import Ref, TensorIndex

if TYPE_CHECKING:
    from mlx_moeflux.checkpoint.source import Checkpoint

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
# Compared at a time.
_PIECE_BYTES = 8 << 20


def is_tied(checkpoint: Checkpoint, config: Any, *, piece_bytes: int = _PIECE_BYTES) -> bool:
    """Return True if the output head of a checkpoint is its embedding. piece_bytes: Of the rows
    that are compared at a time.

    The stored tensors decide over config.json: a head with values of its own counts, as in
    transformers and llama.cpp, and without a head the embedding does, as in llama.cpp. A head that
    an index names and no file has is missing, which the caller reports.

    Raises:
        CheckpointError: They cannot be read.
    """
    rules, head, embedding = config.name_rules(), {}, {}
    for name, ref in checkpoint.tensors.items():
        if HEAD in name or "embed_tokens" in name:
            module, _, part = rules.canonical(name).rpartition(".")
            if module in (HEAD, EMBEDDING):
                (head if module == HEAD else embedding)[part] = ref
    if head and config.tie_word_embeddings:
        return head.keys() == embedding.keys() and all(
            _same_bytes(head[part], embedding[part], piece_bytes)
            for part in sorted(head, reverse=True)
        )
    if head or not embedding or config.tie_word_embeddings:
        return config.tie_word_embeddings
    absent = checkpoint.tensors.absent if isinstance(checkpoint.tensors, TensorIndex) else ()
    return not any(rules.canonical(name).startswith(f"{HEAD}.") for name in absent)


def _same_bytes(one: Ref, other: Ref, piece_bytes: int) -> bool:
    """Return True if dtype, shape and bytes are the same; reads some rows at a time."""
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not one.shape:
        return False
    rows = one.shape[0]
    step = max(1, piece_bytes * rows // max(one.nbytes, 1))
    return all(
        _bytes(one.rows(i, min(i + step, rows))) == _bytes(other.rows(i, min(i + step, rows)))
        for i in range(0, rows, step)
    )


def _bytes(ref: Ref) -> bytearray:
    data = bytearray(ref.nbytes)
    ref.read_into(memoryview(data))
    return data
