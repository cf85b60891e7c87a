"""Which models of the catalogue run on a machine, and how well. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_moeflux.checkpoint.catalogue import KnownModel, catalogue
from mlx_moeflux.experts.budget import Memory, smallest_budget
from mlx_moeflux.measure.plan import ModelPlan, Sizes, plan_model
from mlx_moeflux.measure.rates import Rates

# How a model runs, the best first.
RESIDENT, WELL, SLOWLY, TOO_LARGE = KINDS = (
    "resident",
    "streams well",
    "streams slowly",
    "too large",
)
# Tokens per second; about as fast as people read.
READING_SPEED = 5.0


@dataclass(frozen=True)
class Candidate:
    """A model of the catalogue on a machine.

    kind: One of :data:`KINDS`. least_bytes: The smallest budget that works.
    """

    model: KnownModel
    plan: ModelPlan
    kind: str
    least_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        model, plan = self.model, self.plan
        return {
            "name": model.name,
            "title": model.title,
            "family": plan.sizes.model_type,
            "license": model.license,
            "repository": model.repository,
            "original": model.original,
            "gguf": model.gguf,
            "download_bytes": model.download_bytes,
            "kind": self.kind,
            "trunk_bytes": plan.sizes.trunk_bytes,
            "expert_bytes": plan.sizes.expert_bytes,
            "bytes_per_token": plan.sizes.bytes_per_token,
            "least_budget_bytes": self.least_bytes,
            "budget_bytes": plan.budget_bytes,
            "expected_tokens_per_second": [plan.slow, plan.fast],
        }


def known_sizes(model: KnownModel) -> Sizes:
    """Return the sizes of a model of the catalogue."""
    sizes = dict(model.sizes)
    layers, nbytes = int(sizes.pop("layers")), int(sizes.pop("block_bytes"))
    blocks = dict.fromkeys(range(layers), nbytes)
    return Sizes(blocks=blocks, **sizes)


def rank_models(memory: str | float | Memory, rates: Rates) -> list[Candidate]:
    """Return all models of the catalogue: by kind, and within a kind the fastest first.

    memory: As :func:`~mlx_moeflux.measure.plan.plan_model` takes it.

    Raises:
        InputError: A number makes no sense.
    """
    found = []
    for model in catalogue().values():
        sizes = known_sizes(model)
        plan = plan_model(
            model.name,
            sizes,
            memory=memory,
            ssd_gbps=rates.ssd_gbps,
            memory_gbps=rates.memory_gbps,
        )
        least = smallest_budget(sizes.blocks, sizes.experts_per_token, 0)
        found.append(Candidate(model, plan, _kind(plan), least))
    return sorted(found, key=lambda one: (KINDS.index(one.kind), -one.plan.estimate))


def _kind(plan: ModelPlan) -> str:
    if not plan.fits:
        return TOO_LARGE
    if plan.resident:
        return RESIDENT
    return WELL if plan.estimate >= READING_SPEED else SLOWLY
