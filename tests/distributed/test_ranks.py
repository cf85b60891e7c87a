"""Oracle: one process. Ranks run on this machine, over MLX's ring back end on loopback."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.shapes import SHAPES
from tests.distributed.launch import results
from tests.distributed.program import logits_of

FAMILIES = sorted(name for name in SHAPES if name.endswith("-tiny"))
# One has a delta net and a shared expert, the other latent attention and a layer without experts.
SOME = ("qwen3.5-tiny", "deepseek-tiny")


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    made = {}

    def directory(name: str, **options) -> str:
        key = name, *options.values()
        if key not in made:
            made[key] = synthesize(name, tmp_path_factory.mktemp("shape") / name, **options)
        return str(made[key])

    return directory


def expected(path: str, batch: int = 1) -> np.ndarray:
    with load_model(path) as model:
        logits = logits_of(model, batch)
    assert np.isfinite(logits).all()
    return logits


def check(folder, ranks: int, cases: list[dict]) -> None:
    """Run all cases on all ranks; exact ones must have the bits of one process."""
    found = results(folder, ranks, "logits", {"cases": cases})
    known: dict = {}
    for i, case in enumerate(cases):
        key = case["path"], case.get("batch", 1)
        want = known[key] if key in known else known.setdefault(key, expected(*key))
        for rank in range(ranks):
            assert np.array_equal(found[rank][f"logits{i}"], want), (rank, case)


def test_two_ranks_have_the_bits_of_one_process(directory_of, tmp_path):
    cases = [
        {"path": directory_of(SOME[0]), "expert_memory": "100%"},
        {"path": directory_of(SOME[1]), "expert_memory": "25%"},
    ]
    check(tmp_path, 2, cases)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_at_every_budget(name, ranks, directory_of, tmp_path):
    path = directory_of(name, experts=64)  # of which a token needs 4
    budgets = ("12.5%", "50%", "100%") if ranks == 2 else ("37.5%",)
    cases = [{"path": path, "expert_memory": memory} for memory in budgets]
    cases.append({"path": path, "expert_memory": "50%", "batch": 3, "exact_prompts": True})
    check(tmp_path, ranks, cases)
