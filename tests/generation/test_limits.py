"""Oracle: the limits that MLX returns, and a stand-in for Metal that records calls."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading

import mlx.core as mx
import pytest

from mlx_moeflux import generate, load, stream_generate
from mlx_moeflux.generation import memory
from mlx_moeflux.generation.memory import LIMITS, Limits, Needs
from mlx_moeflux.generation.text import generate_step
from mlx_moeflux.loading import BUNDLED_MODEL

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
    """Every limit that a Metal which only takes notes was given; 7 is what it had before."""
    limits, synchronised = [7], []

    def set_wired_limit(limit):
        assert synchronised, "the limit changes under work that is under way"
        synchronised.clear()
        limits.append(limit)
        return limits[-2]

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "synchronize", lambda: synchronised.append(True))
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    working_set = {"max_recommended_working_set_size": RECOMMENDED}
    monkeypatch.setattr(mx, "device_info", lambda device: working_set)
    return limits


def test_freed_buffers_are_bounded_while_tokens_are_made(original):
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%")
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
def test_limits_are_put_back_however_it_ends(original, how):
    model, _ = load(BUNDLED_MODEL, expert_memory="25%")
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
        with LIMITS.held(Needs(owner=1, cache=2_000_000, wired=0)):
            assert cache_limit() == 1_000_000
        assert cache_limit() == 1_000_000
    finally:
        mx.set_cache_limit(limit)


def test_what_is_kept_beyond_the_limit_is_let_go(original):
    # Evaluated and dropped: MLX keeps the buffer.
    mx.eval(mx.zeros(100 << 20, mx.uint8))
    assert mx.get_cache_memory() >= 100 << 20
    with LIMITS.held(Needs(owner=1, cache=50 << 20, wired=0)):
        assert mx.get_cache_memory() <= 50 << 20


def test_wired_is_trunk_and_bank_and_state(wired):
    limits = Limits()
    needs = Needs(owner=1, cache=1, wired=3_000_000)
    with limits.held(needs):
        assert wired == [7, 3_000_000]
    assert wired == [7, 3_000_000, 7]


def test_wired_is_never_more_than_the_working_set(wired):
    limits = Limits()
    with limits.held(Needs(owner=1, cache=1, wired=10**12)):
        assert wired[-1] == RECOMMENDED
    assert wired[-1] == 7


def test_several_at_once(wired):
    limits = Limits()
    first, longer = (Needs(owner=1, cache=1, wired=n) for n in (2_000_000, 3_000_000))
    other = Needs(owner=2, cache=1, wired=4_000_000)
    with limits.held(first):
        # The same weights are not wired twice.
        with limits.held(longer):
            assert wired[-1] == 3_000_000
            with limits.held(other):
                assert wired[-1] == 7_000_000
            assert wired[-1] == 3_000_000
        assert wired[-1] == 2_000_000
    assert wired[-1] == 7


@pytest.mark.parametrize("budget", ["25%", "100%"])
def test_needs_of_a_model(budget):
    model, _ = load(BUNDLED_MODEL, expert_memory=budget)
    with model:
        needs = Needs.of(model, prompt_tokens=100, positions=300)
        slots = sum(model.plan.slots.values()) * 27_648
        if budget == "25%":
            assert needs.wired == model.plan.trunk_bytes + slots + model.state_bytes(300)
        else:
            # As parameters, the floats of 4-bit experts are float32 on the CPU.
            floor = model.plan.trunk_bytes + slots + model.state_bytes(300)
            assert floor <= needs.wired <= 1.25 * floor
        assert needs.cache >= model.activation_bytes(100)


def test_generation_asks_for_what_it_needs(monkeypatch):
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%")
    seen = []
    original = Limits._apply

    def spy(self):
        seen.append(list(self._needs))
        original(self)

    monkeypatch.setattr(Limits, "_apply", spy)
    with model:
        prompt = len(tokenizer.encode("def f(x):"))
        generate(model, tokenizer, "def f(x):", max_tokens=4)
        expected = Needs.of(model, prompt_tokens=prompt, positions=prompt + 4)
    assert seen == [[expected], []]


def test_threads_leave_nothing_behind(original):
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%")
    with model:
        call = functools.partial(generate, model, tokenizer, "def", max_tokens=5)
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert cache_limit() == original
    assert memory.LIMITS._needs == []


@pytest.mark.parametrize(
    ("platform", "name", "given", "expected"),
    [
        ("darwin", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT", None, "1"),
        ("darwin", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "0", "0"),
        ("linux", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT", None, "None"),
        ("linux", "MLX_MAX_MB_PER_BUFFER", None, "3000"),
        ("linux", "MLX_MAX_MB_PER_BUFFER", "17", "17"),
        ("linux", "MLX_MAX_OPS_PER_BUFFER", None, "40"),
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
        "try: load(BUNDLED_MODEL, expert_memory='no')\n"
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
