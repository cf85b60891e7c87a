"""Oracle: blocks that the trial itself draws, and kernels that are wrong in known ways. Kernels are
played on the CPU."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_moeflux.experts.streaming import handshake, handshake_trial
from mlx_moeflux.experts.streaming.handshake_trial import attempt, in_child, refusal
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.kernels.verify import verdicts
from mlx_moeflux.loading import load_model, stores
from tests.experts.streaming.waiting import PlayedPullWithoutCopies
from tests.kernels.runtime.metal_handshake_on_host import HostPull


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(handshake_trial, "WAIT_SECONDS", 0.05)


@pytest.mark.parametrize(
    "kind", [PlayedPullWithoutCopies, pytest.param(HostPull, marks=pytest.mark.slow)]
)
def test_a_right_kernel(tmp_path, kind):
    """An answer that comes before its blocks would be found: a block takes some 100 us."""
    assert attempt(kind, tmp_path, steps=4, width=256) is None


class OfOtherSlots(PlayedPullWithoutCopies):
    def slots(self, ids, control):
        return mx.roll(super().slots(ids, control), 1, axis=1)


class Late(PlayedPullWithoutCopies):
    def __init__(self, k):
        super().__init__(k)
        self.late = True


class WithoutAbort(PlayedPullWithoutCopies):
    """Ends after its wait, and does not say so."""

    def _awaited(self, at, index, turn, control):
        word = super()._awaited(at, index, turn, control)
        control.common[1] = 0
        return word


class Refused(PlayedPullWithoutCopies):
    def slots(self, ids, control):
        raise RuntimeError("Unable to build metal library\n  from source")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OfOtherSlots, "step 0: kernels read 6[0-9]+ of 6144 numbers of layer 0 that are not"),
        (Late, "step 0: a kernel waited too long for the host"),
        (WithoutAbort, "a kernel without a host did not give up"),
        (Refused, "Unable to build metal library from source"),
        (lambda k: None, "there is no kernel that waits"),
    ],
)
def test_a_wrong_kernel_is_one_line(tmp_path, kind, reason):
    found = attempt(kind, tmp_path, steps=2, width=16)
    assert re.match(reason, found), found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('noise'); print('right')", None),
        ("print('kernels read rubbish')", "kernels read rubbish"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9 ended its process"),
        ("import time; time.sleep(60)", "it took longer than 1 s"),
        ("raise ValueError('of a driver')", "ValueError: of a driver"),
        ("print('right'); raise SystemExit(1)", "its process printed nothing"),
        ("pass", "its process printed nothing"),
    ],
)
def test_a_process_of_its_own(code, reason):
    assert in_child((sys.executable, "-S", "-c", code), seconds=1.0) == reason


@pytest.fixture
def of_this_test(tmp_path, monkeypatch):
    """No verdicts are known, and those of this test are forgotten."""
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "_known", verdicts._Known())


@pytest.mark.usefixtures("of_this_test")
@pytest.mark.parametrize("reason", [None, "kernels read rubbish"])
def test_one_trial_for_all_processes(tmp_path, monkeypatch, reason):
    asked = []
    monkeypatch.setattr(handshake_trial, "in_child", lambda: asked.append(1) or reason)
    monkeypatch.setattr(launcher.Active, "backend", launcher.MetalBackend())
    before = Kernels().identity()
    for _ in range(2):
        expected = None if reason is None else "its trial failed (kernels read rubbish)"
        assert refusal() == refusal() == expected
        verdicts.forget()
    assert asked == [1]
    assert not list(tmp_path.glob("trial-*"))
    assert Kernels().identity() == before, "a saved state does not depend on it"


def test_on_apples_gpus_it_is_asked_for_and_tried(two_layers, monkeypatch):
    """Other machines never try it."""

    def asks(**options):
        path = two_layers / "qwen3.5-tiny"
        with load_model(path, expert_memory="90%", expert_threads=2, **options) as model:
            return model.store.handshake is not None, model.store.ways

    tried = []
    monkeypatch.setattr(handshake_trial, "refusal", lambda: tried.append(1) or verdict)
    verdict = "its trial failed (x)"
    kinds = dict.fromkeys(["cuda", "metal"])
    for kind in kinds:
        pulls = SimpleNamespace(
            kind=lambda kind=kind: kind,
            pull_for=PlayedPullWithoutCopies,
            largest_buffer=lambda: None,
        )
        monkeypatch.setattr(stores, "device", pulls)
        kinds[kind] = [asks(), asks(handshake=True), asks(handshake=False)]
    waits, none = (True, "handshake: 0 steps"), (False, None)
    assert kinds["cuda"] == [waits, waits, none]
    assert kinds["metal"] == [none, (False, "handshake: none, its trial failed (x)"), none]
    assert tried == [1]
    verdict = None
    assert asks(handshake=True) == waits
    assert asks(handshake=True, prefetch="last") == (
        False,
        "handshake: none, a prefetcher excludes it",
    )
    assert len(tried) == 2


def test_waits_end_before_macos_ends_them():
    assert handshake.WAIT_SECONDS < handshake_trial.LONGEST_WAIT
