"""Oracle: one process. Ranks run on this machine, over MLX's ring back end on loopback."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.shapes import SHAPES
from tests.devices import seen_as
from tests.distributed.launch import results, start_job
from tests.distributed.program import PROMPT, STEPS, batched, logits_of, prompts_of, reply

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


@pytest.mark.parametrize("memory", ["100%", "20%"])
def test_a_group_of_one_process(memory, directory_of, monkeypatch):
    """Every step but the exchange, on pairs (one sequence) and sums (three: 120 tokens), with the
    columns of the CPU and those of kernels."""
    other = seen_as("cpu" if memory == "100%" else "cuda")
    monkeypatch.setattr("mlx_moeflux.distributed.store.device", other)
    path, group = directory_of(SOME[0]), mx.distributed.init()
    assert group.size() == 1
    for batch in (1, 3):
        with load_model(path, distributed=group, expert_memory=memory) as model:
            assert np.array_equal(logits_of(model, batch), expected(path, batch))
            tokens = {one.tokens for one in model.store.stats().layers.values()}
            assert tokens == {batch * (PROMPT + STEPS)}


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


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_batches_prompt_caches_and_states(name, directory_of, tmp_path):
    path, saved = directory_of(name), str(tmp_path / "saved")
    with load_model(path) as model:
        prompts = prompts_of(model.config.vocab_size)
        together, alone = batched(model), reply(model, prompts[2])
        state = model.make_cache()
        mx.eval(model(mx.array([prompts[2]]), state))
        state.save(saved)
        following = reply(model, prompts[0], prompt_cache=state)
    found = results(tmp_path / "run", 2, "states", {"path": path, "saved": saved})
    for one in found:
        assert one["batch"].tolist() == together
        for name in ("first", "second", "third"):
            assert one[name].tolist() == alone
        known = [one[f"{name}_known"] for name in ("first", "second", "third")]
        # The third time rank 1 knows nothing, so both begin anew.
        assert known[0] == 0
        assert known[1] > 60
        assert known[2] == 0
        assert one["loaded"].tolist() == following
    with load_model(path) as model:
        for rank in range(2):
            state = model.make_cache()
            state.load(tmp_path / "run" / f"state{rank}")
            assert reply(model, prompts[0], prompt_cache=state) == following


@pytest.mark.slow
def test_rank_0_chooses_for_other_devices(directory_of, tmp_path):
    path = directory_of(SOME[0])
    found = results(tmp_path, 2, "law", {"path": path, "one_kind": False})
    for one in found:
        assert np.array_equal(one["logits"], expected(path))


@pytest.mark.slow
def test_ranks_that_choose_other_experts_are_an_error(directory_of, tmp_path):
    job = {"path": directory_of(SOME[0]), "one_kind": True}
    for process in start_job(tmp_path, 2, "law", job):
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert error.startswith("error: rank 1 chose other experts than rank 0 in layer 0; ")
        assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_prompts_that_are_reduced_first(ranks, directory_of, tmp_path):
    """96 tokens are too many for pairs: each rank adds its own experts."""
    path = directory_of(SOME[0])
    cases = [{"path": path, "batch": 3}, {"path": path, "batch": 3, "expert_memory": "40%"}]
    found = results(tmp_path, ranks, "logits", {"cases": cases})
    want = expected(path, 3)
    size = np.sqrt((want**2).mean(axis=-1))
    for one in found:
        assert np.array_equal(one["logits0"], one["logits1"])
        assert np.array_equal(one["logits0"], found[0]["logits0"])
        error = np.sqrt(((one["logits0"] - want) ** 2).mean(axis=-1))
        assert 0 < (error / size).max() < 1e-5
