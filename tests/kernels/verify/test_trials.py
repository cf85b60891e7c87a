"""Trials of kernels before their first use. Oracle: kernels that are wrong, which are not used, and
verdicts that other processes find."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import plistlib
import subprocess
import sys
import warnings

import mlx.core as mx
import pytest

from mlx_moeflux.errors import ExactnessError, UnsupportedError
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.examples import TINY
from mlx_moeflux.kernels.moe import router
from mlx_moeflux.kernels.registry import OPERATIONS, Kernels
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.kernels.runtime.packing import Packing
from mlx_moeflux.kernels.verify import comparison, trials, verdicts
from mlx_moeflux.models.compiled import _bank_of
from tests.kernels.implementations import IMPLEMENTATIONS
from tests.kernels.metal import metal_device
from tests.kernels.verify.first_use import LOGITS, another_process, reference, stand_in

# ---- A GPU where nothing runs before its trial


def scaled(factor):
    def function(logits, *, k, normalise=True):
        ids, weights = router.softmax_top_k(logits, k=k, normalise=normalise)
        return ids, weights * factor

    return function


def fails_when_evaluated(logits, *, k, normalise=True):
    """As a kernel that does not compile: MLX says so when it evaluates, not when it is called."""
    ids, weights = router.softmax_top_k(logits, k=k, normalise=normalise)
    return ids, weights + metal_device.never()


@pytest.mark.usefixtures("on_metal")
def test_the_first_use_is_tried_and_the_verdict_kept(calls, monkeypatch):
    Kernels().softmax_top_k(LOGITS, k=2)
    first, calls[:] = len(calls), []
    assert first > 3
    Kernels().softmax_top_k(LOGITS, k=2)
    assert calls == ["fused"]
    ((place, kept),) = json.loads(verdicts.file().read_text()).items()
    assert mx.__version__ in place
    ((key, entry),) = kept.items()
    assert key.startswith("softmax_top_k=fused ")
    assert entry["ok"] is True
    assert entry["launched"] == "softmax_top_k"
    another_process(monkeypatch)
    calls.clear()
    Kernels().softmax_top_k(LOGITS, k=2)
    assert calls == ["fused"]
    # Other dtypes are another variant.
    Kernels().softmax_top_k(LOGITS.astype(mx.bfloat16), k=2)
    assert len(calls) > 3


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("wrong", [scaled(1.01), fails_when_evaluated, scaled(math.nan)])
def test_what_fails_its_trial_is_not_used_and_said_once(monkeypatch, wrong):
    stand_in(monkeypatch, "fused", wrong)
    expected = router.softmax_top_k(LOGITS, k=2)
    kernels, said = Kernels(), r"softmax_top_k=fused is not used on .* its trial failed \("
    with pytest.warns(RuntimeWarning, match=said) as warned:
        found = [kernels.softmax_top_k(LOGITS.astype(t), k=2) for t in (mx.float32, mx.bfloat16)]
    assert all(mx.array_equal(ids, expected[0]) for ids, _ in found)
    assert len(warned) == 1
    assert len(verdicts.refused()) == 2
    another_process(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Kernels().softmax_top_k(LOGITS, k=2)
    assert all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("listed", [True, False])
def test_a_stock_operation_that_fails_gives_way_to_a_kernel(monkeypatch, listed):
    """Wrong in 16 bits alone: the truth is computed in float32."""
    right, logits = router.softmax_top_k, LOGITS.astype(mx.bfloat16)

    def wrong(logits, *, k, normalise=True):
        ids, weights = right(logits, k=k, normalise=normalise)
        return ids, weights if logits.dtype == mx.float32 else 3 * weights

    stand_in(monkeypatch, "reference", wrong)
    if not listed:
        monkeypatch.setattr(dispatch, "table", dict)
    expected = right(logits, k=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Kernels().softmax_top_k(logits, k=2)
        assert mx.allclose(found[1], expected[1], atol=1e-6)
        # And if the kernel is wrong as well, nothing computes.
        another_process(monkeypatch)
        verdicts.file().unlink()
        stand_in(monkeypatch, "fused", scaled(2.0))
        with pytest.raises(ExactnessError, match=r"'softmax_top_k' is wrong on .* every kernel"):
            Kernels().softmax_top_k(logits, k=2)


@pytest.mark.usefixtures("on_metal")
def test_a_kernel_that_refuses_the_arguments_is_no_failure(monkeypatch):
    def refuses(logits, *, k, normalise=True):
        raise UnsupportedError("takes no logits.")

    stand_in(monkeypatch, "fused", refuses)
    kernels = Kernels()
    kernels.softmax_top_k(LOGITS, k=2)
    assert kernels.fallbacks() == [
        "softmax_top_k=fused fell back to the reference 1 times: takes no logits."
    ]
    assert not verdicts.refused()


@pytest.mark.usefixtures("on_metal")
def test_want_of_memory_is_no_verdict(monkeypatch):
    def large(logits, *, k, normalise=True):
        if comparison.stock_only.on:
            return router.softmax_top_k(logits, k=k)
        raise RuntimeError("[metal::malloc] Attempting to allocate 9 bytes")

    stand_in(monkeypatch, "fused", large)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Attempting to allocate"):
            Kernels().softmax_top_k(LOGITS, k=2)
    assert not verdicts._known.verdicts
    assert not verdicts.file().exists()


@pytest.mark.usefixtures("on_metal")
def test_another_macos_tries_again(calls, monkeypatch, tmp_path):
    file = tmp_path / "SystemVersion.plist"
    monkeypatch.setattr(verdicts, "SYSTEM_VERSION", file)
    for build in ("24G90", "25A354"):
        file.write_bytes(plistlib.dumps({"ProductBuildVersion": build}))
        verdicts._macos_build.cache_clear()
        another_process(monkeypatch)
        calls.clear()
        Kernels().softmax_top_k(LOGITS, k=2)
        assert len(calls) > 3
    assert [place[-5:] for place in json.loads(verdicts.file().read_text())] == ["24G90", "5A354"]
    verdicts._macos_build.cache_clear()


@pytest.mark.usefixtures("on_metal")
def test_a_changed_kernel_is_tried_again(calls, monkeypatch):
    Kernels().softmax_top_k(LOGITS, k=2)
    another_process(monkeypatch)
    monkeypatch.setattr(launcher.MetalKernel, "_digest", lambda self: "another text")
    calls.clear()
    Kernels().softmax_top_k(LOGITS, k=2)
    assert len(calls) > 3


@pytest.mark.usefixtures("on_metal")
def test_trials_leave_the_random_numbers_of_users_alone():
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(3,))
    mx.random.seed(5)
    Kernels().softmax_top_k(LOGITS, k=2)
    for operation in IMPLEMENTATIONS:
        comparison.on_example(OPERATIONS[operation], reference(operation), mx.float32)
    assert mx.array_equal(mx.random.uniform(shape=(3,)), expected)


# ---- Traces


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("wrong", [False, True])
def test_a_traced_function_is_tried_outside_of_its_trace(calls, monkeypatch, wrong):
    if wrong:
        stand_in(monkeypatch, "fused", scaled(1.5))
    kernels, called = Kernels(), []
    told = {name: functools.partial(called.append, name) for name in ("ready", "repeated")}
    step = trials.compiled(lambda x: kernels.softmax_top_k(x, k=2))
    expected = router.softmax_top_k(LOGITS, k=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = step(LOGITS, **told)
    if wrong:
        assert all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        assert verdicts.refused()
    assert called == ["ready", "repeated"]
    calls.clear()
    step(LOGITS, **told)
    assert called == ["ready", "repeated"]
    assert not calls


@pytest.mark.usefixtures("on_metal")
def test_in_a_trace_of_somebody_else_stock_computes(calls):
    step = mx.compile(lambda x: Kernels().softmax_top_k(x, k=2))
    expected = router.softmax_top_k(LOGITS, k=2)
    assert all(mx.array_equal(a, b) for a, b in zip(step(LOGITS), expected, strict=True))
    assert not verdicts._known.verdicts
    assert not trials._state.pending


@pytest.mark.usefixtures("on_metal")
def test_trials_are_told_before_and_after():
    told = []
    with trials.watched(lambda *counts: told.append(counts)):
        for k in (2, 3, 2):
            Kernels().softmax_top_k(LOGITS.astype(mx.bfloat16), k=k)
    assert told == [(0, 1), (1, 1), (1, 2), (2, 2)]
    Kernels().softmax_top_k(LOGITS.astype(mx.bfloat16), k=4)  # nobody watches
    assert len(told) == 4


@pytest.mark.usefixtures("on_metal")
def test_the_trials_of_a_traced_step_are_known_beforehand():
    kernels, told = Kernels(), []
    step = trials.compiled(lambda x: [kernels.softmax_top_k(x, k=k)[1] for k in (2, 3, 4, 2)])
    with trials.watched(lambda *counts: told.append(counts)):
        step(LOGITS)
        step(LOGITS)
    assert told == [(0, 3), (1, 3), (1, 3), (2, 3), (2, 3), (3, 3)]


@pytest.mark.usefixtures("on_metal")
def test_a_traced_step_is_tried_with_what_it_launches(monkeypatch):
    """A packed bank is one buffer outside a trace and several arrays in it: two variants."""
    rows = {"expert_mix": {"metal": (dispatch.Row("pairs", 1),)}}
    monkeypatch.setattr(dispatch, "table", lambda: rows)
    (x, slots, weights, bank), _ = OPERATIONS["expert_mix"].proof.workload("", TINY, 1, mx.bfloat16)
    packing, kernels, runs = Packing.of(bank.flat), Kernels(), []

    def step(*arrays):
        runs.append(trials.tracing())
        return kernels.expert_mix(x, slots, weights, _bank_of(arrays, bank))

    found = trials.compiled(step)(*packing.arrays)
    assert runs == [True, False, True]
    again = trials.compiled(step)(*packing.arrays)
    assert runs == [True, False, True, True]
    assert mx.array_equal(found, again)


# ---- Tiles of stock MLX


@pytest.fixture
def prompts_by_stock(monkeypatch):
    """Kernels, a call whose experts stock MLX computes in tiles, and rows of those products."""
    kernels, rows, product = Kernels(), [], mx.gather_qmm
    kernels.take_stock_for_prompts()
    args, _ = OPERATIONS["expert_mix"].proof.example_call(mx.float32, tokens=200)

    def watched(x, *others, sorted_indices=False, **options):
        if sorted_indices:
            rows.append(len(x))
        return product(x, *others, sorted_indices=sorted_indices, **options)

    monkeypatch.setattr(mx, "gather_qmm", watched)
    return kernels, args, rows


@pytest.mark.usefixtures("on_metal")
def test_tiles_of_stock_are_tried_on_the_whole_prompt(prompts_by_stock):
    kernels, args, rows = prompts_by_stock
    y = kernels.expert_mix(*args)
    assert mx.allclose(y, reference("expert_mix")(*args), rtol=1e-4, atol=1e-4)
    assert set(rows) == {-(-200 * 3 // 64) * 64}
    assert len(rows) > 3
    rows.clear()
    kernels.expert_mix(*args)
    assert len(rows) == 3


@pytest.mark.usefixtures("on_metal")
def test_tiles_that_are_wrong_are_not_used(prompts_by_stock, monkeypatch):
    kernels, args, _ = prompts_by_stock
    product = mx.gather_qmm

    def wrong(x, *others, sorted_indices=False, **options):
        y = product(x, *others, sorted_indices=sorted_indices, **options)
        return mx.roll(y, 1, axis=0) if sorted_indices else y

    monkeypatch.setattr(mx, "gather_qmm", wrong)
    with pytest.warns(RuntimeWarning, match="expert_mix=in_tiles is not used"):
        y = kernels.expert_mix(*args)
    assert mx.allclose(y, reference("expert_mix")(*args), rtol=1e-4, atol=1e-4)


# ---- Processes that die in a trial

DIES = """
import os, mlx.core as mx
from mlx_moeflux.kernels.verify import verdicts
with verdicts.running("sdpa=fused 1"):
    os.kill(os.getpid(), 9)
"""


def test_a_trial_that_ends_the_process_twice_is_bad(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))
    for deaths in (1, 2):
        subprocess.run([sys.executable, "-c", DIES], check=False, timeout=60)
        assert list(tmp_path.glob("trial-*.json"))
        monkeypatch.setattr(verdicts, "_known", verdicts._Known())
        verdict = verdicts.get("sdpa=fused 1")
        assert (verdict is None) == (deaths == 1)
        assert not list(tmp_path.glob("trial-*.json"))
    assert verdict.reason == "its trial ended the process twice"


def test_an_interrupt_and_another_process_are_no_death(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "_known", verdicts._Known())
    with pytest.raises(KeyboardInterrupt), verdicts.running("a"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with verdicts.running("a"):  # of this process, which lives
        assert verdicts.get("a") is None
        assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / f"trial-{os.getpid()}.json").write_text("{")
    monkeypatch.setattr(verdicts, "_known", verdicts._Known())
    assert verdicts.get("a") is None


# ---- Processes that keep verdicts at once

KEEPS = """
import sys
from mlx_moeflux.kernels.verify import verdicts
from mlx_moeflux.kernels.verify.verdicts import Verdict
name = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
for i in range(40):
    verdicts.put(f"sdpa={name} {i}", Verdict(True, 0.5, launched=name))
"""


def test_processes_that_try_at_once_keep_each_others_verdicts(tmp_path):
    names, environment = ("a", "b", "c"), os.environ | {"MOEFLUX_CACHE_DIR": str(tmp_path / "new")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", KEEPS, name], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for name in names
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    (kept,) = json.loads((tmp_path / "new" / "trials.json").read_text()).values()
    assert sorted(kept) == sorted(f"sdpa={name} {i}" for name in names for i in range(40))


@pytest.mark.parametrize("lacking", ["folder", "locks", "patience"])
def test_without_a_lock_verdicts_are_kept_as_well_as_can_be(lacking, monkeypatch, tmp_path):
    monkeypatch.setattr(verdicts, "_known", verdicts._Known())
    folder = tmp_path / "cache"
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(folder))
    if lacking == "folder":
        folder.write_text("no folder")
    elif lacking == "locks":

        def flock(*_):
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(verdicts.fcntl, "flock", flock)
    else:  # of another process that was stopped
        monkeypatch.setattr(verdicts, "LOCK_SECONDS", 0.02)
        monkeypatch.setattr(verdicts, "_lock", lambda descriptor: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdicts.put("sdpa=fused 1", verdicts.Verdict(True))
    assert verdicts.get("sdpa=fused 1").ok
    verdicts.forget()
    assert (verdicts.get("sdpa=fused 1") is None) == (lacking == "folder")
