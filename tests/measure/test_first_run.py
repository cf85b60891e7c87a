"""Oracle: the plan of the same model on the same numbers."""

from __future__ import annotations

from datetime import date

import pytest

from mlx_moeflux.cli import main
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.measure import first_run, rates
from mlx_moeflux.measure.disk import DiskSpeed
from mlx_moeflux.measure.first_run import first_run_hint, loaded_sizes
from mlx_moeflux.measure.plan import open_sizes, plan_model, short


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list:
    """Disks that were measured, on a Mac with 400 GB/s; the bundled model counts as large."""
    found = []

    def disk_speed(place):
        found.append(place)
        return DiskSpeed(5e9, date.today())

    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_run, "LEAST_EXPERT_BYTES", 1)
    monkeypatch.setattr(rates, "chip", lambda: "Apple M3 Max")
    monkeypatch.setattr(rates, "gpu_cores", lambda: 40)
    monkeypatch.setattr(rates, "disk_speed", disk_speed)
    return found


def test_the_hint_has_the_speeds_of_the_plan(measured, monkeypatch):
    with load_model(BUNDLED_MODEL, expert_memory="25%") as model:
        line = first_run_hint(model)
        sizes = loaded_sizes(model)
        monkeypatch.setattr(first_run, "kept_speed", lambda place: DiskSpeed(1, date.today()))
        assert first_run_hint(model) == ""
    stored = open_sizes(BUNDLED_MODEL)
    assert dict(sizes.blocks) == dict(stored.blocks)
    assert bool(sizes.embedding_bytes) == bool(stored.embedding_bytes)
    plan = plan_model("it", sizes, memory="16GB", expert_memory="25%", ssd_gbps=5, memory_gbps=400)
    assert line.startswith(f"expected {short(plan.slow)} to {short(plan.fast)} tokens per second: ")
    assert "memory 400 GB/s (Apple M3 Max), disk 5 GB/s (measured today)" in line
    assert measured == [BUNDLED_MODEL / "model.safetensors"]


@pytest.mark.parametrize(("reader", "cached"), [("pread", 6 * 10**9), ("direct", 0)])
def test_the_hint_counts_the_page_cache_of_the_reader(reader, cached, measured, monkeypatch):
    asked = []

    def speeds(*_, page_cache_bytes, **__):
        asked.append(page_cache_bytes)
        return 1.0, 2.0, ()

    with load_model(BUNDLED_MODEL, expert_memory="25%", expert_reader=reader) as model:
        left = 6 * 10**9 + loaded_sizes(model).state_bytes
        monkeypatch.setattr(first_run, "available_memory", lambda: (left, {}))
        monkeypatch.setattr(first_run, "speeds", speeds)
        assert first_run_hint(model).startswith("expected 1 to 2 tokens per second: ")
    assert asked == [cached]


@pytest.mark.parametrize("why", ["resident", "small", "chip"])
def test_nothing_is_measured_where_nothing_can_be_said(why, measured, monkeypatch):
    if why == "small":
        monkeypatch.setattr(first_run, "LEAST_EXPERT_BYTES", 10**9)
    if why == "chip":
        monkeypatch.setattr(rates, "chip", lambda: "")
    with load_model(BUNDLED_MODEL, expert_memory="100%" if why == "resident" else "25%") as model:
        assert first_run_hint(model) == ""
    assert measured == []


def test_generate_says_it(measured, capsys):
    arguments = ["--expert-memory", "25%", "-m", "2", "--prompt", "a"]
    assert main(["generate", *arguments]) == 0
    found = capsys.readouterr()
    assert "expected" not in found.out
    assert len([one for one in found.err.splitlines() if one.startswith("expected ")]) == 1
