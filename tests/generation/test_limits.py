"""Oracle: the limits that MLX returns, and a stand-in for Metal that records calls."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import threading

import mlx.core as mx
import pytest

from mlx_moeflux import BatchGenerator, backend, generate, load, stream_generate
from mlx_moeflux.errors import InputError
from mlx_moeflux.generation import memory
from mlx_moeflux.generation.memory import LIMITS, Limits, Needs, parse_wired_memory
from mlx_moeflux.generation.text import generate_step
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.engine import Engine, EngineOptions

RECOMMENDED = 10_000_000


def cache_limit() -> int:
    """MLX tells a limit only when it is changed."""
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    return limit


@pytest.fixture
def original():
    limit = cache_limit()
    mx.set_cache_limit(500_000_000)
    yield 500_000_000
    mx.set_cache_limit(limit)


@pytest.fixture
def wired(monkeypatch):
    """Every limit that a Metal which only takes notes was given; a new process."""
    limits, synchronised = [], []

    def set_wired_limit(limit):
        assert synchronised, "the limit changes under work that is under way"
        synchronised.clear()
        limits.append(limit)
        return 0

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "synchronize", lambda: synchronised.append(True))
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    working_set = {"max_recommended_working_set_size": RECOMMENDED}
    monkeypatch.setattr(mx, "device_info", lambda device: working_set)
    return limits


def test_freed_buffers_are_bounded_while_tokens_are_made(two_bundled_layers, original):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    with model:
        stream = stream_generate(model, tokenizer, "def f(x):", 5)
        assert cache_limit() == original
        next(stream)
        prompt = len(tokenizer.encode("def f(x):"))
        expected = max(64 << 20, model.activation_bytes(prompt))
        assert cache_limit() == min(original, expected) < original
        list(stream)
        assert cache_limit() == original


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_limits_are_put_back_however_it_ends(two_bundled_layers, original, how):
    model, _ = load(two_bundled_layers, expert_memory="25%")
    with model:
        stream = generate_step(mx.array([1, 2, 3]), model, max_tokens=9)
        next(stream)
        assert cache_limit() < original
        if how == "closed":
            stream.close()
        else:
            with pytest.raises(KeyError):
                stream.throw(KeyError())
        assert cache_limit() == original


def test_a_tight_limit_stays_tight():
    limit = mx.set_cache_limit(1_000_000)
    try:
        with LIMITS.held(Needs(cache=2_000_000, wired=0)):
            assert cache_limit() == 1_000_000
        assert cache_limit() == 1_000_000
    finally:
        mx.set_cache_limit(limit)


def test_what_is_kept_beyond_the_limit_is_let_go(original):
    # Evaluated and dropped: MLX keeps the buffer.
    mx.eval(mx.zeros(100 << 20, mx.uint8))
    assert mx.get_cache_memory() >= 100 << 20
    with LIMITS.held(Needs(cache=50 << 20, wired=0)):
        assert mx.get_cache_memory() <= 50 << 20


def test_wired_memory_is_set_once_in_a_process(wired):
    limits = Limits()
    for _ in range(2):
        with limits.held(Needs(cache=1, wired=3_000_000)):
            assert wired == [3_000_000]
        with limits.held(Needs(cache=1, wired=4_000_000)):
            assert wired == [3_000_000]
    assert wired == [3_000_000]


def test_wired_memory_is_never_more_than_the_working_set(wired):
    with Limits().held(Needs(cache=1, wired=10**12)):
        assert wired == [RECOMMENDED]


def test_wired_memory_does_not_change_while_something_is_under_way(wired):
    limits = Limits()
    with limits.held(Needs(cache=1, wired=0)):
        with limits.held(Needs(cache=1, wired=3_000_000)):
            assert wired == []
        assert wired == []
    with limits.held(Needs(cache=1, wired=2_000_000)):
        assert wired == [2_000_000]


def test_nothing_is_wired_without_metal(wired, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with Limits().held(Needs(cache=1, wired=3_000_000)):
        assert wired == []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    with Limits().held(Needs(cache=1, wired=3_000_000)):
        assert wired == []


@pytest.mark.parametrize(
    ("option", "single", "batch"),
    [(None, True, False), ("auto", True, True), ("off", False, False), ("2MB", 2, 2)],
)
def test_who_wires_memory(option, single, batch):
    with load(BUNDLED_MODEL, expert_memory="25%", wired_memory=option)[0] as model:
        whole = model.plan.trunk_bytes + sum(model.plan.slots.values()) * 27_648 + 55
        expected = {True: whole, False: 0, 2: 2_000_000}
        for wanted, several in ((single, False), (batch, True)):
            needs = Needs.of(model, prompt_tokens=9, state_bytes=55, batch=several)
            assert needs.wired == expected[wanted]


@pytest.mark.parametrize("option", [None, "auto", "off", "3MB"])
def test_wired_memory_of_batches_a_server_and_generations(two_bundled_layers, monkeypatch, option):
    wired = []
    monkeypatch.setattr(memory, "_most_wired", lambda: RECOMMENDED)
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    monkeypatch.setattr(LIMITS, "_wired", False)
    model, _ = load(two_bundled_layers, expert_memory="25%", wired_memory=option)
    with model:
        generator = BatchGenerator(model, stop_ids=[])
        generator.insert([[1, 2]], [2])
        while len(generator):
            generator.step()
        assert wired == []
        asyncio.run(serve_shortly(model))
        auto, single = (
            Needs.of(model, prompt_tokens=9, state_bytes=model.state_bytes(n) + more).wired
            for n, more in ((0, 1_000_000), (4, 0))
        )
        after_serving = {None: [], "auto": [auto], "off": [], "3MB": [3_000_000]}[option]
        assert wired == after_serving
        for _ in range(2):
            list(generate_step(mx.array([1, 2, 3]), model, max_tokens=1))
        assert wired == (after_serving or {None: [single], "off": []}[option])


async def serve_shortly(model):
    engine = Engine(model, [], EngineOptions(state_bytes=1_000_000))
    engine.start()
    await engine.close()


@pytest.mark.parametrize("bad", ["a lot", "-2GB", "nan", 0, True, "0B"])
def test_a_size_that_cannot_be_read_is_one_line(bad):
    with pytest.raises(InputError, match=r"wired_memory is .*; give auto, off or an amount"):
        load(BUNDLED_MODEL, wired_memory=bad)


def test_more_than_metal_recommends_is_refused(wired):
    with pytest.raises(
        InputError, match=r"wired_memory is 10 GB, but Metal recommends at most 10 MB"
    ):
        parse_wired_memory("10GB")
    assert parse_wired_memory("10MB") == RECOMMENDED
    assert parse_wired_memory("50%") == RECOMMENDED // 2
    assert parse_wired_memory("AUTO") == "auto"


@pytest.mark.parametrize("budget", ["25%", "100%"])
def test_needs_of_a_model(budget):
    model, _ = load(BUNDLED_MODEL, expert_memory=budget)
    with model:
        needs = Needs.of(model, prompt_tokens=100, state_bytes=model.state_bytes(300))
        slots = sum(model.plan.slots.values()) * 27_648
        if budget == "25%":
            assert needs.wired == model.plan.trunk_bytes + slots + model.state_bytes(300)
        else:
            # As parameters, the floats of 4-bit experts are float32 on the CPU.
            floor = model.plan.trunk_bytes + slots + model.state_bytes(300)
            assert floor <= needs.wired <= 1.25 * floor
        assert needs.cache >= model.activation_bytes(100)


def test_generation_asks_for_what_it_needs(two_bundled_layers, monkeypatch):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    seen = []
    original = Limits._apply

    def spy(self):
        seen.append(list(self._needs))
        original(self)

    monkeypatch.setattr(Limits, "_apply", spy)
    with model:
        prompt = len(tokenizer.encode("def f(x):"))
        generate(model, tokenizer, "def f(x):", max_tokens=4)
        state_bytes = model.state_bytes(prompt + 4)
        expected = Needs.of(model, prompt_tokens=prompt, state_bytes=state_bytes)
    assert seen == [[expected], []]


def test_threads_leave_nothing_behind(two_bundled_layers, original):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    with model:
        call = functools.partial(generate, model, tokenizer, "def", max_tokens=5)
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert cache_limit() == original
    assert memory.LIMITS._needs == []


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("platform", "name", "given", "expected"),
    [
        ("darwin", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT", None, "1"),
        ("darwin", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "0", "0"),
        slow("linux", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT", None, "None"),
        ("linux", "MLX_MAX_MB_PER_BUFFER", None, "3000"),
        slow("linux", "MLX_MAX_MB_PER_BUFFER", "17", "17"),
        slow("linux", "MLX_MAX_OPS_PER_BUFFER", None, "40"),
        ("darwin", "MLX_MAX_OPS_PER_BUFFER", None, "None"),
    ],
)
def test_loading_sets_what_the_gpu_reads_and_importing_changes_nothing(
    platform, name, given, expected
):
    code = (
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import mlx.core, mlx_moeflux\n"
        "from mlx_moeflux import generate, load\n"
        "from mlx_moeflux.loading import BUNDLED_MODEL\n"
        "assert os.environ == before\n"
        f"sys.platform = {platform!r}\n"
        "try: load(BUNDLED_MODEL, expert_memory='1B')  # too little\n"
        "except mlx_moeflux.errors.MoefluxError: pass\n"
        f"print(os.environ.get({name!r}))"
    )
    environment = {k: v for k, v in os.environ.items() if k != name}
    if given is not None:
        environment[name] = given
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected]


def test_cores_are_those_of_the_process_where_the_system_says_so(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5}, raising=False)
    assert backend.usable_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert backend.usable_cores() == 8
