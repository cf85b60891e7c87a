"""Oracle: played kernels, right and wrong, on the CPU."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from mlx_moeflux import cli
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.measure import machine_report
from mlx_moeflux.measure.handshake import compare
from tests.experts.streaming.waiting import PlayedPullWithoutCopies


class Wrong(PlayedPullWithoutCopies):
    """Takes another expert's slot in place of the last."""

    def slots(self, ids, control):
        found = super().slots(ids, control)
        return mx.concatenate([found[:, :-1], found[:, :1]], axis=1)


class Late(PlayedPullWithoutCopies):
    def __init__(self, k):
        super().__init__(k)
        self.late = True


@pytest.fixture(autouse=True)
def on_the_cpu():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.mark.parametrize(
    ("kind", "wrong", "text"),
    [
        (PlayedPullWithoutCopies, False, r"handshake: right; [\d.]+ ms a token, [\d.]+ without it"),
        (Wrong, True, "handshake: wrong bits in 4 of 4 steps"),
        (Late, False, "handshake: 0 steps, then off: a kernel waited too long"),
        (lambda k: None, False, "handshake: none, no kernel waits on this device"),
    ],
)
def test_a_line(monkeypatch, two_layers, kind, wrong, text):
    monkeypatch.setattr(device, "pull_for", kind)
    found = compare(two_layers / "qwen3.5-tiny", tokens=2, rounds=1)
    assert found.wrong == wrong
    assert re.match(text, found.text), found
    assert "\n" not in found.text


def test_the_command(capsys):
    assert cli.main(["check", "--operation", "handshake"]) == 0
    assert capsys.readouterr().out.startswith("handshake: none, no kernel waits on this device")


def test_the_report_has_it_on_apples_gpus_alone(monkeypatch, tmp_path):
    found = {}
    for kind in ("cpu", "cuda", "metal"):
        monkeypatch.setattr(device, "kind", lambda kind=kind: kind)
        steps = machine_report.steps(tmp_path, None)
        found[kind] = [s.arguments for s in steps if s.name == "handshake"]
    assert found == {"cpu": [], "cuda": [], "metal": [("check", "--operation", "handshake")]}
