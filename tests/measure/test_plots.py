"""Oracle: the lines' own data against replays, and the pixels of the files."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from mlx_moeflux.cli import main
from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.experts.policies.eviction import EVICTIONS
from mlx_moeflux.experts.telemetry.forecast import Profile, forecast
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Result, Trace, TraceInfo

pytest.importorskip("matplotlib")

from mlx_moeflux.measure import plots
from tests.experts.zipf import zipf_trace


@pytest.fixture(scope="module")
def trace():
    trace = zipf_trace(num_experts=20, experts_per_token=2, layers=3, tokens=60, prompt=5)
    for i, call in enumerate(trace):
        call.nanoseconds = i * 2_000_000
    return trace


def axes():
    return plots._figure().add_subplot()


def lines(subplot):
    return {line.get_label(): np.array(line.get_xydata()) for line in subplot.get_lines()}


def test_hit_rates_are_those_of_replays(trace):
    plots.draw_hit_rates(subplot := axes(), trace)
    drawn = lines(subplot)
    assert set(EVICTIONS) <= set(drawn)
    for share, rate in drawn["lfu"]:
        slots = dict.fromkeys(range(3), round(share / 5))
        assert rate == pytest.approx(100 * simulate(trace, slots, eviction="lfu").hit_rate)
    best = drawn["best possible (Belady)"][:, 1]
    for name in EVICTIONS:
        assert (drawn[name][:, 1] <= best + 1e-9).all()
        assert drawn[name][-1, 1] == pytest.approx(drawn["first uses miss"][0, 1])


def test_reuse_is_the_hit_rate_of_an_lru_bank(trace):
    plots.draw_reuse(subplot := axes(), trace)
    found = next(iter(subplot.get_lines())).get_xydata()
    steps = Trace(trace.info, [call for call in trace if len(call.ids) == 1])
    plots.draw_reuse(subplot := axes(), steps)
    found = next(iter(subplot.get_lines())).get_xydata()
    for slots in (6, 12, 20):
        replayed = simulate(steps, dict.fromkeys(range(3), slots), eviction="lru").hit_rate
        assert abs(found[slots - 1, 1] - 100 * replayed) < 6  # one expert of a token after another


def test_popularity_is_sorted(trace):
    plots.draw_popularity(subplot := axes(), trace)
    image = np.array(subplot.get_images()[0].get_array())
    assert image.shape == (3, 20)
    assert (np.diff(image, axis=1) <= 0).all()
    assert image.mean() == pytest.approx(1)


def test_pairs_are_in_times_of_what_popularity_gives(trace):
    plots.draw_coactivation(subplot := axes(), trace)
    image = subplot.get_images()[0].get_array().filled(np.nan)
    names = [int(label.get_text()) for label in subplot.get_xticklabels()]
    layer = int(subplot.get_title().split()[-1])
    rows = np.concatenate([call.ids for call in trace if call.layer == layer]).tolist()
    shown = range(0, len(image), len(image) // len(names))
    assert [*shown] == [*subplot.get_xticks()]
    pairs = [(a, b) for row in rows for a in row for b in row if a != b]
    count = {e: sum(e in row for row in rows) for e in range(20)}
    every = sum(count[a] * count[b] for a in count for b in count if a != b)
    for i, a in zip(shown, names, strict=True):
        for j, b in zip(shown, names, strict=True):
            if a == b:
                assert np.isnan(image[i, j])
            else:
                expected = pairs.count((a, b)) / (count[a] * count[b] * len(pairs) / every)
                assert image[i, j] == pytest.approx(expected)
    assert len(image) == sum(n > 0 for n in count.values())


def test_bars_are_the_forecast(trace):
    profile = Profile(0.010, 0.001, (0.002, 0.003), host_seconds=0.0005)
    plots.draw_times(subplot := axes(), trace, profile)
    heights = [sum(p.get_height() for p in bars if p.get_width() == 0.6)
               for bars in zip(*subplot.containers, strict=True)]  # fmt: skip
    shares = [share for share in plots.SHARES if share >= 0.1]
    for share, height in zip(shares, heights, strict=True):
        expected = forecast(trace, simulate(trace, f"{100 * share:g}%"), profile)
        assert height == pytest.approx(1e3 * expected.seconds)


def test_times_of_a_trace_are_those_of_its_clock():
    trace = zipf_trace(num_experts=20, experts_per_token=2, layers=3, tokens=40)
    assert Profile.of_trace(trace) is None  # no clock
    random, clock = np.random.default_rng(0), 0
    for call in trace:
        misses = int(random.integers(0, 3))
        call.nanoseconds, call.result = clock, Result(misses=misses)
        clock += 4_000_000 + 1_500_000 * misses
    profile = Profile.of_trace(trace)
    assert profile.token_seconds == pytest.approx(0.012)
    assert profile.read_seconds == pytest.approx((0.0015,))
    for call in trace.calls[60:]:
        call.nanoseconds += 10**9  # a pause between two tokens
    assert Profile.of_trace(trace).token_seconds == pytest.approx(0.012)
    assert Profile.of_trace(Trace(trace.info, trace.calls[:15])) is None  # too few


@pytest.mark.slow
def test_files_are_pictures_of_the_size_of_a_projector(trace, tmp_path):
    from PIL import Image

    files = plots.show(trace, tmp_path / "new" / "folder")
    assert [f.name for f in files] == [
        "hit-rate.png", "popularity.png", "reuse-distance.png", "coactivation.png", "time.png",
    ]  # fmt: skip
    for file in files:
        image = Image.open(file)
        assert image.size == (1600, 900)
        assert sum(count > 0 for count in image.convert("L").histogram()) > 20
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        plots.show(trace, tmp_path / "file")


def test_a_token_with_one_expert_chooses_no_pair(tmp_path):
    single = zipf_trace(num_experts=8, experts_per_token=1, layers=2, tokens=20)
    assert "coactivation.png" not in [file.name for file in plots.show(single, tmp_path)]


def test_a_layer_that_was_never_called_is_not_drawn():
    trace = zipf_trace(num_experts=8, experts_per_token=2, layers=3, tokens=20)
    trace.calls = [call for call in trace if call.layer == 1]
    plots.draw_coactivation(subplot := axes(), trace)
    assert subplot.get_title().endswith("layer 1")


def test_a_prompt_alone_has_no_times(tmp_path):
    prompt = zipf_trace(num_experts=20, experts_per_token=2, layers=3, tokens=0, prompt=9)
    assert len(plots.show(prompt, tmp_path)) == 4
    with pytest.raises(InputError, match="empty"):
        plots.show(Trace(TraceInfo(2, 1, (0,), {0: 1})), tmp_path)


@pytest.mark.slow
def test_from_the_command_line(two_bundled_layers, tmp_path, capsys):
    file = tmp_path / "run.trace"
    generate = ["generate", "--model", str(two_bundled_layers), "-m", "5"]
    assert main([*generate, "--expert-memory", "25%", "--trace", str(file)]) == 0
    Profile(0.010, 0.001, (0.002,)).save(tmp_path / "p.json")
    capsys.readouterr()
    out = ["--out", str(tmp_path / "out"), "--profile", str(tmp_path / "p.json")]
    assert main(["trace", "show", str(file), *out]) == 0
    assert len(capsys.readouterr().out.split()) == 5
    assert main(["trace", "replay", str(file), "--budget", "25%", "50%"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["hit", "rate", "25%", "50%"]
    assert [row[0] for row in rows[1:]] == [*EVICTIONS, "belady"]
    trace = Trace.open(file)
    assert float(rows[1][1]) == pytest.approx(
        100 * simulate(trace, "25%", eviction="lru").hit_rate, abs=0.06
    )


def test_without_matplotlib_one_line_names_the_extra(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"install .*\[plot\]"):
        plots.show(trace, tmp_path)
