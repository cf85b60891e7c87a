"""Traces, attribution and statistics begin, end and are read while five threads generate.

Oracle: each thread's text alone; what a trace holds is whole calls.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import generate, load
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.experts.telemetry.events import Listeners, joined, parted
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.stats import LayerStats
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.generation.text import stream_generate
from mlx_moeflux.loading import BUNDLED_MODEL

PROMPTS = ["def binary_search(", "import os\n", "class Stack:\n", "for i in", "try:\n    "]
TOKENS = 2
LOADED = {
    "streamed": {"expert_memory": "50%"},
    "prefetched": {"expert_memory": "25%", "prefetch": "ahead"},
    "resident": {"expert_memory": "100%"},
}


# The other two with -m slow.
STREAMED = [pytest.param(name, marks=[pytest.mark.slow] * (name != "streamed")) for name in LOADED]


@pytest.fixture(params=LOADED)
def loaded(request, two_bundled_layers):
    model, tokenizer = load(two_bundled_layers, **LOADED[request.param])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-3)
    with model:
        yield model, tokenizer
    sys.setswitchinterval(before)


def check_trace(file, model) -> None:
    trace = Trace.open(file)
    assert trace.complete
    E = model.store.num_experts
    for call in trace:
        assert call.ids.max() < E
        assert (np.sort(call.ids, axis=1) == call.ids).all()
        if model.store.streaming:
            found = call.result
            assert found is not None
            assert found.hits + found.misses == len(np.unique(call.ids))


def tracing(model, folder, name) -> None:
    file = folder / name
    with model.trace(file):
        threading.Event().wait(random.random() * 0.01)
    check_trace(file, model)


def attributing(model, folder, name) -> None:
    del folder, name
    with model.attribute():
        threading.Event().wait(random.random() * 0.01)
        for call in list(model.store.stats().calls or ()):
            assert call.as_dict()["layer"] in model.store.layers


def reading(model, folder, name) -> None:
    del folder, name
    stats = model.store.stats()
    before = stats.snapshot()
    assert str(stats)
    assert stats.as_dict()["total"]["tokens"] >= before.total.tokens
    assert stats.since(before).total.tokens >= 0
    for counts in (*stats.snapshot().layers.values(), stats.total, stats.since(before).total):
        check_counts(counts.as_dict())
    for counts in (stats.as_dict()["total"], *stats.as_dict()["layers"].values()):
        check_counts(counts)
    model.state_bytes(100)
    streaming = model.store.streaming
    for layer in () if streaming is None else streaming.slots:
        residents = streaming.residents(layer)
        assert len(set(residents.values())) == len(residents)


def check_counts(counts) -> None:
    assert counts["hits"] + counts["misses"] == counts["lookups"]
    assert counts["prefetched_hits"] <= counts["hits"]
    assert counts["foreseen"] <= counts["proposed"]
    assert (counts["reads"] == 0) == (counts["bytes_read"] == 0)


def stress(loaded, folder, rounds: int, disturb) -> None:
    """Generate in five threads `rounds` times, while two others call `disturb` again and again."""
    model, tokenizer = loaded
    expected = [generate(model, tokenizer, p, max_tokens=TOKENS) for p in PROMPTS]
    faults: list[str] = []

    def guarded(action, *arguments):
        try:
            action(*arguments)
        except BaseException:  # noqa: BLE001 (of a thread)
            faults.append(traceback.format_exc())

    def write(i):
        stream = stream_generate(model, tokenizer, PROMPTS[i], max_tokens=TOKENS)
        text = "".join(response.text for response in stream)
        if text != expected[i]:
            faults.append(f"{text!r} instead of {expected[i]!r}")

    def disturbing(name):
        while any(writer.is_alive() for writer in writers):
            disturb(model, folder, name)
            threading.Event().wait(0.005)

    for n in range(rounds):
        writers = [threading.Thread(target=guarded, args=(write, i)) for i in range(len(PROMPTS))]
        others = [threading.Thread(target=guarded, args=(disturbing, f"t{j}")) for j in range(2)]
        for thread in (*writers, *others):
            thread.start()
        for thread in (*writers, *others):
            thread.join()
        assert not faults, f"round {n}: {faults[0]}"
    assert model.store.events is None
    assert [generate(model, tokenizer, p, max_tokens=TOKENS) for p in PROMPTS] == expected


@pytest.mark.parametrize("loaded", STREAMED, indirect=True)
@pytest.mark.parametrize("disturb", [tracing, pytest.param(reading, marks=pytest.mark.slow)])
def test_five_threads(loaded, tmp_path, disturb):
    stress(loaded, tmp_path, 1, disturb)


@pytest.mark.slow
@pytest.mark.parametrize("disturb", [tracing, reading, attributing])
def test_1000_runs_of_five_threads(loaded, tmp_path, disturb):
    """Three ways to load, three disturbances."""
    stress(loaded, tmp_path, 112, disturb)


@pytest.mark.parametrize("loaded", ["prefetched"], indirect=True)
def test_statistics_are_of_one_moment(loaded, monkeypatch):
    """A thread that changes counts pauses after each: others meet every half of a change."""

    def slow(self, name, value):
        object.__setattr__(self, name, value)
        if threading.current_thread() is writer:
            time.sleep(1e-5)

    model, tokenizer = loaded
    monkeypatch.setattr(LayerStats, "__setattr__", slow)
    writer = threading.Thread(
        target=generate, args=(model, tokenizer, "import"), kwargs={"max_tokens": 2}
    )
    seen, stats, (block,) = [], model.store.stats(), set(model.store.block_bytes.values())
    writer.start()
    while writer.is_alive():
        seen.append(stats.snapshot().total)
        for counts in (seen[-1].as_dict(), stats.as_dict()["total"]):
            check_counts(counts)
            assert counts["bytes_read"] == counts["reads"] * block
    writer.join()
    monkeypatch.undo()
    assert sum(a.lookups < b.lookups for a, b in itertools.pairwise(seen)) > 3


@pytest.mark.parametrize("loaded", ["streamed"], indirect=True)
def test_traces_that_overlap(loaded, tmp_path):
    """The first ends before the second: the second goes on, and its hits are those of a replay."""
    model, tokenizer = loaded
    first, second = model.trace(tmp_path / "first"), model.trace(tmp_path / "second")
    first.__enter__()
    second.__enter__()
    generate(model, tokenizer, PROMPTS[0], max_tokens=2)
    first.__exit__(None, None, None)
    assert model.store.events is not None
    generate(model, tokenizer, PROMPTS[1], max_tokens=2)
    second.__exit__(None, None, None)
    assert model.store.events is None
    traces = [Trace.open(tmp_path / name) for name in ("first", "second")]
    assert 0 < len(traces[0].calls) < len(traces[1].calls)
    recorded = traces[1].recorded()
    rate = recorded.hits / (recorded.hits + recorded.misses)
    assert simulate(traces[1], traces[1].info.slots).hit_rate == rate


def test_listeners_come_and_go_in_any_order():
    heard: list[str] = []
    a, b, c = (lambda event, name=name: heard.append(name + event) for name in "abc")
    both = joined(joined(None, a), b)
    all_of_them = joined(both, c)
    all_of_them("1")
    parted(all_of_them, b)("2")
    assert heard == ["a1", "b1", "c1", "a2", "c2"]
    assert parted(both, a) is b
    assert parted(b, b) is None
    assert parted(None, a) is None
    assert isinstance(all_of_them, Listeners)


def test_a_file_that_cannot_be_written_adds_no_listener(tmp_path):
    model, _ = load(BUNDLED_MODEL, expert_memory="50%")
    with model, pytest.raises(MoefluxError), model.trace(tmp_path):
        pass
    assert model.store.events is None


TOGETHER = """
    import faulthandler, sys, threading
    import mlx_moeflux
    from mlx_moeflux.loading import BUNDLED_MODEL

    rounds, threads = map(int, sys.argv[1:])
    texts = set()

    def run(i):
        memory = ["13%", "25%", "100%"][i % 3]
        model, tokenizer = mlx_moeflux.load(BUNDLED_MODEL, expert_memory=memory)
        with model:
            texts.add(mlx_moeflux.generate(model, tokenizer, "def f(", max_tokens=3))

    for _ in range(rounds):
        faulthandler.dump_traceback_later(120, exit=True)
        started = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    print(texts)
"""


def load_together(rounds: int, threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TOGETHER), str(rounds), str(threads)],
        capture_output=True,
        text=True,
        check=False,
    )
    model, tokenizer = load(BUNDLED_MODEL)
    with model:
        expected = generate(model, tokenizer, "def f(", max_tokens=3)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{ {expected} }\n"


def test_models_loaded_in_threads_wait_for_nothing_and_the_process_ends_well():
    """MLX keeps Python objects for each thread. If the last threads take them along after Python
    has ended, the process aborts."""
    load_together(1, 4)


@pytest.mark.slow
def test_eight_models_loaded_in_threads_a_hundred_times():
    load_together(100, 8)


def test_mlx_forgets_a_thread_in_the_thread_and_before_it_is_joined(monkeypatch):
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="100%")
    cleared: list[int] = []
    monkeypatch.setattr(mx, "clear_streams", lambda: cleared.append(threading.get_ident()))

    def run():
        own.append(threading.get_ident())
        for _ in range(2):
            generate(model, tokenizer, "def f(", max_tokens=1)

    with model:
        for threads in (1, 2):
            own: list[int] = []
            started = [threading.Thread(target=run) for _ in range(threads)]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
            assert sorted(cleared) == sorted(own)
            cleared.clear()
        run()  # the main thread keeps its traces
        assert cleared == []
