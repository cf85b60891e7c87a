"""Oracle: the store's own counters, and that wrong results never get a speed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys

import mlx.core as mx
import pytest

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.cli import main
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import ExactnessError, UnsupportedError
from mlx_moeflux.experts.budget import Memory
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.add_shared import add_shared
from mlx_moeflux.measure.benchmark import bench, card, pages
from mlx_moeflux.measure.benchmark import report as output
from mlx_moeflux.measure.benchmark.bench import Options, benchmark
from mlx_moeflux.measure.benchmark.pages import Account, cache_state
from mlx_moeflux.measure.benchmark.report import Spread
from mlx_moeflux.measure.plan import open_sizes
from mlx_moeflux.models import map_checkpoint

SMALL = {"contexts": (9,), "generation_tokens": 6, "trials": 2}


@pytest.fixture(scope="module", autouse=True)
def little_memory(nothing_is_collected):
    """What the bandwidth is measured on: whatever it is, no test here hangs on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "MEMORY_BYTES", {"cpu": 4 << 20, "gpu": 4 << 20})
        yield


@pytest.fixture(scope="module")
def found(checkpoint):
    lines = []
    options = {"compare": "mlx-lm", "cold": pages.can_evict()} | SMALL
    options = Options(expert_memory=("100%", "25%"), **options)
    return benchmark(checkpoint, options, name="a model", say=lines.append), lines


NUMBER = r"\d+\.\d{3}"
SPEEDS = rf"prompt_tps={NUMBER}, generation_tps={NUMBER}, peak_memory={NUMBER}"


@pytest.mark.slow
def test_lines_are_those_of_mlx_lm(checkpoint):
    lines = []
    benchmark(checkpoint, Options(("50%",), **SMALL), say=lines.append)
    assert "Running warmup.." in lines
    assert "Timing with prompt_tokens=9, generation_tokens=6, batch_size=1." in lines
    for title in ("Trial 1: ", "Trial 2: "):
        assert any(re.fullmatch(rf"{title} {SPEEDS}, total_time={NUMBER}", x) for x in lines)
    assert any(re.fullmatch(f"Averages: {SPEEDS}", x) for x in lines)


@pytest.fixture
def with_prediction_layer(tmp_path):
    """A DeepSeek whose last layer is of multi-token prediction, as the published ones have it."""
    path = synthesize("deepseek-tiny", tmp_path / "model", layers=3)
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.slow
def test_layers_of_multi_token_prediction_are_left_out(with_prediction_layer):
    found = benchmark(with_prediction_layer, Options(("100%",), **SMALL))
    assert found.card["layers"] == 1
    assert map_checkpoint(open_checkpoint(with_prediction_layer)).experts.keys() == {1}
    assert open_sizes(with_prediction_layer).blocks.keys() == {1}


def test_trials_take_turns(found):
    _, lines = found
    timed = [line.split(":")[0] for line in lines if "total_time=" in line]
    assert timed == [
        "Trial 1 100%",
        "Trial 1 25%",
        "mlx-lm  1",
        "Trial 2 25%",
        "Trial 2 100%",
        "mlx-lm  2",
    ]
    assert lines.count("Running warmup..") == 1


@pytest.mark.slow
def test_what_does_not_fit_at_once_is_loaded_one_by_one(checkpoint, monkeypatch):
    memory = Memory("cpu", 3_000_000, 3_000_000, "a little memory")
    monkeypatch.setattr(bench, "measure_memory", lambda: memory)
    lines = []
    report = benchmark(checkpoint, Options(("100%", "25%"), **SMALL), say=lines.append)
    assert any("do not take turns" in line for line in lines)
    assert lines.count("Running warmup..") == 2
    assert [run.expert_memory for run in report.runs] == ["100%", "25%"]
    assert report.runs[1].beside_resident is not None


def test_the_card_and_exactness_come_before_any_speed(found):
    _, lines = found
    first = next(i for i, line in enumerate(lines) if line.startswith("Trial"))
    assert sum("GB/s (measured)" in line for line in lines[:first]) == 1
    exact = [line for line in lines[:first] if line.startswith("exact: ")]
    assert len(exact) == 3
    assert "resident (100%) against experts read anew: identical bits" in exact[0]
    assert "logits against mlx-lm computing in float32" in exact[1]


def test_results_add_up(found):
    report, _ = found
    resident, streamed = report.runs
    assert resident.resident
    assert resident.streaming is None
    assert not streamed.resident
    s = streamed.streaming
    assert 0 < s.hit_rate < 1
    assert 0 < s.shuffled < 1
    # Four layers look up four experts each a step; a miss is one block of 13,824 bytes.
    assert s.missed == pytest.approx((1 - s.hit_rate) * 16 * 13_824)
    assert s.sync == 4
    # Nine tokens of a prompt find the banks empty but for one expert a layer.
    assert 4 * 3 * 13_824 <= s.prompt_read <= 4 * 32 * 13_824
    b = streamed.beside_resident
    step = {r.resident: 1 / r.ours.generation_tps.median for r in report.runs}
    assert b.speed == pytest.approx(step[True] / step[False])
    assert b.seconds_more == pytest.approx(step[False] - step[True])
    assert b.disk_seconds is None or b.disk_seconds == pytest.approx(s.missed / report.card["disk"])
    assert resident.beside_resident is None
    assert s.state in (("cold", "unverified") if pages.can_evict() else ("warm", "unverified"))
    assert streamed.distinct == 4.0
    for run in report.runs:
        for name in ("prompt_tps", "generation_tps"):
            mine, other = getattr(run.ours, name), getattr(run.theirs, name)
            assert 0 < mine.low <= mine.median <= mine.high
            assert run.theirs == report.runs[0].theirs
            assert run.ratios[name].low >= mine.low / other.high
            assert run.ratios[name].high <= mine.high / other.low
            assert run.best_ratios[name] == mine.high / other.high
        assert run.percent_of_limit == 100 * run.ours.generation_tps.median / run.limit_tps
    assert json.loads(json.dumps(report.as_dict()))["runs"][1]["streaming"]["sync"] == 4


@pytest.mark.slow
def test_a_wrong_expert_gets_no_speed(checkpoint, monkeypatch):
    lines, original = [], StreamedStore.experts

    def wrong(self, layer, x, ids, weights):
        y = original(self, layer, x, ids, weights)
        return y * 1.05 if layer == 2 else y

    monkeypatch.setattr(StreamedStore, "experts", wrong)
    options = Options(expert_memory=("25%",), **SMALL)
    with pytest.raises(ExactnessError, match=r"streamed \(25%\) against experts read anew"):
        benchmark(checkpoint, options, say=lines.append)
    assert not any("tps" in line for line in lines)


@pytest.mark.slow
def test_wrong_arithmetic_gets_no_speed(checkpoint):
    lines = []

    def wrong(residual, experts, *shared, score):
        return add_shared(residual, experts * 1.05, *shared, score=score)

    load = {"kernels": {"add_shared": wrong}, "check_values": False}
    options = Options(expert_memory=("25%",), compare="mlx-lm", load=load, **SMALL)
    with pytest.raises(ExactnessError, match="logits against mlx-lm"):
        benchmark(checkpoint, options, say=lines.append)
    assert not any("tps" in line for line in lines)


@pytest.mark.slow
def test_a_batch_over_contexts(checkpoint):
    options = Options(
        expert_memory=("50%",),
        contexts=(4, 11),
        batch_sizes=(3, 1),
        generation_tokens=4,
        trials=1,
        prefill_step_size=5,
        load={"dtype": mx.bfloat16},
    )
    report = benchmark(checkpoint, options)
    cases = [(run.context, run.batch) for run in report.runs]
    assert cases == [(4, 3), (4, 1), (11, 3), (11, 1)]
    assert all(4 < run.distinct <= 12 for run in report.runs[::2])
    assert all(run.distinct == 4 for run in report.runs[1::2])
    assert all(run.streaming.state in ("warm", "unverified") for run in report.runs)


def test_table(found, tmp_path):
    report, _ = found
    file = tmp_path / "results.md"
    output.write_markdown(report, file)
    output.write_markdown(report, file)
    rows = [line for line in file.read_text().splitlines() if line.startswith("|")]
    assert len(rows) == 2 * 4
    columns = len(output.COLUMNS) + len(output.COMPARED)
    assert {row.count("|") for row in rows} == {columns + 1}
    assert rows[2].startswith("| resident | 9 | 1 |")
    assert rows[3].startswith("| 25% | 9 | 1 |")
    assert "identical bits" in file.read_text()
    assert re.search(r"mlx_moeflux \d+\.\d+\.\d+, mlx [\d.]+, .*mlx-lm \d", file.read_text())


def test_plot(found, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    output.plot(found[0], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG"


def test_curves(found):
    curves = output._curves(found[0], "generation_tps", by_context=False)
    assert [len(points) for points in curves.values()] == [2, 2]
    assert [x for x, _ in curves["mlx_moeflux"]] == sorted(r.budget_bytes / 1e9
                                                          for r in found[0].runs)  # fmt: skip
    curves = output._curves(found[0], "prompt_tps", by_context=True)
    assert set(curves) == {"mlx_moeflux, resident", "mlx_moeflux, 25%", "mlx-lm"}


def test_a_plot_without_matplotlib_is_one_line(found, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"install .*\[plot\]"):
        output.plot(found[0], tmp_path / "curve.png")


@pytest.mark.parametrize(
    ("cold", "cached", "from_disk", "state"),
    [
        (True, [0.0, 0.01], [0.97, 1.2], "cold"),
        (True, [0.0, 0.05], [0.97, 1.2], "unverified"),
        (True, [0.0, 0.0], [0.94, 1.2], "unverified"),
        (False, [1.0, 0.9], [0.0, 0.04], "warm"),
        (False, [1.0, 1.0], [0.0, 0.06], "unverified"),
        (True, [None, None], [1.0, 1.0], "unverified"),
        (False, [1.0, 1.0], [None, 0.0], "unverified"),
    ],
)
def test_cold_and_warm_are_what_the_counters_say(cold, cached, from_disk, state):
    accounts = [Account(ExpertStats([0]), cached=share) for share in cached]
    for account, share in zip(accounts, from_disk, strict=True):
        account.from_disk = share
    assert cache_state(accounts, cold=cold) == state


@pytest.fixture
def macos(monkeypatch):
    """Files that macOS was told to read and write past its page cache."""
    files: set[str] = set()
    call, link = fcntl.fcntl, os.readlink

    def control(fd, command, *arguments):
        if command == 48:
            return files.add(os.path.basename(link(f"/proc/self/fd/{fd}")))
        return call(fd, command, *arguments)

    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    monkeypatch.setattr(fcntl, "F_NOCACHE", 48, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    return files


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_page_cache_that_cannot_be_emptied_is_passed_by(macos, tmp_path, capsys):
    table = tmp_path / "table.md"
    given = ["--synthetic", "qwen3.5-tiny", "--layers", "1", "--synthetic-dir", str(tmp_path / "s")]
    given += ["-p", "2", "-g", "2", "-n", "1", "--expert-memory", "100%,50%"]
    assert main(["benchmark", *given, "--cold", "--markdown", str(table)]) == 0
    # Written under the first name, read under the second.
    assert {"model.safetensors.tmp", "model.safetensors"} <= macos
    note = "The page cache was not emptied: files are written and read past it (F_NOCACHE)"
    lines = capsys.readouterr().out.strip().splitlines()
    assert any(line.startswith(note) for line in lines)
    report = json.loads(lines[-1])
    assert report["page_cache"].startswith(note)
    assert report["runs"][1]["streaming"]["state"] == "unverified"
    assert note in table.read_text()


@pytest.mark.parametrize("given", [["--compare", "mlx-lm"], ["--expert-reader", "mmap"]])
def test_what_fills_a_page_cache_that_cannot_be_emptied_is_refused(given, monkeypatch, capsys):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert main(["benchmark", "--cold", *given]) == 1
    assert re.search(r"error: .*which this system cannot empty; leave", capsys.readouterr().err)


def test_spread():
    assert Spread.of([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0)


@pytest.mark.slow
def test_command_ends_with_json(checkpoint, tmp_path, capsys):
    table = tmp_path / "table.md"
    arguments = ["benchmark", "--model", str(checkpoint), "-p", "6", "-g", "3", "-n", "1"]
    assert main([*arguments, "--expert-memory", "25%,100%", "--markdown", str(table)]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert [run["expert_memory"] for run in report["runs"]] == ["25%", "100%"]
    assert report["runs"][0]["generation"] == 3
    assert table.read_text().startswith("### model\n\n`mlx_moeflux benchmark --model ")
    assert "--expert-memory 25%,100%`" in table.read_text()


@pytest.mark.slow
def test_synthetic_models_are_written_measured_and_kept(tmp_path, capsys):
    folder = tmp_path / "kept"
    arguments = ["benchmark", "--synthetic", "qwen3.5-tiny", "--layers", "2", "-p", "4"]
    arguments += ["-g", "2", "-n", "1", "--synthetic-dir", str(folder)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"routing: \d+\.\d experts in 32 tokens; an LRU of half hits", out)
    report = json.loads(out.strip().splitlines()[-1])
    assert report["model"] == "synthetic qwen3.5-tiny, 2 layers, skew 1"
    assert report["command"] == (
        "mlx_moeflux benchmark --prompt-tokens 4 --generation-tokens 2 --num-trials 1 "
        "--synthetic qwen3.5-tiny --layers 2"
    )
    assert json.loads(out.strip().splitlines()[-1])["card"]["layers"] == 2
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert main(arguments) == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-g", "1"], "generation_tokens is 1"),
        (["-n", "0"], "trials is 0"),
        (["-b", "0"], "batch_sizes has 0"),
        (["--context", "5,0"], "contexts has 0"),
        (["--prefill-step-size", "0"], "prefill_step_size is 0"),
        (["--compare", "other"], "'other'"),
        (["--layers", "3"], "--layers needs --synthetic"),
        (["--synthetic", "qwen3.5-tiny", "--model", "x"], "either --model or --synthetic"),
        (["--synthetic", "nonesuch"], "nonesuch"),
        (["--markdown", "no/such/folder/x.md"], "no/such/folder"),
        (["--compare", "mlx-lm", "--experts-per-token", "2"], "nothing to compare with"),
        (["--pipeline"], "--pipeline does not apply"),
        (["-qa"], "-qa does not apply"),
        (["--expert-memory", "1kB", "-p", "5", "-g", "2"], "smallest"),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys):
    assert main(["benchmark", *arguments]) == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1
    assert err[0].startswith("error: ")
    assert words in err[0]


@pytest.mark.parametrize("arguments", [["--context", "a"], ["--expert-memory", "1GB,,"]])
def test_unreadable_lists_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        main(["benchmark", *arguments])
    assert done.value.code == 2
    assert "argument --" in capsys.readouterr().err
