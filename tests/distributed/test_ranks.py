"""Oracle: one process. Ranks run on this machine, over MLX's ring back end on loopback."""

from __future__ import annotations

import os
from io import StringIO
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.backend import RANK_VARIABLES
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.distributed.ranks import HASH_FACTOR, Ranks, start_group
from mlx_moeflux.errors import DistributedError
from mlx_moeflux.generation.sampling import make_sampler
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.loading import BUNDLED_MODEL, load, load_model, steps
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


def expected(path: str, batch: int = 1, traced: bool | None = None) -> np.ndarray:
    with load_model(path) as model:
        model.compile_steps = traced
        logits = logits_of(model, batch)
    assert np.isfinite(logits).all()
    return logits


def check(folder, ranks: int, cases: list[dict]) -> None:
    """Run all cases on all ranks; exact ones must have the bits of one process."""
    found = results(folder, ranks, "logits", {"cases": cases})
    known: dict = {}
    for i, case in enumerate(cases):
        key = case["path"], case.get("batch", 1), case.get("traced")
        want = known[key] if key in known else known.setdefault(key, expected(*key))
        for rank in range(ranks):
            assert np.array_equal(found[rank][f"logits{i}"], want), (rank, case)


@pytest.mark.parametrize(
    ("memory", "traced"), [("100%", None), ("20%", None), ("100%", True), ("50%", True)]
)
def test_a_group_of_one_process(memory, traced, directory_of, monkeypatch):
    """Every step but the exchange, on pairs (one sequence) and sums (three: 120 tokens), where sums
    are awaited at once and later, and with one column and several."""
    if memory == "20%" or traced:
        monkeypatch.setattr("mlx_moeflux.distributed.ranks.device", seen_as("cuda"))
        monkeypatch.setattr("mlx_moeflux.experts.compute.columns_count", lambda bank: True)
    path, group = directory_of(SOME[0]), mx.distributed.init()
    assert group.size() == 1
    for batch in (1, 3):
        with load_model(path, distributed=group, expert_memory=memory) as model:
            model.compile_steps = traced
            assert np.array_equal(logits_of(model, batch), expected(path, batch, traced))
            step = model.steps.whole if memory == "100%" else model.steps.segments
            assert bool(step.traces) == bool(traced)
            tokens = {one.tokens for one in model.store.stats().layers.values()}
            assert tokens == {batch * (PROMPT + STEPS)}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_marks_are_made_of_the_last_output(dtype):
    """CUDA graphs order what shares a buffer, and nothing else. The value of the output is none of
    theirs: a NaN changes nothing."""
    ranks, marks = Ranks(mx.distributed.init()), []
    for after in (mx.full((1, 3, 5), mx.nan, dtype), mx.zeros((1, 3, 5), dtype)):
        mx.eval(after)
        ranks.hash_choice(mx.array([[1, 2**31 + 7]], mx.uint32), begins=True)
        marks += ranks.marks(after)
        mx.export_to_dot(graph := StringIO(), marks[-1], after=after)
        assert '"after" -> ' in graph.getvalue()
        assert "Depends" not in graph.getvalue()
    assert [each.tolist() for each in marks] == [[[0, 2**15, 1, 7]]] * 2


@pytest.mark.parametrize("N", [1, 5, 300])
def test_ids_have_one_hash_on_the_host_and_on_the_device(N):
    """Ranks whose experts fit in memory know ids on the device, others on the host, layer by layer.
    Oracle: Python's integers."""
    ranks, rng = Ranks(mx.distributed.init()), np.random.default_rng(N)
    layers = [rng.integers(0, 2**32, (N, 3), np.uint32) for _ in range(3)]
    want = [0] * 3
    for ids in layers:
        columns = ids.T.tolist()
        sums = [sum((2 * n + 1) * e for n, e in enumerate(column)) for column in columns]
        want = [(HASH_FACTOR * one + new) % 2**32 for one, new in zip(want, sums, strict=True)]
    for kinds in product((np.asarray, mx.array), repeat=3):
        for i, (kind, ids) in enumerate(zip(kinds, layers, strict=True)):
            ranks.hash_choice(kind(ids), begins=i == 0)
        (marks,) = ranks.marks(mx.zeros((1, 1, 1)))
        assert marks.tolist() == [[*(one >> 16 for one in want), *(one & 0xFFFF for one in want)]]


@pytest.fixture(params=[(None, "0"), ("1", "1")], ids=["unset", "set"])
def variables(request, monkeypatch):
    """The variables of ranks on GPUs as a user may have them; each as it must be in the end."""
    given, want = request.param
    for name in RANK_VARIABLES:
        monkeypatch.setenv(name, str(given))  # which is undone, whatever follows
        if given is None:
            monkeypatch.delenv(name)
    return dict.fromkeys(RANK_VARIABLES, want)


def found() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in RANK_VARIABLES}


def test_variables_come_before_a_group(variables, monkeypatch):
    seen = []
    monkeypatch.setattr(mx.distributed, "init", lambda **_: seen.append(found()))
    start_group()
    assert seen == [variables]


@pytest.mark.parametrize("function", [load, load_model])
def test_variables_come_before_a_gpu_is_used_and_that_before_ranks_meet(
    function, variables, monkeypatch
):
    order = []

    def meet(group):
        order.append("ranks")
        raise DistributedError("enough")

    monkeypatch.setattr(device, "open_files", lambda: order.append(found()))
    monkeypatch.setattr(steps, "reporting", meet)
    with pytest.raises(DistributedError, match="enough"):
        function(BUNDLED_MODEL, distributed=True)
    assert order == [variables, "ranks"]


def test_one_process_sets_no_variables_of_ranks(variables, monkeypatch):
    before = found()
    load_model(BUNDLED_MODEL).close()
    assert found() == before


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one_process(directory_of, tmp_path):
    cases = [
        {"path": directory_of(SOME[0]), "expert_memory": "100%"},
        {"path": directory_of(SOME[0]), "expert_memory": "100%", "traced": True},
        {"path": directory_of(SOME[1]), "expert_memory": "25%"},
        {"path": directory_of(SOME[0]), "expert_memory": "50%", "traced": True},
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
@pytest.mark.parametrize("sampled", [False, True])
def test_steps_that_run_one_ahead(sampled, directory_of, tmp_path):
    path = directory_of(SOME[0])
    with load_model(path) as model:
        model.compile_steps, options = True, {}
        prompts = prompts_of(model.config.vocab_size)
        if sampled:
            mx.random.seed(0)
            options["sampler"] = make_sampler(temp=1.5)
        alone, together = reply(model, prompts[0], **options), batched(model)
    for one in results(tmp_path, 2, "ahead", {"path": path, "sampled": sampled}):
        assert one["reply"].tolist() == alone
        assert one["batch"].tolist() == together


@pytest.mark.slow
@pytest.mark.parametrize("memories", [("100%", "50%", None), ("50%", "100%", True)])
def test_ranks_with_other_budgets(memories, directory_of, tmp_path):
    """One runs a step as a whole, the other layer by layer."""
    *memories, traced = memories
    path = directory_of(SOME[0])
    cases = [
        [{"path": path, "expert_memory": own, "traced": traced, "batch": n} for n in (1, 2)]
        for own in memories
    ]
    found = results(tmp_path, 2, "logits", *({"cases": own} for own in cases))
    for one in found:
        assert np.array_equal(one["logits0"], expected(path, traced=traced))
        # Its prompt is reduced first.
        assert np.abs(one["logits1"] - expected(path, 2, traced)).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_rank_0_chooses_for_other_devices(traced, directory_of, tmp_path):
    path = directory_of(SOME[0])
    job = {"path": path, "one_kind": False, "traced": traced}
    for one in results(tmp_path, 2, "law", job):
        assert np.array_equal(one["logits"], expected(path, traced=traced))


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_ranks_that_choose_other_experts_are_an_error(traced, directory_of, tmp_path):
    job = {"path": directory_of(SOME[0]), "one_kind": True, "traced": traced}
    for process in start_job(tmp_path, 2, "law", job):
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert error.startswith("error: rank 1 chose other experts than rank 0; ")
        assert error.count("\n") == 1
    if traced:
        for rank in range(2):
            # The step in which it differs is not given out.
            assert (tmp_path / f"step{rank}").read_text() == str(PROMPT)


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
