"""Oracle: choices among times made up for the purpose; what loading does with the file."""

from __future__ import annotations

import json

import pytest

from mlx_moeflux.cli import main
from mlx_moeflux.errors import InputError, MemoryBudgetError
from mlx_moeflux.experts.telemetry.forecast import Profile
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.measure import tune as tuning
from mlx_moeflux.measure.tune import Tuning, cheapest, tune


def test_what_takes_least_among_the_nearly_best():
    assert cheapest({1: 3.0, 2: 2.0, 4: 1.02, 8: 1.0, 16: 1.1}) == 4
    assert cheapest({"none": 1.0, "ahead": 0.99}) == "none"
    assert cheapest({"none": 1.0, "ahead": 0.9}) == "ahead"


@pytest.fixture
def fake_times(monkeypatch):
    """Threads up to 4 help; direct reads are slow; 50 % is the knee; looking ahead pays."""

    def read(reader, files, threads, blocks, repeats):
        return blocks * {1: 4.0, 2: 2.0}.get(threads, 1.0) * (2 if reader.name == "direct" else 1)

    def decode(model, tokens):
        slots = next(iter(model.store.slots.values()))
        ahead = model.store.prefetch is not None and model.store.prefetch.name == "ahead"
        # The buffers of direct reads take the memory of one of eight slots.
        return {4: 4.0, 7: 3.1, 8: 3.0, 16: 2.0, 24: 2.4}[slots] * (0.9 if ahead else 1.0)

    monkeypatch.setattr(tuning, "_read", read)
    monkeypatch.setattr(tuning, "_decode", decode)


@pytest.mark.slow
def test_a_reader_whose_buffers_do_not_fit_is_named(fake_times):
    lines = []
    tune(BUNDLED_MODEL, budgets=["12.5%", "50%"], report=lines.append)
    (line,) = (line for line in lines if "the smallest budget that works" in line)
    assert line.startswith("decode, direct, 12.5%: ")


@pytest.mark.slow
def test_the_knee_is_found_not_the_most(fake_times, tmp_path):
    lines = []
    found = tune(BUNDLED_MODEL, budgets=["25%", "50%", "75%"], report=lines.append)
    assert found.expert_memory == "50%"
    assert (found.expert_reader, found.expert_threads, found.prefetch) == ("pread", 4, "ahead")
    assert found.read_seconds == (1, 2, 3, 4, 5, 6, 7, 8)
    assert found.profile() == Profile(found.token_seconds, 0.0, found.read_seconds)
    assert any("8 blocks, direct, 32 threads" in line for line in lines)
    assert dict(found.measured)["decode, 75%"] == 2.4
    found.save(tmp_path / "t.json")
    assert Profile.open(tmp_path / "t.json") == found.profile()

    with load_model(BUNDLED_MODEL, tuning=tmp_path / "t.json") as model:
        assert set(model.store.slots.values()) == {16}
        assert (model.store.threads, model.store.prefetch.name) == (4, "ahead")
        assert model.layers[0].mlp._lookahead is not None
    options = {"expert_memory": "25%", "expert_threads": 2, "prefetch": "none"}
    with load_model(BUNDLED_MODEL, tuning=tmp_path / "t.json", **options) as model:
        assert set(model.store.slots.values()) == {8}
        assert (model.store.threads, model.store.prefetch) == (2, None)


def test_a_profile_of_another_model_is_refused(tmp_path):
    Tuning("another", "50%", "pread", 4, "none", 1.0, 0.0, (1.0,)).save(tmp_path / "t.json")
    with pytest.raises(InputError, match=r"t\.json was written for another model"):
        load_model(BUNDLED_MODEL, tuning=tmp_path / "t.json")
    (tmp_path / "t.json").write_text("[]")
    with pytest.raises(InputError, match=r"t\.json is no profile"):
        load_model(BUNDLED_MODEL, tuning=tmp_path / "t.json")
    with pytest.raises(InputError, match="cannot be written"):
        Tuning("x", "50%", "pread", 4, "none", 1.0, 0.0, (1.0,)).save(tmp_path / "no" / "t.json")


@pytest.mark.slow
def test_on_this_machine(tmp_path, capsys):
    out = tmp_path / "t.json"
    for wrong, words in (
        (["--budgets", "abc"], "not an amount"),
        (["--out", str(tmp_path / "no" / "t.json")], "no such directory"),
    ):
        assert main(["tune", *wrong]) == 1
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1
    few = ["--tokens", "2", "--repeats", "1", "--out", str(out)]
    assert main(["tune", *few, "--budgets", "15%", "40%"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{out}: --expert-memory ")
    assert "decode, prefetch ahead" in printed.err
    data = json.loads(out.read_text())
    assert data["expert_memory"] in ("15%", "40%")
    assert data["expert_threads"] in tuning.THREADS
    assert all(seconds > 0 for _, seconds in data["measured"])
    assert main(["generate", "-m", "3", "--tuning", str(out)]) == 0
    assert "experts streamed" in capsys.readouterr().err


def test_where_everything_fits_everything_is_the_answer():
    found = tune(BUNDLED_MODEL, tokens=2, repeats=1)
    assert (found.expert_memory, found.prefetch) == ("100%", "none")
    assert found.token_seconds > 0


def test_a_budget_too_small_is_said():
    with pytest.raises(MemoryBudgetError, match="663552"):
        tune(BUNDLED_MODEL, budgets=["1%"], tokens=1, repeats=1)
