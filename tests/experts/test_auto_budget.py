"""Oracle: the resident model's text, and a clock that gives each budget its cost."""

from __future__ import annotations

import json

import pytest

from mlx_moeflux import generate
from mlx_moeflux.cli.common import stats_table
from mlx_moeflux.experts.budget import RESERVE_BYTES, Memory
from mlx_moeflux.experts.policies.chooser import Cost
from mlx_moeflux.experts.policies.timed_budget import TimedBudget, Verdict
from mlx_moeflux.experts.streaming.budget_trial import BudgetTrial
from mlx_moeflux.loading import BUNDLED_MODEL, kept_budget, load, load_model, steps
from mlx_moeflux.measure.benchmark.bench import Options, _Bench
from mlx_moeflux.measure.tune import _budgets
from tests.experts.helpers import Wrapped

PROMPT = "class Stack:\n    def push(self, item):\n"
BLOCK, LAYERS, TOKENS = 27648, 6, 30
LARGER, SMALLER = 15, 7


@pytest.fixture(scope="module")
def right():
    model, tokenizer = load(BUNDLED_MODEL)
    with model:
        others = model.plan.trunk_bytes + model.state_bytes(8192) + RESERVE_BYTES
        yield generate(model, tokenizer, PROMPT, max_tokens=TOKENS), others


@pytest.fixture
def little(monkeypatch, tmp_path, right):
    """A function that gives the machine memory for so many slots a layer, of which `auto` takes
    half, and for nothing else. Trials are short, and a smaller budget is twice as fast."""
    now = [0.0]

    def clock(trial):
        now[0] += 0.010 if trial.timed.wanted.slots[0] > SMALLER else 0.005
        return Cost(now[0], now[0] / 2)

    def little(slots=2 * LARGER, backend="cpu"):
        usable = right[1] + slots * LAYERS * BLOCK
        memory = Memory(backend, usable, usable, "a little memory")
        monkeypatch.setattr(steps, "measure_memory", lambda: memory)

    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(BudgetTrial, "_clock", clock)
    for name, count in (("warm_up", 2), ("settle", 2), ("stretch", 4)):
        monkeypatch.setattr(TimedBudget, name, count)
    little()
    return little


def slots(model):
    """The number of slots of every layer."""
    (count,) = set(model.store.streaming.slots.values())
    return count


def verdict_file(model):
    return kept_budget.file(model.identity, "pread")


@pytest.mark.parametrize("traced", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_better_budget_is_found_kept_and_told(little, right, traced):
    model, tokenizer = load(BUNDLED_MODEL)
    with model:
        model.compile_steps = traced
        assert slots(model) == LARGER
        most = model.store.bank_bytes
        assert most <= model.plan.budget_bytes
        assert "expert memory auto is 2.49 MB, not yet compared with 1.16 MB" in stats_table(
            model.store.stats(), model
        )
        assert generate(model, tokenizer, PROMPT, max_tokens=TOKENS) == right[0]
        assert slots(model) == SMALLER
        assert model.store.bank_bytes < most
        told = "expert memory auto is 1.16 MB: 5.00 ms (2.50 waiting) a step with it, 10.00 ms "
        assert told + "(5.00 waiting) with 2.49 MB" in stats_table(model.store.stats(), model)
        kept = json.loads(verdict_file(model).read_text())
        assert (kept["smaller"], kept["budget_bytes"]) == (True, most)

    with load_model(BUNDLED_MODEL) as model:
        assert slots(model) == SMALLER
        assert str(model.plan).endswith(
            "half of what is left, of which half was measured to be faster"
        )
        assert "(7 slots a layer)" in str(model.plan)
        assert model.store.bank_bytes == model.plan.budget_bytes
        assert generate(model, tokenizer, PROMPT, max_tokens=TOKENS) == right[0]
        assert model.store.streaming.timed_budget.turns == 0
        assert "2.49 MB, measured earlier" in stats_table(model.store.stats(), model)
        assert _budgets(model)[-1] == "93.75%"  # all that auto could give
        model.set_expert_memory("50%")
        assert "auto" not in stats_table(model.store.stats(), model)
        assert slots(model) == 16


def test_a_budget_that_is_set_stays(little, right):
    model, tokenizer = load(BUNDLED_MODEL)
    with model:
        model.set_expert_memory(model.plan.budget_bytes)
        assert generate(model, tokenizer, PROMPT, max_tokens=TOKENS) == right[0]
        assert slots(model) == LARGER
        assert not verdict_file(model).exists()


def test_a_benchmark_measures_one_budget(little):
    bench = _Bench(BUNDLED_MODEL, Options(("auto",)), lambda line: None)
    with bench._ours("auto") as ours:
        assert slots(ours.model) == LARGER
        assert ours.model.store.streaming.timed_budget is None


@pytest.mark.parametrize(
    "options",
    [
        {"expert_memory": "50%"},
        {"expert_memory": LARGER * LAYERS * BLOCK},
        {"expert_reader": "direct"},
        {"expert_reader": "memory"},
        {"safe": True},
        {"slots": 14},  # half of seven slots does not hold a token's four experts
        {"slots": 1},
        {"backend": "cuda"},
    ],
    ids=str,
)
def test_no_other_budget_is_tried(little, options):
    options = dict(options)
    machine = {name: options.pop(name) for name in ("slots", "backend") if name in options}
    little(**machine)
    with load_model(BUNDLED_MODEL, **options) as model:
        assert not model.plan.resident
        assert model.store.streaming.timed_budget is None


def test_a_reader_of_ones_own_tries_no_other_budget(little):
    with load_model(BUNDLED_MODEL) as first:
        reader = Wrapped(first.store.streaming.reader, lambda *_: None)
        reader.name = "pread"
        with load_model(BUNDLED_MODEL, reader=reader) as model:
            assert model.store.streaming.timed_budget is None


def test_a_mapped_file_is_in_the_page_cache(little):
    with load_model(BUNDLED_MODEL, expert_reader="mmap") as model:
        assert model.store.streaming.timed_budget is not None


COSTS = {"with_larger": [0.01, 0.005], "with_smaller": [0.008, 0.002]}


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({"smaller": True, "budget_bytes": 1000, **COSTS}, True),
        ({"smaller": False, "budget_bytes": 1249, **COSTS}, False),
        ({"smaller": True, "budget_bytes": 1251, **COSTS}, None),
        ({"smaller": True, "budget_bytes": 749, **COSTS}, None),
        ({"smaller": True, "budget_bytes": float("nan"), **COSTS}, None),
        ({"smaller": True, "budget_bytes": 10**400, **COSTS}, None),
        ({"smaller": 1, "budget_bytes": 1000, **COSTS}, None),
        ({"smaller": True, "budget_bytes": "many", **COSTS}, None),
        ({"smaller": True, "budget_bytes": 1000}, None),
        ({"smaller": True, "budget_bytes": 1000, **COSTS, "with_larger": [1]}, None),
        ({"smaller": True, "budget_bytes": 1000, **COSTS, "with_larger": 1}, None),
        ({"smaller": True, "budget_bytes": 1000, **COSTS, "with_larger": [1, 2]}, None),
        ({"smaller": True, "budget_bytes": 1000, **COSTS, "with_larger": [1, float("nan")]}, None),
        ([], None),
        ("text", None),
    ],
)
def test_a_kept_verdict_is_taken_if_it_is_sound_and_of_about_that_budget(tmp_path, entry, found):
    path = tmp_path / "budget-x.json"
    assert kept_budget.read(path, 1000) is None
    path.write_text(json.dumps(entry))
    verdict = kept_budget.read(path, 1000)
    if found is None:
        assert verdict is None
    else:
        assert verdict == Verdict(found, Cost(0.01, 0.005), Cost(0.008, 0.002))


def test_a_verdict_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "new" / "cache"))
    files = {kept_budget.file(*key) for key in (("a", "pread"), ("b", "pread"), ("a", "mmap"))}
    assert len(files) == 3
    verdict = Verdict(True, Cost(0.01, 0.005), Cost(0.008, 0.002))
    for path in files:
        kept_budget.write(path, 1000, verdict)
        assert kept_budget.read(path, 1000) == verdict
    (tmp_path / "file").write_text("")
    kept_budget.write(tmp_path / "file" / "budget.json", 1000, verdict)  # not kept, no error
