"""A GPU where nothing runs before its trial."""

from __future__ import annotations

import pytest

from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.verify import trials
from tests.kernels.implementations import IMPLEMENTATIONS
from tests.kernels.metal import metal_device
from tests.kernels.verify.first_use import stand_in


@pytest.fixture
def on_metal(monkeypatch, tmp_path):
    monkeypatch.setattr(trials, "_warned", set())
    rows = {"softmax_top_k": {"metal": (dispatch.Row("fused", 1),)}}
    monkeypatch.setattr(dispatch, "table", lambda: rows)
    with metal_device.on_metal(tmp_path):
        yield


@pytest.fixture
def calls(monkeypatch):
    """Names of the implementations of softmax_top_k in the order in which they ran."""
    ran = []
    for name, implementation in dict(IMPLEMENTATIONS["softmax_top_k"]).items():
        stand_in(
            monkeypatch,
            name,
            lambda *a, f=implementation, n=name, **k: (ran.append(n), f(*a, **k))[1],
        )
    return ran
