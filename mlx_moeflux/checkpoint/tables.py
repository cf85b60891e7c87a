"""Tables of rows that no call reads whole, such as embeddings of n-grams: collected from a
checkpoint's names, in shards or whole, and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import CheckpointError

Shard = dict[str, TensorRef]
"""Part name (``weight``, and of a quantised table ``scales``, ``biases``) -> ``[rows, n]``."""


class Tables:
    """Collects the tensors that match `patterns`, which have the groups ``layer``, ``part`` and,
    if the pattern is of a table in shards, ``shard``."""

    def __init__(self, patterns: Iterable[str]):
        self._patterns = tuple(map(re.compile, patterns))
        self._shards: dict[int, dict[int | None, Shard]] = {}

    def take(self, canonical: str, ref: TensorRef) -> bool:
        """Keep `ref` if its `canonical` name is of a table; return whether it is.

        Raises:
            CheckpointError: Another tensor is the same part, or it is no matrix.
        """
        match = next(filter(None, (p.fullmatch(canonical) for p in self._patterns)), None)
        if match is None:
            return False
        groups = match.groupdict()
        number = None if groups.get("shard") is None else int(groups["shard"])
        shard = self._shards.setdefault(int(groups["layer"]), {}).setdefault(number, {})
        if groups["part"] in shard:
            raise CheckpointError(
                f"{ref.file}: '{ref.name}' and '{shard[groups['part']].name}' are the same part "
                "of a table; remove one."
            )
        if len(ref.shape) != 2:
            raise CheckpointError(
                f"{ref.file}: '{ref.name}' has shape {list(ref.shape)}; expected rows on axis 0 "
                "and their numbers on axis 1."
            )
        shard[groups["part"]] = ref
        return True

    def ordered(self) -> dict[int, list[Shard]]:
        """Return layer -> shards in the order of their numbers; a whole table is one shard.

        Raises:
            CheckpointError: A shard is missing, lacks a part or has another width or dtype, or a
                table is there whole and in shards.
        """
        return {layer: _ordered(layer, found) for layer, found in sorted(self._shards.items())}


def _ordered(layer: int, found: Mapping[int | None, Shard]) -> list[Shard]:
    numbered = {number: shard for number, shard in found.items() if number is not None}
    if numbered and None in found:
        whole, shard = _any_of(found[None]), _any_of(next(iter(numbered.values())))
        raise CheckpointError(
            f"{whole.file}: layer {layer} has its table whole ('{whole.name}') and in shards "
            f"('{shard.name}'); remove one."
        )
    missing = next((n for n in range(len(numbered)) if n not in numbered), None)
    if missing is not None:
        last = _any_of(numbered[max(numbered)])
        raise CheckpointError(
            f"{last.file}: shard {missing} of the table of layer {layer} is missing although "
            f"'{last.name}' is there; fetch the file that holds it."
        )
    shards = [numbered[n] for n in sorted(numbered)] or list(found.values())
    for shard in shards:
        _check_shard(layer, shard, shards[0])
    return shards


def _check_shard(layer: int, shard: Shard, first: Shard) -> None:
    """Raise unless `shard` has the parts of `first`, alike but for the number of rows."""
    ref = _any_of(shard)
    lacking = {"weight", *first} - set(shard)
    if lacking:
        raise CheckpointError(
            f"{ref.file}: the table of layer {layer} has '{ref.name}' without its "
            f"'{min(lacking)}'; fetch the file that holds it."
        )
    for part, ref in shard.items():
        if part not in first:
            raise CheckpointError(
                f"{ref.file}: '{ref.name}' is there, but '{first['weight'].name}' has no '{part}'; "
                "fetch the file that holds it."
            )
        if ref.shape[0] != shard["weight"].shape[0]:
            raise CheckpointError(
                f"{ref.file}: '{ref.name}' has {ref.shape[0]} rows, '{shard['weight'].name}' has "
                f"{shard['weight'].shape[0]}."
            )
        if (ref.dtype, ref.shape[1]) != (first[part].dtype, first[part].shape[1]):
            raise CheckpointError(
                f"{ref.file}: '{ref.name}' has rows of {ref.shape[1]} x {ref.dtype}, "
                f"'{first[part].name}' of {first[part].shape[1]} x {first[part].dtype}."
            )


def _any_of(shard: Shard) -> TensorRef:
    return next(iter(shard.values()))
