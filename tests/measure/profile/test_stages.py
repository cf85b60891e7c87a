"""Oracle: a pause put into one part of the model, which must appear in that part's stage."""

from __future__ import annotations

import json
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_moeflux import generate, load
from mlx_moeflux.errors import ExpertFileError, InputError
from mlx_moeflux.experts.io import native_pool, read_pool
from mlx_moeflux.experts.io.readers import PreadReader
from mlx_moeflux.kernels.attention.attention import causal_sdpa
from mlx_moeflux.kernels.delta.gated_delta import gated_delta
from mlx_moeflux.kernels.moe.add_shared import add_shared
from mlx_moeflux.kernels.moe.expert_mix import expert_mix
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.measure.profile.stages import Profiler
from mlx_moeflux.models.moe import SoftmaxRouter

GOLDEN = Path(__file__).parents[2] / "golden"
PAUSE = 0.01
STEPS = 2


def run(memory="100%", *, tokens=STEPS + 1, **options) -> Profiler:
    model, tokenizer = load(BUNDLED_MODEL, expert_memory=memory, **options)
    with model, Profiler(model) as profiler:
        generate(model, tokenizer, "def f(x):", max_tokens=tokens)
    return profiler


def slow(function, seconds=PAUSE):
    def paused(*arguments, **options):
        time.sleep(seconds)
        return function(*arguments, **options)

    return paused


def stage_of_pause(profiler: Profiler, kind: str = "building") -> tuple[str, float]:
    """The stage with the most time in decode steps, and its seconds a call."""
    decode = profiler.phases["decode"]
    stage = max(decode.stages, key=lambda name: getattr(decode.stages[name], kind))
    return stage, getattr(decode.stages[stage], kind) / decode.calls


def run_paused(stage: str, layers: int, memory="100%", **options) -> Profiler:
    """Run until most of the time of building is the pause of `stage`: other work on the machine may
    delay another stage for longer than so short a pause, but not in each of eight runs."""
    for _ in range(8):
        profiler = run(memory, **options)
        found, seconds = stage_of_pause(profiler)
        if found == stage:
            break
    assert found == stage
    assert seconds >= layers * PAUSE
    return profiler


@pytest.mark.parametrize(
    ("kernels", "stage", "layers"),
    [
        ({"sdpa": slow(causal_sdpa)}, "attention", 2),
        ({"gated_delta": slow(gated_delta)}, "delta net", 4),
    ],
)
def test_pauses_of_the_mixers(kernels, stage, layers):
    profiler = run_paused(stage, layers, kernels=kernels)
    times = profiler.phases["decode"].stages[stage]
    assert times.seconds >= times.building


class SlowRouter(SoftmaxRouter):
    def __call__(self, logits):
        time.sleep(PAUSE)
        return super().__call__(logits)


def test_pause_of_the_router():
    run_paused("router", 6, router=SlowRouter(4))


def test_a_watched_router_gets_the_bias():
    tokens = mx.array([[3, 1, 4, 1, 5]])
    with load_model(GOLDEN / "deepseek_v3_groups", dtype=mx.float32) as model:
        expected = model(tokens)
        with Profiler(model) as profiler:
            # Without mx.compile, which it disables, sums are rounded otherwise.
            assert mx.allclose(model(tokens), expected, rtol=1e-3, atol=1e-3).item()
        for block in model.moe_blocks().values():
            block.gate.e_score_correction_bias *= 0
        assert not mx.allclose(model(tokens), expected, rtol=1e-3, atol=1e-3).item()
    assert profiler.phases["prefill"].stages["router"].seconds > 0


def test_pause_of_the_shared_expert():
    run_paused("shared", 6, kernels={"add_shared": slow(add_shared)})


@pytest.mark.parametrize("memory", ["100%", "25%"])
def test_pause_of_the_store(memory):
    run_paused("experts", 6, memory, kernels={"expert_mix": slow(expert_mix)})


@pytest.mark.slow
def test_pause_of_a_read_is_a_stall(monkeypatch):
    monkeypatch.setattr(PreadReader, "read", slow(PreadReader.read, 0.1))
    monkeypatch.setattr(read_pool, "SMALL_BYTES", 0)
    profiler = run("25%", expert_threads=16)
    found, seconds = stage_of_pause(profiler, "seconds")
    phase = profiler.phases["decode"]
    assert found == "stall"
    assert seconds >= 0.1
    assert phase.read_seconds >= 0.1
    assert phase.bytes_read > 0
    reads = [s for s in profiler.slices if s.name == "read"]
    assert sum(s.details["bytes"] for s in reads) == sum(
        p.bytes_read for p in profiler.phases.values()
    )
    assert {s.thread.startswith("moeflux-read") for s in reads} == {True}


def test_pause_of_the_caller_is_the_host(two_bundled_layers):
    model, _ = load(two_bundled_layers, expert_memory="100%")
    with model, Profiler(model) as profiler:
        cache = model.make_cache()
        for _ in range(3):
            mx.eval(model(mx.array([[5]]), cache))
            time.sleep(0.2)
    # That the pause is in no other stage as well, test_stages_add_up_to_the_whole shows.
    assert profiler.phases["decode"].stages["host"].seconds >= 0.2 * 2


def test_the_kinds_of_calls(two_bundled_layers):
    model, _ = load(two_bundled_layers, expert_memory="50%")
    with model, Profiler(model) as profiler:
        for shape in ((1, 7), (1, 1), (3, 1), (3, 1), (3, 5)):
            mx.eval(model(mx.zeros(shape, mx.int32)))
    calls = {name: (p.calls, p.tokens) for name, p in profiler.phases.items()}
    assert calls == {
        "prefill": (1, 7),
        "decode": (1, 1),
        "batch of 3": (2, 6),
        "prefill of 3": (1, 15),
    }


def test_stages_add_up_to_the_whole(two_bundled_layers):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    share = 0.0
    with model:
        for _ in range(8):  # other work on the machine may fall between the phases
            with Profiler(model) as profiler:
                start = time.perf_counter()
                generate(model, tokenizer, "def f(x):", max_tokens=12)
                wall = time.perf_counter() - start
            total = sum(phase.seconds for phase in profiler.phases.values())
            assert total <= wall
            share = max(share, total / wall)
            if share >= 0.6:
                break
    assert share >= 0.6
    for name in ("attention", "delta net", "router", "experts", "shared", "head", "other"):
        assert profiler.phases["decode"].stages[name].seconds > 0, name


@pytest.mark.parametrize("memory", [pytest.param("100%", marks=pytest.mark.slow), "25%"])
def test_nothing_changes_and_nothing_stays(two_bundled_layers, memory):
    model, tokenizer = load(two_bundled_layers, expert_memory=memory)
    with model:
        expected = generate(model, tokenizer, "class A", max_tokens=9)
        names = [name for name, _ in tree_flatten(model.parameters())]

        def state():
            parts = [model, model.store, *model.layers]
            for layer in model.layers:
                parts += [layer.mlp, layer.mlp._store, layer.mlp._router, *layer.children()]
            return [(id(part), type(part)) for part in parts]

        before = state()
        with Profiler(model) as profiler:
            assert generate(model, tokenizer, "class A", max_tokens=9) == expected
            assert [name for name, _ in tree_flatten(model.parameters())] == names
            assert state() != before
        assert state() == before
        slices = len(profiler.slices)
        assert generate(model, tokenizer, "class A", max_tokens=9) == expected
        assert len(profiler.slices) == slices


def test_an_error_inside_leaves_the_model_as_it_was(two_bundled_layers, monkeypatch):
    def fails(self, *arguments):
        raise ExpertFileError("no.")

    monkeypatch.setattr(native_pool, "library", lambda: None)
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    with model:
        kinds = [type(layer) for layer in model.layers]
        profiler = Profiler(model)
        with monkeypatch.context() as patch:
            patch.setattr(PreadReader, "read", fails)
            with pytest.raises(ExpertFileError), profiler:
                generate(model, tokenizer, "def", max_tokens=2)
        assert [type(layer) for layer in model.layers] == kinds
        with profiler:
            profiler.reset()
            generate(model, tokenizer, "def f(x):", max_tokens=3)
        assert profiler.phases["decode"].calls == 2


def test_entering_twice_is_refused(two_bundled_layers):
    model, _ = load(two_bundled_layers)
    with model, Profiler(model) as profiler:
        with pytest.raises(InputError, match="entered already"):
            profiler.__enter__()
        mx.eval(model(mx.array([[1]])))
    assert profiler.phases["decode"].calls == 1


def test_reset_forgets():
    profiler = run()
    profiler.reset()
    assert (profiler.phases, profiler.slices) == ({}, [])


def test_compiled_functions_run_as_written_meanwhile(two_bundled_layers):
    calls = []

    @mx.compile
    def function(x):
        calls.append(1)
        return x + 1

    model, _ = load(two_bundled_layers)
    x = mx.ones(3)
    with model, Profiler(model):
        mx.eval(function(x), function(x), function(x))
    assert len(calls) == 3
    mx.eval(function(x), function(x), function(x))
    assert len(calls) == 4


def test_table_and_trace(tmp_path):
    profiler = run("25%")
    table = profiler.table().splitlines()
    assert table[0].split() == ["ms", "a", "call", "prefill", "decode"]
    rows = {line.split("  ")[0] for line in table[1:]}
    assert {"attention", "delta net", "router", "experts", "shared", "head", "sum"} <= rows
    file = tmp_path / "trace.json"
    profiler.write_trace(file)
    trace = json.loads(file.read_text())
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    calls = [bar for bar in bars if bar["name"] in ("prefill", "decode")]
    assert len(calls) == STEPS + 1
    layers = [bar for bar in bars if bar["name"] == "layer 3"]
    assert len(layers) == STEPS + 1
    for call, layer in zip(calls, layers, strict=True):
        assert call["ts"] <= layer["ts"]
        assert layer["ts"] + layer["dur"] <= call["ts"] + call["dur"] + 1e-3
    assert all(bar["args"]["layer"] in range(6) for bar in bars if bar["name"] == "router")
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert {bar["tid"] for bar in bars} == {event["tid"] for event in named}
    plain = json.loads(json.dumps(profiler.as_dict()))
    assert plain["decode"]["calls"] == STEPS
    assert plain["decode"]["milliseconds"]["experts"] > 0


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path):
    profiler = run(tokens=1)
    with pytest.raises(InputError, match="cannot be written"):
        profiler.write_trace(tmp_path)
