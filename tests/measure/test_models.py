"""Oracles: the layouts of tests/published, public sizes of downloads, and plans of one model."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from mlx_moeflux.checkpoint.catalogue import FILE, KnownModel, catalogue
from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import format_bytes, make_plan, measure_memory
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.measure import models
from mlx_moeflux.measure.models import KINDS, known_sizes, rank_models
from mlx_moeflux.measure.plan import described_memory, open_sizes, plan_model, span
from mlx_moeflux.measure.rates import Rates
from mlx_moeflux.models import MODEL_TYPES
from tests.experts.simulated_mac import GIB, MACS, days, show, states
from tools.catalogue import as_entry, filled, sizes_of_layout

ENTRIES = {entry["name"]: entry for entry in json.loads(FILE.read_text())["models"]}
# Layouts of tens of thousands of tensors take a second.
MANY = ("qwen3-coder-next", "minimax-m2.7", "deepseek-v3.2", "glm-5.2", "kimi-k2.6")
MANY += ("glm-4.6", "qwen3-coder-480b", "gpt-oss-120b", "qwen3-coder-30b")
MAC = Rates(400, "Apple M3 Max", 5, "measured today")
FLAGS = ("--ssd-gbps", "5", "--memory-gbps", "400")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MANY)) for name in ENTRIES]
)
def test_sizes_are_those_of_the_layout(name):
    """What ``python -m tools.catalogue`` writes is what lies there."""
    entry = ENTRIES[name]
    assert filled(entry) == entry
    assert entry["sizes"]["model_type"] in MODEL_TYPES


@pytest.mark.parametrize("name", ENTRIES)
def test_downloads_have_the_published_bytes(name):
    """The weights, and an image tower of up to 1.3 GB. Packed integers are held with the scales
    and biases of groups of 32, 5 bits of 4.5. One repository has a head of multi-token prediction,
    of 2.6e9 weights in 4.5 bits."""
    entry, model = ENTRIES[name], catalogue()[name]
    sizes = known_sizes(model)
    assert sizes.state_bytes > 0
    assert sizes.context == 8192
    weights = sizes.trunk_bytes + sizes.expert_bytes + sizes.table_bytes
    more = model.download_bytes - weights
    if name == "kimi-k2.6":
        more += sizes.expert_bytes // 10
    if name == "flash-next":
        more -= 2_607_150_848 * 9 // 16
    assert 0 <= more < 1.5e9
    assert (entry["download_source"] is None) == (more == 0)


def test_a_conversion_has_the_sizes_of_its_layout():
    """The layout of floats as if converted, against the layout of the conversion."""
    converted = as_entry(sizes_of_layout("qwen3.5-35b-a3b-4bit"))
    planned = as_entry(sizes_of_layout("qwen3.5-35b-a3b", bits=4))
    assert planned["block_bytes"] == converted["block_bytes"]
    assert planned["trunk_bytes"] == pytest.approx(converted["trunk_bytes"], rel=0.01)
    # 4 bits and a scale and a bias of 16 bits for 32 weights: 5 bits a weight.
    flash = as_entry(sizes_of_layout("qwen3.8-flash-next", bits=4, group_size=32))
    assert flash["block_bytes"] == 3 * 640 * 2560 * 5 // 8


def test_an_entry_of_a_checkpoint_has_its_headers_and_files(tmp_path):
    packed = convert(BUNDLED_MODEL, tmp_path / "packed")
    (packed / "notes.md").write_text("not downloaded")
    entry = filled(ENTRIES["qwen3.6"], str(packed))
    sizes = open_sizes(BUNDLED_MODEL)
    assert entry["sizes"]["block_bytes"] == sizes.blocks[0]
    assert entry["sizes"]["layers"] == len(sizes.blocks)
    files = [f for f in packed.rglob("*") if f.is_file() and f.suffix != ".md"]
    assert entry["download_bytes"] == sum(f.stat().st_size for f in files if f.name[0] != ".")
    assert filled(entry) == entry


@pytest.mark.parametrize("memory", ["8GB", "16GB", "64GB", "512GB"])
def test_models_are_ranked_by_how_they_run(memory):
    found = rank_models(memory, MAC)
    assert {one.model.name for one in found} == set(ENTRIES)
    order = [(KINDS.index(one.kind), -one.plan.slow) for one in found]
    assert order == sorted(order)
    for one in found:
        plan = plan_model(
            one.model.name, known_sizes(one.model), memory=memory, ssd_gbps=5, memory_gbps=400
        )
        assert one.plan == plan
        assert (one.kind == "too large") == (not plan.fits)
        assert (one.kind == "resident") == (plan.fits and plan.resident)
        if one.kind in ("streams well", "streams slowly"):
            assert (one.kind == "streams well") == (plan.estimate >= 5)
        assert one.least_bytes == plan.sizes.bytes_per_token
    kinds = {one.model.name: one.kind for one in found}
    assert kinds["gpt-oss-20b"] == (
        "resident" if memory in ("64GB", "512GB") else kinds["gpt-oss-20b"]
    )
    assert kinds["kimi-k2.6"] == ("too large" if memory in ("8GB", "16GB") else "streams slowly")


@pytest.mark.parametrize("memory", ["16GB", "64GB", "2GB"])
def test_the_table_fits_a_terminal(memory, capsys):
    assert main(["models", "--memory", memory, *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1] == "memory 400 GB/s (given), disk 5 GB/s (given)"
    assert ("expected" in lines[2]) == (memory != "2GB")
    rows, _, too_large = "\n".join(lines).partition("too large: ")
    for name in ENTRIES:
        listed = name in too_large.replace(",", "").split()
        assert len([line for line in rows.splitlines() if line.split()[0] == name]) == 1 - listed
    assert "hf cache rm" in lines[-1]
    assert ("budget:" in "".join(lines)) == (memory != "2GB")
    share = "3/4" if memory == "64GB" else "2/3"
    ending = f"usable (0.9 of the {share} of {memory[:-2]} GiB that macOS gives a GPU)"
    assert lines[0].endswith(ending)
    assert ("with nothing else open." in lines) == (memory != "2GB")


@pytest.mark.parametrize(
    ("slow", "fast", "written"),
    [(0.231, 0.234, "0.23"), (0.23, 0.24, "0.23 to 0.24"), (98.4, 1234, "98 to 1200")],
)
def test_two_speeds_that_look_the_same_are_one(slow, fast, written):
    assert span(slow, fast) == written


def test_numbers_for_programs(capsys):
    assert main(["models", "--memory", "16GB", "--json", *FLAGS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["memory_bytes"] == 16 * GIB
    assert found["machine"]["described"] is True
    assert found["machine"]["ssd_source"] == "given"
    by_name = {model["name"]: model for model in found["models"]}
    flash = by_name["flash-next"]
    assert flash["repository"] == "rapid-mlx/Qwen3.8-Flash-Next-4bit"
    assert flash["license"] == "qwen-community-1.0"
    assert flash["download_bytes"] == 104_681_488_408
    assert flash["expert_bytes"] == 48 * 512 * 2_764_800
    slow, fast = flash["expected_tokens_per_second"]
    assert 0 < slow < fast


@pytest.fixture(params=MACS)
def mac(request, monkeypatch):
    """Return a function that makes a Mac of some GiB whose memory is in a state."""
    gib = request.param
    working_set = gib * GIB * 2 // 3 if gib <= 32 else gib * GIB * 3 // 4
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    info = {"max_recommended_working_set_size": working_set}
    monkeypatch.setattr(mx, "device_info", lambda device=None: info)

    def become(state):
        show(monkeypatch, states(gib)[state].vm_stat())
        return gib

    return become


@pytest.mark.parametrize("state", ["idle", "busy", "file-heavy"])
def test_models_and_plan_say_what_loading_decides(mac, state, capsys):
    mac(state)
    assert main(["models", "--json", *FLAGS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["described"] is False
    memory = measure_memory()
    assert found["machine"]["memory_bytes"] == memory.free_bytes
    for one in found["models"]:
        sizes = known_sizes(catalogue()[one["name"]])
        plan = make_plan(
            "auto",
            sizes.blocks,
            num_experts=sizes.num_experts,
            experts_per_token=sizes.experts_per_token,
            trunk_bytes=sizes.trunk_bytes,
            kv_bytes=sizes.state_bytes,
            row_bytes=64_000_000 if sizes.table_rows else 0,
            memory=memory,
        )
        assert one["budget_bytes"] == pytest.approx(plan.budget_bytes, abs=0.01 * 64e6)
        assert plan.resident == (one["kind"] == "resident") or one["kind"] == "too large"
    assert main(["plan", str(BUNDLED_MODEL), *FLAGS]) == 0
    free, usable = format_bytes(memory.free_bytes), format_bytes(memory.usable_bytes)
    assert f"\nmemory   {free} available now, of which {usable} usable\n" in capsys.readouterr().out
    assert main(["models", *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"memory {usable} usable ({memory.what})"
    runs = any(one["kind"] != "too large" for one in found["models"])
    assert ("with what is available now." in lines) == runs


def test_a_described_mac_is_an_idle_one(mac, monkeypatch):
    """Of the experts' and everything else's memory, an eighth more or less. Programs of an idle Mac
    take no third of 64 GiB."""
    gib = mac("idle")
    if gib == 64:
        show(monkeypatch, days()["64, after boot"].vm_stat())
    measured, described = measure_memory(), described_memory(f"{gib}GB")
    ratio = described.usable_bytes / measured.usable_bytes
    assert ratio == pytest.approx(1, abs=1 / 8)
    assert f" of {gib} GiB " in described.what
    # What is left to pages of files is not promised above what there is.
    assert 0 < described.system_bytes < 1.15 * measured.system_bytes
    text = str(plan_model("it", known_sizes(catalogue()["qwen3.6"]), memory=f"{gib}GB"))
    assert f"{gib} GiB, of which " in text
    assert "usable with nothing else open\n" in text


def test_what_is_unknown_is_a_question_mark(monkeypatch, capsys):
    known = catalogue()["qwen3.6"]
    values = {**vars(known), "license": None, "download_bytes": None}
    monkeypatch.setattr(models, "catalogue", lambda: {"x": KnownModel(**values)})
    assert main(["models", "--memory", "16GB", *FLAGS]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("qwen3.6")]
    assert row.split()[-2:] == ["?", "?"]


def test_wrong_numbers_are_one_line(capsys):
    for wrong in (["--memory", "auto"], ["--memory", "much"], ["--ssd-gbps", "nan"]):
        assert main(["models", "--memory", "16GB", *FLAGS, *wrong]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(InputError):
        rank_models("16GB", MAC._replace(memory_gbps=0))
