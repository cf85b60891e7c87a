"""The limits of a decode step: bytes, and the bandwidths of memory and disk.

Every new token reads the trunk, its experts and its state once. Divided by the memory's bandwidth
that is a hard limit; with experts on disk, the missed bytes by the disk's bandwidth are another.
The same run measures both bandwidths.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_moeflux.experts.budget import format_bytes
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.protocol import named_parameters

HIT_RATES = (0.0, 0.5, 0.8, 0.9, 0.95)
MEMORY_BYTES = {"cpu": 256 << 20, "gpu": 1 << 30}


@dataclass(frozen=True)
class Card:
    """The account of one decode step.

    trunk: Bytes of dense weights that a step reads (one row of the embedding).
    expert: Bytes of one expert, the mean over the layers.
    layers, k, experts: MoE layers, experts of a token, experts of a layer.
    state: Model positions -> bytes of one sequence's state.
    memory, disk: Bytes a second; disk None when it could not be measured.
    """

    trunk: int
    expert: float
    layers: int
    k: int
    experts: int
    state: Callable[[int], int]
    memory: float
    disk: float | None

    def step_bytes(self, positions: int, *, batch: int = 1, distinct: float | None = None) -> float:
        """Bytes that a step of `batch` sequences reads from memory.

        distinct: Different experts that it asks a layer for; for one sequence, its k.
        """
        distinct = min(self.experts, batch * self.k) if distinct is None else distinct
        experts = self.layers * distinct * self.expert
        return self.trunk + experts + batch * self.state(positions)

    def memory_limit(
        self, positions: int, *, batch: int = 1, distinct: float | None = None
    ) -> float:
        """Tokens a second of all sequences together that the memory allows."""
        return batch * self.memory / self.step_bytes(positions, batch=batch, distinct=distinct)

    def disk_limit(
        self, hit_rate: float, *, batch: int = 1, distinct: float | None = None
    ) -> float:
        """Tokens a second of all sequences that the disk allows; infinite if nothing is missed."""
        distinct = batch * self.k if distinct is None else distinct
        missed = (1 - hit_rate) * self.layers * distinct * self.expert
        return batch * self.disk / missed if missed and self.disk else float("inf")

    def lines(self, positions: int) -> list[str]:
        """The card as text."""
        experts = self.layers * self.k * self.expert
        state = self.state(positions)
        lines = [
            f"a token reads trunk {format_bytes(self.trunk)}, experts {format_bytes(experts)} "
            f"({self.layers} layers x {self.k} of {self.experts} x {format_bytes(self.expert)}), "
            f"state {format_bytes(state)} at {positions} positions: "
            f"{format_bytes(self.step_bytes(positions))}",
            f"memory {self.memory / 1e9:.1f} GB/s (measured): at most "
            f"{self.memory_limit(positions):.1f} tok/s, one sequence",
        ]
        if self.disk is None:
            return [*lines, "disk: no cold read could be measured"]
        limits = ", ".join(f"{h:.0%} {self.disk_limit(h):.1f}" for h in HIT_RATES)
        return [
            *lines,
            f"disk {self.disk / 1e9:.2f} GB/s (measured, cold): at most, by hit rate, "
            f"{limits} tok/s",
        ]

    def as_dict(self, positions: int) -> dict[str, float | int | None]:
        """Plain numbers, at one length."""
        names = (f.name for f in fields(self) if f.name != "state")
        return {name: getattr(self, name) for name in names} | {
            "positions": positions,
            "state": self.state(positions),
            "step_bytes": self.step_bytes(positions),
            "memory_limit": self.memory_limit(positions),
        }


def make_card(model: DecoderModel, *, memory: float, disk: float | None) -> Card:
    """The card of a loaded model."""
    config, plan = model.config, model.plan
    assert plan is not None  # no store of a user is measured
    parameters = named_parameters(model)
    trunk = sum(a.nbytes for name, a in parameters if ".switch_mlp." not in name)
    table = sum(a.nbytes for name, a in parameters if ".embed_tokens." in name)
    if not config.tie_word_embeddings:
        trunk += table // config.vocab_size - table
    return Card(
        trunk=trunk,
        expert=plan.expert_bytes / (len(plan.slots) * config.num_experts),
        layers=len(plan.slots),
        k=model.router.num_experts_per_tok,
        experts=config.num_experts,
        state=model.state_bytes,
        memory=memory,
        disk=disk,
    )


def memory_bandwidth(nbytes: int | None = None, *, rounds: int = 5) -> float:
    """Bytes a second of the fastest of a few ways to pass once over a large array."""
    on_cpu = device.kind() == "cpu"
    nbytes = nbytes or MEMORY_BYTES["cpu" if on_cpu else "gpu"]
    x = mx.random.uniform(shape=(1024, nbytes // 4096))
    mx.eval(x)
    repeats = 1 if on_cpu else 8  # so that the launch does not count
    ways: list[tuple[int, Callable[[], object]]] = [
        (repeats * x.nbytes, partial(_sums, x, repeats)),
        (2 * x.nbytes, partial(_copy, x)),
    ]
    if on_cpu:
        # MLX adds up in one thread.
        parts = np.array_split(np.array(x).reshape(-1), 8)
        ways.append((x.nbytes, partial(_sums_in_threads, parts)))
    best = 0.0
    for moved, pass_over in ways:
        for _ in range(rounds):
            began = time.perf_counter()
            pass_over()
            best = max(best, moved / (time.perf_counter() - began))
    del x, ways
    mx.clear_cache()
    return best


def _sums(x: mx.array, repeats: int) -> None:
    mx.eval([mx.sum(x) for _ in range(repeats)])


def _copy(x: mx.array) -> None:
    mx.eval(x + 1)


def _sums_in_threads(parts: list[np.ndarray]) -> None:
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(np.sum, parts))
