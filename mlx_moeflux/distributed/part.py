"""One rank's part of a model: which experts it loads, and what must be equal on all ranks."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux._version import __version__
from mlx_moeflux.checkpoint.source import Checkpoint
from mlx_moeflux.checkpoint.tensors import Blocks, ExpertRefs
from mlx_moeflux.distributed.placement import Places
from mlx_moeflux.distributed.ranks import Ranks
from mlx_moeflux.distributed.store import DistributedStore
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.experts.streaming.store import StreamedStore

Experts = Mapping[int, Mapping[str, ExpertRefs]]


@dataclass(frozen=True)
class Part:
    """The experts of one rank."""

    ranks: Ranks
    places: Places

    @property
    def num_experts(self) -> int:
        """Experts a layer of this rank."""
        return self.places.counts[self.ranks.rank]

    def held(self, experts: Experts, checkpoint: Checkpoint) -> dict[int, dict[str, ExpertRefs]]:
        """Return those of `experts`, the checkpoint's, that this rank holds, ascending.

        Raises:
            InputError: The checkpoint is the part of another rank or placement.
        """
        found = {}
        for layer, parts in experts.items():
            own = self.places.held(layer, self.ranks.rank)
            there = checkpoint.held.get(layer, range(self.places.num_experts))
            if missing := sorted(set(own).difference(there)):
                raise InputError(
                    f"{checkpoint.directory} lacks expert {missing[0]} of layer {layer}, which the "
                    f"placement gives rank {self.ranks.rank}; convert with the same placement."
                )
            chosen = [there.index(e) for e in own]
            if isinstance(parts, Blocks):
                found[layer] = parts.take(chosen)
            else:
                found[layer] = {name: [refs[e] for e in chosen] for name, refs in parts.items()}
        return found

    def identified(self, experts: Experts, checkpoint: Checkpoint) -> Experts:
        """Return what the identity of the model's experts is made of, equal on all ranks:
        `experts` themselves, or the checksums of the ranks' blocks where one has a part of the
        checkpoint."""
        own: dict[str, dict[str, int]] = {}
        for layer, blocks in experts.items():
            if isinstance(blocks, Blocks) and blocks.checksums:
                there = checkpoint.held.get(layer, range(self.places.num_experts))
                own[str(layer)] = dict(zip(map(str, there), blocks.checksums, strict=True))
        parts = [json.loads(t) for t in self.ranks.gather(json.dumps([bool(checkpoint.held), own]))]
        if not any(is_part for is_part, _ in parts):
            return experts
        found: dict[int, Blocks] = {}
        for layer in experts:
            known = ChainMap(*(theirs.get(str(layer), {}) for _, theirs in parts))
            found[layer] = Blocks()
            found[layer].checksums = tuple(known[e] for e in sorted(known, key=int))
        return found

    def store(self, local: StreamedStore | ResidentStore, exact_prompts: bool) -> DistributedStore:
        """Return the store of all experts, of which `local` has those of this rank."""
        options = {"exact_prompts": exact_prompts, "one_kind": self.ranks.same(device_kind())}
        return DistributedStore(local, self.ranks, self.places, **options)

    def agree(self, model: Any, *, exact_prompts: bool) -> None:
        """Compare versions, weights, placement and choices of kernels with the other ranks.

        Raises:
            DistributedError: They differ; all ranks raise the same.
        """
        rank_of = repr(sorted(self.places.rank_of.items())).encode()
        self.ranks.agree(
            {
                "version of mlx_moeflux": __version__,
                "version of mlx": mx.__version__,  # pyright: ignore[reportAttributeAccessIssue]
                "checkpoint": model.identity,
                "choice of kernels": model.kernels.identity(),
                "max_context": model.states.max_context,
                "exact_prompts": exact_prompts,
                "placement": hashlib.blake2b(rank_of, digest_size=8).hexdigest(),
                # Samples of the trunk's weights, dtype, router and lossy options.
                "model": model.state_spec().identity,
            }
        )


def device_kind() -> str:
    """Return what decides which bits a kernel gives: system, back end and device."""
    device = mx.default_device()
    kind = "cpu" if device == mx.cpu else "gpu"
    name = mx.device_info(device).get("device_name", "")
    return f"{platform.system()} {platform.machine()} {kind} {name}"
